"""Findings about what a run spends its wall time on besides training steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.model.finding import STALL_HIGH, Finding, Gain, severity_of
from lightning_fastdata.insight.report.drawing import duration_text

if TYPE_CHECKING:
    from lightning_fastdata.insight.measure.wall import WallTime
    from lightning_fastdata.insight.model.evidence import Evidence
    from lightning_fastdata.insight.model.finding import Kind

PAUSE_HIGH: Final = 0.05
"""Part of a run, from which on a pause is told."""
_MOST_OF_START: Final = 0.5
KINDS: Final[dict[str, Kind]] = {
    "FD310": "paused between epochs",
    "FD318": "starved in validation",
    "FD320": "held up by a callback",
    "FD321": "held up by checkpoints",
    "FD322": "held up by logging",
}
"""What a run is called that such a pause costs most."""


def epoch_starts(e: Evidence) -> Finding | None:
    """FD310 of a run whose wall time is known: epochs but the first start slowly."""
    wall = e.wall
    if wall is None:
        return None
    later_s = dict(wall.names_of("epoch_starts")).get("later epochs", 0.0)
    each_s = later_s / max(1, (e.epochs or 2) - 1)
    own_s = _dataset_s(e)
    remedy = (
        "longer epochs, or a dataset and a sampler that start faster: the workers are kept already"
    )
    if e.streamed and own_s > _MOST_OF_START * each_s:
        remedy = (
            f"have the dataset keep what its __iter__ opens: its first batch takes "
            f"{duration_text(own_s)} in each epoch, with new workers or kept ones"
        )
    elif e.streamed and e.first_parts is None:
        remedy = "have the dataset keep what its __iter__ opens"
        if not e.persistent_workers:
            remedy += (
                ", or keep the workers (persistent_workers=True): FastDataLoader tells which of "
                "the two takes the time"
            )
    elif e.persistent_workers is False:
        remedy = "LoaderOptions(persistent_workers=True)"
    elif e.persistent_workers is None:
        remedy = "a dataset and a sampler that start faster, or longer epochs"
    return _pause(
        wall,
        later_s,
        code="FD310",
        what=f"starting epochs after the first took {duration_text(later_s)} of "
        f"{duration_text(wall.training_s)}, {duration_text(each_s)} each",
        remedy=remedy,
    )


def _dataset_s(e: Evidence) -> float:
    """Return for how long the first batch of an epoch was read, of the wait for it."""
    first = e.first_parts
    if first is None:
        return 0.0
    read_ms = first.read_cpu_ms + first.read_runqueue_ms + first.read_blocked_ms + first.read_ms
    return (read_ms + first.slow_sample_ms) / 1000


def validation(e: Evidence) -> Finding | None:
    """FD318 of a run whose wall time is known: validation waits for its batches."""
    wall = e.wall
    if wall is None:
        return None
    waited_s = dict(wall.names_of("validation")).get("waiting for batches", 0.0)
    all_s = wall.parts_s.get("validation", 0.0)
    return _pause(
        wall,
        waited_s,
        code="FD318",
        what=f"validation waited {duration_text(waited_s)} of its {duration_text(all_s)} for data, "
        f"{wall.share(waited_s):.0%} of the run",
        remedy=f"give {validation_loader(e)} the options of the training loader, num_workers above "
        "all, or validate less often",
    )


def validation_loader(e: Evidence) -> str:
    """Return which loader validation waits for most."""
    return "the validation loader" if e.val_loader is None else f"validation's {e.val_loader}"


def callbacks(e: Evidence) -> Finding | None:
    """FD320: callbacks take long."""
    return _held_up(e, "callbacks", "FD320", "run {name} less often, or make it cheaper")


def checkpoints(e: Evidence) -> Finding | None:
    """FD321: saving checkpoints takes long."""
    save = "save less often (every_n_train_steps, train_time_interval), to a faster disk, or fewer "
    return _held_up(e, "checkpoints", "FD321", save + "weights (save_weights_only=True)")


def logging(e: Evidence) -> Finding | None:
    """FD322: reducing and logging metrics takes long."""
    less = "log less often (Trainer(log_every_n_steps=...)), or with fewer self.log(..., on_step)"
    return _held_up(e, "logging", "FD322", less)


def _held_up(e: Evidence, part: str, code: str, remedy: str) -> Finding | None:
    wall = e.wall
    if wall is None:
        return None
    seconds = wall.parts_s.get(part, 0.0)
    names = wall.names_of(part)
    name = names[0][0] if names else part
    most = f", {duration_text(names[0][1])} of it in {name}" if names else ""
    return _pause(
        wall,
        seconds,
        code=code,
        what=f"{part} took {duration_text(seconds)} of {duration_text(wall.training_s)}{most}",
        remedy=remedy.format(name=name),
    )


def _pause(wall: WallTime, seconds: float, *, code: str, what: str, remedy: str) -> Finding | None:
    share = wall.share(seconds)
    if share < PAUSE_HIGH or not wall.steps:
        return None
    before_ms = 1000 * wall.training_s / wall.steps
    after_ms = max(0.0, before_ms - 1000 * seconds / wall.steps)
    return Finding(
        code=code,
        severity=severity_of(share),
        cause=what,
        remedy=remedy,
        gain=Gain(before_ms=before_ms, after_ms=after_ms, basis="floor"),
        leave_alone="the loader within epochs" if code == "FD310" else "",
    )


ROWS: Final = (epoch_starts, validation, callbacks, checkpoints, logging)


def worst_pause(e: Evidence) -> Finding | None:
    """Return the pause that costs the run most, if that is 10 % and more than late batches do."""
    wall = e.wall
    found = [each for row in ROWS if (each := row(e)) is not None and each.gain is not None]
    if wall is None or not found:
        return None
    worst = min(found, key=lambda each: each.gain.after_ms if each.gain else 0.0)
    cost_ms = worst.gain.before_ms - worst.gain.after_ms if worst.gain else 0.0
    cost_s = cost_ms * wall.steps / 1000
    waited_s = wall.parts_s.get("wait", 0.0)
    return worst if cost_s > waited_s and wall.share(cost_s) > STALL_HIGH else None

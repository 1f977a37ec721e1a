"""Findings about what a run spends its time on besides training steps.

Of a run whose wall time is known, starts of epochs and validation are judged by what they took of
it; else by what they take of an epoch, or of their own steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.model.finding import (
    EPOCH_START_HIGH,
    STALL_LOW,
    Finding,
    Gain,
    duration_text,
    severity_of,
)
from lightning_fastdata.insight.verdicts.rule import Rule

if TYPE_CHECKING:
    from lightning_fastdata.insight.measure.wall import WallTime
    from lightning_fastdata.insight.model.evidence import Evidence

_PAUSE_HIGH: Final = 0.05
"""Part of a run: what takes less is no finding."""
_FEWEST_EPOCHS: Final = 2
"""Workers have to start once; how the first epoch starts says nothing of the others."""
_MOST_OF_START: Final = 0.5


def epoch_starts(e: Evidence) -> Finding | None:
    """FD310: epochs start slowly."""
    wall = e.wall
    if wall is None:
        return _first_batches(e)
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


def _first_batches(e: Evidence) -> Finding | None:
    """FD310 where only the epochs are known: their first batches are late."""
    share = e.epoch_start_share
    if share is None or e.steps_per_epoch is None or share <= EPOCH_START_HIGH:
        return None
    if e.epochs is None or e.epochs < _FEWEST_EPOCHS:
        return None
    if e.setup is not None and not e.setup.workers:
        return None  # nothing starts
    each = (e.epoch_wait_ms or 0.0) / e.steps_per_epoch
    gain = None
    if e.step_ms is not None:
        before = e.step_ms * (1 - 1 / e.steps_per_epoch) + each
        if before > e.step_ms:
            gain = Gain(before_ms=before, after_ms=e.step_ms, basis="floor")
    kept = e.persistent_workers is True
    return Finding(
        code="FD310",
        severity=severity_of(share),
        cause=f"the first batch of an epoch comes after {e.epoch_wait_ms:.0f} ms, which is "
        f"{share:.0%} of an epoch",
        remedy="longer epochs: the workers are kept already"
        if kept
        else "LoaderOptions(persistent_workers=True)",
        gain=gain,
        leave_alone="" if e.stalls else "the loader within epochs",
    )


def _dataset_s(e: Evidence) -> float:
    """Return for how long the first batch of an epoch was read, of the wait for it."""
    first = e.first_parts
    if first is None:
        return 0.0
    read_ms = first.read_cpu_ms + first.read_runqueue_ms + first.read_blocked_ms + first.read_ms
    return (read_ms + first.slow_sample_ms) / 1000


def validation(e: Evidence) -> Finding | None:
    """FD318: validation waits for its batches."""
    which = "the validation loader" if e.val_loader is None else f"validation's {e.val_loader}"
    remedy = f"give {which} the options of the training loader, num_workers above all"
    wall = e.wall
    if wall is None:
        return _validation_steps(e, remedy)
    waited_s = dict(wall.names_of("validation")).get("waiting for batches", 0.0)
    all_s = wall.parts_s.get("validation", 0.0)
    return _pause(
        wall,
        waited_s,
        code="FD318",
        what=f"validation waited {duration_text(waited_s)} of its {duration_text(all_s)} for data, "
        f"{wall.share(waited_s):.0%} of the run",
        remedy=f"{remedy}, or validate less often",
    )


def _validation_steps(e: Evidence, remedy: str) -> Finding | None:
    """FD318 where only the steps of validation are known."""
    share = e.val_stall_share
    if share is None or share < STALL_LOW:
        return None
    return Finding(
        code="FD318",
        severity="moderate",  # the share is of validation, and that may be short
        cause=f"validation waits for data for {share:.0%} of its steps",
        remedy=remedy,
        leave_alone="" if e.stalls else "the training loader",
    )


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
    if share < _PAUSE_HIGH or not wall.steps:
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


RULES: Final = (
    Rule("FD310", "epochs start slowly", epoch_starts, "run", kind="paused between epochs"),
    Rule("FD318", "validation waits for data", validation, "run", kind="starved in validation"),
    Rule("FD320", "callbacks take long", callbacks, "run", kind="held up by a callback"),
    Rule("FD321", "checkpoints take long", checkpoints, "run", kind="held up by checkpoints"),
    Rule("FD322", "logging takes long", logging, "run", kind="held up by logging"),
)

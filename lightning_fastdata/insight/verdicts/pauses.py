"""Findings about what a run spends its time on besides training steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from lightning_fastdata.insight.measure.wall import WallTime
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import (
    KEEP,
    Advice,
    Finding,
    Gain,
    Kind,
    Rule,
    duration_text,
    found,
)

_PAUSE_HIGH: Final = 0.05
"""Part of a run: what takes less is no finding."""
_MOST_OF_START: Final = 0.5
_LONG_VALIDATION: Final = 1 / 3
"""Of the run, without its waits for data."""
_FASTER_START: Final = Advice(text="a dataset and a sampler that start faster, or longer epochs")
_MADE_ONCE: Final = (
    "reload_dataloaders_every_n_epochs=0, and a dataset that is built once, in setup()"
)
_BETWEEN: Final = "paused between epochs"
_COLLECTOR: Final = "held up by the garbage collector"
_WITHIN_EPOCHS: Final = "the loader within epochs"
_SAVE_LESS: Final = (
    "save less often (every_n_train_steps, train_time_interval), to a faster disk, or fewer "
    "weights (save_weights_only=True)"
)
_HOLD_UPS: Final = {
    "callbacks": ("FD320", "run {name} less often, or make it cheaper"),
    "checkpoints": ("FD321", _SAVE_LESS),
    "logging": (
        "FD322",
        "log less often (Trainer(log_every_n_steps=...)), or with fewer self.log(..., on_step)",
    ),
}
"""Part of the wall time -> code of its finding, and what to try."""


def _epoch_starts(e: Evidence, *, anew: bool = False) -> Finding | None:
    """Return the finding that epochs start slowly; ``anew``: because their loaders are made."""
    wall = e.wall
    if e.loaders_anew is not anew:
        return None
    later_s = dict(wall.names_of("epoch_starts")).get("later epochs", 0.0)
    each_s = later_s / max(1, (e.epochs or 2) - 1)
    what = (
        f"starting epochs after the first took {duration_text(later_s)} of "
        f"{duration_text(wall.training_s)}, {duration_text(each_s)} each"
    )
    if anew:
        what = f"loaders are made anew in the course of the training, and {what}"
        return _pause(wall, later_s, "FD332", what, _MADE_ONCE, _WITHIN_EPOCHS)
    return _pause(wall, later_s, "FD310", what, _for_epoch_starts(e, each_s), _WITHIN_EPOCHS)


def _for_epoch_starts(e: Evidence, each_s: float) -> Advice | tuple[Advice, ...]:
    """Return what to try against epochs that take ``each_s`` to start."""
    own_s, keep = _dataset_s(e), Advice(text="have the dataset keep what its __iter__ opens")
    ends = e.loader.persistent_workers is False
    if e.loader.streamed and own_s > _MOST_OF_START * each_s:
        return keep
    if e.loader.streamed and e.first_parts is None:
        return (keep, replace(KEEP, joins=True)) if ends else keep
    return (KEEP, _FASTER_START) if ends else _FASTER_START


def _dataset_s(e: Evidence) -> float:
    """Return for how long the first batch of an epoch was read, of the wait for it."""
    first = e.first_parts
    if first is None:
        return 0.0
    read_ms = first.read_cpu_ms + first.read_runqueue_ms + first.read_blocked_ms + first.read_ms
    return (read_ms + first.slow_sample_ms) / 1000


def _validation(e: Evidence) -> Finding | None:
    which = "the validation loader" if e.val_loader is None else f"validation's {e.val_loader}"
    text = f"give {which} the options of the training loader, num_workers above all"
    cpus, enough = e.loader.usable_cpus, False
    if e.val_workers is not None and cpus is not None:
        free = max(1, cpus - round(e.machine.taken_of(cpus)))
        text = f"num_workers {e.val_workers} -> {free} for {which}"
        enough = e.val_workers >= free  # one that has a worker for each of them needs no more
    advice = () if enough else (Advice(text=text, changes=("val.num_workers",)),)
    wall = e.wall
    waited_s, all_s = _validation_s(wall)
    what = (
        f"validation waited {duration_text(waited_s)} of its {duration_text(all_s)} for data, "
        f"{wall.share(waited_s):.0%} of the run"
    )
    return _pause(wall, waited_s, "FD318", what, advice)


def _validation_s(wall: WallTime) -> tuple[float, float]:
    """Return the seconds that validation waited for batches, and all it took."""
    waited_s = dict(wall.names_of("validation")).get("waiting for batches", 0.0)
    return waited_s, wall.parts_s.get("validation", 0.0)


def _long_validation(e: Evidence) -> Finding | None:
    """Return the finding that validation takes much of the run, and does not wait meanwhile."""
    wall = e.wall
    waited_s, all_s = _validation_s(wall)
    if wall.share(all_s - waited_s) < _LONG_VALIDATION:
        return None
    what = f"validation took {duration_text(all_s)} of {duration_text(wall.training_s)}, "
    what += f"{wall.share(all_s):.0%} of the run, and waited {duration_text(waited_s)} for data"
    remedy = "validate half as often (check_val_every_n_epoch, val_check_interval), or on fewer "
    remedy += "batches (limit_val_batches)"
    return _pause(wall, all_s / 2, "FD331", what, remedy, "the loaders")


def _garbage(e: Evidence) -> Finding | None:
    wall = e.wall
    seconds = wall.parts_s.get("gc", 0.0)
    what = f"Python's garbage collector took {duration_text(seconds)} of "
    what += f"{duration_text(wall.training_s)}, while the training stood still"
    remedy = "gc.collect() and gc.freeze() when the training starts, so that what lives on is not "
    remedy += "searched again; or gc.disable(), and gc.collect() at ends of epochs"
    return _pause(wall, seconds, "FD333", what, remedy, "the loader")


def held_up(e: Evidence) -> bool:
    """Return whether a finding says whose work the host does between steps."""
    return any(_held_up(e, part) for part in _HOLD_UPS)


def _held_up(e: Evidence, part: str) -> Finding | None:
    """Return the finding that a part of the wall time, one of ``_HOLD_UPS``, takes long."""
    wall = e.wall
    code, remedy = _HOLD_UPS[part]
    seconds, names = wall.parts_s.get(part, 0.0), wall.names_of(part)
    name = names[0][0] if names else part
    most = f", {duration_text(names[0][1])} of it in {name}" if names else ""
    what = f"{part} took {duration_text(seconds)} of {duration_text(wall.training_s)}{most}"
    return _pause(wall, seconds, code, what, remedy.format(name=name))


def _pause(
    wall: WallTime,
    seconds: float,
    code: str,
    what: str,
    remedy: str | Advice | tuple[Advice, ...],
    leave: str = "",
) -> Finding | None:
    share = wall.share(seconds)
    if share < _PAUSE_HIGH or not wall.steps:
        return None
    before_ms = 1000 * wall.training_s / wall.steps
    after_ms = max(0.0, before_ms - 1000 * seconds / wall.steps)
    gain = Gain(before_ms=before_ms, after_ms=after_ms, basis="floor")
    return found(code, share, what, remedy, gain, leave)


def _hold_up(part: str, title: str, kind: Kind) -> Rule:
    return Rule(_HOLD_UPS[part][0], title, partial(_held_up, part=part), "run", kind=kind)


RULES: Final = (
    Rule("FD310", "epochs start slowly", _epoch_starts, "run", kind=_BETWEEN),
    Rule("FD318", "validation waits for data", _validation, "run", kind="starved in validation"),
    Rule("FD331", "validation takes long", _long_validation, "run", kind="held up by validation"),
    Rule("FD332", "loaders are made anew", partial(_epoch_starts, anew=True), "run", kind=_BETWEEN),
    Rule("FD333", "the garbage collector takes long", _garbage, "run", kind=_COLLECTOR),
    _hold_up("callbacks", "callbacks take long", "held up by a callback"),
    _hold_up("checkpoints", "checkpoints take long", "held up by checkpoints"),
    _hold_up("logging", "logging takes long", "held up by logging"),
)

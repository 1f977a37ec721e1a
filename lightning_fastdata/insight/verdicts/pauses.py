"""Findings about what a run spends its time on besides training steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_fastdata.insight.measure.wall import WallTime
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import (
    KEEP,
    Advice,
    Finding,
    Gain,
    Rule,
    duration_text,
    found,
)

_PAUSE_HIGH: Final = 0.05
"""Part of a run: what takes less is no finding."""
_FASTER_START: Final = Advice(text="a dataset and a sampler that start faster, or longer epochs")
_MADE_ONCE: Final = Advice(
    text="reload_dataloaders_every_n_epochs=0, and a dataset that is built once, in setup()"
)
_KEPT_OPEN: Final = Advice(text="have the dataset keep what its __iter__ opens")
_BESIDE: Final = {
    "callbacks": "run {name} less often, or make it cheaper",
    "checkpoints": "save less often (every_n_train_steps, train_time_interval), to a faster disk, "
    "or fewer weights (save_weights_only=True)",
    "logging": "log less often (Trainer(log_every_n_steps=...)), or with fewer "
    "self.log(..., on_step)",
    "gc": "gc.collect() and gc.freeze() when the training starts, so that what lives on is not "
    "searched again; or gc.disable(), and gc.collect() at ends of epochs",
}
"""Part of the wall time beside steps -> what to try."""
_WORDS: Final = {"gc": "Python's garbage collector"}


def _epoch_starts(e: Evidence) -> Finding | None:
    later_s = dict(e.wall.names_of("epoch_starts")).get("later epochs", 0.0)
    each_s = later_s / max(1, (e.epochs or 2) - 1)
    what = (
        f"starting epochs after the first took {duration_text(later_s)} of "
        f"{duration_text(e.wall.training_s)}, {duration_text(each_s)} each"
    )
    ends = e.loader.persistent_workers is False
    # A worker that is kept iterates a stream anew all the same; one that ends keeps nothing open.
    faster = replace(_KEPT_OPEN, joins=ends) if e.loader.streamed else _FASTER_START
    advice = (KEEP, faster) if ends else (faster,)
    if e.loaders_anew:
        what = f"loaders are made anew in the course of the training, and {what}"
        advice = (_MADE_ONCE,)
    return _pause(e.wall, later_s, "FD310", what, advice, "the loader within epochs")


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
    waited_s = dict(wall.names_of("validation")).get("waiting for batches", 0.0)
    all_s = wall.parts_s.get("validation", 0.0)
    what = (
        f"validation waited {duration_text(waited_s)} of its {duration_text(all_s)} for data, "
        f"{wall.share(waited_s):.0%} of the run"
    )
    return _pause(wall, waited_s, "FD318", what, advice)


def _beside_steps(e: Evidence) -> Finding | None:
    """Return the finding that what Python does beside steps takes long: the longest part of it."""
    wall = e.wall
    part = max(_BESIDE, key=lambda each: wall.parts_s.get(each, 0.0))
    seconds, names = wall.parts_s.get(part, 0.0), wall.names_of(part)
    name = names[0][0] if names else part
    most = f", {duration_text(names[0][1])} of it in {name}" if names else ""
    what = f"{_WORDS.get(part, part)} took {duration_text(seconds)} of "
    what += f"{duration_text(wall.training_s)}{most}"
    return _pause(wall, seconds, "FD320", what, _BESIDE[part].format(name=name))


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


RULES: Final = (
    Rule("FD310", "epochs start slowly", _epoch_starts, "run", kind="paused between epochs"),
    Rule("FD318", "validation waits for data", _validation, "run", kind="starved in validation"),
    Rule("FD320", "what runs beside steps takes long", _beside_steps, "run", kind="held up"),
)

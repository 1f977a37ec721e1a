"""Findings about what takes time apart from late batches: in a step, and beside the steps."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Final

from lightning_fastdata.insight.measure.wall import WallTime
from lightning_fastdata.insight.model import remedies
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import (
    AUGMENT_HIGH,
    KEEP,
    PIN,
    TRANSFER_HIGH,
    Advice,
    Finding,
    Gain,
    Rule,
    duration_text,
    found,
    may_be_given,
)

_PADDING_HIGH: Final = 0.10
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


def _phase(
    e: Evidence,
    code: str,
    ms: float | None,
    high: float,
    what: str,
    remedy: str | tuple[Advice, ...],
    leave: str,
) -> Finding | None:
    """Return the finding that a phase takes ``high`` of a step or more."""
    share = e.of_step(ms)
    if share is None or share < high:
        return None
    cause = f"{what} takes {ms:.1f} ms, {share:.0%} of a step"
    return found(code, share, cause, remedy, remedies.without(e, ms), leave)


def _transfer(e: Evidence) -> Finding | None:
    what = "copying a batch to the device"
    small = Advice(text="send uint8 and normalize on the device", joins=True)
    remedy: str | tuple[Advice, ...] = (small,) if e.loader.pinned else (PIN, small)
    if e.transfer_hook:
        what = e.transfer_hook
        remedy = "make this hook cheaper, or do in the workers what needs no device: in the "
        remedy += "dataset or in collate_fn"
    elif e.device == "cpu":  # where nothing is copied
        what = "looking for tensors in the many objects of a batch"
        remedy = "batches of few tensors, or lists of objects within a class of your own, into "
        remedy += "which Lightning does not look"
    leave = "the number of workers"
    return _phase(e, "FD312", e.transfer_ms, TRANSFER_HIGH, what, remedy, leave)


def _augmentation(e: Evidence) -> Finding | None:
    what = e.augment_hook or "augmenting on the device"
    where = "there" if e.augment_hook else "on the device, or on uint8"
    fewer = Advice(text=f"fewer or cheaper transforms {where}", joins=True)
    elsewhere = Advice(
        text="FastDataModule(augment_on='cpu') if the workers keep up with the whole pipeline",
        changes=("augment_on",),
    )
    # Whether another place is faster was not known before the steps were.
    idle = e.settings_in == "LoaderOptions" and not e.augment_hook and not e.stalls
    remedy = (elsewhere, fewer) if idle else (fewer,)
    return _phase(e, "FD313", e.augment_ms, AUGMENT_HIGH, what, remedy, "the loader")


def _padding(e: Evidence) -> Finding | None:
    """Return the finding that steps compute on padding, if there is a remedy that pays.

    Where they wait for data, that is first.
    """
    padding, compute = e.padding, e.summary.compute
    if padding is None or padding.share < _PADDING_HIGH or compute is None or e.stalls:
        return None
    then = f"{padding.least_share:.0%} would be padding"
    advice = Advice(
        text="batches of samples of like length, batch_sampler=BucketBatchSampler(lengths, "
        f"tokens={padding.tokens}), of which {then}; or pack() for a language model",
        changes=("batch_sampler",),
    )
    if padding.one_width:
        text = "pad to the longest sample of each batch in collate_fn, and not all to one width"
        advice = Advice(text=f"{text}: {then}", changes=("collate_fn",))
    left = (1 - padding.share) / (1 - padding.least_share)  # of the tokens, with the remedy
    saved_ms = (1 - left) * compute.mean_ms
    gain = remedies.without(e, saved_ms)
    if not may_be_given(advice, gain, e.closed):
        return None
    return found(
        "FD337",
        e.of_step(saved_ms),
        f"{padding.share:.0%} of the tokens of your batches are padding ({padding.shown_by})",
        advice,
        gain,
        "the loader's workers",
    )


def _slow_rank(e: Evidence) -> Finding | None:
    slow = e.slow_rank
    if slow is None:
        return None
    *others, worst = sorted(each.stall_ms or 0.0 for each in e.ranks)
    mean = statistics.fmean((*others, worst))
    return found(
        "FD316",
        e.of_step(worst - mean),
        f"rank {slow.rank} on {slow.host} stalls {worst:.1f} ms a step, all of them {mean:.1f} on "
        "average, and every rank waits for the last one"
        + (f"; there, {slow.reason}" if slow.reason else ""),
        f"look at the data and the host of rank {slow.rank}: its share of the files, its CPUs, its "
        "disk",
        remedies.without(e, worst - max(others)),
        "the loaders of the other ranks",
    )


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
    Rule("FD312", "the copy to the device takes long", _transfer),
    Rule("FD313", "augmentation on the device takes long", _augmentation),
    Rule("FD337", "batches are padded", _padding, after="FD313"),
    Rule("FD316", "one rank holds up the others", _slow_rank, about="rank"),
)

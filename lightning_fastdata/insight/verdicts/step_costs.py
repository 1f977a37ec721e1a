"""Findings about what a step costs apart from late batches."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Final

from lightning_fastdata.insight.model import remedies
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import (
    AUGMENT_HIGH,
    PIN,
    TRANSFER_HIGH,
    Advice,
    Finding,
    Rule,
    found,
    may_be_given,
)


def of_loader(e: Evidence, finding: Finding, *, remedy_too: bool) -> Finding:
    """Return a finding that names its loader; ``remedy_too``: its remedy is an option of that."""
    label = e.loader.loader
    if label is None:
        return finding
    finding = replace(finding, cause=f"{label}: {finding.cause}")
    if not remedy_too or not finding.advice:
        return finding
    first, *others = finding.advice
    return replace(finding, advice=(replace(first, text=f"{label}: {first.text}"), *others))


_PADDING_HIGH: Final = 0.10


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


RULES: Final = (
    Rule("FD312", "the copy to the device takes long", _transfer),
    Rule("FD313", "augmentation on the device takes long", _augmentation),
    Rule("FD337", "batches are padded", _padding, after="FD313"),
    Rule("FD316", "one rank holds up the others", _slow_rank, about="rank"),
)

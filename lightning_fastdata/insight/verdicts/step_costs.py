"""Findings about what a step costs apart from late batches."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Final

from lightning_fastdata.insight.model import remedies
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import (
    AUGMENT_HIGH,
    OPTIMIZE,
    PIN,
    STALL_LOW,
    TRANSFER_HIGH,
    Advice,
    Finding,
    Rule,
    found,
)
from lightning_fastdata.insight.verdicts import pauses


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


_FREE: Final = 0.01
_GAP_HIGH: Final = 0.10
_GAP_LEAST_MS: Final = 1.0
"""What any training loop takes between two steps is no finding."""
_SOON_S: Final = 24 * 3600
"""Later is no danger to most trainings."""
_HEADROOM_LOW: Final = 0.03


def _hidden(e: Evidence) -> Finding | None:
    wait, stall = e.of_step(e.wait_ms), e.stall_share
    if wait is None or stall is None or wait < STALL_LOW or stall >= STALL_LOW:
        return None
    cause = (
        f"the training process waits {wait:.0%} of each step for data, but the device has work "
        f"meanwhile and stalls only {stall:.1%}"
    )
    return Finding(code="FD301", severity="fine", cause=cause, remedy="", leave_alone="the loader")


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


def _host_gap(e: Evidence) -> Finding | None:
    if e.device == "cpu":  # it is the host: what it does between steps is told of callbacks
        return None
    share = e.of_step(e.gap_ms)
    if share is None or share < _GAP_HIGH or (e.gap_ms or 0.0) < _GAP_LEAST_MS:
        return None
    if pauses.held_up(e):
        return None
    return found(
        "FD314",
        share,
        f"the device has nothing to do for {e.gap_ms:.1f} ms, {share:.0%} of a step, although no "
        "batch is waited for",
        "read values less often (.item(), .cpu(), print, prog_bar=True), log every n steps, and "
        "look for slow callbacks; a compiled model launches fewer kernels",
        remedies.without(e, e.gap_ms),
        "" if e.stalls else "the loader",
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


def _memory(e: Evidence) -> Finding | None:
    room = e.machine.device_headroom_share
    if not e.machine.alloc_retries or room is None or room >= _HEADROOM_LOW:
        return None
    return found(
        "FD317",
        1.0,
        f"the device's allocator freed its cache and tried again {e.machine.alloc_retries} times; "
        f"{room:.1%} of the memory was never used",
        Advice(
            text="a smaller batch_size with accumulate_grad_batches, or "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            for_speed=False,
        ),
        leave_alone="the loader",
    )


def _fills_up(e: Evidence) -> Finding | None:
    seconds = e.machine.device_full_in_s
    if seconds is None or seconds > _SOON_S:
        return None
    return found(
        "FD326",
        1.0,
        "the device's memory that is held between steps grows from step to step: it is full "
        f"in {max(1, round(seconds / 60))} min, if it goes on so",
        Advice(
            text="look for tensors that are kept with their graph, as losses in a list or in self: "
            "keep loss.item() or loss.detach(); a memory snapshot of torch shows who keeps them",
            for_speed=False,
        ),
        leave_alone="the loader",
    )


def _free(e: Evidence) -> Finding | None:
    share = e.stall_share
    if share is None or share >= _FREE or e.held_up:
        return None
    # Workers that compute beside the model take CPUs from it, which the stall does not show.
    least = "at least " if e.device == "cpu" else ""
    return Finding(
        code="FD319",
        severity="fine",
        cause=f"data costs {share:.1%} of each step: without any stall, training would be "
        f"{least}{1 / (1 - share):.2f} times as fast",
        remedy="",
        leave_alone="the loader",
        advice=(OPTIMIZE,) if e.model_computes else (),
    )


RULES: Final = (
    Rule("FD301", "waits are hidden", _hidden),
    Rule("FD312", "the copy to the device takes long", _transfer),
    Rule("FD313", "augmentation on the device takes long", _augmentation),
    Rule("FD314", "the device waits for the host", _host_gap),
    Rule("FD316", "one rank holds up the others", _slow_rank, about="rank"),
    Rule("FD317", "the device is short of memory", _memory),
    Rule("FD326", "the device's memory fills up", _fills_up, after="FD317"),
    Rule("FD319", "data is free", _free),
)

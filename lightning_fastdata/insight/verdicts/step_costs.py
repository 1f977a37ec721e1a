"""Findings about what a step costs apart from late batches."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.model import remedies
from lightning_fastdata.insight.model.finding import (
    AUGMENT_HIGH,
    STALL_LOW,
    TRANSFER_HIGH,
    Finding,
    severity_of,
)
from lightning_fastdata.insight.verdicts import pauses
from lightning_fastdata.insight.verdicts.rule import Rule

if TYPE_CHECKING:
    from lightning_fastdata.insight.model.evidence import Evidence

_FREE: Final = 0.01
_GAP_HIGH: Final = 0.10
_GAP_LEAST_MS: Final = 1.0
"""What any training loop takes between two steps is no finding."""
_HEADROOM_LOW: Final = 0.03


def hidden(e: Evidence) -> Finding | None:
    """FD301: the device has work while batches are waited for."""
    wait, stall = e.of_step(e.wait_ms), e.stall_share
    if wait is None or stall is None or wait < STALL_LOW or stall >= STALL_LOW:
        return None
    cause = (
        f"the training process waits {wait:.0%} of each step for data, but the device has work "
        f"meanwhile and stalls only {stall:.1%}"
    )
    return Finding(code="FD301", severity="fine", cause=cause, remedy="", leave_alone="the loader")


def transfer(e: Evidence) -> Finding | None:
    """FD312: the copy to the device takes long."""
    share = e.of_step(e.transfer_ms)
    if share is None or share < TRANSFER_HIGH:
        return None
    what, remedy = "copying a batch to the device", "send uint8 and normalize on the device"
    if not e.pinned:
        remedy = f"LoaderOptions(pin_memory=True), and {remedy}"
    if e.transfer_hook:
        what = e.transfer_hook
        remedy = "make this hook cheaper, or do in the workers what needs no device: in the "
        remedy += "dataset or in collate_fn"
    elif e.device == "cpu":  # where nothing is copied
        what = "looking for tensors in the many objects of a batch"
        remedy = "batches of few tensors, or lists of objects within a class of your own, into "
        remedy += "which Lightning does not look"
    return Finding(
        code="FD312",
        severity=severity_of(share),
        cause=f"{what} takes {e.transfer_ms:.1f} ms, {share:.0%} of a step",
        remedy=remedy,
        gain=remedies.without(e, e.transfer_ms),
        leave_alone="the number of workers",
    )


def augmentation(e: Evidence) -> Finding | None:
    """FD313: augmentation on the device takes long."""
    share = e.of_step(e.augment_ms)
    if share is None or share < AUGMENT_HIGH:
        return None
    return Finding(
        code="FD313",
        severity=severity_of(share),
        cause=f"{e.augment_hook or 'augmenting on the device'} takes {e.augment_ms:.1f} ms, "
        f"{share:.0%} of a step",
        remedy="fewer or cheaper transforms "
        + ("there" if e.augment_hook else "on the device, or on uint8"),
        gain=remedies.without(e, e.augment_ms),
        leave_alone="the loader",
    )


def host_gap(e: Evidence) -> Finding | None:
    """FD314: the device waits for the host, not for data."""
    share = e.of_step(e.gap_ms)
    if share is None or share < _GAP_HIGH or (e.gap_ms or 0.0) < _GAP_LEAST_MS:
        return None
    if pauses.callbacks(e) or pauses.checkpoints(e) or pauses.logging(e):
        return None  # which say whose work it is
    return Finding(
        code="FD314",
        severity=severity_of(share),
        cause=f"the device has nothing to do for {e.gap_ms:.1f} ms, {share:.0%} of a step, "
        "although no batch is waited for",
        remedy="read values less often (.item(), .cpu(), print, prog_bar=True), log every n steps, "
        "and look for slow callbacks; a compiled model launches fewer kernels",
        gain=remedies.without(e, e.gap_ms),
        leave_alone="" if e.stalls else "the loader",
    )


def slow_rank(e: Evidence) -> Finding | None:
    """FD316: one rank holds up the others."""
    rank = e.slow_rank
    if rank is None:
        return None
    *others, worst = sorted(e.rank_stalls_ms)
    mean = statistics.fmean(e.rank_stalls_ms)
    name = f"rank {rank}" + (f" on {e.rank_hosts[rank]}" if e.rank_hosts else "")
    reason = e.rank_reasons[rank] if e.rank_reasons else ""
    return Finding(
        code="FD316",
        severity=severity_of(e.of_step(worst - mean)),
        cause=f"{name} stalls {worst:.1f} ms a step, all of them {mean:.1f} on average, and "
        "every rank waits for the last one" + (f"; there, {reason}" if reason else ""),
        remedy=f"look at the data and the host of rank {rank}: its share of the files, its CPUs, "
        "its disk",
        gain=remedies.without(e, worst - max(others)),
        leave_alone="the loaders of the other ranks",
    )


def memory(e: Evidence) -> Finding | None:
    """FD317: the device is short of memory."""
    room = e.device_headroom_share
    if not e.alloc_retries or room is None or room >= _HEADROOM_LOW:
        return None
    return Finding(
        code="FD317",
        severity="high",
        cause=f"the device's allocator freed its cache and tried again {e.alloc_retries} times; "
        f"{room:.1%} of the memory was never used",
        remedy="a smaller batch_size with accumulate_grad_batches, or "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        leave_alone="the loader",
    )


def free(e: Evidence) -> Finding | None:
    """FD319: data is free."""
    share = e.stall_share
    if share is None or share >= _FREE or e.held_up:
        return None
    return Finding(
        code="FD319",
        severity="fine",
        cause=f"data costs {share:.1%} of each step: without any stall, training would be "
        f"{1 / (1 - share):.2f} times as fast",
        remedy="",
        leave_alone="the loader; optimize the model",
    )


RULES: Final = (
    Rule("FD301", "waits are hidden", hidden),
    Rule("FD312", "the copy to the device takes long", transfer),
    Rule("FD313", "augmentation on the device takes long", augmentation),
    Rule("FD314", "the device waits for the host", host_gap),
    Rule("FD316", "one rank holds up the others", slow_rank, about="rank"),
    Rule("FD317", "the device is short of memory", memory),
    Rule("FD319", "data is free", free),
)

"""Findings about what a step costs apart from late batches."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.model import remedies
from lightning_fastdata.insight.model.finding import (
    AUGMENT_HIGH,
    EPOCH_START_HIGH,
    STALL_LOW,
    TRANSFER_HIGH,
    Finding,
    Gain,
    severity_of,
)
from lightning_fastdata.insight.verdicts import pauses

if TYPE_CHECKING:
    from lightning_fastdata.insight.model.evidence import Evidence

_FREE: Final = 0.01
_FEWEST_EPOCHS: Final = 2
"""Workers have to start once; how the first epoch starts says nothing of the others."""
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


def epoch_starts(e: Evidence) -> Finding | None:
    """FD310: the first batches of epochs are late."""
    share = e.epoch_start_share
    if share is None or e.steps_per_epoch is None or share <= EPOCH_START_HIGH:
        return None
    if e.wall is not None:
        return None  # which tells it of the whole run
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


def other_rank(e: Evidence) -> Finding | None:
    """FD316, of a rank that holds up this one: nothing that is done here would help."""
    return _slow_rank(e) if e.held_up else None


def this_rank(e: Evidence) -> Finding | None:
    """FD316, of this rank or of one that is no slower."""
    return None if e.held_up else _slow_rank(e)


def _slow_rank(e: Evidence) -> Finding | None:
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


def validation(e: Evidence) -> Finding | None:
    """FD318: validation waits for data."""
    share = e.val_stall_share
    if e.wall is not None or share is None or share < STALL_LOW:
        return None
    return Finding(
        code="FD318",
        severity="moderate",  # the share is of validation, and that may be short
        cause=f"validation waits for data for {share:.0%} of its steps",
        remedy=f"give {pauses.validation_loader(e)} the options of the training loader, "
        "num_workers above all",
        leave_alone="" if e.stalls else "the training loader",
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

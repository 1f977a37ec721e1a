"""Precautions of copies to the device, taken out: the laws of ``device/test_late_copies.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from mutants.mutant import Mutant
from rig.late_trainings import (
    Case,
    Seen,
    check_bytes,
    check_limit,
    check_sources,
    check_waits,
    train,
)

from lightning_fastdata.augment.replay.program import Draws
from lightning_fastdata.batches.streams import CudaLockDriver, DeviceStreams, Fence, PageLocks
from lightning_fastdata.device import prefetch
from lightning_fastdata.device.lookahead import Crossing, SideLane
from lightning_fastdata.insight.measure.timeline import CudaClock


@cache
def law(check: Callable[[Case, Seen], None], case: Case, schedule: str) -> Callable[[], None]:
    """Return a law of one training under one schedule."""
    return lambda: check(case, train(case, schedule))


PREFETCHED = Case("inline", "pinned", "prefetch", augmented=True)
STREAMED = Case("inline", "pinned", "stream", augmented=True, measured=True)
AHEAD = Case("inline", "pinned", "lookahead", augmented=True)
STRAIGHT = Case("gather", "locked", "off")


def waits_for_the_device(right):
    def wrong(*args, **kwargs):
        torch.cuda.synchronize()
        return right(*args, **kwargs)

    return wrong


def no_limit(right):
    return lambda lane, streams, *, steps_ahead=2: right(lane, streams, steps_ahead=10**9)


def blocking(right):
    return lambda batch, device, *, non_blocking=False: right(batch, device)


def unlocked_at_once(right):
    def wrong(driver, address):
        driver._runtime.cudaHostUnregister(address)

    return wrong


def polled_by_waiting(right):
    def wrong(clock, mark):
        clock._event(mark).synchronize()
        return True

    return wrong


def from_ordinary_memory(right):
    return lambda draws, device, non_blocking=False: draws._with(
        draws.blob.clone().to(device, non_blocking=non_blocking)
    )


def nothing(right):
    return lambda *_: None


def no_fence(right):
    return lambda locks: Fence([])


MUTANTS = (
    # record_stream is left out.
    *(
        Mutant(f"memory used by two streams is free after one, {case}", law, *keep)
        for case, law, keep in (
            (case, law(check_bytes, case, "late-main"), (DeviceStreams, "keep", nothing))
            for case in (STREAMED,)
        )
    ),
    *(
        Mutant(
            f"the step does not wait for its batch, {case}",
            law(check_bytes, case, "late-side"),
            DeviceStreams,
            "wait",
            nothing,
        )
        for case in (PREFETCHED, STREAMED, AHEAD)
    ),
    Mutant(
        "locked slots are free when the host is done with them",
        law(check_sources, STRAIGHT, "late"),
        PageLocks,
        "fence",
        no_fence,
    ),
    Mutant(
        "what is written into locked slots too early arrives",
        law(check_bytes, STRAIGHT, "late"),
        PageLocks,
        "fence",
        no_fence,
    ),
    Mutant(
        "the stream of the consumer is not fenced",
        law(check_sources, STRAIGHT, "late-main"),
        CudaLockDriver,
        "note_consumer",
        nothing,
    ),
    Mutant(
        "memory is unlocked while it is copied",
        law(check_sources, STRAIGHT, "late"),
        CudaLockDriver,
        "unlock",
        unlocked_at_once,
    ),
    *(
        Mutant(
            f"the host waits before it sends a batch, {case}",
            law(check_waits, case, "late-main"),
            SideLane,
            "send",
            waits_for_the_device,
        )
        for case in (PREFETCHED, STREAMED, AHEAD)
    ),
    Mutant(
        "the host waits for a batch to arrive",
        law(check_waits, PREFETCHED, "late"),
        Crossing,
        "land",
        waits_for_the_device,
    ),
    Mutant(
        "copies block the host",
        law(check_waits, PREFETCHED, "late"),
        prefetch,
        "move",
        blocking,
    ),
    Mutant(
        "draws come from ordinary memory",
        law(check_waits, STREAMED, "late"),
        Draws,
        "to",
        from_ordinary_memory,
    ),
    Mutant(
        "measuring waits for the device",
        law(check_waits, STREAMED, "late"),
        CudaClock,
        "ready",
        polled_by_waiting,
    ),
    *(
        Mutant(
            f"the host runs ahead without end, {case}",
            law(check_limit, case, "late"),
            SideLane,
            "__init__",
            no_limit,
        )
        for case in (PREFETCHED, STREAMED, AHEAD)
    ),
)

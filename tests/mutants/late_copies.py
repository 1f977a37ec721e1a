"""Precautions of copies to the device, taken out: the laws of ``device/test_late_copies.py``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
from rig.late_trainings import (
    Case,
    Seen,
    check_bytes,
    check_lane,
    check_limit,
    check_overlap,
    check_waits,
    train,
)

from lightning_fastdata.augment.replay.program import Draws
from lightning_fastdata.device import DeviceStreams
from lightning_fastdata.insight.measure.metrics import EventClock
from lightning_fastdata.loading import prefetch
from lightning_fastdata.loading.prefetch import Crossing, SideLane
from mutants.mutant import Mutant


@cache
def law(check: Callable[[Case, Seen], None], case: Case, schedule: str) -> Callable[[], None]:
    """Return a law of one training under one schedule."""
    return lambda: check(case, train(case, schedule))


def lane_law() -> None:
    for schedule in ("late", "late-side", "late-main"):
        check_lane(schedule)


PREFETCHED = Case("inline", "pinned", "prefetch", augmented=True)
AHEAD = Case("inline", "pinned", "auto", augmented=True, measured=True)


def nothing(right):
    return lambda *_: None


def passed_at_once(right):
    def wrong(streams):
        event = right(streams)
        event.query = lambda: True
        return event

    return wrong


def waits_for_the_device(right):
    def wrong(*args, **kwargs):
        torch.cuda.synchronize()
        return right(*args, **kwargs)

    return wrong


def waits_for_the_mark(right):
    def wrong(_, mark):
        mark.synchronize()
        return True

    return wrong


def blocks(right):
    return lambda batch, device, *, non_blocking=False: right(batch, device, non_blocking=False)


def sends_from_ordinary_memory(right):
    return lambda draws, device, non_blocking=False: draws._with(
        draws.blob.clone().to(device, non_blocking=non_blocking)
    )


def on_the_same_stream(right):
    return lambda streams: nullcontext()


def mutants_of_streams():
    """Yield those of ``record_stream``, of events that streams wait for, and of sources."""
    yield Mutant(
        "memory that two streams use is free when the first is done",
        law(check_bytes, AHEAD, "late-main"),
        *(DeviceStreams, "keep", nothing),
    )
    yield Mutant("the same in a lane", lane_law, DeviceStreams, "keep", nothing)
    yield Mutant("a source is let go of at once", lane_law, DeviceStreams, "mark", passed_at_once)
    for case in (PREFETCHED, AHEAD):
        yield Mutant(
            f"the step does not wait for its batch, {case}",
            law(check_bytes, case, "late-side"),
            *(DeviceStreams, "wait", nothing),
        )


def mutants_that_wait():
    """Yield those that hold up the host, or do not hold it up where they must."""
    for case in (PREFETCHED, AHEAD):
        yield Mutant(
            f"the host waits before it sends a batch, {case}",
            law(check_waits, case, "late-main"),
            *(SideLane, "send", waits_for_the_device),
        )
        yield Mutant(
            f"the host runs ahead without end, {case}",
            law(check_limit, case, "late"),
            *(SideLane, "_make_room", nothing),
        )
    yield Mutant(
        "the host waits for a batch to arrive",
        law(check_waits, PREFETCHED, "late"),
        *(Crossing, "land", waits_for_the_device),
    )
    yield Mutant(
        "copies block the host",
        law(check_waits, PREFETCHED, "late"),
        *(prefetch, "move", blocks),
    )
    yield Mutant(
        "draws come from ordinary memory",
        law(check_waits, AHEAD, "late"),
        *(Draws, "to", sends_from_ordinary_memory),
    )
    yield Mutant(
        "measuring waits for the device",
        law(check_waits, AHEAD, "late"),
        *(EventClock, "ready", waits_for_the_mark),
    )
    for case in (PREFETCHED, AHEAD):
        yield Mutant(
            f"batches cross on the stream of the steps, {case}",
            law(check_overlap, case, "late-main"),
            *(DeviceStreams, "aside", on_the_same_stream),
        )


MUTANTS = (*mutants_of_streams(), *mutants_that_wait())

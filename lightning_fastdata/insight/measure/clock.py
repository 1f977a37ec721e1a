"""Clocks for the timeline: the host's own, and one that the device stamps while the host goes on.

A mark is a number. On the host it is a time; on CUDA it is the ticket of an event that was recorded
on the current stream and that the device will stamp when it gets there. Everything is read late, by
asking whether the stamp has arrived, so measuring never makes the host and the device meet.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, cast

from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable


class DeviceClock(Protocol):
    """What the timeline needs from a clock. One clock serves one timeline."""

    def mark(self) -> int | None:
        """Return a new mark at this point of the stream; None if no room is left for one."""

    def ready(self, mark: int) -> bool:
        """Return whether the device has passed the mark. Never blocks."""

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Return the milliseconds between two marks that are ready."""

    def forget_before(self, mark: int) -> None:
        """Give back all marks older than this one."""

    def forget_from(self, mark: int) -> None:
        """Give back this mark and all newer ones."""


class HostClock:
    """The host's own clock: exact, always ready, nothing to give back.

    Args:
        clock_ns: monotonic time in nanoseconds.
    """

    __slots__ = ("_clock_ns",)

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns

    def mark(self) -> int:
        """Return the time now, in nanoseconds."""
        return self._clock_ns()

    def ready(self, mark: int) -> bool:  # noqa: ARG002
        """Return True: the host has passed every mark it made."""
        return True

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Return the milliseconds between two marks."""
        return (end - begin) / 1e6

    def forget_before(self, mark: int) -> None:
        """Do nothing: a time holds no resource."""

    def forget_from(self, mark: int) -> None:
        """Do nothing: a time holds no resource."""


class TimingEvent(Protocol):
    """The three calls of ``torch.cuda.Event(enable_timing=True)`` that are used."""

    def record(self) -> object:
        """Ask the device to stamp this point of the current stream."""

    def query(self) -> bool:
        """Return whether the stamp has arrived."""

    def elapsed_time(self, end_event: TimingEvent) -> float:
        """Return the milliseconds from this stamp to the other."""


def cuda_event() -> TimingEvent:
    """Return a new CUDA event that can be timed."""
    import torch

    return cast("TimingEvent", torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


class CudaClock:
    """A ring of events on the current CUDA stream.

    Events are created once and recorded again and again. A mark is given out only while its event
    is not needed for an older mark; otherwise `mark` returns None and the caller goes without.

    Args:
        capacity: number of events in the ring, at least 16. A step uses up to seven, so the default
            lets the host run about 140 steps ahead of the device.
        new_event: makes one event.

    Raises:
        OptionsError: if ``capacity`` is below 16.
    """

    __slots__ = ("_events", "_newest", "_oldest")

    def __init__(
        self, capacity: int = 1024, new_event: Callable[[], TimingEvent] = cuda_event
    ) -> None:
        if capacity < 16:
            raise OptionsError(
                f"CudaClock needs room for two steps, but capacity is {capacity}; give 16 or more."
            )
        self._events = tuple(new_event() for _ in range(capacity))
        self._oldest = 0
        self._newest = 0

    def mark(self) -> int | None:
        """Record the next free event on the current stream; None if the ring is full."""
        ticket = self._newest
        if ticket - self._oldest >= len(self._events):
            return None
        self._events[ticket % len(self._events)].record()
        self._newest = ticket + 1
        return ticket

    def ready(self, mark: int) -> bool:
        """Return whether the device has passed the mark. Never blocks."""
        return self._event(mark).query()

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Return the milliseconds between two marks that are ready."""
        return self._event(begin).elapsed_time(self._event(end))

    def forget_before(self, mark: int) -> None:
        """Give back all marks older than this one."""
        self._oldest = min(max(self._oldest, mark), self._newest)

    def forget_from(self, mark: int) -> None:
        """Give back this mark and all newer ones."""
        self._newest = max(min(self._newest, mark), self._oldest)

    def _event(self, mark: int) -> TimingEvent:
        return self._events[mark % len(self._events)]

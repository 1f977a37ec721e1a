"""What the training process did by itself while it waited for a batch."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


class OwnStamps(NamedTuple):
    """What the training process did by itself during one wait; nanoseconds."""

    sampled_ns: tuple[tuple[int, int], ...] = ()
    """Begin and end of each call of the sampler or batch sampler."""
    unpacked_ns: tuple[tuple[int, int], ...] = ()
    """Begin and end of each time that a batch was taken out of what it was sent in, above all
    unpickled; as long as that took a CPU."""
    runqueue_ns: int | None = None
    """Time ready to run while other threads had the CPUs; None where the kernel does not tell."""


class ThreadSchedule:
    """Reads what the kernel tells of the thread that makes this object.

    https://docs.kernel.org/scheduler/sched-stats.html, ``/proc/<pid>/schedstat``
    """

    def __init__(self) -> None:
        self._file: int | None = None
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        except OSError:
            pass

    def read_ns(self) -> tuple[int, int] | None:
        """Return the time on a CPU and the time ready but without one; None if it is not told."""
        if self._file is None:
            return None
        cpu, runqueue, *_ = os.pread(self._file, 100, 0).split()
        return int(cpu), int(runqueue)


class WaitWatch:
    """Notes what the training process does by itself from one request to its delivery."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._schedule: ThreadSchedule | None = None
        self._queued: tuple[int, int] | None = None
        self._sampled: list[tuple[int, int]] = []
        self._unpacked: list[tuple[int, int]] = []
        self.requested_ns = 0

    def requested(self, *, recorded: bool) -> None:
        """Note that a batch is asked for now.

        Args:
            recorded: Somebody takes the stamps. Else the kernel is not asked, which costs a call.
        """
        self._queued = self._queued_so_far() if recorded else None
        self._sampled.clear()
        self._unpacked.clear()
        self.requested_ns = time.monotonic_ns()

    def sampled(self, sampler: Iterator[T]) -> T:
        """Return the next of what a sampler gives; :exc:`StopIteration` where it ends."""
        began_ns = time.monotonic_ns()
        try:
            return next(sampler)
        finally:
            self._sampled.append((began_ns, time.monotonic_ns()))

    def unpacked(self, call: Callable[[], T]) -> T:
        """Return what a call returns that takes a batch out of what it was sent in."""
        began_ns = time.thread_time_ns()
        try:
            return call()
        finally:
            ended_ns = time.monotonic_ns()
            self._unpacked.append((ended_ns - (time.thread_time_ns() - began_ns), ended_ns))

    def _queued_so_far(self) -> tuple[int, int] | None:
        thread = threading.get_native_id()
        if thread != self._thread:  # the file speaks of the thread that opened it
            self._thread, self._schedule = thread, ThreadSchedule()
        return None if self._schedule is None else self._schedule.read_ns()

    def delivered(self) -> OwnStamps:
        """Return what was noted since the batch was asked for; it is delivered now."""
        queued_ns = None
        if self._queued is not None and self._schedule is not None:
            now = self._schedule.read_ns()
            queued_ns = None if now is None else now[1] - self._queued[1]
        return OwnStamps(tuple(self._sampled), tuple(self._unpacked), queued_ns)

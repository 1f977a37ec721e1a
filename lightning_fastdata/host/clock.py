"""The only clock of the package: it tells time, sleeps, and measures time on and without a CPU.

The rest of the package calls the functions of this module and never those of :mod:`time`; ruff
checks that. A test runs the same code on a clock of its own by :func:`installed`.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import psutil

T = TypeVar("T")
_THREAD_SCHEDSTAT = "/proc/thread-self/schedstat"


class Clock:
    """The clock of the machine. A subclass may keep a time of its own."""

    monotonic_ns = staticmethod(time.perf_counter_ns)
    """Returns nanoseconds that never go back and are the same in all processes of a machine.

    The performance counter is used since on Windows ``time.monotonic`` moves in steps of 16 ms; on
    Linux and macOS the two are one clock. Called dozens of times a step, it is not wrapped.
    """

    thread_time_ns = staticmethod(time.thread_time_ns)
    process_time_ns = staticmethod(time.process_time_ns)
    unix_s = staticmethod(time.time)
    sleep = staticmethod(time.sleep)

    def open_schedstat(self) -> int | None:
        """Return a descriptor of the calling thread's ``schedstat``; None: the kernel has none.

        A clock that needs no file returns a negative descriptor, which is not closed.
        """
        try:
            return os.open(_THREAD_SCHEDSTAT, os.O_RDONLY)
        except OSError:
            return None

    def queued_ns(self, schedstat: int) -> int:
        """Return how long a thread was ready to run without a CPU, in nanoseconds; 0: not known.

        Args:
            schedstat: Descriptor of the thread's ``/proc/<pid>/schedstat``; the second number in it
                is returned: https://docs.kernel.org/scheduler/sched-stats.html
        """
        try:
            return int(os.pread(schedstat, 100, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return 0

    def cpu_s_of(self, pid: int, *, with_children: bool) -> float:
        """Return the CPU seconds of a process, or also of its children; 0 if it is gone."""
        total_s = 0.0
        try:
            process = psutil.Process(pid)
            for each in (process, *(process.children(recursive=True) if with_children else ())):
                times = each.cpu_times()
                total_s += times.user + times.system
        except psutil.Error:
            pass
        return total_s


_clock = Clock()


@contextmanager
def installed(clock: Clock) -> Iterator[None]:
    """Have this process read another clock while the block runs; for tests."""
    global _clock  # noqa: PLW0603 - one clock for the whole process is what this module is for
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


def monotonic_ns() -> int:
    """Return nanoseconds that never go back and are the same in all processes of a machine."""
    return _clock.monotonic_ns()


def reader_ns() -> Callable[[], int]:
    """Return what :func:`monotonic_ns` asks now, for those who ask dozens of times a step."""
    return _clock.monotonic_ns


def monotonic() -> float:
    """Return seconds that never go back and are the same in all processes of a machine."""
    return _clock.monotonic_ns() / 1e9


def thread_time_ns() -> int:
    """Return the CPU time of the calling thread in nanoseconds."""
    return _clock.thread_time_ns()


def thread_time() -> float:
    """Return the CPU time of the calling thread in seconds."""
    return _clock.thread_time_ns() / 1e9


def process_time_ns() -> int:
    """Return the CPU time of all threads of this process in nanoseconds."""
    return _clock.process_time_ns()


def process_time() -> float:
    """Return the CPU time of all threads of this process in seconds."""
    return _clock.process_time_ns() / 1e9


def unix_s() -> float:
    """Return the seconds since 1970, to compare with the times of files."""
    return _clock.unix_s()


def cpu_s_of(pid: int, with_children: bool) -> float:
    """Return the CPU seconds of a process, or also of its children; 0 if it is gone."""
    return _clock.cpu_s_of(pid, with_children=with_children)


def sleep(seconds: float) -> None:
    """Let the calling thread wait."""
    _clock.sleep(seconds)


class ThreadSchedule:
    """Tells how much CPU time the kernel's scheduler gave the thread that makes this object."""

    def __init__(self) -> None:
        self._schedstat = _clock.open_schedstat()
        if self._schedstat is not None and self._schedstat >= 0:
            weakref.finalize(self, os.close, self._schedstat)

    def read_ns(self) -> tuple[int, int] | None:
        """Return the nanoseconds on a CPU and those ready but without one; None: not reported.

        Call it only in the thread that made the object.
        """
        if self._schedstat is None:
            return None
        # The file has the time on a CPU as of the last tick, up to 4 ms ago; the clock is exact.
        return _clock.thread_time_ns(), _clock.queued_ns(self._schedstat)

    def __reduce__(self) -> tuple[type[ThreadSchedule], tuple[()]]:
        return ThreadSchedule, ()  # a copy would share a file that the original closes


def queued_s() -> float:
    """Return the seconds the calling thread was ready to run and had no CPU; 0: not known."""
    scheduled = ThreadSchedule().read_ns()
    return 0.0 if scheduled is None else scheduled[1] / 1e9


class SpentTime(NamedTuple):
    """Time of the calling process, its children left out."""

    wall_s: float = 0.0
    """Wall time, in seconds."""
    cpu_s: float = 0.0
    """CPU time of all threads of the process, in seconds."""
    runqueue_s: float = 0.0
    """Seconds in which the reading thread was ready to run but had no CPU; 0: not known."""


class SpentMeter:
    """Adds up the time that is used between each begin and the pause that follows."""

    def __init__(self) -> None:
        self.total = SpentTime()
        """Time used up to the last pause."""
        self._schedule = ThreadSchedule()
        self._thread = threading.get_native_id()
        self._began: SpentTime | None = None

    def read(self) -> SpentTime:
        """Return the time that the process has used since some moment in the past."""
        thread = threading.get_native_id()
        if thread != self._thread:  # the file belongs to the thread that opened it
            self._thread, self._schedule = thread, ThreadSchedule()
        _, queued_ns = self._schedule.read_ns() or (0, 0)
        return SpentTime(monotonic(), process_time(), queued_ns / 1e9)

    def began(self) -> None:
        """Measure from now on, unless it does so already."""
        self._began = self._began or self.read()

    def paused(self, *, counts: bool = True) -> None:
        """Stop measuring until the next begin; ``counts``: add the time since the last one."""
        if counts:
            self.total = self.used()
        self._began = None

    def used(self) -> SpentTime:
        """Return the time used so far."""
        if self._began is None:
            return self.total
        readings = zip(self.total, self.read(), self._began, strict=True)
        return SpentTime(*(total + (now - began) for total, now, began in readings))


@dataclass(frozen=True, slots=True)
class Clocks:
    """Functions that read times, each in seconds from any start."""

    clock_s: Callable[[], float] = monotonic
    cpu_s: Callable[[], float] = thread_time
    """Returns the CPU seconds of the calling thread, or of its process."""
    queue_s: Callable[[], float] = queued_s
    """Returns the seconds in which the calling thread waited for a CPU."""

    def of(self, work: Callable[[], T]) -> tuple[T, float, float]:
        """Return the result of ``work``, its ms without waits for a CPU, and its ms on a CPU."""
        queued, cpu, wall = self.queue_s(), self.cpu_s(), self.clock_s()
        made = work()
        cpu, wall = self.cpu_s() - cpu, self.clock_s() - wall
        return made, 1000 * max(cpu, wall - (self.queue_s() - queued)), 1000 * cpu

"""A clock that moves by itself only: what is tested in it takes no time, and its figures are exact.

The test says what takes time: its datasets, steps and hooks call :meth:`VirtualClock.sleep`,
:meth:`~VirtualClock.work` or :meth:`~VirtualClock.queue` where real ones would wait, compute, or be
kept from a CPU. All other code takes none. The clock is one of this process: what reads in worker
processes cannot be tested with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_fastdata.host import clock

_A_SECOND_NS = 10**9


class VirtualClock(clock.Clock):
    """Stands still until it is told to move on.

    The thread that makes it drives it: when that sleeps, the clock moves on at once. Any other
    thread that sleeps waits until the driving one has come so far.
    """

    def __init__(self, now_ns: int = 1_000 * _A_SECOND_NS) -> None:
        self.driver = threading.get_ident()
        """The thread whose sleep moves the clock on."""
        self._now_ns = now_ns
        self._cpu_ns = 0
        self._of_thread = threading.local()
        self._moved = threading.Condition()
        self._over = False

    def advance(self, ns: int) -> None:
        """Let time pass in which no thread of this process has a CPU."""
        if ns < 0:
            raise ValueError(f"a clock never goes back; asked to advance {ns} ns")
        with self._moved:
            self._now_ns += ns
            self._moved.notify_all()

    def advance_to(self, ns: int) -> None:
        """Let time pass until then, if that is later than now."""
        self.advance(max(0, ns - self._now_ns))

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait, as for a disk: without a CPU, and without wanting one."""
        if threading.get_ident() == self.driver:
            self.advance(round(seconds * _A_SECOND_NS))
            return
        with self._moved:
            until_ns = self._now_ns + round(seconds * _A_SECOND_NS)
            self._moved.wait_for(lambda: self._over or self._now_ns >= until_ns)

    def work(self, seconds: float) -> None:
        """Let the calling thread compute."""
        ns = round(seconds * _A_SECOND_NS)
        self.spend(ns)
        self.advance(ns)

    def spend(self, ns: int) -> None:
        """Count CPU time of the calling thread, in which the clock does not move."""
        self._of_thread.cpu_ns = self.thread_time_ns() + ns
        self._cpu_ns += ns

    def queue(self, seconds: float) -> None:
        """Let the calling thread be ready to compute while others have the CPUs."""
        ns = round(seconds * _A_SECOND_NS)
        self._of_thread.queued_ns = self.queued_ns() + ns
        self.advance(ns)

    def let_go(self) -> None:
        """Have all threads that sleep wake up, now and in future."""
        with self._moved:
            self._over = True
            self._moved.notify_all()

    def monotonic_ns(self) -> int:
        """Return how far the clock has come."""
        return self._now_ns

    def thread_time_ns(self) -> int:
        """Return how long the calling thread has computed."""
        return getattr(self._of_thread, "cpu_ns", 0)

    def process_time_ns(self) -> int:
        """Return how long all threads have computed."""
        return self._cpu_ns

    def unix_s(self) -> float:
        """Return a time of day that moves with the clock."""
        return 1_700_000_000 + self._now_ns / _A_SECOND_NS

    def queued_ns(self, schedstat: int = -1) -> int:
        """Return how long the calling thread was kept from a CPU; a thread asks for its own."""
        return getattr(self._of_thread, "queued_ns", 0)


class HurriedClock(clock.Clock):
    """A minute passes from one time that it is asked to the next."""

    def __init__(self) -> None:
        self._asked = 0

    def monotonic_ns(self) -> int:
        """Return the machine's time, and a minute more for each time that it was asked."""
        self._asked += 1
        return super().monotonic_ns() + self._asked * 60 * _A_SECOND_NS


class PatientClock(VirtualClock):
    """Moves on by :meth:`advance` only; who sleeps does so really.

    For what waits until another process has done something, whose time is not this one's.
    """

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait, in which the clock does not move."""
        time.sleep(seconds)


@contextmanager
def virtual_time(kind: type[VirtualClock] = VirtualClock) -> Iterator[VirtualClock]:
    """Have this process live in a time that the calling thread drives, while a block runs."""
    virtual = kind()
    with clock.installed(virtual):
        try:
            yield virtual
        finally:
            virtual.let_go()

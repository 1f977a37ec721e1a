"""A time in which threads are looked at while they read, exactly when the watch wants to.

:class:`~lightning_fastdata.stamps.lines.LineWatch` looks from a thread of its own, which sleeps on
the clock of the package between two looks. Here that clock moves from one look to the next, and
goes on when the look is over. Who reads says how long something takes with :func:`takes`, and waits
in a line of its own for the future that this returns.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from processes import until
from thread_waits import ThreadProbe
from virtual_time import VirtualClock

from lightning_fastdata.host import clock

_LOOKS = "fastdata lines"
"""The name of a thread that looks."""
_USUAL_S = sys.getswitchinterval()


class LookedClock(VirtualClock):
    """Moves on from look to look."""

    def __init__(self) -> None:
        super().__init__()
        self._parked: dict[threading.Thread, int] = {}
        self._others = set(threading.enumerate())
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait; one that looks, until the time has come so far."""
        thread = threading.current_thread()
        if thread.name != _LOOKS:
            super().sleep(seconds)
            return
        with self._moved:
            self._parked[thread] = until_ns = self._now_ns + round(seconds * 1e9)
            self._moved.notify_all()
            self._moved.wait_for(lambda: self._over or self._now_ns >= until_ns)
            del self._parked[thread]

    def pass_on(self, seconds: float) -> None:
        """Let time pass; if a reading thread is looked at, all looks are taken that are due."""
        end_ns = self._now_ns + round(seconds * 1e9)
        until(self._all_parked)
        while due := [ns for ns in list(self._parked.values()) if self._now_ns < ns <= end_ns]:
            self.advance_to(min(due))
            until(self._all_parked)
        self.advance_to(end_ns)
        until(self._all_parked)

    def _all_parked(self) -> bool:
        """Return whether nobody reads who is looked at, or all who look wait for the time."""
        with self._moved:
            if sys.getswitchinterval() >= _USUAL_S:  # it is shorter while somebody is looked at
                return True
            looking = {each for each in threading.enumerate() if each.name == _LOOKS}
            return all(self._parked.get(each, 0) > self._now_ns for each in looking - self._others)

    def pool(self) -> ThreadPoolExecutor:
        """Return what time passes in; each process has its own."""
        if os.getpid() not in self._pools:
            self._pools[os.getpid()] = ThreadPoolExecutor()
        return self._pools[os.getpid()]


_clocks: list[LookedClock] = []


@contextmanager
def looked_at() -> Iterator[LookedClock]:
    """Have this process, and those that it forks, live in such a time while a block runs."""
    its_time = LookedClock()
    with clock.installed(its_time):
        _clocks.append(its_time)
        try:
            yield its_time
        finally:
            _clocks.remove(its_time)
            its_time.let_go()


def takes(
    seconds: float,
    *,
    begins: threading.Event | None = None,
    waits_in: str = "",
    then: Callable[[], object] = int,
) -> Future[None]:
    """Let time pass, in another thread, while the calling one does something; return at once.

    Args:
        seconds: So much.
        begins: The time does not begin before the calling thread sets this.
        waits_in: Nor before it waits in the kernel for something of this kind, if that is told.
        then: Is called afterwards.
    """
    probe, its_time = ThreadProbe(threading.get_native_id()), _clocks[-1]

    def passes() -> None:
        if begins is not None:
            begins.wait()
        if waits_in:
            until(lambda: probe.state() in (None, (True, waits_in)))
        probe.close()
        its_time.pass_on(seconds)
        then()

    return its_time.pool().submit(passes)

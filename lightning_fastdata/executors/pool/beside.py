"""A side process keeps its share of the CPUs beside other programs, as torch's workers do.

Linux shares out its CPUs among sessions and control groups. It goes on with one whose threads wake
each other, and has one wait whose threads only compute: beside four busy programs of other
sessions, torch's workers, whose queues have threads, got twice the CPU time of ours (Linux 6.18,
``benchmarks/beside.py``). So a process that waits for a CPU for longer than it runs wakes a thread
of its own now and then. That thread sleeps on at once, in the kernel, and never needs the lock of
the interpreter. A process that does not wait has no such thread. It does so between two samples,
which is seldom if they take long. So the training process, while it waits for such processes, wakes
once a millisecond, too.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from lightning_fastdata.host import clock

_EVERY_NS: Final = 1_000_000
"""Nanoseconds between two wakes; a time slice of Linux is 1.4 ms and more."""
_LOOK_NS: Final = 50_000_000
"""Nanoseconds between two looks at how long the process ran and waited."""
_BYTES: Final = 2**12
"""Number of wakes until the woken thread returns from the kernel once."""


class WokenThread:
    """A thread that does nothing but be woken; each wake is one byte that it waits for."""

    def __init__(self) -> None:
        self._end, there = socket.socketpair()
        self._end.setblocking(False)
        there.settimeout(None)  # a program may have set a time limit for all sockets
        threading.Thread(target=self._wait, args=(there,), daemon=True).start()

    @staticmethod
    def _wait(there: socket.socket) -> None:
        buffer = bytearray(_BYTES)
        with there:
            while there.recv_into(buffer, 0, socket.MSG_WAITALL):
                pass

    def wake(self) -> None:
        """Wake the thread; without effect while it has not taken many earlier wakes, or is gone."""
        with suppress(OSError):
            self._end.send(b"\0")


class Waker:
    """Wakes a thread of this process from time to time, while the process waits for CPUs.

    It belongs to the thread that makes it.
    """

    def __init__(self, make: Callable[[], WokenThread] = WokenThread) -> None:
        self.due_ns = 0
        """Time from which on :meth:`mark` does something."""
        self._make = make
        self._woken: WokenThread | None = None
        self._schedule = clock.ThreadSchedule()
        self._looked_ns = 0
        self._read_ns = self._schedule.read_ns() or (0, 0)
        self.waits = False
        """Whether the process waited for CPUs for longer than it ran, at the last look."""

    def mark(self) -> None:
        """Wake the thread if the process has waited for CPUs for longer than it ran."""
        now_ns = clock.monotonic_ns()
        self.due_ns = now_ns + _EVERY_NS
        if now_ns - self._looked_ns >= _LOOK_NS:
            before, self._read_ns = self._read_ns, self._schedule.read_ns() or (0, 0)
            ran_ns, queued_ns = (
                now - then for now, then in zip(self._read_ns, before, strict=True)
            )
            self._looked_ns, self.waits = now_ns, queued_ns > ran_ns
        if self.waits:
            self._woken = self._woken or self._make()
            self._woken.wake()


def poll(poller: Any, until_ns: int | None, starved: Callable[[], bool]) -> list[tuple[int, int]]:
    """Return the events of a ``select.poll``; empty: there were none ``until_ns`` of the clock.

    ``until_ns`` None: it waits for as long as it takes. While the processes that it waits for are
    ``starved``, it wakes each millisecond.
    """
    while True:
        left_ms = None if until_ns is None else max(0.0, (until_ns - clock.monotonic_ns()) / 1e6)
        waking = starved() and (left_ms is None or left_ms > _EVERY_NS / 1e6)
        events: list[tuple[int, int]] = poller.poll(_EVERY_NS / 1e6 if waking else left_ms)
        if events or not waking:
            return events

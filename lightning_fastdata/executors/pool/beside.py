"""A side process keeps its share of the CPUs beside other programs, as torch's workers do.

Linux shares out its CPUs among sessions and control groups. It goes on with one whose threads wake
each other, and has one wait whose threads only compute: beside four busy programs of other
sessions, torch's workers, whose queues have threads, got twice the CPU time of ours (Linux 6.18,
``benchmarks/beside.py``). So a process that waits for a CPU for longer than it runs wakes a thread
of its own now and then. That thread sleeps on at once, in the kernel, and never needs the lock of
the interpreter. A process that does not wait has no such thread.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

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
        threading.Thread(target=self._wait, args=(there,), daemon=True).start()

    @staticmethod
    def _wait(there: socket.socket) -> None:
        buffer = bytearray(_BYTES)
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
        self._waits = False

    def mark(self) -> None:
        """Wake the thread if the process has waited for CPUs for longer than it ran."""
        now_ns = clock.monotonic_ns()
        self.due_ns = now_ns + _EVERY_NS
        if now_ns - self._looked_ns >= _LOOK_NS:
            before, self._read_ns = self._read_ns, self._schedule.read_ns() or (0, 0)
            ran_ns, queued_ns = (
                now - then for now, then in zip(self._read_ns, before, strict=True)
            )
            self._looked_ns, self._waits = now_ns, queued_ns > ran_ns
        if self._waits:
            self._woken = self._woken or self._make()
            self._woken.wake()

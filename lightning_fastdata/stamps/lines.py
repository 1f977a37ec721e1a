"""In which lines of the user's code reading spends its time, looked at for a part of the time.

A thread of its own looks every few milliseconds where the reading thread is. To look it needs the
interpreter's lock. Code that holds the lock would be seen only when it lets go of it, which is in
another line; so the interpreter is asked for the lock sooner than usual while the thread looks.
What still comes late, as after a long call into C that keeps the lock, counts for the whole time
since the look before.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Mapping
from typing import Final, NamedTuple

from lightning_fastdata.host import clock
from lightning_fastdata.stamps.line_names import Place, look_at_thread, place_of

EVERY: Final = 32
"""Reading is looked at for one of so many parts of the time."""
_UNSEEN_TASKS: Final = 2
"""The first tasks of a process pay for what is done once."""
_ROUND_NS: Final = 100_000_000
"""Of reading that is looked at in one go, which may be one long task or many short ones."""
_TICK_NS: Final = 2_000_000
_TICKS: Final = 128
"""In a task longer than so many ticks, the next one is after such a part of its time: a task that
hangs costs nothing."""
_SWITCH_S: Final = 0.0002
"""How long the looking thread lets others hold the interpreter's lock; 5 ms by default."""
_GIVE_UP_S: Final = 60.0
"""Without a further task, the thread ends."""
_MOST_LINES: Final = 20


class LineTime(NamedTuple):
    """The time that one line took in one task."""

    file: str
    """See :class:`~lightning_fastdata.stamps.line_names.Place`; empty: of all other lines."""
    line: int
    function: str
    calls: str
    total_ns: int
    blocked_ns: int | None
    """Of that, the time it waited for something other than a CPU; None: the system does not tell.
    """


class LineWatch:
    """Looks for one of so many parts of the time where the thread is that reads samples.

    Where no thread can be started to look, lines are not named.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._tasks = 0
        self._next_ns: float = 0
        self._round: _Round | None = None

    def begin(self) -> None:
        """Note that the calling thread starts to read for a task."""
        self._tasks += 1
        if self._round is not None and not (self._round.of_caller and self._round.looks):
            self._close(self._round)
        if self._round is None:
            if self._tasks <= _UNSEEN_TASKS or clock.monotonic_ns() < self._next_ns:
                return
            try:
                self._round = _Round()
            except RuntimeError:
                self._next_ns = math.inf
                return
        self._round.resume()

    def end(self) -> tuple[LineTime, ...]:
        """Note that it has ended; return where it was, longest first: empty if nobody looked."""
        current = self._round
        if current is None or not current.reading or not current.of_caller:
            return ()
        seen = current.pause()
        if current.read_ns >= _ROUND_NS:
            self._close(current)
        return _line_times(seen)

    def __del__(self) -> None:
        if self._round is not None:
            self._round.close()

    def _close(self, current: _Round) -> None:
        self._next_ns = clock.monotonic_ns() + (self._every - 1) * current.read_ns
        self._round = None
        current.close()


def _line_times(seen: Mapping[Place, tuple[int, int | None]]) -> tuple[LineTime, ...]:
    times = [LineTime(*place, *spent) for place, spent in seen.items() if place.file]
    named = sorted(times, key=lambda each: -each.total_ns)[:_MOST_LINES]
    rest_ns = sum(ns for ns, _ in seen.values()) - sum(each.total_ns for each in named)
    rest = [LineTime("", 0, "", "", rest_ns, None)] if rest_ns else []
    return (*named, *rest)


class _Round:
    """Looks at the thread that makes it, while that reads, until it is closed.

    Raises:
        RuntimeError: No thread can be started.
    """

    def __init__(self) -> None:
        self.read_ns = 0
        """Of the tasks that have ended."""
        self.reading = False
        self._process, self._ident = os.getpid(), threading.get_ident()
        # Not the interpreter's number of it, which a thread that starts later may get.
        self._of = threading.get_native_id()
        self._schedule = clock.ThreadSchedule()
        self._going, self._over = threading.Event(), False
        self._began_ns = self._looked_ns = self._seen_ns = 0
        self._runnable_ns: int | None = None
        self._seen: dict[Place, tuple[int, int | None]] = {}
        self._switch_s = (0.0, 0.0)
        self._thread = threading.Thread(target=self._run, name="fastdata lines", daemon=True)
        self._thread.start()

    @property
    def of_caller(self) -> bool:
        """Whether it looks at the calling thread; in a forked process none is the same."""
        return self._of == threading.get_native_id()

    @property
    def looks(self) -> bool:
        """Whether its own thread has not ended."""
        return self._thread.is_alive()

    def resume(self) -> None:
        """Look from now on, and have the interpreter's lock handed over sooner."""
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(min(usual_s, _SWITCH_S))
        self._switch_s = usual_s, sys.getswitchinterval()
        self._began_ns, self._runnable_ns = clock.monotonic_ns(), self._schedule.runnable_ns()
        self.reading = True
        self._going.set()

    def pause(self) -> dict[Place, tuple[int, int | None]]:
        """Look no more, and return what was seen since the last time, in all and blocked."""
        self.reading = False
        self._going.clear()
        self.read_ns += clock.monotonic_ns() - self._began_ns
        usual_s, ours_s = self._switch_s
        if sys.getswitchinterval() == ours_s:
            sys.setswitchinterval(usual_s)
        seen, self._seen = self._seen, {}
        return seen

    def close(self) -> None:
        """Have the thread end."""
        # A forked process has none to end, and may have copied a lock that was taken.
        if os.getpid() == self._process:
            if self.reading:
                self.pause()
            self._over = True
            self._going.set()

    def _run(self) -> None:
        # An error would only be printed into the training's output.
        with contextlib.suppress(Exception):
            while self._going.wait(_GIVE_UP_S) and not self._over:
                # Whoever had to wait for the lock looks at once: then the reading thread has just
                # given it away, and is in the line in which it had it.
                now_ns = clock.monotonic_ns()
                tick_ns = max(_TICK_NS, (now_ns - self._began_ns) // _TICKS)
                early_ns = max(self._began_ns, self._looked_ns) + tick_ns - now_ns
                if early_ns > 0:
                    clock.sleep(early_ns / 1e9)
                if self.reading:
                    self._look()

    def _look(self) -> None:
        place = look_at_thread(self._ident, place_of)
        now_ns = self._looked_ns = clock.monotonic_ns()
        runnable_ns = self._schedule.runnable_ns()
        if not self.reading:
            return
        read_ns = self.read_ns + now_ns - self._began_ns
        spent_ns, self._seen_ns = max(0, read_ns - self._seen_ns), read_ns
        before_ns, self._runnable_ns = self._runnable_ns, runnable_ns
        if place is None:
            return
        total_ns, blocked_ns = self._seen.get(place, (0, 0))
        if runnable_ns is None or before_ns is None or blocked_ns is None:
            blocked_ns = None
        else:
            blocked_ns += max(0, spent_ns - (runnable_ns - before_ns))
        self._seen[place] = total_ns + spent_ns, blocked_ns

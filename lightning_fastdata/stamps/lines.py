"""In which lines of the user's code reading spends its time, looked at for a part of the time.

A thread of its own looks every few milliseconds where the reading thread is. To look it needs the
interpreter's lock. Code that holds the lock would be seen only when it lets go of it, which is in
another line; so the interpreter is asked for the lock sooner than usual while the thread looks.
What still comes late, as after a long call into C that keeps the lock, counts for the whole time
since the look before.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final, NamedTuple

from lightning_fastdata.host import clock
from lightning_fastdata.stamps.line_names import (
    ELSEWHERE,
    Place,
    PlaceName,
    key_of,
    name_of,
    place_of,
)

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
_LEFT_NS: Final = 200_000_000
"""A thread that begins no task for so long is looked at no longer."""
_GIVE_UP_S: Final = 60.0
"""Without a further task, the thread ends."""
_MOST_LINES: Final = 20


class LineTime(NamedTuple):
    """The time that one line took in one task."""

    file: str
    """See :class:`~lightning_fastdata.stamps.line_names.PlaceName`; empty: of all other lines."""
    line: int
    function: str
    calls: str
    total_ns: int
    blocked_ns: int | None
    """Of that, the time it waited for something other than a CPU; None: the system does not tell.
    """


class LineWatch:
    """Looks for one of so many parts of the time where threads are that read samples.

    At one of them at a time. After an error in it, lines are not named.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._tasks = 0
        self._next_ns = 0
        self._round: _Round | None = None
        self._deciding = threading.Lock()
        self._process = os.getpid()
        self._works = hasattr(sys, "_current_frames")

    def begin(self) -> None:
        """Note that the calling thread starts to read for a task."""
        self._tasks += 1
        if self._round is None and (
            self._tasks <= _UNSEEN_TASKS or clock.monotonic_ns() < self._next_ns or not self._works
        ):
            return
        try:
            if os.getpid() != self._process:  # forked: threads are not
                self._process, self._round, self._deciding = os.getpid(), None, threading.Lock()
            with self._deciding:
                current = self._round
                if current is not None and current.left():
                    self._close(current)
                    current = None
                if current is None:
                    if clock.monotonic_ns() < self._next_ns:
                        return
                    self._round = current = _Round()
                if current.thread == threading.get_native_id():
                    current.resume()
        except Exception:  # as when no thread can be started
            self._works = False

    def end(self) -> tuple[LineTime, ...] | None:
        """Note that it has ended; return where it was, or None if it was not looked at."""
        current = self._round
        if current is None or not current.reading or current.thread != threading.get_native_id():
            return None
        try:
            seen = current.pause()
            if current.over or current.read_ns >= _ROUND_NS:
                self._close(current)
            return _named(seen)
        except Exception:
            self._works = False
            return None

    def __del__(self) -> None:
        # A forked process has no thread to end, and may have copied a lock that was taken.
        if self._round is not None and os.getpid() == self._process:
            self._round.close()

    def _close(self, current: _Round) -> None:
        self._next_ns = clock.monotonic_ns() + (self._every - 1) * current.read_ns
        self._round = None
        current.close()


def _named(seen: list[_Seen]) -> tuple[LineTime, ...] | None:
    if not seen:
        return None
    seen.sort(key=lambda each: -each.total_ns)
    times: dict[PlaceName, _Seen] = {}
    for each in seen[:_MOST_LINES]:
        if each.place is not ELSEWHERE:
            known = times.setdefault(name_of(each.place), _Seen(each.place))
            known.add(each.total_ns, each.blocked_ns)
    lines = [LineTime(*name, each.total_ns, each.blocked_ns) for name, each in times.items()]
    rest_ns = sum(each.total_ns for each in seen) - sum(line.total_ns for line in lines)
    if rest_ns:
        lines.append(LineTime("", 0, "", "", rest_ns, None))
    return tuple(lines)


class _Seen:
    """The time in one place."""

    __slots__ = ("blocked_ns", "place", "total_ns")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.total_ns = 0
        self.blocked_ns: int | None = 0

    def add(self, total_ns: int, blocked_ns: int | None) -> None:
        self.total_ns += total_ns
        if blocked_ns is None or self.blocked_ns is None:
            self.blocked_ns = None
        else:
            self.blocked_ns += blocked_ns


class _Round:
    """Looks at the thread that makes it, while that reads, until it is closed."""

    def __init__(self) -> None:
        # Not the interpreter's number of it, which a thread that starts later may get.
        self.thread = threading.get_native_id()
        self.read_ns = 0
        """Of the tasks that have ended."""
        self.reading = False
        self.over = False
        self._ident = threading.get_ident()
        self._schedule = clock.ThreadSchedule()
        self._going = threading.Event()
        self._began_ns = self._looked_ns = self._seen_ns = 0
        self._runnable_ns: int | None = None
        self._paused_ns = clock.monotonic_ns()
        self._seen: dict[tuple[int, ...], _Seen] = {}
        self._switch_s = (0.0, 0.0)
        threading.Thread(target=self._run, name="fastdata lines", daemon=True).start()

    def resume(self) -> None:
        """Look from now on, and have the interpreter's lock handed over sooner."""
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(min(usual_s, _SWITCH_S))
        self._switch_s = usual_s, sys.getswitchinterval()
        self._began_ns, self._runnable_ns = clock.monotonic_ns(), self._schedule.runnable_ns()
        self.reading = True
        self._going.set()

    def pause(self) -> list[_Seen]:
        """Look no more, and return what was seen since the last time."""
        self.reading = False
        self._going.clear()
        self._paused_ns = clock.monotonic_ns()
        self.read_ns += self._paused_ns - self._began_ns
        usual_s, ours_s = self._switch_s
        if sys.getswitchinterval() == ours_s:
            sys.setswitchinterval(usual_s)
        seen, self._seen = self._seen, {}
        return list(seen.values())

    def left(self) -> bool:
        """Tell whether its thread reads no longer, or may have ended."""
        # A round that has ended by itself stays with its thread as long as that reads.
        return not self.reading and (self.over or clock.monotonic_ns() - self._paused_ns > _LEFT_NS)

    def close(self) -> None:
        """Have the thread end."""
        self.over = True
        self._going.set()

    def _run(self) -> None:
        # An error would only be printed into the training's output.
        with contextlib.suppress(Exception):
            while self._going.wait(_GIVE_UP_S) and not self.over:
                # Whoever had to wait for the lock looks at once: then the reading thread has just
                # given it away, and is in the line in which it had it.
                now_ns = clock.monotonic_ns()
                tick_ns = max(_TICK_NS, (now_ns - self._began_ns) // _TICKS)
                early_ns = max(self._began_ns, self._looked_ns) + tick_ns - now_ns
                if early_ns > 0:
                    clock.sleep(early_ns / 1e9)
                if self.reading:
                    self._look()
        self.over = True

    def _look(self) -> None:
        # A frame that is kept keeps the variables in it: it is let go of before anything is waited
        # for.
        place = place_of(sys._current_frames().get(self._ident))
        now_ns = self._looked_ns = clock.monotonic_ns()
        runnable_ns = self._schedule.runnable_ns()
        if not self.reading:
            return
        read_ns = self.read_ns + now_ns - self._began_ns
        spent_ns, self._seen_ns = max(0, read_ns - self._seen_ns), read_ns
        before_ns, self._runnable_ns = self._runnable_ns, runnable_ns
        if place is not None:
            blocked_ns = None
            if runnable_ns is not None and before_ns is not None:
                blocked_ns = max(0, spent_ns - (runnable_ns - before_ns))
            self._seen.setdefault(key_of(place), _Seen(place)).add(spent_ns, blocked_ns)

"""In which lines of the user's code reading spends its time, looked at for a part of the time.

A thread of its own looks every few milliseconds where the reading thread is. To look it needs the
interpreter's lock. Code that holds the lock would be seen only when it lets go of it, which is in
another line; so the interpreter is asked for the lock sooner than usual while the thread looks. A
look that still comes late, as after a long call into C that keeps the lock, counts for the whole
time since the look before.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, NamedTuple, TypeAlias, TypeVar

from lightning_fastdata.host import clock

Seen = TypeVar("Seen")

EVERY: Final = 32
"""Number of parts of the reading time, of which one is looked at."""
_UNSEEN_TASKS: Final = 2
"""Number of first tasks of a process that are not looked at, as they pay for what is done once."""
_TINY_NS: Final = 200_000
"""Mean nanoseconds of a task below which none is looked at: starting to would take longer."""
_ROUND_NS: Final = 100_000_000
"""Nanoseconds of reading that are looked at in one go: one long task, or many short ones."""
_TICK_NS: Final = 2_000_000
_TICKS: Final = 128
"""Number of ticks of a task after which each is the task's time so far divided by this number, so
that looking at a task that hangs costs nothing."""
_SWITCH_S: Final = 0.0002
"""Seconds for which the looking thread lets others hold the interpreter's lock; Python: 0.005."""
_MOST_LINES: Final = 20


class Place(NamedTuple):
    """Where a thread is, in words, without any values."""

    file: str
    """Path relative to where packages are, or its last two parts; empty: no line can be named."""
    line: int
    """Line in the innermost function of the user, or else in the outermost one of a library."""
    function: str
    """Qualified name of the function."""
    calls: str
    """Function of a library that the line calls, if it is one written in Python: ``PIL
    Image.convert``; empty otherwise."""


LineTimes: TypeAlias = tuple[tuple[Place, int], ...]
"""Lines that one task was in, each with its nanoseconds, the longest first; ``ELSEWHERE``: the time
of all other lines, the last one."""


class LineWatch:
    """Looks where the thread is that reads samples, for one of ``every`` parts of the time.

    Where no thread can be started to look, lines are not named.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._tasks = 0
        self._began_ns = self._all_ns = 0
        """Nanoseconds at which the open task began, and of reading in all tasks but the first."""
        self._next_ns: float = 0
        self._read_ns = self._seen_ns = 0
        """Nanoseconds of reading in this round, in all and until the last look."""
        self._look: _Look | None = None

    def begin(self) -> None:
        """Note that the calling thread starts to read for a task."""
        self._tasks += 1
        self._began_ns = clock.monotonic_ns()
        if self._tasks <= _UNSEEN_TASKS or self._began_ns < self._next_ns:
            return
        if self._all_ns < (self._tasks - 2) * _TINY_NS:
            return
        try:
            self._look = _Look(self._read_ns, self._seen_ns)
            self._began_ns = clock.monotonic_ns()
        except RuntimeError:
            self._next_ns = math.inf

    def end(self) -> LineTimes:
        """Note that it has ended; return where it was, longest first: empty if nobody looked."""
        look, self._look = self._look, None
        if self._tasks > 1 and self._began_ns:
            self._all_ns += clock.monotonic_ns() - self._began_ns
        self._began_ns = 0
        if look is None:
            return ()
        self._read_ns, self._seen_ns = look.end(), look.seen_ns
        if self._read_ns >= _ROUND_NS:
            self._next_ns = clock.monotonic_ns() + (self._every - 1) * self._read_ns
            self._read_ns = self._seen_ns = 0
        times = [(place, ns) for place, ns in look.seen.items() if place.file]
        named = sorted(times, key=lambda each: -each[1])[:_MOST_LINES]
        rest_ns = sum(look.seen.values()) - sum(ns for _, ns in named)
        return (*named, *([(ELSEWHERE, rest_ns)] if rest_ns else []))


class _Look:
    """Looks at the thread that makes it, while that reads for one task.

    Args:
        read_ns: Nanoseconds of reading in this round, before this task.
        seen_ns: Nanoseconds of reading in this round until the last look.

    Raises:
        RuntimeError: No thread can be started.
    """

    def __init__(self, read_ns: int, seen_ns: int) -> None:
        self.seen: dict[Place, int] = {}
        """Nanoseconds spent in each place."""
        self.seen_ns = seen_ns
        self._before_ns = read_ns
        self._ident, self._over = threading.get_ident(), False
        self._usual_s, self._ours_s = sys.getswitchinterval(), 0.0
        self._starts = threading.Lock()
        with self._starts:  # else starting the thread would be seen, and count as reading
            threading.Thread(target=self._run, name="fastdata lines", daemon=True).start()
            if self._usual_s > _SWITCH_S:  # else another look has set it, or the user
                sys.setswitchinterval(_SWITCH_S)
                self._ours_s = sys.getswitchinterval()
            self._began_ns = clock.monotonic_ns()

    def end(self) -> int:
        """Look no more, and return the nanoseconds of reading in this round."""
        self._over = True
        if sys.getswitchinterval() == self._ours_s:
            sys.setswitchinterval(self._usual_s)
        return self._read_ns()

    def _read_ns(self) -> int:
        return self._before_ns + clock.monotonic_ns() - self._began_ns

    def _run(self) -> None:
        # An error would only be printed into the training's output.
        with contextlib.suppress(Exception):
            with self._starts:
                pass
            while not self._over:
                # If this thread had to wait for the lock it looks at once: then the reading thread
                # has just given the lock away, and is in the line in which it had it.
                read_ns = self._read_ns()
                tick_ns = max(_TICK_NS, (read_ns - self._before_ns) // _TICKS)
                clock.sleep(max(0, self.seen_ns + tick_ns - read_ns) / 1e9)
                self._note(look_at_thread(self._ident, place_of))

    def _note(self, place: Place | None) -> None:
        if self._over:
            return
        read_ns = self._read_ns()
        spent_ns, self.seen_ns = max(0, read_ns - self.seen_ns), read_ns
        if place is not None:
            self.seen[place] = self.seen.get(place, 0) + spent_ns


_READS, _OWN, _LIBRARY, _USER = range(4)

_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep
_DATASETS: Final = "ext/images/"
"""Folder of modules with datasets, which are named as those of libraries are."""
_STANDARD: Final = str(Path(os.__file__).parent) + os.sep
_INSTALLED: Final = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_CELL: Final = re.compile(r"<ipython-input|.*[/\\]ipykernel_\d+[/\\]")
_TYPED_IN: Final = ("<stdin>", "<python-input")
"""First parts of the file names of code that a user has typed into Python itself."""
_WRAPPERS: Final = (
    str(Path("torch/nn/modules/module.py")),
    str(Path("torch/utils/_contextlib.py")),
    f"{os.sep}contextlib.py",
    f"{os.sep}functools.py",
    str(Path("albumentations/core/composition.py")),
    str(Path("albumentations/core/transforms_interface.py")),
    str(Path("torchvision/transforms/v2/_container.py")),
    str(Path("torchvision/transforms/v2/_transform.py")),
)
"""Modules whose functions only call what they were given."""
_CONTAINERS: Final = frozenset(
    {"Compose.__call__", "RandomApply.forward", "RandomChoice.__call__", "RandomOrder.__call__"}
)
"""Functions that only call what they were given, in modules with others (torchvision v1)."""


ELSEWHERE: Final = Place("", 0, "", "")
"""Place in a dataset written in C, or in code of this package that is no dataset, as what writes
into the batch."""


def look_at_thread(ident: int, see: Callable[[FrameType | None], Seen]) -> Seen:
    """Return what ``see`` finds in the innermost frame of a thread of this process.

    The frame, which keeps the variables in it, is let go of as soon as it has been seen.

    Args:
        ident: The thread's ``threading.get_ident()``.
        see: Called with the frame; None: there is no such thread.
    """
    # Before Python 3.12, to make a frame that can be looked at may collect garbage. What that runs
    # hands the interpreter over to the thread, which returns from the function; whoever then looks
    # at its frame ends the process with a segmentation fault.
    pauses = sys.version_info < (3, 12) and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        return see(sys._current_frames().get(ident))  # noqa: TID251
    finally:
        if pauses:
            gc.enable()


def place_of(frame: FrameType | None) -> Place | None:
    """Return where a thread is that reads samples, by its frame; None: it does something else."""
    called: CodeType | None = None
    below: CodeType | None = None
    outermost: tuple[CodeType, int] | None = None
    while frame is not None:
        code, line = frame.f_code, frame.f_lineno or 0
        kind = _kind_of(code.co_filename)
        if kind == _USER:
            return _named(code, line, called)
        if kind == _READS:
            # There are only libraries: their dataset is named, and what it calls.
            return ELSEWHERE if outermost is None else _named(*outermost, below)
        passes_on = code.co_filename.endswith(_WRAPPERS) or code.co_qualname in _CONTAINERS
        if kind == _LIBRARY and not passes_on:
            below, called, outermost = called, code, (code, line)
        frame = frame.f_back
    return None


def _named(code: CodeType, line: int, called: CodeType | None) -> Place:
    calls = ""
    if called is not None:
        file = _in_library(called.co_filename) or called.co_filename
        calls = f"{Path(file).parts[0].removesuffix('.py')} {_function_name(called)}"
    return Place(short_file(code.co_filename), line, _function_name(code), calls)


@cache
def short_file(filename: str) -> str:
    """Return the name of a file that is short and still says which one it is."""
    if _CELL.match(filename):
        return "notebook cell"
    if filename.startswith("<"):
        return filename
    known = _in_library(filename)
    if known is not None:
        return known
    return str(Path(*Path(filename).parts[-2:]))


@cache
def _kind_of(filename: str) -> int:
    if filename.startswith("<") and not _CELL.match(filename):
        return _USER if filename.startswith(_TYPED_IN) else _LIBRARY
    if not filename.startswith(_PACKAGE):
        return _USER if _in_library(filename) is None else _LIBRARY
    path = Path(filename[len(_PACKAGE) :])
    if path.parts[0] == "executors" or path.name == "stamped.py":
        return _READS
    return _LIBRARY if path.as_posix().startswith(_DATASETS) else _OWN


def _in_library(filename: str) -> str | None:
    """Return the name of a library's file, relative to where libraries are."""
    if filename.startswith(_PACKAGE):
        return str(Path(Path(_PACKAGE).name, filename[len(_PACKAGE) :]))
    installed = _INSTALLED.match(filename)
    if installed is not None:
        return filename[installed.end() :]
    return filename.removeprefix(_STANDARD) if filename.startswith(_STANDARD) else None


def _function_name(code: CodeType) -> str:
    parts = code.co_qualname.split(".<locals>.")
    named = [part for part in parts if not part.startswith("<")]
    return named[-1] if named else parts[-1]

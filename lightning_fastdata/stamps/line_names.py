"""Which line of the user's code a thread is in while it reads, by its stack."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from sysconfig import get_path
from types import CodeType, FrameType
from typing import Final, NamedTuple

_READS, _WRITES, _OWN, _LIBRARY, _USER = range(5)

_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep
_WRITERS: Final = ("batches/collate.py", "batches/layout.py", "batches/packed.py")
"""Modules that work on what was read already."""
_STANDARD: Final = tuple(
    {
        str(Path(each)) + os.sep
        for each in (get_path("stdlib"), get_path("platstdlib"), Path(os.__file__).parent)
        if each
    }
)
_INSTALLED: Final = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_CELL: Final = re.compile(r"<ipython-input|.*[/\\]ipykernel_\d+[/\\]")
_WRAPPERS: Final = (
    str(Path("torch/nn/modules/module.py")),
    str(Path("torch/utils/_contextlib.py")),
    f"{os.sep}contextlib.py",
    f"{os.sep}functools.py",
)
"""Modules whose functions only call what they were given."""

_kinds: dict[str, int] = {}


class Place(NamedTuple):
    """Where a thread is. Compared by identity of its parts; see :func:`key_of`."""

    code: CodeType
    """Of the innermost function of the user, or else of the outermost one of a library."""
    line: int
    called: CodeType | None
    """Of the function of a library that the line calls; None: there is none written in Python."""


class PlaceName(NamedTuple):
    """A place in words, without any values."""

    file: str
    """Relative to the working directory or to where packages are, or its last two parts."""
    line: int
    function: str
    """Qualified name."""
    calls: str
    """The function of a library that the line calls, if it is one written in Python: ``PIL
    Image.convert``."""


ELSEWHERE: Final = Place(compile("", "<elsewhere>", "exec"), 0, None)
"""In a dataset written in C, or in code of this package that is no dataset."""


def key_of(place: Place) -> tuple[int, ...]:
    """Return what distinguishes places, cheaply: code objects are long to hash."""
    return id(place.code), place.line, id(place.called)


def place_of(frame: FrameType | None) -> Place | None:
    """Return where a thread is that reads samples, by its frame; None: it does something else."""
    called: CodeType | None = None
    below: CodeType | None = None
    outermost: tuple[CodeType, int] | None = None
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code.co_filename)
        if kind is None:
            kind = _kind_of(code.co_filename, frame.f_globals.get("__name__"))
        if kind == _USER:
            return Place(code, frame.f_lineno or 0, called)
        if kind == _WRITES:
            return None
        if kind == _READS:
            if outermost is None:
                return ELSEWHERE
            # Nothing but libraries: their dataset is named, and what it calls.
            return Place(*outermost, below)
        if kind == _LIBRARY and not code.co_filename.endswith(_WRAPPERS):
            below, called = called, code
            outermost = code, frame.f_lineno or 0
        frame = frame.f_back
    return None


def name_of(place: Place) -> PlaceName:
    """Return a place in words."""
    calls = ""
    if place.called is not None:
        file = _in_library(place.called.co_filename) or place.called.co_filename
        package = Path(file).parts[0].removesuffix(".py")
        calls = f"{package} {_function_name(place.called)}"
    return PlaceName(
        short_file(place.code.co_filename), place.line, _function_name(place.code), calls
    )


def stack_lines(frames: Iterable[tuple[str, int, str]], most: int = 4) -> tuple[str, ...]:
    """Return a stack in a few words: the innermost function, then the innermost ones of the user.

    Args:
        frames: File, line and name of each function, the innermost first.
        most: So many lines at most.
    """
    frames = list(frames)
    users = [each for each in frames[1:] if _in_library(each[0]) is None]
    return tuple(
        f"{short_file(file)}:{line} {function}"
        for file, line, function in [*frames[:1], *users][:most]
    )


def short_file(filename: str) -> str:
    """Return the name of a file that is short and still says which one it is."""
    if _CELL.match(filename):
        return "notebook cell"
    if filename.startswith("<"):
        return filename
    known = _in_library(filename)
    if known is not None:
        return known
    path = Path(filename)
    try:
        here = Path.cwd()
    except OSError:  # the working directory is gone
        here = Path(os.sep)
    inside = here != Path(os.sep) and path.is_relative_to(here)
    return str(path.relative_to(here) if inside else Path(*path.parts[-2:]))


def _kind_of(filename: str, module: object) -> int:
    if filename.startswith("<") and not _CELL.match(filename):
        # Named after no file: typed in by the user, or made by a library.
        return _USER if module in ("__main__", "__mp_main__") else _LIBRARY
    kind = _USER if _in_library(filename) is None else _LIBRARY
    if filename.startswith(_PACKAGE):
        path = Path(filename[len(_PACKAGE) :])
        if path.as_posix() in _WRITERS:
            kind = _WRITES
        elif path.parts[0] == "executors" or path.name == "stamped.py":
            kind = _READS
        elif path.parts[0] != "images":  # those are datasets
            kind = _OWN
    _kinds[filename] = kind
    return kind


def _in_library(filename: str) -> str | None:
    """Return the name of a library's file, relative to where libraries are."""
    if filename.startswith(_PACKAGE):
        return str(Path(Path(_PACKAGE).name, filename[len(_PACKAGE) :]))
    installed = _INSTALLED.match(filename)
    if installed is not None:
        return filename[installed.end() :]
    folder = next((each for each in _STANDARD if filename.startswith(each)), None)
    return None if folder is None else filename[len(folder) :]


def _function_name(code: CodeType) -> str:
    parts = code.co_qualname.split(".<locals>.")
    named = [part for part in parts if not part.startswith("<")]
    return named[-1] if named else parts[-1]

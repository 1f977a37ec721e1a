"""Which line of the user's code a thread is in while it reads, by its stack."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, NamedTuple, TypeVar

Seen = TypeVar("Seen")

_READS, _WRITES, _OWN, _LIBRARY, _USER = range(5)

_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep
_WRITERS: Final = ("batches/collate.py", "batches/layout.py", "batches/packed.py")
"""Modules that work on what was read already."""
_DATASETS: Final = "ext/images/"
"""Modules with datasets, which are named as those of libraries are."""
_STANDARD: Final = str(Path(os.__file__).parent) + os.sep
_INSTALLED: Final = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_CELL: Final = re.compile(r"<ipython-input|.*[/\\]ipykernel_\d+[/\\]")
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
"""Functions that do so in modules with others, as those of torchvision v1."""


class Place(NamedTuple):
    """Where a thread is, in words, without any values."""

    file: str
    """Relative to the working directory or to where packages are, or its last two parts; empty: in
    no line that can be named."""
    line: int
    """Of the innermost function of the user, or else of the outermost one of a library."""
    function: str
    """Qualified name."""
    calls: str
    """The function of a library that the line calls, if it is one written in Python: ``PIL
    Image.convert``."""


ELSEWHERE: Final = Place("", 0, "", "")
"""In a dataset written in C, or in code of this package that is no dataset."""


def look_at_thread(ident: int, see: Callable[[FrameType | None], Seen]) -> Seen:
    """Return what ``see`` finds in the innermost frame of a thread of this process.

    The frame, which keeps the variables in it, is let go of as soon as it has been seen.

    Args:
        ident: The thread's ``threading.get_ident()``.
        see: Is given the frame; None: there is no such thread.
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
        kind = _kind_of(code.co_filename, frame.f_globals.get("__name__") in _TYPED_IN)
        if kind == _USER:
            return _named(code, line, called)
        if kind == _WRITES:
            return None
        if kind == _READS:
            # Nothing but libraries: their dataset is named, and what it calls.
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
    path = Path(filename)
    try:
        here = Path.cwd()
    except OSError:  # the working directory is gone
        here = Path(os.sep)
    inside = here != Path(os.sep) and path.is_relative_to(here)
    return str(path.relative_to(here) if inside else Path(*path.parts[-2:]))


_TYPED_IN: Final = ("__main__", "__mp_main__")
"""Modules whose functions may be named after no file, as the user has typed them in."""


@cache
def _kind_of(filename: str, typed_in: bool) -> int:
    if filename.startswith("<") and not _CELL.match(filename):
        return _USER if typed_in else _LIBRARY
    if not filename.startswith(_PACKAGE):
        return _USER if _in_library(filename) is None else _LIBRARY
    path = Path(filename[len(_PACKAGE) :])
    if path.as_posix() in _WRITERS:
        return _WRITES
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

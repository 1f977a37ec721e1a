"""Sources of records: files, archives, databases, tables and object storage.

Each adapter is a thin layer over the library of its format, opens what it reads in the process
that reads it, and may be sent to any process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any, Generic, TypeAlias, TypeVar

from lightning_fastdata.errors import OptionsError

Handle = TypeVar("Handle")
"""What a process has open."""
Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One path or several."""


def as_list(paths: Paths) -> list[str]:
    """Return paths as texts.

    Raises:
        OptionsError: There is none.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise OptionsError("There is no path; give at least one.")
    return [os.fspath(path) for path in several]


_opened: weakref.WeakKeyDictionary[OpenedInEachProcess[Any], tuple[int, Any]]
_opened = weakref.WeakKeyDictionary()
"""What each has open, with the process that opened it: not among the attributes of a dataset, where
it would count as something that forked workers share."""


class OpenedInEachProcess(Generic[Handle]):
    """Keeps what was opened, and opens it anew in a process that was forked or sent a copy."""

    def open(self) -> Handle:
        """Open what is read; called once in each process."""
        raise NotImplementedError

    def opened(self) -> Handle:
        """Return what is open in this process."""
        process, kept = _opened.get(self, (0, None))
        if process != os.getpid():
            kept = self.open()
            _opened[self] = os.getpid(), kept
        handle: Handle = kept
        return handle

"""Sources of records: files, archives, databases, tables and object storage.

Each adapter is a thin layer over the library of its format. It opens its files in the process that
reads them, and may be sent to any process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any, Generic, TypeAlias, TypeVar

from lightning_fastdata.errors import OptionsError

Handle = TypeVar("Handle")
"""Type of the object that a process opens to read, such as a file or a client."""
Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One path or several."""


def as_list(paths: Paths) -> list[str]:
    """Return paths as a list of str.

    Raises:
        OptionsError: There is no path.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise OptionsError("There is no path; give at least one.")
    return [os.fspath(path) for path in several]


_opened: weakref.WeakKeyDictionary[OpenedInEachProcess[Any], tuple[int, Any]]
_opened = weakref.WeakKeyDictionary()
"""Open object of each source, with the number of the process that opened it. It is no attribute of
a dataset, where it would count as an object that forked workers share."""


class OpenedInEachProcess(Generic[Handle]):
    """Keeps an open file or client, and opens another one in each process that has a copy of it."""

    def open(self) -> Handle:
        """Open the file or client; called once in each process."""
        raise NotImplementedError

    def opened(self) -> Handle:
        """Return the file or client of this process, opened if it is not yet."""
        process, kept = _opened.get(self, (0, None))
        if process != os.getpid():
            kept = self.open()
            _opened[self] = os.getpid(), kept
        handle: Handle = kept
        return handle

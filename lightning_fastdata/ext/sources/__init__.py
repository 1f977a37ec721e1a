"""Sources of records: files, archives, databases, tables and object storage.

Each adapter is a thin layer over the library of its format. It opens its files in the process that
reads them, and may be sent to any process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, TypeAlias, TypeVar

from lightning_fastdata.errors import OptionsError

Handle = TypeVar("Handle")
"""Type of the object that a process opens to read, such as a file or a client."""
Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One path or several."""


PATHS: Final = (str, bytes, os.PathLike)
"""Types of what a list of paths may hold."""


def as_list(paths: Paths) -> list[str]:
    """Return paths as a list of str.

    Raises:
        OptionsError: There is no path, or something is no path.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    found = [os.fsdecode(path) for path in each_of("paths", several, "paths", *PATHS)]
    if not all(found or [""]):
        raise OptionsError("There is no path, or an empty one; give at least one.")
    return found


def each_of(argument: str, given: Any, what: str, *kinds: type) -> Iterator[Any]:
    """Yield each of the values that an argument lists.

    Raises:
        OptionsError: It is no list of values of these kinds. A text is none, as its letters would
            be taken for values.
    """
    several = not isinstance(given, str | bytes) and any(
        hasattr(given, name) for name in ("__iter__", "__getitem__")
    )
    for value in given if several else [given]:
        if not (several and isinstance(value, kinds)):
            such = f", such as [{given!r}]" if isinstance(given, str) else ""
            raise OptionsError(f"{argument} is {given!r:.200}; give a list of {what}{such}.")
        yield value


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

"""What a source of bytes is, and the simplest one: files."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from operator import index as as_index
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, TypeAlias

from torch.utils.data import ConcatDataset, Subset

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.images.packed import PackedStrings

Raw: TypeAlias = "bytes | memoryview | Mapping[str, Any]"
"""A record as it is stored; of a record with several parts or columns, these by name."""


Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One path or several."""


class Source(Protocol):
    """Records by number, as they are stored.

    Subclassing is not needed. A source is asked in several processes, and by several threads of
    each; it may be pickled, and opens what it reads on first use in each process.
    """

    parallel_reads: int
    """How many records are worth asking for at once from threads, as each waits for an answer; 1:
    records are asked for together, in one call."""

    def __len__(self) -> int:
        """Return the number of records."""

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return records, each number at least 0 and below the length, in the order asked for."""

    def name_of(self, index: int) -> str:
        """Return what errors call a record: a file, an object, a place in an archive."""


def as_list(paths: Paths) -> list[str]:
    """Return paths as texts.

    Raises:
        OptionsError: There is none.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise OptionsError("There is no path; give at least one.")
    return [os.fspath(path) for path in several]


def reads_ahead(dataset: object) -> bool:
    """Return whether a dataset, or one that torch has wrapped, can begin to read several samples.

    It then has a method ``read_ahead(indices)``, which returns at once.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        return any(reads_ahead(part) for part in dataset.datasets)
    able = callable(getattr(type(dataset), "read_ahead", None))
    # What stands for another dataset says whether that one can.
    return able and bool(getattr(dataset, "can_read_ahead", True))


def read_ahead(dataset: Any, indices: Sequence[Any]) -> None:
    """Have a dataset begin to read samples; those with other keys than numbers are left out."""
    numbers = [as_index(index) for index in indices if isinstance(index, SupportsIndex)]
    while type(dataset) is Subset:
        inner = dataset.indices
        numbers = [inner[number] for number in numbers if -len(inner) <= number < len(inner)]
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        starts = [0, *dataset.cumulative_sizes]
        for part, start, end in zip(dataset.datasets, starts, starts[1:], strict=False):
            read_ahead(part, [number - start for number in numbers if start <= number < end])
    elif numbers and reads_ahead(dataset):
        dataset.read_ahead(numbers)


_opened: weakref.WeakKeyDictionary[OpenedInEachProcess, tuple[int, Any]]
_opened = weakref.WeakKeyDictionary()
"""What each has open, with the process that opened it: not among the attributes of a dataset, where
it would count as something that forked workers share."""


class OpenedInEachProcess:
    """Keeps what was opened, and opens it anew in a process that was forked or sent a copy."""

    def open(self) -> Any:
        """Open what is read; called once in each process."""
        raise NotImplementedError

    def opened(self) -> Any:
        """Return what is open in this process."""
        process, handle = _opened.get(self, (0, None))
        if process != os.getpid():
            handle = self.open()
            _opened[self] = os.getpid(), handle
        return handle


class FileSource:
    """A file a record.

    Args:
        paths: Of the files.
        parallel_reads: As of :class:`Source`; more than 1 for a network file system.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]], *, parallel_reads: int = 1) -> None:
        self.paths = PackedStrings(os.fspath(path) for path in paths)
        self.parallel_reads = parallel_reads

    def __len__(self) -> int:
        return len(self.paths)

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return the contents of files."""
        return [Path(self.paths[index]).read_bytes() for index in indices]

    def name_of(self, index: int) -> str:
        """Return the path of a file."""
        return self.paths[index]

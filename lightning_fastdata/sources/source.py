"""The protocol of a source of bytes, and a dataset over one, which reads ahead as it decodes."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import index as as_index
from typing import Any, Protocol, SupportsIndex, TypeAlias, cast

from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_fastdata.errors import DatasetError, add_note, check, is_number, printable, text_of
from lightning_fastdata.tree import has_method
from lightning_fastdata.types import Batch

Raw: TypeAlias = "bytes | memoryview | Mapping[str, Any]"
"""A record as it is stored; if it has several parts or columns, these by name."""


class Source(Protocol):
    """Records by number, as they are stored.

    Subclassing is not needed. A source is used in several processes, and by several threads of
    each. It may be pickled, and opens its files on first use in each process. Two methods are
    optional: ``will_read(indices)`` is called before several records are asked for one by one; it
    can begin to read them, and returns at once. ``block_starts()`` is for ``shuffle="blocks"``: it
    returns the first record of each group that is read as a whole, increasing from 0, or None.
    """

    parallel_reads: int
    """Number of threads that are worth asking at once, as each waits for an answer; 1: records are
    asked for together, in one call."""

    def __len__(self) -> int:
        """Return the number of records."""

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return records, each number at least 0 and below the length, in the order asked for."""

    def name_of(self, index: int) -> str:
        """Return the name of a record for errors: a file, an object, a place in an archive."""


def reads_ahead(dataset: object) -> bool:
    """Return whether a dataset, or one in torch's wrappers, can begin to read several samples.

    Such a dataset has a method ``read_ahead(indices)``, which returns at once.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        return any(reads_ahead(part) for part in dataset.datasets)
    if not has_method(dataset, "read_ahead"):
        return False
    # A wrapper of another dataset says whether that one can read ahead.
    return bool(getattr(dataset, "can_read_ahead", True))


def read_ahead(dataset: object, indices: Sequence[object]) -> None:
    """Have a dataset begin to read samples; keys that are not numbers are left out."""
    if not reads_ahead(dataset):
        return
    numbers = [as_index(index) for index in indices if isinstance(index, SupportsIndex)]
    while type(dataset) is Subset:
        inner = dataset.indices
        numbers = [inner[number] for number in numbers if -len(inner) <= number < len(inner)]
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        starts = [0, *dataset.cumulative_sizes]
        for part, start, end in zip(dataset.datasets, starts, starts[1:], strict=False):
            read_ahead(part, [number - start for number in numbers if start <= number < end])
    elif numbers:
        cast("Any", dataset).read_ahead(numbers)


class SourceDataset(Dataset[Any]):
    """Samples made of the records of a source.

    A worker asks for all records of its part of a batch before it decodes the first one, up to
    ``source.parallel_reads`` of them at once from threads. Order, draws, bad samples and resuming
    are those of any map-style dataset.

    Args:
        source: Source of the records; see :class:`Source`.
        decode: Makes a sample from a record and its number. It may draw at random.
        timeout_s: Seconds to wait for a record before an error is raised.

    Raises:
        OptionsError: ``source`` is no source, ``decode`` cannot be called, or ``timeout_s`` is not
            above 0.

    Example:
        >>> photos = SourceDataset(TarSource("photos.tar"), decode)  # doctest: +SKIP
    """

    def __init__(
        self, source: Source, decode: Callable[[Any, int], Any], *, timeout_s: float = 120.0
    ) -> None:
        fine = callable(getattr(source, "get_bytes", None)) and hasattr(source, "name_of")
        check("source", source, fine, "sources, as those of lightning_fastdata.sources")
        check("decode", decode, callable(decode), "functions that take a record and its number")
        check("timeout_s", timeout_s, is_number(timeout_s, above=0), "seconds, above 0")
        self.source = source
        self.decode = decode
        self.timeout_s = timeout_s
        self._reads: _Reads | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Batch:
        """Return a sample.

        Raises:
            IndexError: There is no such record.
            DatasetError: The record cannot be read; the message names it.
        """
        number, count = operator.index(index), len(self.source)
        if not -count <= number < count:
            raise IndexError(f"There is no record {index}: the source has {count}.")
        number %= count
        return self.decode(self._here().take(number), number)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Begin to read the records of samples that will be asked for in this thread."""
        count = len(self.source)
        numbers = [int(index) % count for index in indices if -count <= int(index) < count]
        self._here().begin(numbers)

    def block_starts(self) -> Sequence[int] | None:
        """Return the first sample of each block that the source stores; None: it states none."""
        source: Any = self.source
        return source.block_starts() if has_method(source, "block_starts") else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reads": None}

    def _here(self) -> _Reads:
        reads = self._reads
        if reads is None or reads.process != os.getpid():
            reads = self._reads = _Reads(self.source, self.timeout_s)
        return reads


class _Begun(threading.local):
    """Reads that a thread has begun, by the number of the record: the future, or the record."""

    def __init__(self) -> None:
        self.begun: dict[int, Any] = {}


class _Reads:
    """The reads of one process."""

    def __init__(self, source: Source, timeout_s: float) -> None:
        self.process = os.getpid()
        self._source = source
        self._timeout_s = timeout_s
        self._mine = _Begun()
        parallel = source.parallel_reads
        self._threads = None
        if parallel > 1:
            self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="fastdata-read")

    def begin(self, numbers: Sequence[int]) -> None:
        """Begin to read records; reads of others that were begun before are cancelled."""
        begun = self._mine.begun
        numbers = list(dict.fromkeys(numbers))
        for left in begun.keys() - set(numbers):
            read = begun.pop(left)
            if isinstance(read, Future):
                read.cancel()
        missing = [number for number in numbers if number not in begun]
        if self._threads is not None:
            begun |= {number: self._submit(number) for number in missing}
        elif has_method(self._source, "will_read"):
            cast("Any", self._source).will_read(missing)
        elif len(missing) > 1:
            begun |= self._together(missing)
        self._mine.begun = begun

    def take(self, number: int) -> Raw:
        """Return a record, which may have been begun."""
        begun = self._mine.begun
        found = begun.pop(number, None)
        try:
            if isinstance(found, Future):
                return self._wait(found, number)
            if found is not None:
                return found  # type: ignore[no-any-return]
            if self._threads is None:
                return self._read(number)
            return self._wait(self._submit(number), number)
        except Exception as error:
            if isinstance(error, DatasetError):
                raise
            # An error of the system keeps its class, which tells whether reading again may help.
            name = printable(self._source.name_of(number), keep="")
            add_note(error, f"While reading {name}.")
            if isinstance(error, OSError):
                raise
            said = text_of(error).partition("\n")[0]  # obstore adds pages
            raise DatasetError(
                f"Cannot read {name}: {type(error).__name__}: {said}. Check that it is there and "
                "may be read."
            ) from error

    def _together(self, numbers: list[int]) -> dict[int, Any]:
        try:
            return dict(zip(numbers, self._source.get_bytes(numbers), strict=True))
        except Exception:  # raised for one record: each is read again alone, and that one is named
            return {}

    def _submit(self, number: int) -> Future[Raw]:
        assert self._threads is not None
        return self._threads.submit(self._read, number)

    def _read(self, number: int) -> Raw:
        return self._source.get_bytes([number])[0]

    def _wait(self, read: Future[Raw], number: int) -> Raw:
        wait([read], self._timeout_s)
        if not read.done():
            raise TimeoutError(
                f"{printable(self._source.name_of(number), keep='')} has not come within "
                f"{self._timeout_s:g} s (timeout_s)"
            )
        return read.result()

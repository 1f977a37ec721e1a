"""A source whose records are read once from where they are, and from then on from this machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from lightning_fastdata.caches.fixed_part import same_parts, tried_indices
from lightning_fastdata.caches.folders import (
    CacheFolder,
    cache_path,
    hold,
    is_memory,
    open_or_make,
    room_bytes,
    warn_of_full,
)
from lightning_fastdata.caches.sample_file import SampleFile
from lightning_fastdata.caches.sample_form import taken_apart
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.host.system_calls import SharedFlags
from lightning_fastdata.sources.source import Raw, Source


class CachedSource:
    """A source that keeps its records on this machine: of object storage, or a slow file system.

    Records are written as they are first read, by whichever worker or rank reads them, and are
    found again by later epochs, other ranks and later runs. Nothing is thrown out to make room: a
    shuffled epoch reads each record once, so one that was thrown out for another is missed as
    often. Records beyond ``max_bytes`` are read from where they are. What nothing has read for 30
    days is removed as a whole.

    A cache belongs to one state of the source: its class and code, the names of its records, and
    what a listing said of objects or the system of files. Some records are compared with the source
    when a run opens a cache, and each is held against its checksum when it is first read.

    Args:
        source: Of records that are bytes, or dicts of bytes, arrays, numbers and strings.
        folder: ``"disk"``, ``"ram"`` or a folder; as for :class:`CachedDataset`.
        max_bytes: What the records may take. Default: half of the disk that is free, a quarter of
            the memory.
        key: As for :class:`CachedDataset`.

    Raises:
        OptionsError: An argument has an impossible value, or there is no such memory.
        DatasetError: The source cannot be recognised in another run.

    Example:
        >>> photos = ObjectSource("s3://bucket/photos")  # doctest: +SKIP
        >>> SourceDataset(CachedSource(photos), decode)  # doctest: +SKIP
    """

    def __init__(
        self,
        source: Source,
        folder: CacheFolder = "disk",
        *,
        max_bytes: int | None = None,
        key: str | None = None,
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise OptionsError(f"max_bytes is {max_bytes!r}; give bytes, or None for the default.")
        self.source = source
        self.folder = cache_path(source, folder, key)
        self.parallel_reads = source.parallel_reads
        self._in_memory = is_memory(folder)
        self._max_bytes = max_bytes
        self._length = len(source)
        # One more than there are records: that the cache was compared with the source.
        self._known = SharedFlags(self._length + 1)
        self._file: SampleFile | None = None
        self._opening = threading.Lock()
        self._full = False
        if self._in_memory:
            hold(self.folder, until_the_end=True)

    def __len__(self) -> int:
        return self._length

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return records, from the cache where they are there.

        Raises:
            DatasetError: The cache is of other records, or cannot be read.
        """
        file = self._opened()
        found = {
            index: record for index in indices for there, record in [file.read(index)] if there
        }
        missing = [index for index in dict.fromkeys(indices) if index not in found]
        if missing:
            for index, record in zip(missing, self._read(missing), strict=True):
                self._keep(file, index, record)
                found[index] = record
        return [found[index] for index in indices]

    def name_of(self, index: int) -> str:
        """Return what the source calls a record."""
        return self.source.name_of(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_opening": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opening=threading.Lock())

    def __repr__(self) -> str:
        return f"CachedSource({self.source!r}, {str(self.folder)!r})"

    # What follows reads nothing from the source, which this process perhaps must not: see
    # ObjectSource.

    @property
    def stored(self) -> int:
        """How many records are in the cache."""
        file = self._existing()
        return 0 if file is None else file.stored()

    @property
    def stored_bytes(self) -> int:
        """How many bytes the records in the cache take."""
        file = self._existing()
        return 0 if file is None else file.used_bytes()

    def explain(self) -> str:
        """Return what is kept and where, as text."""
        return (
            f"cache: {self.folder}, {self.stored} of {self._length}, {self.stored_bytes / 1e6:.0f} "
            f"MB: records of {type(self.source).__name__}"
        )

    def flush(self) -> None:
        """Wait until the disk has all records that were written."""
        file = self._existing()
        if file is not None:
            file.flush()

    def _opened(self) -> SampleFile:
        """Return the cache; it is made if it is not there."""
        if self._file is not None:
            return self._file
        with self._opening:  # reads come in several threads
            if self._file is None:
                if not self._in_memory:
                    hold(self.folder)
                file = open_or_make(self.folder, self._existing, self._create)
                if self._length not in self._known:
                    self._compare(file)
                    self._known.add(self._length)
                self._file = file
        return self._file

    def _existing(self) -> SampleFile | None:
        return self._file or SampleFile.open(self.folder, self._length, self._known)

    def _create(self) -> SampleFile:
        return SampleFile.create(
            self.folder,
            self._length,
            self._known,
            form=None,
            max_bytes=self._max_bytes or room_bytes(self.folder, in_memory=self._in_memory),
            about={"kept": "records", "source": type(self.source).__name__},
        )

    def _read(self, indices: Sequence[int]) -> list[Any]:
        """Return records of the source, in the form in which the cache returns them."""
        records = self.source.get_bytes(indices)
        return [bytes(each) if isinstance(each, memoryview) else each for each in records]

    def _compare(self, file: SampleFile) -> None:
        """Compare some records of the cache with the source."""
        for index in tried_indices(self._length) if self._length else []:
            there, kept = file.read(index)
            if there and not same_parts(taken_apart(kept), taken_apart(*self._read([index]))):
                raise DatasetError(
                    f"The cache {self.folder} does not hold what {self.name_of(index)} is now. "
                    "Delete the folder, and it is made again; if you gave it a key, give another "
                    "one when the records change."
                )

    def _keep(self, file: SampleFile, index: int, record: object) -> None:
        if self._full:
            return
        try:
            file.write(index, record)
        except OSError as error:
            self._full = True
            warn_of_full(self.folder, error)

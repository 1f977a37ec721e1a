"""A source whose records are read once from where they are, and from then on from this machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from lightning_fastdata.caches.fixed_part import same_parts, tried_indices
from lightning_fastdata.caches.folders import CacheFolder, Kept, hold, open_or_make
from lightning_fastdata.caches.sample_file import SampleFile
from lightning_fastdata.caches.sample_form import taken_apart
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.sources.source import Raw, Source


class CachedSource(Kept):
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
        super().__init__(source, folder, max_bytes=max_bytes, key=key)
        self.source = source
        self.parallel_reads = source.parallel_reads
        self._opening = threading.Lock()

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

    def explain(self) -> str:
        """Return what is kept and where, as text."""
        return (
            f"cache: {self.folder}, {self.stored} of {self._length}, {self.stored_bytes / 1e6:.0f} "
            f"MB: records of {type(self.source).__name__}"
        )

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

    def _create(self) -> SampleFile:
        about = {"kept": "records", "source": type(self.source).__name__}
        return self._new_file(form=None, about=about)

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

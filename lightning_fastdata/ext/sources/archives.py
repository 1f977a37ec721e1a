"""Files in tar archives that are read in any order, by an index made once."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.ext.sources.opened import OpenedInEachProcess, Paths, as_list
from lightning_fastdata.sources.files import begin_to_read
from lightning_fastdata.sources.packed import PackedStrings
from lightning_fastdata.sources.source import Raw


class TarSource(OpenedInEachProcess[list[int]]):
    """The files in uncompressed tar archives, WebDataset's shards among them.

    The archives are read once, header by header, to find where each file begins.

    Args:
        paths: Of the archives.
        parts: Extensions of the files that make one record, after WebDataset's convention that
            they share their name up to its first dot (``("jpg", "cls")``): a record is a dict of
            bytes by extension. None: each file is a record of bytes.

    Raises:
        DatasetError: An archive cannot be read, is compressed, or has a record without a part.
    """

    parallel_reads = 1

    def __init__(self, paths: Paths, parts: Sequence[str] | None = None) -> None:
        self.paths = as_list(paths)
        found = [each for number, path in enumerate(self.paths) for each in _members(number, path)]
        self.parts = None if parts is None else tuple(parts)
        if self.parts is not None:
            found = _grouped(found, self.parts, self.paths)
        self._names = PackedStrings(name for name, _ in found)
        self._slices = np.array([at for _, at in found], np.int64).reshape(-1, 3)
        self._each = 1 if self.parts is None else len(self.parts)

    def __len__(self) -> int:
        return len(self._slices) // self._each

    def open(self) -> list[int]:
        """Return the descriptors of the archives, which are closed with the process."""
        return [os.open(path, os.O_RDONLY) for path in self.paths]

    def will_read(self, indices: Sequence[int]) -> None:
        """Have the system begin to read records that are not in memory."""
        files = self.opened()
        for index in indices:
            for file, offset, length in self._slices[self._places(index)].tolist():
                begin_to_read(files[file], offset, length)

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return the bytes of files, or dicts of them by extension.

        Raises:
            DatasetError: An archive has become shorter.
        """
        if self.parts is None:
            return [self._read(index) for index in indices]
        return [
            dict(zip(self.parts, map(self._read, self._places(index)), strict=True))
            for index in indices
        ]

    def name_of(self, index: int) -> str:
        """Return the archive, and the name of the record in it."""
        return self._name(index * self._each)

    def _places(self, index: int) -> range:
        """Return which slices make a record."""
        return range(index * self._each, (index + 1) * self._each)

    def _read(self, place: int) -> bytes:
        file, offset, length = self._slices[place].tolist()
        data = os.pread(self.opened()[file], length, offset)
        if len(data) < length:
            raise DatasetError(
                f"{self._name(place)} ends early: {len(data)} of {length} bytes are there. The "
                "archive has changed since it was opened; make the source anew."
            )
        return data

    def _name(self, place: int) -> str:
        return f"{self.paths[int(self._slices[place, 0])]}:{self._names[place]}"


def _members(number: int, path: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the name of each file of an archive, and where it is: archive, offset, size."""
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isreg() and not member.sparse:
                    yield member.name, (number, member.offset_data, member.size)
                archive.members = []  # type: ignore[attr-defined]  # it would keep them all
    except (OSError, tarfile.TarError) as error:
        raise DatasetError(
            f"{path} cannot be read as an uncompressed tar archive: {error}. Unpack a compressed "
            "one: its files cannot be reached in any order."
        ) from error


def _grouped(found: list[Any], parts: tuple[str, ...], files: list[str]) -> list[Any]:
    """Return the slices of each record one after the other, in the order of the parts."""
    records: dict[tuple[int, str], dict[str, Any]] = {}
    for name, at in found:
        folder, _, base = name.rpartition("/")
        stem, _, extension = base.partition(".")
        records.setdefault((at[0], f"{folder}/{stem}"), {})[extension] = (name, at)
    grouped = []
    for (number, name), record in records.items():
        for part in parts:
            if part not in record:
                raise DatasetError(
                    f"{files[number]}:{name.lstrip('/')} has {', '.join(sorted(record))}, and no "
                    f"{part!r}. Leave it out of parts, or repair the archive."
                )
            grouped.append(record[part])
    return grouped

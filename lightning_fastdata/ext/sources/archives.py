"""Files in archives that are read in any order, by an index made once: tar and zip."""

from __future__ import annotations

import os
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.ext.sources.opened import OpenedInEachProcess, Paths, as_list
from lightning_fastdata.sources.files import begin_to_read
from lightning_fastdata.sources.packed import PackedStrings
from lightning_fastdata.sources.source import Raw


class Slices(OpenedInEachProcess[list[int]]):
    """Records that are slices of files, found by file, offset and length.

    Each is made of so many slices, one after the other.
    """

    parallel_reads = 1

    def __init__(
        self, paths: list[str], names: PackedStrings, slices: list[Any], each: int = 1
    ) -> None:
        self.paths = paths
        self._names = names
        self._slices = np.array(slices, np.int64).reshape(-1, 3)
        self._each = each

    def __len__(self) -> int:
        return len(self._slices) // self._each

    def open(self) -> list[int]:
        """Return the descriptors of the files, which are closed with the process."""
        return [os.open(path, os.O_RDONLY) for path in self.paths]

    def slice(self, place: int) -> bytes:
        """Return the bytes of one slice.

        Raises:
            DatasetError: The file has become shorter.
        """
        file, offset, length = self._slices[place].tolist()
        data = os.pread(self.opened()[file], length, offset)
        if len(data) < length:
            raise DatasetError(
                f"{self._name(place)} ends early: {len(data)} of {length} bytes are there. The "
                "archive has changed since it was opened; make the source anew."
            )
        return data

    def will_read(self, indices: Sequence[int]) -> None:
        """Have the system begin to read records that are not in memory."""
        files = self.opened()
        for index in indices:
            for place in self.places_of(index):
                file, offset, length = self._slices[place].tolist()
                begin_to_read(files[file], offset, length)

    def places_of(self, index: int) -> range:
        """Return which slices make a record."""
        return range(index * self._each, (index + 1) * self._each)

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return records."""
        return [self.slice(index) for index in indices]

    def name_of(self, index: int) -> str:
        """Return the archive, and the name of the record in it."""
        return self._name(self.places_of(index)[0])

    def _name(self, place: int) -> str:
        return f"{self.paths[int(self._slices[place, 0])]}:{self._names[place]}"


class TarSource(Slices):
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

    def __init__(self, paths: Paths, parts: Sequence[str] | None = None) -> None:
        files = as_list(paths)
        found = [each for number, path in enumerate(files) for each in _tar_members(number, path)]
        self.parts = None if parts is None else tuple(parts)
        if self.parts is not None:
            found = _grouped(found, self.parts, files)
        names = PackedStrings(name for name, _ in found)
        each = 1 if self.parts is None else len(self.parts)
        super().__init__(files, names, [at for _, at in found], each)

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return the bytes of files, or dicts of them by extension."""
        if self.parts is None:
            return super().get_bytes(indices)
        return [
            dict(zip(self.parts, map(self.slice, self.places_of(index)), strict=True))
            for index in indices
        ]


class ZipSource(Slices):
    """The files in a zip archive, stored or deflated.

    Args:
        paths: Of the archives.
        suffix: Of the names that count.

    Raises:
        DatasetError: An archive cannot be read, or a file in it is encrypted or compressed in
            another way.
    """

    def __init__(self, paths: Paths, suffix: str = "") -> None:
        files, names, slices, deflated = as_list(paths), [], [], []
        for number, path in enumerate(files):
            for info in _zip_members(path):
                if not info.is_dir() and info.filename.endswith(suffix):
                    names.append(info.filename)
                    slices.append((number, _zip_data_at(path, info), info.compress_size))
                    deflated.append((info.compress_type == zipfile.ZIP_DEFLATED, info.CRC))
        super().__init__(files, PackedStrings(names), slices)
        self._about = np.array(deflated, np.int64).reshape(-1, 2)

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return the contents of files."""
        return [self._content(index) for index in indices]

    def _content(self, index: int) -> bytes:
        import zlib

        data = self.slice(index)
        deflated, crc = self._about[index].tolist()
        if deflated:
            data = zlib.decompress(data, -zlib.MAX_WBITS)
        if zlib.crc32(data) != crc:
            raise DatasetError(f"{self.name_of(index)} is damaged: its checksum is wrong.")
        return data


def _tar_members(number: int, path: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
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


def _zip_members(path: str) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile) as error:
        raise DatasetError(f"{path} cannot be read as a zip archive: {error}.") from error
    for info in members:
        fine = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if not fine or info.flag_bits & 1:
            raise DatasetError(
                f"{path}:{info.filename} is encrypted, or compressed in a way other than deflate. "
                "Pack it again."
            )
    return members


def _zip_data_at(path: str, info: zipfile.ZipInfo) -> int:
    """Return where the data of a file begins: its own header tells how long that is."""
    with Path(path).open("rb") as file:
        file.seek(info.header_offset + 26)
        name, extra = struct.unpack("<HH", file.read(4))
    return info.header_offset + 30 + int(name) + int(extra)

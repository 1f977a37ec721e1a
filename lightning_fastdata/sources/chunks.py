"""Records in the chunks of streaming libraries, read in any order: Mosaic's MDS, and LitData."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.sources.archives import Slices
from lightning_fastdata.sources.source import OpenedInEachProcess, Raw, imported
from lightning_fastdata.types import Batch, MapDataset

_SIZE: Final = struct.Struct("<I")
_KINDS: Final = {"uint": "u", "int": "i", "float": "f"}
_NUMBERS: Final = {
    f"{name}{bits}": f"<{kind}{bits // 8}"
    for name, kind in _KINDS.items()
    for bits in (8, 16, 32, 64)
    if (name, bits) != ("float", 8)
}
_ARRAY_TYPES: Final = {
    8: "|u1",
    9: "|i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
"""Types of NumPy by their number in an MDS array."""


_TEXTS: Final[dict[str, Callable[[str], Any]]] = {
    "str": str,
    "str_int": int,
    "str_float": float,
    "json": json.loads,
}


class MdsSource(Slices):
    """The samples of a dataset in Mosaic's Streaming format (MDS), as dicts by column.

    Read without that library, by the offsets that its shards begin with. Numbers, strings, JSON
    and arrays are returned as such; any other column as it is stored: the bytes of a JPEG, of a
    pickle, of a list.

    Args:
        path: Of the folder with ``index.json`` and the shards, uncompressed
            (``MDSWriter(compression=None)``).

    Raises:
        DatasetError: The folder has no such files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = Path(path)
        try:
            shards = json.loads((folder / "index.json").read_bytes())["shards"]
            self._columns = _mds_columns(shards)
            files = [os.fspath(folder / shard["raw_data"]["basename"]) for shard in shards]
            slices = [
                each
                for number, (file, shard) in enumerate(zip(files, shards, strict=True))
                for each in _mds_slices(number, file, shard["samples"])
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{folder} cannot be read as uncompressed MDS: {error}. It needs index.json and "
                "the shards that this names; write it with MDSWriter(compression=None)."
            ) from error
        super().__init__(files, None, slices)

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return samples."""
        return [self._sample(self.slice(index)) for index in indices]

    def _sample(self, raw: bytes) -> dict[str, Any]:
        sizes, at = [], 0
        for _, _, fixed in self._columns:
            sizes.append(fixed or _SIZE.unpack_from(raw, at)[0])
            at += 0 if fixed else _SIZE.size
        sample = {}
        for (name, encoding, _), size in zip(self._columns, sizes, strict=True):
            sample[name] = _mds_value(encoding, raw[at : at + size])
            at += size
        return sample


class LitDataSource(OpenedInEachProcess[MapDataset]):
    """The samples of a dataset that litdata optimized, as its ``StreamingDataset`` returns them.

    In any order, by number; ``StreamingDataset`` itself goes on as a stream. In a dict, tuple or
    list, views of memory become bytes.

    Args:
        path: Of the folder, on this machine.
        **options: For ``litdata.StreamingDataset``.

    Raises:
        OptionsError: litdata is not installed.
        DatasetError: The folder cannot be read.
    """

    parallel_reads = 1

    def __init__(self, path: str | os.PathLike[str], **options: object) -> None:
        self.path = os.fspath(path)
        self.index = os.fspath(Path(path) / "index.json")  # by its time a cache knows the samples
        self.options = options
        self._length = len(self.open())

    def __len__(self) -> int:
        return self._length

    def open(self) -> MapDataset:
        """Return the dataset of this process."""
        litdata = imported("litdata", "LitDataSource")
        if not Path(self.index).is_file():
            raise DatasetError(f"{self.path} has no index.json; give a folder that litdata wrote.")
        try:
            dataset: MapDataset
            dataset = litdata.StreamingDataset(self.path, shuffle=False, **self.options)
            return dataset
        except Exception as error:
            raise DatasetError(f"{self.path} cannot be read as LitData: {error}.") from error

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return samples."""
        samples = self.opened()
        return [_owned(samples[int(index)]) for index in indices]

    def name_of(self, index: int) -> str:
        """Return the folder and the number of the sample."""
        return f"{self.path}:sample {index}"


def _owned(value: Batch) -> Batch:
    """Return a sample without views of a file that may be let go."""
    if isinstance(value, memoryview):
        return bytes(value)
    if type(value) is dict:
        return {key: _owned(part) for key, part in value.items()}
    return type(value)(map(_owned, value)) if type(value) in (list, tuple) else value


def _mds_columns(shards: list[dict[str, Any]]) -> list[tuple[str, str, int | None]]:
    """Return name, encoding and size of each column; None: it differs from sample to sample."""
    found = []
    for shard in shards:
        if shard["format"] != "mds" or shard["version"] != 2:
            raise ValueError(f"a shard is {shard['format']} {shard['version']}, not mds 2")
        names, kinds, sizes = (shard[f"column_{what}"] for what in ("names", "encodings", "sizes"))
        found.append(list(zip(names, kinds, sizes, strict=True)))
    if not found or any(columns != found[0] for columns in found):
        raise ValueError("there is no shard, or they differ in their columns")
    return found[0]


def _mds_slices(number: int, path: str, samples: int) -> list[tuple[int, int, int]]:
    with Path(path).open("rb") as file:
        head = np.frombuffer(file.read(4 * (samples + 2)), "<u4")
        size = os.fstat(file.fileno()).st_size
    if head.size < samples + 2 or head[0] != samples or head[-1] > size:
        raise ValueError(f"{path} ends early, or has not the {samples} samples of index.json")
    begins, ends = head[1:-1].tolist(), head[2:].tolist()
    return [(number, begin, end - begin) for begin, end in zip(begins, ends, strict=True)]


def _mds_value(encoding: str, raw: bytes) -> object:
    """Return a value as it was written, where that takes no library and runs no code."""
    kind, _, about = encoding.partition(":")
    if kind == "int":
        return int.from_bytes(raw, "little", signed=True)
    if kind in _NUMBERS:
        return np.frombuffer(raw, _NUMBERS[kind])[0]
    if kind in _TEXTS:
        return _TEXTS[kind](raw.decode())
    return _mds_array(about, raw) if kind == "ndarray" else raw


def _mds_array(about: str, raw: bytes) -> np.ndarray[Any, Any]:
    """Return an array; its type and shape are those of the column, or come before its values."""
    dtype_name, _, shape_text = about.partition(":")
    at = 0
    if dtype_name:
        dtype = _NUMBERS[dtype_name]
    else:
        dtype, at = _ARRAY_TYPES[raw[0]], 1
    if shape_text:
        shape = [int(each) for each in shape_text.split(",")]
    else:
        dims, width = raw[at] >> 2, 1 << (raw[at] & 3)
        end = at + 1 + dims * width
        shape = np.frombuffer(raw[at + 1 : end], f"<u{width}").tolist()
        at = end
    return np.frombuffer(raw[at:], dtype).reshape(shape).copy()

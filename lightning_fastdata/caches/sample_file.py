"""Samples in files that many processes read and write at once, and that a kill leaves valid.

A folder holds ``manifest.json``, ``index.bin`` and the samples: a file for each leaf, whose row i
is that of sample i, where all samples have one form (``column-0.bin``, ...), and one file of
samples of any form otherwise (``samples.bin``). The index has an entry for each sample: where it
is, how long, and the CRC-32 of its number and bytes. The bytes are written before the entry, so a
sample is there whole or not at all. No byte is believed: of what a crash of the machine, a copy or
a disk leaves, each sample is held against its checksum when it is first read in a run, and made
again if that is wrong; a manifest or an index that is damaged is an error that names the folder.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.caches.sample_form import (
    column_of,
    first_leaf_at,
    joined,
    leaf_bytes,
    leaves_of,
    put_together,
    split,
    taken_apart,
)
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.host.system_calls import SharedFlags, write_atomically

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from lightning_fastdata.caches.sample_form import Form, Raw

_FORMAT: Final = 2
_ENTRY: Final = np.dtype([("offset", "<u8"), ("length", "<u4"), ("crc", "<u4")])
_MOST_BYTES: Final = 2**32 - 1
"""Of a sample, as its entry can say."""
_MOST_MANIFEST_BYTES: Final = 1 << 20
_CHECKED_BYTES: Final = 1 << 22
"""Of columns that are read at once to be checked."""
_ALIGNMENT_BYTES: Final = 64


class SampleFile:
    """The samples of one dataset in a folder.

    Made by :meth:`create` or :meth:`open`; any number of processes and threads may share a folder.
    Not to be pickled: open it anew.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], known: SharedFlags) -> None:
        self.folder = folder
        self.manifest = manifest
        self.form: Form | None = manifest["form"]
        """Of all samples; None: each has its own."""
        self.max_bytes: int = manifest["max_bytes"]
        """That samples may take."""
        self._known = known
        self._sizes = None if self.form is None else leaf_bytes(self.form)
        names = ["samples.bin"]
        if self._sizes is not None:
            names = [f"column-{number}.bin" for number in range(len(self._sizes))]
        self.paths = [folder / name for name in names]
        self._files: list[int] = []
        self._closing = weakref.finalize(self, _close, self._files)
        self._closing.atexit = False
        self._first: Raw = np.empty(0, np.uint8)
        """The first of the files, as far as it was mapped."""
        count = manifest["samples"]
        found, wanted = (folder / "index.bin").stat().st_size, _index_bytes(count)
        if found != wanted:
            raise ValueError(f"index.bin has {found} bytes, not {wanted}")
        self._mapped: np.memmap[Any, Any] = np.memmap(folder / "index.bin", _ENTRY, "r+")
        self._index: NDArray[Any] = np.asarray(self._mapped)[:count]
        for path, size in zip(self.paths, self._sizes or [0], strict=True):
            file = os.open(path, os.O_RDWR)
            self._files.append(file)
            if os.fstat(file).st_size < count * size:
                # Rows that were cut off are holes, which have no checksum that is right.
                os.ftruncate(file, count * size)

    @classmethod
    def open(cls, folder: Path, samples: int, known: SharedFlags) -> SampleFile | None:
        """Return what is in a folder; None if there is nothing yet.

        Args:
            folder: Of one dataset, as its key names it.
            samples: Length of the dataset.
            known: Which samples were held against their checksum, a flag each.

        Raises:
            DatasetError: The folder holds something else.
        """
        try:
            with (folder / "manifest.json").open("rb") as file:
                text, _, crc = file.read(_MOST_MANIFEST_BYTES).partition(b"\n")
            if crc != _crc_line(text):
                raise ValueError("manifest.json has not its checksum")
            manifest = json.loads(text)
            if manifest["format"] != _FORMAT or manifest["samples"] != samples:
                found = f"{manifest['samples']} samples in format {manifest['format']}"
                raise ValueError(f"it has {found}, not {samples} in format {_FORMAT}")
            return cls(folder, manifest, known)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DatasetError(
                f"The cache {folder} cannot be read: {error}. Delete the folder; it will be made "
                "again."
            ) from error

    @classmethod
    def create(
        cls,
        folder: Path,
        samples: int,
        known: SharedFlags,
        *,
        form: Form | None,
        max_bytes: int,
        about: dict[str, Any],
    ) -> SampleFile:
        """Make the files of an empty cache, under :func:`locked`.

        Args:
            folder: As for :meth:`open`.
            samples: As for :meth:`open`.
            known: As for :meth:`open`.
            form: Of all samples; None: each has its own.
            max_bytes: That the samples may take.
            about: What else the manifest says.

        Raises:
            DatasetError: The files cannot be made.
        """
        sizes = [1] if form is None else leaf_bytes(form)
        names = ["samples.bin"] if form is None else [f"column-{n}.bin" for n in range(len(sizes))]
        manifest = {"format": _FORMAT, "samples": samples, "form": form, "max_bytes": max_bytes}
        text = json.dumps({**manifest, **about}).encode()
        try:
            _make(folder / "index.bin", _index_bytes(samples), filled=True)
            for name, size in zip(names, sizes, strict=True):
                # Sparse: a file takes the room of what is written to it.
                _make(folder / name, 0 if form is None else samples * size, filled=False)
            # Last, because a folder with a manifest is a cache.
            write_atomically(folder / "manifest.json", text + b"\n" + _crc_line(text))
        except OSError as error:
            raise DatasetError(
                f"No cache can be made in {folder}: {error.strerror or error}. Give another folder."
            ) from error
        return cls(folder, json.loads(text), known)

    def __len__(self) -> int:
        return len(self._index)

    def there(self) -> NDArray[np.bool_]:
        """Return for each sample whether it is there."""
        return np.asarray(self._index["length"] > 0)

    def take_out(self, indices: int | NDArray[np.intp]) -> None:
        """Forget a sample, or some."""
        self._index[indices] = (0, 0, 0)

    def stored(self) -> int:
        """Return how many samples are there."""
        return int(np.count_nonzero(self._index["length"]))

    def used_bytes(self) -> int:
        """Return how many bytes the samples take."""
        return int(self._index["length"].sum(dtype=np.uint64))

    def has(self, index: int) -> bool:
        """Return whether a sample is there."""
        return bool(self._index[index]["length"])

    def read(self, index: int) -> tuple[bool, Any]:
        """Return whether a sample is there whole, and the sample: in memory of its own.

        One whose bytes do not have their checksum, or make no sample, is taken out.
        """
        offset, length, crc = self._index[index].item()
        if not length:
            return False, None
        try:
            if self._sizes is None:
                raws = [_read(self._files[0], offset, length)]
            else:
                columns = zip(self._files, self._sizes, strict=True)
                raws = [_read(file, index * size, size) for file, size in columns]
            if index not in self._known:
                if _checksum(index, raws) != crc:
                    raise ValueError("the checksum is wrong")
                self._known.add(index)
            form, raws = split(raws[0]) if self.form is None else (self.form, raws)
            return True, put_together(form, raws)
        except Exception:  # whatever damaged numbers lead to
            self.take_out(index)
            return False, None

    def first_leaf(self, index: int) -> Raw | None:
        """Return the bytes of a sample's first leaf where they are in the file, and a few more.

        None unless the sample is there, and was held against its checksum in this run.
        """
        offset, length, _ = self._index[index].item()
        if not length or index not in self._known:
            return None
        if self._sizes is not None:
            offset, length = index * self._sizes[0], self._sizes[0]
        if offset + length > self._first.size:
            self._first = np.asarray(np.memmap(self.paths[0], np.uint8, "r"))  # it has grown
        record = self._first[offset : offset + length]
        if record.size < length:
            return None
        return record if self._sizes is not None else record[first_leaf_at(record[:4].tobytes()) :]

    def write(self, index: int, sample: object) -> bool:
        """Keep a sample; return whether there was room, and its form is that of the others.

        Raises:
            OSError: It cannot be written.
            DatasetError: It holds what cannot be kept.
        """
        form, raws = taken_apart(sample)
        if self._sizes is None:
            record = np.frombuffer(joined(form, raws), np.uint8)
            offset = self._room(record.size)
            if offset is None:
                return False
            _write(self._files[0], record, offset)
            self._index[index] = (offset, record.size, _checksum(index, [record]))
        else:
            row = sum(self._sizes)
            if form != self.form or row > _MOST_BYTES or (index + 1) * row > self.max_bytes:
                return False
            for file, size, raw in zip(self._files, self._sizes, raws, strict=True):
                _write(file, raw, index * size)
            # A sample without a byte is there, too.
            self._index[index] = (0, max(1, row), _checksum(index, raws))
        self._known.add(index)
        return True

    def columns(self) -> list[NDArray[Any]] | None:
        """Return the leaves of all samples as memory maps ``[samples, ...]``.

        None if a sample is missing, or a leaf is no numbers. Rows that were not held against their
        checksum in this run are read for that, as nothing is checked in a map: the time of one pass
        over the files.
        """
        if self.form is None or self.stored() < len(self):
            return None
        maps: list[NDArray[Any]] = []
        for leaf, path in zip(leaves_of(self.form), self.paths, strict=True):
            kind = column_of(leaf)
            dtype = None if kind is None else _numpy_dtype(kind[0])
            if kind is None or dtype is None or not leaf["bytes"]:
                return None
            # Not as its subclass, whose every operation costs microseconds more.
            maps.append(np.asarray(np.memmap(path, dtype, "r", shape=(len(self), *kind[1]))))
        return maps if maps and self._all_are_whole() else None

    def _all_are_whole(self) -> bool:
        """Hold all rows against their checksums, and take out those that have not theirs."""
        step = max(1, _CHECKED_BYTES // max(1, sum(self._sizes or ())))
        for start in range(0, len(self), step):
            rows = range(start, min(start + step, len(self)))
            unknown = [index for index in rows if index not in self._known]
            if unknown:
                self._check(unknown)
        return self.stored() == len(self)

    def _check(self, unknown: list[int]) -> None:
        assert self._sizes is not None
        first, count = unknown[0], unknown[-1] + 1 - unknown[0]
        try:
            columns = zip(self._files, self._sizes, strict=True)
            raws = [_read(file, first * size, count * size).data for file, size in columns]
        except (OSError, ValueError):
            raws = []
        for index in unknown:
            crc, at = index, index - first
            for raw, size in zip(raws, self._sizes, strict=False):
                crc = zlib.crc32(raw[at * size : at * size + size], crc)
            if raws and crc == self._index["crc"][index]:
                self._known.add(index)
            else:
                self.take_out(index)

    def close(self) -> None:
        """Let go of the files."""
        self._closing()

    def flush(self) -> None:
        """Wait until the disk has what was written."""
        for file in self._files:
            os.fsync(file)
        self._mapped.flush()

    def _room(self, size: int) -> int | None:
        """Return where a record goes, at the end of the file; None if there is no room for it."""
        # Opened under the lock, as a network file system then asks how long the file is.
        with locked(self.folder), self.paths[0].open("r+b") as file:
            end = os.fstat(file.fileno()).st_size
            offset = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            if offset + size > self.max_bytes or size > _MOST_BYTES:
                return None
            file.truncate(offset + size)
        return offset


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which one thread of all processes has at a time."""
    try:
        import fcntl
    except ImportError as error:
        raise OptionsError(
            "A cache needs a system with POSIX file locks (Linux, macOS)."
        ) from error
    with (folder / "lock").open("ab") as file:
        # Of this opening of the file, so that threads wait for each other, too.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    import torch

    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:  # bfloat16 and others that NumPy has not
        return None


def _index_bytes(samples: int) -> int:
    return max(1, samples) * _ENTRY.itemsize  # no file of 0 bytes can be mapped


def _crc_line(text: bytes) -> bytes:
    return b"%08x\n" % zlib.crc32(text)


def _make(path: Path, size: int, *, filled: bool) -> None:
    path.unlink(missing_ok=True)  # cut short, it would end a process that has it mapped
    with path.open("xb") as file:
        file.truncate(size)
        if filled and sys.platform == "linux":
            # A memory map that finds no room would end the process.
            os.posix_fallocate(file.fileno(), 0, size)
        os.fsync(file.fileno())


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _read(file: int, offset: int, size: int) -> Raw:
    raw = np.empty(size, np.uint8)
    done = 0
    while done < size:
        got = os.preadv(file, [raw.data[done:]], offset + done)
        if not got:
            raise ValueError("the file ends early")
        done += got
    return raw


def _write(file: int, raw: Raw, offset: int) -> None:
    done = 0
    while done < raw.size:
        done += os.pwrite(file, raw.data[done:], offset + done)


def _checksum(index: int, raws: list[Raw]) -> int:
    crc = index  # so that the bytes of another sample are none of this one
    for raw in raws:
        crc = zlib.crc32(raw.data, crc)
    return crc

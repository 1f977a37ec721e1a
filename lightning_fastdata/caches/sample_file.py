"""Samples in a file that many processes read and write at once, and that a kill leaves valid.

A folder holds ``manifest.json``, ``index.bin`` and the samples. If all samples have one form, the
manifest holds it, and ``column-0.bin`` has their records as rows: row i is that of sample i. If
not, ``samples.bin`` has each record after its own form, in the order in which they were written.
The index has an entry for each sample: its offset, its length, and the CRC-32 of its number and
bytes. The bytes are written before the entry, so a sample is there whole or not at all. No byte is
trusted, as a crash of the machine, a copy or a disk may damage it: each sample is checked against
its checksum when it is first read in a run, and made again if that is wrong; a damaged manifest or
index is an error that names the folder.

The form of a sample says which containers it is made of, and the kind, type and shape of each leaf:
all but its numbers. A record has the bytes of the leaves, in order, each starting at a multiple of
16. Records of one form have one size, so that they can be rows. No code is read from a file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from numbers import Integral, Rational
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fastdata.caches.folders import locked
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.host.system_calls import SharedFlags, write_atomically
from lightning_fastdata.tree import bytes_of
from lightning_fastdata.types import Batch

Form: TypeAlias = dict[str, Any]
"""Form of a container or leaf: ``{"is": kind, ...}``, of JSON's types alone."""
Raw: TypeAlias = NDArray[np.uint8]
"""Bytes of a leaf or record, one-dimensional."""

_FORMAT: Final = 3
_ENTRY: Final = np.dtype([("offset", "<u8"), ("length", "<u4"), ("crc", "<u4")])
_MOST_BYTES: Final = 2**32 - 1
"""Largest size of a sample in bytes that its entry in the index can hold."""
_MOST_MANIFEST_BYTES: Final = 1 << 20
_ALIGNMENT_BYTES: Final = 64
_NUMBERS: Final = {"int": np.int64, "float": np.float64, "bool": np.bool_}
_PICTURE_MODES: Final = frozenset({"L", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"})
"""Modes of PIL images whose pixels are bytes, without a palette."""
_NOT_WRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_SUPPORTED: Final = (
    "tensors in host memory, NumPy arrays and scalars, PIL images, numbers, strings, bytes and "
    "None, in tuples, lists and dicts"
)


class SampleFile:
    """The samples of one dataset in a folder.

    It is made by :meth:`create` or :meth:`open`; any number of processes and threads may share a
    folder. Do not pickle it: open it anew.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], known: SharedFlags) -> None:
        self.folder = folder
        self.form: Form | None = manifest["form"]
        """Form of all samples; None: each sample has its own."""
        self.max_bytes: int = manifest["max_bytes"]
        """Most bytes that the samples may take."""
        self._known = known
        self._row_bytes = 0 if self.form is None else record_bytes(self.form)
        self._path = folder / _file_name(self.form)
        self._first: Raw = np.empty(0, np.uint8)
        """Memory map of the samples' file for :meth:`first_leaf`; empty until it is needed."""
        count = manifest["samples"]
        found, wanted = (folder / "index.bin").stat().st_size, _index_bytes(count)
        if found != wanted:
            raise ValueError(f"index.bin has {found} bytes, not {wanted}")
        self._mapped: np.memmap[Any, Any] = np.memmap(folder / "index.bin", _ENTRY, "r+")
        self._index: NDArray[Any] = np.asarray(self._mapped)[:count]
        self._file = os.open(self._path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file).atexit = False
        if os.fstat(self._file).st_size < count * self._row_bytes:
            # Rows that were cut off become holes, whose checksums are wrong.
            os.ftruncate(self._file, count * self._row_bytes)

    @classmethod
    def open(
        cls, folder: Path, samples: int, known: SharedFlags, *, max_bytes: int | None = None
    ) -> SampleFile | None:
        """Return what is in a folder; None if there is nothing yet.

        Args:
            folder: Folder of the cache of one dataset.
            samples: Length of the dataset.
            known: A flag for each sample: whether it was checked against its checksum.
            max_bytes: Most bytes that the samples may take; None: as when the cache was made.

        Raises:
            DatasetError: The folder holds a cache of another length or format, or a damaged one.
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
            manifest["max_bytes"] = max_bytes or manifest["max_bytes"]
            return cls(folder, manifest, known)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            advice = "Delete the folder; it will be made again."
            if getattr(error, "errno", None) in _NOT_WRITABLE:  # what it holds may be whole
                advice = "A cache is also written to: copy it to a folder where you may write."
            raise DatasetError(f"The cache {folder} cannot be read: {error}. {advice}") from error

    @classmethod
    def create(
        cls,
        folder: Path,
        samples: int,
        known: SharedFlags,
        *,
        form: Form | None,
        max_bytes: int,
        dataset: str,
    ) -> SampleFile:
        """Make the files of an empty cache, under the lock of its folder; see :meth:`open`.

        ``form``: that of all samples; None: each sample has its own. ``dataset``: the name of its
        class, for people who look into the folder.

        Raises:
            DatasetError: The files cannot be made.
        """
        manifest = {"format": _FORMAT, "samples": samples, "form": form, "max_bytes": max_bytes}
        text = json.dumps({**manifest, "dataset": dataset}).encode()
        rows_bytes = 0 if form is None else samples * record_bytes(form)
        try:
            _make(folder / "index.bin", _index_bytes(samples), filled=True)
            # Sparse: the file takes only the room of the rows that are written.
            _make(folder / _file_name(form), rows_bytes, filled=False)
            # The manifest comes last, because a folder that has one is a cache.
            write_atomically(folder / "manifest.json", text + b"\n" + _crc_line(text))
        except OSError as error:
            raise DatasetError(
                f"No cache can be made in {folder}: {error.strerror or error}. Give another folder."
            ) from error
        return cls(folder, json.loads(text), known)

    def there(self) -> NDArray[np.bool_]:
        """Return whether each sample is there [samples]."""
        return np.asarray(self._index["length"] > 0)

    def take_out(self, indices: int | NDArray[np.intp]) -> None:
        """Remove one or several samples."""
        self._index[indices] = (0, 0, 0)

    def stored(self) -> int:
        """Return how many samples are there."""
        return int(np.count_nonzero(self._index["length"]))

    def used_bytes(self) -> int:
        """Return how many bytes the samples take."""
        return int(self._index["length"].sum(dtype=np.uint64))

    def has(self, index: int) -> bool:
        """Return whether a sample is there."""
        return self._entry(index) is not None

    def read(self, index: int) -> tuple[bool, Any]:
        """Return whether a sample is there whole, and the sample, in memory of its own.

        A sample whose checksum is wrong, or whose bytes make no sample, is removed.
        """
        record = self._record(index)
        if record is None:
            return False, None
        try:
            form, record = split(record) if self.form is None else (self.form, record)
            return True, put_together(form, record)
        except Exception:  # damaged numbers may lead to any error
            self.take_out(index)
            return False, None

    def _record(self, index: int) -> Raw | None:
        """Return the bytes of a sample; None: it is not there, or was removed as damaged."""
        entry = self._entry(index)
        if entry is None:
            return None
        offset, length, crc = entry
        try:
            record = _read(self._file, offset, length)
            if index not in self._known and zlib.crc32(record.data, index) != crc:
                raise ValueError("the checksum is wrong")
        except Exception:  # damaged numbers may lead to any error
            self.take_out(index)
            return None
        self._known.add(index)
        return record

    def _entry(self, index: int) -> tuple[int, int, int] | None:
        """Return offset, length and checksum of the bytes of a sample; None: it is not there."""
        if index >= self._index.size:
            return None
        offset, length, crc = self._index[index].item()
        if not length:
            return None
        if self.form is not None:
            offset, length = index * self._row_bytes, self._row_bytes
        return offset, length, crc

    def first_leaf(self, index: int) -> Raw | None:
        """Return the bytes of a sample from its first leaf on, as a view of the mapped file.

        None unless the sample is there, and was checked against its checksum in this run.
        """
        entry = self._entry(index)
        if entry is None or index not in self._known:
            return None
        offset, length, _ = entry
        if offset + length > self._first.size:
            self._first = self._map()  # it has grown
        record = self._first[offset : offset + length]
        if record.size < length:
            return None
        return record if self.form is not None else record[first_leaf_at(record[:4].tobytes()) :]

    def _map(self) -> Raw:
        # Of the open file: whoever removes the folder leaves that to those who have it open. As a
        # plain array: each operation on a np.memmap costs microseconds more.
        with os.fdopen(os.dup(self._file), "rb") as file:
            return np.asarray(np.memmap(file, np.uint8, "r"))

    def write(self, index: int, sample: object) -> None:
        """Keep a sample, if there is room, its form is that of the others, and it has an entry.

        Raises:
            OSError: The sample cannot be written.
            DatasetError: The sample holds something that cannot be kept.
        """
        if index >= self._index.size:  # the dataset has grown since the cache was made
            return
        form, record = taken_apart(sample)
        if self.form is None:
            record = with_form(form, record)
            offset = self._room(len(record))
        else:
            offset = index * self._row_bytes if form == self.form else None
        if offset is None or offset + len(record) > self.max_bytes or len(record) > _MOST_BYTES:
            return
        _write(self._file, record, offset)
        # A length of 0 means that there is no sample, so an empty one gets the length 1.
        self._index[index] = (offset, max(1, len(record)), zlib.crc32(record, index))
        self._known.add(index)

    def columns(self) -> list[NDArray[Any]] | None:
        """Return the leaves of all samples as memory maps ``[samples, ...]``.

        None if a sample is missing, or a leaf is not made of numbers. Rows that were not checked in
        this run are read and checked now, as nothing is checked in a map: that takes at most the
        time of one pass over the file.
        """
        if self.form is None or not self._row_bytes or self.stored() < len(self._index):
            return None
        rows = self._map()[: len(self._index) * self._row_bytes].reshape(len(self._index), -1)
        columns: list[NDArray[Any]] = []
        for at, leaf in leaves_of(self.form):
            kind = column_of(leaf)
            dtype = None if kind is None else _numpy_dtype(kind[0])
            if kind is None or dtype is None or not leaf["bytes"]:
                return None
            numbers = rows[:, at : at + leaf["bytes"]].view(dtype)
            columns.append(numbers.reshape(len(self._index), *kind[1]))
        for index in range(len(self._index)):
            if index not in self._known:
                self._record(index)
        return columns if self.stored() == len(self._index) else None

    def flush(self) -> None:
        """Wait until all that was written is on the disk."""
        os.fsync(self._file)
        self._mapped.flush()

    def _room(self, size: int) -> int | None:
        """Make room for a record at the end of the file, and return its offset; None: no room."""
        # Opened under the lock, so that a network file system asks for the length anew.
        with locked(self.folder), self._path.open("r+b") as file:
            end = os.fstat(file.fileno()).st_size
            offset = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            if offset + size > self.max_bytes or size > _MOST_BYTES:
                return None
            file.truncate(offset + size)
        return offset


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:  # bfloat16 and other types that NumPy does not have
        return None


def _file_name(form: Form | None) -> str:
    return "samples.bin" if form is None else "column-0.bin"


def _index_bytes(samples: int) -> int:
    return max(1, samples) * _ENTRY.itemsize  # a file of 0 bytes cannot be mapped


def _crc_line(text: bytes) -> bytes:
    return b"%08x\n" % zlib.crc32(text)


def _make(path: Path, size: int, *, filled: bool) -> None:
    path.unlink(missing_ok=True)  # truncating it would kill a process that has it mapped
    with path.open("xb") as file:
        file.truncate(size)
        if filled and sys.platform == "linux":
            # A write to a memory map that finds no room on the disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, size)
        os.fsync(file.fileno())


def _read(file: int, offset: int, size: int) -> Raw:
    raw = np.empty(size, np.uint8)
    done = 0
    while done < size:
        got = os.preadv(file, [raw.data[done:]], offset + done)
        if not got:
            raise ValueError("the file ends early")
        done += got
    return raw


def _write(file: int, record: bytes, offset: int) -> None:
    done = 0
    while done < len(record):
        done += os.pwrite(file, memoryview(record)[done:], offset + done)


# -- the form of a sample, and its record ----------------------------------------------------------


def taken_apart(sample: object) -> tuple[Form, bytes]:
    """Return the form of a sample, and its record.

    Raises:
        DatasetError: It holds something of a kind that cannot be kept.
    """
    raws: list[Raw] = []
    form = _form(sample, raws, "")
    parts: list[Any] = []
    for raw in raws:
        parts += [raw.data, b"\0" * (_padded(raw.size) - raw.size)]
    return form, b"".join(parts)


def put_together(form: Form, record: Raw) -> Batch:
    """Return the sample of a record; tensors and arrays share its memory."""
    raws = (record[at : at + leaf["bytes"]] for at, leaf in leaves_of(form))
    return _made(form, raws.__next__)


def leaves_of(form: Form) -> list[tuple[int, Form]]:
    """Return the offset of each leaf in a record, and its form."""
    found: list[tuple[int, Form]] = []
    at = 0
    for leaf in _leaves_in(form):
        found.append((at, leaf))
        at += _padded(leaf["bytes"])
    return found


def record_bytes(form: Form) -> int:
    """Return the size of a record."""
    return sum(_padded(leaf["bytes"]) for leaf in _leaves_in(form))


def column_of(form: Form) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Return the type and shape that the default collation gives a leaf; None: no numbers."""
    kind = form["is"]
    if kind == "tensor":
        return getattr(torch, form["dtype"]), tuple(form["shape"])
    if kind in ("array", "scalar"):
        array = np.empty(0, form["dtype"])
        return torch.from_numpy(array).dtype, tuple(form["shape"])
    if kind in ("int", "float"):
        return (torch.int64 if kind == "int" else torch.float64), ()
    return None


def with_form(form: Form, record: bytes) -> bytes:
    """Return the length of the form in 4 bytes, the form, and the record, one after the other."""
    text = json.dumps(form, separators=(",", ":")).encode()
    header = len(text).to_bytes(4, "little") + text
    return header.ljust(_padded(len(header)), b"\0") + record


def split(whole: Raw) -> tuple[Form, Raw]:
    """Return form and record; the inverse of :func:`with_form`."""
    start = whole[:4].tobytes()
    text = whole[4 : 4 + int.from_bytes(start, "little")].tobytes()
    return json.loads(text), whole[first_leaf_at(start) :]


def first_leaf_at(start: bytes) -> int:
    """Return the offset of the leaves in the result of :func:`with_form`, by its first 4 bytes."""
    return _padded(4 + int.from_bytes(start, "little"))


def _leaves_in(form: Form) -> Iterator[Form]:
    if "of" not in form:
        yield form
        return
    for part in form["of"]:
        yield from _leaves_in(part)


def _form(value: object, raws: list[Raw], path: str) -> Form:
    kind = type(value)
    if kind in (tuple, list):
        parts = [_form(part, raws, f"{path}[{i}]") for i, part in enumerate(value)]  # type: ignore[arg-type, var-annotated]
        return {"is": kind.__name__, "of": parts}
    if kind is dict:
        named: Any = value
        if not all(type(key) in (str, int) for key in named):
            raise _unsupported(path, f"a dict with the keys {list(named)!r:.200}")
        parts = [_form(part, raws, f"{path}[{key!r}]") for key, part in named.items()]
        return {"is": "dict", "keys": list(named), "of": parts}
    form, raw = _leaf(value, path)
    raws.append(raw)
    form["bytes"] = raw.size
    info = _info(value) if form["is"] == "picture" else None
    return {"is": "described", "of": [form, _form(info, raws, path)]} if info else form


def _leaf(value: object, path: str) -> tuple[Form, Raw]:
    kind = type(value)
    if value is None:
        return {"is": "None"}, np.empty(0, np.uint8)
    if isinstance(value, torch.Tensor):
        return _tensor(value, path)
    if kind.__name__ in _NUMBERS and kind in (int, float, bool):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _unsupported(path, f"the number {value}, which needs more than 64 bits")
        return {"is": kind.__name__}, _raw(np.array(value, _NUMBERS[kind.__name__]))
    if isinstance(value, str | bytes) and kind in (str, bytes):
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return {"is": kind.__name__}, np.frombuffer(data, np.uint8)
    if isinstance(value, np.generic | np.ndarray) and (
        isinstance(value, np.generic) or kind in (np.ndarray, np.memmap)
    ):
        kind_fits = value.dtype.kind in "biufc" and value.dtype.char not in "gG"
        if not (kind_fits and value.dtype.isnative):  # "gG": longer than double, with gaps
            raise _unsupported(path, f"an array of {value.dtype}")
        name = "scalar" if isinstance(value, np.generic) else "array"
        form = {"is": name, "dtype": value.dtype.str, "shape": list(value.shape)}
        return form, _raw(np.asarray(value))
    picture: Any = value
    if kind.__module__.startswith("PIL.") and getattr(picture, "mode", "") in _PICTURE_MODES:
        form = {"is": "picture", "mode": picture.mode, "size": list(picture.size)}
        return form, np.frombuffer(picture.tobytes(), np.uint8)
    raise _unsupported(path, f"a {kind.__module__}.{kind.__qualname__}")


def _info(picture: Any) -> dict[str, Any]:
    """Return what an image carries besides its pixels, such as EXIF, in Python's own types.

    What has no such type is left out.
    """
    found = {}
    for key, value in picture.info.items():  # what a file has behind the pixels was read with these
        plain = _plain(value)
        with suppress(DatasetError):
            _form({key: plain}, [], "")
            found[key] = plain
    return found


def _plain(value: object) -> object:
    """Return a value with PIL's own texts and fractions as str and float."""
    if type(value) is tuple:
        return tuple(map(_plain, value))
    if isinstance(value, str):
        return str(value)
    fraction = isinstance(value, Rational) and not isinstance(value, Integral)
    return float(value) if fraction else value  # type: ignore[arg-type]


def _tensor(value: torch.Tensor, path: str) -> tuple[Form, Raw]:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    tv = kind.__module__.startswith("torchvision.tv_tensors") and kind.__name__ in ("Image", "Mask")
    plain = value.layout is torch.strided and value.device.type == "cpu"
    if not (kind is torch.Tensor or tv) or not plain or value.requires_grad or value.is_quantized:
        raise _unsupported(path, f"a tensor of {name} on {value.device}, {value.layout}")
    # A view may only note that its numbers are conjugate or negative.
    resolved = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    form: Form = {
        "is": "tensor",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
    }
    if tv:
        form["class"] = kind.__name__
    # As bytes: NumPy does not have all of torch's types.
    return form, bytes_of(resolved).numpy()


def _raw(array: NDArray[Any]) -> Raw:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _made(form: Form, take: Callable[[], Raw]) -> Batch:
    kind = form["is"]
    if kind in ("tuple", "list"):
        parts = [_made(part, take) for part in form["of"]]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "dict":
        return {key: _made(part, take) for key, part in zip(form["keys"], form["of"], strict=True)}
    if kind == "described":
        picture, info = (_made(part, take) for part in form["of"])
        picture.info = info
        return picture
    raw = take()
    if kind == "tensor":
        return _made_tensor(form, raw)
    if kind in ("array", "scalar"):
        array = raw.view(form["dtype"]).reshape(form["shape"])
        return array if kind == "array" else array[()]
    if kind in _NUMBERS:
        return raw.view(_NUMBERS[kind])[0].item()
    if kind == "str":
        return raw.tobytes().decode("utf-8", "surrogatepass")
    if kind == "bytes":
        return raw.tobytes()
    if kind == "picture":
        from PIL import Image

        # A copy of the bytes: Pillow makes images that share memory with an array read-only.
        return Image.frombytes(form["mode"], tuple(form["size"]), raw.tobytes())
    return None


def _made_tensor(form: Form, raw: Raw) -> torch.Tensor:
    dtype, shape = getattr(torch, form["dtype"]), form["shape"]
    if math.prod(shape):
        tensor = torch.from_numpy(raw).view(dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    if "class" not in form:
        return tensor
    from torchvision import tv_tensors

    kind: type[torch.Tensor] = {"Image": tv_tensors.Image, "Mask": tv_tensors.Mask}[form["class"]]
    return tensor.as_subclass(kind)


def _unsupported(path: str, what: str) -> DatasetError:
    where = f"at sample{path}" if path else "as a sample"
    return DatasetError(
        f"The dataset returns {what} {where}, which cannot be cached. What can be: {_SUPPORTED}."
    )


def _padded(size: int) -> int:
    return -(-size // 16) * 16

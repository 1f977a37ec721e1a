"""Files that a dataset lists: their paths in one block of memory, and reading them ahead."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import index as as_index
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from lightning_fastdata.host import clock
from lightning_fastdata.sources.source import reads_ahead
from lightning_fastdata.tree import has_method, held

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UNPACKED_TOGETHER: Final = 4096

_LOOKED_AT, _ONE_OF = 4, 8
"""Most files looked at to tell whether all are in memory, and the files that one stands for."""
_MOST_BYTES: Final = 4 << 20
"""Most bytes of a file that are read ahead: a dataset may need only the start of a video."""
_QUICK_S: Final = 2e-4
"""Seconds to reopen a file from which on its file system seems to ask a server each time."""
ADVISABLE: Final = {"posix_fadvise", "RWF_NOWAIT"} <= vars(os).keys()
"""Whether the system can read files ahead, and tell whether they are in memory (Linux)."""


class PackedStrings(Sequence[str]):
    """Strings, such as the paths of a dataset, in two arrays instead of one object each.

    It reads like a list of ``str``: indices from either end, slices (packed as well), ``in``,
    iteration, comparison with a list. Use it for the attribute in which a dataset keeps its paths:

    - Starting a worker with ``spawn`` or ``forkserver`` sends the dataset to it. A million strings
      are pickled and made again one by one, these are copied as two blocks.
    - A forked worker shares its parent's memory until one of them writes to it, and reading a
      ``str`` writes to it, because its references are counted. Workers that read a list of a
      million paths end up with a copy each; here, no references are counted.

    Args:
        strings: What to pack; any ``str``, also paths that are not valid UTF-8.

    Raises:
        TypeError: Something is not a ``str`` (call ``os.fspath`` on paths), or all of it is one.

    Example:
        >>> paths = PackedStrings(["a.jpg", "b.jpg", "c.jpg"])
        >>> paths[-1], paths[:2] == ["a.jpg", "b.jpg"]
        ('c.jpg', True)
    """

    __slots__ = ("_bytes", "_ends")
    __hash__ = None  # type: ignore[assignment]  # equal to a list, which has none either

    def __init__(self, strings: Iterable[str] = ()) -> None:
        if isinstance(strings, str):  # its letters would be packed
            raise TypeError(f"{strings!r} is one str; give a list of them.")
        encoded = [_encoded(string) for string in strings]
        self._bytes = b"".join(encoded)
        self._ends = _ends([len(string) for string in encoded])

    @classmethod
    def _of(cls, data: bytes, ends: NDArray[np.int64]) -> PackedStrings:
        made = cls.__new__(cls)
        made._bytes, made._ends = data, ends
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the strings take, 8 more for each of them included."""
        return int(self._ends[-1] - self._ends[0]) + self._ends.nbytes

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> PackedStrings: ...
    def __getitem__(self, index: int | slice) -> str | PackedStrings:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return PackedStrings(self[i] for i in range(start, stop, step))
            # A slice shares the bytes of the whole.
            return PackedStrings._of(self._bytes, self._ends[start : max(start, stop) + 1])
        number, length = as_index(index), len(self)
        if not -length <= number < length:
            raise IndexError(f"There is no string {number}: there are {length}.")
        number %= length
        return _decoded(self._bytes[self._ends[number] : self._ends[number + 1]])

    def __iter__(self) -> Iterator[str]:
        # In parts: single numbers of an array are slow, and a list of all would take much memory.
        for start in range(0, len(self), _UNPACKED_TOGETHER):
            ends = self._ends[start : start + _UNPACKED_TOGETHER + 1].tolist()
            for begin, end in pairwise(ends):
                yield _decoded(self._bytes[begin:end])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | PackedStrings):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3])) + (", ..." if len(self) > 3 else "")
        return f"PackedStrings([{shown}], {len(self)} in {self.nbytes} bytes)"

    def __reduce__(self) -> tuple[object, ...]:
        sizes = np.diff(self._ends)
        smallest = np.min_scalar_type(sizes.max(initial=0))
        data = self._bytes[self._ends[0] : self._ends[-1]]
        return _unpickled, (data, sizes.astype(smallest))


def _ends(sizes: NDArray[Any] | list[int]) -> NDArray[np.int64]:
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    ends.flags.writeable = False
    return ends


def _unpickled(data: bytes, sizes: NDArray[np.unsignedinteger]) -> PackedStrings:
    return PackedStrings._of(data, _ends(sizes))


def _encoded(string: str) -> bytes:
    if not isinstance(string, str):
        raise TypeError(f"{string!r} is a {type(string).__name__}, not a str.")
    # Paths that are not UTF-8 hold lone surrogates; so every str comes back as it was.
    return string.encode("utf-8", "surrogatepass")


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def files_of(dataset: object, indices: Sequence[int]) -> tuple[str, ...] | None:
    """Return the files of samples, if the dataset lists them as torchvision's folders do."""
    while type(dataset) is Subset:
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        each = [_of_part(dataset, index) for index in indices]
        files = [of_one[0] for of_one in each if of_one is not None]
        return tuple(files) if len(files) == len(each) else None
    if has_method(dataset, "path_of"):  # a FastImageFolder has it
        named: Any = dataset
        return tuple(named.path_of(index) for index in indices)
    # No property is read: it might open a file that has to be opened in the workers.
    listed: object = held(dataset, "samples") or held(dataset, "imgs")
    if not isinstance(listed, Sequence):
        return None
    found = [listed[index] for index in indices]
    paths = [one[0] if isinstance(one, tuple | list) and one else one for one in found]
    known = all(isinstance(path, str | bytes | os.PathLike) for path in paths)
    return tuple(os.fsdecode(path) for path in paths) if known else None


def _of_part(dataset: ConcatDataset[Any], index: int) -> tuple[str, ...] | None:
    """Return the file of one sample of datasets that are put together."""
    index = index + len(dataset) if index < 0 else index
    part = bisect_right(dataset.cumulative_sizes, index)
    begin = dataset.cumulative_sizes[part - 1] if part else 0
    return files_of(dataset.datasets[part], [index - begin])


class ColdFiles:
    """Has the system begin to read files that are not in memory.

    It does so on Linux alone. It does nothing on a file system that asks a server whenever a file
    is opened, nor if files cannot be read.
    """

    def __init__(self) -> None:
        self._able = ADVISABLE
        self._looked = False

    def __reduce__(self) -> tuple[type[ColdFiles], tuple[()]]:
        return ColdFiles, ()  # another process finds out for itself

    def begin(self, files: Sequence[str]) -> None:
        """Look at some of the files, and begin to read all if one of these is not in memory."""
        if not self._able:
            return
        looked_at = files[:: max(_ONE_OF, -(-len(files) // _LOOKED_AT))]
        try:
            if not any(map(_is_cold, looked_at)):
                return
            if not self._looked:
                self._looked = True
                self._able = _opens_quickly(looked_at[0])
            for file in files if self._able else ():
                _begin_to_read(file)
        except OSError:  # reading the file will raise it again
            self._able = False


class ListedFiles:
    """The files of a dataset that lists them as torchvision's folders do, read ahead."""

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset
        self._cold = ColdFiles()
        inner = dataset
        while type(inner) is Subset:
            inner = inner.dataset
        kept = held(inner, "pictures") is not None  # a FastImageFolder with a cache
        listed = has_method(inner, "__getitem__") and not isinstance(inner, ConcatDataset)
        listed = listed and not reads_ahead(dataset)
        self._able = ADVISABLE and listed and not kept

    def begin(self, indices: object) -> None:
        """Begin to read the files of samples, if they are not in memory."""
        if not self._able or not isinstance(indices, Sequence) or len(indices) < 2:
            return
        try:
            # The first file is read at once anyway.
            files = files_of(self._dataset, [as_index(index) for index in indices[1:]])
        except Exception:  # the dataset lists something else
            files = None
        self._able = files is not None
        if files is not None:
            self._cold.begin(files)


def begin_to_read(descriptor: int, offset: int, size: int) -> None:
    """Have the system read a part of an open file into memory, without waiting for it."""
    if ADVISABLE:
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)


def _open(path: str) -> tuple[int, int] | None:
    """Open a file and return its descriptor and size; None for a pipe, a device, an empty file."""
    status = os.stat(path)  # noqa: PTH116 - quicker, and paths may be no text
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return None
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), status.st_size


def _is_cold(path: str) -> bool:
    opened = _open(path)
    if opened is None:
        return False
    descriptor, size = opened
    try:
        os.preadv(descriptor, [bytearray(1)], size // 2, os.RWF_NOWAIT)
    except OSError:  # EAGAIN, or the file system cannot say
        return True
    finally:
        os.close(descriptor)
    return False


def _begin_to_read(path: str) -> None:
    opened = _open(path)
    if opened is not None:
        descriptor, size = opened
        try:
            begin_to_read(descriptor, 0, min(size, _MOST_BYTES))
        finally:
            os.close(descriptor)


def _opens_quickly(path: str) -> bool:
    times_s = []
    for _ in range(3):
        began_s = clock.monotonic()
        opened = _open(path)
        times_s.append(clock.monotonic() - began_s)
        if opened is not None:
            os.close(opened[0])
    return min(times_s) < _QUICK_S

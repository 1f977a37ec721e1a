"""A read-only list of strings that is one block of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import index as as_index
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UNPACKED_TOGETHER: Final = 4096


class PackedStrings(Sequence[str]):
    """Strings, such as the paths of a dataset, in two arrays instead of one object each.

    It reads like a list of ``str``: indices from either end, slices (packed as well), ``in``,
    iteration, comparison with a list. Use it for the attribute in which a dataset keeps its paths:

    - Starting a worker with ``spawn`` or ``forkserver`` sends the dataset to it. A million strings
      are pickled and made again one by one, these are copied as two blocks.
    - A forked worker shares its parent's memory until it is written to, and looking at a
      ``str`` is writing, because its references are counted. Workers that read a list of a million
      paths end up with a copy each; there is nothing to count here.

    Args:
        strings: What to pack; any ``str``, also paths that are not valid UTF-8.

    Raises:
        TypeError: Something is not a ``str``; call ``os.fspath`` on paths.

    Example:
        >>> paths = PackedStrings(["a.jpg", "b.jpg", "c.jpg"])
        >>> paths[-1], paths[:2] == ["a.jpg", "b.jpg"]
        ('c.jpg', True)
    """

    __slots__ = ("_bytes", "_ends")
    __hash__ = None  # type: ignore[assignment]  # equal to a list, which has none either

    def __init__(self, strings: Iterable[str] = ()) -> None:
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
        """Bytes of memory for the strings, and 8 for each of them."""
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
        # Some at a time: single numbers of an array are slow, and a list of all is what we avoid.
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

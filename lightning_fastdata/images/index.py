"""Which files a dataset has, packed so that a million of them are cheap to hold and to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index as as_index
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
import numpy.typing as npt

from lightning_fastdata.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

_UNPACKED_TOGETHER: Final = 4096


class PackedStrings(Sequence[str]):
    """Strings, such as the paths of a dataset, in two arrays instead of one object each.

    It reads like a list of ``str``: indices from either end, slices (packed as well), ``in``,
    iteration, comparison with a list. Use it for the attribute in which a dataset keeps its paths:

    - Starting a worker with ``spawn`` or ``forkserver`` sends the dataset to it. A million strings
      are pickled and made again one by one, these are copied as two blocks.
    - A forked worker shares its parent's memory until somebody writes to it, and looking at a
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
        ends = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(string) for string in encoded], out=ends[1:])
        self._set(b"".join(encoded), ends)

    def _set(self, data: bytes, ends: NDArray[np.int64]) -> None:
        # A slice shares the bytes of the whole.
        self._bytes, self._ends = data, ends
        ends.flags.writeable = False

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
            return self._part(index)
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

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = np.diff(self._ends)
        smallest = np.min_scalar_type(sizes.max(initial=0))
        data = self._bytes[self._ends[0] : self._ends[-1]]
        return _unpickled, (data, sizes.astype(smallest))

    def _part(self, part: slice) -> PackedStrings:
        start, stop, step = part.indices(len(self))
        if step != 1:
            return PackedStrings(self[i] for i in range(start, stop, step))
        made = PackedStrings.__new__(PackedStrings)
        made._set(self._bytes, self._ends[start : max(start, stop) + 1])
        return made


def _unpickled(data: bytes, sizes: NDArray[Any]) -> PackedStrings:
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    made = PackedStrings.__new__(PackedStrings)
    made._set(data, ends)
    return made


def _encoded(string: str) -> bytes:
    if not isinstance(string, str):
        raise TypeError(f"{string!r} is a {type(string).__name__}, not a str.")
    # Paths that are not UTF-8 hold lone surrogates; so every str comes back as it was.
    return string.encode("utf-8", "surrogatepass")


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


class FolderError(DatasetError, FileNotFoundError):
    """An image folder is missing, or has no classes or no files.

    Also a ``FileNotFoundError``, which is what torchvision's ``ImageFolder`` raises.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PathIndex:
    """Paths and class numbers of all samples: three blocks of memory instead of a list of tuples.

    A list of 1.28 million ``(path, class)`` tuples takes about a second to send to a side process;
    this takes the time of copying its bytes.
    """

    paths: PackedStrings
    """Path of each sample."""
    targets: npt.NDArray[np.int32]
    """Class number of each sample."""

    @classmethod
    def pack(cls, samples: Sequence[tuple[str, int]]) -> PathIndex:
        """Pack ``(path, class)`` pairs."""
        return cls(
            paths=PackedStrings(path for path, _ in samples),
            targets=np.fromiter((target for _, target in samples), np.int32, len(samples)),
        )

    def __len__(self) -> int:
        return len(self.targets)

    def path(self, index: int) -> str:
        """Return the path of sample ``index``, 0 <= index < len."""
        return self.paths[index]

    def samples(self) -> list[tuple[str, int]]:
        """Unpack into ``(path, class)`` pairs."""
        return list(zip(self.paths, self.targets.tolist(), strict=True))


def scan_folder(
    root: str, *, is_valid_file: Callable[[str], bool] | None = None, allow_empty: bool = False
) -> tuple[list[str], dict[str, int], PathIndex]:
    """Find classes and files with torchvision's own functions, so that they are ``ImageFolder``'s.

    Args:
        root: Folder with one sub-folder per class.
        is_valid_file: Which paths belong to the dataset; None: the extensions of ``ImageFolder``.
        allow_empty: Whether a class may have no files.

    Returns:
        Class names, class name to number, and the index of the samples.

    Raises:
        FolderError: If the folder does not exist, has no class folders, or a class has no files.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    try:
        classes, class_to_idx = find_classes(root)
        samples = make_dataset(
            root,
            class_to_idx,
            extensions=IMG_EXTENSIONS if is_valid_file is None else None,
            is_valid_file=is_valid_file,
            allow_empty=allow_empty,
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FolderError(
            f"{root!r} cannot be used as an image folder: {error}. "
            f"Put the images of each class into a folder of its own, {root}/<class>/<image>.jpg, "
            "or allow classes without images with allow_empty=True."
        ) from error
    return classes, class_to_idx, PathIndex.pack(samples)

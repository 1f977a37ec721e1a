"""The files that a dataset lists, and what reads them ahead."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from operator import index as as_index
from typing import Any, Final

from torch.utils.data import Subset

from lightning_fastdata.host import clock
from lightning_fastdata.sources.source import reads_ahead
from lightning_fastdata.tree import has_method, held

_LOOKED_AT, _ONE_OF = 4, 8
"""By so many files, one of eight at most, it is known whether the others are in memory."""
_MOST_BYTES: Final = 4 << 20
"""Of one file: a video is not to be read for its first frames."""
_QUICK_S: Final = 2e-4
"""To open a file that was just open; a network file system asks its server again."""
ADVISABLE: Final = {"posix_fadvise", "RWF_NOWAIT"} <= vars(os).keys()


def files_of(dataset: object, indices: Sequence[int]) -> tuple[str, ...] | None:
    """Return the files of samples, of a dataset that lists them as torchvision's folders do."""
    while type(dataset) is Subset:
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    if has_method(dataset, "path_of"):  # as FastImageFolder
        named: Any = dataset
        return tuple(named.path_of(index) for index in indices)
    # Another class's property may open what is to be opened in the workers.
    listed: object = held(dataset, "samples") or held(dataset, "imgs")
    if not isinstance(listed, Sequence):
        return None
    found = [listed[index] for index in indices]
    paths = [one[0] if isinstance(one, tuple | list) and one else one for one in found]
    known = all(isinstance(path, str | bytes | os.PathLike) for path in paths)
    return tuple(os.fsdecode(path) for path in paths) if known else None


class ColdFiles:
    """Has the system begin to read files where they are not in memory.

    On Linux alone. On a file system where to open a file once more would cost another answer of a
    server, and where files cannot be read, it does nothing.
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
        except OSError:  # what is wrong with a file is told when it is read
            self._able = False


class ListedFiles:
    """The files of a dataset that lists them as torchvision's folders do, read ahead."""

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset
        self._cold = ColdFiles()
        inner = dataset
        while type(inner) is Subset:
            inner = inner.dataset
        kept = held(inner, "pictures") is not None  # of FastImageFolder
        listed = has_method(inner, "__getitem__") and not reads_ahead(dataset)
        self._able = ADVISABLE and listed and not kept

    def begin(self, indices: object) -> None:
        """Begin to read the files of samples, if they are not in memory."""
        if not self._able or not isinstance(indices, Sequence) or len(indices) < 2:
            return
        try:
            # The first one is read at once anyway.
            files = files_of(self._dataset, [as_index(index) for index in indices[1:]])
        except Exception:  # a dataset of another kind
            files = None
        self._able = files is not None
        if files is not None:
            self._cold.begin(files)


def begin_to_read(descriptor: int, offset: int, size: int) -> None:
    """Have the system read a part of an open file into memory; returns at once."""
    if ADVISABLE:
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)


def _open(path: str) -> tuple[int, int] | None:
    """Return a descriptor and the size of a file; None for a pipe, a device, an empty file."""
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

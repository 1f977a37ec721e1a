"""Files as a source, on this machine or in object storage, and what reads them ahead."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import index as as_index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from torch.utils.data import Subset

from lightning_fastdata.errors import DatasetError, FastDataWarning, require
from lightning_fastdata.host import clock
from lightning_fastdata.images.folder import FastImageFolder, files_of
from lightning_fastdata.images.packed import PackedStrings
from lightning_fastdata.sources.source import OpenedInEachProcess, Raw, reads_ahead
from lightning_fastdata.tree import has_method

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_LOOKED_AT, _ONE_OF = 4, 8
"""By so many files, one of eight at most, it is known whether the others are in memory."""
_MOST_BYTES: Final = 4 << 20
"""Of one file: a video is not to be read for its first frames."""
_QUICK_S: Final = 2e-4
"""To open a file that was just open; a network file system asks its server again."""
ADVISABLE: Final = {"posix_fadvise", "RWF_NOWAIT"} <= vars(os).keys()
_PARALLEL: Final = 64


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
        kept = isinstance(inner, FastImageFolder) and inner.pictures is not None
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


class FileSource:
    """A file a record.

    Args:
        paths: Of the files.
        parallel_reads: As of :class:`Source`; more than 1 for a network file system.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]], *, parallel_reads: int = 1) -> None:
        self.paths = PackedStrings(os.fspath(path) for path in paths)
        self.parallel_reads = parallel_reads
        self._cold = ColdFiles()

    def __len__(self) -> int:
        return len(self.paths)

    def will_read(self, indices: Sequence[int]) -> None:
        """Have the system begin to read files that are not in memory."""
        self._cold.begin([self.paths[index] for index in indices])

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return the contents of files."""
        return [Path(self.paths[index]).read_bytes() for index in indices]

    def name_of(self, index: int) -> str:
        """Return the path of a file."""
        return self.paths[index]


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


class ObjectSource(OpenedInEachProcess["ObjectStore"]):
    """An object a record, read by obstore, which also has retries, time-outs and credentials.

    Its clients do not survive a fork, so each process opens its own, and one that was forked from a
    process that has one refuses. Workers are such processes only if samples were read in the
    training process before (``num_workers=0``).

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``https://host/path``, ``file:///``, ...
        keys: Of the objects, below ``url``; None: all there are, in the order of their names. A
            cache knows sizes and versions of those that were listed alone, and says so of others.
        suffix: Of the keys that count, where all are listed.
        parallel_reads: Objects that a worker asks for at once.
        **config: For ``obstore.store.from_url``: ``config``, ``client_options``,
            ``retry_config``, ``credential_provider``, ...

    Raises:
        MissingPackageError: obstore is not installed (``lightning-fastdata[objects]``).
        DatasetError: The objects cannot be listed.
    """

    survives_forks = False

    def __init__(
        self,
        url: str,
        keys: Iterable[str] | None = None,
        *,
        suffix: str = "",
        parallel_reads: int = _PARALLEL,
        **config: Any,
    ) -> None:
        require("obstore", extra="objects", what="ObjectSource")
        self.url = url.rstrip("/")
        self.config = config
        self.parallel_reads = parallel_reads
        self.listed: str | None = None
        """Digest of what the listing said of sizes and versions; None: the keys were given."""
        if keys is None:
            try:
                keys, self.listed = self.asked_apart(partial(_list, self, suffix))
            except DatasetError as error:
                raise DatasetError(
                    f"The objects of {self.url} cannot be listed: {error}. Check address and "
                    "rights, or give their keys."
                ) from error
        self.keys = PackedStrings(keys)

    def __len__(self) -> int:
        return len(self.keys)

    def open(self) -> ObjectStore:
        """Return a client of this process."""
        from obstore.store import from_url

        return from_url(self.url, **self.config)

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return the contents of objects, one after the other."""
        import obstore

        store = self.opened()
        return [memoryview(obstore.get(store, self.keys[i]).bytes()) for i in indices]

    def name_of(self, index: int) -> str:
        """Return the address of an object."""
        return f"{self.url}/{self.keys[index]}"

    def recognised_by(self) -> tuple[object, ...]:
        """Return what tells these objects from others: without credentials, which change."""
        if self.listed is None:
            _tell_names_alone(self.keys)
        return self.url, _endpoints(self.config), self.keys, self.listed


def _list(source: ObjectSource, suffix: str) -> tuple[list[str], str]:
    """Return the keys of all objects, and a digest of what is said of their sizes and versions."""
    import obstore

    found: dict[str, str] = {}
    for page in obstore.list(source.open()):
        for each in cast("Sequence[Mapping[str, Any]]", page):
            if each["path"].endswith(suffix):
                version = each.get("e_tag") or each.get("last_modified")
                found[each["path"]] = f"{each['path']}\0{each['size']}\0{version}\n"
    keys = sorted(found)
    digest = hashlib.blake2b(digest_size=16)
    for key in keys:
        digest.update(found[key].encode())
    return keys, digest.hexdigest()


def _tell_names_alone(names: PackedStrings) -> None:
    warnings.warn(
        f"A cache knows these {len(names):,} files by their names alone ({names[0]}, ...): if one "
        "changes, its old bytes may be handed out. Have them listed (ObjectSource without keys), "
        "or give the cache a key=... that you change when they change.",
        FastDataWarning,
        stacklevel=3,
    )


def _endpoints(options: object) -> list[str]:
    """Return the addresses of servers among options."""
    if not isinstance(options, Mapping):
        return []
    found = []
    for name, value in options.items():
        if isinstance(value, str) and "endpoint" in str(name).lower():
            found.append(value)
        found += _endpoints(value)
    return sorted(found)

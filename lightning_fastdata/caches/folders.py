"""Where caches have their folders, which are in use or may be removed, and what all caches do."""

from __future__ import annotations

import atexit
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from torch.utils.data import DataLoader, Dataset

from lightning_fastdata.caches.identity import identity
from lightning_fastdata.caches.sample_file import SampleFile, locked
from lightning_fastdata.caches.sample_form import Form
from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.host import clock
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.system_calls import SharedFlags, cache_folder, private_folder

CacheFolder: TypeAlias = str | os.PathLike[str]
"""``"disk"``, ``"ram"`` or a folder."""

_SHARED_MEMORY: Final = Path("/dev/shm")
_USERS: Final = "users"
"""The file of a cache that processes hold while they use it; its time is that of the last one."""
_FORGOTTEN_AFTER_S: Final = 30 * 86_400
_FILLED_AT_ONCE: Final = 32
_held: dict[Path, int] = {}
"""Open files, by the folder of the cache; of forked processes, too."""


def cache_path(dataset: object, folder: CacheFolder, key: str | None = None) -> Path:
    """Return the folder of a dataset's cache, which need not exist.

    Args:
        dataset: Whose cache.
        folder: Where caches have folders of their own.
        key: In place of the dataset's state.

    Raises:
        OptionsError: There is no such memory, or the key cannot be a name.
        DatasetError: The dataset cannot be recognised in another run, and there is no key.
    """
    return cache_root(folder) / _folder_name(dataset, key)


def is_memory(folder: CacheFolder) -> bool:
    """Return whether a cache is to be in memory."""
    return os.fspath(folder) == "ram"


def cache_root(folder: CacheFolder) -> Path:
    """Return the folder in which caches have folders of their own.

    Raises:
        OptionsError: There is no such memory.
    """
    name = os.fspath(folder)
    if name == "disk":
        return cache_folder() / "samples"
    if not is_memory(folder):
        return Path(name).expanduser()
    if not _SHARED_MEMORY.is_dir():
        raise OptionsError('folder="ram" needs /dev/shm (Linux). Give a folder.')
    return _SHARED_MEMORY / f"lightning_fastdata-{os.getuid()}"


def hold(folder: Path, *, until_the_end: bool = False) -> None:
    """Say that this process, and those that it forks, use a cache.

    With ``until_the_end`` it is removed with the last process that holds it; one whose processes
    were killed is removed by the next that comes here.
    """
    if folder in _held:
        return
    if not until_the_end:
        _held[folder] = _share(folder)
        return
    private_folder(folder.parent)
    with locked(folder.parent):
        for other in folder.parent.iterdir():
            if other.is_dir() and other != folder:
                _remove_if_free(other)
        folder.mkdir(mode=0o700, exist_ok=True)
        _held[folder] = _share(folder)
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:
            os.close(_held.pop(folder))
            _remove_if_free(folder)

    atexit.register(end)


def remove_forgotten(root: Path, now_s: float | None = None) -> None:
    """Remove the caches in a folder that no process holds, nor has held for 30 days."""
    before_s = (clock.unix_s() if now_s is None else now_s) - _FORGOTTEN_AFTER_S
    for folder in root.iterdir():
        try:
            old = (folder / _USERS).stat().st_mtime < before_s
        except OSError:
            continue  # no cache of ours, or one that is being made
        if old and (folder / "manifest.json").is_file():
            _remove_if_free(folder)


def open_or_make(
    folder: Path, existing: Callable[[], SampleFile | None], make: Callable[[], SampleFile]
) -> SampleFile:
    """Return the cache of a folder; the first process that comes makes it.

    Args:
        folder: Of the cache.
        existing: Returns what is there; None if there is nothing.
        make: Makes the cache.
    """
    file = existing()
    if file is None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_forgotten(folder.parent)
        with locked(folder):
            file = existing()  # another process may have made it by now
            if file is None:
                file = make()
    return file


def room_bytes(folder: Path, *, in_memory: bool) -> int:
    """Return what a cache may take if nothing is said: half the disk, a quarter of the memory."""
    if in_memory:
        return read_host_memory().available_bytes // 4
    return shutil.disk_usage(folder).free // 2


def warn_of_full(folder: Path, error: OSError) -> None:
    """Say that nothing more is written to a cache."""
    warnings.warn(
        f"No more samples are written to the cache {folder}: {error.strerror or error}. They are "
        "made each time. Make room there, or give another folder.",
        FastDataWarning,
        stacklevel=3,
    )


@contextmanager
def choosing(folder: CacheFolder) -> Iterator[None]:
    """Let one process at a time look which caches a folder has, and make one."""
    root = cache_root(folder)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(root):
        yield


def _folder_name(dataset: object, key: str | None) -> str:
    if key is None:
        return identity(dataset)
    if not key or not all(sign.isalnum() or sign in "-_." for sign in key) or key.startswith("."):
        raise OptionsError(f"key is {key!r}; use letters, digits, '-', '_' and '.'.")
    return f"key-{key}"


def _share(folder: Path) -> int:
    import fcntl

    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # It stays open, as the lock is that of the open file. Forked workers have it, too.
        users = os.open(folder / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(users, fcntl.LOCK_SH)
        try:
            if os.fstat(users).st_ino == (folder / _USERS).stat().st_ino:
                os.utime(users)
                return users
        except FileNotFoundError:
            pass  # removed by another process while this one waited for it
        os.close(users)


def _remove_if_free(folder: Path) -> None:
    import fcntl

    try:
        users = os.open(folder / _USERS, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # in use
    finally:
        os.close(users)


class Kept:
    """What is kept of a dataset or source in a folder of its own: one record for each index.

    Args:
        owner: Whose records.
        folder: As :func:`cache_path` takes it, like ``key``.
        max_bytes: What the records may take; None: a share of what is free.
        key: In place of the owner's state.

    Raises:
        OptionsError: ``max_bytes`` is impossible, or :func:`cache_path` raises it.
        DatasetError: As of :func:`cache_path`.
    """

    def __init__(
        self, owner: Sized, folder: CacheFolder, *, max_bytes: int | None, key: str | None
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise OptionsError(f"max_bytes is {max_bytes!r}; give bytes, or None for the default.")
        self.folder = cache_path(owner, folder, key)
        self._in_memory = is_memory(folder)
        self._max_bytes = max_bytes
        self._length = len(owner)
        # One more than there are records: that the cache was compared with its owner.
        self._known = SharedFlags(self._length + 1)
        self._file: SampleFile | None = None
        self._full = False
        if self._in_memory:
            hold(self.folder, until_the_end=True)

    def __len__(self) -> int:
        return self._length

    @property
    def stored(self) -> int:
        """How many records are in the cache."""
        file = self._existing()
        return 0 if file is None else file.stored()

    @property
    def stored_bytes(self) -> int:
        """How many bytes the records in the cache take."""
        file = self._existing()
        return 0 if file is None else file.used_bytes()

    def fill(self, num_workers: int = 0) -> None:
        """Make or read all records that are not in the cache, and keep them, before a training.

        It ends early where no more records find room.

        Args:
            num_workers: Processes that do it; 0: this one does.
        """
        filled = _Filled(self)
        for kept in DataLoader(filled, _FILLED_AT_ONCE, num_workers=num_workers, collate_fn=any):
            if not kept:
                break
        self.flush()

    def _fill(self, indices: Sequence[int]) -> list[bool]:
        """Make or read these records, and return which of them are in the cache now."""
        raise NotImplementedError

    def flush(self) -> None:
        """Wait until the disk has all records that were written."""
        file = self._existing()
        if file is not None:
            file.flush()

    def _existing(self) -> SampleFile | None:
        return self._file or SampleFile.open(self.folder, self._length, self._known)

    def _new_file(self, *, form: Form | None, about: dict[str, Any]) -> SampleFile:
        most = self._max_bytes or room_bytes(self.folder, in_memory=self._in_memory)
        return SampleFile.create(
            self.folder, self._length, self._known, form=form, max_bytes=most, about=about
        )

    def _keep(self, file: SampleFile, index: int, record: object) -> None:
        if self._full:
            return
        try:
            file.write(index, record)
        except OSError as error:
            self._full = True
            warn_of_full(self.folder, error)


class _Filled(Dataset[bool]):
    """For each record of a cache, whether it is there after it was made or read."""

    def __init__(self, cache: Kept) -> None:
        self._cache = cache

    def __len__(self) -> int:
        return len(self._cache)

    def __getitems__(self, indices: list[int]) -> list[bool]:
        return self._cache._fill(indices)

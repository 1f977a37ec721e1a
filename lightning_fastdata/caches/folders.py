"""Where caches have their folders, and which of these are in use or may be removed."""

from __future__ import annotations

import atexit
import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeAlias

from lightning_fastdata.caches.identity import identity
from lightning_fastdata.caches.sample_file import SampleFile, locked
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host import clock
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.system_calls import cache_folder, private_folder

CacheFolder: TypeAlias = str | os.PathLike[str]
"""``"disk"``, ``"ram"`` or a folder."""

_WORDS: Final = ("disk", "ram")
_ALIKE: Final = 0.75
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_SHARED_MEMORY: Final = Path("/dev/shm")
_USERS: Final = "users"
"""The file of a cache that processes hold while they use it; its time is that of the last one."""
_FORGOTTEN_AFTER_S: Final = 30 * 86_400
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


def check_folder(folder: object, words: Sequence[str] = _WORDS) -> None:
    """Raise OptionsError unless this may be the place of a cache: one of the words, or a folder.

    A text that is nearly a word is taken for one that was misspelt.
    """
    given = isinstance(folder, str | os.PathLike) and os.fsdecode(folder)
    if not given or _ADDRESS.match(given):
        raise OptionsError(
            f"The place of a cache is {folder!r}. Give {', '.join(map(repr, words))} or a folder "
            "of this machine."
        )
    if isinstance(folder, str) and folder not in words and _is_nearly_a_word(folder):
        raise OptionsError(
            f"The place of a cache is {folder!r}. Give {', '.join(map(repr, words))}; or "
            f"'./{folder}', if a folder of that name is meant."
        )


def _is_nearly_a_word(text: str) -> bool:
    text, words = text.casefold(), ("auto", *_WORDS)
    mixed_up = sorted(text) in map(sorted, words)
    alike = mixed_up or difflib.get_close_matches(text, words, cutoff=_ALIKE)
    return text.isalpha() and bool(alike)


def cache_root(folder: CacheFolder) -> Path:
    """Return the folder in which caches have folders of their own.

    Raises:
        OptionsError: There is no such memory, or it is no folder.
    """
    check_folder(folder)
    if is_memory(folder):
        if not _SHARED_MEMORY.is_dir():
            raise OptionsError('folder="ram" needs /dev/shm (Linux). Give a folder.')
        return _SHARED_MEMORY / f"lightning_fastdata-{os.getuid()}"
    try:
        root = cache_folder() / "samples" if folder == "disk" else Path(folder).expanduser()
    except RuntimeError as error:
        raise OptionsError(
            f"There is no place for a cache: {error} Set LIGHTNING_FASTDATA_CACHE to a folder."
        ) from error
    check_folder(root)  # what the environment says may be an address, too
    return root


def hold(folder: Path, *, until_the_end: bool = False) -> None:
    """Say that this process, and those that it forks, use a cache.

    With ``until_the_end`` it is removed with the last process that holds it; one whose processes
    were killed is used by the next of the same name, or removed by the next of another one.

    Raises:
        OptionsError: It belongs to another user, is a link, or cannot be written to.
    """
    if folder in _held:
        return
    if not until_the_end:
        with _used(folder):
            _held[folder] = _share(folder)
        return
    with _used(folder):
        private_folder(folder.parent)
        with locked(folder.parent):
            for other in folder.parent.iterdir():
                if other.is_dir() and other != folder:
                    _remove_if_free(other)
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
    with suppress(OSError):  # others may have the folder, and let nobody list it
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
        with _used(folder):
            private_folder(folder)
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
    while not folder.exists():  # it may be yet to be made
        folder = folder.parent
    return shutil.disk_usage(folder).free // 2


def is_there(folder: Path) -> bool:
    """Return whether a cache has its folder.

    Raises:
        OptionsError: It belongs to another user, or is a link.
    """
    with _used(folder):
        return private_folder(folder, make=False) is not None


@contextmanager
def _used(folder: Path) -> Iterator[None]:
    """Name another place where this one cannot be used."""
    try:
        yield
    except (OSError, OptionsError) as error:
        raise OptionsError(
            f"The cache {folder} cannot be used: {str(error).rstrip('.')}. Name another folder "
            "(cache=... of a data module), or set LIGHTNING_FASTDATA_CACHE to one."
        ) from error


def _folder_name(dataset: object, key: str | None) -> str:
    if key is None:
        return identity(dataset)
    if not key or not all(sign.isalnum() or sign in "-_." for sign in key) or key.startswith("."):
        raise OptionsError(f"key is {key!r}; use letters, digits, '-', '_' and '.'.")
    return f"key-{key}"


def _share(folder: Path) -> int:
    import fcntl

    while True:
        private_folder(folder)
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

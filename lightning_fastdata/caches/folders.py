"""Where caches have their folders: on disk, or in memory until a process ends."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Final, TypeAlias

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.system_calls import cache_folder, private_folder

CacheFolder: TypeAlias = str | os.PathLike[str]
"""``"disk"``, ``"ram"`` or a folder."""

_WORDS: Final = ("disk", "ram")
_ALIKE: Final = 0.75
_SHARED_MEMORY: Final = Path("/dev/shm")
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


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
        OptionsError: It is no folder of this machine, or there is no such memory.
    """
    check_folder(folder)
    if folder == "ram":
        return _memory_root()
    try:
        root = cache_folder() / "samples" if folder == "disk" else Path(folder).expanduser()
    except RuntimeError as error:
        raise OptionsError(
            f"There is no place for a cache: {error} Set LIGHTNING_FASTDATA_CACHE to a folder."
        ) from error
    check_folder(root)  # what the environment says may be an address, too
    return root


@cache
def _memory_root() -> Path:
    """Return a folder in memory, of this process and those that it forks: it ends with this one.

    What processes that were killed have left is removed by the next that makes one.
    """
    if not _SHARED_MEMORY.is_dir():
        raise OptionsError('folder="ram" needs /dev/shm (Linux). Give a folder.')
    import fcntl

    above = _above_memory_roots()
    with made_by_one(above):
        for left in above.glob("of-*"):
            _remove_if_free(left)
        root = Path(tempfile.mkdtemp(prefix="of-", dir=above))
        # It stays open, as the lock is that of the open folder. Forked workers have it, too.
        fcntl.flock(os.open(root, os.O_RDONLY), fcntl.LOCK_SH)
    # Not atexit, which ranks that multiprocessing has started do not come to.
    Finalize(None, shutil.rmtree, (root, True), exitpriority=0)
    return root


def _above_memory_roots() -> Path:
    return _SHARED_MEMORY / f"lightning_fastdata-ram-{os.getuid()}"


def _remove_if_free(folder: Path) -> None:
    import fcntl

    try:
        held = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return  # its process has ended by now, and removed it
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # in use
    finally:
        os.close(held)


def name_of_key(key: str) -> str:
    """Return the name of the folder of a cache with a key of the user's.

    Raises:
        OptionsError: The key cannot be a name.
    """
    if not key or not all(sign.isalnum() or sign in "-_." for sign in key) or key.startswith("."):
        raise OptionsError(f"key is {key!r}; use letters, digits, '-', '_' and '.'.")
    return f"key-{key}"


def is_there(folder: Path) -> bool:
    """Return whether a cache has its folder.

    Raises:
        OptionsError: It belongs to another user, or is a link.
    """
    with _used(folder):
        return private_folder(folder, make=False) is not None


@contextmanager
def made_by_one(folder: Path) -> Iterator[None]:
    """Make the folder of a cache, and hold its lock.

    Raises:
        OptionsError: It belongs to another user, is a link, or cannot be written to.
    """
    with ExitStack() as held:
        with _used(folder):
            private_folder(folder)
            held.enter_context(locked(folder))
        yield


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


def room_bytes(folder: Path, ranks: int) -> int:
    """Return what a cache may take if nothing is said: half the disk, a quarter of the memory.

    ``ranks``: on this host. Each has a cache of its own in memory, and its part of the room. (Those
    that are forked behind the first such cache share one, which is smaller than it might be.)
    """
    own = folder.is_relative_to(_above_memory_roots())
    while not folder.exists():  # it may be yet to be made
        folder = folder.parent
    room = shutil.disk_usage(folder).free // 2
    if folder.is_relative_to(_SHARED_MEMORY):
        room = min(room, read_host_memory().available_bytes // 4)
    return room // ranks if own else room


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

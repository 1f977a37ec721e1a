"""Where caches have their folders."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, TypeAlias

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host.system_calls import cache_folder, private_folder

CacheFolder: TypeAlias = str | os.PathLike[str]
"""``"disk"``, or a folder."""

_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_folder(folder: object) -> None:
    """Raise OptionsError unless this may be the place of a cache: ``"disk"``, or a folder.

    A text that is a single word is refused, as it may be a misspelt one.
    """
    given = isinstance(folder, str | os.PathLike) and os.fsdecode(folder)
    if not given or _ADDRESS.match(given):
        raise OptionsError(
            f"The place of a cache is {folder!r}. Give 'disk' or a folder of this machine."
        )
    if isinstance(folder, str) and folder != "disk" and re.fullmatch(r"\w[^/\\]*", folder):
        raise OptionsError(
            f"The place of a cache is {folder!r}. Give 'disk'; or './{folder}', if a folder of "
            "that name is meant."
        )


def cache_root(folder: CacheFolder) -> Path:
    """Return the folder in which caches have folders of their own.

    Raises:
        OptionsError: It is no folder of this machine.
    """
    check_folder(folder)
    try:
        root = cache_folder() / "samples" if folder == "disk" else Path(folder).expanduser()
    except RuntimeError as error:
        raise OptionsError(
            f"There is no place for a cache: {error} Set LIGHTNING_FASTDATA_CACHE to a folder."
        ) from error
    check_folder(root)  # what the environment says may be an address, too
    return root


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


def room_bytes(folder: Path) -> int:
    """Return what a cache may take if nothing is said: half of the disk that is free."""
    return shutil.disk_usage(folder).free // 2


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

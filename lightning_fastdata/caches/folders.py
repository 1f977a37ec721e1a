"""Where caches have their folders, which are in use or may be removed, and what all caches do."""

from __future__ import annotations

import atexit
import difflib
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata.caches.identity import identity
from lightning_fastdata.caches.sample_file import SampleFile, locked
from lightning_fastdata.caches.sample_form import Form
from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from lightning_fastdata.fingerprint import Fingerprint, fingerprint
from lightning_fastdata.host import clock
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.system_calls import SharedFlags, cache_folder, private_folder
from lightning_fastdata.randomness.search import find_instances

if TYPE_CHECKING:
    from numpy.typing import NDArray

CacheFolder: TypeAlias = str | os.PathLike[str]
"""``"disk"``, ``"ram"`` or a folder."""

_WORDS: Final = ("disk", "ram")
_ALIKE: Final = 0.75
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_SHARED_MEMORY: Final = Path("/dev/shm")
_USERS: Final = "users"
"""The file of a cache that processes hold while they use it; its time is that of the last one."""
_FORGOTTEN_AFTER_S: Final = 30 * 86_400
_FILLED_AT_ONCE: Final = 32
_CHANGED: Final = (
    "The program has changed {name}, of which the cache {folder} has samples as they were before. "
    "From here on they are made each time, and none is kept. To keep them, leave the dataset as it "
    "is: what changes can be the transform of a CachedDataset, or a dataset around it."
)
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
        make_folder(folder)
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


def make_folder(folder: Path) -> None:
    """Make the folder of a cache, if it is not there, for this user alone.

    Raises:
        OptionsError: It belongs to another user, is a link, or cannot be made.
    """
    with _used(folder):
        private_folder(folder)


@contextmanager
def choosing(folder: CacheFolder) -> Iterator[None]:
    """Let one process at a time look which caches a folder has, and make one.

    Raises:
        OptionsError: It cannot be made, or written to.
    """
    root = cache_root(folder)
    with ExitStack() as held:
        with _used(root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(locked(root))
        yield


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

    made = False
    """Whether this process has had a cache: made here, copied or unpickled."""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Return a new one, and note that there is one."""
        Kept.made = True
        return super().__new__(cls)

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
        self.optional = False
        """Whether samples are made, and that is said, where the cache cannot be used: no error."""
        self._given_up = False
        self._has_key = key is not None
        self._state = _state_of(owner, math.inf)
        """What the owner was when the folder was named; None: it cannot be compared."""
        self._there: NDArray[np.bool_] | None = None
        """Which records were kept when the owner was last found to be as it was."""
        is_there(self.folder)  # one of another user is refused at once
        if self._in_memory:
            hold(self.folder, until_the_end=True)

    def __len__(self) -> int:
        return self._length

    @property
    def owner(self) -> Sized:
        """Whose records are kept."""
        raise NotImplementedError

    def notice_change(self, within_s: float = math.inf) -> None:
        """Use the cache no more, and say so, if its owner is not what it was.

        What was kept since it was last the same may be of either state, and is taken out.

        Args:
            within_s: Seconds of a CPU that it may take; one that takes longer is not compared.
        """
        if self._given_up:
            return
        owner = self.owner
        now = _state_of(owner, within_s)
        if now is None and within_s < math.inf:
            return
        file = self._seen()
        there = None if file is None else file.there()
        if (now is not None and now == self._state) or self._is_recognised(owner, now):
            self._state, self._there = now, there
            return
        if file is not None and there is not None:
            before = np.zeros_like(there) if self._there is None else self._there
            file.take_out(np.flatnonzero(there & ~before))
        self._let_go()
        self._given_up = True
        self._length = len(owner)
        said = _CHANGED.format(name=type(owner).__name__, folder=self.folder)
        warnings.warn(said, FastDataWarning, stacklevel=3)

    def _is_recognised(self, owner: object, now: Fingerprint | None) -> bool:
        """Return whether another run would find the cache by its owner as it is now."""
        if self._has_key:  # which is trusted where nothing can be compared
            return now is None or self._state is None
        try:
            return identity(owner) == self.folder.name
        except DatasetError:  # it has opened a file since, say
            return now is None

    def _let_go(self) -> None:
        """Forget the files, which are used no more."""
        self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_state": None, "_there": None}

    @property
    def stored(self) -> int:
        """How many records are in the cache."""
        file = self._seen()
        return 0 if file is None else file.stored()

    @property
    def stored_bytes(self) -> int:
        """How many bytes the records in the cache take."""
        file = self._seen()
        return 0 if file is None else file.used_bytes()

    def fill(self, num_workers: int = 0) -> None:
        """Make or read all records that are not in the cache, and keep them, before a training.

        It ends early where no more records find room.

        Args:
            num_workers: Processes that do it; 0: this one does.
        """
        notice_changes(self)
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
        file = self._seen()
        if file is not None:
            file.flush()

    def _seen(self) -> SampleFile | None:
        """Return the cache; None: there is none yet, or it is optional and cannot be used."""
        if self._given_up:
            return None
        try:
            return self._existing()
        except (DatasetError, OptionsError) as error:
            self._go_without(error)
            return None

    def _existing(self) -> SampleFile | None:
        if self._file is not None or not is_there(self.folder):
            return self._file
        return SampleFile.open(self.folder, self._length, self._known)

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
            self._give_up(error)
        except DatasetError as error:
            if not self.optional:
                raise
            self._give_up(error)

    def _go_without(self, error: Exception) -> None:
        """Raise an error again; or, of a cache that is optional, say it, and use it no more."""
        if not self.optional:
            raise error
        self._given_up = True
        warnings.warn(
            f"The samples are made each time, as no cache can be used (cache='auto'): {error}",
            FastDataWarning,
            stacklevel=3,
        )

    def _give_up(self, error: Exception) -> None:
        """Say that nothing more is written to the cache."""
        self._full = True
        said = error.strerror if isinstance(error, OSError) else None
        warnings.warn(
            f"No more samples are written to the cache {self.folder}: {said or error}. They are "
            "made each time. Make room there, or give another folder.",
            FastDataWarning,
            stacklevel=3,
        )


def caches_in(dataset: object) -> list[Kept]:
    """Return the caches that a dataset holds, those that are read by others first."""
    found: list[Kept] = []
    if not Kept.made:  # to look for one takes as long as the dataset has parts
        return found
    for cache in find_instances(dataset, (Kept,)):
        found += [*caches_in(cache.owner), cache]
    return found


def notice_changes(dataset: object) -> None:
    """See that the caches of a dataset are used only for what they were made of.

    Call it in the training process, before workers start or are given an epoch.
    """
    for cache in caches_in(dataset):
        cache.notice_change()


def _state_of(owner: object, within_s: float) -> Fingerprint | None:
    return fingerprint(owner, within_s=within_s, with_globals=False)


class _Filled(Dataset[bool]):
    """For each record of a cache, whether it is there after it was made or read."""

    def __init__(self, cache: Kept) -> None:
        self._cache = cache

    def __len__(self) -> int:
        return len(self._cache)

    def __getitems__(self, indices: list[int]) -> list[bool]:
        return self._cache._fill(indices)

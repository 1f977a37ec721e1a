"""The folder of a cache: where it is, and how it is found again in another run.

A cache without a key is found by the identity of its dataset: a digest of what samples are made of.

Two datasets have the same identity if they hold the same, down to each element; if the source text
of their classes, and of the functions and classes that they hold, is the same; and if the files
that they name have the same size and time of change. For code of an installed package its version
counts, or, if the package states none, the file of the module and those of the base classes.

Code that this code calls is not searched: a function of another module may change, and the identity
does not. An object with a method ``recognised_by()`` counts by its class and the method's result.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.fingerprint import file_under, functions_of, is_data
from lightning_fastdata.host import clock
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.system_calls import cache_folder, private_folder, size_and_time
from lightning_fastdata.randomness.seeds import GENERATOR_CLASSES, EpochCell
from lightning_fastdata.sources.files import PackedStrings
from lightning_fastdata.sources.shared import SharedList
from lightning_fastdata.tree import (
    HOLD_NOTHING,
    bytes_of,
    closed_over,
    datasets_in,
    has_method,
    held,
    held_by,
    is_users,
    loaded_classes,
    slots_of,
)

CacheFolder: TypeAlias = str | os.PathLike[str]
"""Place of a cache: ``"disk"``, ``"ram"`` or a folder."""

_WORDS: Final = ("disk", "ram")
_ALIKE: Final = 0.75
"""Least likeness to a word, 0 to 1, for which a text counts as that word misspelt."""
_SHARED_MEMORY: Final = Path("/dev/shm")
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_MOST_FILES: Final = 20_000
"""Most files whose size and time are read; of a longer list, this many evenly spread over it."""
_LONGEST_PATH: Final = 1020
_DEPTH: Final = 4
"""Number of containers within one another that are looked into for names of files."""
_TEXTS: Final = (str, bytes, os.PathLike)
_CLOSED: Final = (*HOLD_NOTHING, type, ModuleType)
"""Classes of objects that are not looked into for names of files."""
_FEW: Final = 16
"""Most texts of an attribute among which names of folders are looked for."""


def check_folder(folder: object, words: Sequence[str] = _WORDS) -> None:
    """Raise OptionsError unless this may be the place of a cache: one of ``words``, or a folder.

    A text that is nearly one of the words counts as a misspelt word.
    """
    given = isinstance(folder, str | os.PathLike) and os.fsdecode(folder)
    if not given or "\0" in given or _ADDRESS.match(given):
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
    text, words = text.strip().casefold(), ("auto", *_WORDS)
    mixed_up = sorted(text) in map(sorted, words)
    alike = mixed_up or difflib.get_close_matches(text, words, cutoff=_ALIKE)
    return text.isalpha() and bool(alike)


def cache_root(folder: CacheFolder) -> Path:
    """Return the folder in which caches have folders of their own.

    Raises:
        OptionsError: It is no folder of this machine, or there is no shared memory for ``"ram"``.
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
    if _ADDRESS.match(os.fsdecode(root)):  # the environment may name one
        raise OptionsError(
            f"The place of a cache is {str(root)!r}, as LIGHTNING_FASTDATA_CACHE says. Set it to a "
            "folder of this machine."
        )
    return root


@cache
def _memory_root() -> Path:
    """Return a folder in memory for this process and those that it forks; it is removed at exit.

    Folders that killed processes have left are removed by the next process that makes one.
    """
    if not _SHARED_MEMORY.is_dir():
        raise OptionsError('folder="ram" needs /dev/shm (Linux). Give a folder.')
    import fcntl

    above = _above_memory_roots()
    with made_by_one(above):
        for left in above.glob("of-*"):
            _remove_if_free(left)
        root = Path(tempfile.mkdtemp(prefix="of-", dir=above))
        # The folder stays open, as the lock belongs to the open file. Forked workers have it, too.
        fcntl.flock(os.open(root, os.O_RDONLY), fcntl.LOCK_SH)
    # Not atexit: ranks that multiprocessing has started do not run its functions.
    Finalize(None, shutil.rmtree, (root, True), exitpriority=0)
    return root


def _above_memory_roots() -> Path:
    return _SHARED_MEMORY / f"lightning_fastdata-ram-{os.getuid()}"


def _remove_if_free(folder: Path) -> None:
    import fcntl

    try:
        held = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return  # its process has ended by now and has removed it
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # in use
    finally:
        os.close(held)


def name_of_key(key: str) -> str:
    """Return the name of the folder of a cache that has a key given by the user.

    Raises:
        OptionsError: The key cannot be a name.
    """
    fine = isinstance(key, str) and all(sign.isalnum() or sign in "-_." for sign in key)
    if not fine or not key or key.startswith("."):
        raise OptionsError(f"key is {key!r}; use letters, digits, '-', '_' and '.'.")
    return f"key-{key}"


def is_there(folder: Path) -> bool:
    """Return whether the folder of a cache exists.

    Raises:
        OptionsError: It belongs to another user, or is a link.
    """
    with _used(folder):
        return private_folder(folder, make=False) is not None


@contextmanager
def made_by_one(folder: Path) -> Iterator[None]:
    """Make the folder of a cache, and hold its lock while the block runs.

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
    """Hold the lock of a folder in the block; one thread of all processes has it at a time."""
    try:
        import fcntl
    except ImportError as error:
        raise OptionsError(
            "A cache needs a system with POSIX file locks (Linux, macOS)."
        ) from error
    with (folder / "lock").open("ab") as file:
        # The lock belongs to this opening of the file, so that threads wait for each other, too.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def room_bytes(folder: Path, ranks: int) -> int:
    """Return the default size of a cache: half of the free disk, a quarter of the free memory.

    ``ranks``: the training processes on this host. Each has a cache of its own in memory, and its
    share of the room. (Ranks that are forked after the first such cache was made share that one,
    which is then smaller than it could be.)
    """
    own = folder.is_relative_to(_above_memory_roots())
    while not folder.exists():  # it may not be made yet
        folder = folder.parent
    room = shutil.disk_usage(folder).free // 2
    if folder.is_relative_to(_SHARED_MEMORY):
        room = min(room, read_host_memory().available_bytes // 4)
    return room // ranks if own else room


@contextmanager
def _used(folder: Path) -> Iterator[None]:
    """Turn an error in the block into one that names the folder and what to do."""
    try:
        yield
    except (OSError, OptionsError) as error:
        raise OptionsError(
            f"The cache {folder} cannot be used: {str(error).rstrip('.')}. Name another folder "
            "(cache=... of a data module), or set LIGHTNING_FASTDATA_CACHE to one."
        ) from error


def identity(dataset: object, files: Iterable[NamedFile] | None = None) -> str:
    """Return 32 hexadecimal digits that identify the samples of a dataset, without reading any.

    ``files``: what :func:`named_files` returned for it; None: it is called now.

    Raises:
        DatasetError: The dataset holds something that cannot be compared between runs.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        _Digesting(digest).dump(dataset)
    except Exception as error:  # whatever an object's own __reduce__ raises
        raise DatasetError(
            f"What {type(dataset).__name__} holds cannot be recognised in another run "
            f"({type(error).__name__}: {error}), and a cache must know whose samples it has. Give "
            "it a key of your own, which you change when the samples change: "
            'CachedDataset(..., key="photos-1").'
        ) from error
    for path, size, changed_ns in named_files(dataset) if files is None else files:
        digest.update(f"{path}\0{size}\0{changed_ns}\n".encode(errors="replace"))
    return digest.hexdigest()


# -- the objects that a dataset holds, and the source of their code --------------------------------


class _Digesting(pickle.Pickler):
    """Digests what a pickle would hold, but code by its source and not by its name alone.

    Without a memo (``fast``), it makes no difference whether two equal strings are one object.
    """

    def __init__(self, digest: hashlib.blake2b) -> None:
        sink: Any = SimpleNamespace(write=digest.update)  # nobody reads the pickle
        super().__init__(sink, protocol=5)
        self.fast = True
        self._known: dict[int, tuple[int, object]] = {}
        """Number of each object seen, and the object, by its address, which so stays its own."""
        self._transforms = loaded_classes("albumentations", "BasicTransform")
        self._of_sets: set[int] = set()
        """Addresses of dicts that were filled in the order of a set."""

    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, set | frozenset):  # the order of its elements is by chance
            return "set", sorted(obj, key=repr)
        if isinstance(obj, dict) and id(obj) in self._of_sets:
            return "dict", sorted(obj.items(), key=repr)
        if isinstance(obj, GENERATOR_CLASSES):
            return "generator", type(obj).__name__  # samples that depend on its state are not kept
        if not hasattr(obj, "__dict__"):
            return None
        # Without a memo, pickling objects that refer to each other would never end.
        if id(obj) in self._known:
            return "again", self._known[id(obj)][0]
        self._known[id(obj)] = len(self._known), obj
        if isinstance(obj, self._transforms):
            sets = [value for value in held_by(obj).values() if isinstance(value, set)]
            dicts = (value for value in held_by(obj).values() if type(value) is dict)
            self._of_sets.update(id(each) for each in dicts if each.keys() in sets)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if obj is _same:
            return NotImplemented
        if isinstance(obj, type | FunctionType | ModuleType) or _is_built_in(obj):
            return _same, tuple(_code(obj))
        if held(obj, "__wrapped__") is not None:  # wrapped by functools.lru_cache, say
            return _same, (type(obj).__qualname__, obj.__wrapped__)
        if isinstance(obj, EpochCell):
            return _same, ("epoch",)
        if has_method(obj, "recognised_by"):
            return _same, (type(obj), obj.recognised_by())
        if isinstance(obj, torch.Tensor):
            raw = bytes_of(obj.detach().cpu().resolve_conj().resolve_neg())
            return _same, (str(obj.dtype), tuple(obj.shape), raw.numpy())
        if isinstance(obj, np.ndarray):
            mapped = _mapped(obj)
            return NotImplemented if mapped is None else (_same, mapped)
        return NotImplemented


def _same(*_what: object) -> None:
    """Stand for an object that is compared by the arguments given here."""


def _is_built_in(obj: object) -> bool:
    """Return whether an object is a function written in C, and no method of an object."""
    return isinstance(obj, BuiltinFunctionType) and isinstance(obj.__self__, ModuleType | None)


def _mapped(array: np.ndarray[Any, Any]) -> tuple[object, ...] | None:
    """Return what identifies an array mapped from a file; None: its numbers do, as in memory."""
    owner = file_under(array)
    if owner is None or owner.filename is None:
        return None
    file, began = Path(owner.filename), owner.offset + array.ctypes.data - owner.ctypes.data
    status = file.stat()
    about = str(file), status.st_size, status.st_mtime_ns
    return *about, began, array.dtype.str, array.shape, array.strides


def _code(obj: type | FunctionType | BuiltinFunctionType | ModuleType) -> Iterator[object]:
    """Yield what identifies a class, function or module, and its version or source."""
    module = obj.__name__ if isinstance(obj, ModuleType) else obj.__module__
    yield f"{_imported_as(module)}.{getattr(obj, '__qualname__', '')}"
    if isinstance(obj, BuiltinFunctionType) or not is_users(module):
        top = (module or "").partition(".")[0]
        version = getattr(sys.modules.get(top), "__version__", None)
        file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
        own = version is None and top not in sys.stdlib_module_names and file.is_file()
        yield file.read_bytes() if own else str(version or sys.version)
        if own and isinstance(obj, type):
            yield obj.__mro__[1:]
        return
    yield _source(obj)
    if isinstance(obj, type):
        yield obj.__mro__[1:]
        # Methods are in the source; a value made elsewhere, such as a table or pipeline, is not,
        # nor what methods hold, nor one that was put there from elsewhere.
        yield {name: value for name, value in vars(obj).items() if _is_value(name, value)}
        seen: set[int] = set()
        for name, value in vars(obj).items():
            for function in functions_of(value):
                more = _of_method(function, obj, seen)
                if more:
                    yield name, more
    elif isinstance(obj, FunctionType):
        yield obj.__defaults__, obj.__kwdefaults__, vars(obj)
        yield closed_over(obj)


def _is_value(name: str, value: object) -> bool:
    """Return whether an attribute of a class is data, or an object of a user's class."""
    return is_data(name, value) or is_users(type(value).__module__)


def _of_method(function: object, cls: type, seen: set[int]) -> list[object]:
    """Return what a method of a class holds, and its source if that of the class has it not.

    Functions that it holds count likewise: some, as those of a dataclass, have no source.
    """
    if not isinstance(function, FunctionType) or id(function) in seen:
        return []
    seen.add(id(function))
    found: list[object] = []
    named = *(function.__kwdefaults__ or {}).values(), *vars(function).values()
    for each in (*(function.__defaults__ or ()), *named, *closed_over(function)):
        if isinstance(each, FunctionType):
            found += _of_method(each, cls, seen)
        elif each is not cls:
            found.append(each)
    within = function.__qualname__.rpartition(".")[0] == cls.__qualname__
    if not within or "__wrapped__" in vars(function):  # a wrapper has the name of what it wraps
        found.append(_source_of_method(function))
    return found


def _imported_as(module: str) -> str:
    """Return the name of a module; of the script that runs, that by which others import it."""
    if module not in ("__main__", "__mp_main__"):  # the latter is the script where it was spawned
        return module
    script = sys.modules.get(module)
    spec, file = held(script, "__spec__"), held(script, "__file__")
    return spec.name if spec is not None else Path(file or module).stem


def _source(obj: type | FunctionType | ModuleType) -> str:
    """Return the source text of a user's code; for a lambda, its line number and its whole file.

    Raises:
        OSError, TypeError: There is no source: it was typed into an interpreter, or made by code.
        ValueError: It is one of several lambdas in a line, so that its source is not known.
    """
    if isinstance(obj, FunctionType) and obj.__name__ == "<lambda>":
        lines, line = inspect.findsource(obj.__code__)
        if lines[line].count("lambda") != 1:
            raise ValueError(f"of the lambdas in line {line + 1} nobody can tell which it is")
        return f"{line}\n{''.join(lines)}"  # nothing says where the lambda ends
    try:
        # The function's own source, not that of a function it wraps, which is compared by itself.
        return inspect.getsource(obj.__code__ if isinstance(obj, FunctionType) else obj)
    except (OSError, TypeError):
        # In a notebook only functions have a source; a named tuple has that of its base classes.
        methods = "".join(map(_source_of_method, held_by(obj).values()))
        if not isinstance(obj, type) or not methods:
            raise
        return methods


def _source_of_method(value: object) -> str:
    with suppress(OSError, TypeError):
        return inspect.getsource(value) if isinstance(value, FunctionType) else ""
    return ""


# -- the files that a dataset names ----------------------------------------------------------------


NamedFile: TypeAlias = tuple[str, int, int]
"""Path, size in bytes and time of change in ns of a file."""


def named_files(dataset: object) -> Iterator[NamedFile]:
    """Yield the files that a dataset names, as they are now.

    A name may be a path, or a path within a folder that the dataset names, too, or the name of a
    file in such a folder or one level below, with or without its extension: ``root="photos"`` and
    ``names=["0001", ...]``. If only a folder is named, no file counts: others may write there.
    """
    parts = parts_of(dataset)
    looked_into = set(map(id, parts))
    for part in parts:
        held = (*_attributes(part), *_settings(part))
        groups = [list(_texts(value, _DEPTH, looked_into)) for value in held]
        single = [text for group in groups if len(group) <= _FEW for text in group]
        folders = [text for text in dict.fromkeys(single) if _is_folder(text)]
        names: dict[str, None] = {}
        yielded: set[str] = set()
        for group in groups:
            paths = _existing(group)
            yield from _regular([path for path in paths if path not in yielded])
            yielded.update(paths)
            if not paths:
                names |= dict.fromkeys(group)
        yield from _regular(_in_folders(folders, [name for name in names if name not in folders]))


def parts_of(dataset: object) -> list[object]:
    """Return a dataset and those within it, without any that says itself what it is."""
    says_it = partial(has_method, name="recognised_by")
    return [part for part in datasets_in(dataset, says_it) if not says_it(part)]


def _attributes(owner: object) -> Iterator[object]:
    yield from held_by(owner).values()
    yield from (getattr(owner, name) for name in slots_of(type(owner)) if hasattr(owner, name))


def _settings(dataset: object) -> Iterator[object]:
    """Yield the data among the attributes of the user's classes of a dataset."""
    for kind in type(dataset).__mro__:
        if is_users(kind.__module__):
            yield from (value for name, value in vars(kind).items() if is_data(name, value))


def _texts(value: object, depth: int, seen: set[int], *, alone: bool = True) -> Iterator[str]:
    """Yield the paths and short strings in nested containers, arrays, tables and objects.

    Of an object that is held ``alone``, as settings are, those in its containers count: what it
    names itself may be a log. ``seen``: addresses of objects that are not looked into again.
    """
    if isinstance(value, _TEXTS):
        text = os.fsdecode(value)
        if 0 < len(text) <= _LONGEST_PATH:
            yield text
    elif depth and (elements := _elements(value)) is not None:
        deeper = depth if isinstance(value, Mapping) else depth - 1  # its items are tuples
        for each in elements:
            yield from _texts(each, deeper, seen, alone=False)
    elif depth and id(value) not in seen and not isinstance(value, _CLOSED):
        seen.add(id(value))
        for each in () if has_method(value, "recognised_by") else _attributes(value):
            if not (alone and isinstance(each, _TEXTS)):
                yield from _texts(each, depth - 1, seen, alone=alone)


def _elements(value: Any) -> Iterable[object] | None:
    """Return elements from all over a container, array or table; None: it is something else."""
    if type(value).__module__.partition(".")[0] in ("pandas", "polars"):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        if value.dtype.names is not None:
            return [value[name] for name in value.dtype.names]
        value = value.reshape(-1) if value.dtype.kind in "OUST" else ()
    if isinstance(value, Mapping):
        return islice(value.items(), 0, None, _evenly(len(value)).step)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)  # its own order is by chance
    if isinstance(value, deque):
        value = list(value)
    if isinstance(value, list | tuple | np.ndarray | PackedStrings | SharedList):
        return (value[number] for number in _evenly(len(value)))
    return None


def _evenly(length: int) -> range:
    return range(0, length, max(1, -(-length // _MOST_FILES)))


def _existing(paths: list[str]) -> list[str]:
    """Return the paths if some of them are files; else none: texts may be captions or labels.

    Looking for a file that is not there takes a millisecond where folders are on a network.
    """
    # At random, not at even steps, which may hit only the captions of (caption, path) pairs.
    some = random.Random(0).sample(paths, min(len(paths), 4 * _FEW))
    return paths if any(map(size_and_time, some)) else []


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # the name is too long, or has a NUL in it
        return False


def _in_folders(folders: list[str], names: list[str]) -> list[str]:
    """Return the files in folders that have one of the names."""
    named = [
        path
        for folder in folders
        for path in _existing([os.path.join(folder, name) for name in names])  # noqa: PTH118
    ]
    if named:
        return named
    known = {Path(name).name for name in names}
    for folder in folders:
        below = (*Path(folder).glob("*"), *Path(folder).glob("*/*"))
        named += [str(path) for path in sorted(below) if {path.name, path.stem} & known]
    return [named[number] for number in _evenly(len(named))]


def first_changed(files: Iterable[NamedFile], at_once: int, within_s: float) -> str | None:
    """Return the path of a file that is no longer as it was; None: ``at_once`` at least are.

    More of them are looked at for as long as that takes no more than ``within_s`` in all. A file
    that is gone is no other one.
    """
    began_s = clock.monotonic()
    for number, file in enumerate(files):
        if number >= at_once and clock.monotonic() - began_s > within_s:
            break
        path, *then = file
        if size_and_time(path) not in (None, tuple(then)):
            return path
    return None


def _regular(paths: Iterable[str]) -> Iterator[NamedFile]:
    for path in paths:
        now = size_and_time(path)
        if now is not None:
            yield path, *now

"""By what the samples of a dataset are recognised in another run: what they are made from.

Two datasets have the same identity if they hold the same, down to each element; if the source text
of their classes, and of the functions and classes that they hold, is the same; and if the files
that they name have the same size and time of change. Of an installed package its version counts, or
the file of the module, and those of its base classes, where the package does not tell its version.

What code refers to is not looked for: a function of another module may change, and nothing here
does. An object with a method ``recognised_by()`` is recognised by its class and what that returns.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import random
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.fingerprint import is_data
from lightning_fastdata.randomness.seeds import GENERATOR_CLASSES, EpochCell
from lightning_fastdata.sources.packed import PackedStrings
from lightning_fastdata.tree import closed_over, has_method, held, held_by, is_users

_MOST_FILES: Final = 20_000
"""Whose size and time are looked at; of more, so many from all over the list."""
_LONGEST_PATH: Final = 1020
_DEPTH: Final = 4
_FEW: Final = 16


def identity(dataset: object) -> str:
    """Return 32 hexadecimal digits for what a dataset returns. No sample is read.

    Raises:
        DatasetError: The dataset holds something that cannot be compared with that of another run.
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
    for path, status in _named_files(dataset):
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace"))
    return digest.hexdigest()


# -- what is held, and the source of its code ------------------------------------------------------


class _Digesting(pickle.Pickler):
    """Digests what a pickle would hold, and of code its source instead of its name alone.

    Without a memo (``fast``), so that whether two equal strings are one object makes no difference.
    """

    def __init__(self, digest: hashlib.blake2b) -> None:
        sink: Any = SimpleNamespace(write=digest.update)  # nobody reads the pickle
        super().__init__(sink, protocol=5)
        self.fast = True
        self._known: dict[int, tuple[int, object]] = {}
        """Objects by their address, with their number; held, so that no other gets it."""

    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, set | frozenset):  # whose order is by chance
            return "set", sorted(obj, key=repr)
        if isinstance(obj, GENERATOR_CLASSES):
            return "generator", type(obj).__name__  # what depends on its state cannot be kept
        if not hasattr(obj, "__dict__"):
            return None
        # Without a memo, objects that refer to each other would never come to an end.
        if id(obj) in self._known:
            return "again", self._known[id(obj)][0]
        self._known[id(obj)] = len(self._known), obj
        return None

    def reducer_override(self, obj: Any) -> Any:
        if obj is _same:
            return NotImplemented
        if isinstance(obj, type | FunctionType | ModuleType) or _is_built_in(obj):
            return _same, tuple(_code(obj))
        if held(obj, "__wrapped__") is not None:  # by functools.lru_cache, say
            return _same, (type(obj).__qualname__, obj.__wrapped__)
        if isinstance(obj, EpochCell):
            return _same, ("epoch",)
        if has_method(obj, "recognised_by"):
            return _same, (type(obj), obj.recognised_by())
        if isinstance(obj, torch.Tensor):
            raw = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return _same, (str(obj.dtype), tuple(obj.shape), raw.numpy())
        if isinstance(obj, np.ndarray):
            mapped = _mapped(obj)
            return NotImplemented if mapped is None else (_same, mapped)
        return NotImplemented


def _same(*_what: object) -> None:
    """Stand for an object that is compared by what is said of it."""


def _is_built_in(obj: object) -> bool:
    """Return whether it is a function written in C, and no method of an object."""
    return isinstance(obj, BuiltinFunctionType) and isinstance(obj.__self__, ModuleType | None)


def _mapped(array: np.ndarray[Any, Any]) -> tuple[object, ...] | None:
    """Return what tells a part of a file that is mapped from another one; None: it is in memory."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if not isinstance(owner, np.memmap) or owner.filename is None:
        return None
    file, began = Path(owner.filename), owner.offset + array.ctypes.data - owner.ctypes.data
    status = file.stat()
    about = str(file), status.st_size, status.st_mtime_ns
    return *about, began, array.dtype.str, array.shape, array.strides


def _code(obj: type | FunctionType | BuiltinFunctionType | ModuleType) -> Iterator[object]:
    """Yield what tells a class, function or module from another one."""
    module = obj.__name__ if isinstance(obj, ModuleType) else obj.__module__
    yield f"{module}.{getattr(obj, '__qualname__', '')}"
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
        # Methods are in the source; what was made elsewhere, a table or a pipeline, is not.
        yield {name: value for name, value in vars(obj).items() if is_data(name, value)}
    elif isinstance(obj, FunctionType):
        yield obj.__defaults__, obj.__kwdefaults__, vars(obj)
        yield closed_over(obj)


def _source(obj: type | FunctionType | ModuleType) -> str:
    """Return the source text of what a user wrote; of a lambda, that of its file, and its line.

    Raises:
        OSError, TypeError: There is none: it was typed into an interpreter, or made by code.
        ValueError: It is one of several lambdas in a line, of which nobody can tell which.
    """
    if isinstance(obj, FunctionType) and obj.__name__ == "<lambda>":
        lines, line = inspect.findsource(obj.__code__)
        if lines[line].count("lambda") != 1:
            raise ValueError(f"of the lambdas in line {line + 1} nobody can tell which it is")
        return f"{line}\n{''.join(lines)}"  # nothing says where it ends
    try:
        # Of a function, not of the one that it wraps, which is compared for itself.
        return inspect.getsource(obj.__code__ if isinstance(obj, FunctionType) else obj)
    except (OSError, TypeError):
        # In a notebook only functions have a source; of a named tuple, what it inherits.
        methods = "".join(map(_source_of_method, held_by(obj).values()))
        if not isinstance(obj, type) or not methods:
            raise
        return methods


def _source_of_method(value: object) -> str:
    with suppress(OSError, TypeError):
        return inspect.getsource(value) if isinstance(value, FunctionType) else ""
    return ""


# -- the files that it names -----------------------------------------------------------------------


def _named_files(dataset: object) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files that a dataset names, with what the system says of them.

    A name may be a path, or a path in a folder that the dataset names, too, or the name of a file
    in such a folder or one level below, with or without its extension: ``root="photos"`` and
    ``names=["0001", ...]``. Of a folder alone no file counts: others may write there.
    """
    for part in _parts(dataset):
        groups = [list(_texts(value, _DEPTH)) for value in held_by(part).values()]
        single = [text for group in groups if len(group) <= _FEW for text in group]
        folders = [text for text in dict.fromkeys(single) if _is_folder(text)]
        names: dict[str, None] = {}
        for group in groups:
            paths = _existing(group)
            yield from _regular(paths)
            if not paths:
                names |= dict.fromkeys(group)
        yield from _regular(_in_folders(folders, [name for name in names if name not in folders]))


def _parts(dataset: object) -> Iterator[object]:
    """Yield a dataset and the datasets and sources within it."""
    waiting, seen = [dataset], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or has_method(one, "recognised_by"):
            continue
        seen.add(id(one))
        yield one
        for value in held_by(one).values():
            several = value if isinstance(value, list | tuple) else [value]
            waiting += [
                each
                for each in islice(several, _MOST_FILES)
                if isinstance(each, torch.utils.data.Dataset) or has_method(each, "get_bytes")
            ]


def _texts(value: object, depth: int) -> Iterator[str]:
    """Yield the paths and short strings in nested containers, arrays and tables."""
    if isinstance(value, str | bytes | os.PathLike):
        text = os.fsdecode(value)
        if 0 < len(text) <= _LONGEST_PATH:
            yield text
    elif isinstance(value, np.ndarray) and value.dtype.kind in "OUS":
        flat = value.reshape(-1)
        yield from _texts([flat[number] for number in _evenly(len(flat))], depth)
    elif type(value).__module__.partition(".")[0] in ("pandas", "polars"):
        yield from _texts(np.asarray(value), depth)
    elif depth and isinstance(value, Mapping):
        for each in islice(value.items(), _MOST_FILES):
            yield from _texts(each, depth)
    elif depth and isinstance(value, list | tuple | PackedStrings):
        for number in _evenly(len(value)):
            yield from _texts(value[number], depth - 1)


def _evenly(length: int) -> range:
    return range(0, length, max(1, -(-length // _MOST_FILES)))


def _existing(paths: list[str]) -> list[str]:
    """Return paths if some of them are files: those of captions or labels are not all looked for.

    A look at a file that is not there takes a millisecond where folders are on a network.
    """
    # Not every so many of them: of pairs of a caption and a path, these may be captions alone.
    some = random.Random(0).sample(paths, min(len(paths), 4 * _FEW))
    return paths if next(_regular(some), None) else []


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # a name too long; a NUL in it
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


def _regular(paths: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
    for path in paths:
        try:
            status = Path(path).stat()
        except (OSError, ValueError):
            continue  # a text that names no file
        # A folder changes with anything that is written to it.
        if stat.S_ISREG(status.st_mode):
            yield path, status

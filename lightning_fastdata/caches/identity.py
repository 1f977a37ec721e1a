"""By what the samples of a dataset are recognised in another run: what they are made from.

Two datasets have the same identity if their classes, the code of these, and everything they hold
are the same, and the files they name have the same size and time of change. An object that has a
method ``recognised_by()`` is recognised by its class and what that returns.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pickle
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.images.folder import files_of
from lightning_fastdata.images.packed import PackedStrings
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.randomness.generators import GENERATOR_CLASSES
from lightning_fastdata.randomness.search import is_users
from lightning_fastdata.randomness.seeds import EpochCell
from lightning_fastdata.tree import has_method, held_by

_VALUES: Final = (
    *(int, float, str, bytes, tuple, list, dict, set, frozenset, type(None)),
    *(np.ndarray, torch.Tensor),
)
_OF_EVERY_CLASS: Final = (
    *("__module__", "__qualname__", "__doc__", "__firstlineno__", "__static_attributes__"),
    # Set by Python when they are first asked for: when an object is pickled, say.
    *("__slotnames__", "__annotations__", "__annotations_cache__"),
)
_MOST_FILES: Final = 20_000
"""Whose size and time are looked at; of more, so many from all over the list."""


@runtime_checkable
class _GivesBytes(Protocol):
    """A source of records."""

    def get_bytes(self, indices: Sequence[int]) -> object: ...


def identity(dataset: object) -> str:
    """Return 32 hexadecimal digits for what a dataset returns. No sample is read.

    Raises:
        DatasetError: The dataset holds something that cannot be compared with that of another run.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        _Identity(digest).dump(dataset)
    except Exception as error:  # whatever an object's own __reduce__ raises
        raise DatasetError(
            f"What {type(dataset).__name__} holds cannot be recognised in another run "
            f"({type(error).__name__}: {error}), and a cache must know whose samples it has. Give "
            'it a key of your own, which you change when the samples change: key="photos-1".'
        ) from error
    for path, status in _files(dataset):
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace"))
    return digest.hexdigest()


class _Sink:
    """Where a pickle goes that is never read: into a digest."""

    def __init__(self, digest: hashlib.blake2b) -> None:
        self.write: Callable[[bytes], object] = digest.update


class _Identity(pickle.Pickler):
    """Digests what a pickle would hold, and of code what it says instead of its name alone.

    Without a memo (``fast``), so that whether two equal strings are one object makes no difference.
    """

    def __init__(self, digest: hashlib.blake2b) -> None:
        super().__init__(_Sink(digest), protocol=5)
        self.fast = True
        self._known: dict[int, tuple[int, object]] = {}
        """Objects by their address, with their number; held, so that no other gets it."""

    def persistent_id(self, obj: object) -> object:
        # Sets are pickled without reducer_override() being asked, in an order by chance.
        if isinstance(obj, set | frozenset):
            return "set", sorted(_digest_of(item) for item in obj)
        if isinstance(obj, GENERATOR_CLASSES):
            return "generator", type(obj).__name__  # what depends on its state cannot be kept
        if not hasattr(obj, "__dict__") or isinstance(obj, type | FunctionType | ModuleType):
            return None
        # Without a memo, objects that refer to each other would never come to an end.
        if id(obj) in self._known:
            return "again", self._known[id(obj)][0]
        self._known[id(obj)] = len(self._known), obj
        return None

    def reducer_override(self, obj: Any) -> Any:
        if obj is _same:
            return NotImplemented
        if isinstance(obj, type | BuiltinFunctionType | FunctionType):
            said = list(_code_of(obj, set()))
            if isinstance(obj, FunctionType):
                cells = [cell.cell_contents for cell in obj.__closure__ or ()]
                return _same, (said, cells, obj.__defaults__, obj.__kwdefaults__)
            return _same, (said,)
        if isinstance(obj, ModuleType):
            return _same, (obj.__name__, _release(obj.__name__))
        if isinstance(obj, EpochCell):
            return _same, ("epoch",)
        if has_method(obj, "recognised_by"):
            return _same, (*_code_of(type(obj), set()), obj.recognised_by())
        if isinstance(obj, torch.Tensor):
            raw = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return _same, (str(obj.dtype), tuple(obj.shape), _digest_of(raw.numpy()))
        if isinstance(obj, np.memmap) and obj.filename is not None:
            file = Path(obj.filename)
            status = file.stat()
            about = (str(file), status.st_size, status.st_mtime_ns)
            return _same, (*about, obj.offset, obj.dtype.str, obj.shape)
        return NotImplemented


def _same(*_what: object) -> None:
    """Stand for an object that is compared by what is said of it."""


def _digest_of(value: object) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    _Identity(digest).dump(value)
    return digest.digest()


def _code_of(obj: type | FunctionType | BuiltinFunctionType, seen: set[int]) -> Iterator[str]:
    """Yield what tells the code of a class or function from other code, line by line.

    Of a user's: its instructions, and those of the classes, functions and plain values that it
    refers to by name. Comments and what else is in its module make no difference. Of an installed
    one: its name and release.
    """
    if id(obj) in seen:
        return
    seen.add(id(obj))
    module = obj.__module__
    yield f"{module}.{obj.__qualname__}"
    if not is_users(module):
        yield _release(module)
    elif isinstance(obj, type):
        for base in obj.__mro__[1:]:
            yield from _code_of(base, seen)
        for name, value in vars(obj).items():
            function = _function_in(value)
            if isinstance(function, FunctionType):
                yield from _code_of(function, seen)
            elif isinstance(value, _VALUES) and name not in _OF_EVERY_CLASS:
                yield f"{name}={_said(value)}"
    elif isinstance(obj, FunctionType):
        yield from _instructions(obj.__code__)
        for name in sorted(_names(obj.__code__)):
            value = obj.__globals__.get(name)
            if isinstance(value, type | FunctionType):
                yield from _code_of(value, seen)
            elif isinstance(value, _VALUES):
                yield f"{name}={_said(value)}"


def _function_in(value: object) -> object:
    """Return the function that an attribute of a class calls, or the attribute itself."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _said(value: object) -> str:
    try:
        return _digest_of(value).hex()
    except Exception:  # code refers to more than makes samples; what cannot be said is left out
        return type(value).__qualname__


def _instructions(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _instructions(const)
        elif isinstance(const, frozenset):
            yield repr(sorted(map(repr, const)))
        else:
            yield repr(const)


def _names(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


@cache
def _release(module: str | None) -> str:
    """Return the version of what an installed module belongs to; of Python's own, Python's."""
    top = (module or "").partition(".")[0]
    if top in sys.stdlib_module_names:
        return sys.version.partition(" ")[0]
    return ",".join(importlib.metadata.version(name) for name in _distributions().get(top, ()))


@lru_cache(maxsize=1)
def _distributions() -> dict[str, list[str]]:
    found = importlib.metadata.packages_distributions()
    return {top: sorted(set(names)) for top, names in found.items()}


def _files(dataset: object) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files that a dataset lists or names, with what the system says of them."""
    paths: list[str] = []
    waiting, seen = [dataset], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or has_method(one, "recognised_by"):
            continue
        seen.add(id(one))
        for value in held_by(one).values():
            if isinstance(value, str | os.PathLike):
                paths.append(os.fsdecode(value))
            elif isinstance(value, PackedStrings):
                step = max(1, -(-len(value) // _MOST_FILES))
                paths.extend(value[number] for number in range(0, len(value), step))
            elif isinstance(value, torch.utils.data.Dataset | _GivesBytes):
                waiting.append(value)
            elif isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
                paths.extend(value[:_MOST_FILES])
        try:
            length = dataset_length(one) or 0
            listed = files_of(one, range(0, length, max(1, -(-length // _MOST_FILES))))
        except Exception:  # a dataset of another kind; its state still counts
            listed = None
        paths.extend(listed or ())
    for path in paths:
        try:
            status = Path(path).stat()
        except (OSError, ValueError):
            continue  # a text that names no file
        # A folder changes with anything that is written to it.
        if stat.S_ISREG(status.st_mode):
            yield path, status

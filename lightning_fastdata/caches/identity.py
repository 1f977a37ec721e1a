"""By what the samples of a dataset are recognised in another run: what they are made from.

Two datasets have the same identity if their classes, the code of these with all that it refers to,
and everything they hold are the same, and the files they name have the same size and time of
change. An object that has a method ``recognised_by()`` is recognised by its class and what that
returns.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.metadata
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, Final

import numpy as np
import torch

from lightning_fastdata.caches.named_files import named_files
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.randomness.generators import GENERATOR_CLASSES
from lightning_fastdata.randomness.search import is_users
from lightning_fastdata.randomness.seeds import EpochCell
from lightning_fastdata.tree import has_method

_OF_EVERY_CLASS: Final = frozenset(
    (
        *("__module__", "__qualname__", "__doc__", "__firstlineno__", "__static_attributes__"),
        *("__dict__", "__weakref__", "_abc_impl"),
        # Set by Python when they are first asked for: when an object is pickled, say.
        *("__slotnames__", "__annotations__", "__annotations_cache__", "__annotate_func__"),
    )
)
_OF_A_PROCESS: Final = frozenset(
    (
        *("os", "multiprocessing", "threading", "logging", "concurrent", "asyncio", "socket"),
        *("subprocess", "queue", "time", "weakref", "contextvars"),
    )
)
"""Modules of Python whose objects stand for what a process has, and not for data."""
_GLOBAL: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTE: Final = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


def identity(dataset: object) -> str:
    """Return 32 hexadecimal digits for what a dataset returns. No sample is read.

    Raises:
        DatasetError: The dataset holds something that cannot be compared with that of another run.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        _Identity(digest, {}).dump(dataset)
    except Exception as error:  # whatever an object's own __reduce__ raises
        raise DatasetError(
            f"What {type(dataset).__name__} holds cannot be recognised in another run "
            f"({type(error).__name__}: {error}), and a cache must know whose samples it has. Give "
            'it a key of your own, which you change when the samples change: key="photos-1".'
        ) from error
    for path, status in named_files(dataset):
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace"))
    return digest.hexdigest()


class _Sink:
    """Where a pickle goes that is never read: into a digest."""

    def __init__(self, digest: hashlib.blake2b) -> None:
        self.write: Callable[[bytes], object] = digest.update


class _Identity(pickle.Pickler):
    """Digests what a pickle would hold, and of code what it says instead of its name alone.

    Without a memo (``fast``), so that whether two equal strings are one object makes no difference.
    ``known``: objects by their address, with their number; held, so that no other gets it.
    """

    def __init__(self, digest: hashlib.blake2b, known: dict[int, tuple[int, object]]) -> None:
        super().__init__(_Sink(digest), protocol=5)
        self.fast = True
        self._known = known

    def persistent_id(self, obj: object) -> object:
        # Sets are pickled without reducer_override() being asked, in an order by chance.
        if isinstance(obj, set | frozenset):
            return "set", sorted(_digest_of(item, {}) for item in obj)
        if isinstance(obj, GENERATOR_CLASSES):
            return "generator", type(obj).__name__  # what depends on its state cannot be kept
        if not hasattr(obj, "__dict__") or isinstance(obj, ModuleType):
            return None
        # Without a memo, objects and functions that refer to each other would never come to an end.
        if id(obj) in self._known:
            return "again", self._known[id(obj)][0]
        self._known[id(obj)] = len(self._known), obj
        return None

    def reducer_override(self, obj: Any) -> Any:
        if obj is _same:
            return NotImplemented
        if isinstance(obj, type | BuiltinFunctionType | FunctionType):
            return _same, tuple(self._code(obj))
        within = _functions_within(obj)
        if within:
            return _same, (type(obj).__qualname__, *map(self._said, within))
        if isinstance(obj, MappingProxyType):
            return _same, tuple(obj.items())
        if isinstance(obj, ModuleType):
            return _same, (obj.__name__, _release(obj.__name__))
        if isinstance(obj, EpochCell):
            return _same, ("epoch",)
        if has_method(obj, "recognised_by"):
            return _same, (*self._code(type(obj)), obj.recognised_by())
        if isinstance(obj, torch.Tensor):
            raw = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return _same, (str(obj.dtype), tuple(obj.shape), _digest_of(raw.numpy(), {}))
        if isinstance(obj, np.memmap) and obj.filename is not None:
            file = Path(obj.filename)
            status = file.stat()
            about = (str(file), status.st_size, status.st_mtime_ns)
            return _same, (*about, obj.offset, obj.dtype.str, obj.shape)
        return NotImplemented

    def _code(self, obj: type | FunctionType | BuiltinFunctionType) -> Iterator[object]:
        """Yield what tells a class or function from another one, line by line.

        Of a user's: its instructions, its defaults, and all that it refers to: global names, names
        of the user's own modules, what it closes over. Comments and what else is in its module make
        no difference. Of an installed one: its name and release.
        """
        module = obj.__module__
        yield f"{module}.{obj.__qualname__}"
        if not is_users(module):
            yield _release(module)
        elif isinstance(obj, type):
            yield from map(self._said, obj.__mro__[1:])
            for name, value in vars(obj).items():
                if name not in _OF_EVERY_CLASS:
                    yield name
                    yield self._said(value)
        elif isinstance(obj, FunctionType):
            yield from _instructions(obj.__code__)
            yield from map(self._said, obj.__defaults__ or ())
            yield from map(self._said, sorted((obj.__kwdefaults__ or {}).items()))
            yield from map(self._said, vars(obj).items())
            for cell in obj.__closure__ or ():
                try:
                    yield self._said(cell.cell_contents)
                except ValueError:  # nothing was put into it so far
                    yield "empty"
            for name, value in _referred_to(obj):
                yield name
                yield self._said(value)

    def _said(self, value: object) -> object:
        """Return what tells a value that code refers to from another one.

        Code refers to more than makes samples, and in more ways than can be compared: of what
        cannot be, the class counts.
        """
        kind = type(value)
        if isinstance(value, type | FunctionType) or kind.__module__.partition(".")[0] not in (
            _OF_A_PROCESS
        ):
            before = len(self._known)
            try:
                return _digest_of(value, self._known)
            except Exception:  # whatever its own __reduce__ raises
                for key in list(self._known)[before:]:
                    del self._known[key]
        return kind.__qualname__ if isinstance(value, type) else self._said(kind)


def _same(*_what: object) -> None:
    """Stand for an object that is compared by what is said of it."""


def _digest_of(value: object, known: dict[int, tuple[int, object]]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    _Identity(digest, known).dump(value)
    return digest.digest()


def _functions_within(obj: object) -> tuple[object, ...]:
    """Return the functions that a descriptor or a wrapper of ``functools`` calls."""
    if isinstance(obj, property):
        return obj.fget, obj.fset, obj.fdel
    if isinstance(obj, functools.cached_property):
        return (obj.func,)
    if isinstance(obj, classmethod | staticmethod | functools._lru_cache_wrapper):
        return (obj.__wrapped__,)
    return ()


def _instructions(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _instructions(const)
        elif isinstance(const, frozenset):
            yield repr(sorted(map(repr, const)))
        else:
            yield repr(const)


def _referred_to(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the globals that a function uses, by name; of user's modules what it uses of them.

    A module that the function itself imports counts by its source, as it may not be imported yet.
    """
    names: dict[str, set[str]] = {}
    for code in _codes(function.__code__):
        for each in dis.get_instructions(code):
            if isinstance(each.argval, str):
                names.setdefault(each.opname, set()).add(each.argval)
    attributes = {name for kind in _ATTRIBUTE for name in names.get(kind, ())}
    waiting = sorted({name for kind in _GLOBAL for name in names.get(kind, ())}, reverse=True)
    found = [(name, function.__globals__[name]) for name in waiting if name in function.__globals__]
    modules = set()
    while found:
        name, value = found.pop()
        if not isinstance(value, ModuleType):
            yield name, value
        elif not is_users(value.__name__):
            yield name, _release(value.__name__)
        elif value.__name__ not in modules:
            modules.add(value.__name__)
            used = sorted(attributes & vars(value).keys(), reverse=True)
            found += [(f"{value.__name__}.{each}", vars(value)[each]) for each in used]
    package = function.__globals__.get("__package__") or ""
    for name in sorted(names.get("IMPORT_NAME", ())):
        for source in _sources(name, package):
            yield f"{name}: {source.name}", source.read_bytes()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _sources(name: str, package: str) -> Iterator[Path]:
    """Yield the file of a module of the user's own that a function of a package imports."""
    for full in (name, f"{package}.{name}"):
        top, *rest = full.split(".")
        if not top or top in sys.stdlib_module_names or top in _distributions():
            continue
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):  # ValueError: __main__ has none
            continue
        if spec is None or spec.origin is None:
            continue
        base = Path(spec.origin)
        if rest:
            base = base.parent.joinpath(*rest)
            base = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if base.is_file():
            yield base


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

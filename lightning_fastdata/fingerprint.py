"""Whether what the program holds is as it was: a digest of objects, down to each element.

It tells of this process alone. Compared are the attributes and elements of an object and of all
that it holds, numbers in arrays and tensors, code by its address with what it closes over, the
attributes of the user's classes, the plain data (numbers, texts, and containers of these) among the
globals of the user's modules that have a part in it, and how much ``functools.lru_cache`` has kept;
of a few files that are named alone, size and time. Not compared are other files, the environment,
and globals of other kinds.
"""

from __future__ import annotations

import argparse
import ctypes
import enum
import functools
import hashlib
import math
import os
import pickle
import stat
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import PurePath
from types import FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch

from lightning_fastdata.host import clock
from lightning_fastdata.randomness.search import is_users, loaded_classes
from lightning_fastdata.tree import held, held_by

_AT_ONCE_BYTES: Final = 2**24
"""So much is digested between two looks at the clock."""
_LARGE_BYTES: Final = 2**20
_FEW: Final = 16
"""Files that are looked at."""
_LOOKED_AT: Final = 1000
"""Elements of a global container that are looked at to see whether it holds plain data."""
_DEPTH: Final = 8
_ATOMS: Final = (int, float, complex, bool, str, bytes, bytearray, NoneType, range, slice)
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_MAPPINGS: Final = (dict, OrderedDict, defaultdict)
_SHARED: Final = (
    ("multiprocessing.managers", "BaseProxy"),
    ("multiprocessing.queues", "Queue", "SimpleQueue"),
    ("multiprocessing.shared_memory", "SharedMemory", "ShareableList"),
    ("multiprocessing.synchronize", "SemLock", "Condition", "Event"),
    ("mmap", "mmap"),
)
"""What other processes see as it is now, whenever they were started."""
BUILT_IN: Final = (dict, list, tuple, set, frozenset, deque, str, bytes, int, float)
_HEAP_TYPE: Final = 1 << 9
"""Of ``type.__flags__``: a class that was made by a class statement."""
C_DATA: Final = ctypes.Array.__mro__[1]
REMEMBERS: Final = type(functools.lru_cache(len))
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))


class Fingerprint(NamedTuple):
    """What some objects were at one moment; equal to another one if nothing has changed."""

    own: bytes
    """A digest of what belongs to this process, and is copied into others when they start."""
    live: bytes
    """A digest of what other processes see change: shared memory, and files."""


def fingerprint(
    *objects: object,
    within_s: float = math.inf,
    roughly: bool = False,
    with_globals: bool = True,
    instead: Mapping[int, object] | None = None,
) -> Fingerprint | None:
    """Return what objects are now, or None if they cannot be compared.

    So it is of what cannot be pickled (an open file, a generator), of memory on a device, and of
    what takes more than ``within_s`` seconds of a CPU. What an object of the user's class leaves
    out of a pickle counts, as a forked process has it. ``roughly``: of tensors above 1 MiB torch's
    count of changes is compared, of such arrays a part. ``with_globals``: with those of modules,
    which may have nothing to do with the objects. ``instead``: what some objects, by their ``id``,
    are compared by.
    """
    return Digesting(within_s, instead, roughly=roughly, with_globals=with_globals).of(objects)


class _TooLongError(Exception):
    """The time is over."""


class _Sink:
    """Where a pickle goes that is never read: into a digest."""

    def __init__(self, until_s: float) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._until_s = until_s

    def write(self, data: Any) -> None:
        raw = memoryview(data).cast("B")
        for start in range(0, len(raw), _AT_ONCE_BYTES):
            if clock.thread_time() > self._until_s:
                raise _TooLongError
            self.digest.update(raw[start : start + _AT_ONCE_BYTES])

    def write_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.write(buffer.raw())


class Digesting(pickle.Pickler):
    """Digests what a pickle would hold; code by its address, and what it holds."""

    def __init__(
        self,
        within_s: float,
        instead: Mapping[int, object] | None = None,
        *,
        roughly: bool = False,
        with_globals: bool = True,
    ) -> None:
        self._sink = sink = _Sink(clock.thread_time() + within_s)
        super().__init__(sink, protocol=5, buffer_callback=sink.write_buffer)
        self.live = hashlib.blake2b(digest_size=16)
        self._instead = instead or {}
        self._roughly = roughly
        self._with_globals = with_globals
        self._looked_up = 0
        self._modules: set[str] = set()
        self._code: set[int] = set()
        self.lasting_kinds = tuple(
            kind for module, *names in _SHARED for kind in loaded_classes(module, *names)
        )
        self.lasting_kinds += _LOCKS
        self.with_locks = loaded_classes("multiprocessing.sharedctypes", "SynchronizedBase")

    def of(self, objects: tuple[object, ...]) -> Fingerprint | None:
        """Return what objects are now; None: they cannot be compared. To be called once."""
        try:
            self.dump(objects)
        except Exception:  # whatever the __reduce__() of an object raises
            return None
        return Fingerprint(self._sink.digest.digest(), self.live.digest())

    def reducer_override(self, obj: Any) -> Any:
        """Return what stands for an object in its pickle."""
        if obj is _stand_in:
            return NotImplemented
        if id(obj) in self._instead:
            return _stand_in, ("instead", self._instead[id(obj)])
        if isinstance(obj, type | FunctionType):
            return _stand_in, (id(obj), tuple(self._of_code(obj)))
        if isinstance(obj, PurePath):
            self._look_up(str(obj))
            return _stand_in, ("path", str(obj))
        if isinstance(obj, ModuleType):
            return _stand_in, ("module", obj.__name__)
        if isinstance(obj, torch.Tensor):
            return _stand_in, tuple(self._of_tensor(obj))
        if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
            return _stand_in, tuple(self._of_array(obj))
        if isinstance(obj, self.with_locks):
            self.live.update(bytes(cast("Any", obj).get_obj()))
            return _stand_in, ("shared", id(obj))
        if isinstance(obj, C_DATA):  # which may be shared, or this process's own
            return _stand_in, (bytes(cast("Any", obj)),)
        if isinstance(obj, self.lasting_kinds):
            return _stand_in, ("lasts", id(obj))
        return self._of_others(obj)

    def _of_others(self, obj: Any) -> Any:
        if isinstance(obj, MethodType):
            return _stand_in, ("method", obj.__func__, obj.__self__)
        if isinstance(obj, REMEMBERS):
            return _stand_in, ("remembers", obj.cache_info().misses, held_by(obj))
        if held(obj, "__wrapped__") is not None:
            return _stand_in, (type(obj).__qualname__, held_by(obj))
        if is_users(type(obj).__module__):
            return _stand_in, tuple(self._of_object(obj))
        return NotImplemented

    def _of_object(self, obj: Any) -> Iterator[object]:
        """Yield what an object of the user's class holds, also what a pickle would leave out."""
        yield type(obj)
        state = object.__getstate__(obj)  # its __dict__, or that and its __slots__
        yield (state[0], tuple(state[1].items())) if isinstance(state, tuple) else state
        for value in held_by(obj).values():
            if type(value) is str:
                self._look_up(value)
        kind: Any = next((one for one in BUILT_IN if isinstance(obj, one)), None)
        if kind is not None:
            yield kind(obj)
        elif not is_python(type(obj)):
            yield obj.__reduce_ex__(5)  # what is not in Python's own attributes

    def _look_up(self, path: str) -> None:
        if self._looked_up < _FEW:
            self._looked_up += 1
            self._digest_file(path)

    def _digest_file(self, path: str) -> None:
        """Take the size and the time of a file into the digest of what others see change."""
        self.live.update(repr(of_file(path)).encode())

    def _of_tensor(self, tensor: torch.Tensor) -> Iterator[object]:
        if tensor.device.type != "cpu":
            raise TypeError("It would have to be copied from its device.")
        yield from (str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad, held_by(tensor))
        if self._roughly and tensor.nbytes > _LARGE_BYTES:
            yield from (tensor._version, tensor.data_ptr())
            return
        content = _memory_of(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        if tensor.is_shared():  # type: ignore[no-untyped-call]
            self.live.update(content)
            yield from (tensor.data_ptr(), tensor.stride())
        else:
            yield content

    def _of_array(self, array: np.ndarray[Any, Any]) -> Iterator[object]:
        yield from (array.dtype.str, array.shape, held_by(array))  # of a subclass: a mask, say
        owner = file_under(array)
        if owner is not None:
            yield from (str(owner.filename), array.ctypes.data, array.strides)
            return
        if self._roughly and array.nbytes > _LARGE_BYTES:
            yield array.ctypes.data
            array = array.reshape(-1)[:: -(-array.nbytes // _LARGE_BYTES)]
        plain = np.ascontiguousarray(np.asarray(array)).reshape(-1)
        yield _as_buffer(plain.view(np.uint8) if plain.size else plain)

    def _of_code(self, obj: type | FunctionType) -> Iterator[object]:
        """Yield what belongs to a class or a function, once: it may refer to itself."""
        if id(obj) not in self._code:
            self._code.add(id(obj))
            yield from self._of_class(obj) if isinstance(obj, type) else self._of_function(obj)

    def _of_class(self, cls: type) -> Iterator[object]:
        yield cls.__qualname__
        for owner in cls.__mro__:
            if is_users(owner.__module__):
                yield _of_namespace(owner)
                yield self._of_globals(owner.__module__)

    def _of_function(self, function: FunctionType) -> Iterator[object]:
        yield from (id(function.__code__), function.__defaults__, function.__kwdefaults__)
        yield from (vars(function), tuple(closed_over(function)))
        if is_users(function.__module__):
            yield self._of_globals(function.__module__)

    def _of_globals(self, name: str | None) -> tuple[object, ...]:
        """Return the plain data of a module, and of the user's modules that it imports, once."""
        module = sys.modules.get(name or "")
        if module is None or name in self._modules or not self._with_globals:
            return ()
        self._modules.add(str(name))
        found: list[object] = []
        for key, value in list(vars(module).items()):
            if key.startswith("__"):
                continue
            if isinstance(value, ModuleType):
                if is_users(value.__name__):
                    found += key, self._of_globals(value.__name__)
            elif isinstance(value, type):
                home = value.__module__
                if isinstance(home, str) and is_users(home):
                    found += key, _plain_attributes(value), self._of_globals(home)
            elif isinstance(value, FunctionType):
                if is_users(value.__module__):
                    found += key, tuple(filter(is_plain, kept_by(value)))
            elif is_plain(value):
                found += key, value
        return tuple(found)


def file_under(array: np.ndarray[Any, Any]) -> np.memmap[Any, Any] | None:
    """Return the memory map whose pages an array shows, for every process and at any time."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    mapped = isinstance(owner, np.memmap) and held(owner, "_mmap") is not None
    return owner if mapped and owner.mode != "c" else None


def closed_over(function: FunctionType) -> list[object]:
    """Return what a function closes over; None in the place of a name that is not bound yet."""
    contents: list[object] = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            contents.append(None)
    return contents


def kept_by(function: FunctionType) -> tuple[object, ...]:
    """Return what a function keeps from call to call: defaults, a closure, attributes."""
    defaults = (function.__defaults__ or ()), (function.__kwdefaults__ or {}).values()
    return (*chain(*defaults), *closed_over(function), *vars(function).values())


def _of_namespace(cls: type) -> tuple[object, ...]:
    """Return what a class has of its own: methods, and whatever else it holds."""
    found: list[object] = []
    for name, value in list(vars(cls).items()):
        if isinstance(value, staticmethod | classmethod):
            found += name, value.__func__
        elif isinstance(value, property):
            found += name, (value.fget, value.fset, value.fdel)
        elif isinstance(value, FunctionType | REMEMBERS) or is_data(name, value):
            found += name, value
    return tuple(found)


def is_data(name: str, value: object) -> bool:
    """Return whether an attribute of a class is data: no method, nor what Python needs itself."""
    return not (name.startswith("__") or name == "_abc_impl" or hasattr(value, "__get__"))


def _plain_attributes(cls: type) -> tuple[object, ...]:
    """Return the plain data among the attributes of a class, with their names."""
    items = list(vars(cls).items())
    return tuple(item for item in items if not item[0].startswith("__") and _is_plain(item[1]))


def is_python(cls: type) -> bool:
    """Return whether objects of a class hold nothing but Python's attributes."""
    return all(owner is object or owner.__flags__ & _HEAP_TYPE for owner in cls.__mro__)


def of_file(path: str) -> tuple[int, int] | None:
    """Return size and time of the last change of a file; None: it is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path would take as long as the system
    except (OSError, ValueError):  # a text that names no file
        return None
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _as_buffer(array: Any) -> pickle.PickleBuffer:
    return pickle.PickleBuffer(array)


def _memory_of(tensor: torch.Tensor) -> pickle.PickleBuffer:
    """Return the bytes of a tensor, whose memory could not be resized after a view of NumPy's."""
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # which is to live as long
    return _as_buffer(memory)


def _stand_in(*_what: object) -> None:
    """Stand for an object that is compared by what is said of it."""


def is_plain(value: object) -> bool:
    """Return whether a global is compared: data, or what has kept results of a function."""
    return isinstance(value, REMEMBERS) or _is_plain(value)


def _is_plain(value: object, depth: int = _DEPTH) -> bool:
    """Return whether a value is made of numbers, texts and arrays alone."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, enum.Enum | np.generic | torch.Tensor):
        return True
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    with_locks = loaded_classes("multiprocessing.sharedctypes", "SynchronizedBase")
    if isinstance(value, (C_DATA, *with_locks)):
        return True
    if not depth:
        return False
    if kind in _SEQUENCES:
        return all(_is_plain(each, depth - 1) for each in islice(value, _LOOKED_AT))  # type: ignore[call-overload]
    if kind in _MAPPINGS:
        return _are_plain(value, depth)  # type: ignore[arg-type]
    own = kind in (SimpleNamespace, argparse.Namespace) or _is_of_user(kind)
    return own and _are_plain(held_by(value), depth)


def may_become_plain(value: object) -> bool:
    """Return whether it rests on what a value holds whether that is plain data."""
    kind = type(value)
    own = kind in (SimpleNamespace, argparse.Namespace) or _is_of_user(kind)
    return own or kind in (*_SEQUENCES, *_MAPPINGS) or isinstance(value, np.ndarray)


def _are_plain(items: Mapping[Any, object], depth: int) -> bool:
    some = islice(list(items.items()), _LOOKED_AT)
    return all(_is_plain(key, depth - 1) and _is_plain(value, depth - 1) for key, value in some)


def _is_of_user(kind: type) -> bool:
    """Return whether a class is the user's alone: no module, dataset or trainer."""
    return all(owner is object or is_users(owner.__module__) for owner in kind.__mro__)

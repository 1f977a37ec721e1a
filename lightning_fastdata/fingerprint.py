"""Fingerprints that tell whether objects of the program have changed.

They are valid in this process alone. They compare the attributes and elements of an object and of
all that it holds; numbers in arrays and tensors; code, by its address, and its closures; the
attributes of the user's classes; in the user's modules involved, globals that are code or plain
data (numbers, texts, containers of these, and the numbers, texts and keys in other containers); the
number of calls that ``functools.lru_cache`` has computed; size and time of a few files that are
named alone; and the environment and some settings of the process. Other files, and globals of other
kinds, are not compared.

A fingerprint digests all this each time, even if nothing has changed. Meanwhile a snapshot can
record each look at an object: while all of these give the same result, so does the fingerprint.
Objects that may change in a way that no look shows have no snapshot, and are digested each time.
"""

from __future__ import annotations

import abc
import argparse
import copyreg
import ctypes
import datetime
import decimal
import enum
import functools
import math
import os
import pickle
import re
import sys
import threading
from array import array
from collections import (
    ChainMap,
    Counter,
    OrderedDict,
    UserDict,
    UserList,
    UserString,
    defaultdict,
    deque,
)
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import attrgetter, eq, is_, itemgetter, methodcaller
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any, Final, Generic, NamedTuple, TypeAlias, cast

import numpy as np
import torch
import xxhash

from lightning_fastdata.host import clock
from lightning_fastdata.host.system_calls import size_and_time
from lightning_fastdata.tree import (
    bytes_of,
    closed_over,
    held,
    held_by,
    is_named_tuple,
    is_users,
    loaded_classes,
)

Look: TypeAlias = Callable[[Any], Any]
"""Function that reads one part of an object's state."""
_AT_ONCE_BYTES: Final = 2**24
"""Bytes that are digested between two looks at the clock."""
_MOST_BYTES: Final = 2**25
"""Most bytes, digested or copied, for which a snapshot is kept; comparing them takes some 5 ms."""
_TRIES: Final = 2
_FEW: Final = 16
"""Most files whose size and time are compared."""
_LOOKED_AT: Final = 1000
"""Most elements of a global container that are checked for being plain data."""
_FIRST: Final = 256
"""Most parts that are compared of a container that does not hold plain data alone."""
_DEPTH: Final = 8
_ATOMS: Final = (int, float, complex, bool, str, bytes, bytearray, NoneType, range, slice)
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_MAPPINGS: Final = (dict, OrderedDict, defaultdict, Counter)
_NAMESPACES: Final = (
    SimpleNamespace, argparse.Namespace, ChainMap, UserDict, UserList, UserString,
)  # fmt: skip
"""Classes whose objects hold all that they hold in attributes."""
_SHARED: Final = (
    ("multiprocessing.managers", "BaseProxy"),
    ("multiprocessing.queues", "Queue", "SimpleQueue"),
    ("multiprocessing.shared_memory", "SharedMemory", "ShareableList"),
    ("multiprocessing.synchronize", "SemLock", "Condition", "Event"),
    ("mmap", "mmap"),
)
"""Classes, by module, of objects that other processes share, whenever they were started."""
_C_DATA: Final = ctypes.Array.__mro__[1]
_REMEMBERS: Final = type(functools.lru_cache(len))
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))
_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)
_ARRAYS: Final = (np.ndarray, np.memmap)
_OF_C: Final = (SimpleNamespace, functools.partial, deque, OrderedDict, defaultdict, Counter)
"""Classes of Python whose objects, if of exactly that type, hold only attributes and items."""
_METHODS: Final = (FunctionType, staticmethod, classmethod, property, functools.cached_property)
_CONSTANT: Final = (frozenset, str, bytes, int, float)
_FIXED: Final = (
    enum.Enum, np.generic, np.dtype, re.Pattern, torch.dtype, torch.device, torch.layout,
    torch.Size, datetime.date, datetime.time, datetime.timedelta, datetime.timezone,
    decimal.Decimal,
)  # fmt: skip
_NEVER_CHANGE: Final = (complex, range, slice, BuiltinFunctionType, *_FIXED)
"""Classes whose objects do not change; objects that these hold are looked at on their own."""
_PLAIN: Final = (torch.Tensor, array, _REMEMBERS, PurePath, *_FIXED)
"""Classes whose objects are compared if they are globals."""
_NUMBERS_AND_TEXTS: Final = (int, float, complex, bool, str, bytes, NoneType)
_ROOTS: Final = (object, abc.ABC, Generic)
"""Base classes of the user's classes that hold nothing."""
_Owner: TypeAlias = "ModuleType | type | dict[str, Any]"
"""A module, a class, or the globals of code that was executed from text."""
_GIVE_ATTRIBUTES: Final = (object.__getstate__, torch.nn.Module.__getstate__)
_OFFSETS: Final = ("__vectorcalloffset__", "__dictoffset__", "__weaklistoffset__")
"""Member descriptors of classes of C that are no attributes of objects: constant numbers."""


def _itself(items: Any) -> Any:
    return items


def _of_tuple(items: Any) -> Any:
    return tuple.__getitem__(items, slice(None))  # not by a subclass's own __iter__()


_ITEMS: Final[dict[type, tuple[Look, ...]]] = {
    OrderedDict: (OrderedDict.keys, OrderedDict.values),
    dict: (dict.keys, dict.values),
    list: (_itself,),
    set: (_itself,),
    deque: (_itself,),
    tuple: (_of_tuple,),
}
_OF_FUNCTION: Final = attrgetter(
    "__code__", "__closure__", "__defaults__", "__kwdefaults__", "__dict__"
)
_OF_CLASS: Final = attrgetter("__mro__")
_OF_ARRAY: Final = (attrgetter("__array_interface__"),)
# None of these calls lets another thread run.
_OF_TENSOR: Final = (
    methodcaller("data_ptr"),
    methodcaller("stride"),
    methodcaller("is_conj"),
    methodcaller("is_neg"),
    attrgetter("shape", "dtype", "is_cpu", "requires_grad"),
)


_CODES: Final[dict[CodeType, CodeType]] = {}
"""First of each group of equal code objects; kept, so that no other object gets its address."""
_NOTED_BY_PICKLE: Final = "__slotnames__"
"""Attribute that ``copyreg`` writes into a class when its first object is pickled."""


class CountsBatches:
    """Base of what counts batches as they are read. Whatever holds a Trainer holds it, too."""


class Fingerprint(NamedTuple):
    """Digests of some objects at one moment; equal to those of another one if nothing changed."""

    own: bytes
    """Digest of memory of this process, which other processes copy when they start."""
    live: bytes
    """Digest of state whose changes other processes see: shared memory, and files."""
    counts: bool = False
    """Whether the objects hold what counts the batches that are read: each batch changes them."""


def fingerprint(
    *objects: object,
    within_s: float = math.inf,
    with_globals: bool = True,
    instead: Mapping[int, object] | None = None,
) -> Fingerprint | None:
    """Return the fingerprint of objects, or None if they cannot be compared.

    Objects that cannot be pickled (an open file, a generator), memory on a device, and objects that
    take more than ``within_s`` CPU seconds cannot be compared. Attributes that an object of the
    user's class leaves out of its pickle count, as a forked process has them.

    ``with_globals``: include globals of modules and settings of the process, which may have nothing
    to do with the objects. ``instead``: objects to compare in place of others, by the ``id`` of
    these.
    """
    return _Digesting(within_s, instead, with_globals=with_globals).of(objects)


class Watched:
    """Gives fingerprints as :func:`fingerprint` does, but quickly while nothing has changed.

    It keeps alive all that the objects held when it was called last, and copies of their numbers,
    up to 32 MiB. While it does, NumPy does not resize such an array in place (``refcheck``).
    """

    def __init__(self) -> None:
        self._objects: tuple[object, ...] = ()
        self._snapshot: Snapshot | None = None
        self._told: Fingerprint | None = None
        self._notes = True
        """Whether a snapshot of the objects is possible, as far as is known."""

    def now(
        self,
        objects: tuple[object, ...],
        within_s: float,
        instead: Callable[[], Mapping[int, object]] = dict,
    ) -> Fingerprint | None:
        """Return the fingerprint of the objects; None: they cannot be compared.

        ``within_s`` and the result of ``instead`` are arguments of :func:`fingerprint`.
        """
        same = len(objects) == len(self._objects) and all(map(is_, objects, self._objects))
        if same and self._snapshot is not None and self._snapshot.holds():
            return self._told
        self._notes |= not same
        self._objects, self._snapshot, self._told, replaced = objects, None, None, instead()
        # The first look may change something itself: Python records the slots of a class in it.
        for _ in range(_TRIES if self._notes and not replaced else 0):
            noting = _Noting(within_s)
            self._told = noting.of(objects)
            self._notes = noting.looks.is_whole and self._told is not None
            if self._notes and noting.looks.holds():  # else another thread made changes meanwhile
                self._snapshot = noting.looks
            if self._snapshot is not None or not self._notes:
                break
        if self._told is None:
            self._told = fingerprint(*objects, within_s=within_s, instead=replaced)
        return self._told

    def __reduce__(self) -> tuple[type[Watched], tuple[()]]:
        return Watched, ()  # another process has the objects at other addresses


class _Sink:
    """A file for a pickle that is never read: it digests what is written."""

    def __init__(self, until_s: float) -> None:
        # Whoever changes the data is no adversary: what counts is that gigabytes take milliseconds.
        self.digest = xxhash.xxh3_128()
        self.digested_bytes = 0
        self._until_s = until_s

    def write(self, data: Any) -> None:
        raw = memoryview(data).cast("B")
        self.digested_bytes += len(raw)
        for start in range(0, len(raw), _AT_ONCE_BYTES):
            if clock.thread_time() > self._until_s:
                raise TimeoutError
            self.digest.update(raw[start : start + _AT_ONCE_BYTES])

    def write_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.write(buffer.raw())


class _Digesting(pickle.Pickler):
    """Digests what a pickle would hold, and code by its address and the objects it holds."""

    def __init__(
        self,
        within_s: float,
        instead: Mapping[int, object] | None = None,
        *,
        with_globals: bool = True,
        noted: bool = False,
    ) -> None:
        self._sink = _Sink(clock.thread_time() + within_s)
        super().__init__(self._sink, protocol=5, buffer_callback=self._sink.write_buffer)
        self._live = xxhash.xxh3_128()
        self._instead = instead or {}
        self.looks = Snapshot(is_whole=noted)
        """Looks that were taken; kept only if ``noted``."""
        self._with_globals = with_globals
        self._looked_up = 0
        self._met: list[_Owner] = []
        """Modules, classes and globals whose plain data are compared."""
        self._in_globals = self._counts = False
        self._once: set[tuple[str, int]] = set()
        self._attributes: dict[type, Look] = {}
        lasting = [kind for module, *names in _SHARED for kind in loaded_classes(module, *names)]
        self._lasting_kinds = (*lasting, *_LOCKS)
        self._with_locks = loaded_classes("multiprocessing.sharedctypes", "SynchronizedBase")

    def of(self, objects: tuple[object, ...]) -> Fingerprint | None:
        """Return the fingerprint of objects; None: they cannot be compared. Call it only once."""
        try:
            self.dump(objects)
            if self._with_globals:
                self.dump((os.environ, self.looks.fact(_of_process, None)))
            self._in_globals = True
            for owner in self._met:  # the list grows meanwhile
                self.dump(self._outline(owner))
        except Exception:  # whatever the __reduce__() of an object raises
            return None
        if self._sink.digested_bytes > _MOST_BYTES:
            self.looks.unseen()
        return Fingerprint(self._sink.digest.digest(), self._live.digest(), self._counts)

    def _items(self, items: dict[Any, Any]) -> None:
        if items:
            self.looks.watch(dict.values, items)
            self.looks.watch(dict.keys, items)
        else:  # as for most functions
            self.looks.fact(len, items)

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduction that represents an object in the pickle."""
        if obj is _stand_in:
            return NotImplemented
        if id(obj) in self._instead:
            return _stand_in, ("instead", self._instead[id(obj)])
        if isinstance(obj, type | FunctionType):
            of: Any = self._of_class if isinstance(obj, type) else self._of_function
            first = self._is_first("code", obj)  # it may refer to itself
            return _stand_in, (id(obj), tuple(of(obj)) if first else ())
        if isinstance(obj, PurePath):
            if not self._in_globals:  # a global path may be that of a log, which changes
                self._look_up(str(obj))
            return _stand_in, ("path", str(obj), held_by(obj))
        if isinstance(obj, ModuleType):
            self._meet(obj)
            return _stand_in, ("module", obj.__name__)
        if isinstance(obj, torch.Tensor):
            return _stand_in, tuple(self._of_tensor(obj))
        if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
            return _stand_in, tuple(self._of_array(obj))
        if isinstance(obj, (_C_DATA, *self._with_locks)):
            return _stand_in, self._of_c_data(obj)
        if isinstance(obj, self._lasting_kinds):
            if isinstance(obj, loaded_classes("mmap", "mmap")) and _is_private(obj):
                return _stand_in, self._of_private_map(obj)
            return _stand_in, ("lasts", id(obj))
        return self._of_others(obj)

    def _of_c_data(self, obj: Any) -> tuple[object, ...]:
        self.looks.unseen()
        if isinstance(obj, self._with_locks):
            self._live.update(bytes(cast("Any", obj).get_obj()))
            return "shared", id(obj)
        return (bytes(obj),)  # the memory may be shared, or this process's own

    def _of_private_map(self, obj: Any) -> tuple[object, ...]:
        self.looks.unseen()
        return id(obj), pickle.PickleBuffer(obj)

    def _of_others(self, obj: Any) -> Any:
        kind = type(obj)
        self._counts |= isinstance(obj, CountsBatches)
        if isinstance(obj, MethodType):
            return _stand_in, ("method", obj.__func__, obj.__self__)
        if isinstance(obj, _REMEMBERS):
            misses = self.looks.fact(_misses, obj)
            return _stand_in, ("remembers", misses, self._of_attributes(obj))
        if kind in _OF_C or is_users(kind.__module__):
            return _stand_in, tuple(self._of_object(obj))
        if held(obj, "__wrapped__") is not None:
            self.looks.unseen()
            return _stand_in, (kind.__qualname__, held_by(obj))
        one_array = isinstance(obj, loaded_classes("pandas._libs.arrays", "NDArrayBacked"))
        if kind.__module__.startswith("pandas.") and (one_array or _is_plain_object(kind)):
            self.looks.unseen()
            # As it is read, pandas keeps there what follows from the rest.
            own = {name: value for name, value in held_by(obj).items() if name != "_cache"}
            return _stand_in, (kind, own, *((obj._ndarray, obj._dtype) if one_array else ()))
        if _is_plain_object(kind):
            self._of_attributes(obj)
            self._items(held_by(obj))  # its pickle may hold only a copy of this dict
        elif not isinstance(obj, _NEVER_CHANGE) or isinstance(obj, np.void):
            self.looks.unseen()
        return NotImplemented

    def _of_object(self, obj: Any) -> Iterator[object]:
        """Yield all that an object holds, also attributes that a pickle would leave out."""
        kind = type(obj)
        yield self._of_attributes(obj)
        for value in held_by(obj).values():
            if type(value) is str:
                self._look_up(value)
        for base, looks in _ITEMS.items():
            if issubclass(kind, base):
                if kind is not base and base in (list, set, deque):
                    self.looks.unseen()
                yield from (self.looks.parts(look, obj) for look in looks)
                return
        constant: Any = next((base for base in _CONSTANT if issubclass(kind, base)), None)
        if constant is not None:
            yield constant(obj)
        elif kind not in _OF_C and not _is_python(kind):
            self.looks.unseen()
            yield obj.__reduce_ex__(5)  # it holds more than Python's own attributes

    def _of_attributes(self, obj: object) -> tuple[object, ...]:
        """Return the class of an object, and the attributes in its ``__dict__`` and slots."""
        (kind,) = self.looks.parts(_kind_of, obj)
        if hasattr(kind, "__del__") and not isinstance(obj, torch.utils.data.Dataset):
            self.looks.unseen()  # a snapshot would keep it alive, and its __del__() from running
        if kind not in self._attributes:
            self._attributes[kind] = _attributes_of(kind)
        return kind, *self.looks.parts(self._attributes[kind], obj)

    def _look_up(self, path: str) -> None:
        """Add the size and the time of a file to the ``live`` digest."""
        if self._looked_up < _FEW:
            self._looked_up += 1
            self._live.update(repr(self.looks.fact(size_and_time, path)).encode())

    def _of_tensor(self, tensor: torch.Tensor) -> Iterator[object]:
        if tensor.device.type != "cpu":
            raise TypeError("It would have to be copied from its device.")
        yield from (str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)
        yield self._of_attributes(tensor)
        yield self.looks.parts(_gradient_of, tensor)
        dense = type(tensor) in _TENSORS and tensor.layout is torch.strided
        dense = dense and tensor.is_contiguous() and tensor.grad_fn is None
        if not dense or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            self.looks.unseen()
        # Not by NumPy: memory that it has viewed can never be resized again.
        flat = bytes_of(tensor.detach())
        content = self.looks.memory(_OF_TENSOR, tensor, _memory_of(flat, flat.data_ptr()))
        if tensor.is_shared():  # type: ignore[no-untyped-call]
            self._live.update(content)
            yield from (tensor.data_ptr(), tensor.stride())
        else:
            yield pickle.PickleBuffer(content)

    def _of_array(self, array: np.ndarray[Any, Any]) -> Iterator[object]:
        yield from (str(array.dtype), array.shape, array.flags.writeable)
        yield self._of_attributes(array)  # a subclass may have some, such as a mask
        if type(array) not in _ARRAYS:
            self.looks.unseen()
        owner = file_under(array)
        if owner is not None:
            self.looks.fact(*_OF_ARRAY, array)
            yield from (str(owner.filename), array.ctypes.data, array.strides)
            return
        if not array.flags.forc:
            self.looks.unseen()
            array = np.ascontiguousarray(array)
        memory = self.looks.memory(_OF_ARRAY, array, _memory_of(array, array.ctypes.data))
        yield from (array.strides, pickle.PickleBuffer(memory))

    def _of_class(self, cls: type) -> Iterator[object]:
        _, *bases = self.looks.parts(_OF_CLASS, cls)
        metaclass = self.looks.parts(_kind_of, cls)
        yield from (base for base in (*metaclass, *bases) if is_users(base.__module__))
        if is_users(cls.__module__):
            own = vars(cls)
            names = self.looks.parts(MappingProxyType.keys, own)
            values = self.looks.parts(MappingProxyType.values, own)
            yield tuple(
                _of_member(*item)
                for item in zip(names, values, strict=True)
                if item[0] != _NOTED_BY_PICKLE
            )
            self._meet(cls.__module__)

    def _of_function(self, function: FunctionType) -> Iterator[object]:
        code, closure, *kept = self.looks.parts(_OF_FUNCTION, function)
        closed = self.looks.parts(closed_over, function) if closure else ()
        yield from (_code(code), *kept, *closed)
        names = function.__globals__
        self._meet(function.__module__, names.get("__name__"))
        module = sys.modules.get(names.get("__name__", ""))
        if module is None or vars(module) is not names:  # code that was executed from text
            self._meet(names)

    def _is_first(self, what: str, obj: object) -> bool:
        first = (what, id(obj)) not in self._once
        self._once.add((what, id(obj)))
        return first

    def _meet(self, *owners: object) -> None:
        """Have the plain data of the user's modules and classes among ``owners`` compared, too."""
        for owner in owners if self._with_globals else ():
            module = sys.modules.get(owner) if isinstance(owner, str) else owner
            users = isinstance(module, ModuleType | type | dict) and is_users(_home_of(module))
            if users and self._is_first("met", module):
                self._met.append(cast("_Owner", module))

    def _outline(self, owner: _Owner) -> tuple[object, ...]:
        """Return the code and the plain data among the attributes of a module or a class.

        Of containers that hold other objects, too, the numbers, texts and keys count; of all other
        objects only which ones they are, and none of these objects is kept. Descriptors of a class
        do not count: cloudpickle gives a class other ones whenever it unpickles it by value.
        """
        namespace: Mapping[str, Any] = owner if isinstance(owner, dict) else vars(owner)
        self.looks.watch(dict.keys if type(namespace) is dict else MappingProxyType.keys, namespace)
        self.looks.watch(_kinds, namespace)
        in_class = isinstance(owner, type)
        found: dict[str, object] = {}
        others: list[str] = []
        for name, value in list(namespace.items()):
            if not name.startswith("__") or isinstance(value, FunctionType):
                told = self._of_global(value, method=in_class)
                if told is not None:
                    found[name] = told
                elif not in_class or is_data(name, value) or _holds_others(type(value)):
                    others.append(name)

        def parts(names: Mapping[str, Any]) -> list[tuple[object, ...]]:
            # An object that is not plain data may become it; none of them is kept.
            return [(_is_plain(names[each]), _plain_part(names[each])) for each in others]

        of_others = self.looks.fact(parts, namespace) if others else []
        if found:
            self.looks.watch(itemgetter(*found, next(iter(found))), namespace)
        return (*found.items(), *zip(others, of_others, strict=True))

    def _of_global(self, value: Any, *, method: bool) -> object:
        """Return the value by which an attribute of a module or class is compared; None: none."""
        if isinstance(value, ModuleType | type):
            for owner in value.__mro__ if isinstance(value, type) else (value,):
                self._meet(owner, _home_of(owner))
            return id(value)
        if isinstance(value, FunctionType) and not method:
            homes = value.__module__, value.__globals__.get("__name__")
            self._meet(*homes)
            return id(value), self._of_code(value) if any(map(is_users, homes)) else ()
        if isinstance(value, _METHODS):
            return tuple(map(self._of_code, functions_of(value)))
        return (value,) if _is_plain(value) else None

    def _of_code(self, function: object, within: tuple[object, ...] = ()) -> object:
        """Return the value by which a global function or a method is compared: its code and state.

        Its address does not count: cloudpickle gives a class equal methods anew whenever it
        unpickles an object whose class was pickled by value, such as those that Ray's actors send.
        The objects that functions hold are compared likewise, ``within`` these functions.
        """
        if not isinstance(function, FunctionType) or function in within:
            if _is_plain(function):
                return (function,)
            if self.looks.is_whole and _holds_others(type(function)):
                self.looks.fact(_is_plain, function)  # it may become plain data
            return id(function)
        code, closure, defaults, keywords, attributes = self.looks.parts(_OF_FUNCTION, function)
        closed = self.looks.parts(closed_over, function) if closure else ()
        self._items(keywords or {})
        self._items(attributes)
        kept = (*(defaults or ()), *(keywords or {}).values(), *closed, *attributes.values())
        inside = (*within, function)
        return _code(code), tuple(self._of_code(each, inside) for each in kept)


class _Noting(_Digesting):
    """Digests objects, and takes a snapshot of each before it is digested."""

    def __init__(self, within_s: float) -> None:
        super().__init__(within_s, noted=True)

    def persistent_id(self, obj: Any) -> None:
        """Note a container that the pickler reduces by itself; it calls this for each object."""
        kind = type(obj)
        if kind is dict:
            self._items(obj)
        elif kind is list or kind is set:
            self.looks.watch(_itself, obj)
        elif kind is bytearray:
            self.looks.fact(bytes, obj)
        elif kind is pickle.PickleBuffer and not self.looks.is_copy(obj.raw().obj):
            self.looks.unseen()


def file_under(array: np.ndarray[Any, Any]) -> np.memmap[Any, Any] | None:
    """Return the memory map under an array if processes share its changes; None: there is none."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    mapped = isinstance(owner, np.memmap) and held(owner, "_mmap") is not None
    return owner if mapped and owner.mode != "c" else None


def _is_private(mapped: Any) -> bool:
    """Return whether changes that are written to a ``mmap`` are this process's own."""
    told = repr(mapped)
    if mapped.closed or "ACCESS_DEFAULT" not in told:
        return not mapped.closed and "ACCESS_COPY" in told
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    try:
        with open("/proc/self/maps", "rb") as maps:  # noqa: PTH123
            areas = (line.split(maxsplit=2) for line in maps)
            bounds = ((area.split(b"-"), rights) for area, rights, _ in areas)
            own = (b"p" in r for (a, b), r in bounds if int(a, 16) <= address < int(b, 16))
            return next(own, False)
    except OSError:  # on other systems it cannot be told
        return False


def functions_of(method: Any) -> tuple[object, ...]:
    """Return the functions behind an attribute of a class; what is no method is returned itself."""
    if isinstance(method, property):
        return method.fget, method.fset, method.fdel
    if isinstance(method, functools.cached_property):
        return (method.func,)
    return (getattr(method, "__func__", method),)


def _code(code: CodeType) -> int:
    """Return a number that equal code objects share, and others do not.

    Their hash does not suffice: in Python 3.11 it ignores what the code computes.
    """
    return id(_CODES.setdefault(code, code))


def _of_member(name: str, value: object) -> tuple[object, ...]:
    """Return the value by which an attribute of a user's class is compared."""
    if isinstance(value, staticmethod | classmethod | property):
        return name, *functions_of(value)
    if isinstance(value, functools.cached_property):
        return name, held_by(value)
    own = is_users(type(value).__module__)
    if own or isinstance(value, FunctionType | _REMEMBERS) or is_data(name, value):
        return name, value
    return (name,) if name.startswith("__") or name == "_abc_impl" else (name, id(value))


def is_data(name: str, value: object) -> bool:
    """Return whether an attribute of a class is data, and no method or attribute of Python's."""
    return not (name.startswith("__") or name == "_abc_impl" or hasattr(value, "__get__"))


def _slots_of(kind: type) -> list[Any]:
    items = [item for owner in kind.__mro__ for item in vars(owner).items()]
    slots = [(name, value) for name, value in items if isinstance(value, MemberDescriptorType)]
    return [slot for name, slot in slots if name not in _OFFSETS]


def _attributes_of(kind: type) -> Look:
    """Return a function that reads the attributes of a class's objects without the user's code."""
    slots = _slots_of(kind)
    if kind.__dictoffset__:
        owners = (vars(owner) for owner in reversed(kind.__mro__))
        slots.append(next(own["__dict__"] for own in owners if "__dict__" in own))
    gets = [slot.__get__ for slot in slots]

    def attributes(obj: object) -> list[object]:
        try:
            return [get(obj) for get in gets]
        except AttributeError:  # one of them is not set
            return [_got(get, obj) for get in gets]

    return attributes


def _got(get: Look, obj: object) -> object:
    try:
        return get(obj)
    except AttributeError:
        return _stand_in


def _home_of(owner: _Owner) -> str:
    if isinstance(owner, dict):
        return str(owner.get("__name__", "__main__"))
    return owner.__module__ if isinstance(owner, type) else owner.__name__


def _is_python(cls: type) -> bool:
    """Return whether objects of a class hold only Python's attributes, judged by their size."""
    fields = len(_slots_of(cls)) + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    size = object.__basicsize__ + fields * ctypes.sizeof(ctypes.c_void_p)
    return cls.__basicsize__ == size and not cls.__itemsize__


def _of_process(_: None) -> tuple[object, ...]:
    """Return the settings of this process, with which new processes start."""
    numbers = torch.get_default_dtype(), torch.get_default_device()
    casts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    errors = np.geterr(), torch.are_deterministic_algorithms_enabled()
    return os.getcwd(), *numbers, torch.is_grad_enabled(), casts, *errors  # noqa: PTH109


def _gradient_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.grad,) if tensor.is_leaf else ()


def _memory_of(owner: Any, address: int) -> Any:
    """Return the memory of a tensor or an array, which keeps its owner alive."""
    if owner.nbytes and not address:
        raise TypeError("Its storage was freed.")
    memory: Any = (ctypes.c_char * owner.nbytes).from_address(address)
    memory.owner = owner
    return memory


def _stand_in(*_what: object) -> None:
    """Stand for an object that is compared by the arguments given here."""


def _is_plain(value: object, depth: int = _DEPTH) -> bool:
    """Return whether a global is compared: it is made of numbers, texts and arrays alone.

    A function with ``functools.lru_cache`` counts as such, too.
    """
    kind = type(value)
    if kind in _ATOMS or isinstance(value, _PLAIN):
        return True
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return True
    with_locks = loaded_classes("multiprocessing.sharedctypes", "SynchronizedBase")
    if isinstance(value, (_C_DATA, *with_locks)):
        return True
    if not depth:
        return False
    if isinstance(value, np.ndarray):  # of objects, or of texts of any length
        return value.dtype.kind in "OT" and _is_plain_throughout(value.flat, depth)
    if kind in _SEQUENCES or is_named_tuple(value):
        return _is_plain_throughout(value, depth)  # type: ignore[arg-type]
    if kind in _MAPPINGS:
        return _are_plain(value, depth)  # type: ignore[arg-type]
    return _holds_others(kind) and _are_plain(held_by(value), depth)


def _is_plain_throughout(items: Iterable[object], depth: int) -> bool:
    return all(_is_plain(each, depth - 1) for each in islice(items, _LOOKED_AT))


def _plain_part(value: object) -> tuple[object, ...]:
    """Return length, numbers and texts of a container, with their keys, and which others it holds.

    Of a large container only the first ones count. Objects of the user's classes are no containers
    here: most of those that hold other than plain data are at work, and count what they do.
    """
    left = [_FIRST]

    def part(value: object, depth: int) -> tuple[object, ...]:
        left[0] -= 1
        kind = type(value)
        if kind in _NUMBERS_AND_TEXTS:
            return (value,)
        if not depth or left[0] < 0:
            return ()
        if kind in _NAMESPACES:
            value = held_by(value)
        items: Iterable[tuple[object, object]]
        if kind in _SEQUENCES or is_named_tuple(value):
            items = enumerate(list(islice(value, _FIRST)))  # type: ignore[call-overload]
        elif type(value) in _MAPPINGS:
            items = list(islice(value.items(), _FIRST))  # type: ignore[attr-defined]
        else:
            return (id(value),)
        parts = [(key, part(each, depth - 1)) for key, each in items]
        told = [(repr(key), of) for key, of in parts if of or type(key) in _NUMBERS_AND_TEXTS]
        return len(value), *told  # type: ignore[arg-type]

    return part(value, _DEPTH)


def _holds_others(kind: type) -> bool:
    """Return whether an object may become plain data, or cease to be, when its parts change."""
    if kind in (*_SEQUENCES, *_MAPPINGS, *_NAMESPACES):
        return True
    return all(owner in _ROOTS or is_users(owner.__module__) for owner in kind.__mro__)


def _are_plain(items: Mapping[Any, object], depth: int) -> bool:
    some = islice(list(items.items()), _LOOKED_AT)
    return all(_is_plain(key, depth - 1) and _is_plain(value, depth - 1) for key, value in some)


def _misses(remembers: Any) -> int:
    return int(remembers.cache_info().misses)


def _kind_of(obj: object) -> tuple[type]:
    return (type(obj),)


def _kinds(namespace: Mapping[str, object]) -> list[type]:
    return list(map(type, namespace.values()))


def _is_plain_object(kind: type) -> bool:
    """Return whether the pickle of an object holds its attributes and nothing else."""
    reduces = ("__reduce__", "__reduce_ex__")
    return (
        _is_python(kind)
        and all(getattr(kind, name) is getattr(object, name) for name in reduces)
        and getattr(kind, "__getstate__", None) in _GIVE_ATTRIBUTES
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and kind not in copyreg.dispatch_table
    )


class Snapshot:
    """The results of looks at objects, to tell later whether the looks still give the same.

    It is a flat list of looks, which takes microseconds to repeat.

    - Items, attributes and namespaces are compared by identity. They are kept alive, so that no
      other object can have their address later. Objects that cannot change (numbers, texts, tuples
      of such) need no look of their own.
    - Numbers in tensors and arrays are compared byte by byte with a copy, after a look at their
      address and form. torch's count of changes (``_version``) would be cheaper, but it misses
      writes through ``.numpy()``, ``.data``, a storage, DLPack or ``apply_``, by C code, and of the
      running means of a normalisation.

    If it is not ``is_whole`` from the beginning, looks are taken, but their results are not kept.
    """

    def __init__(self, *, is_whole: bool = True) -> None:
        self.is_whole = is_whole
        """Whether looks show every change; False: some are not shown, or are too large to keep."""
        self._facts: dict[Look, _Facts] = {}
        self._parts: dict[Look, _Parts] = {}
        self._forms: dict[Look, _Facts] = {}
        self._memory: list[Any] = []
        self._copies: list[bytearray] = []
        self._seen: set[tuple[Look, int]] = set()

    def unseen(self) -> None:
        """Note that something may change that no look shows: results are no longer kept."""
        self.is_whole = False
        kept = (self._facts, self._parts, self._forms, self._memory, self._copies, self._seen)
        for each in kept:
            each.clear()

    def fact(self, look: Look, obj: object) -> Any:
        """Return the result of a look at an object; it will be compared by value."""
        new = self._is_new(look, obj)
        return self._facts.setdefault(look, _Facts(look)).add(obj) if new else look(obj)

    def parts(self, look: Look, obj: object) -> tuple[Any, ...]:
        """Return the results of a look at an object; each will be compared by identity."""
        new = self._is_new(look, obj)
        return self._parts.setdefault(look, _Parts(look)).add(obj) if new else tuple(look(obj))

    def watch(self, look: Look, obj: object) -> None:
        """Take a look as :meth:`parts` does, without returning its results."""
        if self.is_whole:
            self.parts(look, obj)

    def memory(self, looks: Iterable[Look], owner: object, at: Any) -> Any:
        """Return the memory ``at`` of an object, an array of ctypes, or a copy of it.

        ``looks``: read its address and form.
        """
        if sum(map(len, self._copies)) + len(at) > _MOST_BYTES:
            self.unseen()
        if not self.is_whole:
            return at
        for look in looks:
            self._forms.setdefault(look, _Facts(look)).add(owner)
        self._memory.append(at)
        self._copies.append(bytearray(at))
        return self._copies[-1]

    def is_copy(self, memory: object) -> bool:
        """Return whether ``memory`` is the copy that was made last."""
        return bool(self._copies) and memory is self._copies[-1]

    def _is_new(self, look: Look, obj: object) -> bool:
        key = (look, id(obj))  # the object is kept alive, so that its id stays its own
        new = self.is_whole and key not in self._seen
        if new:
            self._seen.add(key)
        return new

    def holds(self) -> bool:
        """Return whether all looks give the same results as before."""
        try:
            same = all(facts.same() for facts in self._facts.values())
            same = same and all(parts.same() for parts in self._parts.values())
            return same and self._same_memory()
        except Exception:  # an attribute is gone, or another thread makes changes
            return False

    def _same_memory(self) -> bool:
        then = chain(*(forms.found for forms in self._forms.values()), self._copies)
        now = chain(*(forms.now() for forms in self._forms.values()), self._memory)
        # In one call, so that no other thread can free the memory before it is read.
        return all(map(eq, then, now))


class _Facts:
    """The results of one look at several objects, one value for each."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._of: list[object] = []
        self.found: list[object] = []

    def add(self, obj: object) -> object:
        found = self._look(obj)
        self._of.append(obj)
        self.found.append(found)
        return found

    def now(self) -> Iterator[object]:
        return map(self._look, self._of)

    def same(self) -> bool:
        return self.found == list(self.now())


class _Parts(_Facts):
    """The results of one look at several objects, several parts for each."""

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self._lengths: list[int] = []

    def add(self, obj: object) -> tuple[object, ...]:
        found = tuple(self._look(obj))
        self._of.append(obj)
        self._lengths.append(len(found))
        self.found += found
        return found

    def same(self) -> bool:
        now: list[Any] = list(self.now())
        same_lengths = self._lengths == list(map(len, now))
        return same_lengths and all(map(is_, chain.from_iterable(now), self.found))

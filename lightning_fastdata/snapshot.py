"""Whether what the program holds is still as it was: seen in microseconds, where it is.

A fingerprint goes through all that is held, however often nothing has changed. A snapshot is taken
on that way: a flat list of looks, each of which tells one part of what an object is. It holds as
long as every look tells what it told then. If one does not, a new fingerprint says whether that
makes a difference.

- Items of containers, attributes, namespaces of classes and modules, and what functions are made of
  are compared by identity. The snapshot keeps what it was told, so that nothing else can lie at the
  same address later; what cannot change (numbers, texts, tuples of such) needs no look of its own.
- Numbers in tensors and arrays are compared byte by byte with a copy, behind a look at where they
  lie and in which form. torch's count of changes (``_version``) would cost less, and is not asked:
  it does not see who writes through ``.numpy()``, ``.data``, a storage, DLPack or ``apply_``, nor
  the running means of a normalisation, nor C code.
- Of globals that are no plain data only the class is compared, and nothing is kept. Where it rests
  on what they hold whether they are plain, that is asked anew.
- What may change in any other way is refused: then there is no snapshot, and each comparison is a
  fingerprint.
"""

from __future__ import annotations

import copyreg
import ctypes
import enum
import functools
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, eq, is_, itemgetter, methodcaller
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from lightning_fastdata.fingerprint import (
    BUILT_IN,
    C_DATA,
    REMEMBERS,
    Digesting,
    Fingerprint,
    closed_over,
    file_under,
    fingerprint,
    is_plain,
    is_python,
    kept_by,
    may_become_plain,
    of_file,
)
from lightning_fastdata.randomness.search import is_users

_Look: TypeAlias = Callable[[Any], Any]
_MOST_BYTES: Final = 2**25
"""Of numbers of which a copy is kept. To compare as many takes some 5 ms."""
_OF_FUNCTION: Final = attrgetter(
    "__code__", "__defaults__", "__kwdefaults__", "__closure__", "__dict__"
)
_OF_CLASS: Final = attrgetter("__qualname__", "__mro__")
# Of these, no call lets another thread go on.
_OF_TENSOR: Final = (
    methodcaller("data_ptr"),
    methodcaller("stride"),
    attrgetter("shape", "dtype", "is_cpu", "requires_grad"),
)
_OF_ARRAY: Final = attrgetter("__array_interface__")
_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)
_ARRAYS: Final = (np.ndarray, np.memmap)
_HOLDERS: Final = (SimpleNamespace, functools.partial, deque, OrderedDict, defaultdict)
"""Of C, and of that very type: their pickles hold attributes and items."""
_CHANGE: Final = (dict, list, set, deque)
_GIVE_ATTRIBUTES: Final = (object.__getstate__, torch.nn.Module.__getstate__)
_OFFSETS: Final = ("__vectorcalloffset__", "__dictoffset__", "__weaklistoffset__")
"""What classes of C have beside their attributes: numbers that are the same ones for ever."""
_NEVER_CHANGE: Final = (
    complex, range, slice, np.generic, enum.Enum, PurePath, ModuleType, MethodType, re.Pattern,
    BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.Size,
)  # fmt: skip
"""What these hold, if anything, is looked at for itself."""


def taken_of(objects: tuple[object, ...], within_s: float) -> tuple[Fingerprint, Snapshot] | None:
    """Return what objects are, and a snapshot of all that this rests on.

    None: they cannot be compared within so many seconds, or something of them may change unseen.
    """
    noting = _Noting(within_s)
    told = noting.of(objects)
    return None if told is None else (told, noting.taken)


class Watched:
    """Tells what objects are as :func:`fingerprint` does, at once while nothing changes.

    It keeps alive what they held when it was asked last.
    """

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._told: Fingerprint | None = None
        self._refused = False

    def now(
        self,
        objects: tuple[object, ...],
        within_s: float,
        instead: Callable[[], Mapping[int, object]] = dict,
    ) -> Fingerprint | None:
        """Return what the objects are now, the same ones each time; None: it cannot be compared.

        ``within_s`` and what ``instead`` returns are those of :func:`fingerprint`.
        """
        if self._snapshot is not None and self._snapshot.holds():
            return self._told
        self._snapshot, replaced = None, instead()
        if not (self._refused or replaced):
            # The first look may change something itself: Python notes in a class what slots it has.
            taken = taken_of(objects, within_s)
            if taken is not None and not taken[1].holds():
                taken = taken_of(objects, within_s)
            self._refused = taken is None
            if taken is not None and taken[1].holds():  # else another thread was at work
                self._told, self._snapshot = taken
                return self._told
        self._told = fingerprint(*objects, within_s=within_s, instead=replaced)
        return self._told

    def __reduce__(self) -> tuple[type[Watched], tuple[()]]:
        return Watched, ()  # for a process that has the objects elsewhere


class Snapshot:
    """What looks at objects have told, and whether they tell it again."""

    def __init__(self) -> None:
        self._parts: dict[_Look, _Parts] = {}
        self._facts: dict[_Look, _Facts] = {}
        self._forms: dict[_Look, _Facts] = {}
        self._memory: list[Any] = []
        self._copies: list[bytearray] = []
        self._bytes = 0
        self._seen: set[tuple[_Look, int]] = set()

    def parts(self, look: _Look, obj: object) -> None:
        """Note all that a look tells of an object, to be compared by identity."""
        if self._is_new(look, obj):
            self._parts.setdefault(look, _Parts(look)).add(obj)

    def fact(self, look: _Look, obj: object) -> None:
        """Note what a look tells of an object, to be compared by its value."""
        if self._is_new(look, obj):
            self._facts.setdefault(look, _Facts(look)).add(obj)

    def mapping(self, items: dict[Any, Any]) -> None:
        """Note the keys and values of a dict."""
        self.parts(dict.values, items)
        if items:
            self.parts(tuple, items)

    def memory(self, looks: Iterable[_Look], owner: object, address: int, content: Any) -> None:
        """Note what lies in the memory of an object; the ``looks`` tell where, and in which form.

        Raises:
            _RefusedError: It is too much.
        """
        size = memoryview(content).nbytes
        self._bytes += size
        if self._bytes > _MOST_BYTES:
            raise _RefusedError
        for look in looks:
            self._forms.setdefault(look, _Facts(look)).add(owner)
        if size:
            self._memory.append((ctypes.c_char * size).from_address(address))
            self._copies.append(bytearray(content))

    def _is_new(self, look: _Look, obj: object) -> bool:
        key = (look, id(obj))  # whose objects are kept
        new = key not in self._seen
        self._seen.add(key)
        return new

    def holds(self) -> bool:
        """Return whether all is as it was noted."""
        try:
            return (
                all(facts.found == list(facts.now()) for facts in self._facts.values())
                and all(parts.same() for parts in self._parts.values())
                and self._same_memory()
            )
        except Exception:  # an attribute is gone, or another thread is at work
            return False

    def _same_memory(self) -> bool:
        then = chain(*(forms.found for forms in self._forms.values()), self._copies)
        now = chain(*(forms.now() for forms in self._forms.values()), self._memory)
        # In one call, in which no other thread can let go of the memory before it is read.
        return all(map(eq, then, now))


class _Facts:
    """What one look has told of objects, a value of each."""

    def __init__(self, look: _Look) -> None:
        self._look = look
        self._of: list[object] = []
        self.found: list[object] = []

    def add(self, obj: object) -> None:
        self._of.append(obj)
        self.found.append(self._look(obj))

    def now(self) -> Iterator[object]:
        return map(self._look, self._of)


class _Parts:
    """What one look has told of objects, several parts of each."""

    def __init__(self, look: _Look) -> None:
        self._look = look
        self._of: list[object] = []
        self._lengths: list[int] = []
        self._found: list[object] = []

    def add(self, obj: object) -> None:
        found = tuple(self._look(obj))
        self._of.append(obj)
        self._lengths.append(len(found))
        self._found += found

    def same(self) -> bool:
        now = list(map(self._look, self._of))
        same_lengths = self._lengths == list(map(len, now))
        return same_lengths and all(map(is_, chain.from_iterable(now), self._found))


class _RefusedError(Exception):
    """Something may change that no look would show."""


class _Noting(Digesting):
    """Digests objects, and takes a snapshot of them on the way: of each before it is digested."""

    def __init__(self, within_s: float) -> None:
        super().__init__(within_s)
        self.taken = Snapshot()
        self._attributes: dict[type, _Look | None] = {}
        self._namespaces: set[type] = set()

    def persistent_id(self, obj: Any) -> None:
        """Note a container that a pickler knows without asking; called for each object."""
        kind = type(obj)
        if kind is dict:
            self.taken.mapping(obj)
        elif kind is list or kind is set:
            self.taken.parts(tuple, obj)
        elif kind is bytearray:
            self.taken.fact(bytes, obj)

    def reducer_override(self, obj: Any) -> Any:
        self._note(obj)
        return super().reducer_override(obj)

    def _note(self, obj: Any) -> None:
        kind = type(obj)
        if isinstance(obj, type):
            self._note_class(obj)
        elif isinstance(obj, FunctionType):
            self._note_function(obj)
        elif isinstance(obj, torch.Tensor):
            self._note_tensor(obj)
        elif isinstance(obj, np.ndarray):
            self._note_array(obj)
        elif isinstance(obj, (C_DATA, *self.with_locks)):
            raise _RefusedError
        elif isinstance(obj, REMEMBERS):
            self.taken.fact(_misses, obj)
            self._note_attributes(obj)
        elif kind in _HOLDERS or is_users(kind.__module__) or _is_plain_object(kind):
            self._note_attributes(obj)
            self._note_items(obj)
        elif not isinstance(obj, (*_NEVER_CHANGE, *self.lasting_kinds)) or kind is np.void:
            raise _RefusedError

    def _note_attributes(self, obj: Any) -> None:
        """Note the class of an object, and what it holds in ``__dict__`` and ``__slots__``."""
        kind = type(obj)
        self.taken.fact(type, obj)
        if hasattr(obj, "__dict__"):
            self.taken.mapping(obj.__dict__)
        if kind not in self._attributes:
            self._attributes[kind] = _attributes_of(obj)
        look = self._attributes[kind]
        if look is not None:
            self.taken.parts(look, obj)

    def _note_items(self, obj: Any) -> None:
        """Note what an object of Python's or of the user's holds beside its attributes."""
        kind = type(obj)
        if kind is deque or kind is OrderedDict:
            self.taken.parts(tuple, obj)
        if kind is OrderedDict:
            self.taken.parts(OrderedDict.values, obj)
        elif kind is defaultdict:
            self.taken.mapping(obj)
        elif kind not in _HOLDERS:
            fixed = isinstance(obj, BUILT_IN) or is_python(kind)
            if isinstance(obj, _CHANGE) or not fixed:
                raise _RefusedError

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        dense = type(tensor) in _TENSORS and tensor.is_cpu and tensor.layout is torch.strided
        dense = dense and tensor.is_contiguous() and tensor.grad_fn is None
        bits = dense and (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        if not dense or bits or tensor.nbytes > _MOST_BYTES:
            raise _RefusedError
        self._note_attributes(tensor)
        # Of a copy: NumPy's view of memory keeps that from being resized ever after.
        content = tensor.detach().clone().reshape(-1).view(torch.uint8).numpy()
        self.taken.memory(_OF_TENSOR, tensor, tensor.data_ptr(), content)

    def _note_array(self, array: np.ndarray[Any, Any]) -> None:
        if type(array) not in _ARRAYS:
            raise _RefusedError
        owner = file_under(array)
        if owner is not None:
            self._note_attributes(owner)
            self.taken.fact(_OF_ARRAY, array)
            return
        if array.dtype.hasobject or not array.flags.forc or array.nbytes > _MOST_BYTES:
            raise _RefusedError
        if type(array) is not np.ndarray:
            self._note_attributes(array)
        self.taken.memory((_OF_ARRAY,), array, array.ctypes.data, array.tobytes("A"))

    def _note_class(self, cls: type) -> None:
        self.taken.fact(_OF_CLASS, cls)
        for owner in cls.__mro__:
            if is_users(owner.__module__):
                self._note_namespace(owner)

    def _note_namespace(self, cls: type) -> None:
        if cls not in self._namespaces:
            self._namespaces.add(cls)
            own = vars(cls)
            self.taken.parts(tuple, own)
            self.taken.parts(MappingProxyType.values, own)

    def _note_function(self, function: FunctionType) -> None:
        self.taken.parts(_OF_FUNCTION, function)
        self.taken.mapping(vars(function))
        if function.__kwdefaults__ is not None:
            self.taken.mapping(function.__kwdefaults__)
        if function.__closure__:
            self.taken.parts(closed_over, function)

    def _digest_file(self, path: str) -> None:
        self.taken.fact(of_file, path)
        super()._digest_file(path)

    def _of_globals(self, name: str | None) -> tuple[object, ...]:
        module = sys.modules.get(name or "")
        if module is not None and name not in self._modules:
            self._note_globals(vars(module))
        return super()._of_globals(name)

    def _note_globals(self, namespace: dict[str, Any]) -> None:
        """Note the globals of a module that are compared, and that the others are not."""
        self.taken.parts(tuple, namespace)
        self.taken.fact(_kinds, namespace)
        kept, unsure = [], []
        for name, value in list(namespace.items()):
            if name.startswith("__"):
                continue
            code = isinstance(value, type | FunctionType | ModuleType)
            if code or is_plain(value):
                kept.append(name)
            elif may_become_plain(value):
                unsure.append(name)
            if isinstance(value, type | FunctionType) and is_users(value.__module__):
                self._note_code(value)
        if kept:
            self.taken.parts(itemgetter(*kept, kept[0]), namespace)
        if unsure:
            self.taken.fact(functools.partial(_are_plain, unsure), namespace)

    def _note_code(self, code: type | FunctionType) -> None:
        """Note a global class or function, of which the plain data are compared."""
        if isinstance(code, type):
            self._note_namespace(code)
            held = tuple(vars(code).values())
        else:
            self._note_function(code)
            held = kept_by(code)
        for value in held:
            if may_become_plain(value) and not is_plain(value):
                self.taken.fact(is_plain, value)


def _attributes_of(obj: object) -> _Look | None:
    """Return what tells the attributes of objects of a class; None: they have none."""
    items = chain.from_iterable(vars(owner).items() for owner in type(obj).__mro__)
    names = [
        name
        for name, value in items
        if type(value) is MemberDescriptorType and name not in _OFFSETS
    ]
    if hasattr(obj, "__dict__"):
        names.append("__dict__")
    # Of a single name it would tell that itself, and no tuple.
    return attrgetter(*names, names[0]) if names else None


def _misses(remembers: Any) -> int:
    return int(remembers.cache_info().misses)


def _kinds(namespace: Mapping[str, object]) -> list[type]:
    return list(map(type, namespace.values()))


def _are_plain(names: list[str], namespace: Mapping[str, object]) -> list[bool]:
    return [is_plain(namespace[name]) for name in names]


def _is_plain_object(kind: type) -> bool:
    """Return whether the pickle of an object holds its attributes and nothing else."""
    reduces = ("__reduce__", "__reduce_ex__")
    return (
        is_python(kind)
        and all(getattr(kind, name) is getattr(object, name) for name in reduces)
        and getattr(kind, "__getstate__", None) in _GIVE_ATTRIBUTES
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and kind not in copyreg.dispatch_table
    )

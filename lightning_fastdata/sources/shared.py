"""One copy of a dataset's objects in memory that all processes map, and none can change.

Processes of one user that share equal objects map the same memory.

A list becomes its numbers, or a pickle of each item with a table of where each starts. Reading an
item makes a new object, so that no references to shared objects are counted.

The lists and dicts that a dataset holds are found by the names of its attributes, and measured.
"""

from __future__ import annotations

import copy
import copyreg
import datetime
import filecmp
import gc
import hashlib
import io
import mmap
import os
import pickle
import sys
import tempfile
import warnings
import weakref
import zlib
from array import array
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partialmethod
from itertools import chain, islice, repeat
from multiprocessing import context, reduction
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import IO, Any, Final, NoReturn, TypeVar

import numpy as np
import torch

from lightning_fastdata.errors import DatasetError, FastDataWarning
from lightning_fastdata.tree import children, held_by, spelled, with_paths

T = TypeVar("T")

_FEW: Final = 1000
"""Most elements of a list or dict that is not shared itself; those within it may be."""
_FLAT: Final = frozenset({str, int, float, bool, complex, bytes, type(None)})
_UNCHANGING: Final = (PurePath, datetime.date, datetime.timedelta, np.generic)
"""Types of values that cannot be changed, and that pickle writes as they are."""
_CODES: Final = {frozenset({int}): "q", frozenset({float}): "d"}
_NAME: Final = "fastdata-shared"
_ALIGNED: Final = 16
_MOST: Final = 2**32
"""Upper limit of the number of elements of a dict: hashes are multiples of it."""
CONTAINERS: Final = (list, dict, OrderedDict, defaultdict)
_ELEMENTS: Final = 200
"""Elements of a list that are measured: reading all of them would copy their memory."""
_PAGE_BYTES: Final = 4096
_GC_HEAD: Final = 16
"""Bytes before each container in which the garbage collector keeps its links."""
_DEPTH: Final = 5
"""Number of objects within one another that are searched, and measured."""
_WORDS: Final = {"str": "texts", "int": "numbers", "float": "numbers", "ndarray": "arrays"}
_PARTS: Final = 100
"""Most elements of a list that is searched for datasets."""
_OPAQUE: Final = (
    type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.nn.Module, torch.Tensor,
    np.ndarray,
)  # fmt: skip


def share(dataset: T) -> T:
    """Move the lists and dicts that a dataset holds into memory that all processes share.

    They then exist once for all workers of all ranks of a machine, however these are started.
    Without it, forked workers copy the objects that they read, as each object counts its
    references. Call it last in ``__init__``, or on the finished dataset:
    ``FastDataLoader(share(dataset))``.

    It shares lists and dicts of more than 1000 elements in attributes of the dataset, and of the
    objects that it holds, such as the dataset of a ``Subset``. They may hold text, bytes, numbers,
    ``None``, paths, dates, arrays, and lists, tuples and dicts of these; a warning names each that
    holds something else. They are read as before: by index, slice and key, ``len``, ``in``, ``==``,
    ``copy``, iteration. An item that is read is equal to the original, but another object each
    time, and cannot be changed. Only a write to a tensor that torch has made over an array
    succeeds; it changes the copy of its own process.

    Args:
        dataset: A dataset, which is changed in place; or a list or a dict.

    Returns:
        The dataset itself; for a list or dict, the object that takes its place.

    Raises:
        DatasetError: A list or dict was given, and holds something that cannot be shared; or the
            class of a dataset was given.
    """
    if isinstance(dataset, type):
        name = dataset.__name__
        raise DatasetError(f"share() got the class {name}. Make one of it: share({name}(...)).")
    if isinstance(dataset, _Shared):
        return dataset
    writer, place = _Writer(), {"dataset": dataset}
    if type(dataset) in CONTAINERS:
        writer.write(place, "dataset", "dataset", least=-1)
        if writer.left:
            raise DatasetError(f"Nothing is shared: {writer.left[0]}.")
    for name, owner, key in attributes(dataset):
        writer.write(owner, key, name)
    now = (*writer.finish(), *held_by(dataset).values())
    said = f"Not shared, and left as it is: {'; '.join(writer.left)}." if writer.left else ""
    if not said and not any(isinstance(each, _Shared) for each in now):
        said = (
            f"Nothing of this {type(dataset).__name__} is shared: none of its attributes is a list "
            f"or dict of more than {_FEW} elements (those in __slots__ are not looked at). Call "
            "share() when it is complete."
        )
    if said:
        warnings.warn(said, FastDataWarning, stacklevel=2)
    return place["dataset"]


# -- the lists and dicts that a dataset holds ------------------------------------------------------


def attributes(
    owner: object, name: str = "dataset", depth: int = _DEPTH, seen: set[int] | None = None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the lists and dicts in a dataset and the objects that it holds: (name, owner, key).

    A name is the path to it, such as ``"dataset.coco.anns"``; ``owner[key]`` is the list or dict.

    Objects that have attributes of their own are searched, such as another dataset or an index,
    also in short lists; modules of networks, tensors and functions are not.
    """
    seen = {id(owner)} if seen is None else seen
    held = held_by(owner)
    for key, value in list(held.items()):
        path = f"{name}.{key}"
        parts = [(path, value)]
        if type(value) in (list, tuple) and 0 < len(value) <= _PARTS:
            parts = [(f"{path}[{number}]", part) for number, part in enumerate(value)]
        owners = [each for each in parts if held_by(each[1]) and not isinstance(each[1], _OPAQUE)]
        if type(value) in CONTAINERS and len(owners) < len(parts):
            yield path, held, key
        for where, part in owners:
            if depth and id(part) not in seen:
                seen.add(id(part))
                yield from attributes(part, where, depth - 1, seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldObjects:
    """A list or dict that a dataset holds."""

    name: str
    """Path by which it is reached, e.g. ``"dataset.samples"``."""
    kind: str
    """Text that describes it, e.g. ``"list of 1.2 million dicts"``."""
    size_bytes: int
    """Bytes of memory that it and all that it holds take."""
    counted_bytes: int
    """Bytes that a forked process copies if it reads all objects, as they count references."""
    places: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """Addresses of some of its objects in the memory of this process and those that it forked."""


def held_objects(dataset: object) -> tuple[HeldObjects, ...]:
    """Return the lists and dicts that a dataset holds, the largest first."""
    found = {id(owner[key]): (name, owner[key]) for name, owner, key in attributes(dataset)}
    measured = (_measured(name, value) for name, value in found.values())
    return tuple(sorted(measured, key=lambda held: -held.counted_bytes))


def _measured(name: str, value: Any) -> HeldObjects:
    some, _ = _some(value)
    word = type(next(iter(some[-1:]), None)).__name__
    count = f"{len(value) / 1e6:.1f} million" if len(value) >= 1e6 else f"{len(value):,}"
    seen: set[int] = set()
    size, counted = _size(value, _DEPTH, seen)
    return HeldObjects(
        name=name,
        kind=f"{type(value).__name__} of {count} {_WORDS.get(word, f'{word}s')}",
        size_bytes=size,
        counted_bytes=counted,
        places=tuple(sorted(seen)[:: len(seen) // _ELEMENTS + 1]),
    )


def _some(value: Any) -> tuple[list[Any], float]:
    """Return some elements (keys and values of a dict), and the ratio of all elements to these."""
    if isinstance(value, Mapping):
        some = list(chain.from_iterable(islice(value.items(), _ELEMENTS)))
        return some, 2 * len(value) / max(1, len(some))
    # A list is sliced, as iterating over it would touch all elements.
    few = isinstance(value, set | frozenset)
    some = list(islice(value, _ELEMENTS) if few else value[:: len(value) // _ELEMENTS or 1])
    return some, len(value) / max(1, len(some))


def _size(value: Any, depth: int, seen: set[int]) -> tuple[int, int]:
    """Return the bytes of an object with all that it holds, and its ``counted_bytes``.

    An object that was seen before counts 0, as it exists once.
    """
    common = value is None or type(value) is bool or (type(value) is int and -6 < value < 257)
    if common or id(value) in seen:  # Python has only one object of each common value
        return 0, 0
    seen.add(id(value))
    own = sys.getsizeof(value)
    if isinstance(value, np.ndarray):
        return max(own, int(value.nbytes)), type(value).__basicsize__
    parts: Any = value
    if not isinstance(value, dict | list | tuple | set | frozenset):
        # The parts of any other object are what it refers to, also in slots, as paths have them.
        parts = [part for part in gc.get_referents(value) if not isinstance(part, _OPAQUE)]
    some, times = _some(parts) if depth else ([], 1.0)
    sizes = [_size(part, depth - 1, seen) for part in some]
    whole, counted = (int(times * sum(column)) for column in zip((0, 0), *sizes, strict=True))
    # The tables of containers are in memory of their own, which reading does not write to.
    head = type(value).__basicsize__ + _GC_HEAD if parts else min(own, _PAGE_BYTES)
    return own + whole, head + counted


# -- the classes that take the place of a list or a dict -------------------------------------------

_OF_LISTS: Final = (
    "append clear extend insert pop remove reverse sort __delitem__ __iadd__ __imul__ __setitem__"
)
_OF_DICTS: Final = "clear pop popitem setdefault update __delitem__ __ior__ __setitem__"


class _ReadOnly:
    """Base of classes whose methods that would change the object raise DatasetError."""

    __slots__ = ()

    def __init_subclass__(cls, refused: str = "") -> None:
        for name in refused.split():
            setattr(cls, name, partialmethod(_ReadOnly._refuse, name))

    def _refuse(self, name: str, *_args: object, **_kwargs: object) -> NoReturn:
        raise DatasetError(
            f"{name}() would change what share() has put into memory of all processes, where "
            "nothing can be changed. Change it before share() is called, or change a copy: "
            "list(x), dict(x), or copy.deepcopy(x) of a sample."
        )


class ReadOnlyList(_ReadOnly, list[Any], refused=_OF_LISTS):
    """A read-only list within a shared object. A copy or a pickle of it is a plain list."""

    __slots__ = ()

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        return list, (list(self),)


class ReadOnlyDict(_ReadOnly, dict[Any, Any], refused=_OF_DICTS):
    """A read-only dict within a shared object. A copy or a pickle of it is a plain dict."""

    __slots__ = ()

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        return dict, (dict(self),)


# Unpickling finds a class by its number in a tenth of the time that it takes by name.
copyreg.add_extension(__name__, "ReadOnlyList", 0x66617374)
copyreg.add_extension(__name__, "ReadOnlyDict", 0x66617375)


class _Shared(_ReadOnly):
    __slots__ = ()

    def __repr__(self) -> str:
        return repr(copy.copy(self))

    def __deepcopy__(self, _memo: object) -> Any:
        return self  # as for a tuple: nothing in it can change


class SharedList(_Shared, Sequence[Any], refused=_OF_LISTS):
    """Takes the place of a list. A slice, ``copy`` and ``list(x)`` are plain lists.

    Args:
        code: ``"q"`` or ``"d"``: the items are ints or floats of 8 bytes; ``"Q"``: the items are
            pickled, and a table of 8 bytes each says where they start.
        start: Offset of the numbers or of the table in the memory, in bytes.
        length: Number of items.
        block: The memory.
    """

    __slots__ = ("_made_of", "_read", "_table")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, code: str, start: int, length: int, block: Block) -> None:
        self._made_of = code, start, length, block
        whole, loads = memoryview(block).toreadonly(), pickle.loads
        buffers = repeat(whole)  # an array takes the whole memory, and has its offset in it
        self._table: Any = whole[start : start + 8 * length].cast(code)  # type: ignore[call-overload]
        numbers: dict[str, Callable[[Any], Any]] = {"q": int, "d": float}
        # pickle.loads() ignores the bytes that follow an item.
        self._read = numbers.get(code, lambda at: loads(whole[at:], buffers=buffers))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        found = self._table[index]
        if type(index) is slice:
            return list(map(self._read, found))
        return self._read(found)

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, self._table)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | SharedList):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedList, self._made_of

    def __copy__(self) -> list[Any]:
        return list(self)

    copy = __copy__


def _hash(key: Any) -> int:
    """Return a multiple of 2**32 that is the same in all processes and for equal keys."""
    if isinstance(key, str):
        key = key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return zlib.crc32(key) % (_MOST // 2) * _MOST
    if isinstance(key, tuple):
        key = tuple(map(_hash, key))
    return 0 if key is None else hash(key) % (_MOST // 2) * _MOST


class SharedDict(_Shared, Mapping[Any, Any], refused=_OF_DICTS):
    """Takes the place of a dict. ``copy`` and ``dict(x)`` are plain dicts.

    Args:
        default: Makes the value of a missing key, as the factory of a ``defaultdict``; or None.
        lists: Keys, values, and sorted numbers: the hash of a key in the upper 32 bits, and its
            place in the keys in the lower ones.
    """

    __slots__ = ("_default", "_keys", "_places", "_values")

    def __init__(self, default: Callable[[], Any] | None, *lists: SharedList) -> None:
        self._default = default
        self._keys, self._values, self._places = lists

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key, or ``default``."""
        hashed, table = _hash(key), self._places._table
        for place in table[bisect_left(table, hashed) :]:
            at = place - hashed
            if at >= _MOST:
                break
            if self._keys[at] == key:
                return self._values[at]
        return default

    def __getitem__(self, key: Any) -> Any:
        value = self.get(key, self)
        if value is not self:
            return value
        if self._default is None:
            raise KeyError(key)
        return _frozen(self._default())

    def __contains__(self, key: object) -> bool:
        return self.get(key, self) is not self

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedDict, (self._default, self._keys, self._values, self._places)

    def __copy__(self) -> dict[Any, Any]:
        return defaultdict(self._default, self.items()) if self._default else dict(self.items())

    copy = __copy__


# -- writing ---------------------------------------------------------------------------------------

_Table = tuple[str, int, int]
"""``code``, ``start`` and ``length`` of a list that was written, see :class:`SharedList`."""


class _NotShareableError(DatasetError):
    """An object cannot be shared; it is the argument of the error."""


def _frozen(value: Any) -> Any:
    """Return an object that is equal to a value, with nothing in it that could be changed."""
    kind: Any = type(value)
    if kind in _FLAT:
        return value
    if kind in (list, tuple, frozenset, ReadOnlyList):
        made = ReadOnlyList if kind is list else kind
        return made(value if _FLAT.issuperset(map(type, value)) else map(_frozen, value))
    if kind in (dict, ReadOnlyDict):
        return ReadOnlyDict({_frozen(key): _frozen(part) for key, part in value.items()})
    if kind is np.ndarray and not value.dtype.hasobject:
        return np.broadcast_to(value, value.shape)  # a read-only view
    if isinstance(value, _UNCHANGING) and kind is not np.void:
        return value
    raise _NotShareableError(value)


def _why(value: Any, culprit: object) -> str:
    """Return where in a list or dict there is what cannot be shared, and what to do."""
    paths = with_paths(value, is_leaf=lambda part: part is culprit)
    path = next((path for path, part in paths if part is culprit), None)
    kind = type(culprit).__name__
    hint = "turn it into text, numbers, arrays, or lists, tuples and dicts of these"
    return f"{spelled(path)} is a {kind}; {hint}" if path else f" has a {kind} among its keys"


class _Writer:
    """Writes objects to be shared, and replaces the originals when all are written."""

    def __init__(self) -> None:
        self._file = _memory_file()
        self._reducers = {
            ReadOnlyList: lambda value: (ReadOnlyList, (tuple(value),)),
            ReadOnlyDict: lambda value: (ReadOnlyDict, (dict(value),)),
            np.ndarray: self._array,
        }
        self._arrays: dict[bytes, int] = {}
        """Offset of each array written, by a digest of its content, so that it is written once."""
        self._written: dict[int, tuple[Any, list[_Table]]] = {}
        """Each original with its tables, by its id; it is kept so that the id stays its own."""
        self._places: list[tuple[Any, Any]] = []
        """Container and key of each original."""
        self.left: list[str] = []
        """Names of objects that are not shared, each with the reason."""

    def write(self, container: Any, key: Any, name: str, least: int = _FEW) -> None:
        """Write ``container[key]``; if it has no more than ``least`` elements, these instead."""
        value = container[key]
        if type(value) not in CONTAINERS:
            return
        self._places.append((container, key))
        if id(value) in self._written:
            return
        self._written[id(value)] = value, []
        try:
            if len(value) > least:
                self._written[id(value)] = value, self._tables(value)
            else:
                for part, _ in children(value) or ():
                    self.write(value, part, f"{name}[{part!r}]")
        except RecursionError:
            self.left.append(f"{name} holds itself, or lists within lists without end")
        except _NotShareableError as error:
            self.left.append(name + _why(value, *error.args))

    def finish(self) -> list[Any]:
        """Make the memory, replace the originals, and return the objects that replace them."""
        with self._file as file:
            block = _block(file)
        made = {each: _read(*written, block) for each, written in self._written.items()}
        for container, key in self._places:
            container[key] = made[id(container[key])]
        return list(made.values())

    def _tables(self, value: Any) -> list[_Table]:
        if type(value) is list:
            return [self._table(value)]
        for key in value:
            if not _FLAT.issuperset(map(type, key if type(key) is tuple else (key,))):
                raise _NotShareableError(key)
        places = sorted(_hash(key) + at for at, key in enumerate(value))
        return [self._table(part) for part in (list(value), list(value.values()), places)]

    def _table(self, value: list[Any]) -> _Table:
        try:
            numbers = array(_CODES[frozenset(map(type, value))], value)
        except (KeyError, OverflowError):  # not all are ints, or floats, of 8 bytes
            numbers = array("Q", map(self._item, value))
        return numbers.typecode, self._put(numbers.tobytes(), _ALIGNED), len(value)

    def _put(self, data: bytes, alignment: int = 1) -> int:
        """Write some bytes, and return where they begin."""
        self._file.write(b"\0" * (-self._file.tell() % alignment))
        self._file.write(data)
        return self._file.tell() - len(data)

    def _item(self, value: Any) -> int:
        pickled = io.BytesIO()
        pickler = pickle.Pickler(pickled, 5, buffer_callback=lambda _: False)
        pickler.dispatch_table = self._reducers
        pickler.dump(_frozen(value))
        return self._put(pickled.getvalue())

    def _array(self, value: Any) -> tuple[Any, ...]:
        dtype = value.dtype.str if value.dtype.names is None else value.dtype
        content = value.tobytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if digest not in self._arrays:
            self._arrays[digest] = self._put(content, _ALIGNED)
        # A buffer outside of the pickle: unpickling is given the whole memory for it.
        memory = pickle.PickleBuffer(bytearray())
        return np.ndarray, (value.shape, dtype, memory, self._arrays[digest])


def _read(value: Any, tables: list[_Table], block: Block) -> Any:
    """Return the object that takes the place of an original: itself if it has no tables."""
    lists = [SharedList(*table, block) for table in tables]
    if lists and type(value) is not list:
        return SharedDict(getattr(value, "default_factory", None), *lists)
    return lists[0] if lists else value


# -- memory ----------------------------------------------------------------------------------------


class Block(mmap.mmap):
    """A memory map of a file without a name, which no process can change.

    A process that is being started gets the open file; any other pickle holds a copy.
    """

    descriptor: int

    @classmethod
    def at(cls, descriptor: int) -> Block:
        """Return the memory map of a descriptor, which is closed with it."""
        # Copy on write: torch does not refuse writes to a tensor over read-only memory. They change
        # this process's own pages, as in a forked process, and do not end it.
        made = cls(descriptor, 0, access=mmap.ACCESS_COPY)
        made.descriptor = descriptor
        weakref.finalize(made, os.close, descriptor).atexit = False
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None and sys.platform != "win32":
            return _received, (reduction.DupFd(self.descriptor),)
        return _received, (bytes(self),)


def _received(sent: Any) -> Block:
    if not isinstance(sent, bytes):
        return Block.at(sent.detach())
    with _memory_file() as file:
        file.write(sent)
        return _block(file)


def _memory_file() -> IO[bytes]:
    with suppress(AttributeError, OSError):  # no Linux, or a sandbox forbids memfd_create()
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        return os.fdopen(os.memfd_create(_NAME, flags), "w+b", buffering=2**20)
    return tempfile.TemporaryFile()


def _block(file: IO[bytes]) -> Block:
    """Return the memory of a file, or equal memory that a process of this user already has."""
    if not file.tell():  # an empty file cannot be mapped
        file.write(b"\0")
    file.flush()
    with suppress(ImportError, AttributeError, OSError):  # without seals, each rank has its own
        import fcntl

        sealed = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        with Path(os.devnull).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several ranks do this one after the other
            for link in Path("/proc").glob("[0-9]*/fd/*"):
                with suppress(OSError):  # processes of other users, or that end meanwhile
                    if f"/memfd:{_NAME}" in str(link.readlink()):
                        other = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
                        seals = fcntl.fcntl(other, fcntl.F_GET_SEALS)
                        if seals & sealed == sealed and _same(other, file.fileno()):
                            return Block.at(other)
                        os.close(other)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, sealed)
    return Block.at(os.dup(file.fileno()))


def _same(other: int, own: int) -> bool:
    filecmp.clear_cache()  # its cache compares only names and times
    one, two = (f"/proc/self/fd/{descriptor}" for descriptor in (other, own))
    # Root can open the memory of other users, too.
    return os.fstat(other).st_uid == os.geteuid() and filecmp.cmp(one, two, shallow=False)

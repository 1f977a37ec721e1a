"""One copy of a dataset's objects in memory that all processes map, and none can change.

Processes of one user that share the same have it in common.

A list becomes the numbers themselves, or a pickle of each item, with a table of where each starts.
Reading an item makes it anew, so that no reference to what is shared is counted.
"""

from __future__ import annotations

import copy
import copyreg
import datetime
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
from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from multiprocessing import context, reduction
from pathlib import Path, PurePath
from typing import IO, Any, Final, NoReturn, TypeVar

import numpy as np

from lightning_fastdata.errors import DatasetError, FastDataWarning
from lightning_fastdata.sources.attributes import CONTAINERS, attributes
from lightning_fastdata.tree import children, held_by, spelled, with_paths

T = TypeVar("T")

_FEW: Final = 1000
"""A list or dict of no more elements is looked into, and stays as it is."""
_FLAT: Final = frozenset({str, int, float, bool, complex, bytes, type(None)})
_UNCHANGING: Final = (PurePath, datetime.date, datetime.timedelta, np.generic)
"""Values that nobody can change, and that pickle alone writes."""
_NAME: Final = "fastdata-shared"
_ALIGNED: Final = 16
_CHUNK: Final = 2**20
_READ_ONLY: Final = (
    "{name}() would change what share() has put into memory of all processes, where nothing can be "
    "changed. Change it before share() is called, or change a copy: list(x), dict(x), or "
    "copy.deepcopy(x) of a sample."
)
_HINTS: Final = {
    "Tensor": "stack them into one tensor, or keep arrays (x.numpy())",
    "set": "keep a tuple or a sorted list",
}


def share(dataset: T) -> T:
    """Move the lists and dicts that a dataset holds into memory that all processes share.

    They exist once then for all workers of all ranks of a machine, however these are started.
    Forked ones would copy the objects that they read, since each counts its references. Call it
    last in ``__init__``, or on the finished dataset: ``FastDataLoader(share(dataset))``.

    Shared are lists and dicts of more than 1000 elements in attributes of the dataset, and of the
    objects that it holds, as the dataset of a ``Subset``. They hold text, bytes, numbers, ``None``,
    paths, dates, arrays, and lists, tuples and dicts of these. They are read as before: by index,
    slice and key, ``len``, ``in``, ``==``, ``copy``, iteration. What is read is equal to what was
    there, but another object each time, and cannot be changed; only what writes to a tensor that
    torch has made over an array does so, in the copy of its own process. A warning names each that
    holds something else.

    Args:
        dataset: A dataset, which is changed in place; or a list or a dict.

    Returns:
        The dataset itself; of a list or dict, what takes its place.

    Raises:
        DatasetError: It is a list or dict, and holds something that cannot be shared.
    """
    if isinstance(dataset, _Shared):
        return dataset
    writer, place = _Writer(), {"dataset": dataset}
    if type(dataset) in CONTAINERS:
        writer.write(place, "dataset", "dataset", least=-1)
        if writer.left:
            raise DatasetError(f"Nothing is shared: {writer.left[0]}.")
    for each in attributes(dataset):
        writer.write(each.owner, each.key, each.name)
    writer.finish()
    said = ""
    if writer.left:
        said = f"Not shared, and left as it is: {'; '.join(writer.left)}."
    elif not writer.made and not any(isinstance(x, _Shared) for x in held_by(dataset).values()):
        said = (
            f"Nothing of this {type(dataset).__name__} is shared: it holds no list or dict of more "
            f"than {_FEW} elements in an attribute, other than of __slots__. Call share() when it "
            "is complete."
        )
    if said:
        warnings.warn(said, FastDataWarning, stacklevel=2)
    return place["dataset"]


# -- what takes the place of a list or a dict ------------------------------------------------------

_OF_LISTS: Final = (
    "append clear extend insert pop remove reverse sort __delitem__ __iadd__ __imul__ __setitem__"
)
_OF_DICTS: Final = "clear pop popitem setdefault update __delitem__ __ior__ __setitem__"


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise DatasetError(_READ_ONLY.format(name=name))

    return refuse


class _ReadOnly:
    """Those methods that would change an object raise DatasetError."""

    __slots__ = ()

    def __init_subclass__(cls, refused: str = "") -> None:
        for name in refused.split():
            setattr(cls, name, _refusal(name))


class ReadOnlyList(_ReadOnly, list[Any], refused=_OF_LISTS):
    """A list within something shared. A copy or a pickle of it is as any other."""

    __slots__ = ()

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        return list, (list(self),)


class ReadOnlyDict(_ReadOnly, dict[Any, Any], refused=_OF_DICTS):
    """A dict within something shared. A copy or a pickle of it is as any other."""

    __slots__ = ()

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        return dict, (dict(self),)


class _Shared(_ReadOnly):
    __slots__ = ()

    def __repr__(self) -> str:
        return repr(copy.copy(self))

    def __deepcopy__(self, _memo: object) -> Any:
        return self  # as of a tuple: nothing in it can change


class SharedList(_Shared, Sequence[Any], refused=_OF_LISTS):
    """What takes the place of a list. A slice, ``copy`` and ``list(x)`` are plain lists.

    Args:
        code: ``"q"`` or ``"d"``: numbers of 8 bytes; ``"Q"``: a table of where each item starts.
        start: Where these are in the memory, in bytes.
        length: So many.
        block: The memory.
    """

    __slots__ = ("_made_of", "_read", "_table")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, code: str, start: int, length: int, block: Block) -> None:
        self._made_of = code, start, length, block
        whole, loads = memoryview(block).toreadonly(), pickle.loads
        buffers = repeat(whole)  # an array is given the whole memory, and where it starts there
        self._table: Any = whole[start : start + 8 * length].cast(code)  # type: ignore[call-overload]
        numbers: dict[str, Callable[[Any], Any]] = {"q": int, "d": float}
        # What follows an item is not looked at.
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
    """Return a number that is the same in all processes, and of all keys that are equal."""
    if isinstance(key, str | bytes):
        return zlib.crc32(key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key)
    if isinstance(key, tuple):
        return hash(tuple(map(_hash, key)))
    return 0 if key is None else hash(key)


class SharedDict(_Shared, Mapping[Any, Any], refused=_OF_DICTS):
    """What takes the place of a dict. ``copy`` and ``dict(x)`` are plain dicts.

    Args:
        default: Makes the value of a missing key, as that of a ``defaultdict`` does.
        lists: Keys, values, sorted hashes of keys, and where the key of each hash is.
    """

    __slots__ = ("_default", "_hashes", "_keys", "_order", "_values")

    def __init__(self, default: Callable[[], Any] | None, *lists: SharedList) -> None:
        self._default = default
        self._keys, self._values, self._hashes, self._order = lists

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key, or ``default``."""
        wanted = _hash(key)
        at = bisect_left(self._hashes._table, wanted)
        while at < len(self) and self._hashes[at] == wanted:
            if self._keys[self._order[at]] == key:
                return self._values[self._order[at]]
            at += 1
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

    def items(self) -> ItemsView[Any, Any]:
        """Return keys and values."""
        return _Items(self)

    def values(self) -> SharedList:  # type: ignore[override]
        """Return the values."""
        return self._values

    def __reduce__(self) -> tuple[Any, ...]:
        lists = self._keys, self._values, self._hashes, self._order
        return SharedDict, (self._default, *lists)

    def __copy__(self) -> dict[Any, Any]:
        return defaultdict(self._default, self.items()) if self._default else dict(self.items())

    copy = __copy__


class _Items(ItemsView[Any, Any]):
    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self._mapping._keys, self._mapping._values, strict=True)  # type: ignore[attr-defined]


# -- writing ---------------------------------------------------------------------------------------


class _NotShareableError(DatasetError):
    """Its argument is what cannot be shared."""


def _frozen(value: Any) -> Any:
    """Return what is equal to a value, with nothing in it that could be changed."""
    kind: Any = type(value)
    if kind in _FLAT:
        return value
    if kind in (list, tuple, frozenset, ReadOnlyList):
        made = ReadOnlyList if kind is list else kind
        return made(value if _FLAT.issuperset(map(type, value)) else map(_frozen, value))
    if kind in (dict, ReadOnlyDict):
        return ReadOnlyDict({_frozen(key): _frozen(part) for key, part in value.items()})
    if kind is np.ndarray and not value.dtype.hasobject:
        return np.broadcast_to(value, value.shape)  # which is read-only
    if isinstance(value, _UNCHANGING) and kind is not np.void:
        return value
    raise _NotShareableError(value)


def _array(shape: tuple[int, ...], dtype: Any, memory: memoryview, start: int) -> Any:
    return np.ndarray(shape, dtype, memory, start)


_made: Any
for _code, _made in enumerate((ReadOnlyList, ReadOnlyDict, _array), 0xFD00):
    # Else pickle would import them by name for each item.
    copyreg.add_extension(_made.__module__, _made.__qualname__, _code)


def _why(value: Any, culprit: object) -> str:
    paths = with_paths(value, is_leaf=lambda part: part is culprit)
    path = next((path for path, part in paths if part is culprit), None)
    kind = type(culprit).__name__
    hint = _HINTS.get(kind, "turn it into a dict or a tuple of text, numbers and arrays")
    return f"{spelled(path)} is a {kind}; {hint}" if path else f" has a {kind} among its keys"


class _Writer:
    """Writes what is to be shared, and puts it in its places when all is written."""

    def __init__(self) -> None:
        self._file, self._pickled = _memory_file(), io.BytesIO()
        self._pickler = pickle.Pickler(self._pickled, 5, buffer_callback=lambda _: False)
        self._pickler.dispatch_table = {
            ReadOnlyList: lambda value: (ReadOnlyList, (tuple(value),)),
            ReadOnlyDict: lambda value: (ReadOnlyDict, (dict(value),)),
            np.ndarray: self._array,
        }
        self._arrays: dict[bytes, int] = {}
        """Where an array is, by a digest of its content: what many items hold is written once."""
        self._seen: dict[int, Any] = {}
        """Originals by their ids, which nothing else gets as long as they are kept."""
        self._places: list[tuple[Any, Any]] = []
        """Container and key of each of them."""
        self.made: dict[int, Callable[[Block], Any]] = {}
        """By the id of an original, what makes of the memory what takes its place."""
        self.left: list[str] = []
        """What is not shared, and why."""

    def write(self, container: Any, key: Any, name: str, least: int = _FEW) -> None:
        """Write what a container holds; of no more elements than ``least``, the parts of that."""
        value = container[key]
        if type(value) not in CONTAINERS:
            return
        self._places.append((container, key))
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(value) <= least:
            for part, _ in children(value) or ():
                self.write(value, part, f"{name}[{part!r}]")
            return
        try:
            write = self._list if type(value) is list else self._dict
            self.made[id(value)] = write(value)
        except RecursionError:
            self.left.append(f"{name} holds itself, or lists within lists without end")
        except _NotShareableError as error:
            self.left.append(name + _why(value, *error.args))

    def finish(self) -> None:
        """Make the memory, and put everything in its place."""
        with self._file as file:
            block = _block(file)
        made = {original: make(block) for original, make in self.made.items()}
        for container, key in self._places:
            container[key] = made.get(id(container[key]), container[key])

    def _put(self, data: bytes, *, aligned: bool = False) -> int:
        """Write some bytes, and return where they begin; ``aligned``: they are numbers."""
        if aligned:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNED))
        began = self._file.tell()
        self._file.write(data)
        return began

    def _dict(self, value: Any) -> Callable[[Block], SharedDict]:
        for key in value:
            if not _FLAT.issuperset(map(type, key if type(key) is tuple else (key,))):
                raise _NotShareableError(key)
        hashes = np.fromiter(map(_hash, value), np.int64, len(value))
        order = np.argsort(hashes, kind="stable")
        parts = list(value), list(value.values()), hashes[order].tolist(), order.tolist()
        default, lists = getattr(value, "default_factory", None), [*map(self._list, parts)]
        return lambda block: SharedDict(default, *(make(block) for make in lists))

    def _list(self, value: list[Any]) -> Callable[[Block], SharedList]:
        kinds, numbers = set(map(type, value)), None
        with suppress(OverflowError):
            if kinds in ({int}, {float}):
                numbers = array("q" if kinds == {int} else "d", value)
        if numbers is None:
            numbers = array("Q", map(self._item, value))
        start = self._put(numbers.tobytes(), aligned=True)
        return partial(SharedList, numbers.typecode, start, len(value))

    def _item(self, value: Any) -> int:
        self._pickled.seek(0)
        self._pickled.truncate()
        self._pickler.clear_memo()
        self._pickler.dump(_frozen(value))
        return self._put(self._pickled.getvalue())

    def _array(self, value: Any) -> tuple[Any, ...]:
        dtype = value.dtype.str if value.dtype.names is None else value.dtype
        content = value.tobytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if digest not in self._arrays:
            self._arrays[digest] = self._put(content, aligned=True)
        return _array, (value.shape, dtype, pickle.PickleBuffer(bytearray()), self._arrays[digest])


# -- memory ----------------------------------------------------------------------------------------


class Block(mmap.mmap):
    """A file without a name, mapped, that nobody can change.

    It is sent to a process that is being started as an open file; any other pickle has a copy.
    """

    descriptor: int

    @classmethod
    def at(cls, descriptor: int) -> Block:
        """Return the memory of a descriptor, which is closed with it."""
        # A copy, so that what writes to a tensor over it, which torch does not refuse, changes this
        # process's own pages, as in a forked one, and does not end it.
        made = cls(descriptor, 0, access=mmap.ACCESS_COPY)
        made.descriptor = descriptor
        weakref.finalize(made, os.close, descriptor).atexit = False
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None and sys.platform != "win32":
            return _received, (reduction.DupFd(self.descriptor),)
        return _copied, (bytes(self),)


def _received(descriptor: Any) -> Block:
    return Block.at(descriptor.detach())


def _copied(content: bytes) -> Block:
    with _memory_file() as file:
        file.write(content)
        return _block(file)


def _memory_file() -> IO[bytes]:
    with suppress(AttributeError, OSError):  # no Linux, or a filter that forbids it
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        return os.fdopen(os.memfd_create(_NAME, flags), "w+b", buffering=2**20)
    return tempfile.TemporaryFile()


def _block(file: IO[bytes]) -> Block:
    """Return the memory of a file, or the same that a process of this user had before."""
    if not file.tell():  # what is empty cannot be mapped
        file.write(b"\0")
    file.flush()
    block = Block.at(os.dup(file.fileno()))
    with suppress(ImportError, AttributeError, OSError):  # no seals: then each rank has its own
        import fcntl

        folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # of several ranks one is the first
            for link in Path("/proc").glob("[0-9]*/fd/*"):
                with suppress(OSError):  # of other users, and what ends meanwhile
                    if _NAME in str(link.readlink()) and _may_be(link, block):
                        other = Block.at(os.open(link, os.O_RDONLY | os.O_CLOEXEC))
                        seals = fcntl.fcntl(other.descriptor, fcntl.F_GET_SEALS)
                        if seals & fcntl.F_SEAL_WRITE and _equal(other, block):
                            return other
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            fcntl.fcntl(block.descriptor, fcntl.F_ADD_SEALS, seals)
        finally:
            os.close(folder)
    return block


def _may_be(link: Path, block: Block) -> bool:
    found = link.stat()  # root sees those of others, too
    return (found.st_size, found.st_uid) == (len(block), os.geteuid())


def _equal(one: Block, other: Block) -> bool:
    starts = range(0, len(one), _CHUNK)
    return all(one[at : at + _CHUNK] == other[at : at + _CHUNK] for at in starts)

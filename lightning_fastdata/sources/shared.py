"""One copy of a dataset's objects in memory that all processes map, and none can change.

A list becomes the numbers themselves, or its items written one after the other, with a table of
where each starts. Reading an item makes it anew, so that no reference to what is shared is counted.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import io
import marshal
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing import context, reduction
from operator import index as as_index
from pathlib import Path, PurePath
from typing import IO, Any, Final, NamedTuple, NoReturn, TypeVar

import numpy as np

from lightning_fastdata.errors import DatasetError, FastDataWarning
from lightning_fastdata.sources.attributes import CONTAINERS, attributes
from lightning_fastdata.tree import held_by

T = TypeVar("T")

_FEW: Final = 1000
"""A list or dict of no more elements is looked into, and stays as it is."""
_ALIGNED: Final = 16
_NAME: Final = "fastdata-shared"
_DIGEST_BYTES: Final = 32
"""Of what follows; at the begin of the memory."""
_MARSHAL: Final = 2
"""The newest form whose bytes do not depend on who else refers to an object."""
_FLAT: Final = frozenset({str, int, float, bool, complex, bytes, type(None)})
_UNCHANGING: Final = (PurePath, datetime.date, datetime.timedelta, np.generic)
"""Values that nobody can change, and that pickle alone writes."""
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
    if isinstance(dataset, SharedList | SharedDict):
        return dataset
    writer = _Writer()
    if type(dataset) in CONTAINERS:
        try:
            made = writer.shared(dataset, "dataset", least=-1)
        except _NotShareableError as error:
            raise DatasetError(f"Nothing is shared: {error}.") from None
        writer.finish()
        return made  # type: ignore[no-any-return]
    for each in attributes(dataset):
        writer.share_parts(each.owner, [(each.key, each.value, each.name)])
    writer.finish()
    said = f"Not shared, and left as it is: {'; '.join(writer.left)}." if writer.left else ""
    already = any(isinstance(each, SharedList | SharedDict) for each in held_by(dataset).values())
    if not writer.left and not writer.places and not already:
        said = (
            f"Nothing of this {type(dataset).__name__} is shared: it holds no list or dict of more "
            f"than {_FEW} elements. Call share() when it is complete."
        )
    if said:
        warnings.warn(said, FastDataWarning, stacklevel=2)
    return dataset


class _NotShareableError(Exception):
    """Names what cannot be shared, and where it is."""


# -- the memory ------------------------------------------------------------------------------------


class Block(mmap.mmap):
    """Memory that cannot be changed: a file without a name, mapped; at its begin is a digest.

    It is sent to a process that is being started as an open file. Any other pickle has a copy.
    """

    descriptor: int

    @classmethod
    def at(cls, descriptor: int) -> Block:
        """Return the memory of a descriptor, which is closed with it."""
        if sys.platform == "win32":
            made = cls(descriptor, 0, access=mmap.ACCESS_READ)
        else:
            # Private, so that what writes to a tensor over it, which torch does not refuse, changes
            # this process's own copy, as in a forked one, and does not end it.
            made = cls(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        made.descriptor = descriptor
        weakref.finalize(made, os.close, descriptor).atexit = False
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None and sys.platform != "win32":
            return _received, (reduction.DupFd(self.descriptor),)
        return _written, (bytes(self),)


def _received(descriptor: Any) -> Block:
    return Block.at(descriptor.detach())


def _written(content: bytes) -> Block:
    with _memory_file() as file:
        file.write(content)
        return _finished(file)


def _memory_file() -> IO[bytes]:
    with suppress(AttributeError, OSError):  # no Linux, or a filter that forbids it
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        return os.fdopen(os.memfd_create(_NAME, flags), "w+b", buffering=2**20)
    return tempfile.TemporaryFile()


def _finished(file: IO[bytes]) -> Block:
    """Return what is written, or the same that a process of this user had before."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    file.seek(_DIGEST_BYTES)
    while part := file.read(2**20):
        digest.update(part)
    size = file.tell()
    file.seek(0)
    file.write(digest.digest())
    file.flush()
    with suppress(ImportError, AttributeError, OSError):  # no seals: then each rank has its own
        import fcntl

        folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # of several ranks one is the first
            for link in Path("/proc").glob("[0-9]*/fd/*"):
                with suppress(OSError):  # of other users, and what ends meanwhile
                    found = _same(link, digest.digest(), size)
                    if found is not None:
                        return found
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, seals)
        finally:
            os.close(folder)
    return Block.at(os.dup(file.fileno()))


def _same(link: Path, digest: bytes, size: int) -> Block | None:
    """Return the memory that an open file is, if it has this content for good."""
    import fcntl

    if _NAME not in str(link.readlink()):
        return None
    found = link.stat()
    if found.st_size != size or found.st_uid != os.geteuid():  # root sees those of others, too
        return None
    block = Block.at(os.open(link, os.O_RDONLY | os.O_CLOEXEC))
    sealed = fcntl.fcntl(block.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    return block if sealed and block[:_DIGEST_BYTES] == digest else None


# -- what takes the place of a list or a dict ------------------------------------------------------


_OF_LISTS: Final = (
    "append clear extend insert pop remove reverse sort __delitem__ __iadd__ __imul__ __setitem__"
)
_OF_DICTS: Final = "clear pop popitem setdefault update __delitem__ __ior__ __setitem__"


def _refusing(names: str) -> Callable[[type[T]], type[T]]:
    """Have methods of a class raise DatasetError, which says that nothing can be changed."""

    def refused(name: str) -> Callable[..., NoReturn]:
        def refuse(*_args: object, **_kwargs: object) -> NoReturn:
            raise DatasetError(_READ_ONLY.format(name=name))

        return refuse

    def decorate(kind: type[T]) -> type[T]:
        for name in names.split():
            setattr(kind, name, refused(name))
        return kind

    return decorate


class _Copied:
    """Read-only, but a copy or a pickle is as any other."""

    __slots__ = ()

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        plain: Any = list if isinstance(self, list) else dict
        return plain, (plain(self),)

    def __copy__(self) -> Any:
        return list(self) if isinstance(self, list) else dict(self)  # type: ignore[call-overload]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(copy.copy(self), memo)


@_refusing(_OF_LISTS)
class ReadOnlyList(_Copied, list[Any]):
    """A list within something shared."""

    __slots__ = ()


@_refusing(_OF_DICTS)
class ReadOnlyDict(_Copied, dict[Any, Any]):
    """A dict within something shared."""

    __slots__ = ()


def _frozen(value: Any) -> Any:
    """Return a value in which nothing can be changed, apart from arrays."""
    kind = _PLAIN.get(type(value), type(value))
    if kind in (list, tuple):
        parts = value if _FLAT.issuperset(map(type, value)) else map(_frozen, value)
        return ReadOnlyList(parts) if kind is list else tuple(parts)
    if kind is dict:
        return ReadOnlyDict(zip(value, map(_frozen, value.values()), strict=True))
    # Pickle writes others within the item, where they would be read as arrays of their own.
    return np.require(value, requirements="C") if kind is np.ndarray else value


_PLAIN: Final[dict[type, type]] = {ReadOnlyList: list, ReadOnlyDict: dict}
"""What was shared before is shared again as what it was."""


class _Pickler(pickle.Pickler):
    """Writes what is read-only as such."""

    dispatch_table = {  # noqa: RUF012
        ReadOnlyList: lambda value: (ReadOnlyList, (list(value),)),
        ReadOnlyDict: lambda value: (ReadOnlyDict, (dict(value),)),
    }


class _Form(NamedTuple):
    """How a list is written."""

    kind: str
    """``"q"`` and ``"d"``: numbers of 8 bytes; others are of items, see :func:`_how`."""
    start: int
    """Of the numbers, or of a table of where each item starts, in bytes."""
    length: int
    keys: tuple[str, ...] | None = None
    """Of all items, which are dicts: their values alone are written."""


def _reader(block: Block, form: _Form) -> Callable[[int], Any]:
    """Return what makes an item from its number."""
    view, keys = memoryview(block).toreadonly(), form.keys
    table: Any = view[form.start : form.start + 8 * form.length]
    if form.kind in ("q", "d"):
        return table.cast(form.kind).__getitem__  # type: ignore[no-any-return]
    starts = table.cast("Q")

    def with_arrays(data: memoryview) -> Any:
        pickled, spans = marshal.loads(data)
        return pickle.loads(pickled, buffers=[view[start:stop] for start, stop in spans])

    kinds = {"flat": marshal.loads, "nested": pickle.loads, "with arrays": with_arrays}
    loads: Any = kinds[form.kind]

    def item(number: int) -> Any:
        return loads(view[starts[number] :])  # what follows the item is not looked at

    def record(number: int) -> Any:
        return ReadOnlyDict(zip(keys or (), loads(view[starts[number] :]), strict=True))

    return item if keys is None else record


class _Shared:
    __slots__ = ()

    def __repr__(self) -> str:
        return repr(copy.copy(self))

    def __deepcopy__(self, _memo: object) -> Any:
        return self  # as of a tuple: nothing in it can change


@_refusing(_OF_LISTS)
class SharedList(_Shared, Sequence[Any]):
    """What takes the place of a list. A slice, ``copy`` and ``list(x)`` are plain lists."""

    __slots__ = ("_block", "_form", "_length", "_read")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, block: Block | None, form: _Form) -> None:
        self._form, self._length = form, form.length
        if block is not None:
            self.attach(block)

    def attach(self, block: Block) -> None:
        """Read from this memory from now on."""
        self._block, self._read = block, _reader(block, self._form)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and 0 <= index < self._length:
            return self._read(index)
        if isinstance(index, slice):
            return [self._read(number) for number in range(*index.indices(self._length))]
        number = as_index(index)
        number += self._length if number < 0 else 0
        if not 0 <= number < self._length:
            raise IndexError("list index out of range")
        return self._read(number)

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, range(self._length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | SharedList):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedList, (self._block, self._form)

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


@_refusing(_OF_DICTS)
class SharedDict(_Shared, Mapping[Any, Any]):
    """What takes the place of a dict. ``copy`` and ``dict(x)`` are plain dicts.

    Args:
        pairs: Keys and values.
        hashes: Of the keys, sorted.
        order: Where the pair of each hash is.
        default: Makes the value of a missing key, as that of a ``defaultdict`` does.
    """

    __slots__ = ("_default", "_hashes", "_order", "_pairs")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        pairs: SharedList,
        hashes: SharedList,
        order: SharedList,
        default: Callable[[], Any] | None,
    ) -> None:
        self._pairs, self._hashes, self._order, self._default = pairs, hashes, order, default

    def _found(self, key: Any) -> Any:
        """Return key and value, or None."""
        wanted = _hash(key)
        at = bisect_left(range(len(self)), wanted, key=self._hashes._read)
        while at < len(self) and self._hashes[at] == wanted:
            pair = self._pairs[self._order[at]]
            if pair[0] == key:
                return pair
            at += 1
        return None

    def __getitem__(self, key: Any) -> Any:
        pair = self._found(key)
        if pair is None and self._default is None:
            raise KeyError(key)
        return pair[1] if pair or self._default is None else _frozen(self._default())

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key, or ``default``."""
        pair = self._found(key)
        return default if pair is None else pair[1]

    def __contains__(self, key: object) -> bool:
        return self._found(key) is not None

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._pairs)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedDict, (self._pairs, self._hashes, self._order, self._default)

    def __copy__(self) -> dict[Any, Any]:
        made: dict[Any, Any] = {} if self._default is None else defaultdict(self._default)
        made.update(self._pairs)
        return made

    copy = __copy__


# -- writing ---------------------------------------------------------------------------------------


class _Writer:
    """Writes what is to be shared, and puts it in its places when all is written."""

    def __init__(self) -> None:
        self._file = _memory_file()
        self._at = 0
        self._write(b"\0" * _DIGEST_BYTES)
        self._lists: list[SharedList] = []
        self._known: dict[int, tuple[Any, Any]] = {}
        """By the ids of originals, which are kept so that nothing else gets their ids."""
        self.places: list[tuple[Any, Any, Any]] = []
        """Container, key, and what is to be there."""
        self.left: list[str] = []
        """What is not shared, and why."""

    def share_parts(self, container: Any, parts: Iterable[tuple[Any, Any, str]]) -> None:
        """Share what a container holds: key, value, and what it is called."""
        for key, value, name in parts:
            try:
                made = self.shared(value, name)
            except _NotShareableError as error:
                self.left.append(str(error))
                continue
            if made is not value:
                self.places.append((container, key, made))

    def shared(self, value: Any, name: str, least: int = _FEW) -> Any:
        """Return what takes the place of a value; the value where nothing is to be shared.

        Of a list or dict with no more elements than ``least`` the parts are.
        """
        if id(value) in self._known:
            return self._known[id(value)][1]
        if type(value) not in CONTAINERS:
            return value
        made, of_list = value, type(value) is list
        if len(value) > least:
            made = self._list(value, name) if of_list else self._dict(value, name)
        else:
            pairs = list(enumerate(value) if of_list else value.items())
            self.share_parts(value, [(key, part, f"{name}[{key!r}]") for key, part in pairs])
        self._known[id(value)] = value, made
        return made

    def finish(self) -> None:
        """Make the memory, and put everything in its place."""
        with self._file as file:
            block = _finished(file)
        for each in self._lists:
            each.attach(block)
        for container, key, made in self.places:
            container[key] = made

    def _write(self, data: Any) -> int:
        """Write some bytes, and return where they begin."""
        began = self._at
        self._at += self._file.write(data)
        return began

    def _write_aligned(self, data: Any) -> int:
        self._write(b"\0" * (-self._at % _ALIGNED))
        return self._write(data)

    def _dict(self, value: Any, name: str) -> SharedDict:
        for key in value:
            if not _FLAT.issuperset(map(type, key if type(key) is tuple else (key,))):
                raise _NotShareableError(f"{name} has a {type(key).__name__} among its keys")
        hashes = np.fromiter(map(_hash, value), np.int64, len(value))
        order = np.argsort(hashes, kind="stable")
        parts = list(value.items()), hashes[order].tolist(), order.tolist()
        pairs, sorted_, positions = (self._list(part, name) for part in parts)
        default = getattr(value, "default_factory", None)
        return SharedDict(pairs, sorted_, positions, default)

    def _list(self, value: list[Any], name: str) -> SharedList:
        kinds = set(map(type, value))
        form = None
        for kind, code in ((int, "q"), (float, "d")):
            with suppress(OverflowError):
                if kinds == {kind}:
                    start = self._write_aligned(array(code, value).tobytes())
                    form = _Form(code, start, len(value))
        made = SharedList(None, form or self._items(value, name, kinds))
        self._lists.append(made)
        return made

    def _items(self, value: list[Any], name: str, kinds: set[type]) -> _Form:
        keys, items = None, value
        if {_PLAIN.get(kind, kind) for kind in kinds} == {dict}:
            keys = tuple(value[0])
            alike = all(tuple(item) == keys for item in value)
            keys = keys if alike and all(type(key) is str for key in keys) else None
        if keys is not None:
            items = [tuple(item.values()) for item in value]
        try:
            kinds_written = set(map(_how, items))
        except RecursionError:
            kinds_written = {""}
        if "" in kinds_written:
            raise _NotShareableError(_culprit(value, name))
        kind = max(kinds_written, default="flat")
        try:
            starts = array("Q", (self._write(self._written(item, kind)) for item in items))
        except RecursionError:
            raise _NotShareableError(f"{name} holds lists within lists, too deep") from None
        return _Form(kind, self._write_aligned(starts.tobytes()), len(value), keys)

    def _written(self, item: Any, kind: str) -> bytes:
        if kind == "flat":
            return marshal.dumps(item, _MARSHAL)
        buffers, pickled = list[Any](), io.BytesIO()
        arrays = buffers.append if kind == "with arrays" else None
        _Pickler(pickled, 5, buffer_callback=arrays).dump(_frozen(item))
        spans = [(self._write_aligned(each.raw()), self._at) for each in buffers]
        parts = pickled.getvalue(), spans
        return marshal.dumps(parts, _MARSHAL) if arrays else parts[0]


def _how(value: Any) -> str:
    """Return how a value is written; of several the last by the alphabet. Empty: not at all.

    ``"flat"``: by marshal, as nobody can change it; ``"nested"``: by pickle, with lists and dicts
    that are read-only; ``"with arrays"``: by pickle, the arrays beside it.
    """
    kind = _PLAIN.get(type(value), type(value))
    if kind in _FLAT:
        return "flat"
    if kind in (list, dict, tuple, frozenset):
        parts = list(chain(value, value.values())) if kind is dict else value
        own = "nested" if kind in (list, dict) else "flat"
        if _FLAT.issuperset(map(type, parts)):
            return own
        found = set(map(_how, parts))
        return "" if "" in found else max(own, *found)
    if kind is np.ndarray:
        # Times have no buffer that would come back read-only.
        return "" if value.dtype.hasobject or value.dtype.kind in "mM" else "with arrays"
    return "nested" if isinstance(value, _UNCHANGING) and kind is not np.void else ""


def _culprit(value: Any, name: str) -> str:
    """Return in words what in a value cannot be shared."""
    pairs: Iterable[tuple[Any, Any]] = ()
    with suppress(RecursionError):
        if type(value) in (list, tuple, dict):
            pairs = value.items() if type(value) is dict else enumerate(value)
        for key, part in pairs:
            if not _how(part):
                return _culprit(part, f"{name}[{key!r}]")
        kind = type(value).__name__
        hint = _HINTS.get(kind, "turn it into a dict or a tuple of text, numbers and arrays")
        return f"{name} is a {kind}; {hint}"
    return f"{name} holds itself, or lists within lists without end"

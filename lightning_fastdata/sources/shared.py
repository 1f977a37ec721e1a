"""One copy of a dataset's objects in memory that all processes map, and none can change.

A list becomes the numbers themselves, or its items written one after the other, with a table of
where each starts. Reading an item makes it anew, so that no reference to what is shared is counted.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import marshal
import pickle
import warnings
import zlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import suppress
from functools import partial, reduce
from pathlib import PurePath
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import numpy as np

from lightning_fastdata.errors import DatasetError, FastDataWarning
from lightning_fastdata.sources.attributes import CONTAINERS, attributes
from lightning_fastdata.sources.sealed import Block, BlockWriter
from lightning_fastdata.tree import held_by

T = TypeVar("T")

_FEW: Final = 1000
"""A list or dict of no more elements is looked into, and stays as it is."""
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
    if isinstance(dataset, _Shared):
        return dataset
    writer, made = _Writer(), dataset
    if type(dataset) in CONTAINERS:
        made = writer.shared(dataset, "dataset", least=-1)
        if writer.left:
            raise DatasetError(f"Nothing is shared: {writer.left[0]}.")
    for each in attributes(dataset):
        writer.share(each.owner, each.key, each.name)
    writer.finish()
    if writer.left:
        said = f"Not shared, and left as it is: {'; '.join(writer.left)}."
        warnings.warn(said, FastDataWarning, stacklevel=2)
    elif not writer.lists and not any(isinstance(x, _Shared) for x in held_by(dataset).values()):
        said = (
            f"Nothing of this {type(dataset).__name__} is shared: it holds no list or dict of more "
            f"than {_FEW} elements in an attribute, other than of __slots__. Call share() when it "
            "is complete."
        )
        warnings.warn(said, FastDataWarning, stacklevel=2)
    return made


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
        form: Of the items.
        block: The memory; None: it is attached later.
    """

    __slots__ = ("_block", "_layout", "_read", "_table")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, code: str, start: int, length: int, form: _Form, block: Any = None) -> None:
        self._layout = code, start, length, form
        if block is not None:
            self.attach(block)

    def attach(self, block: Block) -> None:
        """Read from this memory from now on."""
        code, start, length, form = self._layout
        whole, numbers = memoryview(block).toreadonly(), {"q": int, "d": float}
        self._block = block
        self._table: Any = whole[start : start + 8 * length].cast(code)  # type: ignore[call-overload]
        self._read: Callable[[Any], Any] = numbers.get(code) or _reader(form, whole)

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
        return SharedList, (*self._layout, self._block)

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

    def _place(self, key: Any) -> int | None:
        wanted = _hash(key)
        at = bisect_left(self._hashes._table, wanted)
        while at < len(self) and self._hashes[at] == wanted:
            if self._keys[self._order[at]] == key:
                return int(self._order[at])
            at += 1
        return None

    def __getitem__(self, key: Any) -> Any:
        place = self._place(key)
        if place is not None:
            return self._values[place]
        if self._default is None:
            raise KeyError(key)
        return _frozen(self._default())

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key, or ``default``."""
        place = self._place(key)
        return default if place is None else self._values[place]

    def __contains__(self, key: object) -> bool:
        return self._place(key) is not None

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def items(self) -> ItemsView[Any, Any]:
        """Return keys and values."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """Return the values."""
        return _Values(self)

    def __reduce__(self) -> tuple[Any, ...]:
        lists = self._keys, self._values, self._hashes, self._order
        return SharedDict, (self._default, *lists)

    def __copy__(self) -> dict[Any, Any]:
        made: dict[Any, Any] = {} if self._default is None else defaultdict(self._default)
        made.update(self.items())
        return made

    copy = __copy__


class _Items(ItemsView[Any, Any]):
    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self._mapping._keys, self._mapping._values, strict=True)  # type: ignore[attr-defined]


class _Values(ValuesView[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping._values)  # type: ignore[attr-defined]


# -- reading items ---------------------------------------------------------------------------------

_Form: TypeAlias = "str | tuple[type, tuple[Any, ...], tuple[_Form, ...]] | None"
"""What values have in common: of lists, tuples and dicts the kind, keys, and forms of the parts. A
list has one form for all. None: there are no values."""
_LEAF: Final = "leaf"
_ANY: Final = "any"
_MOST_KEYS: Final = 100
"""Of a dict or a tuple whose parts have forms of their own."""


def _either(one: _Form, other: _Form) -> _Form:
    if one is None or other is None or one == other:
        return one or other
    if isinstance(one, tuple) and isinstance(other, tuple) and one[:2] == other[:2]:
        return *one[:2], tuple(map(_either, one[2], other[2]))
    return _ANY


def _reader(form: _Form, whole: memoryview) -> Callable[[int], Any]:
    """Return what makes an item, from where it begins in the memory."""
    loads, freeze = marshal.loads, _freezer(form, whole)
    # What follows the item is not looked at.
    if freeze is None:
        return lambda start: loads(whole[start:])
    return lambda start: freeze(loads(whole[start:]))


def _freezer(form: _Form, whole: memoryview) -> Callable[[Any], Any] | None:
    """Return what makes a value of a form read-only; None: nobody can change it as it is."""
    if form in (_LEAF, None):
        return None
    if not isinstance(form, tuple):
        return partial(_frozen, whole=whole)
    kind, keys, forms = form
    freezers = [_freezer(each, whole) for each in forms]
    if kind is list:
        (part,) = freezers
        return ReadOnlyList if part is None else lambda value: ReadOnlyList(map(part, value))
    changed = [(key, freeze) for key, freeze in zip(keys, freezers, strict=True) if freeze]

    def frozen(value: Any) -> Any:
        parts = value if kind is dict else list(value)
        for key, freeze in changed:
            parts[key] = freeze(parts[key])
        return ReadOnlyDict(parts) if kind is dict else tuple(parts)

    return frozen if changed else ReadOnlyDict


def _frozen(value: Any, whole: memoryview | None = None) -> Any:
    """Return what a value of any form stands for, with nothing in it that could be changed."""
    kind = type(value)
    if kind is tuple and value and value[0] is ...:
        _, what, *where = value
        if not where:
            return pickle.loads(what)
        shape, start = where
        return np.ndarray(shape, pickle.loads(what) if type(what) is bytes else what, whole, start)
    if kind in (list, tuple):
        return (ReadOnlyList if kind is list else tuple)([_frozen(part, whole) for part in value])
    if kind is dict:
        return ReadOnlyDict({_frozen(k, whole): _frozen(v, whole) for k, v in value.items()})
    return value


# -- writing ---------------------------------------------------------------------------------------


class _NotShareableError(Exception):
    """Its argument is what cannot be shared."""


def _path(value: Any, culprit: object) -> str | None:
    """Return where in a value something is; None: nowhere."""
    if value is culprit:
        return ""
    for key in _keys(value) if isinstance(value, list | tuple | dict) else ():
        found = _path(value[key], culprit)
        if found is not None:
            return f"[{key!r}]{found}"
    return None


def _flat(values: Iterable[Any]) -> bool:
    return _FLAT.issuperset(map(type, values))


def _keys(value: Any) -> list[Any]:
    return list(value if isinstance(value, dict) else range(len(value)))


class _Writer:
    """Writes what is to be shared, and puts it in its places when all is written."""

    def __init__(self) -> None:
        self._block = BlockWriter()
        self._arrays: dict[bytes, int] = {}
        """Where an array is, by a digest of its content: what many items hold is written once."""
        self._known: dict[int, tuple[Any, Any]] = {}
        """By the ids of originals, which are kept so that nothing else gets their ids."""
        self._places: list[tuple[Any, Any, Any]] = []
        """Container, key, and what is to be there."""
        self.lists: list[SharedList] = []
        self.left: list[str] = []
        """What is not shared, and why."""

    def share(self, container: Any, key: Any, name: str) -> None:
        """Share what a container holds."""
        made = self.shared(container[key], name)
        if made is not container[key]:
            self._places.append((container, key, made))

    def shared(self, value: Any, name: str, least: int = _FEW) -> Any:
        """Return what takes the place of a value; the value where nothing is to be shared.

        Of a list or dict with no more elements than ``least`` the parts are.
        """
        if type(value) not in CONTAINERS or id(value) in self._known:
            return self._known.get(id(value), (value, value))[1]
        self._known[id(value)] = value, value
        if len(value) <= least:
            for key in _keys(value):
                self.share(value, key, f"{name}[{key!r}]")
            return value
        try:
            made: Any = self._list(value) if type(value) is list else self._dict(value)
        except RecursionError:
            self.left.append(f"{name} holds itself, or lists within lists without end")
            return value
        except _NotShareableError as error:
            (culprit,) = error.args
            path, kind = _path(value, culprit), type(culprit).__name__
            hint = _HINTS.get(kind, "turn it into a dict or a tuple of text, numbers and arrays")
            why = f"{path} is a {kind}; {hint}" if path else f" has a {kind} among its keys"
            self.left.append(name + why)
            return value
        self._known[id(value)] = value, made
        return made

    def finish(self) -> None:
        """Make the memory, and put everything in its place."""
        block = self._block.finish()
        for each in self.lists:
            each.attach(block)
        for container, key, made in self._places:
            container[key] = made

    def _dict(self, value: Any) -> SharedDict:
        for key in value:
            if not _flat(key if type(key) is tuple else (key,)):
                raise _NotShareableError(key)
        hashes = np.fromiter(map(_hash, value), np.int64, len(value))
        order = np.argsort(hashes, kind="stable")
        parts = list(value), list(value.values()), hashes[order].tolist(), order.tolist()
        return SharedDict(getattr(value, "default_factory", None), *map(self._list, parts))

    def _list(self, value: list[Any]) -> SharedList:
        made = SharedList(*(self._numbers(value) or self._items(value)))
        self.lists.append(made)
        return made

    def _numbers(self, value: list[Any]) -> tuple[str, int, int, _Form] | None:
        kinds = set(map(type, value))
        code = "q" if kinds == {int} else "d"
        if kinds in ({int}, {float}):
            with suppress(OverflowError):
                start = self._block.write(array(code, value).tobytes(), aligned=True)
                return code, start, len(value), _LEAF
        return None

    def _items(self, items: list[Any]) -> tuple[str, int, int, _Form]:
        forms, starts = set(), array("Q")
        for item in items:
            form, plain = self._plain(item)
            # What an item has twice, as keys, is written once; but what is depends on who else
            # refers to it, unless it is a copy.
            copied = marshal.loads(marshal.dumps(plain, 2))
            starts.append(self._block.write(marshal.dumps(copied)))
            forms.add(form)
        start = self._block.write(starts.tobytes(), aligned=True)
        return "Q", start, len(items), reduce(_either, forms, None)

    def _plain(self, value: Any) -> tuple[_Form, Any]:
        """Return the form of a value, and what marshal writes in its place."""
        kind: Any = type(value)
        if kind in _FLAT or (kind is frozenset and _flat(value)):
            return _LEAF, value
        if kind in (list, tuple, dict, ReadOnlyList, ReadOnlyDict):
            return self._container(value)
        if kind is np.ndarray and not value.dtype.hasobject:
            dtype = value.dtype.str if value.dtype.names is None else pickle.dumps(value.dtype)
            content = value.tobytes()
            digest = hashlib.blake2b(content, digest_size=16).digest()
            if digest not in self._arrays:
                self._arrays[digest] = self._block.write(content, aligned=True)
            return _ANY, (..., dtype, value.shape, self._arrays[digest])
        for part in value if kind is frozenset else ():
            self._plain(part)
        if kind is frozenset or (isinstance(value, _UNCHANGING) and kind is not np.void):
            return _ANY, (..., pickle.dumps(value))
        raise _NotShareableError(value)

    def _container(self, value: Any) -> tuple[_Form, Any]:
        mapping = isinstance(value, dict)
        parts: Any = value.values() if mapping else value
        forms: Any = (_LEAF,) * len(value)
        if not _flat(parts):
            forms, parts = zip(*map(self._plain, parts), strict=True)
        if isinstance(value, list):
            return (list, (), (reduce(_either, set(forms), None),)), list(parts)
        if not mapping and {_LEAF}.issuperset(forms):
            return _LEAF, tuple(parts)
        keys: Any = tuple(_keys(value))
        alike = len(keys) <= _MOST_KEYS and _flat(keys)
        if not mapping:
            return (tuple, keys, forms) if alike else _ANY, tuple(parts)
        _, keys = (_LEAF, keys) if alike else self._plain(keys)
        return (dict, keys, forms) if alike else _ANY, dict(zip(keys, parts, strict=True))

"""The lists and dicts that a dataset holds, by the names of its attributes, and their size."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lightning_fastdata.tree import held_by

DICTS: Final = (dict, OrderedDict, defaultdict)
CONTAINERS: Final = (list, *DICTS)
_ELEMENTS: Final = 200
"""Of a list, what is measured: who touches all of them copies them."""
_PAGE_BYTES: Final = 4096
_GC_HEAD: Final = 16
_DEPTH: Final = 5
_WORDS: Final = {"str": "texts", "int": "numbers", "float": "numbers", "ndarray": "arrays"}
_PARTS: Final = 100
"""A list of no more elements may be one of datasets."""
_OPAQUE: Final = (
    type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.nn.Module, torch.Tensor,
    np.ndarray,
)  # fmt: skip


class Attribute(NamedTuple):
    """An attribute that holds a list or a dict."""

    name: str
    """As it is reached, e.g. ``"dataset.coco.anns"``."""
    owner: dict[str, Any]
    """The attributes of the object that it belongs to."""
    key: str
    value: Any

    def put(self, value: Any) -> None:
        """Let the object hold another value."""
        self.owner[self.key] = value


def attributes(dataset: object, name: str = "dataset") -> Iterator[Attribute]:
    """Yield what a dataset holds, and the objects that it holds.

    Objects are searched that have attributes of their own, as another dataset or an index; modules
    of networks, tensors and functions are not.
    """
    yield from _within(dataset, name, _DEPTH, {id(dataset)})


def _within(owner: object, name: str, depth: int, seen: set[int]) -> Iterator[Attribute]:
    held = held_by(owner)
    for key, value in list(held.items()):
        path = f"{name}.{key}"
        kind = type(value)
        if kind in CONTAINERS:
            yield Attribute(path, held, key, value)
        parts = [(path, value)]
        if kind in (list, tuple) and len(value) <= _PARTS:
            parts = [(f"{path}[{number}]", part) for number, part in enumerate(value)]
        for where, part in parts:
            opaque = id(part) in seen or isinstance(part, _OPAQUE)
            if depth and held_by(part) and not opaque:
                seen.add(id(part))
                yield from _within(part, where, depth - 1, seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldObjects:
    """A list or dict that a dataset holds."""

    name: str
    """As it is reached, e.g. ``"dataset.samples"``."""
    elements: int
    kind: str
    """In words, e.g. ``"list of 1.2 million dicts"``."""
    size_bytes: int
    """Of all that it holds."""
    counted_bytes: int
    """Of its objects, at most a page each: what a process copies that reads all of them."""
    places: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """Where some of them are in the memory of this process, and of those that it has forked."""


def held_objects(dataset: object) -> tuple[HeldObjects, ...]:
    """Return the lists and dicts that a dataset holds, the largest first."""
    held = [each for each in attributes(dataset) if not _of_owners(each.value)]
    found = {id(each.value): _measured(each.name, each.value) for each in held}
    return tuple(sorted(found.values(), key=lambda held: -held.counted_bytes))


def _of_owners(value: Any) -> bool:
    """Return whether it is a list of a few objects, as datasets, whose own lists are named."""
    if type(value) is not list or not 0 < len(value) <= _PARTS:
        return False
    return all(held_by(part) and not isinstance(part, _OPAQUE) for part in value)


def _measured(name: str, value: Any) -> HeldObjects:
    some = _some(value)
    sizes = [_size(part, _DEPTH) for part in some]
    times = len(value) / max(1, len(some))
    size, counted = (int(times * sum(each[n] for each in sizes)) for n in (0, 1))
    first = some[0][1] if isinstance(value, Mapping) and some else next(iter(some), None)
    name_of = type(first).__name__
    word = _WORDS.get(name_of, f"{name_of.removesuffix('s')}s")
    kind = f"{type(value).__name__} of {_count(len(value))} {word}"
    return HeldObjects(
        name=name,
        elements=len(value),
        kind=kind,
        size_bytes=size + sys.getsizeof(value),
        counted_bytes=counted,
        places=tuple(id(part) for part in _counted(value)),
    )


def _some(value: Any) -> Sequence[Any]:
    """Return some elements of a list, or keys and values of a dict."""
    if isinstance(value, Mapping):
        return list(islice(value.items(), _ELEMENTS))
    return value[:: max(1, len(value) // _ELEMENTS)]  # type: ignore[no-any-return]


def _counted(value: Any) -> Iterator[Any]:
    """Yield some objects that reading writes to; of a list of a few lists, some of theirs."""
    few = len(value) <= _PARTS
    for part in _some(value):
        element = part[1] if isinstance(value, Mapping) else part
        if few and type(element) in CONTAINERS and element:
            yield from _counted(element)
        elif _size(element, 0)[1]:
            yield element


def _size(value: Any, depth: int) -> tuple[int, int]:
    """Return the bytes of an object with all that it holds, and those that are counted."""
    if value is None or type(value) is bool or (type(value) is int and -6 < value < 257):
        return 0, 0  # Python has one of each
    own = sys.getsizeof(value)
    if isinstance(value, np.ndarray):
        return max(own, int(value.nbytes)), type(value).__basicsize__
    parts: Any = ()
    if depth and isinstance(value, dict):
        parts = value.values()  # keys are names as a rule, which all have in common
    elif depth and isinstance(value, list | tuple | set | frozenset):
        parts = value
    elif depth and hasattr(value, "__dict__"):
        parts = vars(value).values()
    inner = [_size(part, depth - 1) for part in islice(parts, _ELEMENTS)]
    times = max(1.0, len(parts) / _ELEMENTS)
    whole, counted = (int(times * sum(pair[n] for pair in inner)) for n in (0, 1))
    # The tables of containers are in memory of their own, which reading does not write to.
    head = type(value).__basicsize__ + _GC_HEAD if parts else min(own, _PAGE_BYTES)
    return own + whole, head + counted


def _count(number: int) -> str:
    return f"{number / 1e6:.1f} million" if number >= 1e6 else f"{number:,}"

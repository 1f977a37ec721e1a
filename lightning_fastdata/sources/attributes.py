"""The lists and dicts that a dataset holds, by the names of its attributes, and their size."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lightning_fastdata.tree import held_by

CONTAINERS: Final = (list, dict, OrderedDict, defaultdict)
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
    """An attribute that holds a list or a dict: its name, and where it is."""

    name: str
    """As it is reached, e.g. ``"dataset.coco.anns"``."""
    owner: dict[str, Any]
    key: str


def attributes(
    owner: object, name: str = "dataset", depth: int = _DEPTH, seen: set[int] | None = None
) -> Iterator[Attribute]:
    """Yield what a dataset holds, and the objects that it holds.

    Objects are searched that have attributes of their own, as another dataset or an index; modules
    of networks, tensors and functions are not.
    """
    seen = {id(owner)} if seen is None else seen
    held = held_by(owner)
    for key, value in list(held.items()):
        path = f"{name}.{key}"
        if type(value) in CONTAINERS:
            yield Attribute(path, held, key)
        parts = [(path, value)]
        if type(value) in (list, tuple) and len(value) <= _PARTS:
            parts = [(f"{path}[{number}]", part) for number, part in enumerate(value)]
        for where, part in parts:
            if depth and held_by(part) and id(part) not in seen and not isinstance(part, _OPAQUE):
                seen.add(id(part))
                yield from attributes(part, where, depth - 1, seen)


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


def held_objects(dataset: object) -> tuple[HeldObjects, ...]:
    """Return the lists and dicts that a dataset holds, the largest first."""
    found = {id(each.owner[each.key]): each for each in attributes(dataset)}
    measured = (_measured(each.name, each.owner[each.key]) for each in found.values())
    return tuple(sorted(measured, key=lambda held: -held.counted_bytes))


def _measured(name: str, value: Any) -> HeldObjects:
    mapping = isinstance(value, Mapping)
    every = len(value) // _ELEMENTS or 1
    some = list(islice(value.values(), _ELEMENTS)) if mapping else value[::every]
    keys = islice(value, len(some) if mapping else 0)
    seen: set[int] = set()
    sizes = [_size(part, _DEPTH, seen) for part in (*keys, *some)]
    times = len(value) / max(1, len(some))
    size, counted = (int(times * sum(column)) for column in zip((0, 0), *sizes, strict=True))
    word = type(next(iter(some), None)).__name__
    count = f"{len(value) / 1e6:.1f} million" if len(value) >= 1e6 else f"{len(value):,}"
    return HeldObjects(
        name=name,
        elements=len(value),
        kind=f"{type(value).__name__} of {count} {_WORDS.get(word, f'{word}s')}",
        size_bytes=size + sys.getsizeof(value),
        counted_bytes=counted,
    )


def _size(value: Any, depth: int, seen: set[int]) -> tuple[int, int]:
    """Return the bytes of an object with all that it holds, and those that are counted.

    What was seen before is 0: an object that many have is one.
    """
    common = value is None or type(value) is bool or (type(value) is int and -6 < value < 257)
    if common or id(value) in seen:  # Python has one of each that is common
        return 0, 0
    seen.add(id(value))
    own = sys.getsizeof(value)
    if isinstance(value, np.ndarray):
        return max(own, int(value.nbytes)), type(value).__basicsize__
    parts: Any = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple | set | frozenset):
        # Of any other object what it refers to, also in slots, as paths have them.
        parts = [part for part in gc.get_referents(value) if not isinstance(part, _OPAQUE)]
    some = islice(parts, _ELEMENTS if depth else 0)
    sizes = [_size(part, depth - 1, seen) for part in some]
    times = max(1.0, len(parts) / _ELEMENTS)
    whole, counted = (int(times * sum(column)) for column in zip((0, 0), *sizes, strict=True))
    # The tables of containers are in memory of their own, which reading does not write to.
    head = type(value).__basicsize__ + _GC_HEAD if parts else min(own, _PAGE_BYTES)
    return own + whole, head + counted

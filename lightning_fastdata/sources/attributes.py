"""The lists and dicts that a dataset holds, by the names of its attributes, and their size."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

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


def attributes(
    owner: object, name: str = "dataset", depth: int = _DEPTH, seen: set[int] | None = None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield what a dataset holds, and the objects that it holds: names, and where each is.

    A name is as one reaches it, as ``"dataset.coco.anns"``; ``owner[key]`` is the list or dict.

    Objects are searched that have attributes of their own, as another dataset or an index; modules
    of networks, tensors and functions are not. A list of some of them is named by their own.
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
    """As it is reached, e.g. ``"dataset.samples"``."""
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
    """Return some elements, of a dict keys and values, and how many times as many there are."""
    if isinstance(value, Mapping):
        some = list(chain.from_iterable(islice(value.items(), _ELEMENTS)))
        return some, 2 * len(value) / max(1, len(some))
    # Of a list a slice, as going over it would touch them all.
    few = isinstance(value, set | frozenset)
    some = list(islice(value, _ELEMENTS) if few else value[:: len(value) // _ELEMENTS or 1])
    return some, len(value) / max(1, len(some))


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
    parts: Any = value
    if not isinstance(value, dict | list | tuple | set | frozenset):
        # Of any other object what it refers to, also in slots, as paths have them.
        parts = [part for part in gc.get_referents(value) if not isinstance(part, _OPAQUE)]
    some, times = _some(parts) if depth else ([], 1.0)
    sizes = [_size(part, depth - 1, seen) for part in some]
    whole, counted = (int(times * sum(column)) for column in zip((0, 0), *sizes, strict=True))
    # The tables of containers are in memory of their own, which reading does not write to.
    head = type(value).__basicsize__ + _GC_HEAD if parts else min(own, _PAGE_BYTES)
    return own + whole, head + counted

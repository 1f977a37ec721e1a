"""The lists and dicts that a dataset holds, by the names of its attributes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lightning_fastdata.tree import held_by

DICTS: Final = (dict, OrderedDict, defaultdict)
CONTAINERS: Final = (list, *DICTS)
_DEPTH: Final = 5
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

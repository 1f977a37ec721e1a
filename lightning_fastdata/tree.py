"""The leaves of a batch: what its dicts, lists, tuples and dataclasses hold, and where."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

Path = tuple[Any, ...]
"""Keys, positions and field names that lead to one leaf of a batch."""


def spelled(path: Path) -> str:
    """Return a path as one would write it in Python."""
    return "".join(f"[{key!r}]" for key in path) or "the batch itself"


def replace_leaves(
    batch: Any, function: Callable[[Path, Any], Any], path: Path = (), depth: int = 8
) -> Any:
    """Return a batch in which a function has had its say on each leaf; structure stays.

    Args:
        batch: Dicts, lists, tuples, named tuples and dataclasses in each other.
        function: Given the path of a leaf and the leaf, returns what takes its place.
        path: Of ``batch`` itself.
        depth: Levels that are looked into.
    """
    if depth == 0 or isinstance(batch, torch.Tensor):
        return function(path, batch)
    if isinstance(batch, Mapping):
        items = {
            key: replace_leaves(value, function, (*path, key), depth - 1)
            for key, value in batch.items()
        }
        if all(items[key] is batch[key] for key in items):
            return batch
        return items if type(batch) is dict else _with_items(batch, items)
    if isinstance(batch, list | tuple):
        values = [
            replace_leaves(value, function, (*path, place), depth - 1)
            for place, value in enumerate(batch)
        ]
        if all(new is old for new, old in zip(values, batch, strict=True)):
            return batch
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if is_dataclass(batch) and not isinstance(batch, type):
        changed = {
            field.name: replace_leaves(
                getattr(batch, field.name), function, (*path, field.name), depth - 1
            )
            for field in fields(batch)
        }
        same = all(value is getattr(batch, name) for name, value in changed.items())
        return batch if same else _with_fields(batch, changed)
    return function(path, batch)


def _with_items(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same class and attributes with other values."""
    if not isinstance(batch, MutableMapping):
        return type(batch)(items)  # type: ignore[call-arg]
    twin = copy.copy(batch)
    twin.update(items)
    return twin


def _with_fields(batch: Any, changed: Mapping[str, Any]) -> Any:
    """Return a dataclass with other fields, without what its constructor would do to them."""
    twin = copy.copy(batch)
    for name, value in changed.items():
        object.__setattr__(twin, name, value)  # it may be frozen
    return twin

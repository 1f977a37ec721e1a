"""Samples and batches as trees: what their dicts, lists, tuples and dataclasses hold, and where."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from lightning_fastdata.types import Batch

Path = tuple[Any, ...]
"""Keys, positions and field names that lead to one leaf of a batch."""
_LEAVES = (torch.Tensor, str, bytes, bytearray, memoryview, range, type)


def spelled(path: Path) -> str:
    """Return a path as one would write it in Python."""
    return "".join(f"[{key!r}]" for key in path) or "the batch itself"


def children(value: Batch) -> list[tuple[Any, Any]] | None:
    """Return the parts of a container with their keys, positions or field names; None of a leaf.

    Containers are mappings, sequences (named tuples among them) and dataclasses. Tensors and
    strings are leaves.
    """
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return list(enumerate(value)) if isinstance(value, Sequence) else None


def rebuilt(value: Batch, parts: list[Any]) -> Batch:
    """Return a container of the same class with other parts, in the order of :func:`children`.

    Mappings and dataclasses keep their attributes; dataclasses are not constructed anew, as that
    might change what they are given.
    """
    if isinstance(value, Mapping):
        items = dict(zip(value, parts, strict=True))
        if type(value) is dict:
            return items
        if not isinstance(value, MutableMapping):
            return type(value)(items)  # type: ignore[call-arg]
        twin: Any = copy.copy(value)
        twin.update(items)
        return twin
    if is_dataclass(value):
        twin = copy.copy(value)
        for field, part in zip(fields(value), parts, strict=True):
            object.__setattr__(twin, field.name, part)  # it may be frozen
        return twin
    return type(value)(*parts) if is_named_tuple(value) else type(value)(parts)


def is_named_tuple(value: object) -> bool:
    """Return whether a value is a tuple whose class takes its parts one by one."""
    return isinstance(value, tuple) and names_of_parts(value) is not None


def names_of_parts(value: tuple[object, ...]) -> tuple[str, ...] | None:
    """Return the names of the parts of a named tuple; None: it is none."""
    return getattr(value, "_fields", None)


def leaves(value: Batch, is_leaf: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """Yield the leaves, in order; ``is_leaf``: what is not looked into, though a container."""
    parts = None if is_leaf(value) else children(value)
    if parts is None:
        yield value
    else:
        for _, part in parts:
            yield from leaves(part, is_leaf)


def with_paths(
    value: Batch, path: Path = (), is_leaf: Callable[[Any], bool] = lambda _: False
) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves, in order, each with where it is; ``is_leaf`` as of :func:`leaves`."""
    parts = None if is_leaf(value) else children(value)
    if parts is None:
        yield path, value
    else:
        for key, part in parts:
            yield from with_paths(part, (*path, key), is_leaf)


def at_path(value: Batch, path: Path) -> Any:
    """Return what lies under keys, positions and field names; None: nothing does."""
    for key in path:
        parts = dict(children(value) or ())
        if key not in parts:
            return None
        value = parts[key]
    return value


@runtime_checkable
class PilImage(Protocol):
    """A PIL image, recognised without importing PIL."""

    mode: str
    size: tuple[int, int]

    def getbands(self) -> tuple[str, ...]:
        """Return the names of its channels."""

    def convert(self, mode: str) -> object:
        """Return it in another mode."""


def bytes_in(value: Batch) -> int:
    """Return the bytes of all tensors, arrays and images in a sample or a batch."""
    return sum(map(_leaf_bytes, leaves(value)))


def _leaf_bytes(leaf: object) -> int:
    if isinstance(leaf, torch.Tensor | np.ndarray | np.generic):
        return int(leaf.nbytes)
    if isinstance(leaf, bytes | str):
        return len(leaf)
    if isinstance(leaf, PilImage):
        return leaf.size[0] * leaf.size[1] * len(leaf.getbands())
    return 8


def replace_leaves(
    batch: Batch,
    function: Callable[[Path, Any], Any],
    path: Path = (),
    *,
    depth: int = 8,
    is_leaf: Callable[[Any], bool] = lambda _: False,
) -> Batch:
    """Return a batch with each leaf replaced by ``function(path, leaf)``; structure stays.

    Containers are looked into to a ``depth`` (-1: all), unless ``is_leaf`` says that they are
    leaves. A container in which nothing was replaced is returned itself.
    """
    parts = None if depth == 0 or is_leaf(batch) else children(batch)
    if parts is None:
        return function(path, batch)
    replaced = [
        replace_leaves(part, function, (*path, key), depth=depth - 1, is_leaf=is_leaf)
        for key, part in parts
    ]
    if all(new is old for new, (_, old) in zip(replaced, parts, strict=True)):
        return batch
    return rebuilt(batch, replaced)


def put_leaves(value: Batch, leaves: Mapping[Path, Any]) -> Batch:
    """Return a sample or batch with other leaves at some paths."""
    return replace_leaves(value, leaves.get, depth=-1)


def name_of(function: object) -> str:
    """Return what a function or class is called; of another object the name of its class."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def has_method(owner: object, name: str) -> bool:
    """Return whether the class of an object has a method of that name.

    The object itself is not asked: it may hand on to another one whatever it is asked for.
    """
    return callable(getattr(type(owner), name, None))


def held(owner: object, name: str) -> Any:
    """Return an attribute that an object holds itself; None if it has none of that name.

    Neither a property nor ``__getattr__`` is called: either may open what should be opened in the
    workers alone.
    """
    return held_by(owner).get(name)


def held_by(owner: object) -> dict[str, Any]:
    """Return the attributes that an object holds itself, by name."""
    return getattr(owner, "__dict__", {})


def is_a(item: object, package: str, name: str | None = None) -> bool:
    """Return whether an object is of a class of a package, or of one derived from it.

    By name, as the package need not be installed. ``name``: of the class; None: any.
    """
    return any(
        base.__module__.split(".")[0] == package and name in (None, base.__name__)
        for base in type(item).__mro__
    )

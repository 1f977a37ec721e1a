"""What a dataset holds of some classes, found in its attributes: no code is run or read."""

from __future__ import annotations

import sys
from collections import UserDict, deque
from collections.abc import Iterator
from functools import lru_cache, partial
from types import (
    BuiltinMethodType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any, Final

import numpy as np
import torch

from lightning_fastdata.tree import held, held_by

_MAX_DEPTH: Final = 8
_MAX_ITEMS: Final = 256
_LEAF_TYPES: Final = (str, bytes, bytearray, int, float, complex, NoneType, np.ndarray)
_INSTALLED: Final = ("site-packages", "dist-packages")


def find_composes(obj: object) -> tuple[Any, ...]:
    """Return the top-level Albumentations pipelines that a dataset holds, in a fixed order.

    Never imports Albumentations: where nothing has, there is no pipeline to find.
    """
    return find_instances(obj, loaded_classes("albumentations", "BaseCompose", "BasicTransform"))


def loaded_classes(module: str, *names: str) -> tuple[type, ...]:
    """Return the classes of these names that a module has, if it was imported."""
    owner = sys.modules.get(module)
    return tuple(kind for name in names if isinstance(kind := getattr(owner, name, None), type))


def find_instances(obj: object, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Return what a dataset holds of some classes, in a fixed order, without what that holds.

    Looks through attributes, also those of the user's own classes, lists, tuples, dicts (first 256
    items, 8 levels deep), wrapped datasets (``Subset``, ``ConcatDataset``), bound methods,
    ``functools.partial``, and what functions close over and have as defaults. What code refers to,
    a global of a module say, is not held by the dataset.
    """
    if not kinds:
        return ()
    found: list[Any] = []
    seen: set[int] = set()
    waiting: deque[tuple[object, int]] = deque([(obj, 0)])
    while waiting:
        item, depth = waiting.popleft()
        if isinstance(item, _LEAF_TYPES) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, kinds):
            found.append(item)
        elif depth < _MAX_DEPTH:
            waiting.extend((part, depth + 1) for part in _parts(item))
    return tuple(found)


def _parts(item: object) -> Iterator[object]:
    if isinstance(item, dict | UserDict | MappingProxyType):
        # Not any mapping: reading the values of one that stands for a file would open it.
        yield from list(item.values())[:_MAX_ITEMS]
    elif isinstance(item, list | tuple):
        yield from item[:_MAX_ITEMS]
    elif isinstance(item, partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, MethodType | BuiltinMethodType):
        yield item.__self__
    elif isinstance(item, type):
        yield from _class_parts(item)
    elif not isinstance(item, ModuleType | torch.Tensor):
        yield from list(held_by(item).values())[:_MAX_ITEMS]
        if isinstance(item, FunctionType):
            yield from (*closed_over(item), *(item.__defaults__ or ()))
            yield from (item.__kwdefaults__ or {}).values()
        else:
            yield from _slots(item)
            yield from _class_parts(type(item))


def _class_parts(cls: type) -> Iterator[object]:
    """Yield the attributes of a class and of its bases that are the user's own code."""
    for owner in cls.__mro__:
        if is_users(owner.__module__):
            yield from list(vars(owner).values())


def _slots(item: object) -> Iterator[object]:
    for owner in type(item).__mro__:
        names = owner.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            if hasattr(item, name):
                yield getattr(item, name)


def closed_over(function: FunctionType) -> list[object]:
    """Return what a function closes over; None in the place of a name that is not bound yet."""
    contents: list[object] = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            contents.append(None)
    return contents


@lru_cache(maxsize=4096)
def is_users(module: object) -> bool:
    """Return whether a module is the user's own: of no installed package, nor Python's.

    ``module``: its name; classes of C may have something else in its place, which is none.
    """
    if module == "__main__":
        return True
    if not isinstance(module, str):
        return False
    package = module.split(".")[0]
    if package in {"", __name__.split(".")[0]} or package in sys.stdlib_module_names:
        return False
    file = held(sys.modules.get(module), "__file__") or ""
    return not any(folder in file for folder in _INSTALLED)

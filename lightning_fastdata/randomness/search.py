"""What a dataset holds: generators and pipelines, found without running its code."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Iterator
from functools import cached_property, lru_cache, partial
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, Final

import numpy as np

_MAX_DEPTH: Final = 8
_MAX_ITEMS: Final = 256
_LEAF_TYPES: Final = (str, bytes, bytearray, int, float, complex, type(None), np.ndarray)
_INSTALLED: Final = ("site-packages", "dist-packages")
_WRAPPED: Final = ("__func__", "fget", "func")
"""Where static and class methods, properties and cached properties keep their function."""


def find_composes(obj: object) -> tuple[Any, ...]:
    """Return the top-level Albumentations pipelines that a dataset holds, in a fixed order.

    Never imports Albumentations: where nobody has, there is no pipeline to find.
    """
    return find_instances(obj, loaded_classes("albumentations", "BaseCompose", "BasicTransform"))


def loaded_classes(module: str, *names: str) -> tuple[type, ...]:
    """Return the classes of these names that a module has, if somebody has imported it."""
    owner = sys.modules.get(module)
    return tuple(kind for name in names if isinstance(kind := getattr(owner, name, None), type))


def find_instances(obj: object, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Return what a dataset holds of some classes, in a fixed order, without what that holds.

    Looks through attributes, lists, tuples, dicts (first 256 items, 8 levels deep), wrapped
    datasets (``Subset``, ``ConcatDataset``), bound methods, ``functools.partial``, the closures
    and defaults of functions, and what the user's own code of these refers to: globals of its
    modules and attributes of its classes.
    """
    if not kinds:
        return ()
    found: list[Any] = []
    seen: set[int] = set()
    waiting: list[tuple[object, int]] = [(obj, 0)]
    while waiting:
        item, depth = waiting.pop(0)
        if isinstance(item, _LEAF_TYPES) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, kinds):
            found.append(item)
        elif depth < _MAX_DEPTH:
            waiting.extend((part, depth + 1) for part in _parts(item, kinds))
    return tuple(found)


def _parts(item: object, kinds: tuple[type, ...]) -> Iterator[object]:
    if isinstance(item, dict | UserDict | MappingProxyType):
        # Not any mapping: reading the values of one that stands for a file would open it.
        yield from list(item.values())[:_MAX_ITEMS]
    elif isinstance(item, list | tuple):
        yield from item[:_MAX_ITEMS]
    elif isinstance(item, partial):
        yield item.func
        yield from item.args
        yield from item.keywords.values()
    elif isinstance(item, MethodType | BuiltinMethodType):
        yield item.__self__
    elif not _is_module_or_tensor(item):
        if hasattr(item, "__dict__") and not isinstance(item, type):
            yield from list(vars(item).values())[:_MAX_ITEMS]
        yield from code_parts(item, kinds)


def _is_module_or_tensor(item: object) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(item, type(sys)) or (torch is not None and isinstance(item, torch.Tensor))


def code_parts(item: object, kinds: tuple[type, ...]) -> Iterator[object]:
    """Return what the user's own code of a function, or of the class of an object, refers to.

    Args:
        item: A function, a class or any other object.
        kinds: What is looked for. Of the other globals only those are returned that are code of
            the user or may hold it.
    """
    if isinstance(item, FunctionType):
        yield from _function_parts(item, kinds)
    elif isinstance(item, type):
        yield from _class_parts(item)
    else:
        yield from _slots(item)
        yield from _class_parts(type(item))


def _class_parts(cls: type) -> Iterator[object]:
    for owner in cls.__mro__:
        if not is_users(owner.__module__):
            continue
        yield from map(_unwrapped, list(vars(owner).values()))


def _unwrapped(value: object) -> object:
    if not isinstance(value, staticmethod | classmethod | property | cached_property):
        return value
    return next(own for name in _WRAPPED if (own := getattr(value, name, value)) is not value)


def _slots(item: object) -> Iterator[object]:
    for owner in type(item).__mro__:
        names = owner.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            if hasattr(item, name):
                yield getattr(item, name)


def _function_parts(function: FunctionType, kinds: tuple[type, ...]) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is not bound yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if not is_users(function.__module__):
        return
    names = list(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and is_users(value.__name__):
            found = [vars(value)[other] for other in names if other in vars(value)]
        else:
            found = [value]
        yield from (one for one in found if isinstance(one, kinds) or _may_lead_on(one))


def _names(code: CodeType) -> Iterator[str]:
    """Return the names of globals and attributes in a function and in those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _may_lead_on(value: object) -> bool:
    if isinstance(value, dict | list | tuple | partial | MethodType):
        return True
    owner = value if isinstance(value, FunctionType | type) else type(value)
    return is_users(owner.__module__)


@lru_cache(maxsize=4096)
def is_users(module: str | None) -> bool:
    """Return whether a module is the user's own: of no installed package, nor Python's."""
    if module == "__main__":
        return True
    package = (module or "").split(".")[0]
    if package in {"", __name__.split(".")[0]} or package in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return not any(folder in file for folder in _INSTALLED)

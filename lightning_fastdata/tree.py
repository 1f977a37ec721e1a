"""Samples and batches as trees of containers, and the objects that other objects hold.

Objects of some classes within a dataset are found without running or reading the user's code.
"""

from __future__ import annotations

import copy
import importlib.metadata
import sys
import sysconfig
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import PurePath
from types import (
    BuiltinMethodType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch

from lightning_fastdata.types import Batch

Path = tuple[Any, ...]
"""Path of keys, positions and field names that leads to one leaf of a batch."""
_LEAVES = (torch.Tensor, str, bytes, bytearray, memoryview, range, type)
_MAX_DEPTH: Final = 8
_MAX_ITEMS: Final = 256
HOLD_NOTHING: Final = (
    str, bytes, bytearray, int, float, complex, NoneType, np.ndarray, torch.Tensor, PurePath,
)  # fmt: skip
_INSTALLED: Final = ("site-packages", "dist-packages")
_PYTHONS: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
"""Folders of Python's own modules."""


def spelled(path: Path) -> str:
    """Return a path as one would write it in Python."""
    return "".join(f"[{key!r}]" for key in path) or "the batch itself"


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a dense tensor as bytes, uint8 [bytes]: a view if it is contiguous."""
    dense = tensor.contiguous()
    # Not reshape(), which keeps the stride of a single number that was cut out of a table.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def children(value: Batch) -> list[tuple[Any, Any]] | None:
    """Return the parts of a container with their keys, positions or field names; None for a leaf.

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

    Mappings, lists and dataclasses keep their attributes, and are not constructed anew, as their
    constructors might take something else, or change the parts. Where that of another container
    does not take the parts, it becomes a plain dict, tuple or list.
    """
    if isinstance(value, Mapping):
        items = dict(zip(value, parts, strict=True))
        if isinstance(value, dict | UserDict) or not isinstance(value, MutableMapping):
            return with_items(value, items)
        twin: Any = copy.copy(value)
        twin.update(items)
        return twin
    if is_dataclass(value):
        twin = copy.copy(value)
        for field, part in zip(fields(value), parts, strict=True):
            object.__setattr__(twin, field.name, part)  # the dataclass may be frozen
        return twin
    if type(value) is not list and isinstance(value, list | UserList):
        twin = copy.copy(value)
        twin[:] = parts
        return twin
    try:
        return type(value)(*parts) if is_named_tuple(value) else type(value)(parts)
    except TypeError:
        return tuple(parts) if isinstance(value, tuple) else parts


def with_items(value: Mapping[Any, Any], items: Mapping[Any, Any]) -> Batch:
    """Return a mapping of the same class with some items replaced or added; see `rebuilt`."""
    merged = {**value, **items}
    if type(value) is dict:
        return merged
    # Of other classes, a copy may share the items with what was copied, which is not ours.
    if isinstance(value, dict | UserDict):
        twin: Any = copy.copy(value)
        if held_by(value) is value:  # its items are its attributes
            twin.__dict__ = twin
        twin.update(items)
        return twin
    try:
        return type(value)(merged)  # type: ignore[call-arg]
    except TypeError:
        return merged


def is_named_tuple(value: object) -> bool:
    """Return whether a value is a tuple whose class takes its parts one by one."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def leaves(value: Batch, is_leaf: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """Return the leaves in order; ``is_leaf``: whether a container counts as a leaf itself."""
    return (leaf for _, leaf in with_paths(value, is_leaf=is_leaf))


def with_paths(
    value: Batch, path: Path = (), is_leaf: Callable[[Any], bool] = lambda _: False
) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves in order, each with its path; ``is_leaf``: see :func:`leaves`."""
    parts = None if is_leaf(value) else children(value)
    if parts is None:
        yield path, value
    else:
        for key, part in parts:
            yield from with_paths(part, (*path, key), is_leaf)


def at_path(value: Batch, path: Path) -> Any:
    """Return the part of a batch at a path; None: there is none."""
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
        """Return the image in another mode."""


def bytes_in(value: Batch) -> int:
    """Return the bytes of all tensors, arrays and images in a sample or a batch."""
    return sum(map(_leaf_bytes, leaves(value)))


def _leaf_bytes(leaf: object) -> int:
    if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided and not leaf.is_nested:
        values = leaf.coalesce() if leaf.layout is torch.sparse_coo else leaf
        return values.values().nbytes
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
    """Return a batch with each leaf replaced by ``function(path, leaf)``; its structure stays.

    Containers are entered down to a ``depth`` (-1: any), unless ``is_leaf`` says that they are
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
    """Return the name of a function or class; for another object the name of its class."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def has_method(owner: object, name: str) -> bool:
    """Return whether the class of an object has a method of that name.

    The object itself is not asked, as it may look up any attribute in another object.
    """
    return callable(getattr(type(owner), name, None))


def held(owner: object, name: str) -> Any:
    """Return an attribute that an object holds itself; None if it has none of that name.

    Neither a property nor ``__getattr__`` is called: either may open a file that should be opened
    only in the workers.
    """
    return held_by(owner).get(name)


def held_by(owner: object) -> dict[str, Any]:
    """Return the attributes that an object holds itself, by name."""
    return getattr(owner, "__dict__", {})


def is_a(item: object, package: str, name: str | None = None) -> bool:
    """Return whether an object is of a class of a package, or of a class derived from it.

    Names are compared, as the package need not be installed. ``name``: of the class; None: any.
    """
    return any(
        base.__module__.split(".")[0] == package and name in (None, base.__name__)
        for base in type(item).__mro__
    )


def datasets_in(
    dataset: object,
    closed: Callable[[Any], bool] = lambda _: False,
    parts: Callable[[Any], Iterable[object]] | None = None,
) -> Iterator[Any]:
    """Yield a dataset and the datasets and sources within it, each once.

    ``closed`` tells of which ones what they hold is left out. ``parts`` returns what one holds;
    None: the datasets and sources among its attributes, and in lists, tuples and dicts there.
    """
    waiting: list[Any] = [dataset]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting.extend(() if closed(one) else (parts or _read_by)(one))


def _read_by(owner: object) -> Iterator[object]:
    for value in list(held_by(owner).values()):
        parts = value.values() if type(value) is dict else value
        several = parts if parts is not value or isinstance(value, list | tuple) else (value,)
        if any(map(_is_read, islice(several, _MAX_ITEMS))):  # else it is no list of datasets
            yield from filter(_is_read, list(several))


def _is_read(part: object) -> bool:
    return isinstance(part, torch.utils.data.Dataset) or has_method(part, "get_bytes")


def find_composes(obj: object) -> tuple[Any, ...]:
    """Return the top-level Albumentations pipelines that a dataset holds, in a fixed order.

    It never imports Albumentations: if nothing else has, there is no pipeline to find.
    """
    return find_instances(obj, loaded_classes("albumentations", "BaseCompose", "BasicTransform"))


def copy_of_compose(compose: Any) -> Any:
    """Return a deep copy of an Albumentations pipeline, which shares what cannot be copied.

    A transform may hold a lock, an open file, a module, or a number that processes share.
    """
    try:
        return copy.deepcopy(compose)
    except Exception:
        return copy.deepcopy(compose, _uncopied(compose, {}))


def _uncopied(value: Any, around: dict[int, Any]) -> dict[int, Any]:
    """Return the innermost objects within a value that cannot be copied, by their ``id``.

    ``around``: objects that hold the value, and those that were found, which are not looked into.
    """
    if _can_be_copied(value, around):
        return {}
    found: dict[int, Any] = {}
    if len(around) < _MAX_ITEMS and not isinstance(value, ModuleType):
        # No other containers: one that represents a file would read it.
        items = list(value.values()) if isinstance(value, dict) else []
        items += value if isinstance(value, list | tuple) else ()
        for part in (*items, *held_by(value).values()):
            found |= _uncopied(part, {**around, id(value): value, **found})
    # What is reseeded and prepared for recording is never shared.
    own = loaded_classes("albumentations", "BaseCompose", "BasicTransform")
    if isinstance(value, own) or _can_be_copied(value, {**around, **found}):
        return found
    return {id(value): value}


def _can_be_copied(value: Any, shared: Mapping[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(shared))
    except Exception:
        return False
    return True


def loaded_classes(module: str, *names: str) -> tuple[type, ...]:
    """Return the classes of these names that a module has, if it was imported."""
    owner = sys.modules.get(module)
    return tuple(kind for name in names if isinstance(kind := getattr(owner, name, None), type))


def find_instances(obj: object, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Return the objects of some classes that a dataset holds, in a fixed order.

    It looks through attributes, also those of the user's own classes, lists, tuples, dicts (first
    256 items, 8 levels deep), wrapped datasets (``Subset``, ``ConcatDataset``), bound methods,
    ``functools.partial``, and closures and defaults of functions, but not within objects it found.
    Names that code refers to, such as globals of a module, do not belong to the dataset.
    """
    if not kinds:
        return ()
    passed_over = tuple(each for each in HOLD_NOTHING if each not in kinds)
    found: list[Any] = []
    seen: set[int] = set()
    waiting: deque[tuple[object, int]] = deque([(obj, 0)])
    while waiting:
        item, depth = waiting.popleft()
        if isinstance(item, passed_over) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, kinds):
            found.append(item)
        elif depth < _MAX_DEPTH:
            waiting.extend((part, depth + 1) for part in _parts(item))
    return tuple(found)


def _parts(item: object) -> Iterator[object]:
    if isinstance(item, dict | UserDict | MappingProxyType):
        # No other mappings: reading the values of one that represents a file would open the file.
        yield from list(item.values())[:_MAX_ITEMS]
    elif isinstance(item, list | tuple):
        yield from item[:_MAX_ITEMS]
    elif isinstance(item, partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, MethodType | BuiltinMethodType):
        yield item.__self__
    elif isinstance(item, type):
        yield from _class_parts(item)
    elif not isinstance(item, ModuleType):
        yield from list(held_by(item).values())[:_MAX_ITEMS]
        if isinstance(item, FunctionType):
            yield from (*closed_over(item), *(item.__defaults__ or ()))
            yield from (item.__kwdefaults__ or {}).values()
        else:
            yield from (getattr(item, name) for name in slots_of(type(item)) if hasattr(item, name))
            yield from _class_parts(type(item))


def slots_of(kind: type) -> list[str]:
    """Return the names of the slots that objects of a class have."""
    each = [vars(owner).get("__slots__", ()) for owner in kind.__mro__]
    return [name for slots in each for name in ((slots,) if isinstance(slots, str) else slots)]


def _class_parts(cls: type) -> Iterator[object]:
    """Yield the attributes of a class and of its bases that are the user's own code."""
    for owner in cls.__mro__:
        if is_users(owner.__module__):
            yield from list(vars(owner).values())


def closed_over(function: FunctionType) -> list[object]:
    """Return the values that a function closes over; None for a name that is not bound yet."""
    contents: list[object] = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            contents.append(None)
    return contents


@lru_cache(maxsize=4096)
def is_users(module: object) -> bool:
    """Return whether a module is the user's own, and not Python's or of an installed package.

    ``module``: its name; if it is no text, as for some classes of C, it is not the user's.
    """
    if module == "__main__":
        return True
    if not isinstance(module, str):
        return False
    package = module.split(".")[0]
    file = held(sys.modules.get(module), "__file__") or ""
    # A module of the user's may have the same name as one of Python's.
    pythons = package in sys.stdlib_module_names and (not file or file.startswith(_PYTHONS))
    if pythons or package in {"", __name__.split(".")[0]}:
        return False
    return not any(folder in file for folder in _INSTALLED) or package in _installed_projects()


@lru_cache(maxsize=1)
def _installed_projects() -> frozenset[str]:
    """Return the packages that were installed from a folder or a repository, as a user's own are.

    pip records this: https://packaging.python.org/en/latest/specifications/direct-url/
    """
    found: set[str] = set()
    for each in importlib.metadata.distributions():
        noted = each.read_text("direct_url.json") or ""
        if "dir_info" in noted or "vcs_info" in noted:
            found |= {file.parts[0].removesuffix(".py") for file in each.files or ()}
    return frozenset(found)

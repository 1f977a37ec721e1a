"""Albumentations pipelines whose draws cannot be keyed by sample, found before anything is read.

A pipeline that a ``collate_fn`` calls, or that is built while a sample is read, keeps the random
streams that Albumentations gives it: the same ones in every worker. Nothing is called to find them:
what a ``collate_fn`` holds is looked through, and the source of what reads a sample is parsed.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import warnings
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

from lightning_fastdata.augment.pipeline.tree import list_nodes
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.randomness.search import find_composes, is_users, loaded_classes
from lightning_fastdata.tree import held

_DRAWS_NOTHING: Final = frozenset(
    {
        *("CenterCrop", "Crop", "LongestMaxSize", "Pad", "PadIfNeeded", "Resize"),
        *("SmallestMaxSize", "FromFloat", "Normalize", "ToFloat", "ToTensor3D", "ToTensorV2"),
        *("HorizontalFlip", "InvertImg", "NoOp", "ToGray", "ToRGB", "ToSepia", "Transpose"),
        *("VerticalFlip", "Compose", "ReplayCompose", "Sequential"),
    }
)
"""What does the same to every image, if it is always applied."""
_READS: Final = ("__getitem__", "__getitems__", "__iter__")
_MOST_FUNCTIONS: Final = 64
_SAME_STREAMS: Final = (
    "Its draws do not belong to the sample: Albumentations 2.0.8 gives every worker the same "
    "random stream, so that workers repeat each other, and no seed of this package reaches it."
)
_warned: set[tuple[str, str, int]] = set()


class _Built(NamedTuple):
    """A call of a class of Albumentations in a user's code."""

    kind: type
    draws: bool
    """Whether what it builds may draw."""


def warn_of_unkeyed(dataset: object, collate_fn: object) -> None:
    """Warn of pipelines that draw, and whose draws are not keyed; once for each dataset class."""
    inside = [] if collate_fn is None else find_composes(collate_fn)
    known = {id(compose) for compose in find_composes(dataset)} if inside else set()
    if any(id(compose) not in known and may_draw(compose) for compose in inside):
        _warn(
            collate_fn,
            f"The collate_fn {_name(collate_fn)} calls an Albumentations pipeline. {_SAME_STREAMS} "
            "Call the pipeline in the dataset's __getitem__, as an attribute of the dataset, or "
            "pass it as FastDataModule(augment=...).",
        )
    for owner in _wrapped(dataset):
        names = built_while_reading(owner)
        if names:
            kind = type(owner).__name__
            _warn(
                type(owner),
                f"{kind} builds an Albumentations pipeline ({', '.join(names)}) while a sample is "
                f"read. {_SAME_STREAMS} Build it once, in __init__, as an attribute of the "
                "dataset, or pass it as FastDataModule(augment=...).",
            )


def _warn(about: object, message: str) -> None:
    # By name: loaders are made again, and what they are made of may be copied.
    line = about.__code__.co_firstlineno if isinstance(about, FunctionType) else 0
    key = str(about.__module__), _name(about), line
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, FastDataWarning, stacklevel=4)


def _name(value: object) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def may_draw(compose: object) -> bool:
    """Return whether a pipeline may make different things of one image."""
    return any(
        node.p < 1 or type(node).__name__ not in _DRAWS_NOTHING for node in list_nodes(compose)
    )


def built_while_reading(dataset: object) -> tuple[str, ...]:
    """Return the names of classes of Albumentations that are called while a sample is read.

    There are none where nothing of what is built draws, or the source is not there. What a dataset
    wraps is not looked into.
    """
    kinds = loaded_classes("albumentations", "BaseCompose", "BasicTransform")
    if not kinds:
        return ()
    built = list(_built_by(dataset, kinds))
    leaves = [one for one in built if not issubclass(one.kind, kinds[0])]
    # Of a Compose of what was built elsewhere nothing is known.
    draws = any(one.draws for one in built) or (bool(built) and not leaves)
    return tuple(dict.fromkeys(one.kind.__name__ for one in built)) if draws else ()


def _wrapped(dataset: object, depth: int = 8) -> Iterator[object]:
    yield dataset
    # What it holds, and no property of it: that may open a file.
    several = held(dataset, "datasets")
    inner = several if isinstance(several, list | tuple) else ()
    for one in (held(dataset, "dataset"), *inner):
        if one is not None and depth:
            yield from _wrapped(one, depth - 1)


def _built_by(owner: object, kinds: tuple[type, ...]) -> Iterator[_Built]:
    """Yield what the methods that read a sample build, and the user's functions that they call."""
    waiting: list[Any] = [inspect.getattr_static(type(owner), name, None) for name in _READS]
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function = waiting.pop(0)
        if isinstance(function, staticmethod | classmethod | MethodType):
            function = function.__func__
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        tree = _source(function) if is_users(function.__module__) else None
        if tree is None:
            continue
        names = _names_of(function, tree, owner)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            called = _meant(call.func, names)
            if isinstance(called, type) and issubclass(called, kinds):
                yield _Built(called, _call_draws(called, call))
            elif called is not None:
                waiting.append(called)


def _source(function: FunctionType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):  # typed in by hand, or made by code
        return None


def _names_of(function: FunctionType, tree: ast.AST, owner: object) -> dict[str, Any]:
    """Return what names mean in a function, where that is known without running it."""
    names = dict(function.__globals__)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            names[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or top] = sys.modules.get(top)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            module = sys.modules.get(node.module)
            for alias in node.names:
                known = {} if module is None else vars(module)
                names[alias.asname or alias.name] = known.get(alias.name)
    own = function.__code__.co_varnames[: function.__code__.co_argcount]
    names.update(dict.fromkeys(own))
    if own and inspect.getattr_static(type(owner), function.__name__, None) is function:
        names[own[0]] = type(owner)
    return names


def _meant(node: ast.AST, names: dict[str, object]) -> object:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _meant(node.value, names)
        if isinstance(owner, ModuleType):
            return vars(owner).get(node.attr)  # a lazy module would import what is asked for
        return inspect.getattr_static(owner, node.attr, None) if isinstance(owner, type) else None
    return None


def _call_draws(kind: type, call: ast.Call) -> bool:
    """Return whether what a call builds may draw."""
    if kind.__name__ not in _DRAWS_NOTHING:
        return True
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "p"), None)
    if given is None:
        default = inspect.signature(kind).parameters.get("p")
        return (
            default is None or not isinstance(default.default, int | float) or default.default < 1
        )
    return not (isinstance(given, ast.Constant) and given.value == 1)

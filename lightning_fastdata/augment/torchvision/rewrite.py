"""The v2 form of a pipeline of torchvision's first interface, as code to paste."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torchvision.transforms import v2

_DTYPES: Final = {
    "ToTensor": "v2.ToDtype(torch.float32, scale=True)",
    "ConvertImageDtype": "v2.ToDtype({dtype}, scale=True)",
}
_LEFT_OUT: Final = frozenset({"PILToTensor", "ToPILImage"})
"""What moves between PIL images and tensors: v2 has tensors from the beginning."""


def rewritten(transform: Any) -> str:
    """Return code that makes the v2 form of a v1 pipeline; what v2 has not is marked as such."""
    lines = ["v2.Compose([", "    v2.ToImage(),"]
    children = _children(transform) or [transform]
    lines += [f"    {line}" for child in children for line in _lines(child)]
    return "\n".join([*lines, "])"])


def _children(transform: Any) -> list[Any] | None:
    held = list(transform) if isinstance(transform, nn.Sequential) else None
    named = type(transform).__name__ in {"Compose", "RandomApply", "RandomChoice", "RandomOrder"}
    return list(transform.transforms) if named and held is None else held


def _lines(transform: Any) -> Iterator[str]:
    name, inside = type(transform).__name__, _children(transform)
    if name in _LEFT_OUT:
        return
    if name in _DTYPES:
        yield _DTYPES[name].format(dtype=getattr(transform, "dtype", None)) + ","
    elif inside is not None:
        yield f"v2.{'Compose' if name == 'Sequential' else name}(["
        yield from (f"    {line}" for child in inside for line in _lines(child))
        yield f"], p={transform.p!r})," if name in {"RandomApply", "RandomChoice"} else "]),"
    elif hasattr(v2, name) and name != "Lambda":
        yield f"v2.{name}({_arguments(transform, getattr(v2, name))}),"
    else:
        yield f"...,  # {name} has no form in v2: write it as a class derived from v2.Transform"


def _arguments(transform: Any, kind: type) -> str:
    """Return the arguments of a transform of v2 that the one of v1 holds other values of."""
    found = []
    for name, parameter in inspect.signature(kind).parameters.items():
        value = getattr(transform, name, parameter.default)
        required = parameter.default is inspect.Parameter.empty
        if value is inspect.Parameter.empty or (not required and _alike(value, parameter.default)):
            continue
        found.append(_spelled(value) if required else f"{name}={_spelled(value)}")
    return ", ".join(found)


def _alike(value: Any, default: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return False
    same = _plain(value) == _plain(default)
    return bool(same)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _spelled(value: Any) -> str:
    return repr(tuple(_plain(value)) if isinstance(value, list | tuple) else _plain(value))

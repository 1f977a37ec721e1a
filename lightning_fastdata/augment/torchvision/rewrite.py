"""The v2 form of a pipeline of torchvision's first interface, as code to paste."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from typing import Any, Final

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
    children = _children(transform) or [transform]
    lines = [f"    {line}" for child in children for line in _lines(child)]
    return "\n".join(["v2.Compose([", "    v2.ToImage(),", *lines, "])"])


def _children(transform: Any) -> list[Any] | None:
    if isinstance(transform, nn.Sequential):
        return list(transform)
    named = type(transform).__name__ in {"Compose", "RandomApply", "RandomChoice", "RandomOrder"}
    return list(transform.transforms) if named else None


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
        yield f"v2.{name}({', '.join(_arguments(transform, getattr(v2, name)))}),"
    else:
        yield f"...,  # {name} has no form in v2: write it as a class derived from v2.Transform"


def _arguments(transform: Any, kind: type) -> Iterator[str]:
    """Yield the arguments of a transform of v2 that the one of v1 holds other values of."""
    for name, parameter in inspect.signature(kind).parameters.items():
        default, required = parameter.default, parameter.default is inspect.Parameter.empty
        value = repr(_plain(getattr(transform, name, default)))
        if required and hasattr(transform, name):
            yield value
        elif value != repr(_plain(default)):
            yield f"{name}={value}"


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value

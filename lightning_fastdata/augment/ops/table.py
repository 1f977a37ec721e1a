"""Operations on single values: a table of 256 entries for uint8, a formula for float32."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Run,
    Shape,
    Transform,
    Values,
    channels,
)
from lightning_fastdata.augment.replay import instructions


def look_up(images: Tensor, table: Tensor) -> Tensor:
    """Return ``table[i, value, channel]`` for every value of image ``i``.

    Of uint8 ``[n, H, W, C]`` and a table ``[n, 256, C]``, or ``[n, 256, 1]`` for all channels.
    """
    n, _, count = table.shape
    first = torch.arange(n, device=images.device, dtype=torch.int32).view(n, 1, 1, 1) * 256
    index = (first + images) * count
    if count > 1:
        index = index + torch.arange(count, device=images.device, dtype=torch.int32)
    return table.reshape(-1).index_select(0, index.reshape(-1)).view(images.shape)


def to_bytes(images: Tensor) -> Tensor:
    """Return float32 images in [0, 1] as uint8, rounded as Albumentations' ``from_float`` does."""
    return (images * 255).round().clamp(0, 255).to(torch.uint8)


def through_bytes(change: Run) -> Run:
    """Let an operation on uint8 take float32 through uint8, as Albumentations does."""

    def run(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
        if images.dtype == torch.uint8:
            return change(images, static, arrays)
        return change(to_bytes(images), static, arrays).float() / 255

    return run


@cache
def _ramp(count: int) -> np.ndarray:
    return np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), count, 2)


def ramp_table(transform: Transform, params: Values, count: int) -> np.ndarray:
    """Return what Albumentations itself makes of every uint8 value: uint8 ``[256, count]``."""
    # A copy: some transforms write to what they are given.
    ramp = _ramp(count).copy()
    out = transform.apply(ramp, **{**params, "shape": ramp.shape})
    return np.ascontiguousarray(out.reshape(256, count))


def _row(value: object, count: int) -> np.ndarray:
    """Return a number, or numbers per channel, as float32 ``[count]``."""
    return np.broadcast_to(np.asarray(value, np.float32).ravel(), (count,)).copy()


def _encode_floats(transform: Transform, params: Values, count: int) -> Encoded | None:
    """Return the formula that stands for a transform on float32, and its numbers."""
    name = type(transform).__name__
    if name in _ONE_NUMBER:
        form, key = _ONE_NUMBER[name]
        return Encoded((("form", form),), {"number": np.array([params[key]], np.float32)})
    if name not in _LINES:
        return None
    form, *line = _LINES[name]
    gain, offset = (_row(params[one] if isinstance(one, str) else one, count) for one in line)
    return Encoded((("form", form),), {"gain": gain, "offset": offset})


_ONE_NUMBER: Final = {"RandomGamma": ("power", "gamma"), "Solarize": ("solarize", "threshold")}
"""Formula, and the parameter that has its number."""
_LINES: Final = {
    "InvertImg": ("line", -1.0, 1.0),
    "RandomBrightnessContrast": ("clipped line", "alpha", "beta"),
}
"""Formula, gain and offset: a number, or the parameter that has it."""


def encode_value(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    """Return the table, or the numbers of the formula, of one operation on one sample."""
    count, posterizes = channels(shape), type(transform).__name__ == "Posterize"
    if posterizes and np.size(params["num_bits"]) not in (1, count):
        return None  # Albumentations leaves the other channels as the memory was
    # Posterize takes float32 images through uint8 in Albumentations, too.
    if dtype == np.uint8 or posterizes:
        return Encoded((("form", "table"),), {"table": ramp_table(transform, params, count)})
    return _encode_floats(transform, params, count) if dtype == np.float32 else None


@through_bytes
def _by_table(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    return look_up(images, arrays["table"])


def change_value(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Run what `encode_value` encoded."""
    form = static["form"]
    if form == "table":
        return _by_table(images, static, arrays)
    numbers = {name: value[:, None, None, :] for name, value in arrays.items()}
    if form == "power":
        return images ** numbers["number"]
    if form == "solarize":
        return torch.where(images >= numbers["number"], 1 - images, images).clamp(0, 1)
    line = images * numbers["gain"] + numbers["offset"]
    return line.clamp(0, 1) if form == "clipped line" else line


_NAMES: Final = ("InvertImg", "Posterize", "RandomBrightnessContrast", "RandomGamma", "Solarize")
OPS = tuple(DeviceOp(name, encode_value, change_value, fused=instructions.table) for name in _NAMES)
"""Exact on uint8, since the table is made by Albumentations; on float32 to 1e-5."""

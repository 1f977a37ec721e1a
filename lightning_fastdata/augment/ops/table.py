"""Operations on single values: a table of 256 entries for uint8, a formula for float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    Drawn,
    DType,
    Encoded,
    Params,
    Shape,
    Static,
    Transform,
    channels,
)
from lightning_fastdata.augment.replay import instructions


def look_up(images: Tensor, table: Tensor) -> Tensor:
    """Return ``table[i, value, channel]`` for every value of image ``i``.

    Args:
        images: uint8 ``[n, H, W, C]``.
        table: ``[n, 256, C]``, or ``[n, 256, 1]`` for all channels alike; any dtype.
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


def via_bytes(images: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``change(images)``, through uint8 if they are float32, as Albumentations does."""
    if images.dtype == torch.uint8:
        return change(images)
    return change(to_bytes(images)).float() / 255


@cache
def _ramp(count: int) -> np.ndarray:
    return np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), count, 2)


def ramp_table(transform: Transform, params: Params, count: int) -> np.ndarray:
    """Return what Albumentations itself makes of every uint8 value: uint8 ``[256, count]``."""
    # A copy: some transforms write to what they are given.
    ramp = _ramp(count).copy()
    out = transform.apply(ramp, **{**params, "shape": ramp.shape})
    return np.ascontiguousarray(out.reshape(256, count))


def _row(value: Any, count: int) -> np.ndarray | None:
    """Return a number, or numbers per channel, as float32 ``[count]``."""
    values = np.asarray(value, np.float32).ravel()
    if values.size not in (1, count):
        return None
    return np.broadcast_to(values, (count,)).copy()


def _pointwise(transform: Transform, params: Params, count: int) -> Drawn | None:
    """Return params that act on each value alone, or None."""
    name = type(transform).__name__
    if name == "Posterize" and np.size(params["num_bits"]) not in (1, count):
        return None  # Albumentations leaves the other channels as the memory was
    for key in ("multiplier", "noise_map"):
        if key in params:
            if _row(params[key], count) is None:
                return None
            return {**params, key: np.asarray(params[key]).ravel()}
    return dict(params)


def _float_form(
    transform: Transform, params: Params, count: int
) -> tuple[str, dict[str, np.ndarray]] | None:
    """Return which formula stands for the transform on float32, and its numbers."""
    name = type(transform).__name__
    if name == "RandomGamma":
        return "power", {"exponent": np.array([params["gamma"]], np.float32)}
    if name == "PlanckianJitter":
        # Albumentations' own gains, read off a gray that no gain takes out of range.
        gray = np.full((1, 1, 3), 1 / 64, np.float32)
        gains = 64 * transform.apply(gray, **params).ravel()
        return "clipped line", {"gain": gains, "offset": np.zeros(3, np.float32)}
    if name == "Solarize":
        return "solarize", {"threshold": np.array([params["threshold"]], np.float32)}
    gain, offset, kind = {
        "InvertImg": (-1.0, 1.0, "line"),
        "RandomBrightnessContrast": (params.get("alpha"), params.get("beta"), "clipped line"),
        "MultiplicativeNoise": (params.get("multiplier"), 0.0, "clipped line"),
        "RGBShift": (1.0, params.get("noise_map"), "clipped line"),
    }.get(name, (None, None, ""))
    if gain is None or offset is None:
        return None
    gains, offsets = _row(gain, count), _row(offset, count)
    if gains is None or offsets is None:
        return None
    return kind, {"gain": gains, "offset": offsets}


def encode_value(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    """Return the table, or the numbers of the formula, of one operation on one sample."""
    count, name = channels(shape), type(transform).__name__
    plain = _pointwise(transform, params, count)
    if plain is None or (name == "PlanckianJitter" and count != 3):
        return None
    # Albumentations takes these two through uint8 even for float32 images.
    if dtype == np.uint8 or name in {"Posterize", "RandomToneCurve"}:
        return Encoded((("form", "table"),), {"table": ramp_table(transform, plain, count)})
    form = _float_form(transform, plain, count)
    if form is None or dtype != np.float32:
        return None
    return Encoded((("form", form[0]),), form[1])


def change_value(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    """Carry out what `encode_value` encoded."""
    form = static["form"]
    if form == "table":
        if images.dtype == torch.uint8:
            return look_up(images, arrays["table"])
        return look_up(to_bytes(images), arrays["table"]).float() / 255
    numbers = {name: value[:, None, None, :] for name, value in arrays.items()}
    if form == "power":
        return images ** numbers["exponent"]
    if form == "solarize":
        return torch.where(images >= numbers["threshold"], 1 - images, images).clamp(0, 1)
    line = images * numbers["gain"] + numbers["offset"]
    return line.clamp(0, 1) if form == "clipped line" else line


OPS = tuple(
    DeviceOp(name, encode_value, change_value, fused=instructions.table)
    for name in (
        "InvertImg",
        "PlanckianJitter",
        "Posterize",
        "RGBShift",
        "RandomBrightnessContrast",
        "RandomGamma",
        "RandomToneCurve",
        "Solarize",
    )
)
"""Exact on uint8, since the table is made by Albumentations; on float32 to 1e-5."""

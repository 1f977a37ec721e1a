"""Resizing, with crops before it: OpenCV's own arithmetic."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Shape,
    Transform,
    Values,
    as_channels_last,
)
from lightning_fastdata.augment.ops.positions.index import gather

NEAREST: Final = 0
LINEAR: Final = 1
KNOWN: Final = frozenset({NEAREST, LINEAR})
"""Interpolations that resizes and warps have a device form for."""
_WEIGHT_BITS: Final = 11
"""OpenCV blends uint8 pixels with integer weights of this many bits."""


def _out_size(transform: Transform) -> tuple[int, int]:
    resizes = type(transform).__name__ == "Resize"
    height, width = (transform.height, transform.width) if resizes else transform.size
    return int(height), int(width)


@lru_cache(maxsize=64)
def _static(
    size: tuple[int, int], interpolation: int, mask_interpolation: int
) -> tuple[tuple[str, Any], ...]:
    return (
        ("size", size),
        ("interpolation", int(interpolation)),
        ("mask_interpolation", int(mask_interpolation)),
    )


def _encode_resize(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    box = params.get("crop_coords", (0, 0, shape[1], shape[0]))
    left, top, right, bottom = box
    height, width = size = _out_size(transform)
    if not (0 <= left < right <= shape[1] and 0 <= top < bottom <= shape[0]):
        return None
    smaller = height < bottom - top or width < right - left
    kinds = transform.interpolation, transform.mask_interpolation
    if not KNOWN.issuperset(kinds) or (smaller and transform.area_for_downscale is not None):
        return None
    if transform.area_for_downscale == "image_mask" and "crop_coords" in params:
        return None  # Masks of a crop are always means of areas.
    # Source pixels per output pixel, to the last bit, which decides at whole steps: OpenCV takes
    # the reciprocal of a quotient.
    steps = 1.0 / (height / (bottom - top)), 1.0 / (width / (right - left))
    arrays = {"box": np.array(box, np.int32), "step": np.array(steps)}
    return Encoded(_static(size, *kinds), arrays)


def _nearest(first: Tensor, last: Tensor, step: Tensor, out: int) -> Tensor:
    length = (last - first).double()[:, None]
    grid = torch.arange(out, device=first.device, dtype=torch.float64)
    index = (grid * step[:, None]).floor().minimum(length - 1)
    return index.long() + first[:, None]


def _linear(first: Tensor, last: Tensor, step: Tensor, out: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two source positions and the weight of the second, each ``[n, out]``."""
    length = (last - first).double()[:, None]
    grid = torch.arange(out, device=first.device, dtype=torch.float64)
    position = ((grid + 0.5) * step[:, None] - 0.5).float()
    low = position.floor()
    weight = position - low
    edge = length.long() - 1
    below = low.long().clamp(min=0).minimum(edge)
    above = (low.long() + 1).clamp(min=0).minimum(edge)
    return below + first[:, None], above + first[:, None], weight


def blend_bytes(corners: list[Tensor], across: Tensor, down: Tensor) -> Tensor:
    """Return the mean of uint8 pixels above left, above right, below left and below right.

    ``across`` and ``down`` are the weights of the right and of the lower ones, float32 in [0, 1].
    """
    one = 1 << _WEIGHT_BITS
    right, left = (across * one).round().int(), ((1 - across) * one).round().int()
    below, above = (down * one).round().int(), ((1 - down) * one).round().int()
    upper = (corners[0].int() * left + corners[1].int() * right) >> 4
    lower = (corners[2].int() * left + corners[3].int() * right) >> 4
    return ((((upper * above) >> 16) + ((lower * below) >> 16) + 2) >> 2).to(torch.uint8)


def _corners(
    images: Tensor, rows: Sequence[Tensor], columns: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the four pixels around positions, and the weights of the right and the lower ones."""
    (y0, y1, down), (x0, x1, across) = rows, columns
    # OpenCV clamps columns by dropping the weight, rows by reading the edge row twice.
    across = torch.where(x0 == x1, 0.0, across)
    corners = [gather(images, y[:, :, None], x[:, None, :]) for y in (y0, y1) for x in (x0, x1)]
    return corners, across[:, None, :, None], down[:, :, None, None]


def _resample(setting: str, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    images = as_channels_last(batch)
    height, width = static["size"]
    left, top, right, bottom = arrays["box"].long().unbind(1)
    down, across = arrays["step"].unbind(1)
    if static[setting] == NEAREST:
        y = _nearest(top, bottom, down, height)
        x = _nearest(left, right, across, width)
        out = gather(images, y[:, :, None], x[:, None, :])
    else:
        rows = _linear(top, bottom, down, height)
        columns = _linear(left, right, across, width)
        corners, *weights = _corners(images, rows, columns)
        out = _blend(corners, *weights)
        if images.dtype == torch.uint8 and images.shape[-1] == 2:
            # Halved in another way than one, three or four channels are.
            halved = (bottom - top == 2 * height) & (right - left == 2 * width)
            mean = torch.stack(corners).float().mean(0)
            out = torch.where(halved[:, None, None, None], mean.round().byte(), out)
    return out.view(*out.shape[:3], *batch.shape[3:])


def _blend(corners: list[Tensor], across: Tensor, down: Tensor) -> Tensor:
    dtype = corners[0].dtype
    if dtype == torch.uint8:
        return blend_bytes(corners, across, down)
    upper = corners[0] * (1 - across) + corners[1] * across
    lower = corners[2] * (1 - across) + corners[3] * across
    mixed = upper * (1 - down) + lower * down
    # OpenCV rounds masks of other integers to the even number.
    return (mixed if dtype.is_floating_point else mixed.round()).to(dtype)


OPS = tuple(
    DeviceOp(
        name,
        _encode_resize,
        partial(_resample, "interpolation"),
        mask=partial(_resample, "mask_interpolation"),
        out_shape=lambda transform, _params, shape: (*_out_size(transform), *shape[2:]),
    )
    for name in ("Resize", "RandomResizedCrop", "RandomSizedCrop")
)
"""Nearest is exact. Linear on uint8 is exact, or off by one level in a few pixels when it enlarges;
on float32 it agrees to 1e-5."""

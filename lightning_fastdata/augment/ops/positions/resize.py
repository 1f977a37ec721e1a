"""Resizing, with crops before it, and making small and large again: OpenCV's own arithmetic."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Params,
    Shape,
    Static,
    Transform,
    as_channels_last,
    channels,
)
from lightning_fastdata.augment.ops.positions.index import gather
from lightning_fastdata.augment.ops.table import via_bytes

NEAREST: Final = 0
LINEAR: Final = 1
CUBIC: Final = 2
_KNOWN: Final = frozenset({NEAREST, LINEAR})
_WEIGHT_BITS: Final = 11
"""OpenCV blends uint8 pixels with integer weights of this many bits."""


def _out_size(transform: Transform) -> tuple[int, int]:
    if hasattr(transform, "size"):
        height, width = transform.size
    else:
        height, width = transform.height, transform.width
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
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    box = params.get("crop_coords", (0, 0, shape[1], shape[0]))
    left, top, right, bottom = box
    height, width = size = _out_size(transform)
    if not (0 <= left < right <= shape[1] and 0 <= top < bottom <= shape[0]):
        return None
    smaller = height < bottom - top or width < right - left
    kinds = transform.interpolation, transform.mask_interpolation
    if not _KNOWN.issuperset(kinds) or (smaller and transform.area_for_downscale is not None):
        return None
    if transform.area_for_downscale == "image_mask" and "crop_coords" in params:
        return None  # Masks of a crop are always means of areas.
    return Encoded(_static(size, *kinds), {"box": np.array(box, np.int32)})


def _step(length: Tensor, out: int) -> Tensor:
    """Return the source pixels per output pixel, to the last bit, which decides at whole steps.

    OpenCV takes the reciprocal of a quotient. Both are divisions of tensors: torch computes a
    number over a tensor as the tensor's reciprocal times the number, which rounds once more.
    """
    return 1.0 / (torch.full_like(length, out) / length)


def _nearest(first: Tensor, last: Tensor, out: int) -> Tensor:
    length = (last - first).double()[:, None]
    grid = torch.arange(out, device=first.device, dtype=torch.float64)
    index = (grid * _step(length, out)).floor().minimum(length - 1)
    return index.long() + first[:, None]


def _linear(first: Tensor, last: Tensor, out: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two source positions and the weight of the second, each ``[n, out]``."""
    length = (last - first).double()[:, None]
    grid = torch.arange(out, device=first.device, dtype=torch.float64)
    position = ((grid + 0.5) * _step(length, out) - 0.5).float()
    low = position.floor()
    weight = position - low
    edge = length.long() - 1
    below = low.long().clamp(min=0).minimum(edge)
    above = (low.long() + 1).clamp(min=0).minimum(edge)
    return below + first[:, None], above + first[:, None], weight


def blend_bytes(corners: list[Tensor], across: Tensor, down: Tensor) -> Tensor:
    """Return the mean of uint8 pixels above left, above right, below left and below right.

    Args:
        corners: the four, alike in shape.
        across: weight of the right ones, float32 in [0, 1]; broadcasts with them.
        down: weight of the lower ones.
    """
    one = 1 << _WEIGHT_BITS
    right, left = (across * one).round().int(), ((1 - across) * one).round().int()
    below, above = (down * one).round().int(), ((1 - down) * one).round().int()
    upper = (corners[0].int() * left + corners[1].int() * right) >> 4
    lower = (corners[2].int() * left + corners[3].int() * right) >> 4
    return ((((upper * above) >> 16) + ((lower * below) >> 16) + 2) >> 2).to(torch.uint8)


def _resample(setting: str) -> Any:
    def run(batch: Tensor, static: Static, arrays: Arrays) -> Tensor:
        images = as_channels_last(batch)
        height, width = static["size"]
        left, top, right, bottom = arrays["box"].long().unbind(1)
        if static[setting] == NEAREST:
            y, x = _nearest(top, bottom, height), _nearest(left, right, width)
            out = gather(images, y[:, :, None], x[:, None, :])
        else:
            y0, y1, down = _linear(top, bottom, height)
            x0, x1, across = _linear(left, right, width)
            # OpenCV clamps columns by dropping the weight, rows by reading the edge row twice.
            across = torch.where(x0 == x1, 0.0, across)
            corners = [
                gather(images, y[:, :, None], x[:, None, :]) for y in (y0, y1) for x in (x0, x1)
            ]
            across, down = across[:, None, :, None], down[:, :, None, None]
            if images.dtype == torch.uint8:
                out = blend_bytes(corners, across, down)
                if images.shape[-1] == 2:
                    # Halved in another way than one, three or four channels are.
                    halved = (bottom - top == 2 * height) & (right - left == 2 * width)
                    mean = torch.stack(corners).float().mean(0)
                    out = torch.where(halved[:, None, None, None], mean.round().byte(), out)
            else:
                upper = corners[0] * (1 - across) + corners[1] * across
                lower = corners[2] * (1 - across) + corners[3] * across
                mixed = upper * (1 - down) + lower * down
                # OpenCV rounds masks of other integers to the even number.
                out = (mixed if images.is_floating_point() else mixed.round()).to(images.dtype)
        return out.view(*out.shape[:3], *batch.shape[3:])

    return run


_AREA: Final = 3
_GRAIN: Final = 16
"""Small sizes are rounded up to a multiple of this, so that samples share launches."""
_TAP_GRAIN: Final = 4
"""The same for the number of pixels that one small pixel is the mean of, along one axis."""


def _nearest_table(length: int, out: int, step: float) -> np.ndarray:
    index: np.ndarray = np.floor(np.arange(out) * step).astype(np.int32)
    return index.clip(0, length - 1)


def _linear_tables(length: int, out: int, step: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two positions that each small or large pixel lies between, and the weight."""
    position = ((np.arange(out) + 0.5) * step - 0.5).astype(np.float32)
    low = np.floor(position)
    first, edge = low.astype(np.int32), length - 1
    return first.clip(0, edge), (first + 1).clip(0, edge), position - low


def _area_tables(length: int, out: int, step: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first pixel that each small pixel covers, weights of it and the next, and divisor.

    The weighted sum is to be divided by the divisor. It is 1 unless the step is a whole number:
    then the weights are, too, so that the sum is one of whole numbers, as in OpenCV.
    """
    start = np.arange(out) * step
    stop = np.minimum(start + step, length)
    first = np.floor(start + 1e-3).astype(np.int32).clip(0, length - 1)
    taps = int(np.ceil(step)) + 1
    pixel = first[:, None] + np.arange(taps)
    weights = np.minimum(pixel + 1, stop[:, None]) - np.maximum(pixel, start[:, None])
    weights[weights < 1e-3] = 0
    divisor = stop - start
    if step != int(step):
        weights, divisor = weights / divisor[:, None], np.ones(out)
    padded = np.pad(weights, ((0, 0), (0, -taps % _TAP_GRAIN)))
    return first, padded.astype(np.float32), divisor.astype(np.float32)


def _grown(table: np.ndarray) -> np.ndarray:
    """Return a table of small pixels with more of them, which nothing reads."""
    return np.pad(table, [(0, -len(table) % _GRAIN)] + [(0, 0)] * (table.ndim - 1))


def _encode_axis(
    name: str, length: int, small: int, step: float, kinds: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Return the tables of one axis: from the image to the small one, and back."""
    down, up = kinds
    back = 1 / (length / small)
    if up == NEAREST:
        upper = {"first": _nearest_table(small, length, back)}
    else:
        upper = dict(
            zip(("first", "second", "weight"), _linear_tables(small, length, back), strict=True)
        )
    if down == NEAREST:
        # Both at once: the position in the small image is a position in the image.
        source = _nearest_table(length, small, step)
        upper = {key: table if key == "weight" else source[table] for key, table in upper.items()}
        lower = {}
    else:
        keys = ("first", "second", "weight") if down == LINEAR else ("first", "weights", "divisor")
        tables = (_linear_tables if down == LINEAR else _area_tables)(length, small, step)
        lower = {key: _grown(table) for key, table in zip(keys, tables, strict=True)}
    return {
        **{f"up {name} {key}": table for key, table in upper.items()},
        **{f"down {name} {key}": table for key, table in lower.items()},
    }


def _encode_downscale(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    down, up = (int(transform.interpolation_pair[key]) for key in ("downscale", "upscale"))
    if down not in (NEAREST, LINEAR, _AREA) or up not in (NEAREST, LINEAR):
        return None
    sizes = [int(np.rint(length * params["scale"])) for length in shape[:2]]
    if not all(sizes):
        return None
    # OpenCV copies an image that keeps its size.
    step = 1.0 if sizes == list(shape[:2]) else 1 / params["scale"]
    if down == _AREA and channels(shape) > 4:
        return None  # OpenCV refuses it.
    if step == 2 and down == LINEAR:
        down = _AREA  # as in OpenCV
    arrays = {}
    for name, length, small in zip("yx", shape[:2], sizes, strict=True):
        arrays.update(_encode_axis(name, length, small, step, (down, up)))
    halves = step == 2 and channels(shape) in (1, 3, 4)
    return Encoded((("down", down), ("up", up), ("halves", halves)), arrays)


def _between(images: Tensor, arrays: Arrays, stage: str) -> Tensor:
    y0, y1, down = (arrays[f"{stage} y {key}"] for key in ("first", "second", "weight"))
    x0, x1, across = (arrays[f"{stage} x {key}"] for key in ("first", "second", "weight"))
    # OpenCV clamps columns by dropping the weight, rows by reading the edge row twice.
    across = torch.where(x0 == x1, 0.0, across)
    corners = [gather(images, y[:, :, None], x[:, None, :]) for y in (y0, y1) for x in (x0, x1)]
    return blend_bytes(corners, across[:, None, :, None], down[:, :, None, None])


def _covered(images: Tensor, arrays: Arrays, *, halves: bool) -> Tensor:
    y, tall, rows_each = (arrays[f"down y {key}"] for key in ("first", "weights", "divisor"))
    x, wide, columns_each = (arrays[f"down x {key}"] for key in ("first", "weights", "divisor"))
    total = torch.zeros((), device=images.device)
    for row in range(tall.shape[2]):
        rows = (y + row).clamp(max=images.shape[1] - 1)[:, :, None]
        line = torch.zeros((), device=images.device)
        for column in range(wide.shape[2]):
            columns = (x + column).clamp(max=images.shape[2] - 1)[:, None, :]
            line = line + gather(images, rows, columns) * wide[:, None, :, column, None]
        total = total + line * tall[:, :, row, None, None]
    each = (rows_each[:, :, None] * columns_each[:, None, :]).unsqueeze(-1)
    # Padding has the divisor 0.
    mean = total / each.clamp(min=1)
    rounded = mean.round()
    if halves:
        # The mean of four is rounded up in the middle; others, those of two at the edge, and those
        # of other numbers of channels, to the even number.
        rounded = torch.where(each == 4, (mean + 0.5).floor(), rounded)
    return rounded.clamp(0, 255).to(torch.uint8)


def _downscale(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    def change(as_bytes: Tensor) -> Tensor:
        if static["down"] == LINEAR:
            as_bytes = _between(as_bytes, arrays, "down")
        elif static["down"] == _AREA:
            as_bytes = _covered(as_bytes, arrays, halves=static["halves"])
        if static["up"] == LINEAR:
            return _between(as_bytes, arrays, "up")
        y, x = arrays["up y first"], arrays["up x first"]
        return gather(as_bytes, y[:, :, None], x[:, None, :])

    return via_bytes(images, change)


OPS = (
    *tuple(
        DeviceOp(
            name,
            _encode_resize,
            _resample("interpolation"),
            mask=_resample("mask_interpolation"),
            out_shape=lambda transform, _params, shape: (*_out_size(transform), *shape[2:]),
            fused="resize",
        )
        for name in ("Resize", "RandomResizedCrop", "RandomSizedCrop")
    ),
    DeviceOp("Downscale", _encode_downscale, _downscale),
)
"""Nearest is exact. Linear on uint8 is exact, or off by one level in a few pixels when it enlarges;
on float32 it agrees to 1e-5. Downscale may be one level off where a mean lies between two levels;
no such case is known on photographs."""

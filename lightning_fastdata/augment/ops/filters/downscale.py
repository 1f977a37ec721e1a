"""Making an image small and large again, with OpenCV's own arithmetic."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.positions.border import channels, gather
from lightning_fastdata.augment.ops.positions.resample import LINEAR, NEAREST, blend_bytes
from lightning_fastdata.augment.ops.table import via_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape

_AREA: Final = 3
_GRAIN: Final = 16
"""Small sizes are rounded up to a multiple of this, so that samples share launches."""
_TAP_GRAIN: Final = 4
"""The same for the number of pixels that one small pixel is the mean of, along one axis."""


def _nearest(length: int, out: int, step: float) -> np.ndarray:
    index: np.ndarray = np.floor(np.arange(out) * step).astype(np.int32)
    return index.clip(0, length - 1)


def _linear(length: int, out: int, step: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two positions that each small or large pixel lies between, and the weight."""
    position = ((np.arange(out) + 0.5) * step - 0.5).astype(np.float32)
    low = np.floor(position)
    first, edge = low.astype(np.int32), length - 1
    return first.clip(0, edge), (first + 1).clip(0, edge), position - low


def _area(length: int, out: int, step: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
        upper = {"first": _nearest(small, length, back)}
    else:
        upper = dict(zip(("first", "second", "weight"), _linear(small, length, back), strict=True))
    if down == NEAREST:
        # Both at once: the position in the small image is a position in the image.
        source = _nearest(length, small, step)
        upper = {key: table if key == "weight" else source[table] for key, table in upper.items()}
        lower = {}
    else:
        keys = ("first", "second", "weight") if down == LINEAR else ("first", "weights", "divisor")
        tables = (_linear if down == LINEAR else _area)(length, small, step)
        lower = {key: _grown(table) for key, table in zip(keys, tables, strict=True)}
    return {
        **{f"up {name} {key}": table for key, table in upper.items()},
        **{f"down {name} {key}": table for key, table in lower.items()},
    }


def _encode(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
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


def _between(images: torch.Tensor, arrays: Mapping[str, torch.Tensor], stage: str) -> torch.Tensor:
    y0, y1, down = (arrays[f"{stage} y {key}"] for key in ("first", "second", "weight"))
    x0, x1, across = (arrays[f"{stage} x {key}"] for key in ("first", "second", "weight"))
    # OpenCV clamps columns by dropping the weight, rows by reading the edge row twice.
    across = torch.where(x0 == x1, 0.0, across)
    corners = [gather(images, y[:, :, None], x[:, None, :]) for y in (y0, y1) for x in (x0, x1)]
    return blend_bytes(corners, across[:, None, :, None], down[:, :, None, None])


def _covered(
    images: torch.Tensor, arrays: Mapping[str, torch.Tensor], *, halves: bool
) -> torch.Tensor:
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


def _run(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    def change(as_bytes: torch.Tensor) -> torch.Tensor:
        if static["down"] == LINEAR:
            as_bytes = _between(as_bytes, arrays, "down")
        elif static["down"] == _AREA:
            as_bytes = _covered(as_bytes, arrays, halves=static["halves"])
        if static["up"] == LINEAR:
            return _between(as_bytes, arrays, "up")
        y, x = arrays["up y first"], arrays["up x first"]
        return gather(as_bytes, y[:, :, None], x[:, None, :])

    return via_bytes(images, change)


OPS = (DeviceOp(name="Downscale", encode=_encode, image=_run),)
"""Nearest both ways is exact. Linear and area may be one level off where a mean lies between two
levels; none such is known on photographs."""

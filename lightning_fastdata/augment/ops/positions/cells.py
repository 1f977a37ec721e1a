"""Warps whose positions lie on a grid of 1/32 pixel, in the integers of OpenCV 4."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.positions.index import read
from lightning_fastdata.augment.ops.positions.resize import NEAREST

_BITS: Final = 5
CELLS: Final = 1 << _BITS
"""Positions per pixel."""
_AFFINE: Final = 1024
"""OpenCV adds up rows and columns of an affine warp in parts of a pixel."""
_FAR: Final = 1 << 15
"""Positions are limited to this many pixels: OpenCV keeps them in 16 bits."""
_WEIGHT_BITS: Final = 15


@cache
def on_cells() -> bool:
    """Return whether this OpenCV rounds positions to 1/32 pixel, as a third of a pixel shows."""
    import cv2

    ramp = np.arange(64, dtype=np.float32).reshape(1, 64)
    third = np.array([[1, 0, -1 / 3], [0, 1, 0]])
    return bool(abs(cv2.warpAffine(ramp, third, (64, 1))[0, 32] - (32 + 1 / 3)) > 1e-3)


def invert(matrix: np.ndarray) -> np.ndarray:
    """Return the inverse of an affine 3x3 matrix, float64, in the order of OpenCV's operations."""
    # Numbers, not arrays of two: a sample has one of these.
    (a, b, c), (d, e, f), _ = np.asarray(matrix, np.float64).tolist()
    by = 1 / (a * e - b * d)
    a, b, d, e = e * by, b * -by, d * -by, a * by
    return np.array([[a, b, -a * c - b * f], [d, e, -d * c - e * f], [0, 0, 1]])


def cells_of_matrix(
    inverse: Tensor, size: tuple[int, int], *, nearest: bool
) -> tuple[Tensor, Tensor]:
    """Return the rows and columns that output pixels come from, int64 ``[n, height, width]``.

    By float64 matrices ``inverse`` ``[n, 3, 3]``; in pixels if ``nearest``, else in 1/32 pixels.
    """
    y = torch.arange(size[0], device=inverse.device, dtype=inverse.dtype)[:, None]
    x = torch.arange(size[1], device=inverse.device, dtype=inverse.dtype)[None, :]
    m = inverse[:, :, :, None, None]
    # Half of what the shift below cuts off.
    half = _AFFINE // 2 if nearest else _AFFINE // CELLS // 2
    shift = 10 if nearest else 10 - _BITS

    def line(row: int) -> Tensor:
        start = ((m[:, row, 1] * y + m[:, row, 2]) * _AFFINE).round()
        found = start + half + (m[:, row, 0] * x * _AFFINE).round()
        return found.clamp(-_FAR * _AFFINE, _FAR * _AFFINE).long() >> shift

    return line(1), line(0)


def sample_cells(
    images: Tensor, rows: Tensor, columns: Tensor, interpolation: int, mode: int, fill: Tensor
) -> Tensor:
    """Return the values ``[n, h, w, C]`` at positions in 1/32 pixels; with NEAREST in whole pixels.

    ``rows`` and ``columns`` are int64 ``[n, h, w]``, also outside the image.
    """
    if interpolation == NEAREST:
        return read(images, rows, columns, mode, fill)
    y, x = rows >> _BITS, columns >> _BITS
    part = (rows & (CELLS - 1)) * CELLS + (columns & (CELLS - 1))
    # Of other integers OpenCV takes the mean in float32.
    whole = images.dtype == torch.uint8
    table = _weights(whole, images.device)
    sums = torch.float64 if images.dtype == torch.float64 else table.dtype
    total = torch.zeros((), dtype=sums, device=images.device)
    for tap in range(4):
        pixels = read(images, y + tap // 2, x + tap % 2, mode, fill)
        weight = table[tap].index_select(0, part.view(-1)).view(part.shape)
        total = total + pixels.to(sums) * weight.unsqueeze(-1)
    if images.is_floating_point():
        return total.to(images.dtype)
    rounded = (total + (1 << (_WEIGHT_BITS - 1))) >> _WEIGHT_BITS if whole else total.round()
    limits = torch.iinfo(images.dtype)
    return rounded.clamp(limits.min, limits.max).to(images.dtype)


@cache
def _weights(whole: bool, device: torch.device) -> Tensor:
    """Return the weight of each neighbour for each part of a pixel, ``[4, 1024]``; made once."""
    part = np.arange(CELLS, dtype=np.float32) / np.float32(CELLS)
    line = np.stack([1 - part, part], -1)
    table = (line[:, None, :, None] * line[None, :, None, :]).reshape(-1, 4).T
    if whole:
        table = np.rint(table * (1 << _WEIGHT_BITS)).astype(np.int32)
    return torch.from_numpy(table.copy()).to(device)

"""Affine warps with linear or nearest interpolation, all five border modes.

OpenCV 4 reads at positions on a grid of 1/32 pixel, and computes in integers; OpenCV 5 in floats.
"""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Final, TypeAlias

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
from lightning_fastdata.augment.ops.positions.index import MODES, encode_fills, fill_like, read
from lightning_fastdata.augment.ops.positions.resize import KNOWN, LINEAR, NEAREST

_STILL_ON_CELLS: Final = (torch.int16, torch.int32, torch.int64, torch.float64)
Settings: TypeAlias = tuple[tuple[str, object], ...]
FAR: Final = 1 << 20
"""No image is this wide: positions are limited to it before they become integers."""
_IDENTITY: Final = np.eye(3)


_BITS: Final = 5
CELLS: Final = 1 << _BITS
"""Positions per pixel."""
_AFFINE: Final = 1024
"""OpenCV adds up rows and columns of an affine warp in parts of a pixel."""
_FAR_CELLS: Final = 1 << 15
"""Positions are limited to this many pixels: OpenCV keeps them in 16 bits."""
_WEIGHT_BITS: Final = 15


@dataclass(frozen=True, slots=True)
class Loop:
    """How OpenCV 5 goes through the columns of a row of a warp: in vectors, then one by one."""

    vector_columns: int
    """So many columns fill a vector; 1: there is no column behind the last vector."""
    rounds_once: bool
    """Whether a product and a sum are rounded once behind the last vector, as they are in it."""

    def scalar_from(self, width: int) -> int:
        """Return the first column of a row that is behind the last vector, or the width."""
        return width - width % self.vector_columns


_LOOPS: Final = (Loop(1, True), *(Loop(2**n, once) for n in range(2, 7) for once in (True, False)))
"""What compilers make of the loop: vectors of 128 bits have eight columns, those of 256 sixteen."""


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
        return found.clamp(-_FAR_CELLS * _AFFINE, _FAR_CELLS * _AFFINE).long() >> shift

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


@cache
def loop() -> Loop:
    """Return how the installed OpenCV goes through a row, as it warps a ramp of 16 x 63 pixels.

    A ramp read linearly is the position that it is read at, to the last bit.
    """
    import cv2

    if on_cells():
        return _LOOPS[0]
    height, width = size = 16, 63
    ramp = np.tile(np.arange(128, dtype=np.float32), (height, 1))
    inverse = np.array([[0.7, 0.3, 10.1], [0, 1, 0], [0, 0, 1]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    seen = torch.from_numpy(cv2.warpAffine(ramp, inverse[:2], (width, height), flags=flags))
    one = torch.from_numpy(inverse.astype(np.float32))[None]

    def misses(known: Loop) -> int:
        how = (known.scalar_from(width), known.rounds_once)
        return int((_positions(one, size, *how)[1][0] != seen).sum())

    return min(_LOOPS, key=misses)


@cache
def blends_alike() -> bool:
    """Return whether the installed OpenCV blends neighbours as the device does, of noise of bytes.

    On CPUs that multiply and add in two instructions it may be a level off in some pixels.
    """
    import cv2

    if on_cells():
        return True
    size = 64, 96
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    matrix = np.array([[0.8, 0.3, 2.6], [-0.3, 0.9, 4.7], [0, 0, 1]])
    wanted = cv2.warpAffine(noise, matrix[:2], size[::-1], flags=cv2.INTER_LINEAR)
    inverse = torch.from_numpy(invert(matrix).astype(np.float32))[None]
    columns = loop().scalar_from(size[1]), loop().rounds_once
    where = _positions(inverse, size, *columns)
    black = torch.zeros(1, 3)
    found = sample(torch.from_numpy(noise)[None], *where, LINEAR, cv2.BORDER_CONSTANT, black)[0]
    return bool((found.numpy() == wanted).all())


def still_on_cells(batch: Tensor) -> bool:
    """Return whether OpenCV 5 warps a batch as OpenCV 4 does: of these dtypes, or two channels."""
    return batch.dtype in _STILL_ON_CELLS or (batch.ndim == 4 and batch.shape[-1] == 2)


def _out_shape(transform: Transform, params: Values, shape: Shape) -> Shape:
    size = params.get("output_shape", shape[:2])
    return round(float(size[0])), round(float(size[1])), *shape[2:]


def _is_close(matrix: np.ndarray) -> bool:
    """Whether a matrix is ``np.allclose`` to the identity, which takes some time to say so."""
    return all(
        abs(value - (row == column)) <= 1e-8 + 1e-5 * (row == column)
        for row, values in enumerate(matrix.tolist())
        for column, value in enumerate(values)
    )


@lru_cache(maxsize=64)
def _settings(interpolation: int, mask_interpolation: int, border: int) -> Settings:
    kinds = (("interpolation", interpolation), ("mask_interpolation", mask_interpolation))
    return (*kinds, ("border", border), ("cells", on_cells()))


def _encode_sampling(transform: Transform, shape: Shape) -> Encoded | None:
    """Return how a transform reads between pixels and outside; None: it has no device form."""
    fills = encode_fills(transform, shape)
    kinds = transform.interpolation, transform.mask_interpolation
    if fills is None or not KNOWN.issuperset(kinds) or transform.border_mode not in MODES:
        return None
    return Encoded(_settings(*map(int, (*kinds, transform.border_mode))), fills)


def _encode(transform: Transform, params: Values, shape: Shape, dtype: DType) -> Encoded | None:
    how = _encode_sampling(transform, shape)
    matrix = np.asarray(params["matrix"], np.float64)
    # Albumentations returns the image itself if the matrix is close to the identity.
    matrix = _IDENTITY if _is_close(matrix) else matrix
    (a, b, _), (d, e, _), _ = matrix.tolist()
    singular = abs(a * e - b * d) < 1e-12
    crops = type(transform).__name__ == "Rotate" and transform.crop_border
    if how is None or singular or crops:
        return None
    exact = invert(matrix)
    arrays = {"inverse": exact.astype(np.float32), "exact": exact}
    size = _out_shape(transform, params, shape)[:2]
    columns = (("scalar_from", loop().scalar_from(size[1])), ("rounds_once", loop().rounds_once))
    return Encoded((*how.static, ("size", size), *columns), {**arrays, **how.arrays})


def _clamped(where: Tensor) -> Tensor:
    """Return positions that can become integers."""
    return torch.nan_to_num(where, nan=0.0).clamp(-FAR, FAR)


def _positions(
    inverse: Tensor, size: tuple[int, int], scalar_from: int, rounds_once: bool
) -> tuple[Tensor, Tensor]:
    """Return where each output pixel comes from: rows and columns, float32 ``[n, height, width]``.

    The columns are ``m00 x + (m01 y + m02)`` in float32, the first product and sum rounded once,
    as in the vectors of OpenCV 5 on CPUs that multiply and add in one instruction. Behind the last
    vector, from the column ``scalar_from``, they are ``(m00 x + m01 y) + m02``, where the first
    product and sum are rounded once if ``rounds_once``.
    """
    y = torch.arange(size[0], device=inverse.device, dtype=inverse.dtype)[:, None]
    x = torch.arange(size[1], device=inverse.device, dtype=torch.float64)[None, :]
    m = inverse[:, :, :, None, None]

    def line(row: int) -> Tensor:
        across, down, start = m[:, row].unbind(1)
        # The product of two float32 numbers is exact in float64.
        found = (across.double() * x + (down * y + start).double()).float()
        if scalar_from < size[1]:
            products = across.double() * x[:, scalar_from:]
            products = products if rounds_once else products.float().double()
            found[..., scalar_from:] = (products + (down * y).double()).float() + start
        return found

    return _clamped(line(1)), _clamped(line(0))


def sample(
    images: Tensor,
    rows: Tensor,
    columns: Tensor,
    interpolation: int,
    mode: int,
    fill: Tensor,
) -> Tensor:
    """Return the values ``[n, h, w, C]`` between the pixels, as OpenCV 5 does: without a grid.

    ``rows`` and ``columns`` are float positions in pixels, also outside the image.
    """
    if interpolation == NEAREST:
        return read(images, rows.round().long(), columns.round().long(), mode, fill)
    y, x = rows.floor(), columns.floor()
    down, across = (rows - y).unsqueeze(-1), (columns - x).unsqueeze(-1)
    y, x = y.long(), x.long()

    def tap(dy: int, dx: int) -> Tensor:
        return read(images, y + dy, x + dx, mode, fill).float()

    upper = torch.lerp(tap(0, 0), tap(0, 1), across)
    lower = torch.lerp(tap(1, 0), tap(1, 1), across)
    out = torch.lerp(upper, lower, down)
    return (out if images.is_floating_point() else out.round()).to(images.dtype)


def _warp(setting: str, fill_name: str, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    images = as_channels_last(batch)
    fill = fill_like(images, arrays, fill_name)
    size, kind = static["size"], static[setting]
    if static["cells"] or still_on_cells(images):
        places = cells_of_matrix(arrays["exact"], size, nearest=kind == NEAREST)
        out = sample_cells(images, *places, kind, static["border"], fill)
    else:
        how = static["scalar_from"], static["rounds_once"]
        places = _positions(arrays["inverse"], size, *how)
        out = sample(images, *places, kind, static["border"], fill)
    return out.view(*out.shape[:3], *batch.shape[3:])


OPS = tuple(
    DeviceOp(
        name,
        _encode,
        partial(_warp, "interpolation", "fill"),
        mask=partial(_warp, "mask_interpolation", "fill_mask"),
        out_shape=_out_shape,
    )
    for name in ("Affine", "Rotate", "ShiftScaleRotate")
)
"""Nearest is exact. Linear on uint8 is exact with OpenCV 4, at most a level off with OpenCV 5."""

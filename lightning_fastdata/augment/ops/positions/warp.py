"""Affine and projective warps with linear or nearest interpolation, all five border modes."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from collections.abc import Callable
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
)
from lightning_fastdata.augment.ops.positions.cells import (
    cells_of_field,
    cells_of_matrix,
    cubic_weights,
    determinant,
    invert,
    on_cells,
    sample_cells,
)
from lightning_fastdata.augment.ops.positions.index import MODES, encode_fills, fill_like, read
from lightning_fastdata.augment.ops.positions.resize import CUBIC, LINEAR, NEAREST
from lightning_fastdata.augment.replay import instructions

WARPED: Final = frozenset({NEAREST, LINEAR, CUBIC})
"""Interpolations that warps and distortions have a device form for."""
_STILL_ON_CELLS: Final = (torch.int16, torch.int32, torch.int64)
FAR: Final = 1 << 20
"""No image is this wide: positions are limited to it before they become integers."""
_FOLDED: Final = 16
"""So many pixels of a border at least, or as many as the image has, are there to be read cubically;
the last of them is repeated."""
_IDENTITY: Final = np.eye(3)


def still_on_cells(batch: Tensor) -> bool:
    """Return whether OpenCV 5 warps images or masks as OpenCV 4 does: these dtypes, two channels.

    That is so where it reads linearly or at the nearest pixel, not where it reads cubically.
    """
    return batch.dtype in _STILL_ON_CELLS or (batch.ndim == 4 and batch.shape[-1] == 2)


def _out_size(transform: Transform, params: Params, shape: Shape) -> tuple[int, int]:
    if type(transform).__name__ == "Perspective":
        if transform.keep_size:
            return shape[0], shape[1]
        return int(params["max_height"]), int(params["max_width"])
    height, width = params.get("output_shape", shape[:2])
    return round(float(height)), round(float(width))


def _forward(transform: Transform, params: Params, shape: Shape) -> np.ndarray:
    matrix = np.asarray(params["matrix"], np.float64)
    if type(transform).__name__ != "Perspective":
        # Albumentations returns the image itself if the matrix is close to the identity.
        return _IDENTITY if _is_close(matrix) else matrix
    if transform.keep_size:
        scale = shape[1] / params["max_width"], shape[0] / params["max_height"]
        matrix = np.diag([*scale, 1.0]) @ matrix
    return matrix


def _is_close(matrix: np.ndarray) -> bool:
    """Whether a matrix is ``np.allclose`` to the identity, which takes some time to say so."""
    return all(
        abs(value - (row == column)) <= 1e-8 + 1e-5 * (row == column)
        for row, values in enumerate(matrix.tolist())
        for column, value in enumerate(values)
    )


@lru_cache(maxsize=64)
def _static(**settings: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(settings.items())


def _encode(transform: Transform, params: Params, shape: Shape, dtype: DType) -> Encoded | None:
    projective = type(transform).__name__ == "Perspective"
    fills = encode_fills(transform, shape, extends=not projective)
    kinds = transform.interpolation, transform.mask_interpolation
    if fills is None or not WARPED.issuperset(kinds) or transform.border_mode not in MODES:
        return None
    if getattr(transform, "crop_border", False):
        return None
    matrix = _forward(transform, params, shape)
    if abs(determinant(matrix)) < 1e-12:
        return None
    inverse = np.linalg.inv(matrix)
    static = _static(
        size=_out_size(transform, params, shape),
        interpolation=int(kinds[0]),
        mask_interpolation=int(kinds[1]),
        border=int(transform.border_mode),
        projective=projective,
        cells=on_cells(),
    )
    exact = invert(matrix, projective=projective)
    return Encoded(static, {"inverse": inverse.astype(np.float32), "exact": exact, **fills})


def _positions(
    inverse: Tensor, size: tuple[int, int], *, projective: bool
) -> tuple[Tensor, Tensor]:
    """Return where each output pixel comes from: rows and columns, float32 ``[n, height, width]``.

    The columns are ``m00 x + (m01 y + m02)`` in float32, the first product and sum rounded once,
    as in OpenCV 5 on CPUs that multiply and add in one instruction.
    """
    y = torch.arange(size[0], device=inverse.device, dtype=inverse.dtype)[:, None]
    x = torch.arange(size[1], device=inverse.device, dtype=torch.float64)[None, :]
    m = inverse[:, :, :, None, None]

    def line(row: int) -> Tensor:
        start = m[:, row, 1] * y + m[:, row, 2]
        # The product of two float32 numbers is exact in float64.
        return (m[:, row, 0].double() * x + start.double()).float()

    columns, rows = line(0), line(1)
    if projective:
        depth = line(2)
        columns, rows = columns / depth, rows / depth
    return tuple(  # type: ignore[return-value]
        torch.nan_to_num(where, nan=0.0).clamp(-FAR, FAR) for where in (rows, columns)
    )


def sample(
    images: Tensor,
    rows: Tensor,
    columns: Tensor,
    interpolation: int,
    mode: int,
    fill: Tensor,
    *,
    cells: bool = False,
) -> Tensor:
    """Return the values between the pixels, as OpenCV 5 does: in float32, without a grid.

    Args:
        images: ``[n, H, W, C]``.
        rows: positions ``[n, h, w]`` in pixels, also outside the image; float.
        columns: the same.
        interpolation: NEAREST, LINEAR or CUBIC.
        mode: ``BORDER_*``.
        fill: value outside the image for CONSTANT, ``[n, C]``, in the dtype of ``images``.
        cells: as OpenCV 4 does: at multiples of 1/32 pixel.

    Returns:
        ``[n, h, w, C]`` in the dtype of ``images``.
    """
    if cells:
        nearest = interpolation == NEAREST
        rows, columns = (cells_of_field(at, nearest=nearest) for at in (rows, columns))
        return sample_cells(images, rows, columns, interpolation, mode, fill)
    if interpolation == NEAREST:
        return read(images, rows.round().long(), columns.round().long(), mode, fill)
    if interpolation == CUBIC:
        # OpenCV 5 looks no further than this beyond an edge.
        height, width = (max(length, _FOLDED) for length in images.shape[1:3])
        rows, columns = rows.clamp(-height, 2 * height), columns.clamp(-width, 2 * width)
    y, x = rows.floor(), columns.floor()
    down, across = (rows - y).unsqueeze(-1), (columns - x).unsqueeze(-1)
    y, x = y.long(), x.long()

    def tap(dy: int, dx: int) -> Tensor:
        return read(images, y + dy, x + dx, mode, fill).float()

    if interpolation == CUBIC:
        out = _cubic(tap, down, across)
        if not images.is_floating_point():
            limits = torch.iinfo(images.dtype)
            out = out.round().clamp(limits.min, limits.max)
        return out.to(images.dtype)
    upper = torch.lerp(tap(0, 0), tap(0, 1), across)
    lower = torch.lerp(tap(1, 0), tap(1, 1), across)
    out = torch.lerp(upper, lower, down)
    return (out if images.is_floating_point() else out.round()).to(images.dtype)


def _cubic(tap: Callable[[int, int], Tensor], down: Tensor, across: Tensor) -> Tensor:
    """Return the mean of sixteen neighbours with OpenCV's weights, line by line."""
    beside, along = cubic_weights(across), cubic_weights(down)
    out = torch.zeros((), device=down.device)
    for row in range(4):
        line = torch.zeros((), device=down.device)
        for column in range(4):
            line = line + tap(row - 1, column - 1) * beside[column]
        out = out + line * along[row]
    return out


def _warp(setting: str, fill_name: str) -> Any:
    def run(batch: Tensor, static: Static, arrays: Arrays) -> Tensor:
        images = as_channels_last(batch)
        fill = fill_like(images, arrays, fill_name)
        size, projective, kind = static["size"], static["projective"], static[setting]
        if static["cells"] or (kind != CUBIC and still_on_cells(images)):
            places = cells_of_matrix(
                arrays["exact"], size, projective=projective, nearest=kind == NEAREST
            )
            out = sample_cells(images, *places, kind, static["border"], fill)
        else:
            rows, columns = _positions(arrays["inverse"], size, projective=projective)
            out = sample(images, rows, columns, kind, static["border"], fill)
        return out.view(*out.shape[:3], *batch.shape[3:])

    return run


OPS = tuple(
    DeviceOp(
        name,
        _encode,
        _warp("interpolation", "fill"),
        mask=_warp("mask_interpolation", "fill_mask"),
        out_shape=lambda transform, params, shape: (
            *_out_size(transform, params, shape),
            *shape[2:],
        ),
        fused=instructions.warp,
    )
    for name in ("Affine", "Rotate", "ShiftScaleRotate", "SafeRotate", "Perspective")
)
"""Nearest is exact. Linear and cubic on uint8 are exact with OpenCV 4, and at most one level off
with OpenCV 5."""

"""Reading an image through a warp: ``ops/positions/warp.py``."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from lightning_fastdata.augment.replay.kernels.numbers import even, read_anywhere

_FAR = tl.constexpr(1048576.0)


@triton.jit
def _line(row, y, x):
    """Return ``m0 x + (m1 y + m2)``: the first product and sum rounded once."""
    start = tl.load(row + 1) * y.to(tl.float32) + tl.load(row + 2)
    # The product of two float32 numbers is exact in float64.
    return (tl.load(row).to(tl.float64) * x.to(tl.float64) + start.to(tl.float64)).to(tl.float32)


@triton.jit
def _limited(position):
    # Not a number, 0 / 0, becomes 0.
    position = tl.where(position == position, position, 0.0)  # noqa: PLR0124
    return tl.minimum(tl.maximum(position, -_FAR), _FAR)


@triton.jit
def _back(matrix, columns, rows, how):
    """Return the columns and rows that positions come from, float32."""
    x = _line(matrix, rows, columns)
    y = _line(matrix + 3, rows, columns)
    if how & 16 != 0:
        depth = _line(matrix + 6, rows, columns)
        x = tl.div_rn(x, depth)
        y = tl.div_rn(y, depth)
    return _limited(x), _limited(y)


@triton.jit
def nearest_warped(inverse, how, y, x):
    """Return the nearest rows and columns that a warp reads, also outside the image."""
    columns, rows = _back(inverse, x, y, how)
    return even(rows).to(tl.int32), even(columns).to(tl.int32)


@triton.jit
def _between(one, other, weight):
    """``torch.lerp``: from the nearer end, the last product and sum rounded once."""
    small = weight < 0.5
    first = tl.where(small, one, other)
    return tl.fma(tl.where(small, weight, weight - 1.0), other - one, first)


@triton.jit
def _blend(c00, c01, c10, c11, across, down):
    upper = _between(c00.to(tl.float32), c01.to(tl.float32), across)
    lower = _between(c10.to(tl.float32), c11.to(tl.float32), across)
    return even(_between(upper, lower, down)).to(tl.int32)


@triton.jit
def read_warped(image, inverse, how, fill, y, x, height, width, mask):
    """Return red, green and blue where a warp reads them.

    Args:
        image: uint8 ``[height, width, 3]``.
        inverse: float32 ``[3, 3]``, from the result to the image.
        how: the border mode, plus 8 for the nearest pixel, plus 16 for a projective warp.
        fill: float32 ``[3]``.
        y: rows of the result.
        x: columns of the result.
        height: rows of the image.
        width: columns of the image.
        mask: which positions count.
    """
    mode = how & 7
    columns, rows = _back(inverse, x, y, how)
    if how & 8 != 0:
        y0 = even(rows).to(tl.int32)
        x0 = even(columns).to(tl.int32)
        red, green, blue = read_anywhere(image, y0, x0, height, width, mode, fill, mask)
    else:
        top = tl.floor(rows)
        left = tl.floor(columns)
        down = rows - top
        across = columns - left
        y0 = top.to(tl.int32)
        x0 = left.to(tl.int32)
        r00, g00, b00 = read_anywhere(image, y0, x0, height, width, mode, fill, mask)
        r01, g01, b01 = read_anywhere(image, y0, x0 + 1, height, width, mode, fill, mask)
        r10, g10, b10 = read_anywhere(image, y0 + 1, x0, height, width, mode, fill, mask)
        r11, g11, b11 = read_anywhere(image, y0 + 1, x0 + 1, height, width, mode, fill, mask)
        red = _blend(r00, r01, r10, r11, across, down)
        green = _blend(g00, g01, g10, g11, across, down)
        blue = _blend(b00, b01, b10, b11, across, down)
    return red, green, blue

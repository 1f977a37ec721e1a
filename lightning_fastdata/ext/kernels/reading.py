"""Reading an image through a resize or a warp."""


# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from lightning_fastdata.ext.kernels.pixels import (
    even,
    read_anywhere,
    read_pair,
)


@triton.jit
def _taps(out, step):
    """Return the lower position and the weight of the upper one, for output positions."""
    position = ((out.to(tl.float64) + 0.5) * step - 0.5).to(tl.float32)
    low = tl.floor(position)
    return low.to(tl.int32), position - low


@triton.jit
def _blend_bytes(c00, c01, c10, c11, left, right, above, below):
    """``blend_bytes``: weights are whole numbers of 11 bits."""
    upper = (c00 * left + c01 * right) >> 4
    lower = (c10 * left + c11 * right) >> 4
    return (((upper * above) >> 16) + ((lower * below) >> 16) + 2) >> 2


@triton.jit
def read_resized(image, box, steps, y, x, width, mask):
    """Return red, green and blue at ``y, x`` of a box (left, top, right, bottom), resized.

    ``steps``: source pixels per output pixel, down and across, float64.
    """
    left = tl.load(box)
    top = tl.load(box + 1)
    columns = tl.load(box + 2) - left
    rows = tl.load(box + 3) - top
    y0, down = _taps(y, tl.load(steps))
    x0, across = _taps(x, tl.load(steps + 1))
    y1 = tl.minimum(tl.maximum(y0 + 1, 0), rows - 1)
    x1 = tl.minimum(tl.maximum(x0 + 1, 0), columns - 1)
    y0 = tl.minimum(tl.maximum(y0, 0), rows - 1)
    x0 = tl.minimum(tl.maximum(x0, 0), columns - 1)
    # Columns are clamped by dropping the weight, rows by reading the edge row twice.
    two = x0 != x1
    across = tl.where(two, across, 0.0)
    right = even(across * 2048.0).to(tl.int32)
    before = even((1.0 - across) * 2048.0).to(tl.int32)
    below = even(down * 2048.0).to(tl.int32)
    above = even((1.0 - down) * 2048.0).to(tl.int32)
    r00, g00, b00, r01, g01, b01 = read_pair(image, y0 + top, x0 + left, width, two, mask)
    r10, g10, b10, r11, g11, b11 = read_pair(image, y1 + top, x0 + left, width, two, mask)
    red = _blend_bytes(r00, r01, r10, r11, before, right, above, below)
    green = _blend_bytes(g00, g01, g10, g11, before, right, above, below)
    blue = _blend_bytes(b00, b01, b10, b11, before, right, above, below)
    return red, green, blue


_FAR = tl.constexpr(1048576.0)


@triton.jit
def _line(row, y, x, how, scalar_from):
    """Return ``m0 x + (m1 y + m2)``, or behind OpenCV's vectors ``(m0 x + m1 y) + m2``.

    The first product and sum are rounded once; behind the vectors only if ``how`` says so.
    """
    behind = x >= scalar_from
    offset = tl.load(row + 2)
    down = tl.load(row + 1) * y.to(tl.float32)
    # The product of two float32 numbers is exact in float64.
    across = tl.load(row).to(tl.float64) * x.to(tl.float64)
    rounded = across.to(tl.float32).to(tl.float64)
    across = tl.where(behind & (how & 16 == 0), rounded, across)
    start = tl.where(behind, down, down + offset)
    line = (across + start.to(tl.float64)).to(tl.float32)
    return tl.where(behind, line + offset, line)


@triton.jit
def _limited(position):
    return tl.minimum(tl.maximum(position, -_FAR), _FAR)


@triton.jit
def _between(one, other, weight):
    """``torch.lerp``: from the nearer end, the last product and sum rounded once."""
    small = weight < 0.5
    first = tl.where(small, one, other)
    return tl.fma(tl.where(small, weight, weight - 1.0), other - one, first)


@triton.jit
def _lerp_pixels(c00, c01, c10, c11, across, down):
    upper = _between(c00.to(tl.float32), c01.to(tl.float32), across)
    lower = _between(c10.to(tl.float32), c11.to(tl.float32), across)
    return even(_between(upper, lower, down)).to(tl.int32)


@triton.jit
def read_warped(image, inverse, how, scalar_from, fill, y, x, height, width, mask):
    """Return red, green and blue where a warp reads them for ``y, x``.

    ``how``: the border mode, plus 8 for the nearest pixel, plus 16 if OpenCV rounds once behind its
    vectors, which is from the column ``scalar_from``.
    ``inverse``: float32 ``[3, 3]``, from the result to the image; ``fill``: float32 ``[3]``.
    """
    mode = how & 7
    columns = _limited(_line(inverse, y, x, how, scalar_from))
    rows = _limited(_line(inverse + 3, y, x, how, scalar_from))
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
        red = _lerp_pixels(r00, r01, r10, r11, across, down)
        green = _lerp_pixels(g00, g01, g10, g11, across, down)
        blue = _lerp_pixels(b00, b01, b10, b11, across, down)
    return red, green, blue

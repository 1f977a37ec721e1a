"""Reading an image through a resize: ``ops/positions/resample.py``."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from lightning_fastdata.augment.replay.kernels.numbers import even, read


@triton.jit
def _taps(out, length, size):
    """Return the lower position and the weight of the upper one, for output positions."""
    step = 1.0 / (size.to(tl.float64) / length.to(tl.float64))
    position = ((out.to(tl.float64) + 0.5) * step - 0.5).to(tl.float32)
    low = tl.floor(position)
    return low.to(tl.int32), position - low


@triton.jit
def _blend(c00, c01, c10, c11, left, right, above, below):
    """``blend_bytes``: weights are whole numbers of 11 bits."""
    upper = (c00 * left + c01 * right) >> 4
    lower = (c10 * left + c11 * right) >> 4
    return (((upper * above) >> 16) + ((lower * below) >> 16) + 2) >> 2


@triton.jit
def read_resized(image, box, y, x, width, out_height, out_width, mask):
    """Return red, green and blue of a box of an image, resized.

    Args:
        image: uint8 ``[rows, width, 3]``.
        box: int32, left, top, right and bottom.
        y: rows of the result.
        x: columns of the result.
        width: columns of the image.
        out_height: rows of the result.
        out_width: columns of the result.
        mask: which positions count.
    """
    left = tl.load(box)
    top = tl.load(box + 1)
    columns = tl.load(box + 2) - left
    rows = tl.load(box + 3) - top
    y0, down = _taps(y, rows, out_height)
    x0, across = _taps(x, columns, out_width)
    y1 = tl.minimum(tl.maximum(y0 + 1, 0), rows - 1)
    x1 = tl.minimum(tl.maximum(x0 + 1, 0), columns - 1)
    y0 = tl.minimum(tl.maximum(y0, 0), rows - 1)
    x0 = tl.minimum(tl.maximum(x0, 0), columns - 1)
    # Columns are clamped by dropping the weight, rows by reading the edge row twice.
    across = tl.where(x0 == x1, 0.0, across)
    right = even(across * 2048.0).to(tl.int32)
    before = even((1.0 - across) * 2048.0).to(tl.int32)
    below = even(down * 2048.0).to(tl.int32)
    above = even((1.0 - down) * 2048.0).to(tl.int32)
    r00, g00, b00 = read(image, y0 + top, x0 + left, width, mask)
    r01, g01, b01 = read(image, y0 + top, x1 + left, width, mask)
    r10, g10, b10 = read(image, y1 + top, x0 + left, width, mask)
    r11, g11, b11 = read(image, y1 + top, x1 + left, width, mask)
    red = _blend(r00, r01, r10, r11, before, right, above, below)
    green = _blend(g00, g01, g10, g11, before, right, above, below)
    blue = _blend(b00, b01, b10, b11, before, right, above, below)
    return red, green, blue


@triton.jit
def _nearest_taps(out, first, last, size):
    length = last - first
    step = 1.0 / (size.to(tl.float64) / length.to(tl.float64))
    index = tl.floor(out.to(tl.float64) * step).to(tl.int32)
    return first + tl.minimum(index, length - 1)


@triton.jit
def nearest(box, y, x, out_height, out_width):
    """Return rows and columns of a box of an image, resized to the nearest pixels."""
    row = _nearest_taps(y, tl.load(box + 1), tl.load(box + 3), out_height)
    column = _nearest_taps(x, tl.load(box), tl.load(box + 2), out_width)
    return row, column

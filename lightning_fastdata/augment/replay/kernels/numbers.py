"""Rounding, dtypes, positions outside of an image, symmetries and covered rectangles."""

# ruff: noqa: N803 - Triton writes constants in capitals.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

_EVEN = tl.constexpr(12582912.0)
REPLICATE = tl.constexpr(1)
REFLECT_101 = tl.constexpr(4)


@triton.jit
def part(values, BLOCK: tl.constexpr):
    """Return which sample a program works on, and at which of its ``values`` values.

    A grid of one dimension has room for 2**31 programs; in its second dimension, for 65535.
    """
    blocks = tl.cdiv(values, BLOCK)
    program = tl.program_id(0)
    return program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def even(x):
    """Round float32 below 2**22 to whole numbers, halves to even."""
    return (x + _EVEN) - _EVEN


@triton.jit
def cut(x):
    """Limit float32 to 0 .. 255."""
    return tl.minimum(tl.maximum(x, 0.0), 255.0)


@triton.jit
def wrapped(at, period):
    """Return ``at`` modulo ``period``, never negative."""
    rest = at % period
    return tl.where(rest < 0, rest + period, rest)


@triton.jit
def fold(at, length, mode):
    """Map positions along an axis to inside: ``fold`` of ``ops/positions/border.py``."""
    inside = tl.minimum(tl.maximum(at, 0), length - 1)
    if mode == 2:
        around = wrapped(at, 2 * length)
        inside = tl.minimum(around, 2 * length - 1 - around)
    elif mode == 3:
        inside = wrapped(at, length)
    elif mode == 4:
        around = wrapped(at, tl.maximum(2 * length - 2, 1))
        inside = tl.minimum(around, 2 * length - 2 - around)
    return inside


@triton.jit
def read(image, y, x, width, mask):
    """Return red, green and blue at positions inside an image, as int32."""
    at = image + (y * width + x) * 3
    red = tl.load(at, mask, 0).to(tl.int32)
    green = tl.load(at + 1, mask, 0).to(tl.int32)
    blue = tl.load(at + 2, mask, 0).to(tl.int32)
    return red, green, blue


@triton.jit
def read_anywhere(image, y, x, height, width, mode, fill, mask):
    """Return red, green and blue at any positions; ``fill``: three float32, outside for mode 0."""
    red, green, blue = read(image, fold(y, height, mode), fold(x, width, mode), width, mask)
    if mode == 0:
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        red = tl.where(inside, red, cut(even(tl.load(fill))).to(tl.int32))
        green = tl.where(inside, green, cut(even(tl.load(fill + 1))).to(tl.int32))
        blue = tl.where(inside, blue, cut(even(tl.load(fill + 2))).to(tl.int32))
    return red, green, blue


@triton.jit
def as_kind(x, KIND: tl.constexpr):
    """Return int32 or float32 in another dtype: the nearest number, halves to even."""
    if tl.uint8 == KIND:
        return x.to(tl.uint8)
    number = x.to(tl.float32)
    if tl.bfloat16 == KIND:
        # Half of bfloat16's last bit, less where that is even: then cutting off rounds. Triton's
        # interpreter only cuts off.
        bits = number.to(tl.int32, bitcast=True)
        bits = (bits + 32767 + ((bits >> 16) & 1)) & -65536
        number = bits.to(tl.float32, bitcast=True)
    return number.to(KIND)


@triton.jit
def came_from(code, length, y, x, height, width):
    """Return where symmetries took each pixel from, and their instructions' effect undone."""
    for back in range(length):
        step = code + (length - 1 - back) * 5
        if tl.load(step) == 1:
            moves = tl.load(step + 1)
            x = tl.where((moves & 1) != 0, width - 1 - x, x)
            y = tl.where((moves & 2) != 0, height - 1 - y, y)
            y, x = tl.where((moves & 4) != 0, x, y), tl.where((moves & 4) != 0, y, x)
    return y, x


@triton.jit
def went_to(moves, y, x, height, width):
    """Return where a symmetry takes each pixel to."""
    y, x = tl.where((moves & 4) != 0, x, y), tl.where((moves & 4) != 0, y, x)
    x = tl.where((moves & 1) != 0, width - 1 - x, x)
    y = tl.where((moves & 2) != 0, height - 1 - y, y)
    return y, x


@triton.jit
def covered(holes, count, y, x, mask):
    """Return which pixels lie in one of the rectangles, int32 ``[count, 4]``."""
    hidden = mask & False
    for hole in range(count):
        corner = holes + hole * 4
        inside = (x >= tl.load(corner)) & (y >= tl.load(corner + 1))
        inside = inside & (x < tl.load(corner + 2)) & (y < tl.load(corner + 3))
        hidden = hidden | inside
    return hidden

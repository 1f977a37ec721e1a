"""Reading an image through its neighbourhoods: ``ops/filters/blur.py`` and ``ops/filters/rank.py``.

Each sample has a kernel of its own size. Terms are added in the order of ``ops/filters/blur.py``,
each product and its sum rounded once, as torch's ``addcmul`` does on a CPU.
"""

# ruff: noqa: N803 - Triton writes constants in capitals.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from lightning_fastdata.augment.replay.kernels.numbers import cut, even, fold, part, read

_REPLICATE = tl.constexpr(1)
_REFLECT_101 = tl.constexpr(4)


@triton.jit
def _byte(x):
    return cut(even(x)).to(tl.int32)


_VARYING: Final = ("rows_at", "code_at", "height", "width", "length")
"""Kernels are not compiled again for other values of these, nor for 1."""


@triton.jit(do_not_specialize=_VARYING)
def across_kernel(
    source, target, ints, floats, rows_at, code_at, height, width, length, BLOCK: tl.constexpr,
):  # fmt: skip
    """Correlate the rows of those images whose kernel is meant for both axes, one after the other.

    Writes float32 ``[images, height, width, 3]``, to be correlated along the columns.
    """
    place, at = part(height * width, BLOCK)
    sample = tl.load(ints + rows_at + place)
    code = ints + code_at + sample * length * 5
    taps = floats + tl.load(code + 1) // 4
    size = tl.load(code + 2)
    mask = at < height * width
    y = at // width
    x = at % width
    image = source + sample.to(tl.int64) * height * width * 3
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    for tap in range(size):
        weight = tl.load(taps + tap)
        column = fold(x + tap - size // 2, width, _REFLECT_101)
        r, g, b = read(image, y, column, width, mask)
        red = tl.fma(r.to(tl.float32), weight, red)
        green = tl.fma(g.to(tl.float32), weight, green)
        blue = tl.fma(b.to(tl.float32), weight, blue)
    out = target + place.to(tl.int64) * height * width * 3 + at * 3
    tl.store(out, red, mask)
    tl.store(out + 1, green, mask)
    tl.store(out + 2, blue, mask)


@triton.jit
def read_down(middle, taps, size, y, x, height, width, mask, BLOCK: tl.constexpr):
    """Return red, green and blue of what `across_kernel` wrote, correlated along the columns."""
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    for tap in range(size):
        weight = tl.load(taps + tap)
        at = middle + (fold(y + tap - size // 2, height, _REFLECT_101) * width + x) * 3
        red = tl.fma(tl.load(at, mask, 0.0), weight, red)
        green = tl.fma(tl.load(at + 1, mask, 0.0), weight, green)
        blue = tl.fma(tl.load(at + 2, mask, 0.0), weight, blue)
    return _byte(red), _byte(green), _byte(blue)


@triton.jit
def read_plane(
    image, taps, tall, wide, stride, y, x, height, width, mask, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return red, green and blue, correlated with a kernel ``[tall, wide]``.

    Args:
        image: uint8 ``[height, width, 3]``.
        taps: float32, the first number of the kernel.
        tall: rows of the kernel, odd.
        wide: columns of the kernel, odd.
        stride: numbers from one row of the kernel to the next.
        y: rows.
        x: columns.
        height: rows of the image.
        width: columns of the image.
        mask: which positions count.
        BLOCK: how many positions there are.
    """
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    for down in range(tall):
        row = fold(y + down - tall // 2, height, _REFLECT_101)
        for across in range(wide):
            weight = tl.load(taps + down * stride + across)
            column = fold(x + across - wide // 2, width, _REFLECT_101)
            r, g, b = read(image, row, column, width, mask)
            red = tl.fma(r.to(tl.float32), weight, red)
            green = tl.fma(g.to(tl.float32), weight, green)
            blue = tl.fma(b.to(tl.float32), weight, blue)
    return _byte(red), _byte(green), _byte(blue)


@triton.jit
def read_median(image, size, y, x, height, width, mask, BLOCK: tl.constexpr):
    """Return the medians of ``size * size`` neighbours, the border repeated.

    The median of an odd number of bytes is the largest byte that more than half of them reach. It
    is found bit by bit, the highest first.
    """
    half = size * size // 2
    red = tl.zeros([BLOCK], tl.int32)
    green = tl.zeros([BLOCK], tl.int32)
    blue = tl.zeros([BLOCK], tl.int32)
    for bit in range(8):
        step = 128 >> bit
        reds = tl.zeros([BLOCK], tl.int32)
        greens = tl.zeros([BLOCK], tl.int32)
        blues = tl.zeros([BLOCK], tl.int32)
        for down in range(size):
            row = fold(y + down - size // 2, height, _REPLICATE)
            for across in range(size):
                column = fold(x + across - size // 2, width, _REPLICATE)
                r, g, b = read(image, row, column, width, mask)
                reds += (r >= red + step).to(tl.int32)
                greens += (g >= green + step).to(tl.int32)
                blues += (b >= blue + step).to(tl.int32)
        red = tl.where(reds > half, red + step, red)
        green = tl.where(greens > half, green + step, green)
        blue = tl.where(blues > half, blue + step, blue)
    return red, green, blue

"""The kernels of fused runs, in Triton: CUDA, or Triton's own interpreter for tests.

The arithmetic is that of the operations in :mod:`lightning_fastdata.augment.ops` on a CPU, step by
step, so that both give the same bytes: halves to even by adding and taking away ``1.5 * 2**23``,
divisions that are rounded once, and a product and a sum rounded together only where torch does it,
in its ``lerp``: there ``tl.fma`` is written out.
"""

# ruff: noqa: N803, PLR0912, PLR0915 - Triton writes constants in capitals and decides by
# them first, and one kernel is one function.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from lightning_fastdata.ext.kernels.pixels import (
    came_from,
    contrasted,
    covered,
    looked_up,
    luminance,
    part,
    placed,
    read,
    read_anywhere,
    read_resized,
    read_warped,
    saturated,
    scaled,
    shifted_hsv,
    shifted_hue,
    went_to,
)

_VARYING: Final = (
    *("code_at", "where_at", "border", "fill_at", "mean_at", "gain_at"),
    *("height", "width", "out_height", "out_width", "length"),
)
"""Of other integers Triton compiles a kernel again if they are 1 or become multiples of 16, and
where the numbers of a batch lie is another place in each batch."""

_ANYWHERE: Final = ("source",)
"""A batch that is a part of another begins at any address, and the kernels read it at any."""


@triton.jit
def _fills(fill, count):
    """Return three values of a fill; the only one stands for all three."""
    many = count > 1
    second = tl.load(fill + tl.where(many, 1, 0))
    return tl.load(fill), second, tl.load(fill + tl.where(many, 2, 0))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def fused_kernel(
    source, target, bytes_, ints, floats, doubles, sums,
    code_at, where_at, border, fill_at, mean_at, gain_at,
    height, width, out_height, out_width, length, pixels,
    GEOMETRY: tl.constexpr, SUMS: tl.constexpr, ENDS: tl.constexpr,
    PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Carry out a run on one block of output pixels of one sample.

    ``GEOMETRY`` says how the image is read: 0 as it is, 1 a window, 2 resized, 3 warped in those
    samples whose first instruction says so.

    ``ENDS`` says what is written: 0 bytes, 1 normalized, 2 divided by a limit, which lies where
    normalized samples have their mean.

    What lies at ``fill_at`` is float32 for a window, and float64 for a resize: its steps.

    ``pixels`` is the height times the width of the result: where that is a multiple of 16, several
    values are written at once.

    With ``SUMS``, add up the luminance of the pixels as a sample's CONTRAST finds them, and write
    no pixels.
    """
    sample, at = part(pixels, BLOCK)
    mask = at < pixels
    code = ints + code_at + sample * length * 5
    row, column = placed(at, out_width)
    y, x = came_from(code, length, row, column, out_height, out_width)
    image = source + sample.to(tl.int64) * height * width * 3
    if GEOMETRY == 0:
        red, green, blue = read(image, y, x, width, mask)
    elif GEOMETRY == 1:
        corner = ints + where_at + sample * 2
        red, green, blue = read_anywhere(
            image, y + tl.load(corner), x + tl.load(corner + 1), height, width, border,
            floats + fill_at + sample * 3, mask,
        )  # fmt: skip
    elif GEOMETRY == 2:
        box = ints + where_at + sample * 4
        steps = doubles + fill_at // 2 + sample * 2
        red, green, blue = read_resized(image, box, steps, y, x, width, mask)
    elif tl.load(code) == 10:
        inverse = floats + tl.load(code + 1) // 4
        fill = floats + tl.load(code + 3) // 4
        red, green, blue = read_warped(
            image, inverse, tl.load(code + 2), tl.load(code + 4), fill,
            y, x, height, width, mask,
        )  # fmt: skip
    else:
        red, green, blue = read(image, y, x, width, mask)
    running = True
    for number in range(length):
        step = code + number * 5
        kind = tl.load(step)
        one = tl.load(step + 1)
        two = tl.load(step + 2)
        three = tl.load(step + 3)
        if running:
            if kind == 1:
                y, x = went_to(one, y, x, out_height, out_width)
            elif kind == 2:
                red, green, blue = looked_up(red, green, blue, bytes_ + one, two)
            elif kind == 3:
                red, green, blue = shifted_hsv(red, green, blue, bytes_ + one, x, out_width, two)
            elif kind == 4:
                factor = tl.load(doubles + one // 8).to(tl.float32)
                red, green, blue = scaled(red, green, blue, factor, 0.0)
            elif kind == 5:
                if SUMS:
                    light = tl.where(mask, luminance(red, green, blue), 0)
                    tl.atomic_add(sums + sample, tl.sum(light, 0).to(tl.int64))
                    running = False
                else:
                    red, green, blue = contrasted(
                        red, green, blue, tl.load(doubles + one // 8), tl.load(sums + sample),
                        out_height * out_width,
                    )  # fmt: skip
            elif kind == 6:
                factor = tl.load(doubles + one // 8).to(tl.float32)
                red, green, blue = saturated(red, green, blue, factor)
            elif kind == 7:
                red, green, blue = shifted_hue(red, green, blue, bytes_ + one, x, out_width, two)
            elif kind == 8:
                red = luminance(red, green, blue)
                green = red
                blue = red
            elif kind == 9:
                hidden = covered(ints + one // 4, two, y, x, mask)
                in_red, in_green, in_blue = _fills(floats + three // 4, tl.load(step + 4))
                red = tl.where(hidden, in_red.to(tl.uint8).to(tl.int32), red)
                green = tl.where(hidden, in_green.to(tl.uint8).to(tl.int32), green)
                blue = tl.where(hidden, in_blue.to(tl.uint8).to(tl.int32), blue)
    if not SUMS:
        out = target + sample.to(tl.int64) * pixels * 3
        if PLANES:
            first = out + at
            between = pixels
        else:
            first = out + at * 3
            between = 1
        if ENDS == 1:
            mean = floats + mean_at + sample * 3
            gain = floats + gain_at + sample * 3
            red = (red.to(tl.float32) - tl.load(mean)) * tl.load(gain)
            green = (green.to(tl.float32) - tl.load(mean + 1)) * tl.load(gain + 1)
            blue = (blue.to(tl.float32) - tl.load(mean + 2)) * tl.load(gain + 2)
        elif ENDS == 2:
            limit = tl.load(floats + mean_at + sample)
            red = tl.div_rn(red.to(tl.float32), limit)
            green = tl.div_rn(green.to(tl.float32), limit)
            blue = tl.div_rn(blue.to(tl.float32), limit)
        kind_out = target.dtype.element_ty
        tl.store(first, red.to(kind_out), mask)
        tl.store(first + between, green.to(kind_out), mask)
        tl.store(first + 2 * between, blue.to(kind_out), mask)


OPTIONS: Final = {"enable_fp_fusion": False}
"""How all of them are compiled."""

"""The kernel of fused runs, in Triton: CUDA, or Triton's own interpreter for tests.

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

_EVEN = tl.constexpr(12582912.0)


@triton.jit
def part(values, BLOCK: tl.constexpr):
    """Return the sample that a program works on, and the positions among its ``values`` values.

    The grid has one dimension, which has room for 2**31 programs; a second one would have 65535.
    """
    blocks = tl.cdiv(values, BLOCK)
    program = tl.program_id(0)
    return program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def placed(at, width):
    """Return the row and column of pixels; unsigned division takes fewer instructions."""
    columns = width.to(tl.uint32)
    row = at.to(tl.uint32) // columns
    return row.to(tl.int32), (at.to(tl.uint32) - row * columns).to(tl.int32)


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
    """Map positions along an axis to inside: ``fold`` of ``ops/geometry.py``."""
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
def _word(address, mask):
    """Return the four bytes at an aligned address, uint64, the first of them lowest."""
    return tl.load(address.to(tl.pointer_type(tl.uint32)), mask, 0).to(tl.uint64)


@triton.jit
def _colors(pixel):
    """Return red, green and blue of bytes, the first of them lowest, as int32."""
    pixel = pixel.to(tl.uint32).to(tl.int32)
    return pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255


@triton.jit
def read(image, y, x, width, mask):
    """Return red, green and blue at positions inside an image, as int32.

    Words of four bytes are loaded, which takes fewer instructions than single bytes. Only words
    that hold a byte of the pixel are loaded, as others may lie outside the batch's memory.
    """
    address = image.to(tl.int64) + (y * width + x) * 3
    begin = (address & 3) * 8
    word = _word(address & -4, mask)
    word = word | _word((address & -4) + 4, mask & (begin > 8)) << 32
    return _colors(word >> begin.to(tl.uint64))


@triton.jit
def read_pair(image, y, x, width, two, mask):
    """Return what :func:`read` returns, and the same for the pixel to the right if ``two``.

    Elsewhere the second pixel has arbitrary values.
    """
    address = image.to(tl.int64) + (y * width + x) * 3
    begin = (address & 3) * 8
    second = _word((address & -4) + 4, mask & (two | (begin > 8)))
    word = _word(address & -4, mask) | second << 32
    behind = second | _word((address & -4) + 8, mask & two & (begin > 16)) << 32
    red, green, blue = _colors(word >> begin.to(tl.uint64))
    right = tl.where(begin > 16, behind >> 16, word >> (begin + 24).to(tl.uint64))
    red_2, green_2, blue_2 = _colors(right)
    return red, green, blue, red_2, green_2, blue_2


@triton.jit
def read_anywhere(image, y, x, height, width, mode, fill, mask):
    """Return red, green and blue at any positions; ``fill``: float32 ``[3]``, outside in mode 0."""
    red, green, blue = read(image, fold(y, height, mode), fold(x, width, mode), width, mask)
    if mode == 0:
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        red = tl.where(inside, red, cut(even(tl.load(fill))).to(tl.int32))
        green = tl.where(inside, green, cut(even(tl.load(fill + 1))).to(tl.int32))
        blue = tl.where(inside, blue, cut(even(tl.load(fill + 2))).to(tl.int32))
    return red, green, blue


@triton.jit
def _taps(out, step):
    """Return the lower position and the weight of the upper one, for output positions."""
    position = ((out.to(tl.float64) + 0.5) * step - 0.5).to(tl.float32)
    low = tl.floor(position)
    return low.to(tl.int32), position - low


@triton.jit
def _blend_bytes(c00, c01, c10, c11, left, right, above, below):
    """``_blend`` of ``ops/geometry.py``: weights are whole numbers of 11 bits."""
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
def _placed_line(row, y, x, how, scalar_from):
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
    vectors, which end before the column ``scalar_from``.
    ``inverse``: float32 ``[3, 3]``, from the result to the image; ``fill``: float32 ``[3]``.
    """
    mode = how & 7
    columns = _limited(_placed_line(inverse, y, x, how, scalar_from))
    rows = _limited(_placed_line(inverse + 3, y, x, how, scalar_from))
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


@triton.jit
def came_from(code, length, y, x, height, width):
    """Return where each pixel was before the symmetries in ``code``: these are undone."""
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


@triton.jit
def luminance(red, green, blue):
    """Return OpenCV's gray, 0 to 255."""
    return (red * 9798 + green * 19235 + blue * 3735 + 16384) >> 15


@triton.jit
def to_hsv(red, green, blue):
    """Return hue in 0 .. 179, saturation and value: ``hsv_bytes`` of ``ops/values.py``."""
    value = tl.maximum(tl.maximum(red, green), blue)
    spread = value - tl.minimum(tl.minimum(red, green), blue)
    by_value = (tl.div_rn(1044480.0, tl.maximum(value, 1).to(tl.float32)) + 0.5).to(tl.int32)
    by_spread = (tl.div_rn(122880.0, tl.maximum(spread, 1).to(tl.float32)) + 0.5).to(tl.int32)
    saturation = (spread * by_value + 2048) >> 12
    hue = tl.where(
        value == red,
        green - blue,
        tl.where(value == green, blue - red + 2 * spread, red - green + 4 * spread),
    )
    hue = (hue * by_spread + 2048) >> 12
    return tl.where(hue < 0, hue + 180, hue), saturation, value


@triton.jit
def _byte(x, truncated):
    x = x * 255.0
    return tl.where(truncated, x, even(x)).to(tl.int32)


@triton.jit
def _by_sector(sector, high, falling, rising, low):
    """Return red by the sixth of the colour circle; green and blue are two and four sixths on."""
    edge = tl.where(sector == 1, falling, tl.where(sector == 4, rising, low))
    return tl.where((sector == 0) | (sector == 5), high, edge)


@triton.jit
def to_rgb(hue, saturation, value, x, width, lanes):
    """Return red, green and blue: ``rgb_bytes`` of ``ops/values.py``."""
    sixths = hue.to(tl.float32) * 0.03333333507180214  # 6 / 180 in float32
    s = saturation.to(tl.float32) * 0.003921568859368563  # 1 / 255 in float32
    v = value.to(tl.float32) * 0.003921568859368563
    floor = tl.floor(sixths)
    part = sixths - floor
    sector = floor.to(tl.int32) % 6
    low = v * (1.0 - s)
    falling = v * (1.0 - s * part)
    rising = v * (1.0 - s * (1.0 - part))
    red = _by_sector(sector, v, falling, rising, low)
    green = _by_sector(tl.where(sector < 2, sector + 4, sector - 2), v, falling, rising, low)
    blue = _by_sector(tl.where(sector < 4, sector + 2, sector - 4), v, falling, rising, low)
    # Whole groups of OpenCV's lanes are truncated, the rest of a row is rounded.
    rest = tl.where(lanes > 0, width % tl.maximum(lanes, 1), width)
    truncated = (x < width - rest) | (lanes == 1)
    return _byte(red, truncated), _byte(green, truncated), _byte(blue, truncated)


@triton.jit
def _line(value, factor, offset):
    return cut(value.to(tl.float32) * factor + offset).to(tl.int32)


@triton.jit
def scaled(red, green, blue, factor, offset):
    """Return ``factor * value + offset``, cut off to bytes."""
    return _line(red, factor, offset), _line(green, factor, offset), _line(blue, factor, offset)


@triton.jit
def contrasted(red, green, blue, exact, total, pixels):
    """Change the contrast by a factor, around the mean of ``total`` luminance on ``pixels``."""
    mean = total.to(tl.float64) / pixels.to(tl.float64)
    offset = (mean * (1.0 - exact)).to(tl.float32)
    offset = tl.where(exact == 0.0, tl.floor(mean + 0.5).to(tl.float32), offset)
    return scaled(red, green, blue, exact.to(tl.float32), offset)


@triton.jit
def _mixed(value, factor, light):
    return cut(even(value.to(tl.float32) * factor + light)).to(tl.int32)


@triton.jit
def saturated(red, green, blue, factor):
    """Change the saturation by a factor."""
    light = luminance(red, green, blue).to(tl.float32) * (1.0 - factor)
    return _mixed(red, factor, light), _mixed(green, factor, light), _mixed(blue, factor, light)


@triton.jit
def looked_up(first, second, third, table):
    """Return the entries of three values in a table ``[256, 3]``, each from its own column."""
    first = tl.load(table + first * 3).to(tl.int32)
    second = tl.load(table + second * 3 + 1).to(tl.int32)
    third = tl.load(table + third * 3 + 2).to(tl.int32)
    return first, second, third


@triton.jit
def shifted_hsv(red, green, blue, table, x, width, lanes):
    """Change hue, saturation and value by a table ``[256, 3]``."""
    hue, saturation, value = to_hsv(red, green, blue)
    hue, saturation, value = looked_up(hue, saturation, value, table)
    return to_rgb(hue, saturation, value, x, width, lanes)


@triton.jit
def shifted_hue(red, green, blue, table, x, width, lanes):
    """Change the hue by a table ``[256]``."""
    hue, saturation, value = to_hsv(red, green, blue)
    hue = tl.load(table + hue).to(tl.int32)
    return to_rgb(hue, saturation, value, x, width, lanes)


_VARYING: Final = (
    *("code_at", "where_at", "border", "fill_at", "mean_at", "gain_at"),
    *("height", "width", "out_height", "out_width", "length"),
)
"""Integer arguments for which no kernel is compiled anew: Triton compiles others again if they are
1 or become multiples of 16, and these differ from batch to batch: places in the blob, sizes."""

_ANYWHERE: Final = ("source",)
"""Pointers of any alignment: a batch that is part of another one may begin at any address."""


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

    ``ENDS`` says what is written: 0 bytes, 1 normalized values, 2 values divided by a limit, which
    lies where normalized samples have their mean.

    At ``fill_at`` lie the float32 fill of a window, or the float64 steps of a resize.

    ``pixels`` is the height times the width of the result: where that is a multiple of 16, several
    values are written at once.

    With ``SUMS``, add up the luminance of the pixels as they are before a sample's CONTRAST, and
    write no pixels.
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
                red, green, blue = looked_up(red, green, blue, bytes_ + one)
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
                color = floats + three // 4
                red = tl.where(hidden, tl.load(color).to(tl.uint8).to(tl.int32), red)
                green = tl.where(hidden, tl.load(color + 1).to(tl.uint8).to(tl.int32), green)
                blue = tl.where(hidden, tl.load(color + 2).to(tl.uint8).to(tl.int32), blue)
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
"""Compiler options of the kernel: no product is fused with a sum."""

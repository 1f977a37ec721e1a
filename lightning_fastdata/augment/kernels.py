"""The kernels of fused runs, in Triton: CUDA, or Triton's own interpreter for tests.

The arithmetic is that of the operations in :mod:`lightning_fastdata.augment.ops`, operation for
operation, so that both give the same bytes: no fused multiply-add, halves to even by adding and
taking away ``1.5 * 2**23``, divisions that are rounded once.
"""

# ruff: noqa: N803, PLR0912, PLR0915 - Triton writes constants in capitals, and one kernel is one
# function.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

_EVEN = tl.constexpr(12582912.0)


@triton.jit
def _even(x):
    """Round float32 below 2**22 to whole numbers, halves to even."""
    return (x + _EVEN) - _EVEN


@triton.jit
def _taps(out, length, size):
    """Return the lower position and the weight of the upper one, for output positions."""
    step = 1.0 / (size.to(tl.float64) / length.to(tl.float64))
    position = ((out.to(tl.float64) + 0.5) * step - 0.5).to(tl.float32)
    low = tl.floor(position)
    return low.to(tl.int32), position - low


@triton.jit
def _read(image, y, x, width, mask):
    at = image + (y * width + x) * 3
    red = tl.load(at, mask, 0).to(tl.int32)
    green = tl.load(at + 1, mask, 0).to(tl.int32)
    blue = tl.load(at + 2, mask, 0).to(tl.int32)
    return red, green, blue


@triton.jit
def _across(one, other, left, right):
    return (one * left + other * right) >> 4


@triton.jit
def _down(upper, lower, above, below):
    return (((upper * above) >> 16) + ((lower * below) >> 16) + 2) >> 2


@triton.jit
def _load(
    image, where, y, x, width,
    out_height, out_width, mask, GEOMETRY: tl.constexpr,
):  # fmt: skip
    """Return red, green and blue of the run's input, at positions of its geometry's result."""
    if GEOMETRY == 0:
        red, green, blue = _read(image, y, x, width, mask)
    elif GEOMETRY == 1:
        top = tl.load(where)
        left = tl.load(where + 1)
        red, green, blue = _read(image, y + top, x + left, width, mask)
    else:
        left = tl.load(where)
        top = tl.load(where + 1)
        columns = tl.load(where + 2) - left
        rows = tl.load(where + 3) - top
        y0, down = _taps(y, rows, out_height)
        x0, across = _taps(x, columns, out_width)
        y1 = tl.minimum(tl.maximum(y0 + 1, 0), rows - 1)
        x1 = tl.minimum(tl.maximum(x0 + 1, 0), columns - 1)
        y0 = tl.minimum(tl.maximum(y0, 0), rows - 1)
        x0 = tl.minimum(tl.maximum(x0, 0), columns - 1)
        across = tl.where(x0 == x1, 0.0, across)
        right = _even(across * 2048.0).to(tl.int32)
        before = _even((1.0 - across) * 2048.0).to(tl.int32)
        below = _even(down * 2048.0).to(tl.int32)
        above = _even((1.0 - down) * 2048.0).to(tl.int32)
        r00, g00, b00 = _read(image, y0 + top, x0 + left, width, mask)
        r01, g01, b01 = _read(image, y0 + top, x1 + left, width, mask)
        r10, g10, b10 = _read(image, y1 + top, x0 + left, width, mask)
        r11, g11, b11 = _read(image, y1 + top, x1 + left, width, mask)
        red = _down(
            _across(r00, r01, before, right), _across(r10, r11, before, right), above, below
        )
        green = _down(
            _across(g00, g01, before, right), _across(g10, g11, before, right), above, below
        )
        blue = _down(
            _across(b00, b01, before, right), _across(b10, b11, before, right), above, below
        )
    return red, green, blue


@triton.jit
def _luminance(red, green, blue):
    return (red * 9798 + green * 19235 + blue * 3735 + 16384) >> 15


@triton.jit
def _cut(x):
    return tl.minimum(tl.maximum(x, 0.0), 255.0)


@triton.jit
def _to_hsv(red, green, blue):
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
    return tl.where(truncated, x, _even(x)).to(tl.int32)


@triton.jit
def _to_rgb(hue, saturation, value, x, width, lanes):
    sixths = hue.to(tl.float32) * 0.03333333507180214  # 6 / 180 in float32
    s = saturation.to(tl.float32) * 0.003921568859368563  # 1 / 255 in float32
    v = value.to(tl.float32) * 0.003921568859368563
    floor = tl.floor(sixths)
    part = sixths - floor
    sector = floor.to(tl.int32) % 6
    low = v * (1.0 - s)
    falling = v * (1.0 - s * part)
    rising = v * (1.0 - s * (1.0 - part))
    red = tl.where(
        (sector == 0) | (sector == 5),
        v,
        tl.where(sector == 1, falling, tl.where(sector == 4, rising, low)),
    )
    green = tl.where(
        (sector == 1) | (sector == 2),
        v,
        tl.where(sector == 3, falling, tl.where(sector == 0, rising, low)),
    )
    blue = tl.where(
        (sector == 3) | (sector == 4),
        v,
        tl.where(sector == 5, falling, tl.where(sector == 2, rising, low)),
    )
    # Whole groups of OpenCV's lanes are truncated, the rest of a row is rounded.
    rest = tl.where(lanes > 0, width % tl.maximum(lanes, 1), width)
    truncated = (x < width - rest) | (lanes == 1)
    return _byte(red, truncated), _byte(green, truncated), _byte(blue, truncated)


@triton.jit
def fused_kernel(
    source, target, bytes_, ints, floats, doubles, sums,
    code_at, where_at, mean_at, gain_at,
    height, width, out_height, out_width, length,
    GEOMETRY: tl.constexpr, SUMS: tl.constexpr, NORMALIZE: tl.constexpr,
    CHANNELS_FIRST: tl.constexpr, WHERE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Carry out a run on one block of output pixels of one sample.

    With ``SUMS``, add up the luminance of the pixels as a sample's CONTRAST finds them, and write
    no pixels.
    """
    sample = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < out_height * out_width
    y = at // out_width
    x = at % out_width
    code = ints + code_at + sample * length * 5
    # From the result back to where the pixel comes from: mirrors are their own inverse.
    for number in range(length):
        if tl.load(code + number * 5) == 1:
            axes = tl.load(code + number * 5 + 1)
            x = tl.where((axes & 1) != 0, out_width - 1 - x, x)
            y = tl.where((axes & 2) != 0, out_height - 1 - y, y)
    image = source + sample.to(tl.int64) * height * width * 3
    red, green, blue = _load(
        image, ints + where_at + sample * WHERE, y, x, width, out_height, out_width, mask,
        GEOMETRY,
    )  # fmt: skip
    running = True
    for number in range(length):
        step = code + number * 5
        kind = tl.load(step)
        one = tl.load(step + 1)
        two = tl.load(step + 2)
        if running:
            if kind == 1:
                x = tl.where((one & 1) != 0, out_width - 1 - x, x)
                y = tl.where((one & 2) != 0, out_height - 1 - y, y)
            elif kind == 2:
                table = bytes_ + one
                shared = two == 1
                red = tl.load(table + red * two).to(tl.int32)
                green = tl.load(table + green * two + tl.where(shared, 0, 1)).to(tl.int32)
                blue = tl.load(table + blue * two + tl.where(shared, 0, 2)).to(tl.int32)
            elif kind == 3:
                hue, saturation, value = _to_hsv(red, green, blue)
                table = bytes_ + one
                hue = tl.load(table + hue * 3).to(tl.int32)
                saturation = tl.load(table + saturation * 3 + 1).to(tl.int32)
                value = tl.load(table + value * 3 + 2).to(tl.int32)
                red, green, blue = _to_rgb(hue, saturation, value, x, out_width, two)
            elif kind == 4:
                factor = tl.load(doubles + one // 8).to(tl.float32)
                red = _cut(red.to(tl.float32) * factor).to(tl.int32)
                green = _cut(green.to(tl.float32) * factor).to(tl.int32)
                blue = _cut(blue.to(tl.float32) * factor).to(tl.int32)
            elif kind == 5:
                if SUMS:
                    light = tl.where(mask, _luminance(red, green, blue), 0)
                    tl.atomic_add(sums + sample, tl.sum(light, 0).to(tl.int64))
                    running = False
                else:
                    exact = tl.load(doubles + one // 8)
                    pixels = (out_height * out_width).to(tl.float64)
                    mean = tl.load(sums + sample).to(tl.float64) / pixels
                    offset = (mean * (1.0 - exact)).to(tl.float32)
                    offset = tl.where(exact == 0.0, tl.floor(mean + 0.5).to(tl.float32), offset)
                    factor = exact.to(tl.float32)
                    red = _cut(red.to(tl.float32) * factor + offset).to(tl.int32)
                    green = _cut(green.to(tl.float32) * factor + offset).to(tl.int32)
                    blue = _cut(blue.to(tl.float32) * factor + offset).to(tl.int32)
            elif kind == 6:
                factor = tl.load(doubles + one // 8).to(tl.float32)
                light = _luminance(red, green, blue).to(tl.float32) * (1.0 - factor)
                red = _cut(_even(red.to(tl.float32) * factor + light)).to(tl.int32)
                green = _cut(_even(green.to(tl.float32) * factor + light)).to(tl.int32)
                blue = _cut(_even(blue.to(tl.float32) * factor + light)).to(tl.int32)
            elif kind == 7:
                hue, saturation, value = _to_hsv(red, green, blue)
                hue = tl.load(bytes_ + one + hue).to(tl.int32)
                red, green, blue = _to_rgb(hue, saturation, value, x, out_width, two)
            elif kind == 8:
                red = _luminance(red, green, blue)
                green = red
                blue = red
            elif kind == 9:
                covered = mask & False
                for hole in range(two):
                    corner = ints + one // 4 + hole * 4
                    inside = (x >= tl.load(corner)) & (y >= tl.load(corner + 1))
                    inside = inside & (x < tl.load(corner + 2)) & (y < tl.load(corner + 3))
                    covered = covered | inside
                fill = floats + tl.load(step + 3) // 4
                many = tl.load(step + 4) > 1
                red = tl.where(covered, tl.load(fill).to(tl.uint8).to(tl.int32), red)
                second = tl.load(fill + tl.where(many, 1, 0)).to(tl.uint8).to(tl.int32)
                third = tl.load(fill + tl.where(many, 2, 0)).to(tl.uint8).to(tl.int32)
                green = tl.where(covered, second, green)
                blue = tl.where(covered, third, blue)
    if not SUMS:
        out = target + sample.to(tl.int64) * out_height * out_width * 3
        if CHANNELS_FIRST:
            first = out + at
            between = out_height * out_width
        else:
            first = out + at * 3
            between = out_height * 0 + 1
        if NORMALIZE:
            mean = floats + mean_at + sample * 3
            gain = floats + gain_at + sample * 3
            tl.store(first, (red.to(tl.float32) - tl.load(mean)) * tl.load(gain), mask)
            tl.store(
                first + between,
                (green.to(tl.float32) - tl.load(mean + 1)) * tl.load(gain + 1),
                mask,
            )
            tl.store(
                first + 2 * between,
                (blue.to(tl.float32) - tl.load(mean + 2)) * tl.load(gain + 2),
                mask,
            )
        else:
            tl.store(first, red.to(tl.uint8), mask)
            tl.store(first + between, green.to(tl.uint8), mask)
            tl.store(first + 2 * between, blue.to(tl.uint8), mask)

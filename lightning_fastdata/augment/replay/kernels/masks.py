"""The kernel of a run on masks: whole values are moved or replaced, never computed."""

# ruff: noqa: N803, SIM102 - Triton writes constants in capitals, and decides by them first.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from lightning_fastdata.augment.replay.kernels.moves import came_from, covered, went_to
from lightning_fastdata.augment.replay.kernels.numbers import cut, even, fold, part
from lightning_fastdata.augment.replay.kernels.resize import nearest
from lightning_fastdata.augment.replay.kernels.warp import nearest_warped


@triton.jit
def _whole(fill, KIND: tl.constexpr):
    """Return a fill as an integer: the nearest, halves to even; bytes are cut to their range."""
    rounded = tl.where(tl.abs(fill) < 4194304.0, even(fill), fill)
    if tl.uint8 == KIND:
        rounded = cut(rounded)
    return rounded.to(KIND)


_VARYING: Final = (
    *("code_at", "where_at", "border", "fill_at"),
    *("height", "width", "out_height", "out_width", "length"),
)
"""As those of ``fused_kernel``."""


@triton.jit(do_not_specialize=_VARYING)
def mask_kernel(
    source, target, ints, floats, code_at, where_at, border, fill_at,
    height, width, out_height, out_width, length, channels, values,
    GEOMETRY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Carry out a run on one block of values of one mask.

    ``GEOMETRY`` is that of ``fused_kernel``; a resize takes the nearest pixel. ``values`` is the
    number of those of the result: its height, times its width, times ``channels``.
    """
    sample, at = part(values, BLOCK)
    inside = at < values
    channel = at % channels
    pixel = at // channels
    kind = target.dtype.element_ty
    code = ints + code_at + sample * length * 5
    y, x = came_from(code, length, pixel // out_width, pixel % out_width, out_height, out_width)
    from_y = y
    from_x = x
    mode = border * 0 + 1
    # Masks may have more channels than there are fills: the last stands for the rest.
    fills = floats + tl.minimum(channel, 3)
    if GEOMETRY == 1:
        corner = ints + where_at + sample * 2
        from_y = y + tl.load(corner)
        from_x = x + tl.load(corner + 1)
        mode = border
        fills = fills + fill_at + sample * 4
    elif GEOMETRY == 2:
        box = ints + where_at + sample * 4
        from_y, from_x = nearest(box, y, x, out_height, out_width)
    elif GEOMETRY == 3:
        if tl.load(code) == 12:
            inverse = floats + tl.load(code + 1) // 4
            from_y, from_x = nearest_warped(inverse, tl.load(code + 2), y, x)
            mode = tl.load(code + 2) & 7
            fills = fills + tl.load(code + 3) // 4
    row = fold(from_y, height, mode)
    column = fold(from_x, width, mode)
    image = source + sample.to(tl.int64) * height * width * channels
    value = tl.load(image + (row * width + column) * channels + channel, inside, 0)
    if mode == 0:
        known = (from_y == row) & (from_x == column)
        value = tl.where(known, value, _whole(tl.load(fills, inside, 0.0), kind))
    for number in range(length):
        step = code + number * 5
        what = tl.load(step)
        one = tl.load(step + 1)
        if what == 1:
            y, x = went_to(one, y, x, out_height, out_width)
        elif what == 9:
            hidden = covered(ints + one // 4, tl.load(step + 2), y, x, inside)
            last = tl.load(step + 4) - 1
            fill = tl.load(floats + tl.load(step + 3) // 4 + tl.minimum(channel, last))
            value = tl.where(hidden, fill.to(kind), value)
    out = target + sample.to(tl.int64) * values
    tl.store(out + at, value, inside)

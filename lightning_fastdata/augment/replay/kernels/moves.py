"""Where symmetries take pixels, and which pixels rectangles cover."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


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

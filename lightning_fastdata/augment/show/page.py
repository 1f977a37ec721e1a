"""The page that shows draws of a pipeline: a row for each, both ways beside the original."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

import numpy as np

from lightning_fastdata.augment.show.pictures import DIFFERENCE_GAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image

    from lightning_fastdata.augment.show.pictures import ShownDraw

_CELL_PX: Final = 240
_GAP_PX: Final = 8
_LINE_PX: Final = 18
_FONT_PX: Final = 13
_LETTER_PX: Final = 6.6
_OUTLINE: Final = (255, 0, 255)
_HEADS: Final = ("original", "Albumentations", "ours", f"difference, times {DIFFERENCE_GAIN}")
_WIDTH_PX: Final = len(_HEADS) * (_CELL_PX + _GAP_PX) + _GAP_PX


def draw_grid(
    original: np.ndarray,
    shown: Sequence[ShownDraw],
    *,
    mask: np.ndarray | None = None,
    note: str = "",
) -> Image:
    """Return a picture with one row per draw: original, Albumentations', ours, and difference.

    Args:
        original: uint8 or float32 in [0, 1] ``[H, W, C]``.
        shown: the draws. Masks are drawn as outlines.
        mask: of the original, ``[H, W]``; None: there is none.
        note: text below all rows.
    """
    from PIL import Image, ImageDraw, ImageFont

    if original.dtype != np.uint8:
        original = (original * 255).round().clip(0, 255).astype(np.uint8)
    original = original[..., :3] if original.shape[2] >= 3 else original[..., :1].repeat(3, 2)
    rows = [_row(original, mask, one) for one in shown]
    texts = [_wrapped(f"{number}: {one.caption()}") for number, one in enumerate(shown)]
    cell_heights = [max(cell.height for cell in row) for row in rows]
    below = _wrapped(note)
    lines = 1 + sum(map(len, texts)) + len(below)
    height = sum(cell_heights) + lines * _LINE_PX + (2 * len(rows) + 2) * _GAP_PX
    page = Image.new("RGB", (_WIDTH_PX, height), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(_FONT_PX)

    def write(lines: Sequence[str], top: int) -> int:
        for line in lines:
            pen.text((_GAP_PX, top), line, fill="black", font=font)
            top += _LINE_PX
        return top

    for column, head in enumerate(_HEADS):
        pen.text((_left(column), 4), head, fill="black", font=font)
    top = _LINE_PX + _GAP_PX
    for row, text, tall in zip(rows, texts, cell_heights, strict=True):
        for column, cell in enumerate(row):
            page.paste(cell, (_left(column), top))
        top = write(text, top + tall + _GAP_PX // 2) + _GAP_PX
    write(below, top)
    return page


def _row(original: np.ndarray, mask: np.ndarray | None, one: ShownDraw) -> list[Image]:
    theirs, ours = one.masks or (None, None)
    return [
        _cell(original, mask),
        _cell(one.theirs, theirs),
        _cell(one.ours, ours),
        _cell(one.difference, None),
    ]


def _cell(picture: np.ndarray, mask: np.ndarray | None) -> Image:
    """Return a picture in the size of a cell, with the outlines of its mask."""
    from PIL import Image

    scale = _CELL_PX / max(picture.shape[:2])
    wide, tall = (max(1, round(picture.shape[axis] * scale)) for axis in (1, 0))
    cell = Image.fromarray(picture).resize((wide, tall))
    if mask is None:
        return cell
    rows, columns = (
        (np.arange(count) + 0.5) * given // count
        for count, given in zip((tall, wide), mask.shape[:2], strict=True)
    )
    small = mask[rows.astype(np.int64)[:, None], columns.astype(np.int64)[None]]
    pixels = np.array(cell)
    pixels[_outline(small if small.ndim == 2 else small[..., 0])] = _OUTLINE
    return Image.fromarray(pixels)


def _outline(mask: np.ndarray) -> np.ndarray:
    """Return where a pixel has another value than the one beside or below it."""
    edge = np.zeros(mask.shape, bool)
    beside, below = mask[:, 1:] != mask[:, :-1], mask[1:] != mask[:-1]
    edge[:, 1:] |= beside
    edge[:, :-1] |= beside
    edge[1:] |= below
    edge[:-1] |= below
    return edge


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, int((_WIDTH_PX - 2 * _GAP_PX) / _LETTER_PX))


def _left(column: int) -> int:
    return _GAP_PX + column * (_CELL_PX + _GAP_PX)

"""Mosaic: four samples around one point, in the size of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Final

import torch
from torch import Tensor

from lightning_fastdata.augment.mixing.step import (
    Parts,
    check_share,
    joined,
    mixed_labels,
    partners,
    per_sample,
)
from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    import numpy as np

_WHOLE: Final = -1
"""In the place of a quarter: the sample is no mosaic."""


@dataclass(frozen=True)
class Mosaic:
    """Put a sample and three partners around a point, each with a corner of theirs at that point.

    After Bochkovskiy, Wang and Liao, "YOLOv4: optimal speed and accuracy of object detection"
    (2020), in the size of the images: nothing is scaled, so what is small stays as it is, and the
    parts beyond the edge are cut off. Of the sample itself, the lower right part comes to lie upper
    left of the point.

    Args:
        p: probability that a sample becomes a mosaic.
        middle: the point is drawn uniformly between these parts of height and width.
        min_visibility: boxes of which less than this part of the area is left are dropped.

    Raises:
        OptionsError: a value is outside 0 to 1, or ``middle`` is not in ascending order.
    """

    p: float = 1.0
    middle: tuple[float, float] = (0.25, 0.75)
    min_visibility: float = 0.1

    sees_others: ClassVar[bool] = True
    """Samples see each other."""

    def __post_init__(self) -> None:
        check_share("p", self.p)
        check_share("min_visibility", self.min_visibility)
        low, high = self.middle
        if not 0 <= low <= high <= 1:
            raise OptionsError(f"middle is {self.middle}; give two numbers, 0 <= low <= high <= 1.")

    def count(self) -> int:
        """Return 3: whether, and where the point is."""
        return 3

    def draw(self, generator: np.random.Generator) -> list[float]:
        """Return whether, and the point in parts of height and width."""
        return [generator.random(), *generator.uniform(*self.middle, 2)]

    def mix(self, parts: Parts, numbers: Tensor, order: Tensor) -> Parts:
        """Return the batch of mosaics; see :class:`MixStep`."""
        height, width = parts.size
        is_mosaic = numbers[:, 0] < self.p
        y = (numbers[:, 1] * height).round().long()
        x = (numbers[:, 2] * width).round().long()
        others = tuple(partners(order, distance) for distance in (1, 2, 3))
        below = torch.arange(height, device=y.device) >= y[:, None]
        beside = torch.arange(width, device=x.device) >= x[:, None]
        own = torch.arange(len(order), device=order.device)
        # Who is at each pixel: 0 is upper left, 1 upper right, 2 lower left, 3 lower right.
        quarter = below.long()[:, :, None] * 2 + beside.long()[:, None, :]
        whose = torch.stack([own, *others]).T.gather(1, quarter.flatten(1)).view(quarter.shape)
        # A corner at the point: in each quarter the image is shifted around by the same amount.
        rows = (torch.arange(height, device=y.device) - y[:, None]).remainder(height)
        columns = (torch.arange(width, device=x.device) - x[:, None]).remainder(width)

        def laid(pixels: Tensor) -> Tensor:
            last = pixels.movedim(1, -1) if pixels.ndim == 4 else pixels
            out = last[whose, rows[:, :, None], columns[:, None, :]]
            out = torch.where(per_sample(is_mosaic, out), out, last)
            return out.movedim(-1, 1).contiguous() if pixels.ndim == 4 else out

        sides = (
            torch.stack([y, height - y], 1)[:, :, None] * torch.stack([x, width - x], 1)[:, None]
        )
        shares = sides.flatten(1).double() / (height * width)
        only_own = (torch.arange(4, device=y.device) == 0).double()
        shares = torch.where(is_mosaic[:, None], shares, only_own)
        changed = replace(
            parts,
            image=laid(parts.image),
            mask=None if parts.mask is None else laid(parts.mask),
            labels=mixed_labels(parts, shares, others),
        )
        if parts.boxes is None:
            return changed
        sources = torch.stack([own, *others], 1)
        return self._lay_boxes(changed, is_mosaic, torch.stack([y, x], 1), sources)

    def _lay_boxes(self, parts: Parts, is_mosaic: Tensor, point: Tensor, sources: Tensor) -> Parts:
        given = parts.boxes or ()
        counts = [len(boxes) for boxes in given]
        starts = [0, *accumulate(counts)]
        # The host looks at the device twice in all: for who is where, and for what is left of it.
        plan = torch.cat([is_mosaic.long()[:, None], sources], 1).tolist()
        pieces = [
            (row, quarter if changes else _WHOLE, source)
            for row, (changes, *whose) in enumerate(plan)
            for quarter, source in enumerate(whose if changes else whose[:1])
        ]
        table = [
            (row, quarter, number)
            for row, quarter, source in pieces
            for number in range(starts[source], starts[source + 1])
        ]
        every = joined(given).reshape(-1, 4)
        rows, quarters, taken = (
            torch.tensor(table, dtype=torch.long).reshape(-1, 3).to(every.device).unbind(1)
        )
        boxes = every[taken]
        moved, kept = move_boxes(boxes, quarters, point.to(every.device)[rows], parts.size)
        whole = quarters == _WHOLE
        seen = whole | ((kept >= self.min_visibility) & (kept > 0))
        left = [number for number, one in enumerate(seen.tolist()) if one]
        sizes = [0] * len(given)
        for number in left:
            sizes[table[number][0]] += 1
        chosen = torch.tensor(left, dtype=torch.long, device=every.device)
        laid = torch.where(whole[:, None], boxes, moved)[chosen]
        classes = parts.classes
        if classes is not None:
            told = joined(classes)
            kept_of = told[taken.to(told.device)][chosen.to(told.device)]
            classes = torch.split(kept_of, sizes)
        return replace(parts, boxes=torch.split(laid, sizes), classes=classes)


def move_boxes(
    boxes: Tensor, quarter: Tensor, point: Tensor, size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return boxes of images after these were laid in quarters of mosaics, cut to the quarters.

    Args:
        boxes: ``[k, 4]`` of left, top, right, bottom in pixels.
        quarter: of each box, int64 ``[k]``: 0 upper left, 1 upper right, 2 lower left, 3 lower
            right.
        point: of each box, int64 ``[k, 2]``: row and column of the point in the middle.
        size: height and width of the images.

    Returns:
        Boxes ``[k, 4]``, and the part of each one's area that is left, float ``[k]``.
    """
    (y, x), (height, width) = point.unbind(1), size
    lower, right = quarter >= 2, quarter % 2 == 1
    x0, y0, x1, y1 = boxes.unbind(1)
    across = _moved((x0, x1), right, x, width)
    down = _moved((y0, y1), lower, y, height)
    cut = torch.stack([across[0], down[0], across[1], down[1]], 1).to(boxes.dtype)
    before, after = (
        ((one[:, 2] - one[:, 0]) * (one[:, 3] - one[:, 1])).float() for one in (boxes, cut)
    )
    return cut, after / before.clamp(min=1e-9)


def _moved(
    edges: tuple[Tensor, Tensor], behind: Tensor, point: Tensor, length: int
) -> list[Tensor]:
    """Return edges along one side, behind the point or before it, and not beyond."""
    shift = torch.where(behind, point, point - length)
    first = torch.where(behind, point, 0)
    last = torch.where(behind, length, point)
    return [(edge + shift).maximum(first).minimum(last) for edge in edges]

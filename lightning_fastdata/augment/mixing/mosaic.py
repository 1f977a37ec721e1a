"""Mosaic: four samples around one point, in the size of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from lightning_fastdata.augment.mixing.parts import (
    Parts,
    check_share,
    mixed_labels,
    partners,
    per_sample,
)
from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    import numpy as np


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

    def mix(self, parts: Parts, numbers: torch.Tensor, order: torch.Tensor) -> Parts:
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

        def laid(pixels: torch.Tensor) -> torch.Tensor:
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

    def _lay_boxes(
        self, parts: Parts, is_mosaic: torch.Tensor, point: torch.Tensor, sources: torch.Tensor
    ) -> Parts:
        height, width = parts.size
        given = parts.boxes or ()
        boxes, classes = [], []
        # One look at the device for all: how many boxes are left is not known before.
        plan = zip(is_mosaic.tolist(), point.tolist(), sources.tolist(), strict=True)
        for row, (changes, (y, x), whose) in enumerate(plan):
            if not changes:
                boxes.append(given[row])
                classes.append(None if parts.classes is None else parts.classes[row])
                continue
            laid = [
                move_boxes(given[source], quarter, (y, x), (height, width))
                for quarter, source in enumerate(whose)
            ]
            seen = [kept >= self.min_visibility for _, kept in laid]
            seen = [one & (kept > 0) for one, (_, kept) in zip(seen, laid, strict=True)]
            boxes.append(torch.cat([one[keep] for (one, _), keep in zip(laid, seen, strict=True)]))
            if parts.classes is not None:
                own = [parts.classes[source] for source in whose]
                classes.append(torch.cat([c[keep] for c, keep in zip(own, seen, strict=True)]))
        told = None if parts.classes is None else tuple(c for c in classes if c is not None)
        return replace(parts, boxes=tuple(boxes), classes=told)


def move_boxes(
    boxes: torch.Tensor, quarter: int, point: tuple[int, int], size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return boxes of an image after it was laid in one quarter of a mosaic, cut to the quarter.

    Args:
        boxes: ``[k, 4]`` of left, top, right, bottom in pixels.
        quarter: 0 upper left, 1 upper right, 2 lower left, 3 lower right.
        point: row and column of the point in the middle.
        size: height and width of the images.

    Returns:
        Boxes ``[k, 4]``, and the part of each one's area that is left, float ``[k]``.
    """
    (y, x), (height, width) = point, size
    lower, right = quarter >= 2, quarter % 2 == 1
    shift_y, shift_x = (y if lower else y - height), (x if right else x - width)
    top, bottom = (y, height) if lower else (0, y)
    first, last = (x, width) if right else (0, x)
    x0, y0, x1, y1 = boxes.unbind(1)
    across = [(edge + shift_x).clamp(first, last) for edge in (x0, x1)]
    down = [(edge + shift_y).clamp(top, bottom) for edge in (y0, y1)]
    cut = torch.stack([across[0], down[0], across[1], down[1]], 1)
    before, after = (
        ((one[:, 2] - one[:, 0]) * (one[:, 3] - one[:, 1])).float() for one in (boxes, cut)
    )
    return cut, after / before.clamp(min=1e-9)

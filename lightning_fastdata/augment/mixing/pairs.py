"""MixUp and CutMix: two samples in one, and their labels in the same shares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from lightning_fastdata.augment.mixing.parts import (
    MixStep,
    Parts,
    check_positive,
    check_share,
    joined,
    mixed_labels,
    partners,
    per_sample,
    with_pixels,
)
from lightning_fastdata.errors import BatchError, OptionsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


def _check_alpha_and_p(alpha: float, p: float) -> None:
    check_positive("alpha", alpha)
    check_share("p", p)


@dataclass(frozen=True)
class MixUp:
    """Blend each sample with a partner: ``share * own + (1 - share) * partner``.

    After Zhang, Cisse, Dauphin and Lopez-Paz, "mixup: beyond empirical risk minimization" (ICLR
    2018). uint8 images are rounded; float images behind ``Normalize`` are not. A blended sample has
    the boxes of both, after Zhang, He et al., "Bag of freebies for training object detection neural
    networks" (2019), who use ``alpha=1.5``: with a small one, most boxes of one of the two are
    around something that is hardly visible.

    Args:
        alpha: the share is drawn from Beta(alpha, alpha) for each sample.
        p: probability that a sample is blended.

    Raises:
        OptionsError: ``alpha`` is not positive, or ``p`` is no probability.
    """

    alpha: float = 0.2
    p: float = 1.0

    sees_others: ClassVar[bool] = True
    """Samples see each other."""

    def __post_init__(self) -> None:
        _check_alpha_and_p(self.alpha, self.p)

    def count(self) -> int:
        """Return 2: whether, and the share."""
        return 2

    def draw(self, generator: np.random.Generator) -> list[float]:
        """Return whether (a uniform number) and the share."""
        return [generator.random(), generator.beta(self.alpha, self.alpha)]

    def mix(self, parts: Parts, numbers: torch.Tensor, order: torch.Tensor) -> Parts:
        """Return the blended batch; see :class:`MixStep`.

        Raises:
            BatchError: the batch has masks, which cannot be blended.
        """
        if parts.mask is not None:
            raise BatchError(
                "MixUp blends images, and this batch has masks of pixels, which cannot be blended. "
                "Use CutMix or Mosaic for masks."
            )
        other = partners(order)
        blends = numbers[:, 0] < self.p
        share = torch.where(blends, numbers[:, 1], 1.0)
        given = parts.image.dtype
        # Half precision would round the shares, so that they no longer add up to 1.
        wide = torch.float64 if given == torch.float64 else torch.float32
        image = parts.image.to(wide)
        own, rest = (per_sample(one, image).to(wide) for one in (share, 1 - share))
        image = image[other] * rest + image * own
        image = (image if given.is_floating_point else image.round()).to(given)
        labels = mixed_labels(parts, torch.stack([share, 1 - share], 1), (other,))
        mixed = replace(parts, image=image, labels=labels)
        return mixed if parts.boxes is None else _with_boxes_of_both(mixed, blends, other)


def _with_boxes_of_both(parts: Parts, blends: torch.Tensor, other: torch.Tensor) -> Parts:
    """Return a batch in which blended samples have the boxes of their partners, too."""
    # One look at the device for all: it decides how many boxes there are. Who is alone in its
    # batch is its own partner, and has its boxes already.
    pairs = enumerate(zip(blends.tolist(), other.tolist(), strict=True))
    sources = [(row, met) if blended and met != row else (row,) for row, (blended, met) in pairs]

    def of_both(field: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(joined([field[source] for source in own]) for own in sources)

    classes = None if parts.classes is None else of_both(parts.classes)
    return replace(parts, boxes=of_both(parts.boxes or ()), classes=classes)


@dataclass(frozen=True)
class CutMix:
    """Replace a rectangle of each sample by that of a partner; labels by the shares of the area.

    After Yun et al., "CutMix: regularization strategy to train strong classifiers with localizable
    features" (ICCV 2019), with torchvision's rectangle: its middle is anywhere in the image, and
    what would be outside is cut off.

    Args:
        alpha: the share of the area that is kept is drawn from Beta(alpha, alpha) for each sample.
        p: probability that a sample gets a rectangle.

    Raises:
        OptionsError: ``alpha`` is not positive, or ``p`` is no probability.
    """

    alpha: float = 1.0
    p: float = 1.0

    sees_others: ClassVar[bool] = True
    """Samples see each other."""

    def __post_init__(self) -> None:
        _check_alpha_and_p(self.alpha, self.p)

    def count(self) -> int:
        """Return 4: whether, the share, and the middle."""
        return 4

    def draw(self, generator: np.random.Generator) -> list[float]:
        """Return whether, the share, and where the middle is in parts of the sides."""
        share = generator.beta(self.alpha, self.alpha)
        return [generator.random(), share, *generator.random(2)]

    def mix(self, parts: Parts, numbers: torch.Tensor, order: torch.Tensor) -> Parts:
        """Return the batch with rectangles; see :class:`MixStep`.

        Raises:
            BatchError: the batch has boxes.
        """
        if parts.boxes is not None:
            raise BatchError("CutMix cannot cut boxes. Use Mosaic or MixUp for batches with boxes.")
        height, width = parts.size
        left, top, right, bottom = cut_boxes(numbers, height, width, p=self.p)
        y = torch.arange(height, device=numbers.device)
        x = torch.arange(width, device=numbers.device)
        rows = (y >= top[:, None]) & (y < bottom[:, None])
        columns = (x >= left[:, None]) & (x < right[:, None])
        other = partners(order)
        kept = 1 - ((right - left) * (bottom - top)).double() / (height * width)
        labels = mixed_labels(parts, torch.stack([kept, 1 - kept], 1), (other,))
        cut = with_pixels(parts, rows[:, :, None] & columns[:, None, :], other)
        return replace(cut, labels=labels)


def cut_boxes(
    numbers: torch.Tensor, height: int, width: int, *, p: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return left, top, right and bottom of the rectangles that CutMix cuts, int64 ``[n]`` each.

    Args:
        numbers: what :class:`CutMix` drew, float64 ``[n, 4]``.
        height: of the images in pixels.
        width: of the images in pixels.
        p: probability of a rectangle; without one all four are equal.
    """
    whether, share, across, down = numbers.unbind(1)
    half = torch.where(whether < p, 0.5 * (1 - share).clamp(min=0).sqrt(), 0.0)
    x, y = (across * width).long(), (down * height).long()
    half_width, half_height = (half * width).long(), (half * height).long()
    left, right = (x - half_width).clamp(min=0), (x + half_width).clamp(max=width)
    top, bottom = (y - half_height).clamp(min=0), (y + half_height).clamp(max=height)
    return left, top, right, bottom


class OneOfMixes:
    """Use one of several ways for each sample, chosen by chance.

    Args:
        steps: ways to mix, such as ``MixUp(0.8), CutMix()``.
        weights: how often each is chosen, in any unit; equally often by default.
        p: probability that a sample is mixed at all.

    Raises:
        OptionsError: there are not as many weights as ways, or they are not positive.
    """

    def __init__(
        self, *steps: MixStep, weights: Sequence[float] | None = None, p: float = 1.0
    ) -> None:
        given = [1.0] * len(steps) if weights is None else [float(weight) for weight in weights]
        if not steps or len(given) != len(steps):
            raise OptionsError(
                f"OneOfMixes got {len(steps)} ways to mix and {len(given)} weights; give one or "
                "more ways, and a weight for each."
            )
        for weight in given:
            check_positive("a weight", weight)
        check_share("p", p)
        self.steps, self.p = steps, p
        self._bounds = [p * sum(given[: end + 1]) / sum(given) for end in range(len(given))]

    sees_others: ClassVar[bool] = True
    """Samples see each other."""

    def __repr__(self) -> str:
        return f"OneOfMixes({', '.join(map(repr, self.steps))}, p={self.p})"

    def count(self) -> int:
        """Return the numbers of all ways, and one to choose between them."""
        return 1 + sum(step.count() for step in self.steps)

    def draw(self, generator: np.random.Generator) -> list[float]:
        """Return the number that chooses, and those of all ways."""
        numbers = [generator.random()]
        for step in self.steps:
            numbers += step.draw(generator)
        return numbers

    def mix(self, parts: Parts, numbers: torch.Tensor, order: torch.Tensor) -> Parts:
        """Return the batch with each sample mixed in its way; see :class:`MixStep`.

        Raises:
            BatchError: the batch has boxes or masks, and a way does not take them.
        """
        out, start, low = parts, 1, 0.0
        for step, high in zip(self.steps, self._bounds, strict=True):
            own = numbers[:, start : start + step.count()]
            chosen = (numbers[:, 0] >= low) & (numbers[:, 0] < high)
            # Every way starts from the batch as it came, so partners are whole.
            out = _where(chosen, step.mix(parts, own, order), out)
            start, low = start + step.count(), high
        return out


def _where(chosen: torch.Tensor, new: Parts, old: Parts) -> Parts:
    def pick(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
        if one is None or other is None:
            return None
        return torch.where(per_sample(chosen, one), one, other)

    def pick_each(
        one: tuple[torch.Tensor, ...] | None, other: tuple[torch.Tensor, ...] | None
    ) -> tuple[torch.Tensor, ...] | None:
        if one is None or other is None:
            return None
        return tuple(a if yes else b for yes, a, b in zip(rows, one, other, strict=True))

    # Boxes differ in number, so the host has to know whose they are.
    rows = [] if old.boxes is None else chosen.tolist()
    return replace(
        old,
        image=torch.where(per_sample(chosen, new.image), new.image, old.image),
        labels=pick(new.labels, old.labels),
        mask=pick(new.mask, old.mask),
        boxes=pick_each(new.boxes, old.boxes),
        classes=pick_each(new.classes, old.classes),
    )

"""MixUp, CutMix and RandomErasing: steps that leave the pixels of an image where they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import torch
from torch import Tensor

from lightning_fastdata.augment.mixing.step import (
    Parts,
    check_positive,
    check_share,
    joined,
    mixed_labels,
    partners,
    per_sample,
    with_pixels,
)
from lightning_fastdata.augment.ops.splitmix import normal, uniform
from lightning_fastdata.errors import BatchError, OptionsError

if TYPE_CHECKING:
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

    def mix(self, parts: Parts, numbers: Tensor, order: Tensor) -> Parts:
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


def _with_boxes_of_both(parts: Parts, blends: Tensor, other: Tensor) -> Parts:
    """Return a batch in which blended samples have the boxes of their partners, too."""
    # One look at the device for all: it decides how many boxes there are. Who is alone in its
    # batch is its own partner, and has its boxes already.
    pairs = enumerate(zip(blends.tolist(), other.tolist(), strict=True))
    sources = [(row, met) if blended and met != row else (row,) for row, (blended, met) in pairs]

    def of_both(field: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
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

    def mix(self, parts: Parts, numbers: Tensor, order: Tensor) -> Parts:
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
    numbers: Tensor, height: int, width: int, *, p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


_ATTEMPTS: Final = 10


@dataclass(frozen=True)
class RandomErasing:
    """Paint over a rectangle of each image; labels, masks and boxes stay.

    After Zhong et al., "Random erasing data augmentation" (AAAI 2020), with torchvision's rule:
    area and shape are drawn up to ten times until the rectangle fits, and if none does, nothing is
    painted over.

    Args:
        p: probability that an image loses a rectangle.
        scale: its part of the area, drawn uniformly between these.
        ratio: its height over its width, drawn uniformly in the logarithm between these.
        value: what is painted: a number, one number per channel, or ``"random"``: for float images
            a normal number for each value, for uint8 a uniform one.

    Raises:
        OptionsError: a value is out of its range.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | tuple[float, ...] | Literal["random"] = 0.0

    sees_others: ClassVar[bool] = False
    """Every image is changed by itself."""

    def __post_init__(self) -> None:
        check_share("p", self.p)
        if not 0 <= self.scale[0] <= self.scale[1] <= 1:
            raise OptionsError(f"scale is {self.scale}; give two parts, 0 <= low <= high <= 1.")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise OptionsError(f"ratio is {self.ratio}; give two numbers, 0 < low <= high.")
        if isinstance(self.value, str) and self.value != "random":
            raise OptionsError(f'value is {self.value!r}; give numbers, or "random".')

    def count(self) -> int:
        """Return whether, area and ratio of each attempt, the corner, and a seed of two words."""
        return 1 + 2 * _ATTEMPTS + 2 + 2

    def draw(self, generator: np.random.Generator) -> list[float]:
        """Return the numbers in that order; areas and ratios are the final ones."""
        low, high = (math.log(bound) for bound in self.ratio)
        return [
            generator.random(),
            *generator.uniform(*self.scale, _ATTEMPTS),
            *(math.exp(value) for value in generator.uniform(low, high, _ATTEMPTS)),
            *generator.random(2),
            # Whole numbers that float64 holds exactly.
            *(float(word) for word in generator.integers(0, 2**53, 2)),
        ]

    def mix(self, parts: Parts, numbers: Tensor, order: Tensor) -> Parts:  # noqa: ARG002
        """Return the batch with rectangles painted over; see :class:`MixStep`.

        Raises:
            BatchError: there are not as many values as channels.
        """
        height, width = parts.size
        top, left, tall, wide = erased_boxes(numbers, height, width, p=self.p)
        y = torch.arange(height, device=numbers.device) - top[:, None]
        x = torch.arange(width, device=numbers.device) - left[:, None]
        rows, columns = (y >= 0) & (y < tall[:, None]), (x >= 0) & (x < wide[:, None])
        inside = (rows[:, :, None] & columns[:, None, :])[:, None]
        paint = self._paint(parts.image, numbers[:, -2:].long())
        return replace(parts, image=torch.where(inside, paint, parts.image))

    def _paint(self, image: Tensor, seed: Tensor) -> Tensor:
        if self.value == "random":
            count = image[0].numel()
            if image.is_floating_point():
                return normal(seed, count).view(image.shape).to(image.dtype)
            return (uniform(seed, count) * 256).view(image.shape).to(image.dtype)
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        if len(values) not in (1, image.shape[1]):
            raise BatchError(
                f"RandomErasing(value={self.value}) has {len(values)} values, but the images have "
                f"{image.shape[1]} channels."
            )
        # Filled there: a copy from here would wait for the device.
        return torch.stack([image.new_full((1, 1), value) for value in values])[None]


def erased_boxes(
    numbers: Tensor, height: int, width: int, *, p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return top, left, height and width of what is painted over, int64 ``[n]`` each.

    Args:
        numbers: what :class:`RandomErasing` drew, float64 ``[n, 25]``.
        height: of the images in pixels.
        width: of the images in pixels.
        p: probability of a rectangle; without one its height and width are 0.
    """
    area = numbers[:, 1 : 1 + _ATTEMPTS] * (height * width)
    ratio = numbers[:, 1 + _ATTEMPTS : 1 + 2 * _ATTEMPTS]
    tall, wide = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
    fits = (tall < height) & (wide < width)
    first = fits.long().argmax(1, keepdim=True)
    happens = (numbers[:, 0] < p) & fits.any(1)
    tall, wide = (torch.where(happens, one.gather(1, first)[:, 0], 0) for one in (tall, wide))
    down, across = numbers[:, 1 + 2 * _ATTEMPTS], numbers[:, 2 + 2 * _ATTEMPTS]
    return (down * (height - tall + 1)).long(), (across * (width - wide + 1)).long(), tall, wide

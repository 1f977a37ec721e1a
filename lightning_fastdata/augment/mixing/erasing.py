"""RandomErasing: a rectangle of each image is painted over."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import torch

from lightning_fastdata.augment.mixing.parts import Parts, check_share
from lightning_fastdata.augment.ops.splitmix import normal, uniform
from lightning_fastdata.errors import BatchError, OptionsError

if TYPE_CHECKING:
    import numpy as np

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

    def mix(self, parts: Parts, numbers: torch.Tensor, order: torch.Tensor) -> Parts:  # noqa: ARG002
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

    def _paint(self, image: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
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
    numbers: torch.Tensor, height: int, width: int, *, p: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
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

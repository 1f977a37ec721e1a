"""Which part of a picture becomes the sample, and how large: pure arithmetic on sizes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_fastdata.types import SampleKey

Crop: TypeAlias = Literal["random_resized", "center", "stretch"]

_MASK = (1 << 64) - 1


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


class Placement(NamedTuple):
    """How one picture becomes one sample: cut ``box``, resize it, cut the sample out of that."""

    box: Box
    """What is cut out of the picture, in its full-size pixels."""
    height: int
    """Height to which the box is resized."""
    width: int
    """Width to which the box is resized."""
    top: int
    """First row of the sample in the resized box."""
    left: int
    """First column of the sample in the resized box."""
    flip: bool
    """Whether the sample is mirrored left to right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CropRule:
    """How samples are cut out of pictures of any size."""

    size: int
    """Height and width of a sample in pixels."""
    crop: Crop = "random_resized"
    """``random_resized``: torchvision's ``RandomResizedCrop(size, scale, ratio)``. ``center``:
    ``Resize(resize)`` then ``CenterCrop(size)``. ``stretch``: ``Resize((size, size))``."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the picture's area; ``random_resized`` only."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height before resizing; ``random_resized`` only."""
    horizontal_flip: float = 0.0
    """Probability of mirroring left to right, 0 to 1."""
    resize: int | None = None
    """Length of the shorter side before the centre is cut; ``center`` only. None: 8/7 of ``size``,
    as in the usual 256 for 224."""

    def __post_init__(self) -> None:
        if self.crop not in get_args(Crop):
            raise OptionsError(
                f"Unknown crop {self.crop!r}; choose one of {', '.join(get_args(Crop))}."
            )
        if self.size < 1:
            raise OptionsError(f"size is {self.size}; give the side of a sample in pixels, >= 1.")
        if not 0 < self.scale[0] <= self.scale[1]:
            raise OptionsError(f"scale is {self.scale}; give (min, max) with 0 < min <= max.")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise OptionsError(f"ratio is {self.ratio}; give (min, max) with 0 < min <= max.")
        if not 0 <= self.horizontal_flip <= 1:
            raise OptionsError(
                f"horizontal_flip is {self.horizontal_flip}; give a probability from 0 to 1."
            )
        if self.resize is not None and self.resize < self.size:
            raise OptionsError(
                f"resize is {self.resize}, smaller than size {self.size}: the centre crop would "
                "reach beyond the picture. Give resize >= size."
            )

    def place(self, height: int, width: int, uniform: Callable[[], float]) -> Placement:
        """Return where the sample of a ``height`` x ``width`` picture comes from.

        Args:
            height: Of the picture in pixels.
            width: Of the picture in pixels.
            uniform: Draws from [0, 1). Always called for the flip first, so that the flip does not
                depend on how often a crop had to be drawn.
        """
        flip = self.horizontal_flip > 0 and uniform() < self.horizontal_flip
        size = self.size
        if self.crop == "random_resized":
            box = random_resized_box(height, width, self.scale, self.ratio, uniform)
            return Placement(box, size, size, 0, 0, flip)
        whole = Box(0, 0, height, width)
        if self.crop == "stretch":
            return Placement(whole, size, size, 0, 0, flip)
        rows, columns = shorter_side_to(self.resize or round(size * 8 / 7), height, width)
        # torchvision rounds half to even here, as Python's round does.
        top, left = round((rows - size) / 2), round((columns - size) / 2)
        return Placement(whole, rows, columns, top, left, flip)


def keyed_uniform(key: SampleKey) -> Callable[[], float]:
    """Return a source of uniform numbers in [0, 1) that depends on the key and nothing else.

    Only ``random.Random.random`` is used: its sequence for a seed is promised to stay the same in
    later Python versions. Making one costs 4 us, a tenth of what ``numpy.random`` and its checks
    would take per sample.
    """
    seed = (key.seed & _MASK) << 128 | (key.epoch & _MASK) << 64 | (key.index & _MASK)
    return random.Random(seed).random


def random_resized_box(
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    uniform: Callable[[], float],
) -> Box:
    """Draw a box by the law of torchvision's ``RandomResizedCrop.get_params``.

    Area uniform in ``scale`` times the picture's, log of width / height uniform, position uniform;
    ten attempts, then the largest centred box whose ratio is allowed.
    """
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform())
        aspect = math.exp(log_low + (log_high - log_low) * uniform())
        columns = round(math.sqrt(area * aspect))
        rows = round(math.sqrt(area / aspect))
        if 0 < columns <= width and 0 < rows <= height:
            top = int(uniform() * (height - rows + 1))
            left = int(uniform() * (width - columns + 1))
            return Box(top, left, rows, columns)
    rows, columns = height, width
    if width / height < ratio[0]:
        rows = min(height, max(1, round(width / ratio[0])))
    elif width / height > ratio[1]:
        columns = min(width, max(1, round(height * ratio[1])))
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def shorter_side_to(length: int, height: int, width: int) -> tuple[int, int]:
    """Return ``(height, width)`` after torchvision's ``Resize(length)``."""
    if width <= height:
        return int(length * height / width), length
    return length, int(length * width / height)

"""Pictures that are kept as pixels: one row of bytes each, of which no more is read than a crop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from lightning_fastdata.ext.images import Box
from lightning_fastdata.ext.images.resized_crop import (
    Placement,
    plan_resample,
    render,
    shorter_side_to,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.ext.images import Pixels, Scale
    from lightning_fastdata.ext.images.reading import EncodedImage

Picture: TypeAlias = "EncodedImage | StoredPicture"
"""A picture whose size is known, and that can be decoded."""
_HEAD_BYTES: Final = 8
"""Height and width, in 4 bytes each."""


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """A picture whose pixels are at hand."""

    pixels: Pixels
    """They may be read-only."""

    @property
    def height(self) -> int:
        """In pixels."""
        return len(self.pixels)

    @property
    def width(self) -> int:
        """In pixels."""
        return int(self.pixels.shape[1])

    @property
    def scalable(self) -> bool:
        """Whether decoding at a scale above 1 is cheaper than decoding fully."""
        return False

    def decode(self, *, scale: Scale = 1) -> Pixels:  # noqa: ARG002 - which is 1
        """Return the picture, ``[height, width, 3]`` uint8 RGB."""
        return self.pixels

    def decode_part(self, box: Box, scale: Scale = 1) -> Pixels:  # noqa: ARG002 - which is 1
        """Return a view of what the picture has within ``box``."""
        top, left, height, width = box
        return self.pixels[top : top + height, left : left + width]


def as_row(pixels: Pixels) -> NDArray[np.uint8]:
    """Return pixels ``[height, width, 3]``, C-contiguous, as one row of bytes with their size."""
    head = np.array(pixels.shape[:2], "<u4")
    return np.concatenate([head.view(np.uint8), pixels.reshape(-1)])


def open_stored(row: NDArray[np.uint8]) -> StoredPicture:
    """Return a picture that :func:`as_row` made; bytes that follow it make no difference."""
    height, width = row[:_HEAD_BYTES].view("<u4").tolist()
    data = row[_HEAD_BYTES : _HEAD_BYTES + 3 * height * width]
    return StoredPicture(data.reshape(height, width, 3))


def shrunk(image: Picture, shorter_side: int | None) -> Pixels:
    """Return all of a picture, with a shorter side of at most so many pixels; None: any.

    It is decoded at the power of two that leaves a factor of at least 1, and the rest is resized
    with torchvision's antialiased filter.

    Raises:
        DatasetError: If the file is damaged.
    """
    if shorter_side is None or min(image.height, image.width) <= shorter_side:
        return np.ascontiguousarray(image.decode())
    height, width = shorter_side_to(shorter_side, image.height, image.width)
    whole = Placement(Box(0, 0, image.height, image.width), height, width, 0, 0, flip=False)
    plan = plan_resample(whole, "auto", scalable=image.scalable)._replace(filter="antialias")
    out: Pixels = np.empty((height, width, 3), np.uint8)
    render(image, whole, plan, out)
    return out

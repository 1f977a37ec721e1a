"""One picture of a batch, for a logger or a notebook."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    channels_first,
    describe,
    find_fields,
    get_field,
)
from lightning_fastdata.augment.pipeline.tree import list_leaves
from lightning_fastdata.errors import BatchError, OptionsError
from lightning_fastdata.randomness.search import find_composes, find_instances, loaded_classes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

    from PIL.Image import Image

    from lightning_fastdata.augment.pipeline.tree import Node
    from lightning_fastdata.types import Batch


class Normalized(NamedTuple):
    """How images were normalised: ``(image - mean) / std`` of images in [0, 1]."""

    mean: tuple[float, ...]
    """One number per channel, or one for all."""
    std: tuple[float, ...]
    """One number per channel, or one for all."""

    def undone(self, images: np.ndarray) -> np.ndarray:
        """Return images ``[..., C]`` as they were before, in [0, 1] if they were so."""
        undone: np.ndarray = images * np.asarray(self.std) + np.asarray(self.mean)
        return undone


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchImages:
    """What is known of the images of a batch."""

    image: int | str | None = None
    """Their key or index; None: to be found."""
    normalized: Normalized | None = None
    """How they were normalised; None: not known."""

    @classmethod
    def behind(cls, transforms: Iterable[object], image: int | str | None) -> Self:
        """Return what is known of images that transforms run on, in their order."""
        return cls(image=image, normalized=find_normalized(list(transforms)))

    def normalized_by(self, owners: Sequence[object]) -> Self:
        """Return the same of images that datasets or transforms normalise."""
        return replace(self, normalized=find_normalized(owners))

    def find(self, batch: Batch) -> torch.Tensor:
        """Return the images of a batch; see :func:`find_images`."""
        return find_images(batch, self.image)

    def grid(self, images: torch.Tensor, most: int) -> np.ndarray:
        """Return images side by side, ``most`` at most, as :func:`batch_grid` shows them."""
        return batch_grid(images, most=most, normalized=self.normalized)


def find_normalized(owner: object) -> Normalized | None:
    """Return how the pipelines that a dataset or a transform holds normalise; None: not known.

    It is known if there is one way, by fixed numbers in every sample: Albumentations' ``Normalize``
    or torchvision's.
    """
    composes = find_composes(owner)
    leaves = [leaf for compose in composes for leaf in list_leaves(compose)]
    found: set[Normalized | None] = {
        None if leaf.conditional else normalized_by(leaf.transform)
        for leaf in leaves
        if type(leaf.transform).__name__ == "Normalize"
    }
    for module in ("torchvision.transforms", "torchvision.transforms.v2"):
        kinds = loaded_classes(module, "Normalize")
        found |= {_way(own.mean, own.std) for own in find_instances(owner, kinds)}
    return found.pop() if len(found) == 1 else None


def normalized_by(normalize: Node) -> Normalized | None:
    """Return how ``A.Normalize`` normalises; None if by numbers of each image."""
    if normalize.normalization != "standard":
        return None
    return _way(normalize.mean, normalize.std)


def _way(mean: object, std: object) -> Normalized:
    both = (np.atleast_1d(np.asarray(one, np.float64)) for one in (mean, std))
    return Normalized(*(tuple(one.tolist()) for one in both))


_GAP_PX = 2
_CELL_PX: Final = 240
_MARGIN_PX: Final = 8
_LINE_PX: Final = 18
_FONT_PX: Final = 13
_LETTER_PX: Final = 6.6
_OUTLINE: Final = (255, 0, 255)


def batch_grid(
    batch: Batch,
    *,
    image: int | str | None = None,
    most: int = 32,
    normalized: Normalized | None = None,
) -> np.ndarray:
    """Return the images of a batch side by side, as the model gets them.

    uint8 is shown as it is, and floats as they were before they were normalised. Where that is not
    known, floats in [0, 1] are shown as they are, and of others each channel is stretched, in the
    whole batch alike, so that all but its outermost hundredths are visible. It waits for the device
    and copies the images that are shown, nothing else.

    Args:
        batch: a batch on any device whose images are ``[n, C, H, W]``, ``[n, H, W, C]`` or
            ``[n, H, W]``, uint8 or floating point.
        image: key or index of the images; None finds them.
        most: images to show at most, the first ones.
        normalized: how floats were normalised; None: not known.

    Returns:
        uint8 ``[height, width, 3]``; gray images are shown gray, and of more than three channels
        the first three.

    Raises:
        BatchError: there are no images.
        OptionsError: ``most`` is below 1.
    """
    if most < 1:
        raise OptionsError(f"most is {most}; show at least 1 image.")
    images = find_images(batch, image)[:most].detach().cpu()
    if not len(images):
        raise BatchError("The batch is empty, so there is nothing to show.")
    pixels = _as_bytes(images, normalized)
    count, height, width, _ = pixels.shape
    across = math.ceil(math.sqrt(count * height / width))
    across = min(count, max(1, across))
    down = math.ceil(count / across)
    size = (down * (height + _GAP_PX) - _GAP_PX, across * (width + _GAP_PX) - _GAP_PX, 3)
    page = np.full(size, 255, np.uint8)
    for number, one in enumerate(pixels):
        top = number // across * (height + _GAP_PX)
        left = number % across * (width + _GAP_PX)
        page[top : top + height, left : left + width] = one
    return page


def find_images(batch: Batch, image: int | str | None = None) -> torch.Tensor:
    """Return the images of a batch as ``[n, H, W, C]``; BatchError if there are none."""
    place = find_fields(batch, Fields(), batched=True).image if image is None else image
    found = get_field(batch, place)
    if (
        not isinstance(found, torch.Tensor)
        or found.ndim not in {3, 4}
        or not (found.dtype == torch.uint8 or found.is_floating_point())
    ):
        raise BatchError(
            f"The field {place!r} is {describe(found)}. Expected images [n, C, H, W], "
            "[n, H, W, C] or [n, H, W], uint8 or floating point."
        )
    if found.ndim == 3:
        return found.unsqueeze(-1)
    return found.permute(0, 2, 3, 1) if channels_first(tuple(found.shape[1:])) else found


def _as_bytes(images: torch.Tensor, normalized: Normalized | None) -> np.ndarray:
    if images.dtype == torch.uint8:
        return three_channels(images.numpy())
    values = np.nan_to_num(images.float().numpy())
    if normalized is not None and len(normalized.mean) in (1, values.shape[-1]):
        return to_levels(three_channels(normalized.undone(values)))
    values = three_channels(values)
    low, high = values.min(), values.max()
    if low < 0 or high > 1:
        bounds = np.percentile(values.reshape(-1, 3), (1, 99), axis=0)
        values = (values - bounds[0]) / np.maximum(bounds[1] - bounds[0], 1e-6)
    return to_levels(values)


def three_channels(values: np.ndarray) -> np.ndarray:
    """Return the first three channels of images ``[..., C]``, or the first one three times."""
    return values[..., :3] if values.shape[-1] >= 3 else np.repeat(values[..., :1], 3, -1)


def to_levels(values: np.ndarray) -> np.ndarray:
    """Return values in [0, 1] as uint8, rounded; what is beyond is cut off."""
    out: np.ndarray = (values * 255).round().clip(0, 255).astype(np.uint8)
    return out


def draw_page(
    heads: Sequence[str],
    rows: Sequence[Sequence[tuple[np.ndarray, np.ndarray | None]]],
    captions: Sequence[str],
    note: str = "",
) -> Image:
    """Return rows of pictures below their heads, each row with its caption, and a note below all.

    A picture is uint8 ``[H, W, 3]``, with a mask ``[H, W]`` that is drawn as outlines, or None.
    """
    from PIL import Image, ImageDraw, ImageFont

    width = len(heads) * (_CELL_PX + _MARGIN_PX) + _MARGIN_PX
    letters = int((width - 2 * _MARGIN_PX) / _LETTER_PX)
    cells = [[_cell(*pair) for pair in row] for row in rows]
    texts = [textwrap.wrap(caption, letters) for caption in captions]
    below = textwrap.wrap(note, letters)
    lines = 1 + sum(map(len, texts)) + len(below)
    cell_heights = [max(cell.height for cell in row) for row in cells]
    height = sum(cell_heights) + lines * _LINE_PX + (2 * len(rows) + 2) * _MARGIN_PX
    page = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(_FONT_PX)

    def write(lines: Sequence[str], top: int) -> int:
        for line in lines:
            pen.text((_MARGIN_PX, top), line, fill="black", font=font)
            top += _LINE_PX
        return top

    lefts = [_MARGIN_PX + column * (_CELL_PX + _MARGIN_PX) for column in range(len(heads))]
    for left, head in zip(lefts, heads, strict=True):
        pen.text((left, 4), head, fill="black", font=font)
    top = _LINE_PX + _MARGIN_PX
    for row, text, tall in zip(cells, texts, cell_heights, strict=True):
        for left, cell in zip(lefts, row, strict=True):
            page.paste(cell, (left, top))
        top = write(text, top + tall + _MARGIN_PX // 2) + _MARGIN_PX
    write(below, top)
    return page


def _cell(picture: np.ndarray, mask: np.ndarray | None) -> Image:
    """Return a picture in the size of a cell, with the outlines of its mask."""
    from PIL import Image

    scale = _CELL_PX / max(picture.shape[:2])
    wide, tall = (max(1, round(picture.shape[axis] * scale)) for axis in (1, 0))
    cell = Image.fromarray(picture).resize((wide, tall))
    if mask is None:
        return cell
    rows, columns = (
        ((np.arange(count) + 0.5) * given // count).astype(np.int64)
        for count, given in zip((tall, wide), mask.shape[:2], strict=True)
    )
    small = mask[rows[:, None], columns]
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

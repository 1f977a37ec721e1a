"""Reading pixels at integer positions, inside and outside an image, the way OpenCV does."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape

CONSTANT: Final = 0
REPLICATE: Final = 1
REFLECT: Final = 2
WRAP: Final = 3
REFLECT_101: Final = 4
MODES: Final = frozenset({CONSTANT, REPLICATE, REFLECT, WRAP, REFLECT_101})
"""OpenCV's ``BORDER_*`` numbers that have a device form."""

_OPENCV_CHANNELS: Final = 4


def channels(shape: Shape) -> int:
    """Return the number of channels of an image shape."""
    return shape[2] if len(shape) > 2 else 1


def as_channels_last(batch: torch.Tensor) -> torch.Tensor:
    """Return masks ``[n, H, W]`` as ``[n, H, W, 1]``; images and other masks as they are."""
    return batch if batch.ndim == 4 else batch.unsqueeze(-1)


def fold(index: torch.Tensor, length: int, mode: int) -> torch.Tensor:
    """Map positions outside ``0 .. length - 1`` to inside, by OpenCV's ``borderInterpolate``.

    Args:
        index: positions along one axis, any integer dtype and shape.
        length: pixels along that axis.
        mode: ``BORDER_*``; for CONSTANT the nearest pixel is returned, for the caller to overwrite.
    """
    if mode == WRAP:
        return index.remainder(length)
    if mode == REFLECT:
        around = index.remainder(2 * length)
        return torch.minimum(around, 2 * length - 1 - around)
    if mode == REFLECT_101 and length > 1:
        around = index.remainder(2 * length - 2)
        return torch.minimum(around, 2 * length - 2 - around)
    return index.clamp(0, length - 1)


def gather(batch: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the pixels ``batch[i, y[i], x[i]]``.

    Args:
        batch: ``[n, H, W, C]``.
        y: rows inside the image, ``[n, ...]``, integer.
        x: columns inside the image; broadcasts with ``y``.

    Returns:
        ``[n, ..., C]``.
    """
    n, height, width, count = batch.shape
    first = torch.arange(n, device=batch.device).view(n, *[1] * (y.ndim - 1)) * (height * width)
    flat = first + y * width + x
    return batch.reshape(-1, count).index_select(0, flat.reshape(-1)).view(*flat.shape, count)


def read(
    batch: torch.Tensor, y: torch.Tensor, x: torch.Tensor, mode: int, fill: torch.Tensor
) -> torch.Tensor:
    """Return the pixels at any integer positions.

    Args:
        batch: ``[n, H, W, C]``.
        y: rows ``[n, a, b]``, also outside the image; integer.
        x: columns; broadcasts with ``y``.
        mode: ``BORDER_*``.
        fill: value outside the image for CONSTANT, ``[n, C]``, in the dtype of ``batch``.
    """
    _, height, width, _ = batch.shape
    pixels = gather(batch, fold(y, height, mode), fold(x, width, mode))
    if mode != CONSTANT:
        return pixels
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return torch.where(inside.unsqueeze(-1), pixels, fill[:, None, None, :])


def encode_fill(fill: Any, count: int, *, extends: bool = True) -> np.ndarray | None:
    """Return OpenCV's border value for each channel, or None if it has no device form.

    A plain number is a value for every channel if Albumentations extends it before it calls
    OpenCV. If not, OpenCV reads it as a value for the first channel, and 0 for the others.

    Args:
        fill: ``fill`` or ``fill_mask`` of a transform.
        count: channels of the image.
        extends: whether Albumentations extends a float over the channels.

    Returns:
        float32 ``[count]``.
    """
    if fill is not None and not isinstance(fill, int | float):
        fill = tuple(np.ravel(fill).tolist())
    return _border_value(fill, count, extends)


# The same for each sample. A number may be a float or not.
@lru_cache(maxsize=64, typed=True)
def _border_value(fill: Any, count: int, extends: bool) -> np.ndarray | None:
    if fill is None or (extends and isinstance(fill, float)):
        return np.full(count, fill or 0.0, np.float32)
    given = np.atleast_1d(np.asarray(fill, np.float32))
    if given.size > _OPENCV_CHANNELS:
        return None  # OpenCV refuses it.
    four = np.zeros(_OPENCV_CHANNELS, np.float32)
    four[: given.size] = given
    return four[_places(count)]


def _places(count: int) -> list[int]:
    """Return which number of a border value each of so many channels has.

    Albumentations calls OpenCV for four channels at a time, and for each of the last two.
    """
    if count <= _OPENCV_CHANNELS:
        return list(range(count))
    places = [channel % _OPENCV_CHANNELS for channel in range(count)]
    if count % _OPENCV_CHANNELS == 2:
        places[-1] = 0
    return places


def encode_fills(transform: Any, shape: Shape, *, extends: bool = True) -> dict[str, Any] | None:
    """Return the fill of images and of masks, one number per channel, or None.

    Masks may have other channels than the image beside them, so theirs covers at least four.
    """
    image = encode_fill(transform.fill, channels(shape), extends=extends)
    mask = encode_fill(transform.fill_mask, _OPENCV_CHANNELS, extends=extends)
    if image is None or mask is None:
        return None
    return {"fill": image, "fill_mask": mask}


def fill_like(batch: torch.Tensor, arrays: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the fill ``[n, C]`` in the dtype of ``batch`` ``[n, H, W, C]``, rounded if needed."""
    fill = arrays[name]
    count = batch.shape[-1]
    if count > fill.shape[-1]:
        fill = torch.stack([fill[:, place % fill.shape[-1]] for place in _places(count)], 1)
    fill = fill[:, :count]
    if batch.dtype == torch.uint8:
        fill = fill.round().clamp(0, 255)
    elif not batch.is_floating_point():
        fill = fill.round()
    return fill.to(batch.dtype)

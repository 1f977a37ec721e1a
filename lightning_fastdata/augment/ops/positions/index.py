"""Whole pixels: reading them inside and outside an image, and operations that move them."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Shape,
    Transform,
    Values,
    as_channels_last,
    channels,
)

CONSTANT, REPLICATE, REFLECT, WRAP, REFLECT_101 = range(5)
MODES: Final = frozenset({CONSTANT, REPLICATE, REFLECT, WRAP, REFLECT_101})
"""OpenCV's ``BORDER_*`` numbers that have a device form."""

_OPENCV_CHANNELS: Final = 4


def fold(index: Tensor, length: int, mode: int) -> Tensor:
    """Map positions outside ``0 .. length - 1`` to inside, by OpenCV's ``borderInterpolate``.

    For CONSTANT the nearest pixel is returned, for the caller to overwrite.
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


def gather(batch: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return the pixels ``batch[i, y[i], x[i]]``, ``[n, ..., C]``, of a batch ``[n, H, W, C]``.

    Rows and columns are inside the image, integers ``[n, ...]`` that broadcast with each other.
    """
    n, height, width, count = batch.shape
    first = torch.arange(n, device=batch.device).view(n, *[1] * (y.ndim - 1)) * (height * width)
    flat = first + y * width + x
    return batch.reshape(-1, count).index_select(0, flat.reshape(-1)).view(*flat.shape, count)


def read(batch: Tensor, y: Tensor, x: Tensor, mode: int, fill: Tensor) -> Tensor:
    """Return pixels of ``[n, H, W, C]`` at any rows ``[n, a, b]`` and columns, by a border mode.

    ``fill`` is the value outside the image for CONSTANT, ``[n, C]``, in the dtype of ``batch``.
    """
    _, height, width, _ = batch.shape
    pixels = gather(batch, fold(y, height, mode), fold(x, width, mode))
    if mode != CONSTANT:
        return pixels
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return torch.where(inside.unsqueeze(-1), pixels, fill[:, None, None, :])


def _encode_fill(fill: object, count: int) -> np.ndarray | None:
    """Return OpenCV's border value, float32 ``[count]``, or None if it has no device form.

    Albumentations makes a value for every channel of a float; of an integer OpenCV makes one for
    the first channel, and 0 for the others.
    """
    if fill is not None and not isinstance(fill, int | float):
        fill = tuple(np.asarray(fill).ravel().tolist())
    return _border_value(fill, count)


# The same for each sample. A number may be a float or not.
@lru_cache(maxsize=64, typed=True)
def _border_value(fill: float | tuple[float, ...] | None, count: int) -> np.ndarray | None:
    if fill is None or isinstance(fill, float):
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
    places = [channel % _OPENCV_CHANNELS for channel in range(count)]
    if count > _OPENCV_CHANNELS and count % _OPENCV_CHANNELS == 2:
        places[-1] = 0
    return places


def encode_fills(transform: Transform, shape: Shape) -> Values | None:
    """Return the fill of images and of masks, one number per channel, or None.

    Masks may have other channels than the image beside them, so theirs covers at least four.
    """
    image = _encode_fill(transform.fill, channels(shape))
    mask = _encode_fill(transform.fill_mask, _OPENCV_CHANNELS)
    return None if image is None or mask is None else {"fill": image, "fill_mask": mask}


def fill_like(batch: Tensor, arrays: Arrays, name: str) -> Tensor:
    """Return the fill ``[n, C]`` in the dtype of ``batch`` ``[n, H, W, C]``, rounded if needed."""
    fill, count = arrays[name], batch.shape[-1]
    if count > fill.shape[-1]:
        fill = torch.stack([fill[:, place % fill.shape[-1]] for place in _places(count)], 1)
    fill = fill[:, :count]
    fill = fill.clamp(0, 255) if batch.dtype == torch.uint8 else fill
    return (fill if batch.is_floating_point() else fill.round()).to(batch.dtype)


_TURNS: Final = {"e": 0, "r90": 1, "r180": 2, "r270": 3}
_TURNS_TRANSPOSED: Final = {"t": 0, "h": 3, "hvt": 2, "v": 1}
"""Quarter turns by Albumentations' names of the symmetries; here after a transposition."""
_FLIPS: Final = {"HorizontalFlip": "h", "VerticalFlip": "v", "Transpose": "t"}


def _moves(transform: Transform, params: Values) -> tuple[bool, int]:
    """Return whether an image is transposed, and by how many quarter turns it is turned then."""
    name = type(transform).__name__
    if name in ("NoOp", "RandomRotate90"):
        return False, int(params.get("factor", 0)) % 4
    element = _FLIPS.get(name) or str(params["group_element"])
    transposed = element in _TURNS_TRANSPOSED
    return transposed, (_TURNS_TRANSPOSED if transposed else _TURNS)[element]


@cache
def _encoded_symmetry(transposed: bool, turns: int) -> Encoded:
    return Encoded((("transposed", transposed), ("turns", turns)), {})


def _encode_symmetry(transform: Transform, params: Values, shape: Shape, dtype: DType) -> Encoded:
    return _encoded_symmetry(*_moves(transform, params))


def _symmetry(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    moved = batch.transpose(1, 2) if static["transposed"] else batch
    return torch.rot90(moved, static["turns"], (1, 2)) if static["turns"] else moved


def _symmetry_shape(transform: Transform, params: Values, shape: Shape) -> Shape:
    transposed, turns = _moves(transform, params)
    return (shape[1], shape[0], *shape[2:]) if transposed != (turns % 2 == 1) else shape


def _window(transform: Transform, params: Values, shape: Shape) -> tuple[int, int, int, int]:
    """Return ``top, left, height, width`` of the output in the input; it may reach outside."""
    if "crop_coords" not in params:
        height = shape[0] + int(params["pad_top"]) + int(params["pad_bottom"])
        width = shape[1] + int(params["pad_left"]) + int(params["pad_right"])
        return -int(params["pad_top"]), -int(params["pad_left"]), height, width
    x_min, y_min, x_max, y_max = (int(value) for value in params["crop_coords"])
    pads = params.get("pad_params") or {"pad_top": 0, "pad_left": 0}
    top, left = y_min - int(pads["pad_top"]), x_min - int(pads["pad_left"])
    return top, left, y_max - y_min, x_max - x_min


def _encode_window(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    top, left, height, width = _window(transform, params, shape)
    corner = np.array([top, left], np.int32)
    inside = top >= 0 and left >= 0 and top + height <= shape[0] and left + width <= shape[1]
    pads = "crop_coords" not in params or params.get("pad_params") is not None
    if height <= 0 or width <= 0 or not (inside or pads):
        return None  # Albumentations raises its own error.
    fills = encode_fills(transform, shape) if pads else {}
    if fills is None or (pads and transform.border_mode not in MODES):
        return None
    # Samples whose border is never read share one launch.
    border = REPLICATE if inside else int(transform.border_mode)
    arrays = {"corner": corner} if inside else {"corner": corner, **fills}
    return Encoded((("size", (height, width)), ("border", border)), arrays)


def _cut(fill_name: str, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    images = as_channels_last(batch)
    height, width = static["size"]
    top, left = arrays["corner"].long()[:, :, None].unbind(1)
    y = top + torch.arange(height, device=batch.device)
    x = left + torch.arange(width, device=batch.device)
    # Without a fill, no pixel outside is read.
    no_fill = images.new_zeros(len(images), images.shape[-1])
    fill = fill_like(images, arrays, fill_name) if fill_name in arrays else no_fill
    cut = read(images, y[:, :, None], x[:, None, :], static["border"], fill)
    return cut.view(*cut.shape[:3], *batch.shape[3:])


def _window_shape(transform: Transform, params: Values, shape: Shape) -> Shape:
    return (*_window(transform, params, shape)[2:], *shape[2:])


OPS = (
    *(
        DeviceOp(name, _encode_symmetry, _symmetry, _symmetry, out_shape=_symmetry_shape)
        for name in ("NoOp", *_FLIPS, "RandomRotate90", "D4")
    ),
    *(
        DeviceOp(
            name,
            _encode_window,
            partial(_cut, "fill"),
            partial(_cut, "fill_mask"),
            out_shape=_window_shape,
        )
        for name in ("RandomCrop", "CenterCrop", "PadIfNeeded")
    ),
)
"""Exact for every dtype."""

"""Whole pixels: reading them inside and outside an image, and operations that move them."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    Drawn,
    DType,
    Encoded,
    Params,
    Shape,
    Static,
    Transform,
    as_channels_last,
    channels,
)
from lightning_fastdata.augment.replay import instructions

CONSTANT: Final = 0
REPLICATE: Final = 1
REFLECT: Final = 2
WRAP: Final = 3
REFLECT_101: Final = 4
MODES: Final = frozenset({CONSTANT, REPLICATE, REFLECT, WRAP, REFLECT_101})
"""OpenCV's ``BORDER_*`` numbers that have a device form."""

_OPENCV_CHANNELS: Final = 4


def fold(index: Tensor, length: int, mode: int) -> Tensor:
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


def gather(batch: Tensor, y: Tensor, x: Tensor) -> Tensor:
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


def read(batch: Tensor, y: Tensor, x: Tensor, mode: int, fill: Tensor) -> Tensor:
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


def encode_fills(transform: Transform, shape: Shape, *, extends: bool = True) -> Drawn | None:
    """Return the fill of images and of masks, one number per channel, or None.

    Masks may have other channels than the image beside them, so theirs covers at least four.
    """
    image = encode_fill(transform.fill, channels(shape), extends=extends)
    mask = encode_fill(transform.fill_mask, _OPENCV_CHANNELS, extends=extends)
    if image is None or mask is None:
        return None
    return {"fill": image, "fill_mask": mask}


def fill_like(batch: Tensor, arrays: Arrays, name: str) -> Tensor:
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


_SYMMETRIES = {
    "e": (False, 0),
    "r90": (False, 1),
    "r180": (False, 2),
    "r270": (False, 3),
    "t": (True, 0),
    "h": (True, 3),
    "hvt": (True, 2),
    "v": (True, 1),
}
"""Albumentations' names of the eight symmetries, as a transposition before quarter turns."""


_ELEMENTS = {
    "HorizontalFlip": "h",
    "TimeReverse": "h",
    "VerticalFlip": "v",
    "Transpose": "t",
    "NoOp": "e",
}
"""The symmetries that transforms are called by."""


def _moves(transform: Transform, params: Params) -> tuple[bool, int]:
    """Return whether an image is transposed, and by how many quarter turns it is turned then."""
    name = type(transform).__name__
    if name == "RandomRotate90":
        return False, int(params["factor"]) % 4
    return _SYMMETRIES[_ELEMENTS.get(name) or str(params["group_element"])]


@cache
def _encoded_symmetry(transposed: bool, turns: int) -> Encoded:
    return Encoded((("transposed", transposed), ("turns", turns)), {})


def _encode_symmetry(transform: Transform, params: Params, shape: Shape, dtype: DType) -> Encoded:
    return _encoded_symmetry(*_moves(transform, params))


def _symmetry(batch: Tensor, static: Static, arrays: Arrays) -> Tensor:
    moved = batch.transpose(1, 2) if static["transposed"] else batch
    return torch.rot90(moved, static["turns"], (1, 2)) if static["turns"] else moved


def _symmetry_shape(transform: Transform, params: Params, shape: Shape) -> Shape:
    transposed, turns = _moves(transform, params)
    return (shape[1], shape[0], *shape[2:]) if transposed != (turns % 2 == 1) else shape


def _window(transform: Transform, params: Params, shape: Shape) -> tuple[int, int, int, int]:
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
    transform: Transform, params: Params, shape: Shape, dtype: DType
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
    if inside:
        # The border is never read, so samples that need none can share one launch.
        return Encoded((("size", (height, width)), ("border", REPLICATE)), {"corner": corner})
    static = (("size", (height, width)), ("border", int(transform.border_mode)))
    return Encoded(static, {"corner": corner, **fills})


def _cut(fill_name: str) -> Any:
    def run(batch: Tensor, static: Static, arrays: Arrays) -> Tensor:
        images = as_channels_last(batch)
        height, width = static["size"]
        top, left = arrays["corner"].long().unbind(1)
        y = top[:, None] + torch.arange(height, device=batch.device)
        x = left[:, None] + torch.arange(width, device=batch.device)
        if fill_name in arrays:
            fill = fill_like(images, arrays, fill_name)
        else:
            fill = images.new_zeros(len(images), images.shape[-1])
        cut = read(images, y[:, :, None], x[:, None, :], static["border"], fill)
        return cut.view(*cut.shape[:3], *batch.shape[3:])

    return run


def _window_shape(transform: Transform, params: Params, shape: Shape) -> Shape:
    return (*_window(transform, params, shape)[2:], *shape[2:])


def _encode_tiles(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    rows, columns = transform.grid
    tiles = np.asarray(params["tiles"], np.int32)
    mapping = np.asarray(params["mapping"], np.int64)
    if max(shape[:2]) > np.iinfo(np.int16).max or len(tiles) != len(mapping):
        return None  # the tiles of Albumentations are int16
    # Tile `k` goes to where tile `mapping[k]` is; a pixel there is read from this far away.
    away = np.empty((len(tiles), 2), np.int32)
    away[mapping] = tiles[:, :2] - tiles[mapping, :2]
    arrays = {
        "row_starts": tiles[::columns, 0].copy(),
        "column_starts": tiles[:columns, 1].copy(),
        "away": away.reshape(rows, columns, 2),
    }
    return Encoded((), arrays)


def _shuffle_tiles(batch: Tensor, static: Static, arrays: Arrays) -> Tensor:
    images = as_channels_last(batch)
    y = torch.arange(images.shape[1], device=images.device)
    x = torch.arange(images.shape[2], device=images.device)
    row = (y >= arrays["row_starts"][:, 1:, None]).sum(1)
    column = (x >= arrays["column_starts"][:, 1:, None]).sum(1)
    away = gather(arrays["away"], row[:, :, None], column[:, None, :])
    out = gather(images, y[:, None] + away[..., 0], x + away[..., 1])
    return out.reshape(batch.shape)


OPS = (
    *(
        DeviceOp(
            name,
            _encode_symmetry,
            _symmetry,
            mask=_symmetry,
            out_shape=_symmetry_shape,
            fused=instructions.mirror,
        )
        for name in (
            "NoOp",
            "HorizontalFlip",
            "TimeReverse",
            "VerticalFlip",
            "Transpose",
            "RandomRotate90",
            "D4",
            "SquareSymmetry",
        )
    ),
    *(
        DeviceOp(
            name,
            _encode_window,
            _cut("fill"),
            mask=_cut("fill_mask"),
            out_shape=_window_shape,
            fused="window",
        )
        for name in ("RandomCrop", "CenterCrop", "Crop", "Pad", "PadIfNeeded")
    ),
    DeviceOp("RandomGridShuffle", _encode_tiles, _shuffle_tiles, mask=_shuffle_tiles),
)
"""Exact for every dtype."""

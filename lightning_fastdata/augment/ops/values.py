"""Operations that leave pixels at their places: colours, blurs, holes, and what ends a pipeline.

Colours and blurs are for uint8 images, by tables or with OpenCV's own formulas.
"""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

import math
from functools import cache, lru_cache, partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.geometry import REFLECT_101, fold
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

_BYTES: Final = np.arange(256, dtype=np.uint8)
_HUES: Final = (np.arange(180 + 256) % 180).astype(np.uint8)
_ALMOST_ONE: Final = 0.999
_GRAIN: Final = 4
"""Radii of kernels and numbers of rectangles are rounded up to a multiple of this, so that samples
share launches."""


def look_up(images: Tensor, table: Tensor) -> Tensor:
    """Return ``table[i, value, channel]`` for every value of image ``i``.

    Images are uint8 ``[n, H, W, C]``, tables ``[n, 256, C]``, or ``[n, 256, 1]`` for all channels.
    """
    n, _, count = table.shape
    first = torch.arange(n, device=images.device, dtype=torch.int32).view(n, 1, 1, 1) * 256
    index = (first + images) * count
    if count > 1:
        index = index + torch.arange(count, device=images.device, dtype=torch.int32)
    return table.reshape(-1).index_select(0, index.reshape(-1)).view(images.shape)


@cache
def _ramp(count: int) -> np.ndarray:
    return np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), count, 2)


def ramp_table(transform: Transform, params: Values, count: int) -> np.ndarray:
    """Return what Albumentations itself makes of every uint8 value: uint8 ``[256, count]``."""
    # A copy: some transforms write to what they are given.
    ramp = _ramp(count).copy()
    out = transform.apply(ramp, **{**params, "shape": ramp.shape})
    return np.ascontiguousarray(out.reshape(256, count))


def encode_table(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    """Return what a transform makes of every byte, as a table; None if images are not uint8."""
    if dtype != np.uint8:
        return None
    table = ramp_table(transform, params, channels(shape))
    return Encoded((), {"table": table})


def run_table(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Look up the values of images in the tables that `encode_table` made."""
    return look_up(images, arrays["table"])


def gray(images: Tensor) -> Tensor:
    """Return the luminance, int32 ``[n, H, W]``, of uint8 RGB images ``[n, H, W, 3]``."""
    red, green, blue = images.int().unbind(-1)
    return (red * 9798 + green * 19235 + blue * 3735 + (1 << 14)) >> 15


def _sector_colours(hue: Tensor, s: Tensor, v: Tensor) -> Tensor:
    """Return RGB from a hue in sixths of the circle, saturation and value in [0, 1]."""
    sector = hue.floor()
    part = hue - sector
    sector = sector.int().remainder(6)
    low, falling, rising = v * (1 - s), v * (1 - s * part), v * (1 - s * (1 - part))
    choices = torch.stack([v, low, falling, rising], -1)
    order = torch.arange(6, device=v.device)
    # Per sector: which of (v, low, falling, rising) is red; green and blue follow by a third.
    red = (order == 1) * 2 + ((order == 2) | (order == 3)) * 1 + (order == 4) * 3
    which = torch.stack([red, red.roll(2), red.roll(4)], -1)[sector.long()]
    return choices.gather(-1, which)


def hsv_bytes(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hue in 0..179, saturation and value in 0..255 of uint8 RGB images, as int32."""
    red, green, blue = images.int().unbind(-1)
    value = torch.maximum(torch.maximum(red, green), blue)
    spread = value - torch.minimum(torch.minimum(red, green), blue)
    by_value = (1044480.0 / value.clamp(min=1) + 0.5).int()  # 255 << 12
    by_spread = (122880.0 / spread.clamp(min=1) + 0.5).int()  # (180 << 12) / 6
    saturation = (spread * by_value + 2048) >> 12
    hue = torch.where(
        value == red,
        green - blue,
        torch.where(value == green, blue - red + 2 * spread, red - green + 4 * spread),
    )
    hue = (hue * by_spread + 2048) >> 12
    return torch.where(hue < 0, hue + 180, hue), saturation, value


def rgb_bytes(hue: Tensor, saturation: Tensor, value: Tensor, lanes: int) -> Tensor:
    """Return uint8 RGB images from what `hsv_bytes` returns; ``lanes`` as `opencv_lanes`."""
    sixths = hue.float() * (6.0 / 180)
    rgb = _sector_colours(sixths, saturation.float() * (1.0 / 255), value.float() * (1.0 / 255))
    rgb = rgb * 255
    width = hue.shape[-1]
    if lanes == 1:
        return rgb.to(torch.uint8)
    tail = width % lanes if lanes else width
    rgb[..., width - tail :, :].round_()
    return rgb.to(torch.uint8)


@cache
def opencv_lanes() -> int:
    """Return how many pixels the installed OpenCV converts from HSV at a time; 0: it rounds all.

    Whole groups of that many pixels of a row are truncated to bytes, the rest is rounded. It is
    found with a row of a color whose green is 173.67.
    """
    import cv2

    row = np.full((1, 255, 3), (10, 122, 255), np.uint8)
    truncated = int((cv2.cvtColor(row, cv2.COLOR_HSV2RGB)[0, :, 1] == 173).sum())
    return 256 - truncated if truncated else 0


def _hue_table(shift: float) -> np.ndarray:
    """Return ``mod(hue + shift, 180)`` of every byte, cut to a byte: uint8 ``[256]``."""
    whole = math.floor(shift)
    if shift - whole > _ALMOST_ONE:
        # Rounding takes some sums to the next whole number, so that no slice of _HUES has them.
        moved: np.ndarray = np.mod(np.arange(256, dtype=np.int16) + shift, 180)
        return moved.astype(np.uint8)
    return _HUES[whole % 180 :][:256]


@lru_cache(maxsize=512)
def _shift_table(levels: int) -> np.ndarray:
    """Return what Albumentations makes of every byte when it adds a number of levels."""
    from albucore import add_constant

    table: np.ndarray = add_constant(np.arange(256, dtype=np.uint8).reshape(1, 256), levels)[0]
    return table


def _encode_hsv(transform: Transform, params: Values, shape: Shape, dtype: DType) -> Encoded | None:
    if channels(shape) == 1:
        table = ramp_table(transform, params, 1)
        return Encoded((("form", "gray"),), {"table": table})
    if channels(shape) != 3:
        return None
    hue, saturation, value = (float(params[f"{name}_shift"]) for name in ("hue", "sat", "val"))
    if hue == saturation == value == 0:
        return Encoded((("form", "same"),), {})
    table = np.empty((256, 3), np.uint8)
    table[:, 0] = _hue_table(hue) if hue else _BYTES
    # Albumentations adds whole levels.
    table[:, 1] = _shift_table(int(saturation))
    table[0, 1] = 0  # gray stays gray
    table[:, 2] = _shift_table(int(value))
    return Encoded((("form", "hsv"), ("lanes", opencv_lanes())), {"table": table})


def _run_hsv(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    if static["form"] == "gray":
        return look_up(images, arrays["table"])
    if static["form"] == "same":
        return images
    planes = torch.stack(hsv_bytes(images), -1).to(torch.uint8)
    hue, saturation, value = look_up(planes, arrays["table"]).unbind(-1)
    return rgb_bytes(hue, saturation, value, static["lanes"])


def _encode_jitter(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    if channels(shape) != 3:
        return None
    hue = params["hue"]
    drawn = (params["brightness"], params["contrast"], params["saturation"], hue)
    arrays: dict[str, np.ndarray] = {
        "factors": np.array(drawn, np.float64),
        "order": np.array(params["order"], np.int32),
        "hue_table": _hue_table(180 * hue)[:, None],
    }
    return Encoded((("shifts_hue", bool(hue != 0)), ("lanes", opencv_lanes())), arrays)


def _scaled(images: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    """Return ``images * gain + offset`` as Albumentations' tables do: in float32, cut to bytes."""
    return (images.float() * gain + offset).clamp(0, 255).to(torch.uint8)


def _contrast(images: Tensor, factor: Tensor) -> Tensor:
    total = gray(images).sum((1, 2), dtype=torch.int64)
    # Divided by a tensor: CUDA multiplies by the reciprocal of a number, and halves decide below.
    mean = total.double() / torch.full_like(total, images.shape[1] * images.shape[2]).double()
    offset = (mean * (1 - factor)).float()
    offset = torch.where(factor == 0, (mean + 0.5).floor().float(), offset)
    out = _scaled(images, factor.float()[:, None, None, None], offset[:, None, None, None])
    return torch.where((factor == 1)[:, None, None, None], images, out)


def _saturation(images: Tensor, factor: Tensor) -> Tensor:
    factor = factor.float()[:, None, None, None]
    mixed = images.float() * factor + gray(images).float().unsqueeze(-1) * (1 - factor)
    return torch.where(factor == 1, images, mixed.round().clamp(0, 255).to(torch.uint8))


def _hue(images: Tensor, arrays: Arrays, lanes: int) -> Tensor:
    hue, saturation, value = hsv_bytes(images)
    moved = look_up(hue.to(torch.uint8).unsqueeze(-1), arrays["hue_table"]).squeeze(-1)
    return rgb_bytes(moved, saturation, value, lanes)


def _run_jitter(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    # Each sample has its own order. A sample whose turn it is not has factor 1, which changes
    # nothing, so nothing here depends on values that only the device knows.
    for turn in arrays["order"].unbind(1):
        factors = [torch.where(turn == step, arrays["factors"][:, step], 1.0) for step in range(3)]
        gain = factors[0].float()[:, None, None, None]
        images = _scaled(images, gain, torch.zeros_like(gain))
        images = _contrast(images, factors[1])
        images = _saturation(images, factors[2])
        if static["shifts_hue"]:
            hued = _hue(images, arrays, static["lanes"])
            images = torch.where((turn == 3)[:, None, None, None], hued, images)
    return images


def _encode_gray(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    count, out = channels(shape), transform.num_output_channels
    if count == 1:
        return Encoded((("same", True), ("channels", 1)), {})
    # Albumentations drops the channel axis of one channel, and an axis of one pixel.
    if count != 3 or out == 1 or transform.method != "weighted_average" or 1 in shape[:2]:
        return None
    return Encoded((("same", False), ("channels", out)), {})


def _run_gray(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    if static["same"]:
        return images
    return gray(images).to(torch.uint8).unsqueeze(-1).repeat(1, 1, 1, static["channels"])


def _gray_shape(transform: Transform, params: Values, shape: Shape) -> Shape:
    return shape if channels(shape) == 1 else (*shape[:2], transform.num_output_channels)


def padded_kernel(kernel: np.ndarray) -> np.ndarray | None:
    """Return a kernel as float32, padded with zeros to a common size; None: its size is even."""
    if any(size % 2 == 0 for size in kernel.shape):
        return None
    margins = [-(size // 2) % _GRAIN for size in kernel.shape]
    sizes = [size + 2 * margin for size, margin in zip(kernel.shape, margins, strict=True)]
    padded = np.zeros(sizes, np.float32)
    padded[tuple(slice(m, m + size) for m, size in zip(margins, kernel.shape, strict=True))] = (
        kernel
    )
    return padded


def reflected(values: Tensor, axis: int, margin: int) -> Tensor:
    """Return ``[n, H, W, C]`` with a margin on both sides of one axis, reflected as OpenCV does."""
    if margin == 0:
        return values
    length = values.shape[axis]
    at = torch.arange(-margin, length + margin, device=values.device)
    return values.index_select(axis, fold(at, length, REFLECT_101))


def correlate(values: Tensor, kernel: Tensor) -> Tensor:
    """Correlate float32 ``[n, H, W, C]`` with a kernel of odd size per sample.

    Kernels are ``[n, k]``, for both axes one after the other, or ``[n, k, k]``.
    """
    if kernel.ndim == 2:
        return correlate(correlate(values, kernel[:, None, :]), kernel[:, :, None])
    _, height, width, _ = values.shape
    framed = reflected(reflected(values, 1, kernel.shape[1] // 2), 2, kernel.shape[2] // 2)
    total = torch.zeros_like(values)
    for row in range(kernel.shape[1]):
        for column in range(kernel.shape[2]):
            shifted = framed[:, row : row + height, column : column + width]
            total.addcmul_(shifted, kernel[:, row, column, None, None, None])
    return total


def run_kernel(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Correlate uint8 images with ``arrays["kernel"]`` and round as OpenCV does."""
    return correlate(images.float(), arrays["kernel"]).round().clamp(0, 255).to(torch.uint8)


def _encode_kernel(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    if isinstance(params["kernel"], int | np.integer):
        size = int(params["kernel"])
        kernel = padded_kernel(np.full(size, 1.0 / size))
    else:
        kernel = padded_kernel(np.asarray(params["kernel"]))
    return None if kernel is None else Encoded((), {"kernel": kernel})


def _encode_holes(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    fill, fill_mask = transform.fill, transform.fill_mask
    # Where Erasing found no place, Albumentations raises its own error.
    if isinstance(fill, str) or "seed" not in params:
        return None
    values = np.atleast_1d(np.array(fill, np.float64)).ravel().astype(np.float32)
    count = channels(shape)
    if values.size not in (1, count):
        return None
    holes = np.asarray(params["holes"], np.int32).reshape(-1, 4)
    missing = max(_GRAIN, len(holes) + -len(holes) % _GRAIN) - len(holes)
    padded = np.pad(holes, ((0, missing), (0, 0)))
    arrays = {"holes": padded, "fill": np.broadcast_to(values, count)}
    if fill_mask is not None:
        arrays["fill_mask"] = np.atleast_1d(np.array(fill_mask, np.float32)).ravel()
    return Encoded((), arrays)


def _fill_holes(name: str, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    if name not in arrays:
        return batch
    images = as_channels_last(batch)
    left, top, right, bottom = arrays["holes"].unsqueeze(-1).unbind(2)
    y = torch.arange(images.shape[1], device=batch.device)
    x = torch.arange(images.shape[2], device=batch.device)
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
    # Whether any of the holes covers a pixel: in float64, as torch may compute a matrix product of
    # float32 in TF32.
    covered = torch.bmm(rows.double().mT, columns.double()) > 0
    fill = arrays[name][:, None, None, :].to(batch.dtype)
    return torch.where(covered.unsqueeze(-1), fill, images).view(batch.shape)


def _encode_normalize(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    # Albumentations itself normalizes by the image's own mean or range.
    if dtype not in (np.uint8, np.float32) or transform.normalization != "standard":
        return None
    mean, gain = (
        np.asarray(values, np.float32).tobytes()
        for values in (transform.mean_np, transform.denominator)
    )
    return _rows(mean, gain, channels(shape))


@lru_cache(maxsize=64)
def _rows(mean: bytes, gain: bytes, count: int) -> Encoded:
    rows = {}
    for name, values in (("mean", mean), ("gain", gain)):
        given = np.frombuffer(values, np.float32)
        # As in albucore: if there are too few numbers, the first stands for all channels.
        row = given[:count] if given.size >= count else given[:1]
        rows[name] = np.broadcast_to(row, (count,)).copy()
    return Encoded((), rows)


def _normalize(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    mean, gain = (arrays[name][:, None, None, :] for name in ("mean", "gain"))
    return (images.float() - mean) * gain


def _encode_to_float(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    if dtype == np.float32:
        return Encoded((), {})  # Albumentations leaves it alone, whatever max_value is.
    if dtype != np.uint8:
        return None
    limit = 255.0 if transform.max_value is None else float(transform.max_value)
    return Encoded((), {"limit": np.array([limit], np.float32)})


def _to_float(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    # A tensor, not a number: CUDA would multiply by the reciprocal of a number.
    return images.float() / arrays["limit"][:, None, None, :] if "limit" in arrays else images


def _encode_to_tensor(transform: Transform, params: Values, shape: Shape, dtype: DType) -> Encoded:
    return Encoded((("transpose_mask", bool(transform.transpose_mask)),), {})


def _channels_first(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    return images.permute(0, 3, 1, 2).contiguous()


def _mask_to_tensor(masks: Tensor, static: Values, arrays: Arrays) -> Tensor:
    turned = static["transpose_mask"] and masks.ndim == 4
    return masks.permute(0, 3, 1, 2).contiguous() if turned else masks


def _float_dtype(transform: Transform, dtype: DType) -> DType:
    return np.dtype(np.float32)


OPS = (
    DeviceOp("RandomBrightnessContrast", encode_table, run_table),
    DeviceOp("RandomGamma", encode_table, run_table),
    DeviceOp("HueSaturationValue", _encode_hsv, _run_hsv),
    DeviceOp("ColorJitter", _encode_jitter, _run_jitter),
    DeviceOp("ToGray", _encode_gray, _run_gray, out_shape=_gray_shape),
    *(
        DeviceOp(name, _encode_kernel, run_kernel)
        for name in ("Blur", "GaussianBlur", "MotionBlur")
    ),
    *(
        DeviceOp(
            name, _encode_holes, partial(_fill_holes, "fill"), partial(_fill_holes, "fill_mask")
        )
        for name in ("CoarseDropout", "Erasing")
    ),
    DeviceOp("Normalize", _encode_normalize, _normalize, out_dtype=_float_dtype),
    DeviceOp("ToFloat", _encode_to_float, _to_float, out_dtype=_float_dtype),
    DeviceOp(
        "ToTensorV2",
        _encode_to_tensor,
        _channels_first,
        mask=_mask_to_tensor,
        out_shape=lambda _transform, _params, shape: (channels(shape), *shape[:2]),
    ),
)
"""Device forms that leave pixels in place. Tables, which Albumentations makes, gray, holes and the
operations that end a pipeline are exact. HueSaturationValue is at most one level off, mostly in the
last columns, which do not fill a vector of OpenCV and are rounded differently. In ColorJitter,
contrast and saturation can make that two or three levels. Blurs are at most one level off, mostly
where the sum lies between two levels."""

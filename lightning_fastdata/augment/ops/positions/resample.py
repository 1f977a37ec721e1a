"""Resizing, and cropping followed by resizing, with OpenCV's own arithmetic."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.positions.border import as_channels_last, gather

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape

NEAREST: Final = 0
LINEAR: Final = 1
CUBIC: Final = 2
_KNOWN: Final = frozenset({NEAREST, LINEAR})
_WEIGHT_BITS: Final = 11
"""OpenCV blends uint8 pixels with integer weights of this many bits."""


def _out_size(transform: Any) -> tuple[int, int]:
    if hasattr(transform, "size"):
        height, width = transform.size
    else:
        height, width = transform.height, transform.width
    return int(height), int(width)


@lru_cache(maxsize=64)
def _static(
    size: tuple[int, int], interpolation: int, mask_interpolation: int
) -> tuple[tuple[str, Any], ...]:
    return (
        ("size", size),
        ("interpolation", int(interpolation)),
        ("mask_interpolation", int(mask_interpolation)),
    )


def _encode(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    box = params.get("crop_coords", (0, 0, shape[1], shape[0]))
    left, top, right, bottom = box
    height, width = size = _out_size(transform)
    if not (0 <= left < right <= shape[1] and 0 <= top < bottom <= shape[0]):
        return None
    smaller = height < bottom - top or width < right - left
    kinds = transform.interpolation, transform.mask_interpolation
    if not _KNOWN.issuperset(kinds) or (smaller and transform.area_for_downscale is not None):
        return None
    if transform.area_for_downscale == "image_mask" and "crop_coords" in params:
        return None  # Masks of a crop are always means of areas.
    return Encoded(_static(size, *kinds), {"box": np.array(box, np.int32)})


def _step(length: torch.Tensor, out: int) -> torch.Tensor:
    """Return the source pixels per output pixel, to the last bit, which decides at whole steps.

    OpenCV takes the reciprocal of a quotient. Both are divisions of tensors: torch computes a
    number over a tensor as the tensor's reciprocal times the number, which rounds once more.
    """
    return 1.0 / (torch.full_like(length, out) / length)


def _nearest(first: torch.Tensor, last: torch.Tensor, out: int) -> torch.Tensor:
    length = (last - first).double()[:, None]
    grid = torch.arange(out, device=first.device, dtype=torch.float64)
    index = (grid * _step(length, out)).floor().minimum(length - 1)
    return index.long() + first[:, None]


def _linear(
    first: torch.Tensor, last: torch.Tensor, out: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the two source positions and the weight of the second, each ``[n, out]``."""
    length = (last - first).double()[:, None]
    grid = torch.arange(out, device=first.device, dtype=torch.float64)
    position = ((grid + 0.5) * _step(length, out) - 0.5).float()
    low = position.floor()
    weight = position - low
    edge = length.long() - 1
    below = low.long().clamp(min=0).minimum(edge)
    above = (low.long() + 1).clamp(min=0).minimum(edge)
    return below + first[:, None], above + first[:, None], weight


def blend_bytes(
    corners: list[torch.Tensor], across: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Return the mean of uint8 pixels above left, above right, below left and below right.

    Args:
        corners: the four, alike in shape.
        across: weight of the right ones, float32 in [0, 1]; broadcasts with them.
        down: weight of the lower ones.
    """
    one = 1 << _WEIGHT_BITS
    right, left = (across * one).round().int(), ((1 - across) * one).round().int()
    below, above = (down * one).round().int(), ((1 - down) * one).round().int()
    upper = (corners[0].int() * left + corners[1].int() * right) >> 4
    lower = (corners[2].int() * left + corners[3].int() * right) >> 4
    return ((((upper * above) >> 16) + ((lower * below) >> 16) + 2) >> 2).to(torch.uint8)


def _resample(setting: str) -> Any:
    def run(
        batch: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        images = as_channels_last(batch)
        height, width = static["size"]
        left, top, right, bottom = arrays["box"].long().unbind(1)
        if static[setting] == NEAREST:
            y, x = _nearest(top, bottom, height), _nearest(left, right, width)
            out = gather(images, y[:, :, None], x[:, None, :])
        else:
            y0, y1, down = _linear(top, bottom, height)
            x0, x1, across = _linear(left, right, width)
            # OpenCV clamps columns by dropping the weight, rows by reading the edge row twice.
            across = torch.where(x0 == x1, 0.0, across)
            corners = [
                gather(images, y[:, :, None], x[:, None, :]) for y in (y0, y1) for x in (x0, x1)
            ]
            across, down = across[:, None, :, None], down[:, :, None, None]
            if images.dtype == torch.uint8:
                out = blend_bytes(corners, across, down)
                if images.shape[-1] == 2:
                    # Halved in another way than one, three or four channels are.
                    halved = (bottom - top == 2 * height) & (right - left == 2 * width)
                    mean = torch.stack(corners).float().mean(0)
                    out = torch.where(halved[:, None, None, None], mean.round().byte(), out)
            else:
                upper = corners[0] * (1 - across) + corners[1] * across
                lower = corners[2] * (1 - across) + corners[3] * across
                mixed = upper * (1 - down) + lower * down
                # OpenCV rounds masks of other integers to the even number.
                out = (mixed if images.is_floating_point() else mixed.round()).to(images.dtype)
        return out.view(*out.shape[:3], *batch.shape[3:])

    return run


OPS = tuple(
    DeviceOp(
        name=name,
        encode=_encode,
        image=_resample("interpolation"),
        mask=_resample("mask_interpolation"),
        out_shape=lambda transform, _params, shape: (*_out_size(transform), *shape[2:]),
        fused="resize",
    )
    for name in ("Resize", "RandomResizedCrop", "RandomSizedCrop")
)
"""Nearest is exact. Linear on uint8 is exact, or off by one level in a few pixels when it enlarges;
on float32 it agrees to 1e-5."""

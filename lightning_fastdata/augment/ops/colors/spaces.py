"""RGB to gray and HSV and back, with OpenCV's own formulas."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor


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
    """Return uint8 RGB images of what `hsv_bytes` returns; `opencv_lanes` says how to round."""
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
    """Return how many pixels OpenCV here converts from HSV at a time; 0: it rounds them all.

    Whole groups of that many pixels of a row are truncated to bytes, the rest is rounded. It is
    read off a row of a color whose green is 173.67.
    """
    import cv2

    row = np.full((1, 255, 3), (10, 122, 255), np.uint8)
    truncated = int((cv2.cvtColor(row, cv2.COLOR_HSV2RGB)[0, :, 1] == 173).sum())
    return 256 - truncated if truncated else 0

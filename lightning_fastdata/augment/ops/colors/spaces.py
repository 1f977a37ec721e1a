"""RGB to gray, HSV, L*a*b* and YCrCb and back, with OpenCV's own formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor


def gray(images: Tensor) -> Tensor:
    """Return the luminance ``[n, H, W]`` of RGB images ``[n, H, W, 3]``: int32 or float32."""
    if images.dtype == torch.uint8:
        red, green, blue = images.int().unbind(-1)
        return (red * 9798 + green * 19235 + blue * 3735 + (1 << 14)) >> 15
    red, green, blue = images.unbind(-1)
    return red * 0.299 + green * 0.587 + blue * 0.114


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


def _hue(rgb: Tensor, high: Tensor, sixth: Tensor) -> Tensor:
    """Return the hue in degrees; ``high`` is the largest channel, ``sixth`` 60 over the span."""
    red, green, blue = rgb.unbind(-1)
    behind = torch.where(high == green, (blue - red) * sixth + 120, (red - green) * sixth + 240)
    hue = torch.where(high == red, (green - blue) * sixth, behind)
    return torch.where(hue < 0, hue + 360, hue)


def shift_hue_floats(images: Tensor, turn: Tensor) -> Tensor:
    """Return float32 RGB images with the hue moved by ``turn`` (1 is the whole circle)."""
    red, green, blue = images.unbind(-1)
    value = torch.maximum(torch.maximum(red, green), blue)
    spread = value - torch.minimum(torch.minimum(red, green), blue)
    tiny = torch.finfo(torch.float32).eps
    hue = _hue(images, value, 60.0 / (spread + tiny))
    hue = (hue + turn * 360).remainder(360)
    return _sector_colours(hue / 60, spread / (value.abs() + tiny), value)


_TO_XYZ: Final = np.array(
    [
        [0.412453, 0.357580, 0.180423],
        [0.212671, 0.715160, 0.072169],
        [0.019334, 0.119193, 0.950227],
    ]
)
_FROM_XYZ: Final = np.array(
    [
        [3.240479, -1.53715, -0.498535],
        [-0.969256, 1.875991, 0.041556],
        [0.055648, -0.204043, 1.057311],
    ]
)
_WHITE: Final = np.array([0.950456, 1.0, 1.088754])
"""The white point D65."""
_BASE: Final = 1 << 14
"""One, for the fixed-point numbers on the way back."""
_LOWEST: Final = -8145
"""First entry of the table of cubes."""
_DARK: Final = 216 / 24389
"""Below this, the cube root of L*a*b* is a straight line."""


class LabTables(NamedTuple):
    """Tables of OpenCV's conversions, int32, ready to be used on a device."""

    linear: Tensor
    """256 entries: a channel without its gamma, times 2040."""
    root: Tensor
    """3072 entries: cube root of a part of white, times ``2 ** 15``; by the part times 2040."""
    light: Tensor
    """256 entries: Y of a lightness, times ``2 ** 14``."""
    light_root: Tensor
    """256 entries: its cube root, times ``2 ** 14``."""
    cube: Tensor
    """36864 entries: cube of a number times ``2 ** 14``, from -8145 on."""
    gamma: Tensor
    """4096 entries: a channel with its gamma."""


def _quotient(number: np.ndarray, by: int) -> np.ndarray:
    """Divide integers towards zero, as C does."""
    quotient: np.ndarray = np.sign(number) * (np.abs(number) // by)
    return quotient


@cache
def _tables() -> Mapping[str, np.ndarray]:
    value = np.arange(256, dtype=np.float32) / np.float32(255)
    wide = value.astype(np.float64)
    linear = np.where(wide <= 0.04045, wide / 12.92, ((wide + 0.055) / 1.055) ** 2.4)
    # OpenCV computes these in float32, cuts the cube root off there, and rounds halves to even:
    # some entries lie that close to the middle of two integers.
    part = (np.arange(3072, dtype=np.float32) * np.float32(1 / 2040)).astype(np.float64)
    cut = np.cbrt(part).astype(np.float32)
    cut = np.where(cut > np.cbrt(part), np.nextafter(cut, np.float32(0)), cut)
    root = np.where(part < _DARK, part * (841 / 108) + 16 / 116, cut)
    lightness = np.arange(256)
    root_y = np.where(
        lightness <= 20,
        _BASE * (16 / 116 + lightness * 5 / (3 * 17 * 29)),
        lightness * 100 * _BASE / (255 * 116) + 16 * _BASE / 116,
    )
    light = np.where(lightness <= 20, lightness * _BASE * 180 / (17 * 29**3), root_y**3 / _BASE**2)
    number = np.arange(_LOWEST, _LOWEST + _BASE * 9 // 4)
    line = _quotient(number * 108, 841) - 290
    cube = np.where(number <= 3390, line, number * number // _BASE * number // _BASE)
    dim = np.arange(4096) / 4096
    gamma = np.where(dim <= 0.0031308, dim * 12.92, dim ** (1 / 2.4) * 1.055 - 0.055)
    return {
        "linear": np.rint(2040 * linear),
        "root": np.rint((1 << 15) * root),
        "light": np.rint(light),
        "light_root": np.rint(root_y),
        "cube": cube,
        "gamma": np.rint(255 * gamma),
    }


@cache
def lab_tables(device: torch.device) -> LabTables:
    """Return the tables on a device; made once, and then free to use in any stream."""
    return LabTables(
        **{
            name: torch.from_numpy(table.astype(np.int32)).to(device)
            for name, table in _tables().items()
        }
    )


def _look(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.reshape(-1)).view(index.shape)


def _mixed(weights: np.ndarray, values: Sequence[Tensor], shift: int) -> list[Tensor]:
    """Return weighted sums of three values, one per row of weights, over ``2 ** shift``."""
    first, second, third = values
    rows = np.rint(weights).astype(int).tolist()
    half = 1 << (shift - 1)
    return [(first * a + second * b + third * c + half) >> shift for a, b, c in rows]


def lab_bytes(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return L, a and b in 0..255 of uint8 RGB images ``[n, H, W, 3]``, int32 ``[n, H, W]``."""
    tables = lab_tables(images.device)
    channels = _look(tables.linear, images.int()).unbind(-1)
    parts = _mixed(_TO_XYZ * (4096 / _WHITE[:, None]), channels, 12)
    x, y, z = (_look(tables.root, part) for part in parts)
    half, middle = 1 << 14, 128 << 15
    lightness = (296 * y - 1336934 + half) >> 15  # 296 = 116 * 255 / 100
    return (
        lightness.clamp(0, 255),
        ((500 * (x - y) + middle + half) >> 15).clamp(0, 255),
        ((200 * (y - z) + middle + half) >> 15).clamp(0, 255),
    )


def rgb_from_lab(lightness: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return uint8 RGB images ``[n, H, W, 3]`` from what `lab_bytes` returns."""
    tables = lab_tables(lightness.device)
    y, root = _look(tables.light, lightness), _look(tables.light_root, lightness)
    # a / 500 and b / 200, times 2 ** 14.
    by_a = ((5 * a * 53687 + (1 << 7)) >> 13) - 4194
    by_b = ((b * 41943 + (1 << 4)) >> 9) - 10485 + 1
    x = _look(tables.cube, root + by_a - _LOWEST)
    z = _look(tables.cube, root - by_b - _LOWEST)
    dims = _mixed(_FROM_XYZ * (4096 * _WHITE), (x, y, z), 14)
    return torch.stack([_look(tables.gamma, dim.clamp(0, 4095)) for dim in dims], -1).to(
        torch.uint8
    )


def ycrcb_bytes(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Y, Cr and Cb in 0..255 of uint8 RGB images ``[n, H, W, 3]``, int32 ``[n, H, W]``."""
    red, green, blue = images.int().unbind(-1)
    half, middle = 1 << 13, 128 << 14
    y = (red * 4899 + green * 9617 + blue * 1868 + half) >> 14
    return (
        y,
        (((red - y) * 11682 + middle + half) >> 14).clamp(0, 255),
        (((blue - y) * 9241 + middle + half) >> 14).clamp(0, 255),
    )


def rgb_from_ycrcb(y: Tensor, cr: Tensor, cb: Tensor) -> Tensor:
    """Return uint8 RGB images ``[n, H, W, 3]`` from what `ycrcb_bytes` returns."""
    cr, cb, half = cr - 128, cb - 128, 1 << 13
    red = y + ((cr * 22987 + half) >> 14)
    green = y + ((cb * -5636 + cr * -11698 + half) >> 14)
    blue = y + ((cb * 29049 + half) >> 14)
    return torch.stack([red, green, blue], -1).clamp(0, 255).to(torch.uint8)

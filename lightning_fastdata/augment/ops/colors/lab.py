"""RGB to L*a*b* and to YCrCb and back, uint8, with OpenCV's own integer formulas."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

    linear: torch.Tensor
    """256 entries: a channel without its gamma, times 2040."""
    root: torch.Tensor
    """3072 entries: cube root of a part of white, times ``2 ** 15``; by the part times 2040."""
    light: torch.Tensor
    """256 entries: Y of a lightness, times ``2 ** 14``."""
    light_root: torch.Tensor
    """256 entries: its cube root, times ``2 ** 14``."""
    cube: torch.Tensor
    """36864 entries: cube of a number times ``2 ** 14``, from -8145 on."""
    gamma: torch.Tensor
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
    """Return the tables on a device; made once.

    The host waits for that one time: any stream may use them from then on.
    """
    return LabTables(
        **{
            name: torch.from_numpy(table.astype(np.int32)).to(device)
            for name, table in _tables().items()
        }
    )


def _look(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, index.reshape(-1)).view(index.shape)


def _mixed(weights: np.ndarray, values: Sequence[torch.Tensor], shift: int) -> list[torch.Tensor]:
    """Return weighted sums of three values, one per row of weights, over ``2 ** shift``."""
    first, second, third = values
    rows = np.rint(weights).astype(int).tolist()
    half = 1 << (shift - 1)
    return [(first * a + second * b + third * c + half) >> shift for a, b, c in rows]


def lab_bytes(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def rgb_from_lab(lightness: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
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


def ycrcb_bytes(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Y, Cr and Cb in 0..255 of uint8 RGB images ``[n, H, W, 3]``, int32 ``[n, H, W]``."""
    red, green, blue = images.int().unbind(-1)
    half, middle = 1 << 13, 128 << 14
    y = (red * 4899 + green * 9617 + blue * 1868 + half) >> 14
    return (
        y,
        (((red - y) * 11682 + middle + half) >> 14).clamp(0, 255),
        (((blue - y) * 9241 + middle + half) >> 14).clamp(0, 255),
    )


def rgb_from_ycrcb(y: torch.Tensor, cr: torch.Tensor, cb: torch.Tensor) -> torch.Tensor:
    """Return uint8 RGB images ``[n, H, W, 3]`` from what `ycrcb_bytes` returns."""
    cr, cb, half = cr - 128, cb - 128, 1 << 13
    red = y + ((cr * 22987 + half) >> 14)
    green = y + ((cb * -5636 + cr * -11698 + half) >> 14)
    blue = y + ((cb * 29049 + half) >> 14)
    return torch.stack([red, green, blue], -1).clamp(0, 255).to(torch.uint8)

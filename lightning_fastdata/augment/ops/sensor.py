"""Noise of a camera's sensor, whose strength depends on the brightness of the image."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.positions.border import channels
from lightning_fastdata.augment.ops.splitmix import normal, uniform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape

_MOST_COUNTS: Final = 256
"""Larger counts of photons are left to Albumentations, as their tables would not fit."""
_COLOR_STREAM: Final = 1


def _seed(params: Mapping[str, Any]) -> np.ndarray:
    # Albumentations draws 32 bits for a generator of its own.
    return np.array([int(params["random_seed"]), 0x5EED], np.int64)


def poisson_counts(mean: float) -> int:
    """Return a power of two that a Poisson number reaches less than once in 1e8 draws."""
    return max(4, 1 << math.ceil(math.log2(mean + 7 * math.sqrt(mean) + 12)))


def poisson_below(mean: torch.Tensor, counts: int) -> torch.Tensor:
    """Return the probability of at most 0, 1, ... ``counts - 1``: float32 ``[..., counts]``."""
    whole = torch.arange(1, counts + 1, device=mean.device, dtype=torch.float64)
    below: torch.Tensor = torch.special.gammaincc(whole, mean.double().unsqueeze(-1))
    return below.float()


def _encode_iso(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    # The brightness of an image within [0, 1] deviates by at most a half.
    counts = poisson_counts(transform.intensity[1] / 2)
    if channels(shape) != 3 or counts > _MOST_COUNTS or dtype not in (np.uint8, np.float32):
        return None
    numbers = np.array([params["color_shift"], params["intensity"]], np.float64)
    return Encoded((("counts", counts),), {"numbers": numbers, "seed": _seed(params)})


def _hls(rgb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hue in degrees, lightness and saturation of floats ``[..., 3]``, as OpenCV does."""
    red, green, blue = rgb.unbind(-1)
    high, low = rgb.amax(-1), rgb.amin(-1)
    span, total = high - low, high + low
    lightness = total * 0.5
    colored = span > torch.finfo(torch.float32).eps
    saturation = span / torch.where(lightness < 0.5, total, 2 - total)
    sixth = torch.full_like(span, 60) / span
    hue = torch.where(
        high == red,
        (green - blue) * sixth,
        torch.where(high == green, (blue - red) * sixth + 120, (red - green) * sixth + 240),
    )
    hue = torch.where(hue < 0, hue + 360, hue)
    return torch.where(colored, hue, 0.0), lightness, torch.where(colored, saturation, 0.0)


def _rgb(hue: torch.Tensor, lightness: torch.Tensor, saturation: torch.Tensor) -> torch.Tensor:
    """Return the reverse of :func:`_hls`; the hue may lie outside of 0 to 360."""
    top = torch.where(
        lightness <= 0.5,
        lightness * (1 + saturation),
        lightness + saturation - lightness * saturation,
    )
    bottom = 2 * lightness - top
    sextant = hue * (6 / 360)
    # A channel rises over one sextant, stays for two, falls over one, and stays for two.
    turns = torch.stack([sextant + 2, sextant, sextant - 2], -1).remainder(6)
    share = torch.minimum(turns, 4 - turns).clamp(0, 1)
    return bottom.unsqueeze(-1) + (top - bottom).unsqueeze(-1) * share


def _iso(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    n, height, width, _ = images.shape
    count, whole = height * width, images.dtype == torch.uint8
    values = images / torch.full((), 255.0, device=images.device) if whole else images
    hue, lightness, saturation = _hls(values)
    shift, intensity = arrays["numbers"][:, :, None].unbind(1)
    deviation = lightness.double().reshape(n, -1).std(1, correction=0, keepdim=True)
    below = poisson_below(deviation * intensity, static["counts"])
    drawn = uniform(arrays["seed"], count)
    grains = torch.zeros_like(drawn)
    for step in below[:, 0].unbind(1):
        grains += drawn >= step[:, None]
    grains = (grains * intensity.float()).view_as(lightness)
    lightness = (lightness + grains * (1 - lightness)).clamp(0, 1)
    colors = normal(arrays["seed"], count, _COLOR_STREAM) * (shift * intensity).float()
    out = _rgb(hue + colors.view_as(hue), lightness, saturation).clamp(0, 1)
    return (out * 255).round().to(torch.uint8) if whole else out


def _encode_shot(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    if dtype != np.uint8 or transform.scale_range[0] <= 0:
        return None
    counts = poisson_counts(1 / transform.scale_range[0])
    if counts > _MOST_COUNTS:
        return None
    scale = float(params["scale"])
    # The levels after each count of photons, and the mean count before, at each level.
    ramp = np.arange(256, dtype=np.float32) / 255
    means = (ramp**2.2 + scale * 1e-6) / scale
    photons = np.clip(np.arange(counts, dtype=np.float32) * np.float32(scale), 0, 1)
    levels = np.rint(photons ** np.float32(1 / 2.2) * 255).astype(np.uint8)
    arrays = {"means": means.astype(np.float32), "levels": levels, "seed": _seed(params)}
    return Encoded((("counts", counts),), arrays)


def _shot(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    counts, n = static["counts"], len(images)
    values = images.reshape(n, -1)
    below = poisson_below(arrays["means"], counts).view(-1)
    first = (torch.arange(n, device=images.device)[:, None] * 256 + values) * counts
    drawn = uniform(arrays["seed"], values.shape[1])
    # How many probabilities are reached, by bisection in the row of the pixel's level.
    found = torch.zeros_like(first)
    step = counts // 2
    while step:
        reached = drawn >= below.index_select(0, (first + found + step - 1).view(-1)).view(n, -1)
        found += reached * step
        step //= 2
    row = torch.arange(n, device=images.device)[:, None] * counts
    out = arrays["levels"].view(-1).index_select(0, (row + found).view(-1))
    return out.view(images.shape)


OPS = (
    DeviceOp(name="ISONoise", encode=_encode_iso, image=_iso, draws_pixels=lambda _transform: True),
    DeviceOp(
        name="ShotNoise", encode=_encode_shot, image=_shot, draws_pixels=lambda _transform: True
    ),
)
"""The distribution of Albumentations' noise, of the strength that it drew."""

"""Noise: sums, factors and the grain of a sensor, which the device draws."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_fastdata.augment.ops import splitmix
from lightning_fastdata.augment.ops.colors.spaces import hls_floats, rgb_from_hls
from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Shape,
    Transform,
    Values,
    always,
    channels,
)
from lightning_fastdata.augment.ops.table import (
    change_value,
    encode_value,
)
from lightning_fastdata.augment.replay import instructions

_DTYPES: Final = (np.dtype(np.uint8), np.dtype(np.float32))
_COLOR_STREAM: Final = 1
_MOST_COUNTS: Final = 256
"""Larger counts of photons are deferred to Albumentations, as their tables would not fit."""


def _limit(dtype: DType | torch.dtype) -> int:
    return 255 if dtype in (np.dtype(np.uint8), torch.uint8) else 1


def _encode_drawn(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    encoded: Encoded | None = params.get("drawn")
    return encoded


def _draw_gauss(transform: Transform, params: Values, data: Values) -> Values | None:
    dtype = data["image"].dtype
    if dtype not in _DTYPES:
        return None
    scale = transform.py_random.uniform(*transform.std_range)
    location = transform.py_random.uniform(*transform.mean_range)
    seed = splitmix.peek_seed(transform.random_generator)
    transform.random_generator.integers(0, 2**16)  # Albumentations seeds OpenCV with it
    shared, part = not transform.per_channel, float(transform.noise_scale_factor)
    # Of images from 0 to 1.
    arrays = {"seed": seed, "numbers": np.array((location, scale), np.float32) * _limit(dtype)}
    return {"drawn": Encoded((("shared", shared), ("part", part)), arrays)}


def _reduced(size: tuple[int, ...], part: float) -> tuple[int, int]:
    return max(1, int(size[0] * part)), max(1, int(size[1] * part))


def _add(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    n, height, width, count = images.shape
    size = _reduced((height, width), static["part"])
    layers = 1 if static["shared"] else count
    noise = splitmix.normal(arrays["seed"], size[0] * size[1] * layers)
    location, scale = arrays["numbers"][:, :, None].unbind(1)
    noise = (noise * scale + location).view(n, *size, layers)
    if size != (height, width):
        small = noise.permute(0, 3, 1, 2)
        noise = interpolate(small, (height, width), mode="bilinear").permute(0, 2, 3, 1)
    # Albumentations cuts the fraction off the noise before it adds whole levels.
    noise = noise.trunc() if images.dtype == torch.uint8 else noise
    return (images.float() + noise).clamp(0, _limit(images.dtype)).to(images.dtype)


def _draw_factors(transform: Transform, params: Values, data: Values) -> Values | None:
    image = data["image"]
    if not transform.elementwise or image.dtype not in _DTYPES:
        return None
    seed = splitmix.peek_seed(transform.random_generator)
    layers = channels(image.shape) if transform.per_channel else 1
    splitmix.skip_doubles(transform.random_generator, image.shape[0] * image.shape[1] * layers)
    arrays = {"seed": seed, "limits": np.array(transform.multiplier, np.float32)}
    return {"drawn": Encoded((("form", "each"), ("layers", layers)), arrays)}


def _encode_gain(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    encode = _encode_drawn if transform.elementwise else encode_value
    return encode(transform, params, shape, dtype)


def _multiply(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    if static["form"] != "each":
        return change_value(images, static, arrays)
    n, height, width, _ = images.shape
    drawn = splitmix.uniform(arrays["seed"], height * width * static["layers"])
    low, high = arrays["limits"][:, :, None].unbind(1)
    factors = (low + (high - low) * drawn).view(n, height, width, static["layers"])
    return (images.float() * factors).clamp(0, _limit(images.dtype)).to(images.dtype)


def poisson_counts(mean: float) -> int:
    """Return a power of two that a Poisson number reaches less than once in 1e8 draws."""
    return max(4, 1 << math.ceil(math.log2(mean + 7 * math.sqrt(mean) + 12)))


def poisson_below(mean: Tensor, counts: int) -> Tensor:
    """Return the probability of at most 0, 1, ... ``counts - 1``: float32 ``[..., counts]``."""
    whole = torch.arange(1, counts + 1, device=mean.device, dtype=torch.float64)
    below: Tensor = torch.special.gammaincc(whole, mean.double().unsqueeze(-1))
    return below.float()


def _encode_iso(transform: Transform, params: Values, shape: Shape, dtype: DType) -> Encoded | None:
    # The brightness of an image within [0, 1] deviates by at most a half.
    counts = poisson_counts(transform.intensity[1] / 2)
    if channels(shape) != 3 or counts > _MOST_COUNTS or dtype not in _DTYPES:
        return None
    numbers = np.array([params["color_shift"], params["intensity"]], np.float64)
    # Albumentations draws 32 bits for a generator of its own.
    seed = np.array([int(params["random_seed"]), 0x5EED], np.int64)
    return Encoded((("counts", counts),), {"numbers": numbers, "seed": seed})


def _iso(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    n, height, width, _ = images.shape
    count, whole = height * width, images.dtype == torch.uint8
    values = images / torch.full((), 255.0, device=images.device) if whole else images
    hue, lightness, saturation = hls_floats(values)
    shift, intensity = arrays["numbers"][:, :, None].unbind(1)
    deviation = lightness.double().reshape(n, -1).std(1, correction=0, keepdim=True)
    below = poisson_below(deviation * intensity, static["counts"])
    drawn = splitmix.uniform(arrays["seed"], count)
    grains = torch.zeros_like(drawn)
    for step in below[:, 0].unbind(1):
        grains += drawn >= step[:, None]
    grains = (grains * intensity.float()).view_as(lightness)
    lightness = (lightness + grains * (1 - lightness)).clamp(0, 1)
    colors = splitmix.normal(arrays["seed"], count, _COLOR_STREAM) * (shift * intensity).float()
    out = rgb_from_hls(hue + colors.view_as(hue), lightness, saturation).clamp(0, 1)
    return (out * 255).round().to(torch.uint8) if whole else out


OPS = (
    DeviceOp("GaussNoise", _encode_drawn, _add, draw=_draw_gauss, draws_pixels=always),
    DeviceOp(
        "MultiplicativeNoise",
        _encode_gain,
        _multiply,
        draw=_draw_factors,
        draws_pixels=lambda transform: transform.elementwise,
        fused=instructions.table,
    ),
    DeviceOp("ISONoise", _encode_iso, _iso, draws_pixels=always),
)
"""The distribution of Albumentations' noise, with its drawn strength. Exact for
MultiplicativeNoise that is not elementwise."""

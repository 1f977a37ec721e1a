"""Noise that the device draws: sums, lost pixels, and the grain of a sensor."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

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
    always,
    as_channels_last,
    channels,
)
from lightning_fastdata.augment.ops.splitmix import (
    normal,
    peek_seed,
    skip_doubles,
    take_seed,
    uniform,
    words,
)
from lightning_fastdata.augment.ops.table import change_value, encode_value, look_up, ramp_table
from lightning_fastdata.augment.replay import instructions

_DTYPES: Final = (np.dtype(np.uint8), np.dtype(np.float32))
_MASK_STREAM: Final = 1


def _limit(dtype: Any) -> int:
    return 255 if dtype in (np.dtype(np.uint8), torch.uint8) else 1


def _summand(
    seed: np.ndarray, kind: str, spatial: str, location: float, scale: float, approximation: float
) -> dict[str, Any]:
    return {
        "summand_seed": seed,
        "summand": np.array([location, scale], np.float32),
        "summand_form": (kind, spatial == "shared", float(approximation)),
    }


def _draw_gauss(transform: Transform, params: Params, data: Params) -> Drawn | None:
    if data["image"].dtype not in _DTYPES:
        return None
    scale = transform.py_random.uniform(*transform.std_range)
    location = transform.py_random.uniform(*transform.mean_range)
    seed = peek_seed(transform.random_generator)
    transform.random_generator.integers(0, 2**16)  # Albumentations seeds OpenCV with it
    spatial = "per_pixel" if transform.per_channel else "shared"
    factor = transform.noise_scale_factor
    return _summand(seed, "gaussian", spatial, location, scale, factor)


def _either(generator: np.random.Generator, limits: tuple[float, float]) -> float:
    return limits[0] if limits[0] == limits[1] else generator.uniform(*limits)


def _draw_additive(transform: Transform, params: Params, data: Params) -> Drawn | None:
    kind, spatial, settings = transform.noise_type, transform.spatial_mode, transform.noise_params
    if spatial == "constant" or kind == "beta" or not settings:
        return None
    if data["image"].dtype not in _DTYPES:
        return None
    generator = transform.random_generator
    seed = peek_seed(generator)
    generator.integers(0, 2**16)
    if kind == "uniform":
        location, high = settings["ranges"][0]
        scale = high - location
    elif kind == "gaussian":
        location = _either(generator, settings["mean_range"])
        scale = _either(generator, settings["std_range"])
    else:
        location = generator.uniform(*settings["mean_range"])
        scale = generator.uniform(*settings["scale_range"])
    if kind != "gaussian":  # that one comes from OpenCV's generator
        shape = data["image"].shape
        height, width = _reduced(shape[:2], transform.approximation)
        count = channels(shape) if spatial == "per_pixel" else 1
        skip_doubles(generator, height * width * count)
    return _summand(seed, kind, spatial, location, scale, transform.approximation)


def _reduced(size: tuple[int, ...], approximation: float) -> tuple[int, int]:
    height, width = size
    return max(1, int(height * approximation)), max(1, int(width * approximation))


def _encode_summand(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    if dtype not in _DTYPES:
        return None
    if "summand" in params:
        kind, shared, approximation = params["summand_form"]
        static = (("kind", kind), ("shared", shared), ("approximation", approximation))
        arrays = {"seed": params["summand_seed"], "numbers": params["summand"] * _limit(dtype)}
        return Encoded(static, arrays)
    noise = np.asarray(params["noise_map"])
    if noise.ndim != 1 or noise.size != channels(shape):
        return None
    if dtype == np.uint8:
        table = ramp_table(transform, params, channels(shape))
        return Encoded((("kind", "table"),), {"table": table})
    return Encoded((("kind", "constant"),), {"numbers": noise.astype(np.float32)})


def _standard(kind: str, seed: Tensor, count: int) -> Tensor:
    """Return numbers of a distribution with location 0 and scale 1, float32 ``[n, count]``."""
    if kind == "gaussian":
        return normal(seed, count)
    numbers = uniform(seed, count)
    if kind == "uniform":
        return numbers
    # Laplace: the logarithm of a number in (0, 1), with either sign.
    signed = numbers * 2 - (1 - 2.0**-24)
    return torch.copysign(torch.log1p(-signed.abs()), signed)


def _add(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    kind = static["kind"]
    if kind == "table":
        return look_up(images, arrays["table"])
    if kind == "constant":
        return (images + arrays["numbers"][:, None, None, :]).clamp(0, 1)
    n, height, width, count = images.shape
    size = _reduced((height, width), static["approximation"])
    layers = 1 if static["shared"] else count
    noise = _standard(kind, arrays["seed"], size[0] * size[1] * layers)
    location, scale = arrays["numbers"][:, :, None].unbind(1)
    noise = (noise * scale + location).view(n, *size, layers)
    if size != (height, width):
        small = noise.permute(0, 3, 1, 2)
        noise = interpolate(small, (height, width), mode="bilinear").permute(0, 2, 3, 1)
    # Albumentations cuts the fraction off the noise before it adds whole levels.
    noise = noise.trunc() if images.dtype == torch.uint8 else noise
    return (images.float() + noise).clamp(0, _limit(images.dtype)).to(images.dtype)


def _draw_factors(transform: Transform, params: Params, data: Params) -> Drawn | None:
    image = data["image"]
    if not transform.elementwise or image.dtype not in _DTYPES:
        return None
    generator = transform.random_generator
    seed = peek_seed(generator)
    layers = channels(image.shape) if transform.per_channel else 1
    skip_doubles(generator, image.shape[0] * image.shape[1] * layers)
    return {"factors_seed": seed}


def _encode_factors(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    if not transform.elementwise:
        return encode_value(transform, params, shape, dtype)
    if "factors_seed" not in params or dtype not in _DTYPES:
        return None
    limits = np.array(transform.multiplier, np.float32)
    static = (("form", "each"), ("layers", channels(shape) if transform.per_channel else 1))
    return Encoded(static, {"seed": params["factors_seed"], "limits": limits})


def _multiply(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    if static["form"] != "each":
        return change_value(images, static, arrays)
    n, height, width, _ = images.shape
    drawn = uniform(arrays["seed"], height * width * static["layers"])
    low, high = arrays["limits"][:, :, None].unbind(1)
    factors = (low + (high - low) * drawn).view(n, height, width, static["layers"])
    return (images.float() * factors).clamp(0, _limit(images.dtype)).to(images.dtype)


def _draw_specks(transform: Transform, params: Params, data: Params) -> Drawn | None:
    if data["image"].dtype not in _DTYPES:
        return None
    height, width = data["image"].shape[:2]
    amount = transform.py_random.uniform(*transform.amount)
    share = transform.py_random.uniform(*transform.salt_vs_pepper)
    pixels = int(height * width * amount)
    counts = np.array([int(pixels * share), pixels], np.int64)
    return {"specks_seed": take_seed(transform.random_generator), "specks": counts}


def _encode_specks(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    if "specks" not in params or dtype not in _DTYPES:
        return None
    return Encoded((), {"seed": params["specks_seed"], "counts": params["specks"]})


def _specks(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    n, height, width, _ = images.shape
    # Pixels in the order of random words: as many as Albumentations chose, no fewer and no more.
    order = words(arrays["seed"], height * width)
    ranked = order.sort(1).values
    last = (arrays["counts"] - 1).clamp(min=0)
    chosen = (order[:, :, None] <= ranked.gather(1, last)[:, None]) & (arrays["counts"] > 0)[
        :, None
    ]
    salt, both = chosen.view(n, height, width, 1, 2).unbind(-1)
    return torch.where(salt, _limit(images.dtype), torch.where(both, 0, images))


def _draw_lost(transform: Transform, params: Params, data: Params) -> Drawn | None:
    from albumentations.augmentations.pixel import functional

    image, mask = data["image"], functional.get_mask_array(data)
    if image.dtype not in _DTYPES:
        return None
    generator = transform.random_generator
    drawn: dict[str, Any] = {"lost_seed": peek_seed(generator)}
    targets = [("lost", image, transform.drop_value)]
    if transform.mask_drop_value is not None and mask is not None:
        targets.append(("lost_mask", mask, transform.mask_drop_value))
    for name, array, value in targets:
        count = channels(array.shape)
        skip_doubles(generator, array.size if transform.per_channel else array.size // count)
        pixel = np.empty((1, 1, count), array.dtype)
        drawn[name] = functional.prepare_drop_values(pixel, value, generator).reshape(-1)
    return drawn


def _encode_lost(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    if "lost" not in params or params["lost"].size not in (1, channels(shape)):
        return None
    arrays = {"value": params["lost"], "seed": params["lost_seed"]}
    if "lost_mask" in params:
        arrays["mask_value"] = params["lost_mask"]
    if "drop_mask" in params:
        # Boxes are filtered by the pixels that were lost, so those travel.
        lost = {"lost": params["drop_mask"], "lost_mask": params["mask_drop_mask"]}
        for name, where in lost.items():
            if where is not None:
                one = where[..., :1] if where.ndim == 3 and not transform.per_channel else where
                arrays[name] = np.packbits(one)
        del arrays["seed"]
    static = (("each", bool(transform.per_channel)), ("share", float(transform.dropout_prob)))
    return Encoded(static, arrays)


def _lose(value: str, lost: str, stream: int) -> Any:
    def run(batch: Tensor, static: Static, arrays: Arrays) -> Tensor:
        if value not in arrays:
            return batch
        images = as_channels_last(batch)
        n, height, width, count = images.shape
        layers = count if static["each"] else 1
        total = height * width * layers
        if lost in arrays:
            place = torch.arange(7, -1, -1, device=batch.device, dtype=torch.uint8)
            chosen = (arrays[lost][:, :, None] >> place & 1).view(n, -1)[:, :total] > 0
        else:
            chosen = uniform(arrays["seed"], total, stream) < static["share"]
        chosen = chosen.view(n, height, width, layers)
        out = torch.where(chosen, arrays[value].to(batch.dtype)[:, None, None, :], images)
        return out.reshape(batch.shape)

    return run


_MOST_COUNTS: Final = 256
"""Larger counts of photons are left to Albumentations, as their tables would not fit."""
_COLOR_STREAM: Final = 1


def _sensor_seed(params: Params) -> np.ndarray:
    # Albumentations draws 32 bits for a generator of its own.
    return np.array([int(params["random_seed"]), 0x5EED], np.int64)


def poisson_counts(mean: float) -> int:
    """Return a power of two that a Poisson number reaches less than once in 1e8 draws."""
    return max(4, 1 << math.ceil(math.log2(mean + 7 * math.sqrt(mean) + 12)))


def poisson_below(mean: Tensor, counts: int) -> Tensor:
    """Return the probability of at most 0, 1, ... ``counts - 1``: float32 ``[..., counts]``."""
    whole = torch.arange(1, counts + 1, device=mean.device, dtype=torch.float64)
    below: Tensor = torch.special.gammaincc(whole, mean.double().unsqueeze(-1))
    return below.float()


def _encode_iso(transform: Transform, params: Params, shape: Shape, dtype: DType) -> Encoded | None:
    # The brightness of an image within [0, 1] deviates by at most a half.
    counts = poisson_counts(transform.intensity[1] / 2)
    if channels(shape) != 3 or counts > _MOST_COUNTS or dtype not in (np.uint8, np.float32):
        return None
    numbers = np.array([params["color_shift"], params["intensity"]], np.float64)
    return Encoded((("counts", counts),), {"numbers": numbers, "seed": _sensor_seed(params)})


def _hls(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def _rgb(hue: Tensor, lightness: Tensor, saturation: Tensor) -> Tensor:
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


def _iso(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
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
    transform: Transform, params: Params, shape: Shape, dtype: DType
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
    arrays = {"means": means.astype(np.float32), "levels": levels, "seed": _sensor_seed(params)}
    return Encoded((("counts", counts),), arrays)


def _shot(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
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
    DeviceOp(
        "GaussNoise",
        _encode_summand,
        _add,
        draw=_draw_gauss,
        draws_pixels=always,
    ),
    DeviceOp(
        "AdditiveNoise",
        _encode_summand,
        _add,
        draw=_draw_additive,
        draws_pixels=lambda transform: transform.spatial_mode != "constant",
    ),
    DeviceOp(
        "MultiplicativeNoise",
        _encode_factors,
        _multiply,
        draw=_draw_factors,
        draws_pixels=lambda transform: transform.elementwise,
        fused=instructions.table,
    ),
    DeviceOp(
        "SaltAndPepper",
        _encode_specks,
        _specks,
        draw=_draw_specks,
        draws_pixels=always,
    ),
    DeviceOp(
        "PixelDropout",
        _encode_lost,
        _lose("value", "lost", 0),
        mask=_lose("mask_value", "lost_mask", _MASK_STREAM),
        draw=_draw_lost,
        draws_pixels=always,
    ),
    DeviceOp("ISONoise", _encode_iso, _iso, draws_pixels=always),
    DeviceOp("ShotNoise", _encode_shot, _shot, draws_pixels=always),
)
"""The distribution of Albumentations' noise, with its drawn strength, amount and values. Exact for
AdditiveNoise that is constant in space, for MultiplicativeNoise that is not elementwise, and for
PixelDropout where there are boxes."""

"""Noise of uint8 images that the device draws."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_fastdata.augment.ops import splitmix
from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Shape,
    Transform,
    Values,
    always,
)


def _encode_drawn(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    encoded: Encoded | None = params.get("drawn")
    return encoded


def _draw_gauss(transform: Transform, params: Values, data: Values) -> Values | None:
    scale = transform.py_random.uniform(*transform.std_range)
    location = transform.py_random.uniform(*transform.mean_range)
    seed = splitmix.peek_seed(transform.random_generator)
    transform.random_generator.integers(0, 2**16)  # Albumentations seeds OpenCV with it
    shared, part = not transform.per_channel, float(transform.noise_scale_factor)
    # Of images from 0 to 1.
    arrays = {"seed": seed, "numbers": np.array((location, scale), np.float32) * 255}
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
    return (images.float() + noise.trunc()).clamp(0, 255).to(torch.uint8)


OPS = (DeviceOp("GaussNoise", _encode_drawn, _add, draw=_draw_gauss, draws_pixels=always),)
"""The distribution of Albumentations' noise, with its drawn strength."""

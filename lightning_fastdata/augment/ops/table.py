"""Operations on single values of uint8 images: a table of 256 entries."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Shape,
    Transform,
    Values,
    channels,
)


def look_up(images: Tensor, table: Tensor) -> Tensor:
    """Return ``table[i, value, channel]`` for every value of image ``i``.

    Of uint8 ``[n, H, W, C]`` and a table ``[n, 256, C]``, or ``[n, 256, 1]`` for all channels.
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
    """Return what a transform makes of every byte, as a table."""
    table = ramp_table(transform, params, channels(shape))
    return Encoded((("form", "table"),), {"table": table})


def run_table(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Run what `encode_table` encoded."""
    return look_up(images, arrays["table"])


OPS = tuple(
    DeviceOp(name, encode_table, run_table) for name in ("RandomBrightnessContrast", "RandomGamma")
)
"""Exact, since the table is made by Albumentations."""

"""Operations that follow from the histograms of each uint8 image."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from typing import Final

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
from lightning_fastdata.augment.ops.table import look_up

_COUNTS_IN_FLOAT32: Final = 1 << 24
"""Albumentations counts pixels in float32: from this number on it miscounts."""


def channel_histograms(images: Tensor) -> Tensor:
    """Return how often each value is in each channel of uint8 ``[n, H, W, C]``: ``[n, C, 256]``."""
    values = images.flatten(1, 2).mT
    first = torch.arange(values[..., 0].numel(), device=values.device, dtype=torch.int32) * 256
    bins = (first.view(*values.shape[:-1], 1) + values).reshape(-1)
    counts = torch.zeros(len(first) * 256, device=values.device, dtype=torch.int32)
    # Whole numbers: the order in which a GPU adds them does not matter.
    ones = torch.ones(1, device=values.device, dtype=torch.int32).expand(bins.shape)
    return counts.index_add_(0, bins, ones).view(*values.shape[:-1], 256)


def _identity(counts: Tensor) -> Tensor:
    return torch.arange(256, device=counts.device, dtype=torch.float32)


def _equalizing(counts: Tensor, mode: str) -> Tensor:
    """Return the tables that spread histograms: uint8, ``[..., 256]`` like ``counts``."""
    below = counts.cumsum(-1)
    total = below[..., -1:]
    if mode == "cv":
        darkest = below.where(below > 0, total).amin(-1, keepdim=True)
        spread = total - darkest
        # A quotient of tensors: CUDA would multiply by the reciprocal of a number.
        scale = torch.full_like(spread, 255).float() / spread.clamp(min=1).float()
        table = ((below - darkest).float() * scale).round()
    else:
        brightest = counts.gather(-1, (below < total).sum(-1, keepdim=True))
        spread = (total - brightest) // 255
        step = spread.clamp(min=1)
        table = ((below + step // 2) // step).float()
    table = torch.where(spread == 0, _identity(counts), table)
    return table.clamp(0, 255).to(torch.uint8)


def _encode_equal(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    count, countable = channels(shape), shape[0] * shape[1] < _COUNTS_IN_FLOAT32
    if params["mask"] is not None or count not in (1, 3) or not countable:
        return None
    if count == 3 and not transform.by_channels:
        return None
    return Encoded((("mode", transform.mode),), {})


def _equalize(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    return look_up(images, _equalizing(channel_histograms(images), static["mode"]).mT)


OPS = (DeviceOp("Equalize", _encode_equal, _equalize),)
"""Exact."""

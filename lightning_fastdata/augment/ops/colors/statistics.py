"""Operations that follow from the histograms of each image."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.colors import spaces
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
from lightning_fastdata.augment.ops.positions.index import REFLECT_101, fold
from lightning_fastdata.augment.ops.table import look_up, through_bytes

_COUNTS_IN_FLOAT32: Final = 1 << 24
"""Albumentations counts pixels in float32: from this number on it miscounts."""


def _histograms(values: Tensor) -> Tensor:
    """Return how often each value is in rows of uint8 ``[..., pixels]``: int32 ``[..., 256]``."""
    first = torch.arange(values[..., 0].numel(), device=values.device, dtype=torch.int32) * 256
    bins = (first.view(*values.shape[:-1], 1) + values).reshape(-1)
    counts = torch.zeros(len(first) * 256, device=values.device, dtype=torch.int32)
    # Whole numbers: the order in which a GPU adds them does not matter.
    ones = torch.ones(1, device=values.device, dtype=torch.int32).expand(bins.shape)
    return counts.index_add_(0, bins, ones).view(*values.shape[:-1], 256)


def channel_histograms(images: Tensor) -> Tensor:
    """Return the histograms of uint8 ``[n, H, W, C]``: int32 ``[n, C, 256]``."""
    return _histograms(images.flatten(1, 2).mT.contiguous())


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
    luma = count == 3 and not transform.by_channels
    return Encoded((("mode", transform.mode), ("luma", luma)), {})


@through_bytes
def _equalize(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    if not static["luma"]:
        tables = _equalizing(channel_histograms(images), static["mode"])
        return look_up(images, tables.mT)
    luma, red, blue = spaces.ycrcb_bytes(images)
    luma = luma.to(torch.uint8).unsqueeze(-1)
    tables = _equalizing(channel_histograms(luma), static["mode"])
    return spaces.rgb_from_ycrcb(look_up(luma, tables.mT).squeeze(-1).int(), red, blue)


def _encode_clahe(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    if channels(shape) not in (1, 3):
        return None
    across, down = map(int, transform.tile_grid_size)
    height, width = shape[:2]
    if height % down or width % across:
        # OpenCV extends both axes, by a whole row of pixels per tile even where one divides.
        height, width = height + down - height % down, width + across - width % across
    height, width = height // down, width // across
    limit = max(int(params["clip_limit"] * (height * width) / 256), 1)
    static = (("tiles", (down, across)), ("tile", (height, width)))
    return Encoded(static, {"limit": np.array([limit], np.int32)})


def _clipped(counts: Tensor, limit: Tensor) -> Tensor:
    """Return histograms ``[n, tiles, 256]`` cut at the limit, and the rest spread evenly."""
    limit = limit[:, :, None]
    surplus = (counts - limit).clamp(min=0).sum(-1, keepdim=True, dtype=torch.int32)
    every = surplus // 256
    left = surplus - every * 256
    # What is left goes to every `stride`-th value, from 0 on.
    stride = 256 // left.clamp(min=1)
    value = torch.arange(256, device=counts.device, dtype=torch.int32)
    takes = (value % stride == 0) & (value // stride < left)
    return counts.minimum(limit) + every + takes.int()


def _between(
    length: int, tile: int, tiles: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two tiles that each position lies between, and the weight of the second."""
    reciprocal = float(np.float32(1) / np.float32(tile))
    where = torch.arange(length, device=device, dtype=torch.float32) * reciprocal - 0.5
    low = where.floor()
    first = low.int()
    return first.clamp(min=0), (first + 1).clamp(max=tiles - 1), where - low


def _equalized_tiles(plane: Tensor, static: Values, limit: Tensor) -> Tensor:
    """Equalize uint8 ``[n, H, W]`` by tiles, blending the tables of the four nearest ones."""
    n, height, width = plane.shape
    (down, across), (tall, wide) = static["tiles"], static["tile"]
    device = plane.device
    rows = fold(torch.arange(down * tall, device=device), height, REFLECT_101)
    columns = fold(torch.arange(across * wide, device=device), width, REFLECT_101)
    tiles = plane.index_select(1, rows).index_select(2, columns)
    tiles = tiles.view(n, down, tall, across, wide).transpose(2, 3)
    counts = _clipped(_histograms(tiles.reshape(n, down * across, tall * wide)), limit)
    scale = float(np.float32(255) / np.float32(tall * wide))
    tables = (counts.cumsum(-1).float() * scale).round().clamp(0, 255).reshape(-1)

    y1, y2, along = _between(height, tall, down, device)
    x1, x2, beside = _between(width, wide, across, device)
    image = torch.arange(n, device=device, dtype=torch.int32)[:, None, None] * (down * across)

    def table_of(y: Tensor, x: Tensor) -> Tensor:
        index = (image + y[:, None] * across + x) * 256 + plane
        return tables.index_select(0, index.reshape(-1)).view(n, height, width)

    along = along[:, None]
    upper = table_of(y1, x1) * (1 - beside) + table_of(y1, x2) * beside
    lower = table_of(y2, x1) * (1 - beside) + table_of(y2, x2) * beside
    blended = upper * (1 - along) + lower * along
    return blended.round().clamp(0, 255).to(torch.uint8)


@through_bytes
def _clahe(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    if images.shape[-1] == 1:
        return _equalized_tiles(images.squeeze(-1), static, arrays["limit"]).unsqueeze(-1)
    lightness, a, b = spaces.lab_bytes(images)
    lightness = _equalized_tiles(lightness.to(torch.uint8), static, arrays["limit"])
    return spaces.rgb_from_lab(lightness.int(), a, b)


OPS = (
    DeviceOp("Equalize", _encode_equal, _equalize),
    DeviceOp("CLAHE", _encode_clahe, _clahe),
)
"""Equalize is exact; CLAHE may be one level off where a blend of tables lies between two levels.
These take a float32 image through uint8, as Albumentations does."""

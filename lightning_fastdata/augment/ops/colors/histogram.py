"""Tables made on the device from the histogram of each image, or of each tile of it."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.augment.ops.colors.lab import (
    lab_bytes,
    rgb_from_lab,
    rgb_from_ycrcb,
    ycrcb_bytes,
)
from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.positions.border import REFLECT_101, channels, fold
from lightning_fastdata.augment.ops.table import look_up, via_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape

_COUNTS_IN_FLOAT32: Final = 1 << 24
"""Albumentations counts pixels in float32: from this number on it miscounts."""


def _histograms(values: torch.Tensor) -> torch.Tensor:
    """Return how often each value is in each row of ``[n, pixels]`` uint8: int32 ``[n, 256]``."""
    n = values.shape[0]
    first = torch.arange(n, device=values.device, dtype=torch.int32)[:, None] * 256
    bins = (first + values).reshape(-1)
    counts = torch.zeros(n * 256, device=values.device, dtype=torch.int32)
    # Whole numbers: the order in which a GPU adds them does not matter.
    ones = torch.ones(1, device=values.device, dtype=torch.int32).expand(bins.shape)
    return counts.index_add_(0, bins, ones).view(n, 256)


def channel_histograms(images: torch.Tensor) -> torch.Tensor:
    """Return the histograms of uint8 ``[n, H, W, C]``: int32 ``[n, C, 256]``."""
    n, _, _, count = images.shape
    planes = images.permute(0, 3, 1, 2).reshape(n * count, -1)
    return _histograms(planes).view(n, count, 256)


def _identity(counts: torch.Tensor) -> torch.Tensor:
    return torch.arange(256, device=counts.device, dtype=torch.float32)


def _equalizing(counts: torch.Tensor, mode: str) -> torch.Tensor:
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


def _per_channel(images: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    return look_up(images, tables.mT)


def _encode_equalize(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    count = channels(shape)
    if params["mask"] is not None or count not in (1, 3):
        return None
    if shape[0] * shape[1] >= _COUNTS_IN_FLOAT32:
        return None
    luma = count == 3 and not transform.by_channels
    return Encoded((("mode", transform.mode), ("luma", luma)), {})


def _equalize(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    def change(as_bytes: torch.Tensor) -> torch.Tensor:
        if not static["luma"]:
            tables = _equalizing(channel_histograms(as_bytes), static["mode"])
            return _per_channel(as_bytes, tables)
        luma, red, blue = ycrcb_bytes(as_bytes)
        luma = luma.to(torch.uint8).unsqueeze(-1)
        tables = _equalizing(channel_histograms(luma), static["mode"])
        return rgb_from_ycrcb(_per_channel(luma, tables).squeeze(-1).int(), red, blue)

    return via_bytes(images, change)


def _encode_contrast(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    ignore = transform.ignore
    if shape[0] * shape[1] >= _COUNTS_IN_FLOAT32 or not (ignore is None or 0 <= ignore <= 255):
        return None
    static = (
        ("cutoff", float(transform.cutoff)),
        ("method", transform.method),
        ("ignore", ignore),
        # Albumentations skips the channel of that number, too.
        ("skip", ignore if ignore is not None and ignore < channels(shape) else None),
    )
    return Encoded(static, {})


def _bounds(counts: torch.Tensor, cutoff: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the darkest and the brightest value that count, ``[..., 1]``."""
    below = counts.cumsum(-1)
    total = below[..., -1:]
    if not cutoff:
        # Without any pixel the bounds are the same, and nothing is changed.
        low = (below == 0).sum(-1, keepdim=True)
        return low, (below < total).sum(-1, keepdim=True)
    share = total.double() * cutoff
    cut = (share / torch.full_like(share, 100)).float()
    above = total - below + counts
    low = ((below.float() < cut).sum(-1, keepdim=True) + 1).clamp(max=255)
    high = (above.float() >= cut).sum(-1, keepdim=True) - 1
    return torch.where(total == 0, 0, low), torch.where(total == 0, 0, high)


def _stretching(counts: torch.Tensor, cutoff: float, method: str) -> torch.Tensor:
    """Return the tables that stretch histograms to 0..255: uint8, like ``counts``."""
    low, high = _bounds(counts, cutoff)
    value = torch.arange(256, device=counts.device)
    inside = (value >= low) & (value <= high)
    if method == "cdf":
        below = counts.where(inside, 0).cumsum(-1).float()
        least = counts.gather(-1, low.clamp(0, 255)).float()
        most = below[..., -1:]
        line = ((below - least) * 255 / (most - least)).round()
        line = torch.where(most == 0, _identity(counts), torch.nan_to_num(line, nan=0.0))
        empty = most == 0
    else:
        width = (high - low).clamp(min=1).double()
        line = ((value - low) * (torch.full_like(width, 255) / width)).round().float()
        empty = torch.zeros_like(low, dtype=torch.bool)
    table = torch.where(inside | empty, line, torch.where(value < low, 0.0, 255.0))
    return torch.where(high <= low, _identity(counts), table).clamp(0, 255).to(torch.uint8)


def _contrast(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    def change(as_bytes: torch.Tensor) -> torch.Tensor:
        counts = channel_histograms(as_bytes)
        # Albumentations counts from 0 to 255 without 255.
        counts[..., 255] = 0
        if static["ignore"] is not None:
            counts[..., static["ignore"]] = 0
        tables = _stretching(counts, static["cutoff"], static["method"])
        if static["ignore"] is not None:
            tables[..., static["ignore"]] = static["ignore"]
        if static["skip"] is not None:
            tables[:, static["skip"]] = torch.arange(256, device=tables.device).to(torch.uint8)
        return _per_channel(as_bytes, tables)

    return via_bytes(images, change)


def _tile(length: int, tiles: int, *, extends: bool) -> int:
    """Return the pixels of a tile along one axis."""
    # Where one axis does not divide, OpenCV extends both, by a whole row of pixels per tile even
    # where the other divides.
    return (length + tiles - length % tiles if extends else length) // tiles


def _encode_clahe(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    if channels(shape) not in (1, 3):
        return None
    across, down = map(int, transform.tile_grid_size)
    extends = shape[0] % down != 0 or shape[1] % across != 0
    height = _tile(shape[0], down, extends=extends)
    width = _tile(shape[1], across, extends=extends)
    limit = max(int(params["clip_limit"] * (height * width) / 256), 1)
    static = (("tiles", (down, across)), ("tile", (height, width)))
    return Encoded(static, {"limit": np.array([limit], np.int32)})


def _clipped(counts: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the two tiles that each position lies between, and the weight of the second."""
    reciprocal = float(np.float32(1) / np.float32(tile))
    where = torch.arange(length, device=device, dtype=torch.float32) * reciprocal - 0.5
    low = where.floor()
    first = low.int()
    return first.clamp(min=0), (first + 1).clamp(max=tiles - 1), where - low


def _equalized_tiles(
    plane: torch.Tensor, static: Mapping[str, Any], limit: torch.Tensor
) -> torch.Tensor:
    """Equalize uint8 ``[n, H, W]`` by tiles, blending the tables of the four nearest ones."""
    n, height, width = plane.shape
    (down, across), (tall, wide) = static["tiles"], static["tile"]
    device = plane.device
    rows = fold(torch.arange(down * tall, device=device), height, REFLECT_101)
    columns = fold(torch.arange(across * wide, device=device), width, REFLECT_101)
    tiles = plane.index_select(1, rows).index_select(2, columns)
    tiles = tiles.view(n, down, tall, across, wide).transpose(2, 3)
    counts = _histograms(tiles.reshape(n * down * across, tall * wide))
    counts = _clipped(counts.view(n, down * across, 256), limit)
    scale = float(np.float32(255) / np.float32(tall * wide))
    tables = (counts.cumsum(-1).float() * scale).round().clamp(0, 255).reshape(-1)

    y1, y2, along = _between(height, tall, down, device)
    x1, x2, beside = _between(width, wide, across, device)
    image = torch.arange(n, device=device, dtype=torch.int32)[:, None, None] * (down * across)

    def table_of(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        index = (image + y[:, None] * across + x) * 256 + plane
        return tables.index_select(0, index.reshape(-1)).view(n, height, width)

    along = along[:, None]
    upper = table_of(y1, x1) * (1 - beside) + table_of(y1, x2) * beside
    lower = table_of(y2, x1) * (1 - beside) + table_of(y2, x2) * beside
    blended = upper * (1 - along) + lower * along
    return blended.round().clamp(0, 255).to(torch.uint8)


def _clahe(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    def change(as_bytes: torch.Tensor) -> torch.Tensor:
        if as_bytes.shape[-1] == 1:
            return _equalized_tiles(as_bytes.squeeze(-1), static, arrays["limit"]).unsqueeze(-1)
        lightness, a, b = lab_bytes(as_bytes)
        lightness = _equalized_tiles(lightness.to(torch.uint8), static, arrays["limit"])
        return rgb_from_lab(lightness.int(), a, b)

    return via_bytes(images, change)


OPS = (
    DeviceOp(name="Equalize", encode=_encode_equalize, image=_equalize),
    DeviceOp(name="AutoContrast", encode=_encode_contrast, image=_contrast),
    DeviceOp(name="CLAHE", encode=_encode_clahe, image=_clahe),
)
"""Exact; CLAHE may be one level off where a blend of tables lies between two levels. A float32
image goes through uint8, as in Albumentations."""

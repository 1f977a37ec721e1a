"""Operations that follow from the colours of each image: its histograms, its principal axes."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from itertools import combinations
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.colors.spaces import (
    lab_bytes,
    rgb_from_lab,
    rgb_from_ycrcb,
    ycrcb_bytes,
)
from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Params,
    Shape,
    Static,
    Transform,
    always,
    channels,
)
from lightning_fastdata.augment.ops.positions.index import REFLECT_101, fold
from lightning_fastdata.augment.ops.table import look_up, via_bytes

_COUNTS_IN_FLOAT32: Final = 1 << 24
"""Albumentations counts pixels in float32: from this number on it miscounts."""


def _histograms(values: Tensor) -> Tensor:
    """Return how often each value is in each row of ``[n, pixels]`` uint8: int32 ``[n, 256]``."""
    n = values.shape[0]
    first = torch.arange(n, device=values.device, dtype=torch.int32)[:, None] * 256
    bins = (first + values).reshape(-1)
    counts = torch.zeros(n * 256, device=values.device, dtype=torch.int32)
    # Whole numbers: the order in which a GPU adds them does not matter.
    ones = torch.ones(1, device=values.device, dtype=torch.int32).expand(bins.shape)
    return counts.index_add_(0, bins, ones).view(n, 256)


def channel_histograms(images: Tensor) -> Tensor:
    """Return the histograms of uint8 ``[n, H, W, C]``: int32 ``[n, C, 256]``."""
    n, _, _, count = images.shape
    planes = images.permute(0, 3, 1, 2).reshape(n * count, -1)
    return _histograms(planes).view(n, count, 256)


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


def _per_channel(images: Tensor, tables: Tensor) -> Tensor:
    return look_up(images, tables.mT)


def _encode_equalize(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    count = channels(shape)
    if params["mask"] is not None or count not in (1, 3):
        return None
    if shape[0] * shape[1] >= _COUNTS_IN_FLOAT32:
        return None
    luma = count == 3 and not transform.by_channels
    return Encoded((("mode", transform.mode), ("luma", luma)), {})


def _equalize(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    def change(as_bytes: Tensor) -> Tensor:
        if not static["luma"]:
            tables = _equalizing(channel_histograms(as_bytes), static["mode"])
            return _per_channel(as_bytes, tables)
        luma, red, blue = ycrcb_bytes(as_bytes)
        luma = luma.to(torch.uint8).unsqueeze(-1)
        tables = _equalizing(channel_histograms(luma), static["mode"])
        return rgb_from_ycrcb(_per_channel(luma, tables).squeeze(-1).int(), red, blue)

    return via_bytes(images, change)


def _encode_contrast(
    transform: Transform, params: Params, shape: Shape, dtype: DType
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


def _bounds(counts: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
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


def _stretching(counts: Tensor, cutoff: float, method: str) -> Tensor:
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


def _contrast(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    def change(as_bytes: Tensor) -> Tensor:
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
    transform: Transform, params: Params, shape: Shape, dtype: DType
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


def _equalized_tiles(plane: Tensor, static: Static, limit: Tensor) -> Tensor:
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

    def table_of(y: Tensor, x: Tensor) -> Tensor:
        index = (image + y[:, None] * across + x) * 256 + plane
        return tables.index_select(0, index.reshape(-1)).view(n, height, width)

    along = along[:, None]
    upper = table_of(y1, x1) * (1 - beside) + table_of(y1, x2) * beside
    lower = table_of(y2, x1) * (1 - beside) + table_of(y2, x2) * beside
    blended = upper * (1 - along) + lower * along
    return blended.round().clamp(0, 255).to(torch.uint8)


def _clahe(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    def change(as_bytes: Tensor) -> Tensor:
        if as_bytes.shape[-1] == 1:
            return _equalized_tiles(as_bytes.squeeze(-1), static, arrays["limit"]).unsqueeze(-1)
        lightness, a, b = lab_bytes(as_bytes)
        lightness = _equalized_tiles(lightness.to(torch.uint8), static, arrays["limit"])
        return rgb_from_lab(lightness.int(), a, b)

    return via_bytes(images, change)


_MOST_CHANNELS: Final = 5
_SWEEPS: Final = 8
"""Jacobi's method converges quadratically: a 5 x 5 matrix is diagonal to 1e-16 after 6 or 7."""


def principal_axes(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in descending order, and eigenvectors, of small symmetric matrices.

    By Jacobi's rotations (Golub and Van Loan, "Matrix computations", 8.5.2), a fixed number of
    them: no step depends on a value, so nothing waits for the device. An eigenvector's sign is a
    choice, and LAPACKs choose differently; here its largest component is positive.

    Args:
        matrices: ``[n, c, c]``, float64.

    Returns:
        ``[n, c]``, and ``[n, c, c]`` with one eigenvector per column.
    """
    count = matrices.shape[-1]
    whole = torch.eye(count, dtype=matrices.dtype, device=matrices.device)
    vectors = whole.expand_as(matrices)
    for _ in range(_SWEEPS):
        for p, q in combinations(range(count), 2):
            off = matrices[:, p, q]
            ratio = (matrices[:, q, q] - matrices[:, p, p]) / (2 * off)
            side = torch.where(ratio < 0, -1.0, 1.0).to(ratio.dtype)
            tangent = side / (ratio.abs() + (ratio * ratio + 1).sqrt())
            tangent = torch.where(off == 0, 0.0, tangent)
            cosine = 1 / (tangent * tangent + 1).sqrt()
            sine = tangent * cosine
            left = cosine[:, None] * whole[p] - sine[:, None] * whole[q]
            right = sine[:, None] * whole[p] + cosine[:, None] * whole[q]
            columns = [whole[k].expand_as(left) for k in range(count)]
            columns[p], columns[q] = left, right
            turn = torch.stack(columns, -1)
            matrices = turn.mT @ matrices @ turn
            vectors = vectors @ turn
    values, order = matrices.diagonal(dim1=1, dim2=2).sort(-1, descending=True)
    vectors = vectors.gather(2, order[:, None, :].expand_as(vectors))
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return values, vectors * torch.where(largest < 0, -1.0, 1.0).to(vectors.dtype)


def mixed_channels(images: Tensor, mixing: Tensor) -> Tensor:
    """Return images of which each channel is a sum of all channels.

    One product after the other: a matrix product may be one of TF32, if the user allows that.

    Args:
        images: float32 ``[n, H, W, c]``.
        mixing: float32 ``[n, c, c]``: row ``i`` has the shares of channel ``i``.
    """
    columns = mixing[:, None, None].unbind(-1)
    out = images[..., :1] * columns[0]
    for channel, column in enumerate(columns[1:], 1):
        out = out + images[..., channel : channel + 1] * column
    return out


def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean ``[n, c]`` and covariance ``[n, c, c]`` of colours in [0, 1], float64.

    Sums of bytes are whole numbers, the same in any order and on any device.
    """
    n, height, width, count = images.shape
    pixels = images.reshape(n, height * width, count)
    whole = images.dtype == torch.uint8
    values = pixels.int() if whole else pixels.double()
    kind = torch.int64 if whole else torch.float64
    many = height * width
    total = values.sum(1, dtype=kind).double()
    mean = total / many
    if not whole:
        values = values - mean[:, None]
        total = torch.zeros_like(mean)
    products = [
        (values[..., p] * values[..., q]).sum(1, dtype=kind).double()
        for p in range(count)
        for q in range(count)
    ]
    scatter = torch.stack(products, -1).view(n, count, count)
    scatter = scatter - total[:, :, None] * total[:, None, :] / many
    unit = 255.0 if whole else 1.0
    return mean / unit, scatter / (max(many - 1, 1) * unit**2)


def _encode_pca(transform: Transform, params: Params, shape: Shape, dtype: DType) -> Encoded | None:
    fits = channels(shape) <= _MOST_CHANNELS and shape[0] * shape[1] > 1
    if not fits or dtype not in (np.uint8, np.float32):
        return None
    return Encoded((), {"strength": np.asarray(params["alpha_vector"], np.float64)})


def _run_pca(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    whole = images.dtype == torch.uint8
    mean, covariance = _moments(images)
    count = images.shape[-1]
    if count == 1:
        many = images.shape[1] * images.shape[2]
        spread = (covariance[:, 0] * ((many - 1) / many)).clamp(min=0).sqrt()
        mixing = (arrays["strength"] * spread)[:, :, None]
    else:
        values, vectors = principal_axes(covariance)
        mixing = vectors * (arrays["strength"] * values)[:, None, :]
    colours = (
        images.float() / torch.full_like(mean, 255).float()[:, None, None] if whole else images
    )
    centred = colours - mean.float()[:, None, None]
    moved = mixed_channels(centred, mixing.float())
    out = (colours + moved).clamp(0, 1)
    return (out * 255).round().to(torch.uint8) if whole else out


OPS = (
    DeviceOp("Equalize", _encode_equalize, _equalize),
    DeviceOp("AutoContrast", _encode_contrast, _contrast),
    DeviceOp("CLAHE", _encode_clahe, _clahe),
    DeviceOp(
        "FancyPCA",
        _encode_pca,
        _run_pca,
        # With one channel there is no axis to choose a sign for, but images come later.
        draws_pixels=always,
        freedom="chooses the signs of the principal axes there",
    ),
)
"""Equalize and AutoContrast are exact; CLAHE may be one level off where a blend of tables lies
between two levels. These take a float32 image through uint8, as Albumentations does. FancyPCA is at
most one level off Albumentations with the same signs of the axes; the signs of the drawn strengths
are as often plus as minus, so the distribution is Albumentations'."""

"""Rectangles of a constant, of a random colour, or of noise."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Params,
    Shape,
    Static,
    Transform,
    as_channels_last,
    channels,
)
from lightning_fastdata.augment.ops.splitmix import uniform
from lightning_fastdata.augment.replay import instructions

_GRAIN = 4
"""The number of rectangles is rounded up to a multiple of this, so that samples share launches."""
_MOST_COLOURS = 64
"""More holes, each with a colour, would take a pass over the images each."""
_STREAM = 0x401E5
"""Tells the random numbers of holes from those of noise."""


def _padded(rows: np.ndarray) -> np.ndarray:
    count = max(_GRAIN, len(rows) + -len(rows) % _GRAIN)
    padded = np.zeros((count, rows.shape[1]), rows.dtype)
    padded[: len(rows)] = rows
    return padded


def _encode_random(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> dict[str, np.ndarray] | None:
    """Return the colour of each hole, or the seed of the colours of all pixels."""
    if dtype not in (np.uint8, np.float32):
        return None
    if transform.fill == "random":
        return {"seed": np.array([int(params["seed"]), _STREAM], np.int64)}
    if transform.fill != "random_uniform" or len(params["holes"]) > _MOST_COLOURS:
        return None
    from albumentations.augmentations.dropout.functional import generate_random_fill

    generator, count = np.random.default_rng(params["seed"]), channels(shape)
    colours = [generate_random_fill(dtype, (1, count), generator) for _ in params["holes"]]
    rows = np.concatenate([np.zeros((0, count), dtype), *colours]).astype(np.float32)
    return {"colours": _padded(rows)}


def _encode(transform: Transform, params: Params, shape: Shape, dtype: DType) -> Encoded | None:
    fill, fill_mask = transform.fill, transform.fill_mask
    if "seed" not in params:
        return None  # Erasing found no place; Albumentations raises its own error.
    holes = np.asarray(params["holes"], np.int32).reshape(-1, 4)
    if isinstance(fill, str):
        if (holes[:, 2:] < holes[:, :2]).any():
            return None  # Albumentations raises its own error.
        random = _encode_random(transform, params, shape, dtype)
        if random is None:
            return None
        arrays = random
    else:
        values = np.atleast_1d(np.array(fill, np.float64)).ravel()
        if values.size not in (1, channels(shape)):
            return None
        arrays = {"fill": values.astype(np.float32)}
    if (holes < 0).any():
        # Cells of a grid with more of them than pixels end before they begin: NumPy counts from
        # the end of the image then.
        holes = np.where(holes < 0, holes + (shape[1], shape[0]) * 2, holes).astype(np.int32)
    arrays["holes"] = _padded(holes)
    if fill_mask is not None:
        arrays["fill_mask"] = np.atleast_1d(np.array(fill_mask, np.float32)).ravel()
    return Encoded((), arrays)


def _covered(rows: Tensor, columns: Tensor) -> Tensor:
    """Return which pixels ``[n, H, W]`` any of the holes covers.

    Args:
        rows: whether a hole covers a row, ``[n, holes, H]``.
        columns: the same of columns, ``[n, holes, W]``.
    """
    # Holes are few in most transforms, but a GridDropout has hundreds of them: in float64, as
    # nobody can have such a matrix product rounded.
    return torch.bmm(rows.double().mT, columns.double()) > 0


def _noise(images: Tensor, seed: Tensor) -> Tensor:
    """Return values over the whole range, as evenly as Albumentations draws them, in float32."""
    numbers = uniform(seed, images[0].numel()).view(images.shape)
    return (numbers * 256).floor() if images.dtype == torch.uint8 else numbers


def _fill(name: str) -> Any:
    def run(batch: Tensor, static: Static, arrays: Arrays) -> Tensor:
        random = name == "fill" and name not in arrays
        if name not in arrays and not random:
            return batch
        images = as_channels_last(batch)
        left, top, right, bottom = arrays["holes"].unsqueeze(-1).unbind(2)
        y = torch.arange(images.shape[1], device=batch.device)
        x = torch.arange(images.shape[2], device=batch.device)
        inside = (y >= top) & (y < bottom), (x >= left) & (x < right)
        if "colours" in arrays and random:
            # The last of the holes that cover a pixel has its colour.
            for hole, colour in enumerate(arrays["colours"].to(batch.dtype).unbind(1)):
                covered = inside[0][:, hole, :, None] & inside[1][:, hole, None, :]
                images = torch.where(covered.unsqueeze(-1), colour[:, None, None], images)
            return images.view(batch.shape)
        covered = _covered(*inside)
        fill = _noise(images, arrays["seed"]) if random else arrays[name][:, None, None, :]
        fill = fill.to(batch.dtype)
        return torch.where(covered.unsqueeze(-1), fill, images).view(batch.shape)

    return run


OPS = tuple(
    DeviceOp(
        name,
        _encode,
        _fill("fill"),
        mask=_fill("fill_mask"),
        draws_pixels=lambda transform: transform.fill == "random",
        fused=instructions.holes,
    )
    for name in (
        "CoarseDropout",
        "Erasing",
        "FrequencyMasking",
        "GridDropout",
        "TimeMasking",
        "XYMasking",
    )
)
"""Exact, but for noise, which the device draws."""

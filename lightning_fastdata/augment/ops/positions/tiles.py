"""Tiles of an image that change places."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.positions.border import as_channels_last, gather

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape


def _encode(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    rows, columns = transform.grid
    tiles = np.asarray(params["tiles"], np.int32)
    mapping = np.asarray(params["mapping"], np.int64)
    if max(shape[:2]) > np.iinfo(np.int16).max or len(tiles) != len(mapping):
        return None  # the tiles of Albumentations are int16
    # Tile `k` goes to where tile `mapping[k]` is; a pixel there is read from this far away.
    away = np.empty((len(tiles), 2), np.int32)
    away[mapping] = tiles[:, :2] - tiles[mapping, :2]
    arrays = {
        "row_starts": tiles[::columns, 0].copy(),
        "column_starts": tiles[:columns, 1].copy(),
        "away": away.reshape(rows, columns, 2),
    }
    return Encoded((), arrays)


def _run(
    batch: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    images = as_channels_last(batch)
    y = torch.arange(images.shape[1], device=images.device)
    x = torch.arange(images.shape[2], device=images.device)
    row = (y >= arrays["row_starts"][:, 1:, None]).sum(1)
    column = (x >= arrays["column_starts"][:, 1:, None]).sum(1)
    away = gather(arrays["away"], row[:, :, None], column[:, None, :])
    out = gather(images, y[:, None] + away[..., 0], x + away[..., 1])
    return out.reshape(batch.shape)


OPS = (DeviceOp(name="RandomGridShuffle", encode=_encode, image=_run, mask=_run),)
"""Exact for every dtype."""

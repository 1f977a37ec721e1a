"""What loses pixels: rectangles of a constant."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import partial

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
    as_channels_last,
    channels,
)

_GRAIN = 4
"""The number of rectangles is rounded up to a multiple of this, so that samples share launches."""


def _encode(transform: Transform, params: Values, shape: Shape, dtype: DType) -> Encoded | None:
    fill, fill_mask = transform.fill, transform.fill_mask
    # Where Erasing found no place, Albumentations raises its own error.
    if isinstance(fill, str) or "seed" not in params:
        return None
    values = np.atleast_1d(np.array(fill, np.float64)).ravel().astype(np.float32)
    if values.size not in (1, channels(shape)):
        return None
    holes = np.asarray(params["holes"], np.int32).reshape(-1, 4)
    missing = max(_GRAIN, len(holes) + -len(holes) % _GRAIN) - len(holes)
    arrays = {"holes": np.pad(holes, ((0, missing), (0, 0))), "fill": values}
    if fill_mask is not None:
        arrays["fill_mask"] = np.atleast_1d(np.array(fill_mask, np.float32)).ravel()
    return Encoded((), arrays)


def _fill(name: str, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    if name not in arrays:
        return batch
    images = as_channels_last(batch)
    left, top, right, bottom = arrays["holes"].unsqueeze(-1).unbind(2)
    y = torch.arange(images.shape[1], device=batch.device)
    x = torch.arange(images.shape[2], device=batch.device)
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
    # Whether any of the holes covers a pixel. In float64, as a matrix product of float32 may be
    # one of TF32.
    covered = torch.bmm(rows.double().mT, columns.double()) > 0
    fill = arrays[name][:, None, None, :].to(batch.dtype)
    return torch.where(covered.unsqueeze(-1), fill, images).view(batch.shape)


OPS = tuple(
    DeviceOp(name, _encode, partial(_fill, "fill"), mask=partial(_fill, "fill_mask"))
    for name in ("CoarseDropout", "Erasing")
)
"""Exact."""

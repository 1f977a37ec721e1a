"""Rectangles of a constant."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_fastdata.augment import fusion
from lightning_fastdata.augment.ops.border import as_channels_last, channels
from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape

_GRAIN = 4
"""The number of rectangles is rounded up to a multiple of this, so that samples share launches."""


def _encode(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    fill, fill_mask = transform.fill, transform.fill_mask
    if isinstance(fill, str) or isinstance(fill_mask, str):
        return None
    values = np.atleast_1d(np.array(fill, np.float64)).ravel()
    if values.size not in (1, channels(shape)):
        return None
    holes = np.asarray(params["holes"], np.int32).reshape(-1, 4)
    padded = np.zeros((max(_GRAIN, len(holes) + -len(holes) % _GRAIN), 4), np.int32)
    padded[: len(holes)] = holes
    arrays = {"holes": padded, "fill": values.astype(np.float32)}
    if fill_mask is not None:
        arrays["fill_mask"] = np.atleast_1d(np.array(fill_mask, np.float32)).ravel()
    return Encoded((), arrays)


def _fill(name: str) -> Any:
    def run(
        batch: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        if name not in arrays:
            return batch
        images = as_channels_last(batch)
        left, top, right, bottom = arrays["holes"].unsqueeze(-1).unbind(2)
        y = torch.arange(images.shape[1], device=batch.device)
        x = torch.arange(images.shape[2], device=batch.device)
        rows = ((y >= top) & (y < bottom)).float()
        columns = ((x >= left) & (x < right)).float()
        covered = torch.bmm(rows.mT, columns) > 0
        fill = arrays[name].to(batch.dtype)[:, None, None, :]
        return torch.where(covered.unsqueeze(-1), fill, images).view(batch.shape)

    return run


OPS = tuple(
    DeviceOp(
        name=name,
        encode=_encode,
        image=_fill("fill"),
        mask=_fill("fill_mask"),
        fused=fusion.holes,
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
"""Exact."""

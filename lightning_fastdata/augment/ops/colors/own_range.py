"""Normalize by the mean and deviation, or by the range, that each image itself has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.augment.ops.colors.histogram import channel_histograms
from lightning_fastdata.augment.ops.operation import Encoded
from lightning_fastdata.augment.ops.positions.border import channels
from lightning_fastdata.augment.ops.table import look_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape

_TINY: Final = 1e-4
"""albucore adds it to what it divides by, with exceptions for float images."""
_LIMIT: Final = 20


def dtype_of(transform: Any, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of what a Normalize of this kind makes of images of a dtype.

    It depends on NumPy: from version 2 on, albucore makes float64 of uint8.
    """
    found: np.dtype[Any] = transform.apply(np.zeros((2, 2, 3), dtype)).dtype
    return found


def encode_own(transform: Any, shape: Shape, dtype: np.dtype[Any]) -> Encoded:
    """Return the settings of a Normalize whose ``normalization`` is not ``standard``."""
    by_range = transform.normalization.startswith("min_max")
    each = transform.normalization.endswith("per_channel") and channels(shape) > 1
    # float images: added nowhere but here.
    adds = dtype == np.uint8 or by_range == each
    static = (
        *(("by_range", by_range), ("each", each), ("tiny", _TINY if adds else 0.0)),
        ("double", dtype_of(transform, dtype) == np.float64),
    )
    return Encoded(static, {})


def normalize_own(images: torch.Tensor, static: Mapping[str, Any]) -> torch.Tensor:
    """Return images of any range with mean 0 and deviation 1, or from 0 to 1.

    Args:
        images: uint8 or float32 ``[n, H, W, C]``.
        static: settings by `encode_own`.

    Returns:
        ``[n, H, W, C]``, float64 if ``static`` says so, else float32.
    """
    kind = torch.float64 if static["double"] else torch.float32
    if images.dtype != torch.uint8:
        shift, scale = (_by_range if static["by_range"] else _by_spread)(images, static)
        out = (images - shift.float()) / scale.float()
        if static["by_range"]:
            out = torch.where(scale > 0, out, 0.0)
        return out.clamp(-_LIMIT, _LIMIT).to(kind)
    # What stands at each level, by the numbers of pixels at each level: whole numbers, which are
    # the same in whatever order they are added up.
    counts = channel_histograms(images)
    counts = counts if static["each"] else counts.sum(1, keepdim=True)
    level = torch.arange(256, device=images.device, dtype=torch.float64)
    if static["by_range"]:
        low = torch.where(counts > 0, level, 256.0).amin(-1, keepdim=True)
        high = torch.where(counts > 0, level, -1.0).amax(-1, keepdim=True)
        shift, scale = low, high - low + static["tiny"]
    else:
        many = counts.sum(-1, keepdim=True).double()
        shift = (counts * level).sum(-1, keepdim=True) / many
        spread = (counts * (level - shift).square()).sum(-1, keepdim=True) / many
        scale = spread.sqrt() + static["tiny"]
    table = ((level - shift) / scale).clamp(-_LIMIT, _LIMIT)
    return look_up(images, table.to(kind).mT)


def _by_range(images: torch.Tensor, static: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    axes = (1, 2) if static["each"] else (1, 2, 3)
    low, high = images.amin(axes, keepdim=True), images.amax(axes, keepdim=True)
    return low, high - low + static["tiny"]


def _by_spread(
    images: torch.Tensor, static: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    axes = (1, 2) if static["each"] else (1, 2, 3)
    values = images.double()
    mean = values.mean(axes, keepdim=True)
    spread = (values - mean).square().mean(axes, keepdim=True).sqrt()
    return mean, spread + static["tiny"]

"""Blurs: the kernel is made by Albumentations, the border is reflected without the edge pixel."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.positions.border import REFLECT_101, fold
from lightning_fastdata.augment.replay import instructions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape

_GRAIN = 4
"""Kernel radii are rounded up to a multiple of this, with zeros, so that samples share launches."""


def padded_kernel(kernel: np.ndarray) -> np.ndarray | None:
    """Return a kernel of odd size, float32, with zeros up to a size that many share."""
    if any(size % 2 == 0 for size in kernel.shape):
        return None
    margins = [-(size // 2) % _GRAIN for size in kernel.shape]
    sizes = [size + 2 * margin for size, margin in zip(kernel.shape, margins, strict=True)]
    padded = np.zeros(sizes, np.float32)
    padded[tuple(slice(m, m + size) for m, size in zip(margins, kernel.shape, strict=True))] = (
        kernel
    )
    return padded


def _encode(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    kernel = params["kernel"]
    if isinstance(kernel, (int, np.integer)):
        kernel = np.full(int(kernel), 1.0 / int(kernel))
    padded = padded_kernel(np.asarray(kernel))
    if padded is None or dtype not in (np.uint8, np.float32):
        return None
    # A box blur keeps the range by itself; the others are cut to it, even after Normalize.
    clips = type(transform).__name__ != "Blur"
    return Encoded((("clips", clips),), {"kernel": padded})


def reflected(values: torch.Tensor, axis: int, margin: int) -> torch.Tensor:
    """Return ``[n, H, W, C]`` with a margin on both sides of one axis, reflected as OpenCV does."""
    length = values.shape[axis]
    at = torch.arange(-margin, length + margin, device=values.device)
    return values.index_select(axis, fold(at, length, REFLECT_101))


def correlate_along(values: torch.Tensor, kernel: torch.Tensor, axis: int) -> torch.Tensor:
    """Correlate float32 ``[n, H, W, C]`` along one axis with a kernel per sample, ``[n, k]``."""
    length, size = values.shape[axis], kernel.shape[1]
    framed = reflected(values, axis, size // 2)
    total = torch.zeros_like(values)
    for tap in range(size):
        total.addcmul_(framed.narrow(axis, tap, length), kernel[:, tap, None, None, None])
    return total


def correlate(values: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Correlate float32 ``[n, H, W, C]`` with a kernel per sample.

    Args:
        values: images.
        kernel: ``[n, k]`` for both axes, one after the other, or ``[n, k, k]``; ``k`` is odd.
    """
    if kernel.ndim == 2:
        return correlate_along(correlate_along(values, kernel, 2), kernel, 1)
    _, height, width, _ = values.shape
    framed = reflected(reflected(values, 1, kernel.shape[1] // 2), 2, kernel.shape[2] // 2)
    total = torch.zeros_like(values)
    for row in range(kernel.shape[1]):
        for column in range(kernel.shape[2]):
            shifted = framed[:, row : row + height, column : column + width]
            total.addcmul_(shifted, kernel[:, row, column, None, None, None])
    return total


def run_kernel(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Correlate uint8 or float32 images with ``arrays["kernel"]`` and round as OpenCV does."""
    out = correlate(images.float(), arrays["kernel"])
    if images.dtype == torch.uint8:
        return out.round().clamp(0, 255).to(torch.uint8)
    return out.clamp(0, 1) if static["clips"] else out


OPS = tuple(
    DeviceOp(name=name, encode=_encode, image=run_kernel, fused=instructions.correlation)
    for name in ("AdvancedBlur", "Blur", "GaussianBlur", "MotionBlur", "RingingOvershoot")
)
"""At most one level off on uint8, mostly where the sum lies between two levels; 1e-5 on float32."""

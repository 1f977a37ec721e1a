"""Blurs of uint8 images: a kernel per sample, and a border that reflects."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

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
)
from lightning_fastdata.augment.ops.positions.index import REFLECT_101, fold

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


def reflected(values: Tensor, axis: int, margin: int) -> Tensor:
    """Return ``[n, H, W, C]`` with a margin on both sides of one axis, reflected as OpenCV does."""
    length = values.shape[axis]
    at = torch.arange(-margin, length + margin, device=values.device)
    return values.index_select(axis, fold(at, length, REFLECT_101))


def correlate_along(values: Tensor, kernel: Tensor, axis: int) -> Tensor:
    """Correlate float32 ``[n, H, W, C]`` along one axis with a kernel per sample, ``[n, k]``."""
    length, size = values.shape[axis], kernel.shape[1]
    framed = reflected(values, axis, size // 2)
    total = torch.zeros_like(values)
    for tap in range(size):
        total.addcmul_(framed.narrow(axis, tap, length), kernel[:, tap, None, None, None])
    return total


def correlate(values: Tensor, kernel: Tensor) -> Tensor:
    """Correlate float32 ``[n, H, W, C]`` with a kernel of odd size per sample.

    Either ``[n, k]`` for both axes, one after the other, or ``[n, k, k]``.
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


def run_kernel(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Correlate uint8 images with ``arrays["kernel"]`` and round as OpenCV does."""
    return correlate(images.float(), arrays["kernel"]).round().clamp(0, 255).to(torch.uint8)


def _encode_kernel(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    if isinstance(params["kernel"], int | np.integer):
        size = int(params["kernel"])
        kernel = padded_kernel(np.full(size, 1.0 / size))
    else:
        kernel = padded_kernel(np.asarray(params["kernel"]))
    return None if kernel is None else Encoded((), {"kernel": kernel})


OPS = tuple(
    DeviceOp(name, _encode_kernel, run_kernel) for name in ("Blur", "GaussianBlur", "MotionBlur")
)
"""At most one level off, mostly where the sum lies between two levels."""

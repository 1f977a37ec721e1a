"""Blurs and what sharpens: a kernel per sample, the border reflected without the edge pixel."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import cache

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
)
from lightning_fastdata.augment.ops.positions.index import REFLECT_101, fold
from lightning_fastdata.augment.ops.table import to_bytes
from lightning_fastdata.augment.replay import instructions

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


def _encode_blur(
    transform: Transform, params: Params, shape: Shape, dtype: DType
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


def run_kernel(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    """Correlate uint8 or float32 images with ``arrays["kernel"]`` and round as OpenCV does."""
    out = correlate(images.float(), arrays["kernel"])
    if images.dtype == torch.uint8:
        return out.round().clamp(0, 255).to(torch.uint8)
    return out.clamp(0, 1) if static["clips"] else out


def _encode_convolution(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    name = type(transform).__name__
    if dtype not in (np.uint8, np.float32):
        return None
    if name == "Defocus":
        kernel = padded_kernel(_disk(params["radius"], params["alias_blur"]))
    else:
        kernel = params[{"Emboss": "emboss_matrix", "Sharpen": "sharpening_matrix"}[name]]
    if kernel is None:
        return None
    return Encoded((("clips", True),), {"kernel": kernel.astype(np.float32)})


def _disk(radius: int, alias_blur: float) -> np.ndarray:
    """Return the kernel that Albumentations makes for Defocus, without the zeros around it."""
    import cv2

    reach = max(8, radius)
    at = np.arange(-reach, reach + 1)
    disk = (at[:, None] ** 2 + at**2 <= radius**2).astype(np.float32)
    size = 3 if radius <= 8 else 5
    kernel = cv2.GaussianBlur(disk / disk.sum(), (size, size), sigmaX=alias_blur)
    spare = max(0, reach - radius - size // 2)
    trimmed: np.ndarray = kernel[spare : len(at) - spare, spare : len(at) - spare]
    return trimmed


@cache
def _gaussian_256ths(size: int, sigma: float) -> np.ndarray:
    """Return the whole numbers, 256 in all, by which OpenCV blurs uint8.

    They are read off the blur of a single bright pixel in a line: 255 times a number up to 127,
    over 256, is rounded to that number.
    """
    import cv2

    reach = size // 2
    line = np.zeros((1, 4 * reach + 1), np.uint8)
    line[0, 2 * reach] = 255
    blurred = cv2.GaussianBlur(line, (size, size), sigmaX=sigma, sigmaY=sigma)
    kernel: np.ndarray = blurred[0, reach : 3 * reach + 1].astype(np.float32)
    kernel[reach] += 256 - kernel.sum()
    return kernel


def _gaussian(size: int, sigma: float) -> np.ndarray:
    """Return the kernel by which OpenCV blurs float32."""
    import cv2

    kernel: np.ndarray = cv2.getGaussianKernel(size, sigma, cv2.CV_32F).ravel()
    return kernel


def _encode_sharpen(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    if transform.method == "kernel":
        encoded = _encode_convolution(transform, params, shape, dtype)
        return encoded and Encoded((("method", "kernel"), *encoded.static), encoded.arrays)
    size = transform.kernel_size
    static = (("method", "gaussian"),)
    if dtype == np.uint8:
        kernel = padded_kernel(_gaussian_256ths(size, transform.sigma))
    else:
        kernel = padded_kernel(_gaussian(size, transform.sigma))
    # With (height, width, 1), Albumentations subtracts an image without its channel axis.
    if kernel is None or dtype not in (np.uint8, np.float32) or shape[2:] == (1,):
        return None
    return Encoded(static, {"kernel": kernel, "alpha": np.array([params["alpha"]], np.float64)})


def _sharpen(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    if static["method"] == "kernel":
        return run_kernel(images, static, arrays)
    blurred = correlate(images.float(), arrays["kernel"])
    alpha = arrays["alpha"][:, None, None]
    if images.dtype != torch.uint8:
        return (images + alpha.float() * (images - blurred)).clamp(0, 1)
    # Sums of whole numbers below 2 ** 24, so float32 has them to the last bit. The difference of
    # bytes wraps round in Albumentations, so it does here; and it computes in float64.
    rounded = ((blurred + (1 << 15)) / (1 << 16)).floor().to(torch.uint8)
    return (images + alpha * (images - rounded)).clamp(0, 255).to(torch.uint8)


def _encode_unsharp(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    kernel = padded_kernel(_gaussian(params["ksize"], params["sigma"]))
    if kernel is None or dtype not in (np.uint8, np.float32):
        return None
    arrays = {"kernel": kernel, "alpha": np.array([params["alpha"]], np.float32)}
    static = (("threshold", float(transform.threshold)), ("small", params["ksize"] <= 5))
    return Encoded(static, arrays)


def _pairs(values: Tensor, kernel: Tensor, axis: int) -> Tensor:
    """Correlate along one axis with symmetric kernels: the middle first, then pairs outwards."""
    length, radius = values.shape[axis], kernel.shape[1] // 2
    framed = reflected(values, axis, radius)
    total = values * kernel[:, radius, None, None, None]
    for tap in range(1, radius + 1):
        both = framed.narrow(axis, radius - tap, length) + framed.narrow(axis, radius + tap, length)
        total.addcmul_(both, kernel[:, radius + tap, None, None, None])
    return total


def _blurred(values: Tensor, static: Static, kernel: Tensor) -> Tensor:
    # OpenCV's order of additions. The last bit decides where a difference meets the threshold,
    # which is often on uint8 and with the kernels of 1/4 and 1/2.
    along = _pairs if static["small"] else correlate_along
    return _pairs(along(values, kernel, 2), kernel, 1)


def _unsharp(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    values = images
    if images.dtype == torch.uint8:
        values = images.float()
        values = values / torch.full_like(values[:1, :1, :1, :1], 255)
    residual = values - _blurred(values, static, arrays["kernel"])
    loud = (residual.abs() * 255 > static["threshold"]).float()
    share = _blurred(loud, static, arrays["kernel"])
    sharp = (values + arrays["alpha"][:, None, None] * residual).clamp(0, 1)
    out = (sharp * share + values * (1 - share)).clamp(0, 1)
    return to_bytes(out) if images.dtype == torch.uint8 else out


OPS = (
    *tuple(
        DeviceOp(name, _encode_blur, run_kernel, fused=instructions.correlation)
        for name in ("AdvancedBlur", "Blur", "GaussianBlur", "MotionBlur", "RingingOvershoot")
    ),
    DeviceOp("Sharpen", _encode_sharpen, _sharpen, fused=instructions.correlation),
    DeviceOp("UnsharpMask", _encode_unsharp, _unsharp),
    DeviceOp("Emboss", _encode_convolution, run_kernel, fused=instructions.correlation),
    DeviceOp("Defocus", _encode_convolution, run_kernel, fused=instructions.correlation),
)
"""On uint8, Sharpen by a Gaussian is exact, and the others are at most one level off, mostly where
the sum lies between two levels. In UnsharpMask, rounding can decide whether a difference is above
the threshold: a few pixels are off by a few levels then. 1e-5 on float32, but for these."""

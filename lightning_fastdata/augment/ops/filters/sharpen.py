"""Filters that sharpen, emboss and defocus: a kernel per sample, the border reflected."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_fastdata.augment.ops.filters.blur import (
    correlate,
    correlate_along,
    padded_kernel,
    reflected,
    run_kernel,
)
from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.table import to_bytes
from lightning_fastdata.augment.replay import instructions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape


def _encode_convolution(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
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
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
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


def _sharpen(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
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
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    kernel = padded_kernel(_gaussian(params["ksize"], params["sigma"]))
    if kernel is None or dtype not in (np.uint8, np.float32):
        return None
    arrays = {"kernel": kernel, "alpha": np.array([params["alpha"]], np.float32)}
    static = (("threshold", float(transform.threshold)), ("small", params["ksize"] <= 5))
    return Encoded(static, arrays)


def _pairs(values: torch.Tensor, kernel: torch.Tensor, axis: int) -> torch.Tensor:
    """Correlate along one axis with symmetric kernels: the middle first, then pairs outwards."""
    length, radius = values.shape[axis], kernel.shape[1] // 2
    framed = reflected(values, axis, radius)
    total = values * kernel[:, radius, None, None, None]
    for tap in range(1, radius + 1):
        both = framed.narrow(axis, radius - tap, length) + framed.narrow(axis, radius + tap, length)
        total.addcmul_(both, kernel[:, radius + tap, None, None, None])
    return total


def _blurred(values: torch.Tensor, static: Mapping[str, Any], kernel: torch.Tensor) -> torch.Tensor:
    # OpenCV's order of additions. The last bit decides where a difference meets the threshold,
    # which is often on uint8 and with the kernels of 1/4 and 1/2.
    along = _pairs if static["small"] else correlate_along
    return _pairs(along(values, kernel, 2), kernel, 1)


def _unsharp(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
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
    DeviceOp(
        name="Sharpen", encode=_encode_sharpen, image=_sharpen, fused=instructions.correlation
    ),
    DeviceOp(name="UnsharpMask", encode=_encode_unsharp, image=_unsharp),
    DeviceOp(
        name="Emboss", encode=_encode_convolution, image=run_kernel, fused=instructions.correlation
    ),
    DeviceOp(
        name="Defocus", encode=_encode_convolution, image=run_kernel, fused=instructions.correlation
    ),
)
"""On uint8, Sharpen by a Gaussian is exact, and the convolutions are at most one level off. In
UnsharpMask, rounding can decide whether a difference is above the threshold: a few pixels are off
by a few levels then. 1e-5 on float32, but for these."""

"""FancyPCA: colours moved along the principal axes of each image's own colours.

After Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural
networks" (NeurIPS 2012), in the form that Albumentations gives it.
"""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.positions.border import channels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape

_MOST_CHANNELS: Final = 5
_SWEEPS: Final = 8
"""Jacobi's method converges quadratically: a 5 x 5 matrix is diagonal to 1e-16 after 6 or 7."""


def principal_axes(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def mixed_channels(images: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
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


def _moments(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def _encode(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    fits = channels(shape) <= _MOST_CHANNELS and shape[0] * shape[1] > 1
    if not fits or dtype not in (np.uint8, np.float32):
        return None
    return Encoded((), {"strength": np.asarray(params["alpha_vector"], np.float64)})


def _run(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
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
    DeviceOp(
        name="FancyPCA",
        encode=_encode,
        image=_run,
        # With one channel there is no axis to choose a sign for, but images come later.
        draws_pixels=lambda _transform: True,
        freedom="chooses the signs of the principal axes there",
    ),
)
"""At most one level off Albumentations with the same signs of the axes; the signs of the drawn
strengths are as often plus as minus, so the distribution is Albumentations'."""

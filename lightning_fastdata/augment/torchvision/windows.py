"""Windows of each sample's own, resized to one size: torchvision's ``resized_crop`` on a batch.

Bytes are computed as torch's own kernel for bytes computes them on the CPU: first along rows, then
along columns, with weights of 16 bits, each pass rounded to bytes. So a device has the same pixels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_fastdata.augment.ops.operation import Arrays, Values

_MOST_BITS: Final = 22
_WEIGHT_LIMIT: Final = 1 << 15


class _Axis(NamedTuple):
    """What each place along one axis of the result is made of."""

    taps: Tensor
    """Places that are read, int64 ``[n, out, taps]``."""
    weights: Tensor
    """Their weights, of the dtype of the lengths; of each place they add up to one."""


def resized_crop(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Cut windows ``top, left, height, width`` out of a batch, and resize each to one size.

    ``static`` names the mode: ``"nearest"``, ``"bilinear"``, or ``"antialias"``.
    """
    planes = batch if batch.ndim == 4 else batch.unsqueeze(1)
    top, left, rows, columns = arrays["box"].unbind(1)
    (height, width), mode = static["size"], static["mode"]
    if mode == "nearest":
        across, down = _nearest(left, columns, width), _nearest(top, rows, height)
        made = _take(_take(planes, across).mT, down).mT
    else:
        smooth = mode == "antialias"
        # As precise as torch's own kernels for each dtype.
        as_read = torch.float32 if planes.is_floating_point() else torch.float64
        length, size = torch.stack([columns, rows]).to(as_read), planes.shape[-2:]
        across_axis = _axis(left, length[0], size[1], width, smooth=smooth)
        down_axis = _axis(top, length[1], size[0], height, smooth=smooth)
        made = _blended(_blended(planes, across_axis).mT, down_axis).mT
    return made.reshape(*batch.shape[:-2], height, width)


def _nearest(first: Tensor, length: Tensor, size: int) -> Tensor:
    """Return the places along an axis that are read, int64 ``[n, size]``."""
    steps = torch.arange(size, device=first.device, dtype=torch.float32)
    scale = length.float()[:, None] / size
    return first[:, None] + (steps * scale).long().minimum(length[:, None] - 1)


def _take(planes: Tensor, places: Tensor) -> Tensor:
    """Return planes ``[n, C, rows, places]`` of some places along the last axis."""
    return planes.gather(3, places[:, None, None].expand(*planes.shape[:3], -1))


def _axis(first: Tensor, length: Tensor, most: int, size: int, *, smooth: bool) -> _Axis:
    """Return what windows that begin at ``first`` are made of, where none is longer than ``most``.

    ``smooth``: what is made smaller is averaged.
    """
    scale = length[:, None] / size
    wide = scale.clamp(min=1.0) if smooth else torch.ones_like(scale)
    count = math.ceil(max(1.0, most / size) if smooth else 1.0) * 2 + 1
    center = scale * (torch.arange(size, device=first.device, dtype=length.dtype) + 0.5)
    begin = (center - wide + 0.5).long().clamp(min=0)
    last = length.long()[:, None]
    end = (center + wide + 0.5).long().minimum(last)
    taps = begin[..., None] + torch.arange(count, device=first.device)
    away = (taps - center[..., None] + 0.5) * (1.0 / wide)[..., None]
    weights = (1.0 - away.abs()).clamp(min=0.0) * (taps < end[..., None])
    weights /= weights.sum(-1, keepdim=True)
    places = first[:, None, None] + taps.minimum(last[:, None] - 1)
    return _Axis(places, weights)


def _blended(planes: Tensor, axis: _Axis) -> Tensor:
    """Return planes ``[n, C, rows, out]``: sums along the last axis, rounded as the dtype needs."""
    if planes.is_floating_point():
        return _sums(planes, axis.taps, axis.weights)
    bits = _bits(axis.weights.amax((1, 2)))
    weights = (axis.weights * 2.0 ** bits[:, None, None] + 0.5).int()
    bits = bits[:, None, None, None].int()
    half = torch.ones_like(bits).bitwise_left_shift(bits - 1)
    sums = _sums(planes, axis.taps, weights) + half
    return sums.bitwise_right_shift(bits).clamp_(0, 255).to(planes.dtype)


def _sums(planes: Tensor, taps: Tensor, weights: Tensor) -> Tensor:
    parts = (
        _take(planes, taps[..., at]).to(weights.dtype) * weights[:, None, None, :, at]
        for at in range(taps.shape[-1])
    )
    total = next(parts)
    for part in parts:
        total += part
    return total


def _bits(largest: Tensor) -> Tensor:
    """Return by how many bits weights are scaled, so that the largest fits into 16, ``[n]``."""
    bits = torch.arange(1, _MOST_BITS + 1, device=largest.device)
    fits = (largest[:, None] * 2.0**bits + 0.5).long() < _WEIGHT_LIMIT
    return fits.sum(1)

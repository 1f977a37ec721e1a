"""Windows of each sample's own, resized to one size: torchvision's ``resized_crop`` on a batch.

What each row and column is made of is computed with the draws, in the arithmetic of torch's own
kernels for the CPU, and the sums are taken in their order: first along rows, then along columns.
Bytes have weights of 16 bits, and each pass is rounded to bytes. So a device has the same pixels.
Of floats the last bit may be another one: compilers round products and sums at once, or apart.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.augment.ops.planes import multiply_add

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from lightning_fastdata.augment.ops.operation import Arrays, Values

_MOST_BITS: Final = 22
_WEIGHT_LIMIT: Final = 1 << 15


def window_numbers(
    box: Sequence[int], whole: Sequence[int], size: Sequence[int], mode: str, *, floats: bool
) -> Mapping[str, np.ndarray]:
    """Return what a window ``top, left, height, width`` is made of, resized to a size.

    Args:
        box: the window, in pixels.
        whole: height and width of the image that it is cut out of.
        size: height and width of the result.
        mode: ``"nearest"``, whose numbers are those of a crop; ``"bilinear"``, or ``"antialias"``.
        floats: whether pixels are floats, and not bytes.
    """
    numbers: dict[str, np.ndarray] = {}
    for axis, name in enumerate(("rows", "columns")):
        first, length = box[axis], box[axis + 2]
        if mode == "nearest":
            numbers[name] = first + _nearest(length, size[axis])
        else:
            made = _averages(first, length, whole[axis], size[axis], mode == "antialias", floats)
            numbers[name], weights = made
            numbers |= {f"{name} weights": weights} if floats else _rounded(name, weights)
    return numbers


def resized_crop(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Return windows of images ``[n, C, H, W]``, resized; of :func:`window_numbers`, stacked."""
    return _blended(_blended(batch, 3, "columns", arrays), 2, "rows", arrays)


def _nearest(length: int, size: int) -> np.ndarray:
    """Return the places along an axis that are read, int64 ``[size]``."""
    scale = np.float32(length) / np.float32(size)
    places = (np.arange(size, dtype=np.float32) * scale).astype(np.int64)
    return np.minimum(places, length - 1)


@lru_cache(maxsize=64)
def _averages(
    first: int, length: int, whole: int, size: int, smooth: bool, floats: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first places that are read, int64 ``[size]``, and weights ``[taps, size]``.

    All windows of a batch have as many taps. ``smooth``: what is made smaller is averaged.
    """
    kind: Any = np.float32 if floats else np.float64
    scale = kind(length) / kind(size)
    wide = np.maximum(scale, kind(1.0)) if smooth else kind(1.0)
    taps = min(whole, math.ceil(max(1.0, whole / size) if smooth else 1.0) * 2 + 1)
    half = np.array([0.5])  # as in torch, of doubles, whatever is added to it
    center = ((np.arange(size) + half) * scale).astype(kind)
    begin = np.maximum((center - wide + half).astype(np.int64), 0)
    end = np.minimum((center + wide + half).astype(np.int64), length)
    # Taps before the window or behind it weigh nothing.
    start = np.minimum(first + begin, whole - taps)
    at = (start - first + np.arange(taps)[:, None]).astype(kind)
    away = np.abs(((at - center + half) * kind(1.0 / np.float64(wide))).astype(kind))
    inside = (at >= begin) & (at < end) & (away < 1.0)
    weights = np.where(inside, kind(1.0) - away, kind(0.0))
    return start, weights / np.add.accumulate(weights)[-1]


def _rounded(name: str, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Return weights as whole numbers, and how sums of them are rounded: what is added, bits."""
    scaled = weights.max() * 2.0 ** np.arange(1, _MOST_BITS + 1) + 0.5
    bits = int((scaled.astype(np.int64) < _WEIGHT_LIMIT).sum())
    return {
        f"{name} weights": (weights * 2.0**bits + 0.5).astype(np.int32),
        f"{name} rounding": np.array([1 << (bits - 1), bits], np.int32),
    }


def _blended(planes: Tensor, axis: int, name: str, arrays: Arrays) -> Tensor:
    """Return weighted sums along an axis of ``[n, C, H, W]``, rounded as the dtype needs."""
    places, weights = arrays[name], arrays[f"{name} weights"]
    rounding = arrays.get(f"{name} rounding")
    one, made = [len(planes), 1, 1, 1], [*planes.shape]
    one[axis] = made[axis] = places.shape[-1]
    first = places.view(one).expand(made)
    total = planes.new_zeros(()) if rounding is None else rounding[:, 0].view(-1, 1, 1, 1)
    for tap in range(weights.shape[1]):
        # The place of a tap is that of the first one in a batch that begins so much later.
        later = planes.narrow(axis, tap, planes.shape[axis] - tap)
        total = multiply_add(total, weights[:, tap].view(one), later.gather(axis, first))
    if rounding is None:
        return total
    # Weights of bytes add up to one, nearly, so that no sum is above 255.
    return total.bitwise_right_shift_(rounding[:, 1].view(-1, 1, 1, 1)).to(planes.dtype)

"""What ends a pipeline: the numbers and the layout that a model takes."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Shape,
    Transform,
    Values,
    channels,
)

if TYPE_CHECKING:
    from torch import Tensor


def _encode_normalize(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    # By the image's own mean or range Albumentations normalizes it.
    if dtype not in (np.uint8, np.float32) or transform.normalization != "standard":
        return None
    mean, gain = (
        np.asarray(values, np.float32).tobytes()
        for values in (transform.mean_np, transform.denominator)
    )
    return _rows(mean, gain, channels(shape))


@lru_cache(maxsize=64)
def _rows(mean: bytes, gain: bytes, count: int) -> Encoded:
    rows = {}
    for name, values in (("mean", mean), ("gain", gain)):
        given = np.frombuffer(values, np.float32)
        # As in albucore: too few numbers mean that the first stands for all.
        row = given[:count] if given.size >= count else given[:1]
        rows[name] = np.broadcast_to(row, (count,)).copy()
    return Encoded((), rows)


def _normalize(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    mean, gain = (arrays[name][:, None, None, :] for name in ("mean", "gain"))
    return (images.float() - mean) * gain


def _encode_to_float(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    if dtype == np.float32:
        return Encoded((), {})  # Albumentations leaves it alone, whatever max_value is.
    if dtype != np.uint8:
        return None
    limit = 255.0 if transform.max_value is None else float(transform.max_value)
    return Encoded((), {"limit": np.array([limit], np.float32)})


def _to_float(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    # A tensor, not a number: CUDA would multiply by the reciprocal of a number.
    return images.float() / arrays["limit"][:, None, None, :] if "limit" in arrays else images


_TO_TENSOR: Final = {turns: Encoded((("transpose_mask", turns),), {}) for turns in (False, True)}


def _encode_to_tensor(transform: Transform, params: Values, shape: Shape, dtype: DType) -> Encoded:
    return _TO_TENSOR[bool(transform.transpose_mask)]


def _channels_first(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    return images.permute(0, 3, 1, 2).contiguous()


def _mask_to_tensor(masks: Tensor, static: Values, arrays: Arrays) -> Tensor:
    turned = static["transpose_mask"] and masks.ndim == 4
    return masks.permute(0, 3, 1, 2).contiguous() if turned else masks


def _float_dtype(transform: Transform, dtype: DType) -> DType:
    return np.dtype(np.float32)


OPS = (
    DeviceOp("Normalize", _encode_normalize, _normalize, out_dtype=_float_dtype),
    DeviceOp("ToFloat", _encode_to_float, _to_float, out_dtype=_float_dtype),
    DeviceOp(
        "ToTensorV2",
        _encode_to_tensor,
        _channels_first,
        mask=_mask_to_tensor,
        out_shape=lambda _transform, _params, shape: (channels(shape), *shape[:2]),
    ),
)
"""Exact."""

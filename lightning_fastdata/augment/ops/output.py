"""What ends a pipeline: the numbers and the layout that a model takes."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

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
    channels,
)
from lightning_fastdata.augment.pipeline.tree import list_leaves
from lightning_fastdata.errors import OptionsError, TransformError

_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """The form in which a pipeline hands over its images, after its last operation."""

    dtype: torch.dtype | None = None
    """Type of the numbers, which are not scaled; None: what the pipeline makes."""
    channels_last: bool = False
    """Whether ``[n, C, H, W]`` lies in memory as ``torch.channels_last``, else contiguous."""

    @property
    def converts(self) -> bool:
        """Whether it asks for anything."""
        return self.dtype is not None or self.channels_last


def output_form(out: str | None, *, channels_last: bool = False) -> OutputForm:
    """Return the form that options ask for; OptionsError if ``out`` names no dtype of theirs."""
    if out is not None and out not in _DTYPES:
        raise OptionsError(f"out is {out!r}; choose one of {', '.join(_DTYPES)}, or None.")
    dtype = None if out is None else _DTYPES[out]
    return OutputForm(dtype=dtype, channels_last=channels_last)


def check_form(form: OutputForm, compose: object) -> None:
    """Raise TransformError if a pipeline cannot yield images in a form."""
    ends = any(
        type(leaf.transform).__name__ == "ToTensorV2" and not leaf.conditional
        for leaf in list_leaves(compose)
    )
    if form.channels_last and not ends:
        raise TransformError(
            "channels_last=True is about images [n, C, H, W], which ToTensorV2 makes: end the "
            "pipeline with ToTensorV2."
        )


def convert_output(images: Tensor, form: OutputForm) -> Tensor:
    """Return images in a form; the same tensor if they have it already.

    They are ``[n, C, H, W]`` where the form is ``channels_last``, else of any shape.
    """
    converted = images if form.dtype is None else images.to(form.dtype)
    if not form.channels_last:
        return converted
    return converted.contiguous(memory_format=torch.channels_last)


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
    DeviceOp("Normalize", _encode_normalize, _normalize, out_dtype=_float_dtype, fused="normalize"),
    DeviceOp("ToFloat", _encode_to_float, _to_float, out_dtype=_float_dtype, fused="to float"),
    DeviceOp(
        "ToTensorV2",
        _encode_to_tensor,
        _channels_first,
        mask=_mask_to_tensor,
        out_shape=lambda _transform, _params, shape: (channels(shape), *shape[:2]),
        fused="channels first",
    ),
)
"""Exact."""

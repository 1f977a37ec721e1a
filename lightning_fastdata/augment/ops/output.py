"""What ends a pipeline: the numbers and the layout that a model takes."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.colors.statistics import channel_histograms
from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Params,
    Shape,
    Static,
    Transform,
    channels,
)
from lightning_fastdata.augment.ops.table import look_up
from lightning_fastdata.augment.pipeline.tree import list_leaves
from lightning_fastdata.errors import OptionsError, TransformError

_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


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
    """Return the form that these options ask for.

    Args:
        out: ``"float32"``, ``"float16"`` or ``"bfloat16"``; None leaves the dtype alone.
        channels_last: lay images out as ``torch.channels_last``.

    Raises:
        OptionsError: ``out`` is something else.
    """
    if out is not None and out not in _DTYPES:
        raise OptionsError(f"out is {out!r}; choose one of {', '.join(_DTYPES)}, or None.")
    dtype = None if out is None else _DTYPES[out]
    return OutputForm(dtype=dtype, channels_last=channels_last)


def check_form(form: OutputForm, compose: Any) -> None:
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

    Args:
        images: any shape; ``[n, C, H, W]`` where the form is ``channels_last``.
        form: what to convert to.

    Returns:
        ``images.to(dtype)``, and of that ``contiguous(memory_format=torch.channels_last)``.
    """
    converted = images if form.dtype is None else images.to(form.dtype)
    if not form.channels_last:
        return converted
    return converted.contiguous(memory_format=torch.channels_last)


def _encode_normalize(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    if dtype not in (np.uint8, np.float32):
        return None
    if transform.normalization != "standard":
        return encode_own(transform, shape, dtype)
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


def _normalize(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    if static:
        return normalize_own(images, static)
    mean, gain = (arrays[name][:, None, None, :] for name in ("mean", "gain"))
    return (images.float() - mean) * gain


def _normalized_dtype(transform: Transform, dtype: DType) -> DType:
    standard = transform.normalization == "standard"
    return np.dtype(np.float32) if standard else dtype_of(transform, dtype)


def _encode_to_float(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    if dtype == np.float32:
        return Encoded((), {})  # Albumentations leaves it alone, whatever max_value is.
    if dtype != np.uint8:
        return None
    limit = 255.0 if transform.max_value is None else float(transform.max_value)
    return Encoded((), {"limit": np.array([limit], np.float32)})


def _to_float(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    # A tensor, not a number: CUDA would multiply by the reciprocal of a number.
    return images.float() / arrays["limit"][:, None, None, :] if "limit" in arrays else images


def _encode_from_float(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    if transform.dtype != "uint8" or dtype != np.float32:
        return None
    return Encoded((), {"limit": np.array([transform.max_value], np.float32)})


def _from_float(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    levels = (images * arrays["limit"][:, None, None, :]).round()
    return levels.clamp(0, 255).to(torch.uint8)


def _encode_to_tensor(transform: Transform, params: Params, shape: Shape, dtype: DType) -> Encoded:
    return _to_tensor(bool(transform.transpose_mask))


@cache
def _to_tensor(transpose_mask: bool) -> Encoded:
    return Encoded((("transpose_mask", transpose_mask),), {})


def _channels_first(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    return images.permute(0, 3, 1, 2).contiguous()


def _mask_to_tensor(masks: Tensor, static: Static, arrays: Arrays) -> Tensor:
    turned = static["transpose_mask"] and masks.ndim == 4
    return masks.permute(0, 3, 1, 2).contiguous() if turned else masks


def _float_dtype(transform: Transform, dtype: DType) -> DType:
    return np.dtype(np.float32)


OPS = (
    DeviceOp(
        "Normalize",
        _encode_normalize,
        _normalize,
        out_dtype=_normalized_dtype,
        fused="normalize",
    ),
    DeviceOp(
        "ToFloat",
        _encode_to_float,
        _to_float,
        out_dtype=_float_dtype,
        fused="to float",
    ),
    DeviceOp(
        "FromFloat",
        _encode_from_float,
        _from_float,
        out_dtype=lambda transform, _dtype: np.dtype(transform.dtype),
    ),
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


_TINY: Final = 1e-4
"""albucore adds it to what it divides by, with exceptions for float images."""
_LIMIT: Final = 20


def dtype_of(transform: Transform, dtype: DType) -> DType:
    """Return the dtype of what a Normalize of this kind makes of images of a dtype.

    It depends on NumPy: from version 2 on, albucore makes float64 of uint8.
    """
    found: np.dtype[Any] = transform.apply(np.zeros((2, 2, 3), dtype)).dtype
    return found


def encode_own(transform: Transform, shape: Shape, dtype: DType) -> Encoded:
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


def normalize_own(images: Tensor, static: Static) -> Tensor:
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


def _by_range(images: Tensor, static: Static) -> tuple[Tensor, Tensor]:
    axes = (1, 2) if static["each"] else (1, 2, 3)
    low, high = images.amin(axes, keepdim=True), images.amax(axes, keepdim=True)
    return low, high - low + static["tiny"]


def _by_spread(images: Tensor, static: Static) -> tuple[Tensor, Tensor]:
    axes = (1, 2) if static["each"] else (1, 2, 3)
    values = images.double()
    mean = values.mean(axes, keepdim=True)
    spread = (values - mean).square().mean(axes, keepdim=True).sqrt()
    return mean, spread + static["tiny"]

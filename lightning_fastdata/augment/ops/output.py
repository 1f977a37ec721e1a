"""What ends a pipeline: the numbers and the layout that a model takes."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.augment.ops.colors.own_range import dtype_of, encode_own, normalize_own
from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.positions.border import channels
from lightning_fastdata.augment.pipeline.tree import list_leaves
from lightning_fastdata.errors import OptionsError, TransformError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape


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


def convert_output(images: torch.Tensor, form: OutputForm) -> torch.Tensor:
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
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
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


def _normalize(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if static:
        return normalize_own(images, static)
    mean, gain = (arrays[name][:, None, None, :] for name in ("mean", "gain"))
    return (images.float() - mean) * gain


def _normalized_dtype(transform: Any, dtype: np.dtype[Any]) -> np.dtype[Any]:
    standard = transform.normalization == "standard"
    return np.dtype(np.float32) if standard else dtype_of(transform, dtype)


def _encode_to_float(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    if dtype == np.float32:
        return Encoded((), {})  # Albumentations leaves it alone, whatever max_value is.
    if dtype != np.uint8:
        return None
    limit = 255.0 if transform.max_value is None else float(transform.max_value)
    return Encoded((), {"limit": np.array([limit], np.float32)})


def _to_float(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    # A tensor, not a number: CUDA would multiply by the reciprocal of a number.
    return images.float() / arrays["limit"][:, None, None, :] if "limit" in arrays else images


def _encode_from_float(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    if transform.dtype != "uint8" or dtype != np.float32:
        return None
    return Encoded((), {"limit": np.array([transform.max_value], np.float32)})


def _from_float(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    levels = (images * arrays["limit"][:, None, None, :]).round()
    return levels.clamp(0, 255).to(torch.uint8)


def _encode_to_tensor(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded:
    return _to_tensor(bool(transform.transpose_mask))


@cache
def _to_tensor(transpose_mask: bool) -> Encoded:
    return Encoded((("transpose_mask", transpose_mask),), {})


def _channels_first(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    return images.permute(0, 3, 1, 2).contiguous()


def _mask_to_tensor(
    masks: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    turned = static["transpose_mask"] and masks.ndim == 4
    return masks.permute(0, 3, 1, 2).contiguous() if turned else masks


def _float_dtype(transform: Any, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32)


OPS = (
    DeviceOp(
        name="Normalize",
        encode=_encode_normalize,
        image=_normalize,
        out_dtype=_normalized_dtype,
        fused="normalize",
    ),
    DeviceOp(
        name="ToFloat",
        encode=_encode_to_float,
        image=_to_float,
        out_dtype=_float_dtype,
        fused="to float",
    ),
    DeviceOp(
        name="FromFloat",
        encode=_encode_from_float,
        image=_from_float,
        out_dtype=lambda transform, _dtype: np.dtype(transform.dtype),
    ),
    DeviceOp(
        name="ToTensorV2",
        encode=_encode_to_tensor,
        image=_channels_first,
        mask=_mask_to_tensor,
        out_shape=lambda _transform, _params, shape: (channels(shape), *shape[:2]),
        fused="channels first",
    ),
)
"""Exact."""

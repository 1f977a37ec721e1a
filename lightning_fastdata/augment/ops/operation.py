"""What it takes for one Albumentations transform to run on a batch on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch

Shape: TypeAlias = tuple[int, ...]
"""``(height, width)`` or ``(height, width, channels)``, as Albumentations sees one image."""


class Encoded(NamedTuple):
    """The drawn parameters of one operation on one sample, ready to be stacked over samples."""

    static: tuple[tuple[str, Any], ...]
    """Hashable settings that all samples of one launch share: sizes, interpolation, border mode."""
    arrays: Mapping[str, np.ndarray]
    """Numbers that differ between samples, e.g. a 2x3 matrix or a 256-entry table."""


Encode: TypeAlias = "Callable[[Any, Mapping[str, Any], Shape, np.dtype[Any]], Encoded | None]"
Run: TypeAlias = (
    "Callable[[torch.Tensor, Mapping[str, Any], Mapping[str, torch.Tensor]], torch.Tensor]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOp:
    """One Albumentations transform, in the form that runs on ``n`` samples at once.

    Images are ``[n, H, W, C]`` uint8 or float32 in [0, 1]; masks are ``[n, H, W]`` or
    ``[n, H, W, C]`` of any integer dtype or float32. Nothing here draws random numbers: the
    parameters were drawn by Albumentations itself.
    """

    name: str
    """Class name of the Albumentations transform."""
    encode: Encode
    """``(transform, params, shape, dtype) -> Encoded``, or None if these parameters have no device
    form; the sample then runs through Albumentations on the CPU."""
    image: Run
    """``(images, static, arrays) -> images``; each array is stacked to ``[n, ...]``."""
    mask: Run | None = None
    """The same for masks; None leaves masks as they are."""
    out_shape: Callable[[Any, Mapping[str, Any], Shape], Shape] = lambda _t, _p, shape: shape
    """Shape of one image after the operation, given its shape before."""
    out_dtype: Callable[[Any, np.dtype[Any]], np.dtype[Any]] = lambda _t, dtype: dtype
    """Dtype of one image after the operation, given its dtype before."""

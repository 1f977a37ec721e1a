"""The device form of one Albumentations transform, and what is recorded of it for one sample.

Recording, packing and replaying share these types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from albumentations import BasicTransform
    from torch import Tensor

Role: TypeAlias = Literal["image", "mask"]
Shape: TypeAlias = tuple[int, ...]
"""``(height, width)`` or ``(height, width, channels)``, as Albumentations sees one image."""
DType: TypeAlias = "np.dtype[Any]"
Transform: TypeAlias = "BasicTransform"
"""An Albumentations transform; its settings are its attributes."""
Values: TypeAlias = Mapping[str, Any]
"""Values by name: what was drawn, the targets of a sample, or settings that all samples share."""
Arrays: TypeAlias = "Mapping[str, Tensor]"
"""Arrays by name: numbers that differ between samples, stacked to ``[n, ...]``."""


class Encoded(NamedTuple):
    """The drawn parameters of one operation on one sample, ready to be stacked over samples."""

    static: tuple[tuple[str, Any], ...]
    """Hashable settings that all samples of one launch share: sizes, interpolation, border mode."""
    arrays: Mapping[str, np.ndarray]
    """Numbers that differ between samples, e.g. a 2x3 matrix or a 256-entry table."""


Encode: TypeAlias = "Callable[[Transform, Values, Shape, DType], Encoded | None]"
Run: TypeAlias = "Callable[[Tensor, Values, Arrays], Tensor]"


# Named functions, not lambdas: forms that users register travel to other processes.
def _same_shape(transform: Transform, params: Values, shape: Shape) -> Shape:  # noqa: ARG001
    return shape


def _same_dtype(transform: Transform, dtype: DType) -> DType:  # noqa: ARG001
    return dtype


def channels(shape: Shape) -> int:
    """Return the number of channels of an image shape."""
    return shape[2] if len(shape) > 2 else 1


def as_channels_last(batch: Tensor) -> Tensor:
    """Return masks ``[n, H, W]`` as ``[n, H, W, 1]``; images and other masks as they are."""
    return batch if batch.ndim == 4 else batch.unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class DeviceOp:
    """One Albumentations transform, in the form that runs on ``n`` samples at once.

    Images are uint8 or float32, ``[n, H, W, C]``; masks are ``[n, H, W]`` or ``[n, H, W, C]``, of a
    dtype in ``MASKS``. ``albumentations/plan.py`` says which form takes which. The parameters were
    drawn by Albumentations itself.
    """

    name: str
    """Class name of the Albumentations transform."""
    encode: Encode
    """``(transform, params, shape, dtype) -> Encoded``, or None if these parameters have no device
    form; the sample then runs through Albumentations on the CPU."""
    image: Run
    """``(images, static, arrays) -> images``; each array is stacked to ``[n, ...]``."""
    mask: Run | None = None
    """``(masks, static, arrays) -> masks``, as for images; None: masks stay as they are."""
    _: KW_ONLY
    out_shape: Callable[[Transform, Values, Shape], Shape] = _same_shape
    """Shape of one image after the operation, given its shape before."""
    out_dtype: Callable[[Transform, DType], DType] = _same_dtype
    """Dtype of one image after the operation, given its dtype before."""
    owner: type | None = None
    """The class for which a user registered it; it then keeps the shape and dtype of images and
    masks. None: it belongs to Albumentations' own class ``name``."""
    reads_pixels: bool = False
    """Whether the sampler of ``owner`` needs the real image; without an owner it is not used."""


class TapeOp(NamedTuple):
    """One operation that the device has still to run on one sample."""

    leaf: int
    """Number of the transform in its pipeline."""
    name: str
    """Class name of the transform."""
    encoded: Encoded
    """Drawn parameters of the operation."""


class Track(NamedTuple):
    """All operations that the device has still to run on an image or mask of a sample, in order."""

    role: Role
    """Whether the operations treat the pixels as an image or as a mask."""
    ops: tuple[TapeOp, ...]
    """The operations, in the order in which they run."""


Tape: TypeAlias = Mapping[Any, Track]
"""One track for each image or mask of a sample, by its name, e.g. ``"image"``, or by its path."""

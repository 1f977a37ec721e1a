"""Which dtype images have at each place of a pipeline, and which device forms take it.

Device forms are for bytes, and some for float32, which ``Normalize`` and ``ToFloat`` make. A batch
is one tensor: all of its images have one dtype when they leave the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from lightning_fastdata.augment.pipeline.tree import CHANGES_SIZE, Leaf, is_albumentations

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.pipeline.tree import Node

CASTS: Final = frozenset({"FromFloat", "Normalize", "ToFloat"})
CHANGES_DTYPE_OR_LAYOUT: Final = CASTS | {"ToTensorV2"}
"""Transforms that are there to change the dtype."""
_OF_FLOATS: Final = frozenset(
    {
        *("CenterCrop", "Crop", "D4", "HorizontalFlip", "NoOp", "Pad", "PadIfNeeded", "RandomCrop"),
        *("RandomRotate90", "ToTensorV2", "Transpose", "VerticalFlip"),
        *("Affine", "Rotate", "ShiftScaleRotate", "ElasticTransform"),
        *("RandomResizedCrop", "RandomSizedCrop", "Resize"),
        *("CoarseDropout", "Erasing", "Normalize", "ToFloat"),
    }
)
"""Transforms whose device forms take float32 as well as uint8; colours, blurs and noise do not."""

DType: TypeAlias = "np.dtype[Any]"
BYTES: Final = np.dtype(np.uint8)
FLOATS: Final = np.dtype(np.float32)


class Followed(NamedTuple):
    """How the dtype of one image develops along a pipeline; None: some samples have another one."""

    before: tuple[DType | None, ...]
    """Per leaf: its input."""
    after: DType | None
    """What the pipeline returns."""

    @property
    def boundary(self) -> int:
        """Number of the last leaf before or behind which samples may have several dtypes, or -1."""
        mixed = [index for index, dtype in enumerate((*self.before, self.after)) if dtype is None]
        return min(mixed[-1], len(self.before) - 1) if mixed else -1


def takes_dtype(op: DeviceOp, dtype: DType) -> bool:
    """Return whether a device form knows images of a dtype."""
    of_floats = op.owner is not None or op.name in _OF_FLOATS
    return dtype == BYTES or (dtype == FLOATS and of_floats)


def why_not(op: DeviceOp, dtypes: Iterable[DType | None]) -> str | None:
    """Return why a device form cannot have such images, or None."""
    strange = [dtype for dtype in dtypes if dtype is None or not takes_dtype(op, dtype)]
    return f"no device form for images of {strange[0]}" if strange else None


def follow_dtypes(leaves: Iterable[Leaf], given: DType) -> Followed:
    """Follow the dtype of an image through a pipeline.

    What transforms of users make is not known before they run: images of another dtype are then
    computed in the worker, and so is their batch.
    """
    before: list[DType | None] = []
    current: DType | None = given
    for leaf in leaves:
        before.append(current)
        after = dtype_after(leaf.transform, current)
        current = None if leaf.conditional and after != current else after
    return Followed(tuple(before), current)


def dtype_after(transform: Node, dtype: DType | None) -> DType | None:
    """Return which dtype an image of one has after a transform was applied."""
    name = type(transform).__name__
    if name not in CASTS or not is_albumentations(transform):
        return dtype
    return np.dtype(transform.dtype) if name == "FromFloat" else FLOATS


def changes_form(transform: Node) -> bool:
    """Return whether a transform may change the shape or dtype of images."""
    name = type(transform).__name__
    if not is_albumentations(transform):
        return False
    if name in CHANGES_DTYPE_OR_LAYOUT or name in CHANGES_SIZE:
        return True
    # ToRGB is there for images of one channel.
    return name == "ToRGB" or bool(name == "ToGray" and transform.num_output_channels != 3)

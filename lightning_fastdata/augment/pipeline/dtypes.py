"""Which dtype images have at each place of a pipeline, and which device forms take it.

Device forms are for bytes, and some for float32, which ``Normalize`` and ``ToFloat`` make. A batch
is one tensor: all of its images have one dtype when they leave the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

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
        *("CenterCrop", "D4", "HorizontalFlip", "NoOp", "PadIfNeeded", "RandomCrop"),
        *("RandomRotate90", "ToTensorV2", "Transpose", "VerticalFlip"),
        *("Affine", "Rotate", "ShiftScaleRotate"),
        *("RandomResizedCrop", "RandomSizedCrop", "Resize"),
        *("CoarseDropout", "Erasing", "Normalize", "ToFloat"),
    }
)
"""Transforms whose device forms take float32 as well as uint8; colours and blurs do not."""

DType: TypeAlias = "np.dtype[Any]"
BYTES: Final = np.dtype(np.uint8)
FLOATS: Final = np.dtype(np.float32)
MASKS: Final = frozenset(
    np.dtype(kind)
    for kind in (np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64, np.float32)
)
"""Dtypes of masks that device forms take: torch hardly computes with wider unsigned ones."""


def takes_dtype(op: DeviceOp, dtype: DType) -> bool:
    """Return whether a device form knows images of a dtype."""
    of_floats = op.owner is not None or op.name in _OF_FLOATS
    return dtype == BYTES or (dtype == FLOATS and of_floats)


def why_no_forms(images: Iterable[DType], masks: Iterable[DType]) -> str | None:
    """Return why there are no device forms for the images and masks of a sample, or None."""
    for what, dtypes, known in (("images", images, {BYTES, FLOATS}), ("masks", masks, MASKS)):
        if strange := set(dtypes) - known:
            return f"there are no device forms for {what} of {strange.pop()}"
    return "the images of a sample have several dtypes" if len(set(images)) > 1 else None


def follow_dtypes(leaves: Iterable[Leaf], given: DType) -> list[DType] | None:
    """Return the dtype that images have before each transform.

    What transforms of users make is not known before they run: images of another dtype are then
    computed in the worker, and so is their batch.

    Returns:
        None: some samples only may change their dtype, and a batch has one.
    """
    before: list[DType] = []
    for leaf in leaves:
        before.append(given)
        after = dtype_after(leaf.transform, given)
        if leaf.conditional and after != given:
            return None
        given = after
    return before


def dtype_after(transform: Node, dtype: DType) -> DType:
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

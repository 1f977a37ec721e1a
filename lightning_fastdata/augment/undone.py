"""What the training does to all images, and another stage leaves undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.augment.albumentations.plan import list_leaves
from lightning_fastdata.augment.fields import Fields, describe, find_fields, get_field, to_hwc
from lightning_fastdata.errors import BatchError
from lightning_fastdata.tree import find_composes, find_instances, loaded_classes

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from lightning_fastdata.types import Batch


def left_undone(
    training: Iterable[object], other: Iterable[object], sample: Batch, image: int | str | None
) -> str | None:
    """Return what training does to all images and another stage does not; None: nothing is found.

    Only operations that make images floating point, or normalise them, are looked for.

    Args:
        training: transforms of the training.
        other: transforms of the other stage.
        sample: a sample of the other stage's dataset, which may have done all of it already.
        image: key or index of the image in the sample; None finds it.
    """
    trained, others = _names(training), _names(other)
    try:
        place = find_fields(sample, Fields(image=image), batched=False).image
        pixels = to_hwc(get_field(sample, place))
    except BatchError:
        return None
    normalised = "Normalize" not in trained - others or not _in_unit_range(pixels)
    if normalised and (others or not trained or pixels.dtype.kind == "f"):
        return None
    return f"{' and '.join(sorted(trained))}, and images here are {describe(pixels)}"


def _in_unit_range(pixels: np.ndarray) -> bool:
    """Return whether the values of an image are integers, or lie in [0, 1]."""
    floats = pixels.dtype.kind == "f" and pixels.size
    return not floats or bool(pixels.min() >= 0 and pixels.max() <= 1)


def _names(transforms: Iterable[object]) -> set[str]:
    """Return the class names of the operations that make floats of images, or normalise them."""
    transforms = list(transforms)
    leaves = [leaf for compose in find_composes(transforms) for leaf in list_leaves(compose)]
    names = {type(leaf.transform).__name__ for leaf in leaves} & {"Normalize", "ToFloat"}
    kinds = loaded_classes("torchvision.transforms.v2", "Normalize", "ToDtype", "ConvertImageDtype")
    own = find_instances(transforms, kinds)
    return names | {type(one).__name__ for one in own if _makes_floats(one)}


def _makes_floats(transform: Any) -> bool:
    """Return whether a transform of torchvision makes images floating point, or normalises them."""
    dtypes = getattr(transform, "dtype", torch.float32)
    given = dtypes.values() if isinstance(dtypes, Mapping) else [dtypes]
    return any(isinstance(one, torch.dtype) and one.is_floating_point for one in given)

"""What lies beside an image that is moved, and would stay behind: masks, images, boxes."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Collection, Iterator, Mapping
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import torch

from lightning_fastdata.augment.pipeline.fields import Location, describe
from lightning_fastdata.augment.pipeline.tree import is_container, list_leaves
from lightning_fastdata.errors import BatchError, FastDataWarning
from lightning_fastdata.tree import PilImage, children, spelled

if TYPE_CHECKING:
    from lightning_fastdata.augment.pipeline.tree import Node
    from lightning_fastdata.tree import Path
    from lightning_fastdata.types import Batch

_MASK_FILLS: Final = ("fill_mask", "mask_drop_value")
"""Where dropouts keep what they write to a mask; None: they leave it as it is."""
_MOST_PARTS: Final = 16
"""Of a list within a sample that are looked at: it may hold thousands of tokens."""
_PLAIN: Final = (numbers.Number, str, bytes, type(None))
_warned: set[str] = set()


class Mover(NamedTuple):
    """What moves the pixels of an image."""

    name: str
    """As messages call it."""
    takes_boxes: bool
    """Whether it knows boxes: what looks like some is no concern then."""
    library: Literal["albumentations", "torchvision"] = "albumentations"
    """Whose pipeline it is: how a field gets a role."""


def mover_of(compose: Node) -> Mover | None:
    """Return what moves pixels in a pipeline; None if all of it leaves them at their places."""
    import albumentations

    for leaf in list_leaves(compose):
        transform = leaf.transform
        # A Lambda is a NoOp, too: what it does to masks is the user's own.
        if not isinstance(transform, albumentations.DualTransform) or isinstance(
            transform, albumentations.NoOp
        ):
            continue
        if all(vars(transform).get(name, name) is not None for name in _MASK_FILLS):
            boxes = is_container(compose) and "bboxes" in getattr(compose, "processors", ())
            return Mover(type(transform).__name__, boxes)
    return None


def check_beside(
    item: Batch,
    known: Collection[Location],
    size: tuple[int, int],
    mover: Mover,
    *,
    samples: int | None = None,
) -> None:
    """Raise BatchError if a field of the height and width of the image would stay where it is.

    Boxes that would stay are a FastDataWarning, once; so are keypoints that are called so.

    Args:
        item: a sample, or a batch.
        known: fields that move, too, or that are said to stay.
        size: height and width of the image in pixels.
        mover: what moves its pixels.
        samples: of a batch; None for a sample.
    """
    if isinstance(item, list | tuple):
        known = {place % len(item) for place in known if isinstance(place, int)}
    for place, field in children(item) or ():
        if place in known or isinstance(field, _PLAIN):
            continue
        for path, value, shape in _arrays(field, (place,), samples):
            if size in pairwise(shape):
                raise BatchError(_left_behind(path, value, mover))
            rows = shape[1] if len(shape) == 2 else 0
            if rows in {2, 3} and any(word in str(path[-1]).lower() for word in _POINTS):
                _warn_of(_KEYPOINTS, path, value, mover)
            elif not mover.takes_boxes and rows in {4, 5}:
                _warn_of(_BOXES, path, value, mover)


def _arrays(
    value: Batch, path: Path, samples: int | None
) -> Iterator[tuple[Path, Batch, tuple[int, ...]]]:
    """Yield the arrays in a field, with where each is and the shape that it has in one sample."""
    if isinstance(value, np.ndarray | torch.Tensor):
        shape = tuple(value.shape)
        yield path, value, shape[1:] if samples is not None and shape[:1] == (samples,) else shape
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _arrays(part, (*path, key), samples)
    elif isinstance(value, list | tuple):
        width = _width_of_rows(value)
        if width:
            yield path, value, (len(value), width)
            return
        # The parts of a list in a batch are of one sample each.
        of_each = None if samples == len(value) else samples
        for place, part in enumerate(islice(value, _MOST_PARTS)):
            yield from _arrays(part, (*path, place), of_each)
    elif not isinstance(value, _PLAIN) and isinstance(value, PilImage):
        yield path, value, value.size[::-1]


def _width_of_rows(value: list[Batch] | tuple[Batch, ...]) -> int:
    """Return how many numbers each row of a list has, of which the first is asked; 0: no rows."""
    first: Any = value[0] if value else None
    rows = isinstance(first, list | tuple)
    return len(first) if rows and all(isinstance(one, numbers.Number) for one in first) else 0


def _name(path: Path) -> str:
    return repr(path[0]) if len(path) == 1 else spelled(path)


def _left_behind(path: Path, value: Batch, mover: Mover) -> str:
    place = path[0]
    return (
        f"The field {_name(path)} is {describe(value)}, as high and as wide as the image. "
        f"{mover.name} moves the pixels of the image, and this field has no role, so that it would "
        f"stay behind. {_role_of(path, mover)} If it is to stay as it is, say stays=[{place!r}], "
        f"as in augment=as_batch_transform({_GIVEN[mover.library]}, stays=[{place!r}])."
    )


_GIVEN: Final = {"albumentations": "compose", "torchvision": "pipeline"}


def _role_of(path: Path, mover: Mover) -> str:
    """Return how to say what a field is."""
    place = path[0]
    if mover.library == "torchvision":
        named = f", or say mask={place!r} (to FastDataModule or as_batch_transform)"
        return (
            "If it is a mask, let the dataset return it as tv_tensors.Mask"
            f"{named if len(path) == 1 else ''}. If it is another image, return both as "
            "tv_tensors.Image."
        )
    if len(path) > 1:
        return (
            "If it is a mask or an image, return it beside the image: {'image': ..., 'mask': ...}."
        )
    return (
        f"If it is the mask, say mask={place!r} (to FastDataModule, DataThroughputCallback, "
        "as_batch_transform). If it is another image or mask, say A.Compose(..., "
        f"additional_targets={{'{place}': 'image'}}), or 'mask'."
    )


_BOXES: Final = "boxes", "bbox_params=A.BboxParams(...)", "bboxes", "BoundingBoxes"
_KEYPOINTS: Final = "keypoints", "keypoint_params=A.KeypointParams(...)", "keypoints", "KeyPoints"
"""A word, how a Compose is told of them, their usual field, and the class of tv_tensors."""
_POINTS: Final = ("keypoint", "landmark")


def _warn_of(targets: tuple[str, str, str, str], path: Path, value: Batch, mover: Mover) -> None:
    word, params, field, tv_tensor = targets
    how = (
        f"Say how they are written, A.Compose(..., {params}), and have the dataset return a dict "
        f"with 'image' and {field!r}."
        if mover.library == "albumentations"
        else f"Let the dataset return them as tv_tensors.{tv_tensor}, and a FastDataModule load it."
    )
    text = (
        f"The field {_name(path)} is {describe(value)}, as {word} are, and {mover.name} moves the "
        f"pixels of the image without them. {how} If they are no {word}, or are to stay as they "
        f"are, say augment=as_batch_transform({_GIVEN[mover.library]}, stays=[{path[0]!r}])."
    )
    # By name: the numbers of boxes differ from sample to sample.
    told = f"{mover.name} {_name(path)}"
    if told not in _warned:
        _warned.add(told)
        warnings.warn(text, FastDataWarning, stacklevel=4)

"""What a pipeline is given of a sample, and what would stay behind an image that it moves."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import PIL.Image
import torch
from torch.utils._pytree import tree_flatten
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    Location,
    describe,
    find_fields,
    get_field,
    has_field,
    put_fields,
)
from lightning_fastdata.augment.pipeline.roles import Mover, check_beside
from lightning_fastdata.augment.torchvision.pipeline import is_own
from lightning_fastdata.augment.torchvision.plan import MOVES, NEED_BOXES
from lightning_fastdata.errors import BatchError, FastDataWarning
from lightning_fastdata.tree import children, replace_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_fastdata.augment.torchvision.pipeline import Leaf
    from lightning_fastdata.tree import Path
    from lightning_fastdata.types import Batch

_IMAGE: Final = 3
"""Dimensions of an image."""
_CONVERTERS: Final = frozenset({"Lambda", "ToImage", "ToTensor"})


def typed(sample: Batch, fields: Fields) -> Batch:
    """Return a sample whose named fields say by their types what they are.

    Of plain tensors v2 takes the first one for the image. Where that is none, and another one is,
    that one gets its type.

    Raises:
        BatchError: a named field does not exist.
    """
    values: dict[Location, Any] = {}
    named = (("image", fields.image, tv_tensors.Image), ("mask", fields.mask, tv_tensors.Mask))
    for name, place, kind in named:
        if place is None:
            continue
        if not has_field(sample, place):
            raise BatchError(
                f"There is no field {place!r} (given as {name}=) in {describe(sample)}. "
                "Name a key or an index that exists."
            )
        value = get_field(sample, place)
        if isinstance(value, torch.Tensor) and not isinstance(value, tv_tensors.TVTensor):
            values[place] = kind(value)
    if fields.image is None and not any(map(_has_role, tree_flatten(sample)[0])):
        with suppress(BatchError):
            place = find_fields(sample, fields, batched=False).image
            value, first = get_field(sample, place), image_of(sample)
            if isinstance(value, torch.Tensor) and value is not first and first.ndim < _IMAGE:
                values[place] = tv_tensors.Image(value)
    return put_fields(sample, values) if values else sample


def only_image(sample: Batch) -> Path | None:
    """Return where the image of a sample is, if v2 would transform nothing else."""
    leaves = tree_flatten(sample)[0]
    own = list(filter(_has_role, leaves))
    own = own or [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)][:1]
    if len(own) != 1 or own[0] is sample:
        return None
    paths: list[Path] = []

    def looked_at(path: Path, leaf: Any) -> Any:
        if leaf is own[0]:
            paths.append(path)
        return leaf

    replace_leaves(sample, looked_at)
    return paths[0] if paths else None


def functions_in(leaves: Iterable[Leaf]) -> list[str]:
    """Return the names of what is no transform of v2 in a pipeline, nor derived from one.

    It is written for images as a rule, as torchvision's datasets call their ``transform``.
    """
    return [leaf.name for leaf in leaves if not isinstance(leaf.transform, v2.Transform)]


def mover_of(leaves: Iterable[Leaf]) -> Mover | None:
    """Return what moves pixels in a pipeline; None if nothing of torchvision's does."""
    names = [type(leaf.transform).__name__ for leaf in leaves]
    moving = next((name for name in names if name in MOVES), None)
    boxes = any(name in NEED_BOXES for name in names)
    return None if moving is None else Mover(moving, boxes, "torchvision")


def check_roles(sample: Batch, fields: Fields, mover: Mover | None) -> None:
    """Raise BatchError if a field as large as the image would stay where it is."""
    parts = children(sample)
    if mover is None or parts is None:
        return
    held = {place: tree_flatten(part)[0] for place, part in parts}
    roles = {place for place, values in held.items() if any(map(_has_role, values))}
    values = [value for place in held for value in held[place]]
    image = image_of(sample)
    roles |= {place for place in held if any(value is image for value in held[place])}
    size = size_of(image)
    if size is None:
        return
    boxes = mover.takes_boxes or any(isinstance(each, tv_tensors.BoundingBoxes) for each in values)
    known = {*roles, *fields.stays}
    check_beside(sample, known, (size[0], size[1]), mover._replace(takes_boxes=boxes))


def image_of(sample: Batch) -> Any:
    """Return the image of a sample, as v2 finds it; None: there is none."""
    values = tree_flatten(sample)[0]
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return next(filter(_is_image, values), next(tensors, None))


def size_of(image: Any) -> tuple[int, ...] | None:
    """Return height and width of an image; None: it has none."""
    if isinstance(image, PIL.Image.Image):
        return image.size[::-1]
    return None if image is None or image.ndim < 2 else tuple(image.shape[-2:])


def check_convertible(sample: Batch, leaves: Sequence[Leaf]) -> None:
    """Raise BatchError if v2 would pass a sample through, as it does with arrays.

    A warning comes where the image alone is given to the pipeline, and there is more in the sample.
    """
    values, functions = tree_flatten(sample)[0], functions_in(leaves)
    if functions and len(values) > 1 and only_image(sample) is not None:
        warnings.warn(
            f"{functions[0]} is no transform of v2, so that the pipeline is called with the image "
            "of a sample alone, and what is beside it stays as it is. If it is to see that, too, "
            "derive it from v2.Transform.",
            FastDataWarning,
            stacklevel=2,
        )
    if any(isinstance(value, torch.Tensor | PIL.Image.Image) for value in values):
        return
    own = all(is_own(leaf.transform) for leaf in leaves)
    converts = any(type(leaf.transform).__name__ in _CONVERTERS for leaf in leaves)
    arrays = [value for value in values if isinstance(value, np.ndarray) and value.ndim in {2, 3}]
    if own and not converts and not arrays:
        raise BatchError(
            f"The first sample is {describe(sample)}, in which torchvision finds nothing to "
            "transform. It looks for tensors and PIL images in tuples, lists and dicts."
        )
    if own and not converts:
        raise BatchError(
            f"The image of the first sample is {describe(arrays[0])}, and torchvision passes "
            "arrays through as they are. Begin the pipeline with v2.ToImage(), or return a tensor "
            "[C, H, W]."
        )


def _has_role(value: object) -> bool:
    return isinstance(value, tv_tensors.TVTensor | PIL.Image.Image)


def _is_image(value: object) -> bool:
    return isinstance(value, tv_tensors.Image | tv_tensors.Video | PIL.Image.Image)


def field_at(item: Batch, path: Path) -> Any:
    """Return what lies under keys and positions in a sample or batch; None: nothing does."""
    for key in path:
        if isinstance(item, Mapping):
            if key not in item:
                return None
            item = item[key]
        elif isinstance(item, list | tuple) and isinstance(key, int) and key < len(item):
            item = item[key]
        else:
            return getattr(item, key, None) if isinstance(key, str) else None
    return item

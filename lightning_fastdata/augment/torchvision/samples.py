"""What a pipeline is given of a sample, and what would stay behind an image that it moves."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import PIL.Image
import torch
from torch.utils._pytree import tree_flatten
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    Location,
    check_named,
    describe,
    find_fields,
    get_field,
    put_fields,
)
from lightning_fastdata.augment.pipeline.roles import Mover, check_beside
from lightning_fastdata.augment.torchvision.kinds import MOVES, NEED_BOXES
from lightning_fastdata.augment.torchvision.pipeline import is_own
from lightning_fastdata.errors import BatchError, FastDataWarning
from lightning_fastdata.randomness.global_generators import GENERATORS
from lightning_fastdata.tree import children, with_paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_fastdata.augment.torchvision.pipeline import Leaf
    from lightning_fastdata.tree import Path
    from lightning_fastdata.types import Batch

_FROM_ARRAYS: Final = frozenset({"ToImage", "ToTensor"})


class Traits(NamedTuple):
    """What a pipeline does to samples, as far as its transforms tell."""

    mover: Mover | None
    """What moves pixels in it; None if nothing of torchvision's does."""
    boxes: str | None
    """What makes no sense without boxes or keypoints."""
    function: str | None
    """What is no transform of v2, nor derived from one: it is written for images as a rule, as
    torchvision's datasets call their ``transform``."""
    own: bool
    """Whether all that runs is torchvision's."""
    takes_arrays: bool
    """Whether it makes images of NumPy's arrays before it moves any."""
    writes: bool
    """Whether a transform writes to the tensors that it is given."""

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> Traits:
        """Return what the transforms of a pipeline tell."""
        names = [type(leaf.transform).__name__ for leaf in leaves]
        moves = next((name for name in names if name in MOVES), None)
        before = names if moves is None else names[: names.index(moves)]
        boxes = next((name for name in names if name in NEED_BOXES), None)
        functions = (leaf for leaf in leaves if not isinstance(leaf.transform, v2.Transform))
        return cls(
            mover=None if moves is None else Mover(moves, boxes is not None, "torchvision"),
            boxes=boxes,
            function=next((leaf.name for leaf in functions), None),
            own=all(is_own(leaf.transform) and leaf.name != "Lambda" for leaf in leaves),
            takes_arrays=not _FROM_ARRAYS.isdisjoint(before),
            writes=any(getattr(leaf.transform, "inplace", False) for leaf in leaves),
        )

    @property
    def generators(self) -> tuple[str, ...]:
        """The global generators that it may draw from."""
        return ("torch",) if self.own else GENERATORS


def typed(sample: Batch, fields: Fields) -> Batch:
    """Return a sample whose named fields say by their types what they are.

    Of plain tensors v2 takes the first one for the image. Where that is none, and another one is,
    that one gets its type.

    Raises:
        BatchError: a named field does not exist.
    """
    check_named(sample, fields)
    kinds: dict[Location, Any] = {fields.mask: tv_tensors.Mask, fields.image: tv_tensors.Image}
    kinds.pop(None, None)
    first = image_of(sample)
    plain = first is not None and not any(map(_has_role, tree_flatten(sample)[0]))
    if plain and fields.image is None and first.ndim < 3:
        with suppress(BatchError):
            kinds[find_fields(sample, fields, batched=False).image] = tv_tensors.Image
    given = {place: get_field(sample, place) for place in kinds}
    bare = {place for place, value in given.items() if isinstance(value, torch.Tensor)}
    values = {place: kinds[place](given[place]) for place in bare if not _has_role(given[place])}
    return put_fields(sample, values) if values else sample


def only_image(sample: Batch) -> Path | None:
    """Return where the image of a sample is, if v2 would transform nothing else."""
    leaves = tree_flatten(sample)[0]
    own = list(filter(_has_role, leaves))
    own = own or [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)][:1]
    if len(own) != 1 or own[0] is sample:
        return None
    return next((path for path, leaf in with_paths(sample) if leaf is own[0]), None)


def check_roles(sample: Batch, fields: Fields, traits: Traits) -> None:
    """Raise BatchError if a field as large as the image would stay where it is."""
    parts, mover, image = children(sample), traits.mover, image_of(sample)
    size = size_of(image)
    if mover is None or parts is None or size is None:
        return
    held = {place: tree_flatten(part)[0] for place, part in parts}

    def moves(value: Any) -> bool:
        array = traits.takes_arrays and isinstance(value, np.ndarray)
        return array or value is image or _has_role(value)

    roles = {place for place, values in held.items() if any(map(moves, values))}
    boxes = any(isinstance(one, tv_tensors.BoundingBoxes) for part in held.values() for one in part)
    mover = mover._replace(takes_boxes=mover.takes_boxes or boxes)
    check_beside(sample, {*roles, *fields.stays}, (size[0], size[1]), mover)


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


def check_convertible(sample: Batch, traits: Traits) -> None:
    """Raise BatchError if v2 would pass a sample through, as it does with arrays.

    A warning comes where the image alone is given to the pipeline, and there is more in the sample.
    """
    values = tree_flatten(sample)[0]
    if traits.function is not None and len(values) > 1 and only_image(sample) is not None:
        warnings.warn(
            f"{traits.function} is no transform of v2, so that the pipeline is called with the "
            "image of a sample alone, and what is beside it stays as it is. If it is to see that, "
            "too, derive it from v2.Transform.",
            FastDataWarning,
            stacklevel=2,
        )
    if not traits.own or any(isinstance(one, torch.Tensor | PIL.Image.Image) for one in values):
        return
    arrays = [value for value in values if isinstance(value, np.ndarray) and value.ndim in {2, 3}]
    if not arrays:
        raise BatchError(
            f"The first sample is {describe(sample)}, in which torchvision finds nothing to "
            "transform. It looks for tensors and PIL images in tuples, lists and dicts."
        )
    if not traits.takes_arrays:
        raise BatchError(
            f"The image of the first sample is {describe(arrays[0])}, and torchvision passes "
            "arrays through as they are. Begin the pipeline with v2.ToImage(), or return a tensor "
            "[C, H, W]."
        )


def _has_role(value: object) -> bool:
    return isinstance(value, tv_tensors.TVTensor | PIL.Image.Image)


def _is_image(value: object) -> bool:
    return isinstance(value, tv_tensors.Image | tv_tensors.Video | PIL.Image.Image)

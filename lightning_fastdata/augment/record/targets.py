"""Images and masks: on their way through a pipeline, their names there, their places in a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    Location,
    channels_first,
    describe,
    find_fields,
    get_field,
    has_numpy_dtype,
    numpy_dtype,
)
from lightning_fastdata.augment.pipeline.roles import check_beside, mover_of
from lightning_fastdata.augment.pipeline.tree import is_container, list_leaves, list_nodes
from lightning_fastdata.errors import BatchError

if TYPE_CHECKING:
    from albumentations import BaseCompose

    from lightning_fastdata.augment.ops.operation import Role, TapeOp
    from lightning_fastdata.types import Batch


@dataclass(slots=True)
class Pending:
    """An operation that was noted, and how Albumentations would run it."""

    op: TapeOp
    apply: Callable[..., Any]
    params: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Target:
    """An image or mask on its way through a pipeline."""

    real: Any
    """Its pixels, or what fetches them."""
    shown: Any
    """What the pipeline handles in its place."""
    pending: list[Pending] = field(default_factory=list)

    def flush(self) -> Any:
        """Return the pixels after what was noted, which Albumentations does now."""
        if callable(self.real):
            self.real = self.real()
        for pending in self.pending:
            self.real = contiguous(pending.apply(contiguous(self.real), **pending.params))
        self.pending.clear()
        return self.real


def contiguous(value: Any) -> Any:
    """Return an array that lies in memory as NumPy's do; anything else as it is."""
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value


_ROLES: Final[tuple[Role, ...]] = ("image", "mask")


def target_roles(compose: BaseCompose) -> dict[str, Role]:
    """Return the names that a pipeline takes images and masks under, with what each one is."""
    roles: dict[str, Role] = {role: role for role in _ROLES}
    return roles | {name: kind for name, kind in _added(compose).items() if kind in _ROLES}


def argument_names(compose: BaseCompose) -> frozenset[str]:
    """Return the names of everything that a pipeline takes from a sample beside its image.

    Boxes and keypoints only where it knows their format; without that they mean nothing to it.
    """
    kinds = {name: name for name in ("masks", *compose.available_keys)} | _added(compose)
    # A version of Albumentations without that name runs whole on the CPU.
    known = getattr(compose, "processors", kinds) if is_container(compose) else kinds
    return frozenset(
        name for name, kind in kinds.items() if kind not in {"bboxes", "keypoints"} or kind in known
    )


def _added(compose: BaseCompose) -> dict[str, Role]:
    """Return the ``additional_targets`` of a pipeline and of the pipelines within it."""
    added: dict[str, Role] = {}
    for node in filter(is_container, list_nodes(compose)):
        added |= node.additional_targets
    return added


def named_places(item: Batch, names: Collection[str]) -> dict[str, Location]:
    """Return where a sample or batch has what a pipeline knows by other names than its image.

    In a mapping under these names; in a tuple, ``"2"`` names the position.
    """
    if isinstance(item, Mapping):
        return {name: name for name in item if name in names and item[name] is not None}
    length = len(item) if isinstance(item, list | tuple) else 0
    return {str(place): place for place in range(length) if str(place) in names}


def places_of(batch: Batch, fields: Fields, compose: BaseCompose) -> dict[str, Location]:
    """Return where the images and masks of a batch are, by the pipeline's names for them.

    Raises:
        BatchError: there is no image, or something of its size beside it would not be moved.
    """
    found = find_fields(batch, fields, batched=True)
    places: dict[str, Location] = {"image": found.image}
    if found.mask is not None:
        places["mask"] = found.mask
    names = target_roles(compose).keys() - {"image", "mask"}
    named = named_places(batch, names).items()
    places |= {name: at for name, at in named if isinstance(get_field(batch, at), torch.Tensor)}
    mover, image = mover_of(compose), get_field(batch, found.image)
    if mover is not None and isinstance(image, torch.Tensor) and image.ndim in {3, 4}:
        known = {*places.values(), *fields.stays}
        check_beside(batch, known, size_of(image), mover, samples=len(image))
    return places


def size_of(images: torch.Tensor) -> tuple[int, int]:
    """Return height and width of images ``[n, C, H, W]``, ``[n, H, W, C]`` or ``[n, H, W]``."""
    first = images.ndim == 4 and channels_first(tuple(images.shape[1:]))
    height, width = images.shape[2:] if first else images.shape[1:3]
    return int(height), int(width)


def channels_behind(
    tensors: Mapping[str, torch.Tensor], size: tuple[int, int]
) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Return images and masks as ``[n, H, W, ...]``, and the names of those that were turned.

    They are ``[n, H, W]``, ``[n, H, W, C]`` or ``[n, C, H, W]``, of ``size`` ``H, W``.
    """
    turned = frozenset(
        name
        for name, tensor in tensors.items()
        if tensor.ndim == 4
        and tuple(tensor.shape[2:]) == size
        and (tuple(tensor.shape[1:3]) != size or name == "image")
    )
    behind = {
        name: tensor.permute(0, 2, 3, 1).contiguous() if name in turned else tensor
        for name, tensor in tensors.items()
    }
    return behind, turned


def channels_as_given(
    results: Mapping[str, torch.Tensor],
    turned: frozenset[str],
    compose: BaseCompose,
    *,
    images_are_chw: bool,
) -> dict[str, torch.Tensor]:
    """Return results in the layout in which they were given, unless the pipeline chose another.

    They are ``[n, H, W, ...]``, or what ``ToTensorV2`` made of that; ``turned`` are the names of
    those that were given as ``[n, C, H, W]``.
    """
    roles = target_roles(compose)
    masks_are_chw = images_are_chw and any(
        type(leaf.transform).__name__ == "ToTensorV2" and leaf.transform.transpose_mask
        for leaf in list_leaves(compose)
    )
    done = {"image": images_are_chw, "mask": masks_are_chw}
    return {
        name: result.permute(0, 3, 1, 2).contiguous()
        if name in turned and result.ndim == 4 and not done[roles[name]]
        else result
        for name, result in results.items()
    }


def check_images(image: object, *, values: bool) -> None:
    """Raise BatchError for no batch of images, or, with ``values``, floats outside of [0, 1]."""
    ok = has_numpy_dtype(image) and isinstance(image, torch.Tensor) and image.ndim in {3, 4}
    if not ok or not isinstance(image, torch.Tensor) or len(image) == 0:
        raise BatchError(
            f"The image field is {describe(image)}. Expected a tensor [n, C, H, W], [n, H, W, C] "
            "or [n, H, W] of at least one sample, uint8 or float32 in [0, 1], or of another dtype "
            "that NumPy has."
        )
    if values and image.is_floating_point() and image.numel():
        low, high = (float(value) for value in image.aminmax())
        if low < 0 or high > 1:
            raise BatchError(
                f"The images are {numpy_dtype(image.dtype)} with values from {low:g} to {high:g}, "
                "so they look normalised already. Albumentations needs uint8, or floats in [0, 1]: "
                "leave Normalize out of the dataset and put it at the end of this pipeline."
            )

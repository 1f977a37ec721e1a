"""Images and masks: their names in a pipeline, their places in a batch, and how they lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_fastdata.augment.ops.output import OutputForm, convert_output
from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    Location,
    describe,
    find_fields,
    get_field,
    has_numpy_dtype,
    numpy_dtype,
    put_fields,
)
from lightning_fastdata.augment.pipeline.tree import list_leaves, list_nodes
from lightning_fastdata.errors import BatchError

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import Role
    from lightning_fastdata.types import Batch


_ROLES: Final[tuple[Role, ...]] = ("image", "mask")


def target_roles(compose: Any) -> dict[str, Role]:
    """Return the names that a pipeline takes images and masks under, with what each one is."""
    roles: dict[str, Role] = {role: role for role in _ROLES}
    # A pipeline within a pipeline may have targets that only its own transforms know.
    for node in list_nodes(compose):
        for name, kind in getattr(node, "additional_targets", {}).items():
            if kind in _ROLES:
                roles[name] = kind
    return roles


def argument_names(compose: Any) -> frozenset[str]:
    """Return the names of everything that a pipeline takes from a sample beside its image.

    Boxes and keypoints only where it was told their format; without that they mean nothing to it.
    """
    names = {"masks", *getattr(compose, "available_keys", ())}
    kinds = {name: name for name in names}
    for node in list_nodes(compose):
        kinds |= getattr(node, "additional_targets", {})
    told = getattr(compose, "processors", kinds)
    return frozenset(
        name for name, kind in kinds.items() if kind not in {"bboxes", "keypoints"} or kind in told
    )


def places_of(batch: Batch, fields: Fields, compose: Any) -> dict[str, Location]:
    """Return where the images and masks of a batch are, by the pipeline's names for them."""
    found = find_fields(batch, fields, batched=True)
    places: dict[str, Location] = {"image": found.image}
    if found.mask is not None:
        places["mask"] = found.mask
    if isinstance(batch, Mapping):
        names = [name for name in target_roles(compose) if name not in {"image", "mask"}]
        places |= {name: name for name in names if isinstance(batch.get(name), torch.Tensor)}
    return places


def channels_behind(
    tensors: Mapping[str, torch.Tensor], size: tuple[int, int]
) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Return images and masks ``[n, H, W, ...]``, and the names of those that were turned.

    Args:
        tensors: ``[n, H, W]``, ``[n, H, W, C]`` or ``[n, C, H, W]`` by name.
        size: ``H, W``.
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
    compose: Any,
    *,
    images_are_chw: bool,
) -> dict[str, torch.Tensor]:
    """Return results in the layout in which they were given, unless the pipeline chose another.

    Args:
        results: ``[n, H, W, ...]``, or what ``ToTensorV2`` made of that.
        turned: names of those that were given as ``[n, C, H, W]``.
        compose: the pipeline.
        images_are_chw: whether images went through ``ToTensorV2``.
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


def convert_images(
    batch: Batch, fields: Fields, roles: Mapping[str, Role], form: OutputForm
) -> Batch:
    """Return a batch with its images in their output form.

    Args:
        batch: a collated batch, whose images are uint8 or float32.
        fields: where its image is.
        roles: names of a pipeline for what it takes; other images are keys of a dict.
        form: what to convert to.
    """
    if not form.converts:
        return batch
    places: list[Location] = [find_fields(batch, fields, batched=True).image]
    if isinstance(batch, Mapping):
        named = (name for name, role in roles.items() if role == "image" and name != "image")
        places += [name for name in named if isinstance(batch.get(name), torch.Tensor)]
    converted = {place: convert_output(get_field(batch, place), form) for place in places}
    return put_fields(batch, converted)


def check_images(image: Any, *, values: bool) -> None:
    """Raise BatchError if a field is no batch of images, or of floats outside of [0, 1].

    Args:
        image: the field.
        values: look at the values, too.
    """
    ok = isinstance(image, torch.Tensor) and image.ndim in {3, 4} and len(image) > 0
    if not ok or not has_numpy_dtype(image):
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

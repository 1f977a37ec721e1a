"""Run an Albumentations pipeline on a batch that another loader has collated.

The batch is checked, drawn for and computed. Images are ``[n, C, H, W]``, ``[n, H, W, C]`` or
``[n, H, W]``, masks likewise; sample ``i`` draws with ``key.index + i``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from lightning_fastdata import registry
from lightning_fastdata.augment.albumentations.plan import Node, list_leaves, mover_of, target_roles
from lightning_fastdata.augment.albumentations.tape import Recorder, phantom
from lightning_fastdata.augment.fields import (
    Fields,
    Location,
    check_beside,
    describe,
    get_field,
    has_numpy_dtype,
    mask_as_given,
    numpy_dtype,
    size_of,
    target_places,
)
from lightning_fastdata.augment.ops.operation import DeviceOp, Tape
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.randomness.seeds import reseeder
from lightning_fastdata.types import Batch, SampleKey


def places_of(batch: Batch, fields: Fields, compose: Node) -> dict[str, Location]:
    """Return where the images and masks of a batch are, by the pipeline's names for them.

    Raises:
        BatchError: there is no image, or a field of its size beside it would not be moved.
    """
    names = target_roles(compose)
    places = target_places(batch, fields, names, batched=True, fits=_is_tensor)
    mover, image = mover_of(compose), get_field(batch, places["image"])
    if mover is not None and isinstance(image, torch.Tensor) and image.ndim in {3, 4}:
        known = {*places.values(), *fields.stays}
        check_beside(batch, known, size_of(image), mover, samples=len(image))
    return places


def _is_tensor(_name: str, value: Batch) -> bool:
    return isinstance(value, torch.Tensor)


def channels_behind(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Return images and masks as ``[n, H, W, ...]``, and the names of those that were permuted.

    They are given as ``[n, H, W]``, ``[n, H, W, C]`` or ``[n, C, H, W]``, of the image's size.
    """
    size = size_of(tensors["image"])
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
    compose: Node,
    *,
    images_are_chw: bool,
) -> dict[str, torch.Tensor]:
    """Return results in the layout in which they were given, unless the pipeline chose another.

    Results are ``[n, H, W, ...]``, or what ``ToTensorV2`` made of that. ``turned`` has the names of
    the images and masks that were given as ``[n, C, H, W]``.
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
    """Raise BatchError for no batch of images; with ``values``, also for floats outside [0, 1]."""
    ok = has_numpy_dtype(image) and isinstance(image, torch.Tensor) and image.ndim in {3, 4}
    if not ok or not isinstance(image, torch.Tensor) or len(image) == 0:
        halved = isinstance(image, torch.Tensor) and image.dtype == torch.bfloat16
        raise BatchError(
            f"The image field is {describe(image)}. Expected a tensor [n, C, H, W], [n, H, W, C] "
            "or [n, H, W] of at least one sample, uint8 or float32 in [0, 1], or of another dtype "
            "that NumPy has."
            + (' precision="bf16-true" makes bfloat16 of floats; uint8 stays.' if halved else "")
        )
    if values and image.is_floating_point() and image.numel():
        low, high = (float(value) for value in image.aminmax())
        remedy = "return bytes as uint8, or divide them by 255"
        if low < 0:
            remedy = "they look normalised already. Leave Normalize out of the dataset and put it "
            remedy += "at the end of this pipeline"
        if low < 0 or high > 1:
            raise BatchError(
                f"The images are {numpy_dtype(image.dtype)} with values from {low:g} to {high:g}. "
                f"Albumentations needs uint8, or floats in [0, 1]: {remedy}."
            )


def check_samples(given: Mapping[str, Batch], places: Mapping[str, Location]) -> None:
    """Raise BatchError if a mask or another image is no tensor with one row for each sample."""
    samples = len(given["image"])
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) or len(value) != samples:
            raise BatchError(
                f"The field {places[name]!r} is {describe(value)}. Expected a tensor of {samples} "
                "samples, as the images are. If some samples lack it, give the pipeline to "
                "FastDataModule(augment=...), which sees samples before they are collated."
            )


def run_each(
    tensors: Mapping[str, torch.Tensor],
    key: SampleKey,
    compose: Node,
    recorder: Recorder | None,
    ops: Mapping[str, DeviceOp],
) -> tuple[dict[str, torch.Tensor], bool]:
    """Run a pipeline on each sample; return the results and whether images are CHW.

    With a ``recorder`` samples are drawn for on the host, and computed where the batch lies; those
    in which an operation needs real pixels are fetched one by one and put back. If these have
    another shape or dtype than the others, and without a recorder, all run on the CPU.
    """
    samples, device = len(tensors["image"]), tensors["image"].device
    rows = tensors if recorder else {name: tensor.cpu() for name, tensor in tensors.items()}
    shown = {
        name: phantom(tuple(tensor.shape[1:]), numpy_dtype(tensor.dtype))
        for name, tensor in tensors.items()
    }
    tapes: list[Tape] = []
    is_chw = False
    ran: dict[str, dict[int, torch.Tensor]] = {name: {} for name in tensors}
    seed = reseeder(recorder.compose if recorder else compose)
    for row in range(samples):
        seed(key._replace(index=key.index + row))
        sources = {name: functools.partial(_fetch, tensor, row) for name, tensor in rows.items()}
        if recorder is None:
            result = compose(**{name: fetch() for name, fetch in sources.items()})
        else:
            result, tape = recorder(shown, sources)
            tapes.append(tape)
        is_chw = is_chw or isinstance(result["image"], torch.Tensor)
        for name, tensor in tensors.items():
            if not callable(result[name]):
                ran[name][row] = _as_tensor(result[name], tensor)
    for name, tensor in tensors.items():
        made = [*ran[name].values(), *([] if len(ran[name]) == samples else [tensor[0]])]
        if recorder is not None and len({(one.shape, one.dtype) for one in made}) > 1:
            return run_each(tensors, key, compose, None, ops)
        if len(sizes := {tuple(one.shape) for one in made}) > 1:
            raise TransformError(
                f"The pipeline makes {name}s of different shapes of one batch: {sorted(sizes)}. "
                "End it with an operation that makes them one size: Resize, RandomCrop, ..."
            )
    draws = compile_tapes(tapes, fuse=registry.fuse()).to(device, non_blocking=True)
    results = {name: _with_rows(tensor, ran[name]) for name, tensor in tensors.items()}
    for name, program in draws.programs.items():
        results[name] = replay(program, draws.blob, results[name], ops)
    image = draws.programs.get("image")
    return results, is_chw or (image is not None and image.makes_tensor)


def _fetch(tensor: torch.Tensor, row: int) -> np.ndarray:
    # A copy: Albumentations writes to a gray image that it equalizes.
    pixels: np.ndarray = tensor[row].to("cpu", copy=True).numpy()
    return pixels


def _as_tensor(made: Any, batch: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", mask_as_given(torch.from_numpy(np.asarray(made).copy()), batch))


def _with_rows(tensor: torch.Tensor, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return a batch in which some samples, or all, are replaced by ``rows``."""
    if not rows:
        return tensor
    stacked = torch.stack(list(rows.values())).to(tensor.device)
    if len(rows) == len(tensor):
        return stacked
    return tensor.index_copy(0, torch.tensor(list(rows), device=tensor.device), stacked)

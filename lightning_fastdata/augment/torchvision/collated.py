"""A v2 pipeline on a batch that another loader has collated."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torchvision import tv_tensors

from lightning_fastdata.augment.pipeline.fields import (
    describe,
    find_fields,
    get_field,
    put_fields,
)
from lightning_fastdata.augment.pipeline.roles import check_beside
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.replay.torch import replay, with_rows
from lightning_fastdata.augment.torchvision.operations import device_ops, plain
from lightning_fastdata.augment.torchvision.pipeline import leaves_of
from lightning_fastdata.augment.torchvision.plan import NEED_BOXES
from lightning_fastdata.augment.torchvision.samples import mover_of
from lightning_fastdata.augment.torchvision.worker import generators_of
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.randomness.seeds import keyed_draws

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Track
    from lightning_fastdata.augment.pipeline.fields import Fields, Location
    from lightning_fastdata.augment.torchvision.tape import Recorder
    from lightning_fastdata.types import Batch, SampleKey

_IMAGE, _MASK = "image", "mask"


def run_collated(
    pipeline: Any,
    batch: Batch,
    fields: Fields,
    key: SampleKey,
    *,
    recorder: Recorder | None,
    recorded: bool = False,
) -> Batch:
    """Return a batch, on any device, with its images and masks transformed.

    On the CPU the pipeline runs on one sample after the other, which is faster there. Sample ``i``
    draws with ``key.index + i``.

    Args:
        pipeline: of v2.
        batch: as another loader made it.
        fields: where its images and masks are.
        key: of its first sample.
        recorder: of the pipeline, for images of one size. None: on any device it is done so.
        recorded: on the CPU it is done as on a device.

    Raises:
        BatchError: there is no image ``[n, C, H, W]``, or something would stay behind it.
        TransformError: the pipeline needs boxes or keypoints, or makes images of several forms.
    """
    leaves = leaves_of(pipeline)
    boxes = next(
        (leaf.name for leaf in leaves if type(leaf.transform).__name__ in NEED_BOXES), None
    )
    if boxes is not None:
        raise TransformError(
            f"The pipeline transforms boxes or keypoints, too ({boxes}), and those cannot be told "
            "apart in a batch that another loader has collated. Give the pipeline to "
            "FastDataModule(augment=...) and let FastDataModule load the data."
        )
    found = find_fields(batch, fields, batched=True)
    places: dict[str, Location] = {_IMAGE: found.image}
    if found.mask is not None:
        places[_MASK] = found.mask
    given = {name: _checked(get_field(batch, place), place) for name, place in places.items()}
    image = given[_IMAGE]
    if image.ndim != 4 or (image.shape[-1] in {1, 3, 4} and image.shape[1] not in {1, 3, 4}):
        raise BatchError(
            f"The images are {describe(image)}, and torchvision takes [n, C, H, W]. Let the "
            "dataset return images [C, H, W], or begin its own transforms with v2.ToImage()."
        )
    mover = mover_of(leaves)
    if mover is not None and places[_IMAGE] is not None:
        known = {*places.values(), *fields.stays}
        size = (int(image.shape[-2]), int(image.shape[-1]))
        check_beside(batch, known, size, mover, samples=len(image))
    made = None
    if recorder is not None and (image.device.type != "cpu" or recorded):
        made = _replayed(pipeline, given, key, recorder)
    made = made or _run_each(pipeline, given, key)
    return put_fields(batch, {places[name]: made[name] for name in places})


def _checked(value: Any, place: Location) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise BatchError(f"The field {place!r} is {describe(value)}. Expected a tensor of samples.")
    return plain(value)


def _run_each(
    pipeline: Any, given: Mapping[str, torch.Tensor], key: SampleKey
) -> dict[str, torch.Tensor]:
    device, names = given[_IMAGE].device, generators_of(pipeline)
    batches = {name: batch.cpu() for name, batch in given.items()}
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in given}
    for row in range(len(batches[_IMAGE])):
        # Copies: transforms may write to what they are given.
        sample = _sample({name: batch[row].clone() for name, batch in batches.items()})
        with keyed_draws(key._replace(index=key.index + row), names):
            made = _by_name(pipeline(sample))
        for name, each in rows.items():
            each.append(plain(made[name]))
    for name, each in rows.items():
        if len(sizes := {tuple(one.shape) for one in each}) > 1:
            raise TransformError(
                f"The pipeline makes {name}s of different shapes of one batch: {sorted(sizes)}. "
                "End it with a transform that makes them one size: Resize, RandomCrop, ..."
            )
    return {name: torch.stack(each).to(device) for name, each in rows.items()}


def _replayed(
    pipeline: Any, given: Mapping[str, torch.Tensor], key: SampleKey, recorder: Recorder
) -> dict[str, torch.Tensor] | None:
    """Draw every sample here, and compute the draws where the batch lies.

    Samples in which an operation needs pixels are fetched one by one and put back. None: by then
    they have another form than the others.
    """
    names, samples = generators_of(pipeline), len(given[_IMAGE])
    ran: dict[str, dict[int, torch.Tensor]] = {name: {} for name in given}
    tapes: list[dict[str, Track]] = []
    for row in range(samples):
        shown = {
            name: torch.empty(batch.shape[1:], dtype=batch.dtype, device="meta")
            for name, batch in given.items()
        }
        sample = _sample(shown)
        phantoms = _by_name(sample)
        sources = {id(phantoms[name]): partial(_fetch, given[name], row) for name in given}
        with keyed_draws(key._replace(index=key.index + row), names):
            result, tape = recorder(sample, sources)
        tapes.append({path[0] if path else _IMAGE: track for path, track in tape.items()})
        for name, value in _by_name(result).items():
            if not callable(value):
                ran[name][row] = plain(value)
    for name, batch in given.items():
        rows = [*ran[name].values(), *([] if len(ran[name]) == samples else [batch[0]])]
        if len({(row.shape, row.dtype) for row in rows}) > 1:
            return None
    draws = compile_tapes(tapes).to(given[_IMAGE].device, non_blocking=True)
    done = {name: with_rows(batch, ran[name]) for name, batch in given.items()}
    ops = device_ops(pipeline)
    for name, program in draws.programs.items():
        done[name] = replay(program, draws.blob, done[name], ops)
    return done


def _sample(tensors: Mapping[str, torch.Tensor]) -> Batch:
    """Return what the pipeline is given: an image, or an image and a mask by their names."""
    kinds = {_IMAGE: tv_tensors.Image, _MASK: tv_tensors.Mask}
    made = {name: tensor.as_subclass(kinds[name]) for name, tensor in tensors.items()}
    return made if _MASK in made else made[_IMAGE]


def _by_name(made: Batch) -> dict[str, Any]:
    return made if isinstance(made, dict) else {_IMAGE: made}


def _fetch(batch: torch.Tensor, row: int) -> torch.Tensor:
    return batch[row].cpu()

"""A v2 pipeline on a batch that another loader has collated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate
from torchvision import tv_tensors

from lightning_fastdata.augment.pipeline.fields import describe, find_fields, get_field, put_fields
from lightning_fastdata.augment.pipeline.roles import check_beside
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.augment.torchvision.operations import device_ops, plain
from lightning_fastdata.augment.torchvision.pipeline import leaves_of
from lightning_fastdata.augment.torchvision.samples import Traits
from lightning_fastdata.augment.torchvision.tape import form_of
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.randomness.seeds import keyed_draws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lightning_fastdata.augment.pipeline.fields import Fields, Location
    from lightning_fastdata.augment.torchvision.tape import Recorder
    from lightning_fastdata.types import Batch, SampleKey

_KINDS = {"image": tv_tensors.Image, "mask": tv_tensors.Mask}


def run_collated(
    pipeline: Any,
    batch: Batch,
    fields: Fields,
    key: SampleKey,
    recorder: Recorder | None,
) -> Batch:
    """Return a batch, on any device, with its images and masks transformed.

    Sample ``i`` draws with ``key.index + i``.

    Args:
        pipeline: of v2.
        batch: as another loader made it.
        fields: where its images and masks are.
        key: of its first sample.
        recorder: of the pipeline, for images of one size; the batch is computed where it lies.
            None: the pipeline runs on one sample after the other on the CPU.

    Raises:
        BatchError: there is no image ``[n, C, H, W]``, or something would stay behind it.
        TransformError: the pipeline needs boxes or keypoints, or makes what cannot be stacked.
    """
    traits = Traits.of(leaves_of(pipeline))
    if traits.boxes is not None:
        raise TransformError(
            f"The pipeline transforms boxes or keypoints, too ({traits.boxes}), and those cannot "
            "be told apart in a batch that another loader has collated. Give the pipeline to "
            "FastDataModule(augment=...) and let FastDataModule load the data."
        )
    found = find_fields(batch, fields, batched=True)
    places = {"image": found.image} | ({} if found.mask is None else {"mask": found.mask})
    given = {name: _checked(get_field(batch, place), place) for name, place in places.items()}
    image = given["image"]
    if image.ndim != 4 or (image.shape[-1] in {1, 3, 4} and image.shape[1] not in {1, 3, 4}):
        raise BatchError(
            f"The images are {describe(image)}, and torchvision takes [n, C, H, W]. Let the "
            "dataset return images [C, H, W], or begin its own transforms with v2.ToImage()."
        )
    if traits.mover is not None and found.image is not None:
        known = {*places.values(), *fields.stays}
        size = (int(image.shape[-2]), int(image.shape[-1]))
        check_beside(batch, known, size, traits.mover, samples=len(image))
    made = None if recorder is None else _replayed(pipeline, given, key, recorder, traits)
    made = made or _run_each(pipeline, given, key, traits)
    return put_fields(batch, {places[name]: made[name] for name in places})


def _checked(value: Any, place: Location) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise BatchError(f"The field {place!r} is {describe(value)}. Expected a tensor of samples.")
    return plain(value)


def _run_each(
    pipeline: Any, given: Mapping[str, torch.Tensor], key: SampleKey, traits: Traits
) -> dict[str, Any]:
    """Run the pipeline on each sample on the CPU, and collate what it makes as torch does."""
    rows = {name: batch.cpu() for name, batch in given.items()}
    made = [tree_map_only(torch.Tensor, plain, one) for one in _drawn(pipeline, rows, key, traits)]
    try:
        whole = default_collate(made)
    except (RuntimeError, TypeError) as error:
        raise TransformError(
            f"What the pipeline makes of the samples of a batch cannot be stacked: {error}. End it "
            "with transforms that make tensors of one size: Resize, RandomCrop, ToImage, ..."
        ) from error
    device = given["image"].device
    return _by_name(tree_map_only(torch.Tensor, lambda one: one.to(device), whole), given)


def _replayed(
    pipeline: Any,
    given: Mapping[str, torch.Tensor],
    key: SampleKey,
    recorder: Recorder,
    traits: Traits,
) -> dict[str, torch.Tensor] | None:
    """Draw every sample here, and compute the draws where the batch lies.

    None: samples have several forms by then, or such that nothing can be left to a device.
    """
    device = given["image"].device
    source = "cpu" if recorder.needs_pixels else "meta"
    rows = {name: batch.to(source) for name, batch in given.items()}
    results, tapes = zip(*_drawn(recorder, rows, key, traits), strict=True)
    made = [_by_name(one, given) for one in results]
    forms = {tuple(map(form_of, one.values())) for one in made}
    if len(forms) > 1 or None in next(iter(forms)):
        return None
    done = dict(given)
    for name in given if recorder.needs_pixels else ():
        done[name] = torch.stack([plain(one[name]) for one in made]).to(device)
    draws, ops = compile_tapes(tapes).to(device, non_blocking=True), device_ops(pipeline)
    for path, program in draws.programs.items():
        name = path[0] if path else "image"
        done[name] = replay(program, draws.blob, done[name], ops)
    return done


def _drawn(
    run: Callable[[Batch], Any], rows: Mapping[str, torch.Tensor], key: SampleKey, traits: Traits
) -> Iterator[Any]:
    """Yield what is made of each sample of a batch, drawn by its key."""
    for row in range(len(rows["image"])):
        # Copies: transforms may write to what they are given.
        sample = _sample({name: batch[row].clone() for name, batch in rows.items()})
        with keyed_draws(key._replace(index=key.index + row), traits.generators):
            made = run(sample)
        yield made


def _sample(tensors: Mapping[str, torch.Tensor]) -> Batch:
    """Return what the pipeline is given: an image, or an image and a mask by their names."""
    made = {name: tensor.as_subclass(_KINDS[name]) for name, tensor in tensors.items()}
    return made if "mask" in made else made["image"]


def _by_name(made: Batch, given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return made if "mask" in given else {"image": made}

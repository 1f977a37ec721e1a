"""Several augmentations of each sample in one batch.

After Hoffer et al., "Augment your batch: improving generalization through instance repetition"
(CVPR 2020): a sample is read and decoded once, and augmented several times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.augment.fields import find_fields, get_field, put_fields

if TYPE_CHECKING:
    from lightning_fastdata.augment.fields import Fields, Location
    from lightning_fastdata.types import Batch, SampleKey


def repeated_key(key: SampleKey, repeats: int, number: int) -> SampleKey:
    """Return the key of one augmentation of a sample, as if the dataset were so much longer."""
    return key._replace(index=key.index * repeats + number)


def stack_samples(samples: Sequence[Any], locations: Sequence[Location]) -> Any:
    """Return one sample whose images and masks are those of several, stacked.

    Args:
        samples: augmentations of one sample.
        locations: where images and masks are.
    """
    stacked = {
        place: torch.stack([torch.as_tensor(get_field(sample, place)) for sample in samples])
        for place in locations
    }
    return put_fields(samples[0], stacked)


def find_stacked(batch: Batch, fields: Fields) -> list[Location]:
    """Return where images and masks are in a batch of stacked samples."""
    found = find_fields(_first_of_each(batch), fields, batched=True)
    return [found.image, *([] if found.mask is None else [found.mask])]


def _first_of_each(batch: Batch) -> Batch:
    if isinstance(batch, torch.Tensor):
        return batch[:, 0] if batch.ndim > 2 else batch
    if isinstance(batch, Mapping):
        return {name: _first_of_each(one) for name, one in batch.items()}
    if isinstance(batch, list | tuple):
        return [_first_of_each(one) for one in batch]
    return batch


def flatten_batch(batch: Batch, locations: Sequence[Location], repeats: int) -> Batch:
    """Return a batch of stacked samples as a batch of so many times as many samples.

    Images and masks ``[n, repeats, ...]`` become ``[n * repeats, ...]``; of all other fields, each
    entry stands ``repeats`` times.
    """
    if None in locations:
        return batch.flatten(0, 1)
    samples = len(get_field(batch, locations[0]))
    if isinstance(batch, Mapping):
        places: Sequence[Location] = list(batch)
    else:
        places = range(len(batch))
    return put_fields(
        batch,
        {
            place: get_field(batch, place).flatten(0, 1)
            if place in locations
            else repeat_entries(get_field(batch, place), samples, repeats)
            for place in places
        },
    )


def repeat_batch(batch: Batch, samples: int, repeats: int) -> Batch:
    """Return a batch in which every sample stands ``repeats`` times, one after the other."""
    if isinstance(batch, Mapping):
        return put_fields(
            batch, {name: repeat_entries(one, samples, repeats) for name, one in batch.items()}
        )
    if isinstance(batch, list | tuple):
        entries = [repeat_entries(one, samples, repeats) for one in batch]
        return put_fields(batch, dict(enumerate(entries)))
    return repeat_entries(batch, samples, repeats)


def repeat_entries(field: Any, samples: int, repeats: int) -> Any:
    """Return a field with each entry ``repeats`` times; a field of no entries as it is."""
    if isinstance(field, torch.Tensor) and field.ndim and len(field) == samples:
        return field.repeat_interleave(repeats, 0)
    if isinstance(field, list | tuple) and len(field) == samples:
        return [one for one in field for _ in range(repeats)]
    return field

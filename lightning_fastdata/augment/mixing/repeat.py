"""Several augmentations of each sample in one batch.

After Hoffer et al., "Augment your batch: improving generalization through instance repetition"
(CVPR 2020): a sample is read and decoded once, and augmented several times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.augment.pipeline.fields import put_fields

if TYPE_CHECKING:
    from lightning_fastdata.types import Batch, SampleKey


def repeated_key(key: SampleKey, repeats: int, number: int) -> SampleKey:
    """Return the key of one augmentation of a sample, as if the dataset were so much longer."""
    return key._replace(index=key.index * repeats + number)


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

"""Whether the samples of a dataset are the same each time they are made: such alone are kept.

It is found by trying: samples from all over the dataset are made twice, under other states of the
generators and in another epoch, while the generators are watched.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch.utils.data import Subset

from lightning_fastdata.caches.sample_form import taken_apart
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.randomness.global_generators import DrawWatch, kept_random_state
from lightning_fastdata.randomness.search import find_instances
from lightning_fastdata.randomness.seeds import (
    GENERATOR_CLASSES,
    EpochCell,
    seed_generator,
    seed_global_generators,
    state_of,
)
from lightning_fastdata.types import MapDataset

_TRIED: Final = 8


def tried_indices(length: int, count: int = _TRIED) -> list[int]:
    """Return indices from all over a dataset, 8 by default."""
    if not length:
        return []
    return sorted({round(i * (length - 1) / max(1, count - 1)) for i in range(count)})


def refuse_drawn(dataset: MapDataset) -> None:
    """Raise DatasetError if samples draw at random, or are not the same twice."""
    if all(_is_fixed(dataset, index) for index in tried_indices(len(dataset))):
        return
    inner = dataset.dataset if type(dataset) is Subset else dataset
    raise DatasetError(
        f"{type(inner).__name__} draws at random, or differs from reading to reading, so that "
        "its samples cannot be kept. Cache a dataset without its random transforms, and give these "
        "to the cache (transform=...), or to the data module (augment=...). If it always returns "
        "the same samples, say so: always_same=True."
    )


def _is_fixed(dataset: MapDataset, index: int) -> bool:
    with kept_random_state():
        watch, before = DrawWatch(), _own_states(dataset)
        first = taken_apart(dataset[index])
        if watch.drew() or _own_states(dataset) != before:
            return False
        _seed_all(dataset, index)
        with _another_epoch(dataset):
            return taken_apart(dataset[index]) == first


def _own_states(dataset: object) -> list[bytes]:
    """Return the states of the generators that a dataset holds, pipelines' among them."""
    return [pickle.dumps(state_of(one)) for one in find_instances(dataset, GENERATOR_CLASSES)]


def _seed_all(dataset: object, number: int) -> None:
    seed_global_generators(number, 0, number)
    for place, generator in enumerate(find_instances(dataset, GENERATOR_CLASSES)):
        seed_generator(generator, 1 + number + 1000 * place)


@contextmanager
def _another_epoch(dataset: object) -> Iterator[None]:
    """Have the datasets of this package draw as in another epoch."""
    cells = [(cell, cell.get()) for cell in find_instances(dataset, (EpochCell,))]
    try:
        for cell, epoch in cells:
            cell.set(epoch + 1)
        yield
    finally:
        for cell, epoch in cells:
            cell.set(epoch)

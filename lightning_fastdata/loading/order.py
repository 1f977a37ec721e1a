"""In which order the samples of an epoch are read."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch.utils.data import RandomSampler

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class ShuffleSampler(RandomSampler):
    """A permutation of the dataset that depends on the seed and the epoch alone.

    torch's own ``RandomSampler`` draws from the global generator, so what a user's model drew
    before the epoch decides the order. It is a ``RandomSampler`` to everyone who asks.

    Args:
        data_source: The dataset; only its length is used.
        seed: Seed of the run.
    """

    def __init__(self, data_source: Sized, seed: int = 0) -> None:
        super().__init__(data_source)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of ``epoch``, counted from 0; Lightning calls it every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        # torch's CPU generator takes in 32 bits of its seed only, so the two are hashed into those.
        words = np.random.SeedSequence([self.seed & 0xFFFFFFFF, self.epoch]).generate_state(1)
        generator = torch.Generator().manual_seed(int(words[0]))
        yield from torch.randperm(len(self.data_source), generator=generator).tolist()


def dataset_length(dataset: Dataset[object]) -> int | None:
    """Return ``len(dataset)``, or None when it has no length."""
    try:
        return len(cast("Sized", dataset))
    except (TypeError, NotImplementedError):
        return None

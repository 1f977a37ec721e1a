"""In which order the samples of an epoch are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    from numpy.typing import NDArray
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
        yield from epoch_permutation(len(self.data_source), self.seed, self.epoch).tolist()


def dataset_length(dataset: Dataset[object]) -> int | None:
    """Return ``len(dataset)``, or None when it has no length."""
    try:
        return len(cast("Sized", dataset))
    except (TypeError, NotImplementedError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder:
    """Which samples each batch of one epoch holds: a pure plan that reads nothing.

    The samples are put in one order for all ranks and cut into global batches of
    ``batch_size * world_size``, of which each rank takes its slice. With the global batch size
    kept, a run may therefore go on with another number of ranks.
    """

    length: int
    """Samples in the dataset, from 0."""
    batch_size: int
    """Samples of one rank's batch, from 1."""
    seed: int = 0
    """Seed of the run."""
    epoch: int = 0
    """Epoch, counted from 0."""
    shuffle: bool = True
    """Permute the samples; False keeps the dataset's order."""
    drop_last: bool = False
    """Leave out the last global batch if it is not full. Otherwise the ranks share what is left,
    and their last batches differ by one sample at most; a rank left without samples has one batch
    less than the others."""
    rank: int = 0
    """This process among ``world_size``."""
    world_size: int = 1
    """Processes that share the epoch."""
    position: int = 0
    """Batches of this epoch that were delivered before; they are skipped."""

    def __post_init__(self) -> None:
        for name, lowest in (("length", 0), ("batch_size", 1), ("world_size", 1), ("position", 0)):
            if getattr(self, name) < lowest:
                raise OptionsError(f"{name} is {getattr(self, name)!r}; it starts at {lowest}.")
        if not 0 <= self.rank < self.world_size:
            raise OptionsError(
                f"rank is {self.rank!r}; with world_size={self.world_size} it is one of 0 to "
                f"{self.world_size - 1}."
            )

    def __len__(self) -> int:
        """Batches of this rank that are still to come."""
        full, rest = divmod(self.length, self.batch_size * self.world_size)
        # numpy.array_split gives its first parts what does not divide evenly.
        last = not self.drop_last and rest > self.rank
        return max(0, full + last - self.position)

    def batches(self) -> Iterator[NDArray[np.int64]]:
        """Yield the indices of each batch, int64, from ``position`` on."""
        order = epoch_permutation(self.length, self.seed, self.epoch) if self.shuffle else None
        step = self.batch_size * self.world_size
        for number in range(self.position, self.position + len(self)):
            start, stop = number * step, min((number + 1) * step, self.length)
            everyone = np.arange(start, stop) if order is None else order[start:stop]
            if stop - start == step:
                yield everyone[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
            else:
                yield np.array_split(everyone, self.world_size)[self.rank]


def epoch_permutation(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of ``length`` samples, int64 [length], that (seed, epoch) stand for."""
    # torch's CPU generator takes in 32 bits of its seed only, so the two are hashed into those.
    words = np.random.SeedSequence([seed & 0xFFFFFFFF, epoch]).generate_state(1)
    generator = torch.Generator().manual_seed(int(words[0]))
    return torch.randperm(length, generator=generator).numpy()


def epoch_order(batch_sampler: Any, epoch: int) -> EpochOrder | None:
    """Return the plan that a batch sampler will follow in an epoch, if that is sure beforehand.

    It is for ``BatchSampler`` over ``ShuffleSampler`` or ``SequentialSampler``.
    """
    if type(batch_sampler) is not BatchSampler:
        return None
    sampler: Any = batch_sampler.sampler
    shuffled = type(sampler) is ShuffleSampler
    if not shuffled and type(sampler) is not SequentialSampler:
        return None
    if shuffled and sampler.epoch != epoch:
        return None
    return EpochOrder(
        length=len(sampler.data_source),
        batch_size=batch_sampler.batch_size,
        seed=sampler.seed if shuffled else 0,
        epoch=epoch,
        shuffle=shuffled,
        drop_last=batch_sampler.drop_last,
    )


def index_batches(batch_sampler: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a batch sampler; as int64 arrays where that gives the same indices.

    Python integers cost more than the gather of a row does. For torch's own sequential and random
    samplers and for ``ShuffleSampler`` the same indices are had as one array; every other sampler
    is asked as usual.
    """
    sampler = getattr(batch_sampler, "sampler", None)
    order = _sampled_order(sampler) if type(batch_sampler) is BatchSampler else None
    if order is None:
        yield from batch_sampler
        return
    size: int = batch_sampler.batch_size  # type: ignore[attr-defined]
    drop_last: bool = batch_sampler.drop_last  # type: ignore[attr-defined]
    stop = len(order) - len(order) % size if drop_last else len(order)
    for start in range(0, stop, size):
        yield order[start : start + size]


def _sampled_order(sampler: Any) -> NDArray[np.int64] | None:
    if type(sampler) is SequentialSampler:
        return np.arange(len(sampler.data_source))
    if type(sampler) is ShuffleSampler:
        return epoch_permutation(len(sampler.data_source), sampler.seed, sampler.epoch)
    if type(sampler) is not RandomSampler or sampler.replacement:
        return None
    length = len(sampler.data_source)
    if sampler.num_samples != length:
        return None
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    order = torch.randperm(length, generator=generator).numpy()
    # torch draws a second permutation for the remainder, of which it then takes nothing.
    torch.randperm(length, generator=generator)
    return order

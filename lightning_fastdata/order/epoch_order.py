"""In which order the samples of an epoch are read."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.order.permutation import Order, cut, epoch_permutation, parts_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.data import Dataset

_TO_INTEGERS: Final = 2**14


class ShuffleSampler(RandomSampler):
    """A permutation of the dataset that depends on the seed and the epoch alone.

    torch's own ``RandomSampler`` draws from the global generator, so what a user's model drew
    before the epoch decides the order. It is a ``RandomSampler`` to everyone who asks. The order of
    very large sets is computed on the way and takes no memory.

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
        order = epoch_permutation(len(self.data_source), self.seed, self.epoch)
        # As integers of Python a permutation takes five times its memory.
        for part in parts_of(order, cut(len(order), _TO_INTEGERS)):
            yield from part.tolist()


class EvaluationBatchSampler(BatchSampler):
    """Batches of a dataset in its own order, of which each rank gets its share exactly once.

    Given a ``DistributedSampler``, whose ``rank``, ``num_replicas`` and length it takes, it makes
    the batches of :class:`EpochOrder` with ``equal_counts``: each sample once over all ranks, and
    as many batches on each rank, so that steps in which the ranks wait for each other go on. Where
    that is impossible (fewer samples than ranks, or batches of one that do not come out even) it
    warns and does as ``BatchSampler`` does. Given any other sampler it is a ``BatchSampler``.

    Lightning puts its ``DistributedSampler`` in place of a sequential one, and with
    ``use_distributed_sampler=False`` leaves it alone; both need no more than this class.

    Args:
        sampler: Yields indices. Of a ``DistributedSampler`` only who shares is read, not the order.
        batch_size: Samples of one rank's batch at most.
        drop_last: Leave out what does not fill a batch on every rank.

    Example:
        >>> share = DistributedSampler(range(5), num_replicas=2, rank=0, shuffle=False)
        >>> list(EvaluationBatchSampler(share, batch_size=2))
        [[0, 1], [3]]
    """

    def __init__(
        self, sampler: Sampler[int] | Iterable[int], batch_size: int, drop_last: bool = False
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.order: EpochOrder | None = None
        """The plan of this rank; None where the sampler decides."""
        if not isinstance(sampler, DistributedSampler):
            return
        length, ranks = len(cast("Sized", sampler.dataset)), sampler.num_replicas
        if drop_last or can_share_evenly(length, batch_size, ranks):
            self.order = EpochOrder(
                length=length,
                batch_size=batch_size,
                shuffle=False,
                drop_last=drop_last,
                rank=sampler.rank,
                world_size=ranks,
                equal_counts=True,
            )
        elif sampler.rank == 0:
            _warn_of_uneven_share(sampler, length, batch_size)

    def __len__(self) -> int:
        return super().__len__() if self.order is None else len(self.order)

    def __iter__(self) -> Iterator[list[int]]:
        if self.order is None:
            yield from super().__iter__()
        else:
            for batch in self.order.batches():
                yield batch.tolist()


def can_share_evenly(length: int, batch_size: int, world_size: int) -> bool:
    """Return whether all ranks can have as many batches, none empty and none above the size."""
    steps = -(-length // (batch_size * world_size))
    return steps * world_size <= length


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
    equal_counts: bool = False
    """Give every rank as many batches. If the last global batch has fewer samples than there are
    ranks, the one before gives up what is missing; then the batches of a rank still differ by one
    sample at most between the ranks, and so does how an epoch is cut with their number."""
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

        if self.equal_counts and not self.drop_last:
            self._check_can_share()

    def __len__(self) -> int:
        """Batches of this rank that are still to come."""
        full, rest = divmod(self.length, self.batch_size * self.world_size)
        # What does not divide evenly goes to the first ranks.
        last = not self.drop_last and rest > (0 if self.equal_counts else self.rank)
        return max(0, full + last - self.position)

    def batches(self) -> Iterator[NDArray[np.int64]]:
        """Yield the indices of each batch, int64, from ``position`` on."""
        order: Order = range(self.length)
        if self.shuffle:
            order = epoch_permutation(self.length, self.seed, self.epoch)
        numbers = range(self.position, self.position + len(self))
        return parts_of(order, map(self._bounds, numbers))

    def _bounds(self, number: int) -> tuple[int, int]:
        """Return where this rank's batch ``number`` begins and ends in the order of the epoch."""
        begin, end = self._cut(number), self._cut(number + 1)
        each, more = divmod(end - begin, self.world_size)
        start = begin + self.rank * each + min(self.rank, more)
        return start, start + each + (self.rank < more)

    def _cut(self, number: int) -> int:
        """Return where global batch ``number`` begins; after the last one, the end."""
        step = self.batch_size * self.world_size
        full, rest = divmod(self.length, step)
        shift = self.equal_counts and not self.drop_last and 0 < rest < self.world_size
        if shift and number == full:
            return self.length - self.world_size  # one each for the last batch
        return min(number * step, self.length)

    def _check_can_share(self) -> None:
        if not can_share_evenly(self.length, self.batch_size, self.world_size):
            raise OptionsError(
                f"equal_counts is True, but {self.length} samples in batches of at most "
                f"{self.batch_size} cannot make equally many on {self.world_size} ranks. Use fewer "
                "ranks, or a batch_size of 2 or more if there are as many samples as ranks."
            )


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


def _warn_of_uneven_share(sampler: DistributedSampler[Any], length: int, batch_size: int) -> None:
    twice = sampler.total_size - length
    warnings.warn(
        f"{length} samples in batches of at most {batch_size} cannot make equally many batches on "
        f"{sampler.num_replicas} ranks. "
        + (
            f"{twice} are therefore evaluated more than once, which biases the metrics. "
            if twice > 0
            else "Some ranks therefore have a batch less than others, and a step in which ranks "
            "wait for each other will hang. "
        )
        + "Use a batch_size of 2 or more"
        + (" and fewer devices." if length < sampler.num_replicas else ", or other devices."),
        FastDataWarning,
        stacklevel=3,
    )

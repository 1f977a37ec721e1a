"""Samplers of our own, and the indices of any sampler as arrays where that is possible."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.order.block_shuffle import BlockShuffleSampler
from lightning_fastdata.order.epoch_order import (
    Blocks,
    EpochOrder,
    Order,
    can_share_evenly,
    cut,
    drawn_permutation,
    epoch_permutation,
    parts_of,
)
from lightning_fastdata.types import SetsEpoch

if TYPE_CHECKING:
    from numpy.typing import NDArray


_TO_INTEGERS: Final = 2**14


def sampler_in(batch_sampler: object) -> object:
    """Return the sampler whose indices a batch sampler groups; None: it has none."""
    return getattr(batch_sampler, "sampler", None)


def rows_in(batch_sampler: object) -> int | None:
    """Return how many samples a batch sampler says that its batches have; None: it does not."""
    rows: int | None = getattr(batch_sampler, "batch_size", None)
    return rows


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


class RankSampler(DistributedSampler[Any]):
    """One rank's share of a shuffle by seed and epoch, each sample once over all ranks.

    Lightning puts no sampler of its own in the place of a ``DistributedSampler``, and sets its
    epoch. With the global batch size kept, any number of ranks gives the same global batches.

    Args:
        dataset: Only its length is used.
        batch_size: Samples of one rank's batch at most.
        num_replicas: Ranks.
        rank: This one.
        seed: Seed of the run.
        drop_last: Leave out the last global batch if it is not full.
        blocks: Shuffle within these blocks of the dataset. Default: all samples.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int,
        num_replicas: int,
        rank: int,
        seed: int = 0,
        drop_last: bool = False,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__(
            cast("Any", dataset), num_replicas, rank, shuffle=True, seed=seed, drop_last=drop_last
        )
        self.batch_size = batch_size
        self.blocks = blocks

    @property
    def order(self) -> EpochOrder:
        """The plan of this rank in the epoch that was set last."""
        return EpochOrder(
            length=len(cast("Sized", self.dataset)),
            batch_size=self.batch_size,
            seed=self.seed,
            epoch=self.epoch,
            drop_last=self.drop_last,
            rank=self.rank,
            world_size=self.num_replicas,
            equal_counts=True,
            blocks=self.blocks,
        )

    def __iter__(self) -> Iterator[int]:
        for batch in self.order.batches():
            yield from batch.tolist()

    def __len__(self) -> int:
        return sum(map(len, self.order.batches()))


class RankBatchSampler(BatchSampler):
    """The batches of a :class:`RankSampler`; with any other sampler those of ``BatchSampler``."""

    def __iter__(self) -> Iterator[list[int]]:
        if not isinstance(self.sampler, RankSampler):
            yield from super().__iter__()
            return
        for batch in self.sampler.order.batches():
            yield batch.tolist()

    def __len__(self) -> int:
        if isinstance(self.sampler, RankSampler):
            return len(self.sampler.order)
        return super().__len__()


_DRAWN_AT_START: Final = (
    BlockShuffleSampler, DistributedSampler, EpochOrder, RandomSampler, RankSampler,
    SequentialSampler, ShuffleSampler, WeightedRandomSampler,
)  # fmt: skip
"""Not SubsetRandomSampler, which looks at its list of indices as it goes."""


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Set the epoch of a loader's sampler, and of that of its batch sampler, if they have one."""
    for sampler in (loader.sampler, sampler_in(loader.batch_sampler)):
        if isinstance(sampler, SetsEpoch):
            sampler.set_epoch(epoch)


def epoch_order(batch_sampler: object, epoch: int) -> EpochOrder | None:
    """Return the plan that a batch sampler will follow in an epoch, if that is sure beforehand.

    It is for ``BatchSampler`` over ``ShuffleSampler``, ``BlockShuffleSampler`` or
    ``SequentialSampler``, and for :class:`RankBatchSampler`.
    """
    if type(batch_sampler) is RankBatchSampler:
        share = batch_sampler.sampler
        return share.order if isinstance(share, RankSampler) and share.epoch == epoch else None
    if type(batch_sampler) is not BatchSampler:
        return None
    sampler = batch_sampler.sampler
    blocks = None
    if type(sampler) is ShuffleSampler and sampler.epoch == epoch:
        seed = sampler.seed
    elif type(sampler) is BlockShuffleSampler and sampler.epoch == epoch:
        seed, blocks = sampler.seed, sampler.blocks
    elif type(sampler) is SequentialSampler:
        seed = 0
    else:
        return None
    return EpochOrder(
        length=len(sampler.data_source),
        batch_size=batch_sampler.batch_size,
        seed=seed,
        epoch=epoch,
        shuffle=type(sampler) is not SequentialSampler,
        drop_last=batch_sampler.drop_last,
        blocks=blocks,
    )


def is_drawn_at_start(source: object) -> bool:
    """Return whether the order of an epoch is sure when it begins: no step has a part in it.

    ``source``: a batch sampler, or a sampler. Known are torch's own and those of this package; one
    of the user's may look at what the training writes.
    """
    batched = type(source) in (BatchSampler, RankBatchSampler, EvaluationBatchSampler)
    sampler = sampler_in(source) if batched else source
    return type(sampler) in _DRAWN_AT_START


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


def index_batches(batch_sampler: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a batch sampler; as int64 arrays where that gives the same indices.

    Python integers cost more than the gather of a row does. For torch's own samplers and for those
    of this module the same indices are had as one array; every other sampler is asked as usual.
    """
    if type(batch_sampler) is EvaluationBatchSampler and batch_sampler.order is not None:
        yield from batch_sampler.order.batches()
        return
    if type(batch_sampler) is RankBatchSampler and isinstance(batch_sampler.sampler, RankSampler):
        yield from batch_sampler.sampler.order.batches()
        return
    plain = batch_sampler if type(batch_sampler) is BatchSampler else None
    order = None if plain is None else _sampled_order(plain.sampler)
    if plain is None or order is None:
        yield from batch_sampler
        return
    stop = len(order) - len(order) % plain.batch_size if plain.drop_last else len(order)
    yield from parts_of(order, cut(stop, plain.batch_size))
    sampler = plain.sampler
    if type(sampler) is RandomSampler and sampler.generator is not None:
        # torch draws a second permutation for the remainder, of which it then takes nothing.
        drawn_permutation(len(order), sampler.generator)


def _sampled_order(sampler: object) -> Order | None:
    """Return the order that a sampler is going to give; None of a subclass, which may differ."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler.data_source))
    if type(sampler) is ShuffleSampler:
        return epoch_permutation(len(sampler.data_source), sampler.seed, sampler.epoch)
    if type(sampler) is BlockShuffleSampler:
        return sampler.blocks.order(sampler.seed, sampler.epoch)
    if type(sampler) is RandomSampler and not sampler.replacement:
        length = len(sampler.data_source)
        generator = sampler.generator
        if sampler.num_samples != length:
            return None
        if generator is None:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        return drawn_permutation(length, generator)
    if type(sampler) is SubsetRandomSampler:
        indices = np.asarray(sampler.indices)
        if indices.ndim != 1 or indices.dtype.kind != "i":
            return None
        order = drawn_permutation(len(indices), sampler.generator)
        return indices.astype(np.int64, copy=False)[order]
    if type(sampler) is WeightedRandomSampler:
        drawn: NDArray[np.int64] = torch.multinomial(
            sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator
        ).numpy()
        return drawn
    return _rank_order(sampler) if type(sampler) is DistributedSampler else None


def _rank_order(sampler: DistributedSampler[Any]) -> NDArray[np.int64] | None:
    length = len(cast("Sized", sampler.dataset))
    if (sampler.total_size > length) if sampler.drop_last else (sampler.total_size < length):
        return None  # the dataset has changed, which the sampler itself is to say
    order = np.arange(length)
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        order = drawn_permutation(length, generator)
    # Short of samples it begins again with the first ones, as resize does.
    everyone = np.resize(order, sampler.total_size)
    return everyone[sampler.rank : sampler.total_size : sampler.num_replicas]

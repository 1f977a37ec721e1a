"""Samplers of our own, and the indices of any sampler as arrays where that is possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata.order.block_shuffle import BlockShuffleSampler
from lightning_fastdata.order.buckets import BucketBatchSampler, BucketOrder, BucketShare
from lightning_fastdata.order.epoch_order import (
    EpochOrder,
    can_share_evenly,
    cut,
    drawn_permutation,
    epoch_permutation,
    parts_of,
)
from lightning_fastdata.order.ranks import SharedSampler, sampler_in, share_in

if TYPE_CHECKING:
    from numpy.typing import NDArray


_TO_INTEGERS: Final = 2**14


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


class RankBatchSampler(BatchSampler):
    """One rank's batches of the steps of a :class:`SharedSampler`.

    With any other sampler they are those of ``BatchSampler``. Lightning, which makes the batch
    sampler of a prediction anew, needs no more than this class and its arguments.
    """

    def __iter__(self) -> Iterator[list[int]]:
        share, plan = self.sampler, epoch_order(self)
        if plan is not None:
            yield from (batch.tolist() for batch in plan.batches())
        elif isinstance(share, SharedSampler):
            yield from (step.own for step in share.keyed_steps(once=draws_at_start(share.source)))
        else:
            yield from super().__iter__()

    def __len__(self) -> int:
        share = self.sampler
        return share.number_of_steps() if isinstance(share, SharedSampler) else super().__len__()


# -- what is sure of an order beforehand -----------------------------------------------------------


def epoch_order(
    source: object, epoch: int | None = None, start: int = 0
) -> EpochOrder | BucketOrder | None:
    """Return the plan that a batch sampler will follow in an epoch, if that is sure beforehand.

    It is of batches of a ``ShuffleSampler``, ``BlockShuffleSampler`` or ``SequentialSampler``,
    shared among ranks or not, and of a :class:`BucketBatchSampler`. ``epoch``: there is none if
    another one was set. Default: that one. ``start``: samples of all ranks that are skipped.
    """
    if type(source) is BucketBatchSampler:
        now = source.sampler.epoch
        return replace(source.sampler.order, start=start) if epoch in (None, now) else None
    if type(source) not in (BatchSampler, RankBatchSampler):
        return None
    share = share_in(source)
    cuts: Any = source if share is None else share
    rank, ranks = (0, 1) if share is None else (share.rank, share.num_replicas)
    sampler: Any = sampler_in(source) if share is None else share.source
    size, drop_last = cuts.batch_size, cuts.drop_last
    known = type(sampler) in (ShuffleSampler, BlockShuffleSampler, SequentialSampler)
    if size is None or not known:
        return None
    now = getattr(sampler, "epoch", epoch or 0)
    length = len(sampler.data_source)
    even = drop_last or can_share_evenly(max(0, length - start), size, ranks)
    if epoch not in (None, now) or not even:
        return None
    return EpochOrder(
        length=length,
        batch_size=size,
        seed=getattr(sampler, "seed", 0),
        epoch=now,
        shuffle=type(sampler) is not SequentialSampler,
        drop_last=drop_last,
        rank=rank,
        world_size=ranks,
        blocks=getattr(sampler, "blocks", None),
        start=start,
    )


_DRAWN_AT_START: Final = (
    BlockShuffleSampler, BucketShare, DistributedSampler, RandomSampler, SequentialSampler,
    ShuffleSampler, WeightedRandomSampler,
)  # fmt: skip
"""Not SubsetRandomSampler, which looks at its list of indices as it goes."""


def is_drawn_at_start(source: object) -> bool:
    """Return whether the order of an epoch is sure when it begins: no step has a part in it.

    ``source``: a batch sampler, or a sampler. Known are torch's own and those of this package; one
    of the user's may look at what the training writes.
    """
    return type(_grouped_in(source)) in _DRAWN_AT_START


def draws_at_start(source: object) -> bool:
    """Return whether what an epoch draws from global generators is drawn before its first index."""
    return is_drawn_at_start(source) or type(_grouped_in(source)) is SubsetRandomSampler


def _grouped_in(source: object) -> object:
    share = share_in(source)
    source = source if share is None else share.source
    known = type(source) in (BatchSampler, BucketBatchSampler, RankBatchSampler)
    return sampler_in(source) if known else source


# -- indices as arrays -----------------------------------------------------------------------------


def index_batches(batch_sampler: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a batch sampler; as int64 arrays where that gives the same indices.

    Python integers cost more than the gather of a row does. For torch's own samplers and for those
    of this module the same indices are had as one array; every other sampler is asked as usual.
    """
    plan = epoch_order(batch_sampler)
    if plan is not None:
        yield from plan.batches()
        return
    plain = batch_sampler if type(batch_sampler) is BatchSampler else None
    order = None if plain is None else _drawn_order(plain.sampler)
    if plain is None or order is None:
        yield from batch_sampler
        return
    stop = len(order) - len(order) % plain.batch_size if plain.drop_last else len(order)
    yield from parts_of(order, cut(stop, plain.batch_size))
    sampler = plain.sampler
    if type(sampler) is RandomSampler and sampler.generator is not None:
        # torch draws a second permutation for the remainder, of which it then takes nothing.
        drawn_permutation(len(order), sampler.generator)


def _drawn_order(sampler: object) -> NDArray[np.int64] | None:
    """Return what a sampler of torch's is going to give; None of a subclass, which may differ."""
    if type(sampler) is RandomSampler and not sampler.replacement:
        length, generator = len(sampler.data_source), sampler.generator
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
    return np.fromiter(sampler, np.int64) if type(sampler) is DistributedSampler else None

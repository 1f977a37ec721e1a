"""Samplers of this package, sharing any sampler among ranks, and orders that are known ahead."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from itertools import chain, cycle, islice
from numbers import Integral
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata.errors import FastDataWarning, OptionsError, check, checked_seed
from lightning_fastdata.order.epoch_order import (
    BlockOrder,
    Blocks,
    Counted,
    EpochOrder,
    Fixed,
    Ints,
    Order,
    blocks_of,
    can_share_evenly,
    check_rank,
    cut,
    dataset_length,
    drawn_permutation,
    epoch_permutation,
    part_of,
    parts_of,
    rank_now,
    steps_in,
    whole,
)
from lightning_fastdata.order.lengths import BucketBatchSampler, BucketOrder, BucketShare
from lightning_fastdata.randomness.global_generators import DrawWatch, kept_random_state
from lightning_fastdata.randomness.seeds import seed_global_generators
from lightning_fastdata.types import SetsEpoch

Indices: TypeAlias = Any
"""Indices of one batch: a list, tuple or array; or any item of a sampler of ready batches."""

_RANKS: Final = ("num_replicas", "world_size")
_SEQUENCES: Final = (list, tuple, np.ndarray)
_ENDED: Final = object()
_TO_INTEGERS: Final = 2**14
_PACKAGE: Final = __name__.partition(".")[0]


class ShuffleSampler(RandomSampler):
    """A permutation of the dataset that depends on the seed and the epoch alone.

    torch's own ``RandomSampler`` draws from the global generator, so that earlier draws of the
    user's model change the order. As a subclass of it, this class counts as a ``RandomSampler``
    everywhere. The order of a very large dataset is computed as it is read, and takes no memory.

    Args:
        data_source: The dataset; only its length is used.
        seed: Seed of the run.
    """

    def __init__(self, data_source: Sized, seed: int = 0) -> None:
        super().__init__(data_source)
        self.seed = seed
        self.epoch: int = Counted()

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of ``epoch``, counted from 0; loaders and Lightning call it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return _integers(epoch_permutation(len(self.data_source), self.seed, self.epoch))


class BlockShuffleSampler(Sampler[int]):
    """Every sample once, in an order that stays within a few blocks of the dataset at a time.

    The dataset is cut into blocks of samples that are stored together. Each epoch draws an order of
    the blocks, takes ``blocks_at_once`` of them at a time, and shuffles their samples together. So
    ``blocks_at_once * block`` consecutive reads fall into that many blocks, and two samples of one
    block are never further apart than that in the order. The price is an order that is less random
    than a full shuffle. With a block of 1, or with all blocks at once, it is a full shuffle.

    A dataset states how it is stored by a method ``block_starts()``, which returns the numbers of
    the first samples of its blocks, increasing from 0; ``SourceDataset`` has it if its source has
    groups or chunks of rows. The method is found through ``Subset``, ``ConcatDataset`` and any
    wrapper that has the dataset as ``.dataset`` and the same length; a block of a subset holds the
    samples of the block that are in the subset.

    The order depends on seed and epoch alone, so that a training can go on within an epoch. Ranks
    of a data module share the batches of one order. For a loader without a data module, Lightning's
    own wrapper deals the samples of the order to the ranks in turn.

    Args:
        data_source: The dataset.
        block: Samples in a block, as they are stored. Default: as the dataset states, else 100.
        blocks_at_once: Blocks whose samples are shuffled together. Default: 8 if the dataset states
            its blocks, else as many as have 8,000 samples, and 8 at least.
        seed: Seed of the run.

    Raises:
        OptionsError: ``block`` or ``blocks_at_once`` is below 1.
        DatasetError: ``block_starts()`` returns numbers that are no blocks of the dataset.

    Example:
        >>> list(BlockShuffleSampler(range(6), block=2, blocks_at_once=1, seed=2))
        [1, 0, 2, 3, 4, 5]
    """

    def __init__(
        self,
        data_source: Sized,
        block: int | None = None,
        *,
        blocks_at_once: int | None = None,
        seed: int = 0,
    ) -> None:
        self.data_source = data_source
        self._cut = block, blocks_at_once
        self._blocks = blocks_of(data_source, *self._cut)
        self.seed = checked_seed(seed)
        self.epoch: int = Counted()

    @property
    def blocks(self) -> Blocks:
        """Blocks of the dataset as long as it is now."""
        if self._blocks.length != len(self.data_source):
            self._blocks = blocks_of(self.data_source, *self._cut)
        return self._blocks

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``, counted from 0; loaders and Lightning call it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.blocks.length

    def __iter__(self) -> Iterator[int]:
        return _integers(BlockOrder(self.blocks, self.seed, self.epoch))


def _integers(order: Order) -> Iterator[int]:
    # In parts: all at once as Python integers would take five times the memory of the order.
    for part in parts_of(order, cut(len(order), _TO_INTEGERS)):
        yield from part.tolist()


def is_in_blocks(shuffle: object) -> bool:
    """Return whether ``shuffle`` is ``"blocks"``.

    Raises:
        OptionsError: ``shuffle`` is another text.
    """
    if isinstance(shuffle, str) and shuffle != "blocks":
        raise OptionsError(f'shuffle={shuffle!r} has to be True, False or "blocks".')
    return shuffle == "blocks"


# -- any sampler, on several ranks -----------------------------------------------------------------


class Step(NamedTuple):
    """The indices of one step."""

    whole: tuple[Indices, ...]
    """Indices of all ranks, in the order of the epoch, in one piece or several."""
    own: Indices
    """Indices of this rank."""


def keyed(steps: Iterable[Any], seed: int, epoch: int, *, once: bool = False) -> Iterator[Any]:
    """Yield steps while their draws from global generators are keyed, from ``iter()`` on.

    The draws depend on seed and epoch alone, and do not change the draws of other code. ``once``:
    all draws are made before the first item.
    """
    with kept_random_state():
        seed_global_generators(seed, epoch, "order")
        items = iter(steps)
        item, own = next(items, _ENDED), DrawWatch()
    while item is not _ENDED:
        yield item
        if once:
            yield from items
            return
        with kept_random_state():
            own.restore()
            item = next(items, _ENDED)
            own.begin()


class SharedSampler(DistributedSampler[Any]):
    """One rank's part of each step of a sampler or of a batch sampler of any kind.

    All ranks iterate the whole order, which has to be the same on each. If the source is a sampler,
    a step is its next ``batch_size * num_replicas`` samples, and each rank takes a slice of them:
    with the same global batch, any number of ranks takes the same steps. If it is a batch sampler,
    a step is its next ``num_replicas`` batches, and each rank takes one of them.

    All ranks have equally many steps. Samples left over at the end are left out with ``drop_last``.
    Otherwise the ranks share them, so that the batches of the last step are smaller, and differ by
    one sample at most. If fewer samples than ranks are left over, the missing ones are taken from
    the step before, if it has enough; else the first samples of the epoch are taken again, and a
    warning says how many. torch's own ``DataLoader(sampler=...)`` cuts the samples of a rank into
    batches itself, so that there they are always taken again. Items that are not lists cannot be
    cut, and the first of them are taken again likewise.

    Lightning does not replace a ``DistributedSampler`` by one of its own, and sets its epoch.

    On several ranks, ``FastDataModule`` makes one for each of its loaders. Elsewhere give it to a
    loader as ``sampler=``, or as ``batch_sampler=`` if the source gives batches.

    Args:
        source: The sampler, or the batch sampler. Its ``set_epoch()`` is called, if it has one.
        batch_size: Samples of one rank's batch. None: ``source`` gives batches.
        num_replicas: Number of ranks. Default: that of torch's process group, else 1.
        rank: Number of this rank. Default: that of torch's process group, else 0.
        drop_last: Leave out samples that do not fill a step. Default: as ``source``, else False.
        seed: Keys draws from global generators, together with the epoch.

    Raises:
        OptionsError: ``rank`` is none of the ranks, ``batch_size`` is no whole number from 1, or
            ``source`` cannot be iterated, or is split among ranks already.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        batch_size: int | None,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool | None = None,
        seed: int = 0,
    ) -> None:
        now = rank_now()
        num_replicas = now.ranks if num_replicas is None else num_replicas
        rank = now.number if rank is None else rank
        num_replicas = whole("num_replicas", num_replicas)
        check_rank(rank, num_replicas)
        given: Any = source
        fine = isinstance(given, Iterable) or hasattr(given, "__getitem__")
        check("source", source, fine, "what can be iterated")
        if split_of(source) is not None:
            raise OptionsError(
                f"{type(source).__name__} gives the part of one rank, which cannot be shared out "
                "again. Give the sampler of all samples."
            )
        everything = cast("Any", range(dataset_length(source) or 0))
        super().__init__(everything, num_replicas, rank, shuffle=False, seed=checked_seed(seed))
        self.epoch = Counted()
        self.source = source
        self.batch_size = None if batch_size is None else whole("batch_size", batch_size)
        said = getattr(source, "drop_last", False) if drop_last is None else drop_last
        check("drop_last", drop_last, isinstance(drop_last, bool | None), "True, False and None")
        self.drop_last = bool(said)

    def check_loader(self, batch_size: int | None, *, drop_last: bool) -> None:
        """Raise an :class:`OptionsError` unless a loader makes the batches that are shared here."""
        if (self.batch_size, self.drop_last and self.gives_samples) != (batch_size, drop_last):
            raise OptionsError(
                f"The loader has batch_size={batch_size!r} and drop_last={drop_last!r}, and its "
                f"SharedSampler {self.batch_size!r} and {self.drop_last!r}. Give both the same."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``, counted from 0; loaders and Lightning call it."""
        super().set_epoch(epoch)
        tell_samplers(epoch, self.source)

    def __iter__(self) -> Iterator[Any]:
        # A loader that puts samples into batches again knows no steps: only the last may be small.
        owns = (step.own for step in self.keyed_steps(even=self.gives_samples))
        return chain.from_iterable(owns) if self.gives_samples else owns

    def __len__(self) -> int:
        """Return the number of samples of this rank, or of batches if the source gives batches."""
        steps = self.number_of_steps()
        if not self.gives_samples or not steps:
            return steps
        full, rest = divmod(len(cast("Sized", self.source)), self.full)
        own = range(rest)[part_of(rest, self.rank, self.num_replicas)]
        # A rest of fewer samples than ranks is filled up, see __iter__().
        return full * cast("int", self.batch_size) + (max(1, len(own)) if steps > full else 0)

    @property
    def gives_samples(self) -> bool:
        """Whether the source gives samples; False: it gives batches."""
        return self.batch_size is not None

    @property
    def full(self) -> int:
        """Number of items of the source in a step."""
        return (self.batch_size or 1) * self.num_replicas

    def number_of_steps(self) -> int:
        """Return how many steps an epoch has."""
        return steps_in(len(cast("Sized", self.source)), self.full, drop_last=self.drop_last)

    def left_over(self) -> str | None:
        """Return in words what becomes of a rest that does not fill a step; None: no known rest."""
        rest = (dataset_length(self.source) or 0) % self.full
        if not rest:
            return None
        what, ranks = "samples" if self.gives_samples else "batches", self.num_replicas
        if self.drop_last:
            done = "left out"
        elif not self.gives_samples:
            done = f"cut into {ranks} parts; where they have fewer samples, some come again"
        elif rest < ranks:
            done = f"too few for {ranks} ranks: the step before gives up some, or some come again"
        else:
            done = f"shared by all {ranks} ranks in a smaller step"
        return (
            f"the last {rest} {what} of each epoch of {type(self.source).__name__}, whose steps "
            f"are of {self.full}, are {done}"
        )

    def keyed_steps(self, *, even: bool = False) -> Iterator[Step]:
        """Return the steps of the epoch that was set last, with keyed draws; see :func:`keyed`."""
        items: Any = self.source
        if self.gives_samples:
            items = BatchSampler(items, self.full, self.drop_last)
        steps, once = self.steps(items, even=even), draws_at_start(self.source)
        return keyed(steps, self.seed, self.epoch, once=once)

    def steps(
        self, items: Iterable[Any], *, even: bool = False, first: Any = (), begun: int = 0
    ) -> Iterator[Step]:
        """Yield the steps of a rank.

        ``items``: the samples of a sampler in batches of all ranks, without a rest to be dropped;
        or the batches of a batch sampler. ``even``: keep all steps but the last full, and repeat
        samples rather than take them from the step before. ``first``: the items of the first step,
        if ``items`` begin after it. ``begun``: samples of the epoch before ``items``.
        """
        if self.gives_samples:
            waits = not even and self._waits(begun)
            for whole in self._complete(items, next(iter(first), None), waits=waits):
                yield Step((whole,), self._own(whole))
            return
        batches, first = (each for each in items), list(first)
        while group := list(islice(batches, self.num_replicas)):
            first = first or group
            if len(group) == self.num_replicas:
                yield Step(tuple(group), group[self.rank])
            elif not self.drop_last:
                yield self._rest_of_batches(group, first)

    def _own(self, whole: Any) -> Any:
        return whole[part_of(len(whole), self.rank, self.num_replicas)]

    def _complete(
        self, batches: Iterable[Indices], first: Indices | None, *, waits: bool
    ) -> Iterator[Indices]:
        """Yield the samples of each step; too small a rest is completed to one for each rank."""
        before: Indices | None = None
        for batch in batches:
            first, whole = batch if first is None else first, batch
            lacking = self.num_replicas - len(batch)
            if lacking > 0 and before is not None and len(before) - lacking >= self.num_replicas:
                before, whole = before[:-lacking], _joined((before[-lacking:], batch))
            elif lacking > 0:
                whole = self._filled(batch, first)
            if before is not None:
                yield before
            before = whole
            if not waits:
                yield whole
                before = None
        if before is not None:
            yield before

    def _waits(self, begun: int) -> bool:
        """Return whether a step may change when the next one is known."""
        length = dataset_length(self.source)
        rest = None if length is None else (length - begun) % self.full
        return not self.drop_last and (rest is None or 0 < rest < self.num_replicas)

    def _rest_of_batches(self, group: list[Indices], first: list[Indices]) -> Step:
        if not all(isinstance(batch, _SEQUENCES) for batch in group):
            whole = self._filled(group, first)
            return Step((whole,), whole[self.rank])
        whole = _joined(group)
        if len(whole) < self.num_replicas:
            whole = self._filled(whole, _joined(first))
        return Step((whole,), self._own(whole))

    def _filled(self, rest: Indices, first: Indices) -> list[Any]:
        if self.rank == 0:
            warnings.warn(
                f"The last {len(rest)} of an epoch of {type(self.source).__name__} are fewer than "
                f"the {self.num_replicas} ranks, which all need as many batches: "
                f"{self.num_replicas - len(rest)} of the epoch are taken again. Use drop_last=True "
                "to leave them out, a larger batch_size, or another number of ranks.",
                FastDataWarning,
                stacklevel=2,
            )
        plain = (part.tolist() if isinstance(part, np.ndarray) else part for part in (rest, first))
        return list(islice(chain(next(plain), cycle(next(plain))), self.num_replicas))


def _joined(parts: Sequence[Indices]) -> Indices:
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return [index for part in parts for index in part]


class OwnSplit(DistributedSampler[Any]):
    """Wraps a sampler or batch sampler that splits itself among ranks, and passes on its items.

    Lightning and Fabric do not replace a ``DistributedSampler`` by one of theirs, and set its
    epoch, which is passed on. Further methods and attributes are those of what is wrapped.
    """

    def __init__(self, source: Any, num_replicas: int) -> None:
        super().__init__(cast("Any", range(0)), num_replicas, source.rank, shuffle=False)
        self.source = source

    def __getattr__(self, name: str) -> Any:
        if name == "source" or name.startswith("__"):  # a copy has no source yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.source, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the source, if it has one."""
        super().set_epoch(epoch)
        tell_samplers(epoch, self.source)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


class RankBatchSampler(BatchSampler):
    """One rank's batches of the steps of a :class:`SharedSampler`.

    With any other sampler it gives the batches of ``BatchSampler``. Lightning can make it anew for
    a prediction, as it has the arguments of ``BatchSampler``.
    """

    def __iter__(self) -> Iterator[list[int]]:
        share, plan = self.sampler, epoch_order(self)
        if plan is not None:
            yield from (batch.tolist() for batch in plan.batches())
        elif isinstance(share, SharedSampler):
            yield from (step.own for step in share.keyed_steps())
        else:
            yield from super().__iter__()

    def __len__(self) -> int:
        share = self.sampler
        return share.number_of_steps() if isinstance(share, SharedSampler) else super().__len__()


# -- the parts of the sampler, or batch sampler, of a loader ---------------------------------------


def sampler_in(batch_sampler: object) -> Any:
    """Return the sampler whose indices a batch sampler groups; None: it has none."""
    return getattr(batch_sampler, "sampler", None)


def rows_in(batch_sampler: object) -> int | None:
    """Return the ``batch_size`` that a batch sampler states; None: it states none, or no number."""
    rows: Any = getattr(batch_sampler, "batch_size", None)
    if isinstance(rows, bool) or not isinstance(rows, Integral):
        return None
    return int(rows) if int(rows) > 0 else None


def tell_samplers(epoch: int, *sources: object) -> None:
    """Set the epoch of samplers, batch samplers and the samplers in these, if they have one.

    A :class:`Counted` one is for samplers of this package alone, on which nobody has set another,
    and a :class:`Fixed` one for all of this package: Lightning tells others the epoch in which they
    evaluate.
    """
    for one in chain.from_iterable((source, sampler_in(source)) for source in sources):
        counts = isinstance(getattr(one, "epoch", None), Counted)
        own = isinstance(epoch, Fixed) and type(one).__module__.startswith(_PACKAGE)
        if isinstance(one, SetsEpoch) and (counts or own or not isinstance(epoch, Counted)):
            one.set_epoch(epoch)


def split_of(source: object) -> DistributedSampler[Any] | None:
    """Return the sampler that splits itself among ranks, as a ``DistributedSampler``.

    It is a sampler or batch sampler, or the sampler in one, that has ``rank`` and either
    ``num_replicas``, as torch's ``DistributedSampler``, or ``world_size``. None: there is none.
    """
    for one in (source, sampler_in(source)):
        if isinstance(one, BucketShare):  # it asks for the number of ranks when it is iterated
            return one
        found = (getattr(one, name, None) for name in _RANKS)
        ranks = next((each for each in found if type(each) is int), 1)
        if ranks > 1 and type(getattr(one, "rank", None)) is int:
            return one if isinstance(one, DistributedSampler) else OwnSplit(one, ranks)
    return None


def ranks_aside(source: object) -> int:
    """Return how many ranks take as much of an order of which this one knows its part alone.

    1: it knows what all of them take.
    """
    split = split_of(source)
    if split is None or isinstance(split, SharedSampler | BucketShare):
        return 1
    return split.num_replicas


def as_given(sampler: Any) -> Any:
    """Return the sampler that the user gave, where an :class:`OwnSplit` stands for it."""
    return sampler.source if isinstance(sampler, OwnSplit) else sampler


def check_fit(
    sampler: object,
    batch_sampler: object,
    samples: int | None,
    batch_size: int | None,
    *,
    drop_last: bool,
) -> None:
    """Raise an error if one of our own samplers was made for other batches, or other ``samples``.

    ``samples``: their number in the dataset; None: it has no length.
    """
    if isinstance(sampler, SharedSampler):
        sampler.check_loader(batch_size, drop_last=drop_last)
    if isinstance(batch_sampler, BucketBatchSampler):
        batch_sampler.check_dataset(samples)


def share_in(source: object) -> SharedSampler | None:
    """Return the :class:`SharedSampler` in a sampler or batch sampler; None: there is none."""
    share = sampler_in(source) if isinstance(source, BatchSampler) else source
    return share if isinstance(share, SharedSampler) else None


def deciding(source: object) -> object:
    """Return the object that decides the order: the one with a state to save, else the sampler.

    Batch samplers of libraries may have their dataset in the place of a sampler: they decide.
    """
    share = share_in(source)
    source = source if share is None else share.source
    inner = sampler_in(source)
    by_itself = type(source) is not BatchSampler and hasattr(inner, "__getitem__")
    return source if inner is None or by_itself or hasattr(source, "state_dict") else inner


# -- orders that are known before they are drawn ---------------------------------------------------


def epoch_order(
    source: object, epoch: int | None = None, start: int = 0
) -> EpochOrder | BucketOrder | None:
    """Return the plan that a batch sampler will follow in an epoch; None: it is not known ahead.

    It is known for batches of a ``ShuffleSampler``, ``BlockShuffleSampler`` or
    ``SequentialSampler``, shared among ranks or not, and for a :class:`BucketBatchSampler`.
    ``epoch``: if the sampler is set to another one, the plan is None. Default: the one that is set.
    ``start``: samples of all ranks that are skipped.
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
"""Samplers with an order fixed at the start of an epoch; SubsetRandomSampler reads as it goes."""


def is_drawn_at_start(source: object) -> bool:
    """Return whether the order of an epoch is fixed when it begins, so that no step can change it.

    ``source``: a batch sampler, or a sampler. It is so for most of torch's own and those of this
    package; a sampler of the user's may depend on what the training writes. One that draws from a
    ``generator`` of the user's as it goes leaves it where torch does, if the epoch is broken off.
    """
    sampler = _grouped_in(source)
    draws = type(sampler) is RandomSampler and sampler.generator is not None
    return type(sampler) in _DRAWN_AT_START and not (draws and may_repeat(sampler))


def may_repeat(source: object) -> bool:
    """Return whether an order may have an index twice, as far as is known of its sampler."""
    sampler = _grouped_in(source)
    if type(sampler) is RandomSampler:
        return sampler.replacement or sampler.num_samples > len(sampler.data_source)
    return type(sampler) not in _DRAWN_AT_START or type(sampler) is WeightedRandomSampler


def draws_at_start(source: object) -> bool:
    """Return whether an epoch makes all draws from global generators before its first index."""
    return is_drawn_at_start(source) or type(_grouped_in(source)) is SubsetRandomSampler


def _grouped_in(source: object) -> object:
    share = share_in(source)
    source = source if share is None else share.source
    known = type(source) in (BatchSampler, BucketBatchSampler, RankBatchSampler)
    return sampler_in(source) if known else source


# -- indices as arrays -----------------------------------------------------------------------------


def index_batches(batch_sampler: BatchSampler) -> Iterator[Any]:
    """Yield the batches of torch's own; as int64 arrays where that gives the same indices.

    Python integers cost more than copying a row does. For torch's own samplers that draw an epoch
    at its start, and for those of this module, the same indices are computed as one array; any
    other sampler is iterated as usual.
    """
    plan = epoch_order(batch_sampler)
    if plan is not None:
        yield from plan.batches()
        return
    sampler, size = batch_sampler.sampler, batch_sampler.batch_size
    order = _drawn_order(sampler)
    if order is None:
        yield from batch_sampler
        return
    full = len(order) - len(order) % size
    yield from parts_of(order, cut(full, size))
    if type(sampler) is RandomSampler and sampler.generator is not None:
        # torch draws a second permutation for a remainder, and then takes nothing of it.
        drawn_permutation(len(order), sampler.generator)
    if full < len(order) and not batch_sampler.drop_last:
        yield from parts_of(order, [(full, len(order))])


def _drawn_order(sampler: object) -> Ints | None:
    """Return the order that a sampler of torch's draws at its start; None for all others."""
    if type(sampler) is RandomSampler and not sampler.replacement:
        length, generator = len(sampler.data_source), sampler.generator
        if sampler.num_samples != length:
            return None
        if generator is None:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        return drawn_permutation(length, generator)
    if type(sampler) is WeightedRandomSampler:
        drawn: Ints = torch.multinomial(
            sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator
        ).numpy()
        return drawn
    return np.fromiter(sampler, np.int64) if type(sampler) is DistributedSampler else None

"""Batches of samples of like length, so that little of them is padding, shared evenly by ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.order.epoch_order import epoch_permutation, parts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints: TypeAlias = NDArray[np.int64]

Cost: TypeAlias = Literal["linear", "quadratic"]
_POWERS: Final = {"linear": 1.0, "quadratic": 2.0}
_BALANCED: Final = 4096
"""Steps whose batches are given to ranks by what each has had; those of the others are nearly of
one cost, and go in turn."""
_ORDER_OF_GROUPS: Final = 0x5BD1E995
"""Mixed into the seed, as the order of batches is drawn apart from that of samples."""


def checked_lengths(lengths: Sequence[int] | NDArray[Any] | torch.Tensor) -> Ints:
    """Return lengths as int64 [samples].

    Raises:
        DatasetError: They are no whole numbers from 0 on, or not one for each sample.
    """
    found = np.asarray(lengths)
    if found.ndim != 1 or (found.dtype.kind not in "iu" and len(found)):
        raise DatasetError(
            f"lengths has the shape {found.shape} and numbers of type {found.dtype}; give a whole "
            "number for each sample, such as len(sample), or the frames of a recording."
        )
    found = found.astype(np.int64)
    if len(found) and found.min() < 0:
        at = int(found.argmin())
        raise DatasetError(f"lengths[{at}] is {found[at]}; a length is a whole number from 0 on.")
    return found


def check_whole(**values: int | None) -> None:
    """Refuse a number that is none from 1 on; None is left out.

    Raises:
        OptionsError: One of them is no such number.
    """
    for name, value in values.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and not (whole and value >= 1):
            raise OptionsError(f"{name} is {value!r}; give a whole number, at least 1.")


def check_fits(lengths: Ints, tokens: int, remedy: str) -> None:
    """Refuse samples that are longer than a batch may be.

    Raises:
        DatasetError: There are some; the message names the first and ends with ``remedy``.
    """
    above = np.flatnonzero(lengths > tokens)
    if len(above):
        more = f", and so are {len(above) - 1} others" if len(above) > 1 else ""
        raise DatasetError(
            f"Sample {above[0]} has the length {lengths[above[0]]}, above tokens={tokens}{more}. "
            f"{remedy}"
        )


def shuffled_within(classes: NDArray[Any], seed: int, epoch: int) -> Ints:
    """Return all samples by class, in an order within each that (seed, epoch) stand for."""
    drawn = epoch_permutation(len(classes), seed, epoch)[:]
    return drawn[np.argsort(classes[drawn], kind="stable")]


class BucketBatchSampler(BatchSampler):
    """Batches of samples of like length, each sample once an epoch, equally many on each rank.

    Samples are put into buckets by their length: in one, the shortest is no more than ``padding``
    shorter than the longest. Each epoch draws anew, from (seed, epoch), which samples of a bucket
    come together, and the order of the batches. What does not fill the last batch of a bucket goes
    into one with samples of the next. So of a padded batch at most ``padding`` is padding, about
    half of that on average, and more where a bucket does not fill a batch. That is the randomness:
    samples of very different length are never in one batch, and as many batches in a row as there
    are ranks are of like length, so that no rank waits for one with longer samples.

    The number of batches is the same in each epoch and on each rank. What is left for the last step
    is cut into smaller batches, one for each rank. Batches of a step are given to ranks so that the
    costs of an epoch come out even. A training may go on within an epoch, on another number of
    ranks, too, with every sample once.

    Ranks are those of ``torch.distributed`` when an epoch begins, unless they are given. With
    torch's own DataLoader in Lightning, set ``Trainer(use_distributed_sampler=False)``.

    Args:
        lengths: Length of each sample, whole numbers [samples]: tokens, frames, characters.
        tokens: A batch has ``samples * longest <= tokens``, per rank.
        batch_size: Samples of a batch at most, per rank. Give this, ``tokens``, or both.
        padding: Share of a batch of one bucket that is padding at most, above 0 and below 1.
        cost: What a batch costs, for the balance among ranks: ``"linear"`` samples * longest,
            ``"quadratic"`` samples * longest ** 2.
        together: Batches in a row that are of like length. Default: the number of ranks. With
            ``together=4``, 4 ranks, 2 ranks that accumulate 2 batches and 1 that accumulates 4
            train on the same samples in each optimizer step.
        drop_last: Leave out what does not fill a step, in place of smaller batches.
        seed: Seed of the run.
        num_replicas: Ranks. Default: see above.
        rank: This one.

    Raises:
        DatasetError: Lengths are negative or no whole numbers, or a sample is longer than
            ``tokens``.
        OptionsError: Another argument has an impossible value, or, when an epoch begins, there are
            fewer samples than ranks.

    Example:
        >>> list(BucketBatchSampler([3, 9, 9, 3, 3], tokens=18))
        [[2, 1], [4, 3, 0]]
    """

    sampler: BucketShare
    """What has this rank's share of the samples."""

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any] | torch.Tensor,
        *,
        tokens: int | None = None,
        batch_size: int | None = None,
        padding: float = 0.05,
        cost: Cost = "linear",
        together: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        check_whole(
            tokens=tokens, batch_size=batch_size, together=together, num_replicas=num_replicas
        )
        if tokens is None and batch_size is None:
            raise OptionsError("Give BucketBatchSampler tokens=, batch_size=, or both.")
        if not isinstance(padding, float) or not 0 < padding < 1:
            raise OptionsError(f"padding is {padding!r}; give a share above 0 and below 1.")
        if cost not in _POWERS:
            raise OptionsError(f"cost is {cost!r}; allowed are {', '.join(map(repr, _POWERS))}.")
        if rank is not None and not 0 <= rank < (num_replicas or 0):
            raise OptionsError(f"rank is {rank!r}; with num_replicas it is one from 0 on below it.")
        found = checked_lengths(lengths)
        if tokens is not None:
            check_fits(found, tokens, "Cut such samples, leave them out, or give more tokens.")
        self.batch_size = batch_size  # type: ignore[assignment]  # as SizeWatch and planners read it
        self.drop_last = drop_last
        self.tokens = tokens
        buckets = Buckets(found, tokens, batch_size, padding, _POWERS[cost], seed)
        given = None if num_replicas is None else (rank or 0, num_replicas)
        self.sampler = BucketShare(buckets, together, drop_last=drop_last, given=given)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``, counted from 0; loaders and Lightning call it."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return len(self.sampler.order)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.sampler.order.batches():
            yield batch.tolist()


class BucketShare(DistributedSampler[Any]):
    """One rank's share of the samples of a :class:`BucketBatchSampler`, batch by batch.

    Lightning puts no sampler of its own in the place of a ``DistributedSampler``, and sets its
    epoch.
    """

    def __init__(
        self,
        buckets: Buckets,
        together: int | None,
        *,
        drop_last: bool,
        given: tuple[int, int] | None,
    ) -> None:
        # Not that of the base class, which asks for the ranks where they may not be known yet.
        self.buckets, self.together, self.drop_last = buckets, together, drop_last
        self.seed, self.epoch, self.shuffle, self._given = buckets.seed, 0, True, given

    @property
    def _place(self) -> tuple[int, int]:
        if self._given is not None:
            return self._given
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 1
        return distributed.get_rank(), distributed.get_world_size()

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This process among ``num_replicas``."""
        return self._place[0]

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Processes that share the epoch."""
        return self._place[1]

    @property
    def order(self) -> BucketOrder:
        """The plan of this rank in the epoch that was set last."""
        rank, ranks = self._place
        return BucketOrder(
            buckets=self.buckets,
            epoch=self.epoch,
            together=self.together or ranks,
            rank=rank,
            world_size=ranks,
            drop_last=self.drop_last,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what the order rests on beside (seed, epoch): how many batches are together."""
        return {"together": self.together or self.num_replicas}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the order of a run that was saved, maybe on another number of ranks."""
        self.together = int(state_dict["together"])

    def __len__(self) -> int:
        return sum(map(len, self.order.batches()))

    def __iter__(self) -> Iterator[int]:
        for batch in self.order.batches():
            yield from batch.tolist()


class _Epoch(NamedTuple):
    """All batches of an epoch, over all ranks."""

    samples: Ints
    """[samples]; batch by batch."""
    edges: Ints
    """[batches + 1]; where in ``samples`` each batch begins, and the last one ends."""


class Buckets:
    """Which samples are of like length, and how batches of them are cut."""

    def __init__(
        self,
        lengths: Ints,
        tokens: int | None,
        batch_size: int | None,
        padding: float,
        power: float,
        seed: int,
    ) -> None:
        self.lengths, self.power, self.seed = lengths, power, seed
        floored = np.maximum(lengths, 1)
        longest = floored.max(initial=1)
        # Buckets are numbered from that of the longest samples on.
        step = max(-math.log1p(-padding), math.log(longest) / 2**15)
        self._bucket = (np.log(longest / floored) / step).astype(np.uint16)
        counts = np.bincount(self._bucket)
        highest = np.zeros(len(counts), np.int64)
        np.maximum.at(highest, self._bucket, floored)
        self._cuts = _cuts(counts, highest, tokens, batch_size)
        self._known: dict[tuple[int, int], _Epoch] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}

    def epoch(self, number: int, together: int) -> _Epoch:
        """Return the batches of an epoch, in which so many in a row are of like length."""
        key = number, together
        if key not in self._known:
            while len(self._known) > 1:  # the one that was asked for first goes
                del self._known[next(iter(self._known))]
            self._known[key] = self._drawn(number, together)
        return self._known[key]

    def _drawn(self, number: int, together: int) -> _Epoch:
        samples = shuffled_within(self._bucket, self.seed, number)
        batches = len(self._cuts) - 1
        groups = -(-batches // together)
        order = epoch_permutation(groups, self.seed ^ _ORDER_OF_GROUPS, number)[:]
        sizes = np.full(groups, together, np.int64)
        if groups:  # the group that comes last is the one that is not full
            sizes[order[-1]] = batches - together * (groups - 1)
        order = _ranges(np.cumsum(sizes)[order] - sizes[order], sizes[order])
        sizes = np.diff(self._cuts)[order]
        samples = samples[_ranges(self._cuts[:-1][order], sizes)]
        return _Epoch(samples, np.concatenate([[0], np.cumsum(sizes)]))


def _cuts(counts: Ints, highest: Ints, tokens: int | None, batch_size: int | None) -> Ints:
    """Return where batches of samples begin and end that are ordered by bucket.

    A batch has as many samples as it may have of the longest in the bucket where it begins.
    """
    cuts, at = [0], 0
    for end, longest in zip(np.cumsum(counts).tolist(), highest.tolist(), strict=True):
        fit = math.inf if tokens is None else tokens // max(longest, 1)
        rows = int(min(fit, batch_size or math.inf))
        while at < end:
            at += rows
            cuts.append(at)
    cuts[-1] = int(counts.sum())  # the last batch may have fewer
    return np.array(cuts, np.int64)


def _ranges(starts: Ints, sizes: Ints) -> Ints:
    """Return ``start, start + 1, ...`` for each start, so many as its size, one after the other."""
    ends = np.cumsum(sizes)
    found: Ints = np.arange(sizes.sum()) + np.repeat(starts - (ends - sizes), sizes)
    return found


@dataclass(frozen=True, kw_only=True)
class BucketOrder:
    """Which batches of buckets this rank reads in one epoch, and in which order.

    It is asked as an :class:`EpochOrder` is.
    """

    buckets: Buckets
    epoch: int = 0
    """Epoch, counted from 0."""
    together: int = 1
    """Batches in a row that are of like length."""
    drop_last: bool = False
    """Leave out what does not fill a step."""
    equal_counts: bool = True
    """Every rank has as many batches, in any case."""
    rank: int = 0
    """This process among ``world_size``."""
    world_size: int = 1
    """Processes that share the epoch."""
    start: int = 0
    """Samples of this epoch, over all ranks, that were delivered before; they are skipped."""

    def __len__(self) -> int:
        """Batches of this rank that are still to come."""
        return (len(self._edges) - 1) // self.world_size

    def batches(self) -> Iterator[Ints]:
        """Yield the indices of each batch, int64, from ``start`` on."""
        return parts_of(self.samples(), map(self._bounds, range(len(self))))

    def batch(self, number: int) -> Ints:
        """Return the indices of batch ``number`` of this rank, int64; IndexError without one."""
        if not 0 <= number < len(self):
            raise IndexError(f"There is no batch {number} of {len(self)}.")
        begin, end = self._bounds(number)
        return self.samples()[begin:end]

    def samples(self) -> Ints:
        """Return the order of all samples of the epoch, over all ranks."""
        return self._epoch.samples

    def samples_before(self, batches: int) -> int:
        """Return how many samples of the epoch all ranks have had after so many batches of each."""
        return int(self._edges[min(batches * self.world_size, len(self._edges) - 1)])

    def _bounds(self, number: int) -> tuple[int, int]:
        begin, end = self._edges[self._mine[number] : self._mine[number] + 2].tolist()
        return begin, end

    @cached_property
    def _epoch(self) -> _Epoch:
        return self.buckets.epoch(self.epoch, self.together)

    @cached_property
    def _whole(self) -> Ints:
        """Where batches of all ranks begin and end in the whole epoch, step by step."""
        return self._even(self._epoch.edges)

    @cached_property
    def _begun(self) -> int | None:
        """Batches of the whole epoch before ``start``; None: no step of it ends there."""
        at = int(np.searchsorted(self._whole, self.start))
        ends = at < len(self._whole) and self._whole[at] == self.start
        return at if ends and at % self.world_size == 0 else None

    @cached_property
    def _edges(self) -> Ints:
        """Where batches of all ranks begin and end, from ``start`` on, step by step."""
        if self._begun is not None:
            return self._whole[self._begun :]
        # Steps of other ranks ended here, maybe within a batch.
        edges = self._epoch.edges
        return self._even(np.concatenate([[self.start], edges[edges > self.start]]))

    @cached_property
    def _mine(self) -> Ints:
        """[steps]; numbers of this rank's batches among those of ``_edges``."""
        if self._begun is None:
            return self._shared(self._edges)
        return self._shared(self._whole)[self._begun // self.world_size :] - self._begun

    def _even(self, edges: Ints) -> Ints:
        """Return the edges of as many batches as make whole steps."""
        batches = len(edges) - 1
        rest = batches % self.world_size
        if rest == 0 or self.drop_last:
            return edges[: batches - rest + 1]
        missing = self.world_size - rest
        sizes = np.diff(edges)
        spare = np.cumsum((sizes - 1)[::-1])
        if spare[-1] < missing:
            raise OptionsError(
                f"{sizes.sum()} samples cannot make {self.world_size} batches, one for each rank. "
                "Use fewer ranks, or drop_last=True."
            )
        # The last batches, as few as have samples enough, are cut into more.
        last = max(rest, int(np.searchsorted(spare, missing)) + 1)
        sizes = sizes[-last:]
        parts = np.ones(last, np.int64)
        for _ in range(missing):
            parts[np.argmax(np.where(sizes > parts, sizes / parts, 0))] += 1
        tail = [
            begin + size * np.arange(count) // count
            for begin, size, count in zip(edges[-last - 1 : -1], sizes, parts, strict=True)
        ]
        return np.concatenate([edges[: -last - 1], *tail, edges[-1:]])

    def _shared(self, edges: Ints) -> Ints:
        """Return [steps]; which batch of each step is that of this rank."""
        numbers = np.arange(len(edges) - 1).reshape(-1, self.world_size)
        if self.world_size == 1 or not len(numbers):
            return numbers[:, 0]
        lengths = self.buckets.lengths[self.samples()[: edges[-1]]]
        longest = np.maximum.reduceat(lengths, edges[:-1])
        costs = np.diff(edges) * np.maximum(longest, 1.0) ** self.buckets.power
        costs = costs.reshape(numbers.shape)
        dearest = np.argsort(-costs, axis=1, kind="stable")
        costs = np.take_along_axis(costs, dearest, axis=1)
        by_spread = np.argsort(costs[:, -1] - costs[:, 0], kind="stable")
        # Which place in a step, by cost, is this rank's: first of those where it matters most.
        place = np.empty(len(numbers), np.int64)
        place[by_spread[::2]], place[by_spread[1::2]] = self.rank, self.world_size - 1 - self.rank
        loads = np.zeros(self.world_size)
        for step in by_spread[:_BALANCED].tolist():
            who = np.argsort(loads, kind="stable")  # who has had least gets the dearest batch
            loads[who] += costs[step]
            place[step] = np.flatnonzero(who == self.rank)[0]
        steps = np.arange(len(numbers))
        mine: Ints = numbers[steps, dearest[steps, place]]
        return mine

"""Batches of samples of like length, so that little of them is padding, shared evenly by ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.order.epoch_order import (
    KeepsEpochs,
    Lengths,
    Rank,
    SharedOrder,
    check_whole,
    checked_lengths,
    edges_of,
    epoch_permutation,
    rank_now,
    reordered,
    shuffled_within,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.order.epoch_order import Ints

Cost: TypeAlias = Literal["linear", "quadratic"]
_POWERS: Final = {"linear": 1.0, "quadratic": 2.0}
_ORDER_OF_GROUPS: Final = 0x5BD1E995
"""Mixed into the seed, as the order of batches is drawn apart from that of samples."""
_BY_LOAD: Final = 4096
"""Steps whose batches are given to ranks by what each has had; those of the others are nearly of
one cost, and go in turn."""


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
    costs of an epoch come out even, unless, with ``batch_size`` alone, one of a few steps costs too
    much. A training may go on within an epoch, on other ranks, too, with every sample once.

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
        lengths: Lengths,
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
        if isinstance(lengths, Sampler):
            raise OptionsError(
                "Lightning makes the batch sampler of a prediction anew, in the order of the "
                "dataset, which BucketBatchSampler does not have. Give prediction a loader with "
                "batch_size=."
            )
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
        remedy = "Cut such samples, leave them out, or give more tokens."
        found = checked_lengths(lengths, tokens, remedy)
        self.batch_size = batch_size  # type: ignore[assignment]  # as CountedBatches and planners read it
        self.drop_last, self.tokens = drop_last, tokens
        buckets = Buckets(found, tokens, batch_size, padding, _POWERS[cost], seed)
        given = None if num_replicas is None else Rank(rank or 0, num_replicas)
        plan = BucketOrder(buckets=buckets, drop_last=drop_last)
        self.sampler = BucketShare(plan, together, given)

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

    Lightning leaves a ``DistributedSampler`` where it is, and sets its epoch.
    """

    def __init__(self, plan: BucketOrder, together: int | None, given: Rank | None) -> None:
        # Not that of the base class, which asks for the ranks where they may not be known yet.
        self._plan, self._given, self.together = plan, given, together
        self.seed, self.epoch, self.shuffle = plan.buckets.seed, 0, True
        self.drop_last = plan.drop_last

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This process among ``num_replicas``."""
        return self.order.rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Processes that share the epoch."""
        return self.order.world_size

    @property
    def order(self) -> BucketOrder:
        """The plan of this rank in the epoch that was set last."""
        rank, ranks = self._given or rank_now()
        together = self.together or ranks
        plan = replace(self._plan, epoch=self.epoch, together=together)
        return replace(plan, rank=rank, world_size=ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return what the order rests on beside (seed, epoch): how many batches are together."""
        return {"together": self.order.together}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the order of a run that was saved, maybe on another number of ranks."""
        self.together = int(state_dict["together"])

    def __len__(self) -> int:
        return sum(map(len, self.order.batches()))

    def __iter__(self) -> Iterator[int]:
        for batch in self.order.batches():
            yield from batch.tolist()


@dataclass(eq=False)
class Buckets(KeepsEpochs):
    """Which samples are of like length, and how batches of them are cut."""

    lengths: Ints
    tokens: int | None
    batch_size: int | None
    padding: float
    power: float
    """Of the length, in what a batch costs."""
    seed: int

    def __post_init__(self) -> None:
        floored = np.maximum(self.lengths, 1)
        longest = floored.max(initial=1)
        # Buckets are numbered from that of the longest samples on.
        step = max(-math.log1p(-self.padding), math.log(longest) / 2**15)
        self._bucket = (np.log(longest / floored) / step).astype(np.uint16)
        ends = np.cumsum(np.bincount(self._bucket))
        highest = np.ones(len(ends), np.int64)
        np.maximum.at(highest, self._bucket, floored)
        # A batch has as many samples as it may have of the longest in the bucket where it begins.
        rows = np.full(len(ends), self.batch_size or len(floored))
        if self.tokens is not None:
            rows = np.minimum(rows, self.tokens // highest)
        cuts = [0]
        for end, most in zip(ends.tolist(), rows.tolist(), strict=True):
            cuts.extend(range(cuts[-1] + most, end + most, most))
        cuts[-1] = len(floored)  # the last batch may have fewer
        self._cuts = np.array(cuts, np.int64)

    def _draw(self, *key: int) -> tuple[Ints, Ints]:
        """Return the samples of an epoch, batch by batch, and where these begin and the last ends.

        The key is the epoch, and how many batches in a row are of like length.
        """
        epoch, together = key
        samples = shuffled_within(self._bucket, self.seed, epoch)
        batches = len(self._cuts) - 1
        groups = -(-batches // together)
        order = epoch_permutation(groups, self.seed ^ _ORDER_OF_GROUPS, epoch)[:]
        sizes = np.full(groups, together, np.int64)
        sizes[order[-1:]] -= groups * together - batches  # what comes last is not full
        numbers, _ = reordered(edges_of(sizes), order)
        places, edges = reordered(self._cuts, numbers)
        return samples[places], edges


@dataclass(frozen=True, kw_only=True)
class BucketOrder(SharedOrder):
    """Which batches of buckets a rank reads in one epoch: as many as any other, in any case."""

    buckets: Buckets
    together: int = 1
    """Batches in a row that are of like length."""

    def __len__(self) -> int:
        edges, before = self._steps
        return (len(edges) - 1 - before) // self.world_size

    def samples(self) -> Ints:
        """Return the order of all samples of the epoch, over all ranks."""
        return self.buckets.drawn(self.epoch, self.together)[0]

    def samples_before(self, batches: int) -> int:
        """Return how many samples of the epoch all ranks have had after so many batches of each."""
        edges, before = self._steps
        return int(edges[min(before + batches * self.world_size, len(edges) - 1)])

    def _bounds(self, number: int) -> tuple[int, int]:
        edges, before = self._steps
        step = before // self.world_size + number
        own = step * self.world_size + int(self._places[step])
        return int(edges[own]), int(edges[own + 1])

    @cached_property
    def _steps(self) -> tuple[Ints, int]:
        """Return the edges of the batches of all ranks, step by step, and how many were before."""
        edges = self.buckets.drawn(self.epoch, self.together)[1]
        whole = self._even(edges)
        before = int(np.searchsorted(whole, self.start))
        if before % self.world_size == 0 and self.start in whole[before : before + 1]:
            return whole, before
        # Steps of other ranks ended here, maybe within a batch.
        return self._even(np.concatenate([[self.start], edges[edges > self.start]])), 0

    def _even(self, edges: Ints) -> Ints:
        """Return the edges of as many batches as make whole steps."""
        rest = (len(edges) - 1) % self.world_size
        if rest == 0 or self.drop_last:
            return edges[: len(edges) - rest]
        missing, sizes = self.world_size - rest, np.diff(edges)
        spare = np.cumsum((sizes - 1)[::-1])
        if spare[-1] < missing:
            raise OptionsError(
                f"{sizes.sum()} samples cannot make {self.world_size} batches, one for each rank. "
                "Use fewer ranks, or drop_last=True."
            )
        # The last batches, as few as have samples enough, are cut into more.
        last = max(rest, int(np.searchsorted(spare, missing)) + 1)
        begins, sizes, parts = edges[-last - 1 : -1], sizes[-last:], np.ones(last, np.int64)
        for _ in range(missing):
            parts[np.argmax(sizes / parts)] += 1
        cut = zip(begins, sizes, parts, strict=True)
        tail = [begin + size * np.arange(count) // count for begin, size, count in cut]
        return np.concatenate([edges[: -last - 1], *tail, edges[-1:]])

    @cached_property
    def _places(self) -> Ints:
        """Return which batch of each step is that of this rank [steps]."""
        edges = self._steps[0]
        if self.world_size == 1 or len(edges) == 1:
            return np.zeros(len(edges) - 1, np.int64)
        lengths = self.buckets.lengths[self.samples()[: edges[-1]]]
        longest = np.maximum.reduceat(lengths, edges[:-1])
        costs = np.diff(edges) * np.maximum(longest, 1.0) ** self.buckets.power
        return dealt(costs.reshape(-1, self.world_size))[:, self.rank]


def dealt(costs: NDArray[np.float64]) -> Ints:
    """Return the number of the batch that each rank gets of each step, int64 [steps, ranks].

    By the costs of the batches of each step [steps, ranks]. What ranks have in the end differs by
    little, unless the batches of one step differ by more than those of all others together.
    """
    dearest = np.argsort(-costs, axis=1, kind="stable")
    by_spread = np.argsort(np.min(costs, axis=1) - np.max(costs, axis=1), kind="stable")
    given = dearest.copy()
    given[by_spread[1::2]] = dearest[by_spread[1::2], ::-1]
    loads = np.take_along_axis(costs, given, axis=1)[by_spread[_BY_LOAD:]].sum(axis=0)
    for step in by_spread[:_BY_LOAD]:
        # Who has least so far gets the dearest batch.
        given[step, np.argsort(loads, kind="stable")] = dearest[step]
        loads += costs[step, given[step]]
    return given

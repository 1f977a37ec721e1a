"""Samples of different lengths: batches of samples of like length, and packs of documents."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, Sampler

from lightning_fastdata.errors import (
    DatasetError,
    OptionsError,
    check,
    check_among,
    checked_seed,
    is_number,
)
from lightning_fastdata.order.epoch_order import (
    Counted,
    Ints,
    Rank,
    SharedOrder,
    check_rank,
    check_whole,
    dataset_length,
    edges_of,
    epoch_permutation,
    rank_now,
    reordered,
    whole,
)
from lightning_fastdata.types import has_own_order

Lengths: TypeAlias = Sequence[int] | NDArray[Any] | torch.Tensor
"""Length of each sample, whole numbers [samples]."""
Cost: TypeAlias = Literal["linear", "quadratic"]
_POWERS: Final = {"linear": 1.0, "quadratic": 2.0}
_ORDER_OF_GROUPS: Final = 0x5BD1E995
"""Number mixed into the seed, so that batches are ordered independently of their samples."""
_BY_LOAD: Final = 4096
"""Number of steps, those with the most unequal batches, whose dearest batch goes to the rank with
the least cost so far. In the other steps batches cost nearly the same, and are dealt in turn."""
IGNORED: Final = -100
"""Label that no loss counts: ``ignore_index`` of ``torch.nn.functional.cross_entropy``."""
Packed: TypeAlias = dict[str, torch.Tensor]
"""Documents one after the other, see :class:`PackedDataset`."""


def checked_lengths(lengths: Lengths, tokens: int | None, remedy: str) -> Ints:
    """Return lengths as int64 [samples].

    Raises:
        DatasetError: They are not whole numbers from 0 on in one dimension, or some are above
            ``tokens``, if that is given. The message then names the first, and ends with
            ``remedy``.
    """
    found = np.asarray(lengths)
    if found.ndim != 1 or (found.dtype.kind not in "iu" and len(found)):
        raise DatasetError(
            f"lengths has the shape {found.shape} and numbers of type {found.dtype}; give a whole "
            "number for each sample, such as len(sample), or the frames of a recording."
        )
    for at in np.flatnonzero(found < 0)[:1]:
        raise DatasetError(f"lengths[{at}] is {found[at]}; a length is a whole number from 0 on.")
    above = np.flatnonzero(found > (math.inf if tokens is None else tokens))
    if len(above):
        more = f", and so are {len(above) - 1} others" if len(above) > 1 else ""
        raise DatasetError(
            f"Sample {above[0]} has the length {found[above[0]]}, above tokens={tokens}{more}. "
            f"{remedy}"
        )
    return found.astype(np.int64)


def shuffled_within(classes: NDArray[Any], seed: int, epoch: int) -> Ints:
    """Return all samples sorted by class, in an order within each drawn from (seed, epoch)."""
    drawn = epoch_permutation(len(classes), seed, epoch)[:]
    return drawn[np.argsort(classes[drawn], kind="stable")]


class KeepsEpochs:
    """Draws each epoch once. It keeps the last two, as loaders read ahead, and pickles neither."""

    _kept: dict[Any, tuple[Ints, ...]] = {}  # noqa: RUF012  # never changed, but replaced

    def drawn(self, *key: int) -> tuple[Ints, ...]:
        """Return what ``_draw`` returns for an epoch."""
        kept = self._kept  # read once, as other threads may draw another epoch
        if key not in kept:
            self._kept = kept = {**dict([*kept.items()][-1:]), key: self._draw(*key)}
        return kept[key]

    def _draw(self, *key: int) -> tuple[Ints, ...]:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}


# -- batches of samples of like length -------------------------------------------------------------


class BucketBatchSampler(BatchSampler):
    """Batches of samples of like length, each sample once an epoch, equally many on each rank.

    Samples are put into buckets by their length: the shortest of a bucket is no more than
    ``padding`` shorter than the longest. Each epoch draws anew, from (seed, epoch), which samples
    of a bucket come together, and the order of the batches. The rest of a bucket that does not fill
    a batch shares one with samples of the next bucket. So at most ``padding`` of a padded batch is
    padding, about half of that on average, and more where a bucket does not fill a batch. This
    limits the randomness: samples of very different lengths are never in one batch, and as many
    consecutive batches as there are ranks have like lengths, so that no rank waits for another with
    longer samples.

    The number of batches is the same in each epoch and on each rank. The samples left for the last
    step are cut into smaller batches, one for each rank; where these are of one sample each, and do
    not divide among the ranks, an OptionsError says so. The batches of a step are given to ranks
    so that the costs of an epoch come out even, unless, with ``batch_size`` alone, one of a few
    steps costs too much. A training may go on within an epoch, with another number of ranks, too,
    and takes every sample once.

    The ranks are those of ``torch.distributed`` when an epoch begins, unless they are given. With
    torch's own DataLoader in Lightning, set ``Trainer(use_distributed_sampler=False)``.

    Args:
        lengths: Length of each sample, whole numbers [samples]: tokens, frames, characters.
        tokens: Most tokens of a padded batch, per rank: ``samples * longest <= tokens``.
        batch_size: Most samples of a batch, per rank. Give this, ``tokens``, or both.
        padding: Largest share of padding in a batch of one bucket, above 0 and below 1.
        cost: Cost of a batch, for the balance among ranks: ``"linear"`` is samples * longest,
            ``"quadratic"`` is samples * longest ** 2.
        together: Number of consecutive batches of like length. Default: the number of ranks. With
            ``together=4``, 4 ranks, 2 ranks that accumulate 2 batches and 1 rank that accumulates 4
            train on the same samples in each optimizer step.
        drop_last: Leave out samples that do not fill a step, in place of smaller batches.
        seed: Seed of the run.
        num_replicas: Number of ranks. Default: see above.
        rank: Number of this rank.

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
    """Sampler with this rank's share of the samples."""

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
        if not is_number(padding, above=0) or padding >= 1:
            raise OptionsError(f"padding is {padding!r}; give a share above 0 and below 1.")
        check("drop_last", drop_last, isinstance(drop_last, bool), "True and False")
        check_among("cost", cost, _POWERS)
        if rank is not None and num_replicas is None:
            raise OptionsError(f"rank is {rank!r}, and there is no num_replicas. Give both.")
        if rank is not None:
            check_rank(rank, num_replicas or 0)
        remedy = "Cut such samples, leave them out, or give more tokens."
        found = checked_lengths(lengths, tokens, remedy)
        self.batch_size = batch_size  # type: ignore[assignment]  # as CountedBatches and planners read it
        self.drop_last, self.tokens = drop_last, tokens
        buckets = Buckets(found, tokens, batch_size, padding, _POWERS[cost], checked_seed(seed))
        given = None if num_replicas is None else Rank(rank or 0, num_replicas)
        plan = BucketOrder(buckets=buckets, drop_last=drop_last)
        self.sampler = BucketShare(plan, together, given)

    def check_dataset(self, count: int | None) -> None:
        """Raise DatasetError if a dataset has another number of samples; None: it has no length."""
        lengths = len(self.sampler.order.buckets.lengths)
        if count not in (None, lengths):
            raise DatasetError(
                f"BucketBatchSampler was given {lengths} lengths, and the dataset has {count} "
                "samples: some would never be read, or do not exist. Give one length for each."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``, counted from 0; loaders and Lightning call it."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch."""
        return len(self.sampler.order)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.sampler.order.batches():
            yield batch.tolist()


class BucketShare(DistributedSampler[Any]):
    """One rank's share of the samples of a :class:`BucketBatchSampler`, batch by batch.

    Lightning does not replace a ``DistributedSampler``, and sets its epoch.
    """

    def __init__(self, plan: BucketOrder, together: int | None, given: Rank | None) -> None:
        # No super().__init__(): it asks for the ranks, which may not be known yet.
        self._plan, self._given, self.together = plan, given, together
        self.part: Rank | None = None
        """Part of the samples that is read where ranks share one; None: each rank has its own."""
        self.seed, self.epoch, self.shuffle = plan.buckets.seed, Counted(), True
        self.drop_last = plan.drop_last

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Number of this process, below ``num_replicas``."""
        return self.order.rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Number of processes that share the epoch."""
        return self.order.world_size

    @property
    def order(self) -> BucketOrder:
        """The plan of this rank in the epoch that was set last."""
        rank, ranks = self._given or self.part or rank_now()
        together = self.together or ranks
        plan = replace(self._plan, epoch=self.epoch, together=together)
        return replace(plan, rank=rank, world_size=ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the order besides (seed, epoch): batches of like length in a row."""
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
    """Exponent of the longest length in the cost of a batch: 1 or 2."""
    seed: int

    def __post_init__(self) -> None:
        floored = np.maximum(self.lengths, 1)
        longest = floored.max(initial=1)
        # Bucket 0 has the longest samples.
        step = max(-math.log1p(-self.padding), math.log(longest) / 2**15)
        self._bucket = (np.log(longest / floored) / step).astype(np.uint16)
        ends = np.cumsum(np.bincount(self._bucket))
        highest = np.ones(len(ends), np.int64)
        np.maximum.at(highest, self._bucket, floored)
        # The number of samples of a batch is set by the longest sample of the bucket it begins in.
        rows = np.full(len(ends), self.batch_size or len(floored))
        if self.tokens is not None:
            rows = np.minimum(rows, self.tokens // highest)
        cuts = [0]
        for end, most in zip(ends.tolist(), rows.tolist(), strict=True):
            cuts.extend(range(cuts[-1] + most, end + most, most))
        cuts[-1] = len(floored)  # the last batch may have fewer
        self._cuts = np.array(cuts, np.int64)

    def _draw(self, *key: int) -> tuple[Ints, Ints]:
        """Return the samples of an epoch, batch by batch, and the edges of the batches.

        The key is the epoch, and the number of consecutive batches of like length.
        """
        epoch, together = key
        samples = shuffled_within(self._bucket, self.seed, epoch)
        batches = len(self._cuts) - 1
        groups = -(-batches // together)
        order = epoch_permutation(groups, self.seed ^ _ORDER_OF_GROUPS, epoch)[:]
        sizes = np.full(groups, together, np.int64)
        sizes[order[-1:]] -= groups * together - batches  # the last group is not full
        numbers, _ = reordered(edges_of(sizes), order)
        places, edges = reordered(self._cuts, numbers)
        return samples[places], edges


@dataclass(frozen=True, kw_only=True)
class BucketOrder(SharedOrder):
    """The batches of buckets that a rank reads in one epoch: equally many on each rank."""

    buckets: Buckets
    together: int = 1
    """Number of consecutive batches of like length."""

    def __len__(self) -> int:
        edges, before = self._steps
        return (len(edges) - 1 - before) // self.world_size

    def samples(self) -> Ints:
        """Return the order of all samples of the epoch, over all ranks."""
        return self.buckets.drawn(self.epoch, self.together)[0]

    def samples_before(self, batches: int) -> int:
        """Return how many samples of the epoch all ranks have had after ``batches`` of each."""
        edges, before = self._steps
        return int(edges[min(before + batches * self.world_size, len(edges) - 1)])

    def _bounds(self, number: int) -> tuple[int, int]:
        edges, before = self._steps
        step = before // self.world_size + number
        own = step * self.world_size + int(self._places[step])
        return int(edges[own]), int(edges[own + 1])

    @cached_property
    def _steps(self) -> tuple[Ints, int]:
        """Return the edges of the batches of all ranks, and how many come before the start."""
        edges = self.buckets.drawn(self.epoch, self.together)[1]
        whole = self._even(edges)
        before = int(np.searchsorted(whole, self.start))
        if before % self.world_size == 0 and self.start in whole[before : before + 1]:
            return whole, before
        # The epoch was interrupted on another number of ranks, maybe within a batch of now.
        return self._even(np.concatenate([[self.start], edges[edges > self.start]])), 0

    def _even(self, edges: Ints) -> Ints:
        """Return the edges of batches that make whole steps: the last ones are dropped or cut."""
        rest = (len(edges) - 1) % self.world_size
        if rest == 0 or self.drop_last:
            return edges[: len(edges) - rest]
        missing, sizes = self.world_size - rest, np.diff(edges)
        spare = np.cumsum((sizes - 1)[::-1])
        if spare[-1] < missing:
            raise OptionsError(
                f"Batches left: {len(sizes)}, of {sizes.sum()} samples. They do not divide among "
                f"{self.world_size} ranks: the last step has {rest} of them, and no {missing} more "
                "can be cut off. Use larger batches, drop_last=True, or ranks that divide them."
            )
        # As few of the last batches as have enough samples are cut into smaller ones.
        last = max(rest, int(np.searchsorted(spare, missing)) + 1)
        begins, sizes, parts = edges[-last - 1 : -1], sizes[-last:], np.ones(last, np.int64)
        for _ in range(missing):
            parts[np.argmax(sizes / parts)] += 1
        cut = zip(begins, sizes, parts, strict=True)
        tail = [begin + size * np.arange(count) // count for begin, size, count in cut]
        return np.concatenate([edges[: -last - 1], *tail, edges[-1:]])

    @cached_property
    def _places(self) -> Ints:
        """Return the number of this rank's batch within each step, int64 [steps]."""
        edges = self._steps[0]
        if self.world_size == 1 or len(edges) == 1:
            return np.zeros(len(edges) - 1, np.int64)
        lengths = self.buckets.lengths[self.samples()[: edges[-1]]]
        longest = np.maximum.reduceat(lengths, edges[:-1])
        costs = np.diff(edges) * np.maximum(longest, 1.0) ** self.buckets.power
        return dealt(costs.reshape(-1, self.world_size))[:, self.rank]


def dealt(costs: NDArray[np.float64]) -> Ints:
    """Return the number of the batch that each rank gets in each step, int64 [steps, ranks].

    ``costs``: those of the batches of each step [steps, ranks]. In the end the ranks' costs differ
    by little, unless the batches of one step differ by more than those of all others together.
    """
    dearest = np.argsort(-costs, axis=1, kind="stable")
    by_spread = np.argsort(np.min(costs, axis=1) - np.max(costs, axis=1), kind="stable")
    given = dearest.copy()
    given[by_spread[1::2]] = dearest[by_spread[1::2], ::-1]
    loads = np.take_along_axis(costs, given, axis=1)[by_spread[_BY_LOAD:]].sum(axis=0)
    for step in by_spread[:_BY_LOAD]:
        # The rank with the least cost so far gets the dearest batch.
        given[step, np.argsort(loads, kind="stable")] = dearest[step]
        loads += costs[step, given[step]]
    return given


# -- documents packed together ---------------------------------------------------------------------


def pack(
    dataset: Dataset[Any],
    tokens: int = 8192,
    *,
    lengths: Lengths | None = None,
    split: bool = True,
    seed: int = 0,
) -> PackedDataset:
    """Return a dataset whose samples are packs of the documents of another dataset.

    With ``cu_seqlens``, attention stays within a document, and the loss is the same as for the
    documents one by one: nothing is padded, and no label is predicted across documents.

    Args:
        dataset: Map-style dataset. A sample is the ids of a document, or a mapping with
            ``"input_ids"`` and maybe ``"labels"`` of the same length, not shifted.
        tokens: Most tokens of a pack.
        lengths: Length of each document [documents]. Default: each document is read once for it.
        split: Put the documents one after the other, in an order that each epoch draws, and cut
            every ``tokens`` tokens, so that all packs but the last are full. A part of a document
            is treated as a document of its own. False: keep documents whole, each in the fullest
            pack that has room for it, the longest first (best fit decreasing); each epoch draws
            which of the documents of one length goes where.
        seed: Seed of the run.

    Raises:
        DatasetError: ``dataset`` is a :class:`Mixture`, there is no length, lengths do not fit the
            dataset, or, with ``split=False``, a document is longer than a pack.
        OptionsError: ``tokens``, ``split`` or ``seed`` has an impossible value.

    Example:
        >>> packs = pack([[5, 6, 7], [8, 9]], tokens=8, split=False)
        >>> packs[0]["labels"].tolist(), packs[0]["cu_seqlens"].tolist()
        ([-100, 6, 7, -100, 9], [0, 3, 5])
    """
    tokens = whole("tokens", tokens)
    check("split", split, isinstance(split, bool), "True and False")
    if has_own_order(dataset):
        raise DatasetError(
            f"A {type(dataset).__name__} has other samples at each index in each epoch, and what "
            "is packed together is known by their lengths. Pack its parts, and mix the packs: "
            "Mixture({'a': pack(a), ...})."
        )
    count = dataset_length(dataset)
    if count is None:
        raise DatasetError(
            f"{type(dataset).__name__} has no length, so that it is not known what there is to "
            "pack. Give a map-style dataset with a __len__()."
        )
    if lengths is None:
        lengths = [len(_ids_and_labels(dataset[at], at)[0]) for at in range(count)]
    remedy = "Cut such documents, use split=True, or give more tokens."
    found = checked_lengths(lengths, None if split else tokens, remedy)
    if len(found) != count:
        raise DatasetError(f"lengths has {len(found)} numbers for {count} documents.")
    return (PackedDataset if split else _WholeDocuments)(dataset, found, tokens, checked_seed(seed))


class PackedDataset(KeepsEpochs, Dataset[Packed]):
    """The packs of :func:`pack`: sample ``i`` is pack ``i`` of the epoch that was set.

    A pack is a dict of four tensors. ``input_ids``: int64 [tokens]. ``position_ids``: int64
    [tokens], from 0 in each document, or part of one. ``labels``: int64 [tokens], not shifted,
    -100 where nothing is predicted: at least at the first token of each document.
    ``cu_seqlens``: int32 [documents + 1], where each document begins, and where the last one ends.

    Each epoch has equally many packs, in an order that is drawn, too: a data module does not
    shuffle them. Loaders of this package set the epoch; with torch's own, call :meth:`set_epoch`
    before each epoch, and do not keep workers.
    """

    has_own_order = True

    def __init__(self, dataset: Dataset[Any], lengths: Ints, tokens: int, seed: int) -> None:
        self.dataset = dataset
        self._lengths, self._tokens, self._seed = lengths, tokens, seed
        self.epoch: int = Counted()
        self._packs = -(-int(lengths.sum()) // tokens)

    def _draw(self, *epoch: int) -> tuple[Ints, Ints, Ints]:
        """Return the documents in the order of an epoch, their edges, and those of the packs."""
        documents = epoch_permutation(len(self._lengths), self._seed, *epoch)[:]
        edges = edges_of(self._lengths[documents])
        return documents, edges, np.minimum(np.arange(self._packs + 1) * self._tokens, edges[-1])

    def set_epoch(self, epoch: int) -> None:
        """Choose what is packed together in ``epoch``, counted from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of packs in an epoch."""
        return self._packs

    @property
    def waste(self) -> float:
        """Share of the packs' room that holds no token, 0 to 1."""
        return 1 - int(self._lengths.sum()) / max(1, self._packs * self._tokens)

    def __getitem__(self, index: int) -> Packed:
        """Return a pack of the epoch that was set.

        Raises:
            IndexError: There is no pack of this number.
            DatasetError: A document is not as long as ``lengths`` says, or is no row of ids.
        """
        return self.of_epoch(index, self.epoch)

    def of_epoch(self, index: int, epoch: int) -> Packed:
        """Return a pack of any epoch, as ``self[index]`` does of the one that was set."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no pack {index} of {len(self)}.")
        ids, labels = [], []
        for at, begin, end in self._pieces(index % len(self), epoch):
            own_ids, own_labels = _ids_and_labels(self.dataset[at], at)
            if len(own_ids) != self._lengths[at]:
                raise DatasetError(
                    f"Document {at} has {len(own_ids)} tokens, and lengths says "
                    f"{self._lengths[at]}. Give the lengths that the dataset returns."
                )
            ids.append(own_ids[begin:end])
            labels.append(own_labels[begin:end])
        positions = torch.cat([torch.arange(len(row)) for row in ids])
        return {
            "input_ids": torch.cat(ids),
            "position_ids": positions,
            "labels": torch.cat(labels).masked_fill(positions == 0, IGNORED),
            "cu_seqlens": _ends(positions),
        }

    def _pieces(self, number: int, epoch: int) -> Iterator[tuple[int, int, int]]:
        """Yield each document of a pack, and the bounds of the part of it that the pack holds."""
        documents, edges, packs = self.drawn(epoch)
        first, last = packs[number : number + 2].tolist()
        at = int(np.searchsorted(edges, first, side="right")) - 1
        while (begin := int(edges[at])) < last:
            end = min(last, int(edges[at + 1]))
            yield int(documents[at]), max(first - begin, 0), end - begin
            at += 1

    @staticmethod
    def collate(packs: Sequence[Packed]) -> dict[str, torch.Tensor | int]:
        """Return a batch: the documents of all packs one after the other, in one row.

        Use it as ``collate_fn``. ``input_ids``, ``position_ids`` and ``labels`` are int64
        [1, tokens], ``cu_seqlens`` is int32 [documents + 1], and ``max_seqlen``, an int, is the
        length of the longest document.
        """
        rows = ("input_ids", "position_ids", "labels")
        batch = {name: torch.cat([one[name] for one in packs])[None] for name in rows}
        ends = _ends(batch["position_ids"][0])
        return {**batch, "cu_seqlens": ends, "max_seqlen": int(ends.diff().max())}


class _WholeDocuments(PackedDataset):
    """Packs of whole documents, each in the fullest pack that has room for it."""

    def __init__(self, dataset: Dataset[Any], lengths: Ints, tokens: int, seed: int) -> None:
        super().__init__(dataset, lengths, tokens, seed)
        # Class 0 has the longest documents. Numbers of 16 bits are sorted in a tenth of the time.
        self._classes = (tokens - lengths).astype(np.min_scalar_type(tokens))
        packs = best_fit(np.sort(lengths[lengths > 0])[::-1], tokens)
        self._places = np.argsort(packs, kind="stable")
        self._edges = edges_of(np.bincount(packs))
        self._packs = len(self._edges) - 1

    def _draw(self, *epoch: int) -> tuple[Ints, Ints, Ints]:
        order = epoch_permutation(self._packs, self._seed, *epoch)[:]
        places, packs = reordered(self._edges, order)
        documents = shuffled_within(self._classes, self._seed, *epoch)[self._places[places]]
        edges = edges_of(self._lengths[documents])
        return documents, edges, edges[packs]


def _ends(positions: torch.Tensor) -> torch.Tensor:
    begins = (positions == 0).nonzero()[:, 0]
    return torch.cat([begins, torch.tensor([len(positions)])]).int()


def _ids_and_labels(document: Any, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and labels of a document, int64 [tokens] both."""
    named = document if isinstance(document, Mapping) else {"input_ids": document}
    if "input_ids" not in named:
        keys = ", ".join(map(repr, named))
        raise DatasetError(f'Document {at} has the keys {keys}; its ids are to be in "input_ids".')
    ids = labels = _row(named["input_ids"], f"input_ids of document {at}")
    if named.get("labels") is not None:
        labels = _row(named["labels"], f"labels of document {at}")
    if len(ids) != len(labels):
        raise DatasetError(
            f"labels of document {at} are {len(labels)} for {len(ids)} ids; give as many of both."
        )
    return ids, labels


def _row(given: Any, name: str) -> torch.Tensor:
    why = "text, which is to be tokenized first"
    try:
        if not isinstance(given, bytes | bytearray | str):
            row = torch.as_tensor(given)
            if row.ndim == 1 and not (row.is_floating_point() and len(row)):  # an empty [] is float
                return row.long()
            why = f"of the shape {list(row.shape)} and of numbers of type {row.dtype}"
    except (TypeError, ValueError, RuntimeError) as error:
        why = f"a {type(given).__name__} of which torch makes no tensor ({error})"
    raise DatasetError(f"{name} is {why}; give whole numbers in a row.")


def best_fit(lengths: Ints, tokens: int) -> Ints:
    """Return the number of the pack of each document, int64 [documents].

    Best fit decreasing: documents, of 1 to ``tokens`` tokens, come the longest first, and each goes
    into the pack with the least room that suffices.
    """
    numbers, packs = [], 0
    rooms: list[int] = []  # the distinct numbers of tokens that packs have room for, ascending
    having: defaultdict[int, list[int]] = defaultdict(list)  # packs by the room that is left
    for length in lengths.tolist():
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            pack = having[room].pop()
            if not having[room]:
                del rooms[place]
        else:
            room, pack, packs = tokens, packs, packs + 1
        numbers.append(pack)
        if room > length:
            if not having[room - length]:
                insort(rooms, room - length)
            having[room - length].append(pack)
    return np.array(numbers, np.int64)

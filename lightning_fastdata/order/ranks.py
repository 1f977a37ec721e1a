"""Any sampler on any number of ranks: one global order, of whose steps each rank takes its part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain, cycle, islice
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.order.checks import check_whole
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.randomness.global_generators import DrawWatch, kept_random_state
from lightning_fastdata.randomness.seeds import seed_global_generators
from lightning_fastdata.types import SetsEpoch

Indices: TypeAlias = Any
"""Of one batch: a list, a tuple or an array; of a sampler of ready batches, whatever it gives."""

_RANKS: Final = ("num_replicas", "world_size")
_SEQUENCES: Final = (list, tuple, np.ndarray)


class Step(NamedTuple):
    """What all ranks take in one step."""

    whole: tuple[Indices, ...]
    """Of all ranks, in the order of the epoch, in one piece or several."""
    own: Indices
    """Of this one."""


def ranks_of(source: object) -> int | None:
    """Return among how many ranks a sampler, or that of a batch sampler, splits itself.

    Those that do have ``rank`` and ``num_replicas``, as torch's ``DistributedSampler``, or
    ``world_size``. None: it does not.
    """
    return _split_in(source)[1]


def _split_in(source: object) -> tuple[Any, int | None]:
    for one in (source, getattr(source, "sampler", None)):
        if type(getattr(one, "rank", None)) is int:
            found = (getattr(one, name, None) for name in _RANKS)
            ranks = next((each for each in found if type(each) is int), None)
            if ranks is not None:
                return one, ranks
    return None, None


def knows_ranks(source: object) -> bool:
    """Return whether a sampler or batch sampler has each rank's part by itself."""
    return ranks_of(source) not in (None, 1) or hasattr(getattr(source, "sampler", None), "order")


def tell_samplers(source: object, epoch: int) -> None:
    """Set the epoch of a sampler, or of a batch sampler and of its sampler, where they have one."""
    for one in (source, getattr(source, "sampler", None)):
        if isinstance(one, SetsEpoch):
            one.set_epoch(epoch)


class KeyedDraws(Iterator[Any]):
    """An iterator, made by a function, whose draws from global generators are keyed.

    What it draws rests on seed and epoch alone, and what others draw does not rest on it.

    Args:
        make: Returns what is to be iterated.
        seed: Seed of the run.
        epoch: Counted from 0.
        once: All draws are made before the first item.
    """

    def __init__(
        self, make: Callable[[], Iterable[Any]], seed: int, epoch: int, *, once: bool = False
    ) -> None:
        self._make, self._key, self._once = make, (seed, epoch), once
        self._items: Iterator[Any] | None = None
        self._own: DrawWatch | None = None

    def __next__(self) -> Any:
        if self._items is not None and self._own is None:
            return next(self._items)
        with kept_random_state():
            if self._items is None or self._own is None:
                seed_global_generators(*self._key, "order")
                self._items = iter(self._make())
                self._own = None if self._once else DrawWatch()
            else:
                self._own.restore()
            try:
                return next(self._items)
            finally:
                if self._own is not None:
                    self._own.begin()


class SharedSampler(DistributedSampler[Any]):
    """One rank's part of each step of a sampler or of a batch sampler of any kind.

    All ranks iterate the whole order, which has to be the same on each. Of a sampler, a step is the
    next ``batch_size * num_replicas`` samples, of which each rank takes its slice: with the global
    batch kept, any number of ranks takes the same steps. Of a batch sampler, a step is the next
    ``num_replicas`` batches, of which each rank takes one.

    All ranks have equally many steps. What is left over at the end is left out with ``drop_last``.
    Otherwise the ranks share it, so that the batches of the last step are smaller, and differ by
    one sample at most. If fewer samples than ranks are left over, the step before gives up what is
    missing, where it can; else the first samples of the epoch are taken again, and a warning says
    how many. torch's own ``DataLoader(sampler=...)`` cuts the samples of a rank anew, so that there
    they are always taken again. Items that are no lists cannot be cut, and the first of them are
    taken again likewise.

    Lightning puts no sampler of its own in the place of a ``DistributedSampler``, and sets its
    epoch.

    ``FastDataModule`` makes one of any sampler of its training. Elsewhere give it to a loader as
    ``sampler=``, or as ``batch_sampler=`` if the source gives batches.

    Args:
        source: The sampler, or the batch sampler. Its ``set_epoch()`` is called, if it has one.
        batch_size: Samples of one rank's batch. None: ``source`` gives batches.
        num_replicas: Ranks. Default: those of torch's process group, else 1.
        rank: This one. Default: likewise.
        drop_last: Leave out what does not fill a step. Default: what ``source`` says, else False.
        seed: By which, with the epoch, draws from global generators are keyed.

    Raises:
        OptionsError: ``rank`` is none of the ranks, ``batch_size`` is no whole number from 1, or
            ``source`` is split among ranks already.
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
        group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if num_replicas is None:
            num_replicas = torch.distributed.get_world_size() if group else 1
        if rank is None:
            rank = torch.distributed.get_rank() if group else 0
        if not 0 <= rank < num_replicas:
            raise OptionsError(f"rank is {rank!r}; of {num_replicas} it is one from 0.")
        check_whole(batch_size=batch_size)
        already = ranks_of(source)
        if already is not None and already > 1:
            raise OptionsError(
                f"{type(source).__name__} gives the part of one of {already} ranks, which cannot "
                "be shared out again. Give the sampler of all samples."
            )
        everything = cast("Any", range(dataset_length(source) or 0))
        super().__init__(everything, num_replicas, rank, shuffle=False, seed=seed)
        self.source = source
        self.batch_size = batch_size
        self.drop_last = bool(
            getattr(source, "drop_last", False) if drop_last is None else drop_last
        )

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
        tell_samplers(self.source, epoch)

    def __iter__(self) -> Iterator[Any]:
        # Who puts the samples into batches anew knows no steps: none may be smaller but the last.
        items, even = self._batches(), self.gives_samples
        steps = KeyedDraws(lambda: self.steps(items, even=even), self.seed, self.epoch)
        owns = (step.own for step in steps)
        return chain.from_iterable(owns) if self.gives_samples else owns

    def __len__(self) -> int:
        """Return the samples of this rank, or the items if the source's are ready batches."""
        steps = self.number_of_steps()
        if not self.gives_samples or not steps:
            return steps
        full, rest = divmod(len(cast("Sized", self.source)), self.full)
        whole = full * cast("int", self.batch_size)
        # A rest of fewer samples than ranks is filled up, see __iter__().
        return whole + (max(1, len(self._part(range(rest)))) if steps > full else 0)

    @property
    def gives_samples(self) -> bool:
        """Whether the source gives samples, and not batches."""
        return self.batch_size is not None

    @property
    def full(self) -> int:
        """Items of the source in a step."""
        return (self.batch_size or 1) * self.num_replicas

    def number_of_steps(self, items: int | None = None) -> int:
        """Return how many steps so many items of the source make; None: those of an epoch."""
        items = len(cast("Sized", self.source)) if items is None else items
        full, rest = divmod(max(0, items), self.full)
        return full + bool(rest and not self.drop_last)

    def left_over(self) -> str | None:
        """Return what becomes of what does not fill a step; None: there is nothing known of."""
        rest = (dataset_length(self.source) or 0) % self.full
        if not rest:
            return None
        what, ranks = "samples" if self.gives_samples else "batches", self.num_replicas
        done = "left out" if self.drop_last else f"shared by all {ranks} ranks in a smaller step"
        return (
            f"the last {rest} {what} of each epoch of {type(self.source).__name__} are {done} "
            f"(a step is {self.full} {what})"
        )

    def steps(self, items: Iterable[Indices], *, even: bool = False) -> Iterator[Step]:
        """Yield the steps of a rank.

        ``items``: of a sampler its samples in batches of all ranks, of a batch sampler its batches.
        ``even``: all steps but the last are full; samples come again rather than from the step
        before.
        """
        if not self.gives_samples:
            yield from self._of_batches(iter(items))
            return
        for batch in self._complete(items, even=even):
            yield Step((batch,), self._part(batch))

    def _batches(self) -> Iterator[Indices]:
        items = iter(self.source)
        while self.gives_samples and (batch := list(islice(items, self.full))):
            yield batch
        yield from items

    def _part(self, whole: Any) -> Any:
        each, more = divmod(len(whole), self.num_replicas)
        start = self.rank * each + min(self.rank, more)
        return whole[start : start + each + (self.rank < more)]

    def _complete(self, batches: Iterable[Indices], *, even: bool) -> Iterator[Indices]:
        """Yield the samples of each step; a rest is dropped, or made to do for all ranks."""
        first: Indices | None = None
        before: Indices | None = None
        waits = not even and self._waits()
        for batch in batches:
            if self.drop_last and len(batch) < self.full:
                break
            first = batch if first is None else first
            lacking = self.num_replicas - len(batch)
            if lacking > 0 and before is not None and len(before) - lacking >= self.num_replicas:
                yield before[:-lacking]
                batch, before = _joined((before[-lacking:], batch)), None  # noqa: PLW2901
            elif lacking > 0:
                batch = self._filled(batch, first)  # noqa: PLW2901
            if before is not None:
                yield before
            before = batch if waits else None
            if not waits:
                yield batch
        if before is not None:
            yield before

    def _waits(self) -> bool:
        """Return whether a step is not sure before the next one is known."""
        length = dataset_length(self.source)
        rest = None if length is None else length % self.full
        return not self.drop_last and (rest is None or 0 < rest < self.num_replicas)

    def _of_batches(self, batches: Iterator[Indices]) -> Iterator[Step]:
        first: list[Indices] = []
        while group := list(islice(batches, self.num_replicas)):
            first = first or group
            if len(group) == self.num_replicas:
                yield Step(tuple(group), group[self.rank])
            elif not self.drop_last:
                yield self._rest_of_batches(group, first)

    def _rest_of_batches(self, group: list[Indices], first: list[Indices]) -> Step:
        if not all(isinstance(batch, _SEQUENCES) for batch in group):
            whole = self._filled(group, first)
            return Step((whole,), whole[self.rank])
        whole = _joined(group)
        if len(whole) < self.num_replicas:
            whole = self._filled(whole, _joined(first))
        return Step((whole,), self._part(whole))

    def _filled(self, rest: Indices, first: Indices) -> list[Any]:
        if self.rank == 0:
            warnings.warn(
                f"The last {len(rest)} of an epoch of {type(self.source).__name__} are fewer than "
                f"the {self.num_replicas} ranks, which all need as many batches: "
                f"{self.num_replicas - len(rest)} of the epoch are taken again. Use "
                "drop_last=True to leave them out.",
                FastDataWarning,
                stacklevel=2,
            )
        return list(islice(chain(rest, cycle(first)), self.num_replicas))


def _joined(parts: Sequence[Indices]) -> Indices:
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return [index for part in parts for index in part]


class OwnSplit(DistributedSampler[Any]):
    """What splits itself among ranks, as it is.

    Lightning and Fabric put no sampler of theirs in the place of a ``DistributedSampler``, and set
    its epoch, which is passed on.

    Args:
        source: The sampler, or the batch sampler. It has a ``rank``.
        num_replicas: Ranks that it splits itself among.
    """

    def __init__(self, source: Any, num_replicas: int) -> None:
        super().__init__(cast("Any", range(0)), num_replicas, source.rank, shuffle=False)
        self.source = source

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the source, if it has one."""
        super().set_epoch(epoch)
        tell_samplers(self.source, epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


def split_of(source: object) -> DistributedSampler[Any] | None:
    """Return the sampler in what splits itself among ranks, as Lightning knows it; None: none."""
    split, ranks = _split_in(source)
    if ranks is None or ranks == 1:
        return None
    return split if isinstance(split, DistributedSampler) else OwnSplit(split, ranks)


def as_given(sampler: Any) -> Any:
    """Return the sampler that the user gave, where an :class:`OwnSplit` stands for it."""
    return sampler.source if isinstance(sampler, OwnSplit) else sampler


def share_in(source: object) -> SharedSampler | None:
    """Return what shares out the order of a loader among ranks; None: nothing of this module."""
    inner = getattr(source, "sampler", None)
    share = inner if isinstance(inner, SharedSampler) else source
    return share if isinstance(share, SharedSampler) else None


def deciding(source: object) -> object:
    """Return what decides the order of a loader: what has a state to save, or else the sampler."""
    share = share_in(source)
    source = source if share is None else share.source
    inner = getattr(source, "sampler", None)
    return source if inner is None or hasattr(source, "state_dict") else inner

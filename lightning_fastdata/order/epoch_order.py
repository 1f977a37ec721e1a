"""The order of the samples of an epoch, for datasets of any size, and each rank's share of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from lightning_fastdata.errors import DatasetError, OptionsError, checked_seed, is_whole
from lightning_fastdata.tree import has_method

Ints: TypeAlias = NDArray[np.int64]
Order: TypeAlias = "Ints | KeyedPermutation | BlockOrder | range"
"""An order of samples: held as an array, computed on demand, or the dataset's own."""

# Of 2**24 samples, torch.randperm makes 128 MiB in 0.45 s before the first batch (27 ns a sample,
# one thread of a server CPU), and of 2**30 8 GiB in half a minute. A computed batch costs 30 ns a
# sample when many are drawn together, and 0.1 ms of overhead when few are, at any length.
DRAWN_AT_ONCE: Final = 2**24
"""Samples of a dataset from which on the order of an epoch is computed on demand, not held."""

_ROUNDS: Final = 8
_LONGEST: Final = 2**62
_DRAWN_TOGETHER: Final = 2**13
_BLOCK: Final = 100
"""Samples in a block, for a dataset that does not say how it is stored."""
_TOGETHER: Final = 8000
"""Least number of samples shuffled together, for a dataset that does not say how it is stored."""
_AT_ONCE: Final = 8
"""Least number of blocks shuffled together: the sources of this package keep as many in memory."""
_MASK: Final = 2**64 - 1


def check_whole(**values: int | None) -> None:
    """Raise an :class:`OptionsError` unless each value is None or a whole number from 1 on."""
    for name, value in values.items():
        if value is not None:
            whole(name, value)


def whole(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number as Python's; raises OptionsError if it is none, or below ``least``."""
    if not is_whole(value, least):
        raise OptionsError(f"{name} is {value!r}; give a whole number, at least {least}.")
    return int(value)


def check_rank(rank: int, ranks: int) -> None:
    """Raise an :class:`OptionsError` unless a rank is one of so many."""
    if whole("rank", rank, 0) >= ranks:
        raise OptionsError(f"rank is {rank!r}; of {ranks} ranks it is one of 0 to {ranks - 1}.")


class KeyedPermutation:
    """A permutation of ``range(length)`` that is computed, not stored.

    Any part of it costs no more than that part, so that neither memory nor the time to the first
    batch depends on the length. It is the generalised Feistel network with cycle walking of
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002, method 3), with 8
    rounds on pairs of numbers below about ``sqrt(length)`` and the finaliser of SplitMix64 (Steele,
    Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) for its round
    function. It is meant for shuffling large sets: it keeps no secrets, and of a handful of samples
    not all orders are equally likely.

    Args:
        length: Length of the permuted range, 0 to 2**62.
        seed: Seed of the run; its low 64 bits count.
        epoch: Epoch, counted from 0.

    Raises:
        OptionsError: The length is negative or too large.
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        if not 0 <= length <= _LONGEST:
            raise OptionsError(f"length is {length!r}; a permutation has one of 0 to 2**62.")
        self.length = length
        # left < _lefts and right < _rights, with as few pairs beyond the length as possible.
        self._lefts = math.isqrt(max(length - 1, 0)) + 1
        self._rights = max(1, -(-length // self._lefts))
        words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch & 0xFFFFFFFF, epoch >> 32]
        self._keys = np.random.SeedSequence(words).generate_state(_ROUNDS, np.uint64)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> Ints:
        """Return a part of the permutation, int64."""
        return self.at(np.arange(*part.indices(self.length)))

    def at(self, positions: Ints) -> Ints:
        """Return the samples at these positions, each 0 <= position < length; int64."""
        found = self._once(positions.astype(np.uint64))
        # There are a few more pairs than samples. A pair that is no sample is mapped again until it
        # is one; this keeps the map one to one.
        while (outside := np.flatnonzero(found >= self.length)).size:
            found[outside] = self._once(found[outside])
        return found.astype(np.int64)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        lefts, rights = np.uint64(self._lefts), np.uint64(self._rights)
        right, left = np.divmod(values, lefts)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = _add(right, _below(left + key, rights), rights)
            else:
                left = _add(left, _below(right + key, lefts), lefts)
        return right * lefts + left


def _below(values: NDArray[np.uint64], limit: np.uint64) -> NDArray[np.uint64]:
    """Hash each value into a number below ``limit`` <= 2**32."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    high: NDArray[np.uint64] = (mixed >> np.uint64(32)) * limit >> np.uint64(32)
    return high


def _add(
    values: NDArray[np.uint64], more: NDArray[np.uint64], modulus: np.uint64
) -> NDArray[np.uint64]:
    total = values + more
    # Unsigned: below the modulus the difference wraps around to a huge number.
    reduced: NDArray[np.uint64] = np.minimum(total, total - modulus)
    return reduced


def epoch_permutation(length: int, seed: int, epoch: int) -> Ints | KeyedPermutation:
    """Return the order of ``length`` samples that belongs to (seed, epoch).

    It is an array, int64 [length], below :data:`DRAWN_AT_ONCE` samples, and else a
    :class:`KeyedPermutation`; slices of both are arrays.
    """
    if length >= DRAWN_AT_ONCE:
        return KeyedPermutation(length, seed=seed, epoch=epoch)
    # torch's CPU generator uses only 32 bits of its seed, so seed and epoch are hashed to 32 bits.
    words = np.random.SeedSequence([seed & 0xFFFFFFFF, epoch]).generate_state(1)
    generator = torch.Generator().manual_seed(int(words[0]))
    return drawn_permutation(length, generator)


def drawn_permutation(length: int, generator: torch.Generator | None) -> Ints:
    """Return ``torch.randperm(length, generator=generator)``, int64 [length], in half its time."""
    # The draws are the same for each integer type, and int32 fits the CPU's cache better.
    dtype = torch.int32 if length < 2**31 else torch.int64
    return torch.randperm(length, generator=generator, dtype=dtype).numpy().astype(np.int64)


def edges_of(sizes: Sequence[int] | Ints) -> Ints:
    """Return where each run begins, and where the last one ends, int64 [runs + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def reordered(edges: Ints, order: Ints) -> tuple[Ints, Ints]:
    """Return the places of all runs in another order of the runs, and the new edges."""
    sizes = np.diff(edges)[order]
    ends = edges_of(sizes)
    return np.arange(ends[-1]) + np.repeat(edges[order] - ends[:-1], sizes), ends


# -- data that is stored in blocks -----------------------------------------------------------------


def blocks_of(dataset: Sized, block: int | None = None, at_once: int | None = None) -> Blocks:
    """Return the blocks of a dataset; see :class:`BlockShuffleSampler`."""
    check_whole(block=block, blocks_at_once=at_once)
    block, at_once = (None if n is None else int(n) for n in (block, at_once))
    starts, positions, said = _stored(dataset, block)
    if at_once is None:
        at_once = _AT_ONCE if said else max(_AT_ONCE, -(-_TOGETHER // (block or _BLOCK)))
    return Blocks(starts, len(dataset), positions, at_once)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Which samples of a dataset are stored together, and how many blocks are shuffled at once."""

    starts: Ints
    """Place in ``positions`` at which each block begins, int64 [blocks]."""
    length: int
    """Samples of the dataset."""
    positions: Ints | None
    """Indices of the samples, block by block, int64 [length]; None: in the dataset's order."""
    at_once: int
    """Blocks that are shuffled together."""


class BlockOrder:
    """The samples of one epoch in an order of blocks, each part drawn when it is asked for.

    It holds the order of the blocks. The samples of each run of ``at_once`` blocks are permuted
    together by a generator of their own, with the key (seed, epoch, run).
    """

    def __init__(self, blocks: Blocks, seed: int, epoch: int) -> None:
        self._blocks = blocks
        self._seed, self._epoch = seed, epoch
        self._order = epoch_permutation(len(blocks.starts), seed, epoch)[:]
        sizes = np.diff(blocks.starts, append=blocks.length)[self._order]
        runs = np.arange(0, len(sizes), blocks.at_once)
        self._ends = np.cumsum(np.add.reduceat(sizes, runs)) if len(sizes) else sizes
        self._run = lru_cache(maxsize=2)(self._drawn)

    def __len__(self) -> int:
        return self._blocks.length

    def __getitem__(self, part: slice) -> Ints:
        """Return a part of the order, int64; the slice has no step."""
        start, stop, _ = part.indices(len(self))
        found = [np.empty(0, np.int64)]
        while start < stop:
            number = int(np.searchsorted(self._ends, start, side="right"))
            run, end = self._run(number), int(self._ends[number])
            found.append(run[start - end + len(run) : stop - end + len(run)])
            start = end
        return np.concatenate(found)

    def _drawn(self, number: int) -> Ints:
        blocks, first = self._blocks, number * self._blocks.at_once
        edges = np.append(blocks.starts, blocks.length)
        together, _ = reordered(edges, self._order[first : first + blocks.at_once])
        # The upper half of an epoch says which pass of it this is.
        seed = self._seed ^ self._epoch >> 32 << 32
        key = np.array([seed & _MASK, (self._epoch << 32 | first) & _MASK], np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=key)).permutation(together)
        return drawn if blocks.positions is None else blocks.positions[drawn]


def _stored(dataset: Any, block: int | None) -> tuple[Ints, NDArray[np.int64] | None, bool]:
    """Return the starts and positions of blocks, and whether the dataset has stated them."""
    if type(dataset) is Subset:
        starts, positions, said = _stored(dataset.dataset, block)
        # Indices below 0 count from the end, as those of a list do.
        length = dataset_length(dataset.dataset) or 1
        places = np.asarray(dataset.indices, np.int64).reshape(-1) % length
        if positions is not None:
            inverse = np.empty_like(positions)
            inverse[positions] = np.arange(len(positions))
            places = inverse[places]
        numbers = np.searchsorted(starts, places, side="right")
        own = np.argsort(numbers, kind="stable")
        return np.flatnonzero(np.diff(numbers[own], prepend=0)), own, said
    if type(dataset) is ConcatDataset:
        parts = [(len(cast("Sized", part)), *_stored(part, block)) for part in dataset.datasets]
        firsts = np.cumsum([0, *(part[0] for part in parts)])[:-1]
        pairs = list(zip(firsts.tolist(), parts, strict=True))
        starts = np.concatenate([first + part[1] for first, part in pairs])
        positions = None
        if any(part[2] is not None for part in parts):
            positions = np.concatenate(
                [first + (np.arange(n) if own is None else own) for first, (n, _, own, _) in pairs]
            )
        return starts, positions, any(part[3] for part in parts)
    length = len(dataset)
    if block is None and has_method(dataset, "block_starts"):
        said_starts = dataset.block_starts()
        if said_starts is not None:
            return _checked(dataset, np.asarray(said_starts), length), None, True
    inner = getattr(dataset, "dataset", None)
    if inner is not None and dataset_length(inner) == length:
        return _stored(inner, block)
    return np.arange(0, length, block or _BLOCK, dtype=np.int64), None, False


def _checked(dataset: object, starts: NDArray[Any], length: int) -> Ints:
    fine = starts.ndim == 1 and (starts.dtype.kind in "iu" or not len(starts))
    if fine and length:
        fine = len(starts) > 0 and starts[0] == 0 and bool((np.diff(starts) > 0).all())
        fine = fine and int(starts[-1]) < length
    if not fine:
        raise DatasetError(
            f"block_starts() of {type(dataset).__name__} returned {np.array2string(starts):.100}; "
            f"blocks of its {length} samples begin at 0 and at increasing numbers below {length}."
        )
    return starts.astype(np.int64) if length else np.empty(0, np.int64)


# -- what each rank reads of an order --------------------------------------------------------------


def cut(stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of parts of ``size`` up to ``stop``; the last part may be shorter."""
    for start in range(0, stop, size):
        yield start, min(start + size, stop)


def parts_of(order: Order, bounds: Iterable[tuple[int, int]]) -> Iterator[Ints]:
    """Yield ``order[start:stop]``, int64, for each pair of bounds."""
    if not isinstance(order, KeyedPermutation):
        for start, stop in bounds:
            yield np.arange(start, stop) if isinstance(order, range) else order[start:stop]
        return
    # A call costs about 0.1 ms however short the part is, so several parts share one call.
    bounds = iter(bounds)
    for start, stop in bounds:
        more = islice(bounds, (_DRAWN_TOGETHER - 1) // max(1, stop - start))
        positions = [np.arange(*part) for part in ((start, stop), *more)]
        ends = np.cumsum([len(part) for part in positions])
        yield from np.split(order.at(np.concatenate(positions)), ends[:-1])


def steps_in(items: int, full: int, *, drop_last: bool) -> int:
    """Return how many steps of ``full`` items each ``items`` items make."""
    return max(0, items // full if drop_last else -(-items // full))


def part_of(items: int, rank: int, ranks: int) -> slice:
    """Return which items of a step a rank gets.

    Ranks differ by one item at most: a remainder goes to the first ones.
    """
    each, more = divmod(items, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def can_share_evenly(length: int, batch_size: int, world_size: int) -> bool:
    """Return whether all ranks can get equally many batches, none empty and none too large."""
    return steps_in(length, batch_size * world_size, drop_last=False) * world_size <= length


class Counted(int):
    """An epoch that nobody has set on a sampler or dataset: loaders count on in a plain loop."""


class Fixed(Counted):
    """The epoch of evaluations, in all of which samplers of this package have one order."""


def first_epoch() -> Fixed:
    """Return 0: evaluation draws the same each time, so that its metrics can be compared."""
    return Fixed(0)


def dataset_length(dataset: object) -> int | None:
    """Return the length of a dataset or a loader; None: it has none, as most streams."""
    try:
        return len(cast("Sized", dataset))
    except Exception:  # whatever the user's own method raises: torch would not ask for it
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOrder:
    """A plan of the batches of one epoch that ranks share: it reads no samples."""

    epoch: int = 0
    """Epoch, counted from 0."""
    drop_last: bool = False
    """Whether to leave out samples that do not fill a step of all ranks; else ranks share them."""
    rank: int = 0
    """Number of this process, below ``world_size``."""
    world_size: int = 1
    """Number of processes that share the epoch."""
    start: int = 0
    """Samples of this epoch, over all ranks, that were delivered before and are skipped. If they
    are whole steps, the batches that follow are those of an epoch that was not interrupted."""

    def __len__(self) -> int:
        """Return the number of batches of this rank that are still to come."""
        raise NotImplementedError

    def samples(self) -> Order:
        """Return the order of all samples of the epoch, over all ranks."""
        raise NotImplementedError

    def _bounds(self, number: int) -> tuple[int, int]:
        """Return where this rank's batch ``number`` begins and ends in the order of the epoch."""
        raise NotImplementedError

    def batches(self) -> Iterator[Ints]:
        """Yield the indices of each batch, int64, from ``start`` on."""
        return parts_of(self.samples(), map(self._bounds, range(len(self))))

    def batch(self, number: int) -> Ints:
        """Return the indices of batch ``number`` of this rank, int64; IndexError without one."""
        if not 0 <= number < len(self):
            raise IndexError(f"There is no batch {number} of {len(self)}.")
        return next(parts_of(self.samples(), [self._bounds(number)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder(SharedOrder):
    """A plan of which samples each batch of one epoch holds; it reads no samples.

    The samples are put in one order for all ranks and cut into global batches of
    ``batch_size * world_size``. Each rank takes its slice of each of these, so that a run may go
    on with another number of ranks if the global batch size stays the same.

    All ranks have equally many batches, and the batches of one step differ by one sample at most.
    If the last global batch has fewer samples than there are ranks, it takes the missing ones from
    the global batch before it.

    Raises:
        OptionsError: A number is impossible, or there are too few samples for equal batches.
    """

    length: int
    """Samples of the dataset, 0 or more."""
    batch_size: int
    """Samples of one rank's batch, 1 or more."""
    seed: int = 0
    """Seed of the run."""
    shuffle: bool = True
    """Permute the samples; False keeps the dataset's order."""
    blocks: Blocks | None = None
    """Blocks to shuffle samples within; None: each epoch is a permutation of all samples."""

    def __post_init__(self) -> None:
        for name, least in (("length", 0), ("batch_size", 1), ("world_size", 1), ("start", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        whole("epoch", self.epoch, 0)
        check_rank(self.rank, self.world_size)
        object.__setattr__(self, "seed", checked_seed(self.seed))
        if not (self.drop_last or can_share_evenly(self._left, self.batch_size, self.world_size)):
            raise OptionsError(
                f"{self._left} samples in batches of at most {self.batch_size} cannot make equally "
                f"many on {self.world_size} ranks. Use fewer ranks, drop_last=True, or a "
                "batch_size of 2 or more if there are as many samples as ranks."
            )

    @property
    def _left(self) -> int:
        return max(0, self.length - self.start)

    def __len__(self) -> int:
        """Return the number of batches of this rank that are still to come."""
        return steps_in(self._left, self.batch_size * self.world_size, drop_last=self.drop_last)

    def samples(self) -> Order:
        """Return the order of all samples of the epoch, over all ranks."""
        if not self.shuffle:
            return range(self.length)
        if self.blocks is not None:
            return BlockOrder(self.blocks, self.seed, self.epoch)
        return epoch_permutation(self.length, self.seed, self.epoch)

    def _bounds(self, number: int) -> tuple[int, int]:
        begin, end = self.samples_before(number), self.samples_before(number + 1)
        own = part_of(end - begin, self.rank, self.world_size)
        return begin + own.start, begin + own.stop

    def samples_before(self, batches: int) -> int:
        """Return how many samples of the epoch all ranks have had after ``batches`` of each."""
        step = self.batch_size * self.world_size
        full, rest = divmod(self._left, step)
        if batches == full and 0 < rest < self.world_size and not self.drop_last:
            return self.length - self.world_size  # the last batch has one sample for each rank
        return min(self.start + batches * step, self.length)


class Rank(NamedTuple):
    """Number of this training process, and how many there are."""

    number: int
    ranks: int


def rank_now() -> Rank:
    """Return the rank of this process; rank 0 of 1 if there is no process group (yet)."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return Rank(0, 1)
    return Rank(distributed.get_rank(), distributed.get_world_size())

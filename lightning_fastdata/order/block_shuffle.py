"""A shuffled order for data that is read in blocks: larger than memory, or stored in groups."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from torch.utils.data import ConcatDataset, Sampler, Subset

from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.order.epoch_order import (
    check_whole,
    dataset_length,
    epoch_permutation,
    reordered,
)
from lightning_fastdata.tree import has_method

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK: Final = 100
"""Samples in a block of data that does not say how it is stored."""
_TOGETHER: Final = 8000
"""Of such data, samples that are shuffled together."""
_AT_ONCE: Final = 8
"""Blocks of other data: as many groups of rows as the sources of this package keep."""
_MASK: Final = 2**64 - 1


class BlockShuffleSampler(Sampler[int]):
    """Every sample once, in an order that stays within a few blocks of the dataset at a time.

    The dataset is cut into blocks of samples that are stored together. Each epoch draws an order of
    the blocks; so many of them at once are put together, and their samples shuffled. So all reads
    of ``blocks_at_once * block`` samples fall into as many blocks, and two neighbours of one block
    are never further apart than that in the order: less random than a full shuffle, which is the
    price. With a block of 1, or with all blocks at once, it is a full shuffle.

    A dataset says how it is stored by a method ``block_starts()``, which returns the numbers of the
    first samples of its blocks, increasing from 0; ``SourceDataset`` does where its source has
    groups or chunks of rows. It is found through ``Subset``, ``ConcatDataset`` and what has the
    dataset as ``.dataset`` of the same length; a block of a subset is what the subset has of it.

    The order depends on seed and epoch alone, so that a training goes on within it. Ranks of a
    data module share the batches of one order; of a loader without one, Lightning's own wrapper
    gives each rank every so many samples of it.

    Args:
        data_source: The dataset.
        block: Samples in a block, as they are stored. Default: what the dataset says, else 100.
        blocks_at_once: Blocks whose samples are shuffled together. Default: 8 of those that the
            dataset says, else as many as have 8,000 samples.
        seed: Seed of the run.

    Raises:
        OptionsError: ``block`` or ``blocks_at_once`` is below 1.
        DatasetError: ``block_starts()`` gives no blocks of the dataset.

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
        self.blocks = blocks_of(data_source, block, blocks_at_once)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``, counted from 0; loaders and Lightning call it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.blocks.length

    def __iter__(self) -> Iterator[int]:
        order = self.blocks.order(self.seed, self.epoch)
        for start in range(0, len(order), _TOGETHER):
            yield from order[start : start + _TOGETHER].tolist()


def is_in_blocks(shuffle: object) -> bool:
    """Return whether ``shuffle`` is ``"blocks"``.

    Raises:
        OptionsError: It is another text.
    """
    if isinstance(shuffle, str) and shuffle != "blocks":
        raise OptionsError(f'shuffle={shuffle!r} has to be True, False or "blocks".')
    return shuffle == "blocks"


def blocks_of(dataset: Sized, block: int | None = None, at_once: int | None = None) -> Blocks:
    """Return the blocks of a dataset; see :class:`BlockShuffleSampler`."""
    check_whole(block=block, blocks_at_once=at_once)
    starts, positions, said = _stored(dataset, block)
    if at_once is None:
        at_once = _AT_ONCE if said else max(_AT_ONCE, -(-_TOGETHER // (block or _BLOCK)))
    return Blocks(starts, len(dataset), positions, at_once)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Which samples of a dataset are stored together, and how many blocks are shuffled at once."""

    starts: NDArray[np.int64]
    """[blocks]; where in ``positions`` each block begins."""
    length: int
    """Samples of the dataset."""
    positions: NDArray[np.int64] | None
    """[length]; the samples, block by block. None: as the dataset has them."""
    at_once: int

    def order(self, seed: int, epoch: int) -> BlockOrder:
        """Return the order of an epoch."""
        return BlockOrder(self, seed, epoch)


class BlockOrder:
    """The samples of one epoch, in an order that is drawn where it is asked for.

    It holds the order of the blocks. Each run of ``at_once`` of them is put together and permuted
    by a generator of its own, with the key (seed, epoch, run).
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

    def __getitem__(self, part: slice) -> NDArray[np.int64]:
        """Return a part of the order, int64; the slice has no step."""
        start, stop, _ = part.indices(len(self))
        found = [np.empty(0, np.int64)]
        while start < stop:
            number = int(np.searchsorted(self._ends, start, side="right"))
            run, end = self._run(number), int(self._ends[number])
            found.append(run[start - end + len(run) : stop - end + len(run)])
            start = end
        return np.concatenate(found)

    def _drawn(self, number: int) -> NDArray[np.int64]:
        blocks, first = self._blocks, number * self._blocks.at_once
        edges = np.append(blocks.starts, blocks.length)
        together, _ = reordered(edges, self._order[first : first + blocks.at_once])
        key = np.array([self._seed & _MASK, (self._epoch << 32 | first) & _MASK], np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=key)).permutation(together)
        return drawn if blocks.positions is None else blocks.positions[drawn]


def _stored(
    dataset: Any, block: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, bool]:
    """Return the starts and positions of blocks, and whether the dataset has said them."""
    if type(dataset) is Subset:
        starts, positions, said = _stored(dataset.dataset, block)
        places = np.asarray(dataset.indices, np.int64).reshape(-1)
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


def _checked(dataset: object, starts: NDArray[Any], length: int) -> NDArray[np.int64]:
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

"""A shuffled order for data that is read in blocks: larger than memory, or stored in groups."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Final

import numpy as np
from torch.utils.data import Sampler

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.order.epoch_order import epoch_permutation

_MASK: Final = 2**64 - 1


class BlockShuffleSampler(Sampler[int]):
    """Every sample once, in an order that stays within a few blocks of the dataset at a time.

    The dataset is cut into blocks of neighbours. Each epoch draws an order of the blocks; so many
    of them at once are put together, and their samples shuffled. So all reads of ``blocks_at_once
    * block`` samples fall into as many blocks, and two neighbours of one block are never further
    apart than that in the order: less random than a full shuffle, which is the price. With a block
    of 1, or with all blocks at once, it is a full shuffle.

    The order depends on seed and epoch alone, so that a training goes on within it. Ranks share it
    in turn, by Lightning's own wrapper.

    Args:
        data_source: The dataset; only its length is used.
        block: Samples in a block, such as the rows of a Parquet group.
        blocks_at_once: Blocks whose samples are shuffled together. Default: 8.
        seed: Seed of the run.

    Raises:
        OptionsError: ``block`` or ``blocks_at_once`` is below 1.

    Example:
        >>> list(BlockShuffleSampler(range(6), block=2, blocks_at_once=1, seed=2))
        [1, 0, 2, 3, 4, 5]
    """

    def __init__(
        self, data_source: Sized, block: int, *, blocks_at_once: int = 8, seed: int = 0
    ) -> None:
        for name, value in (("block", block), ("blocks_at_once", blocks_at_once)):
            if value < 1:
                raise OptionsError(f"{name} is {value!r}; give a whole number, at least 1.")
        self.data_source = data_source
        self.block = block
        self.blocks_at_once = blocks_at_once
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``, counted from 0; loaders and Lightning call it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        length, block = len(self.data_source), self.block
        order = np.asarray(epoch_permutation(-(-length // block), self.seed, self.epoch)[:])
        for first in range(0, len(order), self.blocks_at_once):
            starts = order[first : first + self.blocks_at_once].astype(np.int64) * block
            together = (starts[:, None] + np.arange(block)).reshape(-1)
            together = together[together < length]
            key = [self.seed & _MASK, (self.epoch << 32 | first) & _MASK]
            generator = np.random.Generator(np.random.Philox(key=key))
            yield from generator.permutation(together).tolist()

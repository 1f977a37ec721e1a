"""In which order the samples of an epoch are read."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.order.permutation import Order, epoch_permutation, parts_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.data import Dataset


def can_share_evenly(length: int, batch_size: int, world_size: int) -> bool:
    """Return whether all ranks can have as many batches, none empty and none above the size."""
    steps = -(-length // (batch_size * world_size))
    return steps * world_size <= length


def dataset_length(dataset: Dataset[object]) -> int | None:
    """Return ``len(dataset)``, or None when it has no length."""
    try:
        return len(cast("Sized", dataset))
    except (TypeError, NotImplementedError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder:
    """Which samples each batch of one epoch holds: a pure plan that reads nothing.

    The samples are put in one order for all ranks and cut into global batches of
    ``batch_size * world_size``, of which each rank takes its slice. With the global batch size
    kept, a run may therefore go on with another number of ranks.
    """

    length: int
    """Samples in the dataset, from 0."""
    batch_size: int
    """Samples of one rank's batch, from 1."""
    seed: int = 0
    """Seed of the run."""
    epoch: int = 0
    """Epoch, counted from 0."""
    shuffle: bool = True
    """Permute the samples; False keeps the dataset's order."""
    drop_last: bool = False
    """Leave out the last global batch if it is not full. Otherwise the ranks share what is left,
    and their last batches differ by one sample at most; a rank left without samples has one batch
    less than the others."""
    equal_counts: bool = False
    """Give every rank as many batches. If the last global batch has fewer samples than there are
    ranks, the one before gives up what is missing; then the batches of a rank still differ by one
    sample at most between the ranks, and so does how an epoch is cut with their number."""
    rank: int = 0
    """This process among ``world_size``."""
    world_size: int = 1
    """Processes that share the epoch."""
    position: int = 0
    """Batches of this epoch that were delivered before; they are skipped."""

    def __post_init__(self) -> None:
        for name, lowest in (("length", 0), ("batch_size", 1), ("world_size", 1), ("position", 0)):
            if getattr(self, name) < lowest:
                raise OptionsError(f"{name} is {getattr(self, name)!r}; it starts at {lowest}.")
        if not 0 <= self.rank < self.world_size:
            raise OptionsError(
                f"rank is {self.rank!r}; with world_size={self.world_size} it is one of 0 to "
                f"{self.world_size - 1}."
            )

        if self.equal_counts and not self.drop_last:
            self._check_can_share()

    def __len__(self) -> int:
        """Batches of this rank that are still to come."""
        full, rest = divmod(self.length, self.batch_size * self.world_size)
        # What does not divide evenly goes to the first ranks.
        last = not self.drop_last and rest > (0 if self.equal_counts else self.rank)
        return max(0, full + last - self.position)

    def batches(self) -> Iterator[NDArray[np.int64]]:
        """Yield the indices of each batch, int64, from ``position`` on."""
        order: Order = range(self.length)
        if self.shuffle:
            order = epoch_permutation(self.length, self.seed, self.epoch)
        numbers = range(self.position, self.position + len(self))
        return parts_of(order, map(self._bounds, numbers))

    def _bounds(self, number: int) -> tuple[int, int]:
        """Return where this rank's batch ``number`` begins and ends in the order of the epoch."""
        begin, end = self._cut(number), self._cut(number + 1)
        each, more = divmod(end - begin, self.world_size)
        start = begin + self.rank * each + min(self.rank, more)
        return start, start + each + (self.rank < more)

    def _cut(self, number: int) -> int:
        """Return where global batch ``number`` begins; after the last one, the end."""
        step = self.batch_size * self.world_size
        full, rest = divmod(self.length, step)
        shift = self.equal_counts and not self.drop_last and 0 < rest < self.world_size
        if shift and number == full:
            return self.length - self.world_size  # one each for the last batch
        return min(number * step, self.length)

    def _check_can_share(self) -> None:
        if not can_share_evenly(self.length, self.batch_size, self.world_size):
            raise OptionsError(
                f"equal_counts is True, but {self.length} samples in batches of at most "
                f"{self.batch_size} cannot make equally many on {self.world_size} ranks. Use fewer "
                "ranks, or a batch_size of 2 or more if there are as many samples as ranks."
            )

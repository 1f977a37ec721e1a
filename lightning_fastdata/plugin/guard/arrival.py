"""A training batch that runs out of memory on its way to the device is brought there with less.

Lightning brings a batch there in one call: its hooks before, the transfer, its hooks behind, which
augment. On an out-of-memory error nothing of that is kept, and the call is made again, from the
batch in host memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.device.backend import free_memory, is_out_of_memory
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.plugin.guard.replay import joined, part_of, rows_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.plugin.contracts import DataModule
    from lightning_fastdata.types import Batch

_TOLD: Final = (
    "A training batch ran out of memory before its step, while it was moved or transformed "
    "({said}). {how}. A smaller batch_size does without."
)


class ArrivesInParts:
    """What brings training batches to the device, and those that do not fit with less memory.

    First what was sent ahead is dropped. Then what workers drew is carried out in host memory, with
    the same draws. Then the batch is moved and transformed in parts, half as large each time, and
    joined: a transform that looks at the whole batch sees a part, and draws for each anew.

    Args:
        trainer: Trains on one device, or on one of several.
        move: Lightning's own ``batch_to_device``.
        datamodule: Has the transforms.
    """

    def __init__(
        self, trainer: Trainer, move: Callable[..., Batch], datamodule: DataModule
    ) -> None:
        self.trainer, self.move, self.datamodule = trainer, move, datamodule
        self.largest: int | None = None
        """Samples that fit, of batches that did not; None: all did."""
        self.on_host = False
        """Whether draws are carried out in host memory."""

    def __call__(self, batch: Batch, *where: Any, **named: Any) -> Batch:
        """Return the batch on the device, transformed; the error of torch if nothing helps."""
        if not self.trainer.training:
            return self.move(batch, *where, **named)
        while True:
            try:
                parts = [self.move(part, *where, **named) for part in self._parts(batch)]
                return parts[0] if len(parts) == 1 else joined(parts)
            except Exception as error:
                how = self._less(batch) if is_out_of_memory(error) else None
                if how is None:
                    raise
                said = str(error).partition("\n")[0]
            finally:
                self.datamodule.part_begin = 0
            # Not within the except clause, which keeps the frames of what has failed.
            free_memory()
            if how:
                warnings.warn(_TOLD.format(said=said, how=how), FastDataWarning, stacklevel=2)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        if not self.on_host and self.largest is None:
            yield batch
            return
        batch = _as_loaded(batch)
        if self.on_host:
            batch = self.datamodule.carried_out(batch)
        plain = batch.batch if isinstance(batch, StagedBatch) else batch
        rows = rows_of(plain)
        size = rows if self.largest is None else self.largest
        if rows is None or size is None or rows <= size or _has_draws(batch):
            yield batch
            return
        for begin in range(0, rows, size):
            self.datamodule.part_begin = begin
            part = part_of(plain, begin, min(begin + size, rows), rows)
            yield batch.with_batch(part) if isinstance(batch, StagedBatch) else part

    def _less(self, batch: Batch) -> str | None:
        """Go over to what takes less memory, and return it in words; None: there is nothing."""
        if self.datamodule.drop_ahead():
            return ""
        batch = _as_loaded(batch)
        if _has_draws(batch) and not self.on_host:
            self.on_host = True
            return "From now on the pipeline's draws are carried out in host memory"
        rows = rows_of(batch.batch if isinstance(batch, StagedBatch) else batch)
        size = None if rows is None else min(rows, self.largest or rows)
        if size is None or size == 1:
            return None
        self.largest = -(-size // 2)
        return f"From now on it is done in parts of {self.largest} samples, which are then joined"


def _as_loaded(batch: Batch) -> Batch:
    """Return a batch as its loader gave it."""
    if isinstance(batch, StagedBatch) and batch.crossing is not None:
        return batch.crossing.source
    return batch


def _has_draws(batch: Batch) -> bool:
    return isinstance(batch, StagedBatch) and batch.draws is not None

"""A batch on its way to the device: what the loader delivers when a transform is still to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol

from lightning_fastdata.errors import BatchError
from lightning_fastdata.torch_internals import pinned

if TYPE_CHECKING:
    from lightning_fastdata.augment import DatasetDraws, Draws
    from lightning_fastdata.types import Batch, Stage

_NOT_UNWRAPPED = (
    "This batch still waits for its transform on the device (a StagedBatch, of which {used} was "
    "used). "
    "FastDataModule.on_after_batch_transfer applies the transform and hands over the plain batch. "
    "If your class overrides on_before_batch_transfer, transfer_batch_to_device or "
    "on_after_batch_transfer, start it with `batch = super().<hook>(...)`; in the first two, read "
    "`batch.batch` and return `batch.with_batch(...)`."
)


class Landing(Protocol):
    """A batch that a side stream brings to the device."""

    def land(self) -> Batch:
        """Return the batch on the device; the current stream waits for it."""


class StagedBatch:
    """A collated batch and the draws of the transform that will run on it on the device.

    It passes unchanged through Lightning's combined loaders, precision plugins and hooks, so that
    what belongs to a batch cannot be mixed up with another batch's, and a tensor that did not come
    from our loader (``example_input_array``) is never taken for a batch.

    With a ``crossing`` a side stream is moving the batch already: ``batch`` is None, and what
    ``crossing.land()`` returns is the batch on the device.
    """

    __slots__ = ("batch", "crossing", "draws", "stage")

    def __init__(
        self,
        batch: Batch,
        draws: Draws | DatasetDraws | None,
        stage: Stage,
        crossing: Landing | None = None,
    ) -> None:
        self.batch = batch
        self.draws = draws
        self.stage = stage
        self.crossing = crossing

    def with_batch(self, batch: Batch) -> StagedBatch:
        """Return the same draws for another form of the batch, e.g. its copy on the device."""
        return StagedBatch(batch, self.draws, self.stage, self.crossing)

    def pin_memory(self, device: str | None = None) -> StagedBatch:
        """Return the same batch in page-locked memory; torch's pin thread calls this."""
        return StagedBatch(pinned(self.batch, device), pinned(self.draws, device), self.stage)

    def __getitem__(self, item: object) -> NoReturn:
        raise _StillStagedError("[...]")

    def __iter__(self) -> NoReturn:
        raise _StillStagedError("iteration")

    def __getattr__(self, name: str) -> NoReturn:
        raise _StillStagedError(f".{name}")


class _StillStagedError(BatchError, AttributeError):
    """Somebody took a StagedBatch for the batch; an AttributeError too, so that hasattr works."""

    def __init__(self, used: str) -> None:
        super().__init__(_NOT_UNWRAPPED.format(used=used))

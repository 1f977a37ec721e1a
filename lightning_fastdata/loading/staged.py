"""A batch on its way to the device: what the loader delivers when a transform is still to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from lightning_fastdata.errors import BatchError

if TYPE_CHECKING:
    from lightning_fastdata.augment.transform import Draws
    from lightning_fastdata.types import Batch

_NOT_UNWRAPPED = (
    "This batch still waits for its transform on the device (StagedBatch.{name} was used). "
    "FastDataModule.on_after_batch_transfer applies the transform and hands over the plain batch. "
    "If your class overrides on_before_batch_transfer, transfer_batch_to_device or "
    "on_after_batch_transfer, start it with `batch = super().<hook>(...)`; in the first two, work "
    "on `batch.batch`."
)


class StagedBatch:
    """A collated batch and the draws of the transform that will run on it on the device.

    It passes unchanged through Lightning's combined loaders, precision plugins and hooks, so that
    what belongs to a batch cannot be mixed up with another batch's, and a tensor that did not come
    from our loader (``example_input_array``) is never taken for a batch.
    """

    __slots__ = ("batch", "draws")

    def __init__(self, batch: Batch, draws: Draws | None) -> None:
        self.batch = batch
        self.draws = draws

    def pin_memory(self, device: str | None = None) -> StagedBatch:
        """Return the same batch in page-locked memory; torch's pin thread calls this."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return StagedBatch(pin_memory(self.batch, device), pin_memory(self.draws, device))

    def __getitem__(self, item: object) -> NoReturn:
        raise BatchError(_NOT_UNWRAPPED.format(name="__getitem__"))

    def __iter__(self) -> NoReturn:
        raise BatchError(_NOT_UNWRAPPED.format(name="__iter__"))

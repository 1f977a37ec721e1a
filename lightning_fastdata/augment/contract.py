"""What a transform of batches has to offer, whatever it was written with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_fastdata.augment.replay.program import Draws
    from lightning_fastdata.types import Batch, SampleKey


class WorkerTransform(Protocol):
    """The part of a stage transform that runs on each sample in the side process; picklable."""

    needs_batches: bool
    """Whether something is left to do once samples are collated, even with nothing on a device."""

    def __call__(self, sample: Any, key: SampleKey) -> tuple[Any, Any]:
        """Return the sample as the worker leaves it, and what it drew for the device."""

    def collate(self, drawn: Sequence[Any], /) -> Draws | None:
        """Return what was drawn for the samples of a batch, in their order.

        None: nothing is left to the device, and :meth:`finish` makes the batch complete.
        """

    def finish(self, batch: Batch, drawn: Sequence[Any], /) -> Batch:
        """Return a collated batch after what was left to do, where no device takes part."""


@runtime_checkable
class StageTransform(Protocol):
    """What a data module runs on a batch once it is on the device."""

    name: str
    """How messages and reports call it."""
    starts_in_worker: bool
    """Whether it has a part that runs on each sample in the side process."""

    def check_sample(self, sample: Any) -> None:
        """Raise BatchError if a sample of the dataset has not what the transform needs."""

    def in_worker(self, *, on_device: bool) -> WorkerTransform | None:
        """Return the part that runs on each sample in the side process, or None."""

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Return the batch, which is already on the device, with the transform carried out."""

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Return a batch of a loader that is not ours with the transform carried out.

        Sample ``i`` draws with ``key.index + i``.
        """

    def explain(self) -> str:
        """Return where each operation runs and why, as text."""


@runtime_checkable
class SuitsSamples(Protocol):
    """A stage transform that may do less in the workers where it knows what samples look like."""

    def for_samples(self, samples: Iterable[Any]) -> StageTransform:
        """Return the transform for a dataset, of which these are samples from all over it.

        It has to be right for any other sample, too.
        """

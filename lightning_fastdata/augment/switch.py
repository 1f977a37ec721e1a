"""A pipeline whose pixels are computed in one place in some epochs and in the other in the rest.

What decides is the epoch in the key of a sample, never the time: the samples of one batch belong to
one epoch, so that all of a batch is done in the same place, and the batch says by its draws what is
left to do. The draws belong to the key as well, and are the same in both places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.augment.pipeline.plan import redrawn
from lightning_fastdata.augment.record.worker import device_ops

if TYPE_CHECKING:
    from lightning_fastdata.augment.contract import StageTransform, WorkerTransform
    from lightning_fastdata.augment.placement import Place
    from lightning_fastdata.augment.replay.program import Draws
    from lightning_fastdata.types import Batch, SampleKey


class PlaceSwitch:
    """Where the pixels of an epoch are computed, which worker processes read from shared memory.

    Args:
        place: Where, until it is changed.
    """

    def __init__(self, place: Place) -> None:
        # One word, so that no process can see half of a change: twice the epoch from which the
        # newest place holds, and 1 if that is the device.
        word = torch.zeros(1, dtype=torch.int64)
        self._word: torch.Tensor = word.share_memory_()  # type: ignore[no-untyped-call]
        self._word[0] = int(place == "device")

    def change(self, place: Place, *, from_epoch: int) -> None:
        """Have another place from an epoch on, of which nobody has begun a sample.

        Args:
            place: The place that is not the newest one.
            from_epoch: An epoch at which the newest place holds. Until then that goes on to hold;
                before it had come to hold, it is forgotten what did.
        """
        self._word[0] = 2 * from_epoch + int(place == "device")

    def place(self, epoch: int) -> Place:
        """Return where the pixels of an epoch are computed."""
        since, on_device = divmod(int(self._word[0]), 2)
        return "device" if (epoch >= since) == bool(on_device) else "workers"

    @property
    def newest(self) -> Place:
        """Where they are computed from some epoch on."""
        return "device" if int(self._word[0]) % 2 else "workers"

    @property
    def since_epoch(self) -> int:
        """The epoch from which :attr:`newest` holds."""
        return int(self._word[0]) // 2


class SwitchedTransform:
    """A stage transform that starts in the workers, and in some epochs ends there."""

    def __init__(self, inner: StageTransform, switch: PlaceSwitch) -> None:
        self.name = inner.name
        self.starts_in_worker = True
        self.inner = inner
        self.switch = switch

    def check_sample(self, sample: Any) -> None:
        """Raise BatchError if a sample of the dataset has not what the transform needs."""
        self.inner.check_sample(sample)

    def in_worker(self, *, on_device: bool) -> WorkerTransform | None:
        """Return the part that runs on each sample; without a device, the whole of it."""
        whole = self.inner.in_worker(on_device=False)
        deferred = self.inner.in_worker(on_device=True)
        if not on_device or whole is None or deferred is None:
            return whole
        return SwitchedWorker(whole, deferred, self.switch)

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Return the batch with what was left to the device carried out."""
        return self.inner.apply(batch, draws)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Return a batch of a loader that is not ours with the transform carried out."""
        return self.inner.apply_unprepared(batch, key)

    def explain(self) -> str:
        """Return where each operation runs if the device does what it can."""
        return self.inner.explain()


class SwitchedWorker:
    """Both parts of a transform, of which the epoch of a sample chooses one; picklable."""

    needs_batches = True

    def __init__(
        self, whole: WorkerTransform, deferred: WorkerTransform, switch: PlaceSwitch
    ) -> None:
        self.repeats: int = getattr(deferred, "repeats", 1)
        self._whole = whole
        self._deferred = deferred
        self._switch = switch

    def __call__(self, sample: Any, key: SampleKey) -> tuple[Any, Any]:
        """Return the sample as the worker leaves it; whether that is all, and what was drawn."""
        whole = self._switch.place(key.epoch) == "workers"
        sample, drawn = (self._whole if whole else self._deferred)(sample, key)
        return sample, (whole, drawn)

    def collate(self, drawn: Sequence[Any]) -> Draws | None:
        """Return what was drawn for a batch; None if nothing is left to the device."""
        if drawn and drawn[0][0]:
            return None
        return self._deferred.collate([own for _, own in drawn])

    def finish(self, batch: Batch, drawn: Sequence[Any]) -> Batch:
        """Return a batch of which nothing is left to the device after what was left to do."""
        if not self._whole.needs_batches:
            return batch
        return self._whole.finish(batch, [own for _, own in drawn])


def leaves_to_device(transform: StageTransform) -> bool:
    """Return whether a device can do any part of a transform that starts in the workers."""
    plan = getattr(transform, "plan", None)
    return True if plan is None else bool(plan.defers)


def redrawn_on_device(transform: StageTransform) -> tuple[str, ...]:
    """Return the operations of which a device makes other pixels of the same distribution."""
    pipeline = getattr(transform, "pipeline", transform)
    plan, compose = getattr(pipeline, "plan", None), getattr(pipeline, "compose", None)
    return () if plan is None or compose is None else redrawn(compose, plan, device_ops())

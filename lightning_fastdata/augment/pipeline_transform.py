"""An Albumentations pipeline in two halves: drawn in the worker, computed on the batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_fastdata.augment.collated_batches import ForeignBatches, OnCpu, checked_on_cpu
from lightning_fastdata.augment.pipeline.fields import Fields, describe
from lightning_fastdata.augment.pipeline.plan import OF_BYTES, analyse, redrawn
from lightning_fastdata.augment.pipeline.trial import refusal, what_it_means
from lightning_fastdata.augment.record.worker import (
    ComposeWorker,
    SampleForm,
    device_ops,
)
from lightning_fastdata.augment.replay.torch import replay_batch
from lightning_fastdata.augment.stage_transform import plain_tensors, table
from lightning_fastdata.errors import BatchError, FastDataWarning
from lightning_fastdata.fingerprint import fingerprint

if TYPE_CHECKING:
    from typing import Self

    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.pipeline.dtypes import States
    from lightning_fastdata.augment.pipeline.plan import Plan
    from lightning_fastdata.augment.pipeline.tree import Node
    from lightning_fastdata.augment.replay.program import Draws
    from lightning_fastdata.augment.stage_transform import PlaceSwitch
    from lightning_fastdata.fingerprint import Fingerprint
    from lightning_fastdata.types import Batch, SampleKey


class PipelineTransform:
    """A pipeline as a stage transform: what a loader and a trainer ask of it."""

    starts_in_worker = True
    repeats = 1
    switch: PlaceSwitch | None = None

    def __init__(
        self,
        compose: Node,
        fields: Fields,
        ops: Mapping[str, DeviceOp] | None = None,
        *,
        same_pixels: bool = False,
        on_cpu: OnCpu = "albumentations",
    ) -> None:
        import albumentations

        self.name = type(compose).__name__
        if not isinstance(compose, albumentations.Compose):
            compose = albumentations.Compose([compose])
        self.compose = compose
        self._ops = ops
        self._same_pixels = same_pixels
        self._on_cpu = checked_on_cpu(on_cpu)
        self._fields = fields
        self._images: tuple[int | None, Collection[States]] = 3, OF_BYTES
        """Channels and dtypes of the images that the plan is for."""
        self._unfitted: PipelineTransform | None = None
        """What :meth:`for_samples` has made this of; it runs on the device."""
        self._why_not: str | None = None
        """Why nothing of it runs on a device; None: something may."""
        self._take_in(_state_of(compose))

    def _take_in(self, state: Fingerprint | None) -> None:
        """Plan for the pipeline as it is now."""
        channels, dtypes = self._images
        self._state = state
        self._epoch: int | None = None
        self.plan = self._analyse(channels=channels, dtypes=dtypes, why_not=self._why_not)
        self._foreign: ForeignBatches | None = None

    def made_of(self) -> tuple[object, ...]:
        """Return the pipeline."""
        return (self.compose,)

    def renewed(self) -> Self:
        """Return the transform as the pipeline is now: itself, if nothing of that has changed."""
        state = _state_of(self.compose)
        if state is not None and state == self._state:
            return self
        twin = copy.copy(self)
        twin._take_in(state)
        if self._unfitted is not None:
            self._unfitted._take_in(state)
        return twin

    @property
    def ops(self) -> Mapping[str, DeviceOp]:
        """Device forms by name."""
        return device_ops(self._ops)

    @property
    def defers(self) -> bool:
        """Whether a device can do any part of it."""
        return self.plan.defers

    def redrawn(self) -> tuple[str, ...]:
        """Return the operations of which a device makes other pixels of the same distribution."""
        return redrawn(self.compose, self.plan, device_ops())

    def check_sample(self, sample: Batch) -> None:
        """Raise BatchError if a sample holds no image, or something that would stay behind it."""
        self.in_worker(on_device=False).form_of(sample)
        for kind, processor in self.compose.processors.items():
            names = processor.data_fields
            if not isinstance(sample, Mapping) or not any(name in sample for name in names):
                warnings.warn(
                    f"The pipeline transforms {kind}, and the first sample has none: it is "
                    f"{describe(sample)}. Images would move without their {kind}. Let the dataset "
                    f"return a dict with {' or '.join(map(repr, names))}, or leave the "
                    f"{kind} out of the Compose.",
                    FastDataWarning,
                    stacklevel=2,
                )

    def _analyse(
        self,
        *,
        channels: int | None,
        dtypes: Collection[States] = OF_BYTES,
        why_not: str | None = None,
    ) -> Plan:
        return analyse(
            self.compose,
            self.ops,
            refusal=refusal() or why_not,
            same_pixels=self._same_pixels,
            channels=channels,
            dtypes=dtypes,
        )

    def in_worker(self, *, on_device: bool) -> ComposeWorker:
        """Return the part for the side process: all of it, or what a device cannot do."""
        defers = on_device and self.plan.defers
        return ComposeWorker(
            self.compose,
            self._fields,
            self.plan if defers else None,
            self._ops,
        )

    def for_samples(self, samples: Iterable[Batch]) -> Self:
        """Return the transform for a dataset, of which these are samples from all over it.

        What a device can do depends on channels and dtypes of the images.
        """
        worker = ComposeWorker(self.compose, self._fields, None, self._ops)
        found: list[SampleForm | None] = []
        for sample in samples:
            try:
                found.append(worker.form_of(sample))
            except BatchError:
                if not found:
                    raise
                break  # Training reports it, if it reads that sample.
        if not found:
            return self
        fitted = copy.copy(self)
        fitted._foreign, fitted._unfitted = None, self
        if not (forms := [form for form in found if form is not None]):
            why_not = "the samples hold no image, but frames or volumes"
            fitted._why_not = why_not
            fitted.plan = self._analyse(channels=3, why_not=why_not)
            return fitted
        channels, first = forms[0]
        dtypes = [frozenset(form.dtypes.get(name, first[name]) for form in forms) for name in first]
        fitted._images = channels, dtypes
        fitted.plan = self._analyse(channels=channels, dtypes=dtypes)
        return fitted

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Compute what was drawn on images ``[n, H, W, C]`` or ``[n, H, W]`` of the workers.

        They come out as ``[n, C, H, W]`` behind ``ToTensorV2``, else as ``[n, H, W, C]``.

        Raises:
            BatchError: the image field is missing, or has another number of samples than was drawn.
        """
        if draws is None:
            return batch
        with plain_tensors():
            return replay_batch(batch, draws, self._fields, self.ops)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw and compute here, for a batch ``[n, C, H, W]`` or ``[n, H, W, C]``.

        Raises:
            BatchError: there is no image batch, or one of floats outside of [0, 1].
            TransformError: the pipeline needs boxes or keypoints, which a collated batch has lost.
        """
        if self._epoch not in (None, key.epoch):
            self._follow()
        self._epoch = key.epoch
        return self._run_unprepared(batch, key, self._fields)

    def _follow(self) -> None:
        """Plan anew if the pipeline is not what it was."""
        state = _state_of(self.compose)
        if state is None or state != self._state:
            self._take_in(state)

    def _run_unprepared(self, batch: Batch, key: SampleKey, fields: Fields) -> Batch:
        with plain_tensors():
            return self._on_batches().run(batch, fields, key)

    def _on_batches(self) -> ForeignBatches:
        if self._foreign is None:
            self._foreign = ForeignBatches(
                self.compose,
                self.ops,
                refusal(),
                same_pixels=self._same_pixels,
                on_cpu=self._on_cpu,
            )
        return self._foreign

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_foreign": None}

    def explain(self) -> str:
        """Return a table: operation, where it runs, why."""
        rows = table([(place.name, place.where, place.why) for place in self.plan.placements])
        reason = refusal()
        return rows if reason is None else f"{rows}\n{what_it_means(reason)}"


def _state_of(compose: Node) -> Fingerprint | None:
    # Globals have no part in what a device can do.
    return fingerprint(compose, with_globals=False)

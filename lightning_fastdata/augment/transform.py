"""Transforms of a batch on the device, whatever they were written with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_fastdata.augment.collated_batches import ForeignBatches
from lightning_fastdata.augment.front_ends import pipeline_transform
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.dtypes import BYTES, why_no_forms
from lightning_fastdata.augment.pipeline.fields import Fields, describe, listed
from lightning_fastdata.augment.pipeline.known_version import refusal, what_it_means
from lightning_fastdata.augment.pipeline.plan import analyse
from lightning_fastdata.augment.pipeline.tree import is_albumentations_pipeline
from lightning_fastdata.augment.record.worker import ComposeWorker, SampleForm
from lightning_fastdata.augment.replay.torch import replay_batch
from lightning_fastdata.augment.stage_transform import (
    CallableTransform,
    PipelineTransform,
    StageTransform,
    plain_tensors,
)
from lightning_fastdata.errors import BatchError, FastDataWarning, TransformError
from lightning_fastdata.fingerprint import fingerprint
from lightning_fastdata.randomness.seeds import lasting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from lightning_fastdata.augment.pipeline.dtypes import DType
    from lightning_fastdata.augment.pipeline.plan import Plan
    from lightning_fastdata.augment.pipeline.tree import Node
    from lightning_fastdata.augment.replay.program import Draws
    from lightning_fastdata.fingerprint import Fingerprint
    from lightning_fastdata.types import Batch, SampleKey


def as_batch_transform(
    transform: object,
    *,
    image: int | str | None = None,
    mask: int | str | None = None,
    stays: int | str | Sequence[int | str] = (),
) -> StageTransform:
    """Return a transform of batches.

    Args:
        transform: an ``A.Compose`` or any single Albumentations transform; a torchvision
            ``v2.Compose`` or any single transform of v2; a module of Kornia or a sequence of them;
            another ``nn.Module`` or callable; or a ``StageTransform``, which is returned as it is.
            A callable gets the whole batch and returns the whole batch; with ``image=`` it gets
            that field alone, and its result replaces the field.
        image: key or index of the image in a sample and in a batch; None finds it.
        mask: key or index of the mask; None takes the key ``"mask"``. For more of them, and for
            other images, Albumentations has ``additional_targets``, such as ``{"depth": "mask"}``;
            in tuples ``{"2": "image"}`` names the third element.
        stays: for a pipeline, keys or indices of what is to stay as it is beside an image that
            is moved. Anything else of the image's height and width is an error.

    Raises:
        TransformError: it is none of these.
    """
    fields = Fields(image=image, mask=mask, stays=listed(stays))
    if isinstance(transform, StageTransform):
        return transform
    if callable(transform) and not isinstance(transform, type):
        made = pipeline_transform(transform, fields)
        return CallableTransform(transform, fields) if made is None else made
    raise TransformError(
        f"{transform!r} cannot transform a batch. Pass an albumentations Compose or a torchvision "
        "v2.Compose (an instance), an nn.Module, or a callable that takes a batch and returns a "
        "batch."
    )


def stage_transform(transform: object, fields: Fields) -> BatchTransform | None:
    """Return the transform of batches of an Albumentations pipeline; None: it is none."""
    if not is_albumentations_pipeline(transform):
        return None
    return BatchTransform(transform, fields)


class BatchTransform(PipelineTransform):
    """An Albumentations pipeline for batches. Not for several threads at once."""

    library = "Albumentations"
    plan: Plan

    def __init__(self, compose: Node, fields: Fields) -> None:
        import albumentations

        self.name = type(compose).__name__
        if not isinstance(compose, albumentations.Compose):
            compose = albumentations.Compose([compose])
        self.pipeline = compose
        self._fields = fields
        self._images: tuple[int | None, DType] = 3, BYTES
        """Channels and dtype of the images that the plan is for."""
        self._unfitted: BatchTransform | None = None
        """What :meth:`for_samples` has made this of; it runs on the device."""
        self._why_not: str | None = None
        """Why nothing of it runs on a device; None: something may."""
        self.take_in()

    @property
    def compose(self) -> Any:
        """The pipeline, as a ``Compose``."""
        return self.pipeline

    def state(self) -> Fingerprint | None:
        """Return what the pipeline is now."""
        # Globals have no part in what a device can do, nor what somebody drew from the pipeline.
        return fingerprint(self.compose, with_globals=False, instead=lasting([self.compose]))

    def take_in(self) -> None:
        """Plan for the pipeline as it is now."""
        super().take_in()
        channels, dtype = self._images
        self.plan = analyse(
            self.compose,
            DEVICE_OPS,
            refusal=refusal() or self._why_not,
            channels=channels,
            dtype=dtype,
        )
        self._foreign: ForeignBatches | None = None

    def renewed(self) -> Self:
        """Return the transform as the pipeline is now: itself, if nothing of that has changed."""
        twin = super().renewed()
        if twin is not self and self._unfitted is not None:
            self._unfitted.take_in()
        return twin

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

    def in_worker(self, *, on_device: bool) -> ComposeWorker:
        """Return the part that runs on each sample: all of it, or what a device cannot do."""
        plan = self.plan if on_device and self.plan.defers else None
        return ComposeWorker(self.compose, self._fields, plan)

    def for_samples(self, samples: Iterable[Batch]) -> Self:
        """Return the transform for a dataset, of which these are samples from all over it.

        What a device can do depends on channels and dtypes of the images.
        """
        worker = ComposeWorker(self.compose, self._fields, None)
        found: list[SampleForm] = []
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
        fitted._unfitted = self
        first = found[0]
        fitted._images = first.channels, first.images["image"]
        fitted._why_not = why_no_forms(first.images.values(), first.masks.values())
        if any(form.images.items() - first.images.items() for form in found):
            fitted._why_not = "the samples hold images of several dtypes"
        fitted.take_in()
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
            return replay_batch(batch, draws, self._fields, DEVICE_OPS)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw and compute here, for a batch ``[n, C, H, W]`` or ``[n, H, W, C]``.

        Raises:
            BatchError: there is no image batch, or one of floats outside of [0, 1].
            TransformError: the pipeline needs boxes or keypoints, which a collated batch has lost.
        """
        self.follow(key.epoch)
        if self._foreign is None:
            self._foreign = ForeignBatches(self.compose, refusal())
        with plain_tensors():
            return self._foreign.run(batch, self._fields, key)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_foreign": None}

    def explain(self) -> str:
        """Return a table: operation, where it runs, why."""
        reason = refusal()
        return super().explain() + ("" if reason is None else f"\n{what_it_means(reason)}")

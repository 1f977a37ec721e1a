"""Transforms of a batch on the device, whatever they were written with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_fastdata.augment.collated_batches import ForeignBatches, OnCpu, checked_on_cpu
from lightning_fastdata.augment.ops.output import OutputForm, check_form, output_form
from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    describe,
    find_fields,
    get_field,
    to_hwc,
)
from lightning_fastdata.augment.pipeline.plan import OF_BYTES, analyse
from lightning_fastdata.augment.pipeline.tree import is_albumentations_pipeline
from lightning_fastdata.augment.pipeline.trial import refusal, what_it_means
from lightning_fastdata.augment.record.targets import convert_images, target_roles
from lightning_fastdata.augment.record.worker import (
    ComposeWorker,
    CropOnDevice,
    SampleForm,
    crop_on_device,
    device_ops,
)
from lightning_fastdata.augment.registry import registered_forms
from lightning_fastdata.augment.replay.torch import replay_batch
from lightning_fastdata.augment.stage_transform import (
    CallableTransform,
    StageTransform,
    plain_tensors,
    table,
)
from lightning_fastdata.errors import BatchError, FastDataWarning, TransformError

if TYPE_CHECKING:
    from lightning_fastdata.augment.callable_transform import ExplicitTransform
    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.pipeline.plan import Plan
    from lightning_fastdata.augment.pipeline.values import States
    from lightning_fastdata.augment.replay.program import Draws
    from lightning_fastdata.types import Batch, SampleKey


def as_batch_transform(
    transform: Any,
    *,
    image: int | str | None = None,
    mask: int | str | None = None,
    same_pixels: bool = False,
    out: str | None = None,
    channels_last: bool = False,
) -> StageTransform:
    """Return a transform of batches.

    Args:
        transform: an ``A.Compose`` or any single Albumentations transform; an ``nn.Module`` or
            callable; or a ``StageTransform``, which is returned as it is. A callable gets the whole
            batch and returns the whole batch; with ``image=`` it gets that field alone, and its
            result replaces the field.
        image: key or index of the image in a sample and in a batch; None finds it.
        mask: key or index of the mask; None takes the key ``"mask"``.
        same_pixels: for Albumentations, leave noise, elastic fields and other operations that draw
            numbers for every pixel to the worker. On the device they keep the distribution of
            Albumentations' result, not its pixels.
        out: for Albumentations, the dtype of the images that come out, ``"float32"``,
            ``"float16"`` or ``"bfloat16"``; None: what the pipeline makes. Numbers are not scaled.
        channels_last: for Albumentations behind ``ToTensorV2``, have the images that come out lie
            in memory as ``torch.channels_last``.

    Raises:
        TransformError: it is none of these, or cannot yield that form.
        OptionsError: ``out`` is something else.
    """
    form = output_form(out, channels_last=channels_last)
    fields = Fields(image=image, mask=mask)
    ready = isinstance(transform, StageTransform)
    if not ready and callable(transform) and not isinstance(transform, type):
        if is_albumentations_pipeline(transform):
            return BatchTransform(transform, fields, same_pixels=same_pixels, form=form)
        if not form.converts:
            return CallableTransform(transform, fields)
    if form.converts:
        raise TransformError(
            f"out= and channels_last= go with an albumentations Compose, not with {transform!r}: "
            "convert in it, behind what it does."
        )
    if isinstance(transform, StageTransform):
        return transform
    raise TransformError(
        f"{transform!r} cannot transform a batch. Pass an albumentations Compose (an instance), an "
        "nn.Module, or a callable that takes a batch and returns a batch."
    )


class BatchTransform:
    """An Albumentations pipeline: drawn per sample in the worker, carried out on the batch.

    Without our loaders, :meth:`from_albumentations` makes one to call.
    """

    def __init__(
        self,
        compose: Any,
        fields: Fields,
        ops: Mapping[str, DeviceOp] | None = None,
        *,
        same_pixels: bool = False,
        form: OutputForm | None = None,
        strict: bool = False,
        on_cpu: OnCpu = "albumentations",
    ) -> None:
        import albumentations

        self.name = type(compose).__name__
        self.starts_in_worker = True
        if not isinstance(compose, albumentations.Compose):
            compose = albumentations.Compose([compose])
        self.compose = compose
        self.form = form or OutputForm()
        check_form(self.form, compose)
        self._ops = ops
        self._registered = registered_forms(compose)
        self._same_pixels = same_pixels
        self._strict = strict
        self._on_cpu = checked_on_cpu(on_cpu)
        self.plan = self._any_size = self._analyse(channels=3)
        self._crop: CropOnDevice | None = None
        self._fields = fields
        self._roles = target_roles(compose)
        self._foreign: ForeignBatches | None = None

    @staticmethod
    def from_albumentations(
        compose: Any,
        *,
        image: int | str | None = None,
        mask: int | str | None = None,
        same_pixels: bool = False,
        out: str | None = None,
        channels_last: bool = False,
        strict: bool = False,
        on_cpu: OnCpu = "albumentations",
    ) -> ExplicitTransform:
        """Return a transform of batches to call yourself.

        Args:
            compose: an ``A.Compose`` or any single Albumentations transform.
            image: key or index of the image in batches that are no bare tensor; None finds it.
            mask: key or index of the mask; None takes the key ``"mask"``.
            same_pixels: as :func:`as_batch_transform` takes it.
            out: the same.
            channels_last: the same.
            strict: refuse a pipeline of which anything would have to run on the CPU for batches on
                a device, now where that is known, else when it is drawn.
            on_cpu: what makes the pixels of batches that lie on the CPU: ``"albumentations"``, or
                ``"torch"``, as on a device, to see without one what it would do; that takes many
                times as long.

        Raises:
            TransformError: it is no pipeline, cannot yield that form, or is refused as ``strict``.
            OptionsError: ``out`` or ``on_cpu`` is something else.
        """
        if isinstance(compose, type) or not is_albumentations_pipeline(compose):
            raise TransformError(
                f"{compose!r} is no albumentations pipeline. Pass a Compose, an instance of it."
            )
        from lightning_fastdata.augment.callable_transform import ExplicitTransform

        return ExplicitTransform(
            compose,
            Fields(image=image, mask=mask),
            same_pixels=same_pixels,
            form=output_form(out, channels_last=channels_last),
            strict=strict,
            on_cpu=on_cpu,
        )

    @property
    def ops(self) -> Mapping[str, DeviceOp]:
        """Device forms by name, with those that were registered for the pipeline's own classes."""
        return device_ops(self._ops, self._registered)

    def check_sample(self, sample: Any) -> None:
        """Raise BatchError if a sample of the dataset holds no image that can be read."""
        found = find_fields(sample, self._fields, batched=False)
        to_hwc(get_field(sample, found.image))
        for kind, processor in getattr(self.compose, "processors", {}).items():
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

    def _analyse(self, *, channels: int | None, values: Collection[States] = OF_BYTES) -> Plan:
        return analyse(
            self.compose,
            self.ops,
            refusal=refusal(),
            same_pixels=self._same_pixels,
            channels=channels,
            values=values,
        )

    def in_worker(self, *, on_device: bool) -> ComposeWorker:
        """Return the part that runs on each sample in the side process.

        Args:
            on_device: leave to the device what can run there; else all of it runs in the worker.
        """
        defers = on_device and self.plan.defers
        return ComposeWorker(
            self.compose,
            self._fields,
            self._any_size if defers else None,
            self._ops,
            self._crop if defers else None,
            registered=self._registered,
            form=None if on_device else self.form,  # On a device it is converted there.
        )

    def for_samples(self, samples: Iterable[Any]) -> BatchTransform:
        """Return the transform for a dataset, of which these are samples from all over it.

        What the device can do depends on the channels of the images, some operations being there
        for three alone, and on their dtypes and ranges. If all images have one size that is not
        much larger than what the pipeline makes of it, the device crops, too. Samples of another
        size are still right, but cost more than without.

        Args:
            samples: All of them are looked at.
        """
        worker = ComposeWorker(self.compose, self._fields, None, self._ops)
        forms: list[SampleForm] = []
        for sample in samples:
            try:
                forms.append(worker.form_of(sample))
            except BatchError:
                if not forms:
                    raise
                break  # It is told when training reads it, if it does.
        if not forms:
            return self
        (size, channels, first), crop = forms[0], None
        values = [frozenset(form.values.get(name, first[name]) for form in forms) for name in first]
        if size is not None and all(form.size == size for form in forms):
            crop = crop_on_device(
                self.compose,
                self.ops,
                size,
                refusal=refusal(),
                same_pixels=self._same_pixels,
                channels=channels,
                values=values,
            )
        fitted = copy.copy(self)
        fitted._foreign = None
        fitted._any_size = self._analyse(channels=channels, values=values)
        fitted._crop = crop
        fitted.plan = fitted._any_size if crop is None else crop.plan
        return fitted

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Carry out what was drawn.

        The image field is ``[n, H, W, C]`` or ``[n, H, W]`` as the worker left it; afterwards it
        has the layout that the pipeline yields: ``[n, C, H, W]`` behind ``ToTensorV2``, else
        ``[n, H, W, C]``.

        Raises:
            BatchError: the image field is missing, or has another number of samples than was drawn.
        """
        with plain_tensors():
            if draws is not None:
                batch = replay_batch(batch, draws, self._fields, self.ops, self.form)
            return convert_images(batch, self._fields, self._roles, self.form)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw here and carry out, for a batch ``[n, C, H, W]`` or ``[n, H, W, C]``.

        On the CPU the pipeline itself runs on every sample, unless ``on_cpu`` says otherwise, and
        on a device where it has no form for images of that dtype.

        Raises:
            BatchError: there is no image batch, or one of floats outside of [0, 1].
            TransformError: the pipeline needs boxes or keypoints, which a collated batch has lost.
        """
        return self._run_unprepared(batch, key, self._fields)

    def _run_unprepared(self, batch: Batch, key: SampleKey, fields: Fields) -> Batch:
        with plain_tensors():
            batch = self._on_batches().run(batch, fields, key)
            return convert_images(batch, fields, self._roles, self.form)

    def _on_batches(self) -> ForeignBatches:
        if self._foreign is None:
            self._foreign = ForeignBatches(
                self.compose,
                self.ops,
                refusal(),
                same_pixels=self._same_pixels,
                strict=self._strict,
                on_cpu=self._on_cpu,
            )
        return self._foreign

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_foreign": None}

    def explain(self) -> str:
        """Return a table: operation, where it runs, why."""
        told = table([(place.name, place.where, place.why) for place in self.plan.placements])
        reason = refusal()
        return told if reason is None else f"{told}\n{what_it_means(reason)}"

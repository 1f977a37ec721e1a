"""Transforms of a batch on the device, whatever they were written with."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.augment.callables import CallableTransform, plain_tensors, table
from lightning_fastdata.augment.contract import StageTransform
from lightning_fastdata.augment.crop import CropOnDevice, crop_on_device
from lightning_fastdata.augment.fields import (
    Fields,
    Found,
    Location,
    describe,
    find_fields,
    get_field,
    put_fields,
    to_hwc,
)
from lightning_fastdata.augment.foreign import ForeignBatches
from lightning_fastdata.augment.geometry_plan import checked, explain_joins
from lightning_fastdata.augment.plan import analyse
from lightning_fastdata.augment.replay_torch import replay
from lightning_fastdata.augment.self_check import refusal, what_it_means
from lightning_fastdata.augment.worker import ComposeWorker, device_ops
from lightning_fastdata.errors import BatchError, TransformError

if TYPE_CHECKING:
    from lightning_fastdata.augment.geometry import GeometryMode
    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.plan import Plan
    from lightning_fastdata.augment.program import Draws
    from lightning_fastdata.types import Batch, SampleKey


def as_batch_transform(
    transform: Any,
    *,
    image: int | str | None = None,
    mask: int | str | None = None,
    same_pixels: bool = False,
    geometry: GeometryMode = "exact",
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
        geometry: for Albumentations, ``"fused"`` joins geometric operations that follow each other
            on the device to one resampling: sharper, but not Albumentations' pixels.

    Raises:
        TransformError: it is none of these.
    """
    if isinstance(transform, StageTransform):
        return transform
    fields = Fields(image=image, mask=mask)
    if callable(transform) and not isinstance(transform, type):
        if _is_albumentations(transform):
            return BatchTransform(transform, fields, same_pixels=same_pixels, geometry=geometry)
        return CallableTransform(transform, fields)
    raise TransformError(
        f"{transform!r} cannot transform a batch. Pass an albumentations Compose (an instance), an "
        "nn.Module, or a callable that takes a batch and returns a batch."
    )


class BatchTransform:
    """An Albumentations pipeline: drawn per sample in the worker, carried out on the batch."""

    def __init__(
        self,
        compose: Any,
        fields: Fields,
        ops: Mapping[str, DeviceOp] | None = None,
        *,
        same_pixels: bool = False,
        geometry: GeometryMode = "exact",
    ) -> None:
        import albumentations

        self.name = type(compose).__name__
        self.starts_in_worker = True
        if not isinstance(compose, albumentations.Compose):
            compose = albumentations.Compose([compose])
        self.compose = compose
        self._ops = ops
        self._geometry = checked(geometry)
        self._same_pixels = same_pixels
        self.plan = self._any_size = self._analyse(channels=3)
        self._crop: CropOnDevice | None = None
        self._fields = fields
        self._foreign: ForeignBatches | None = None

    def check_sample(self, sample: Any) -> None:
        """Raise BatchError if a sample of the dataset holds no image that can be read."""
        found = find_fields(sample, self._fields, batched=False)
        to_hwc(get_field(sample, found.image))

    def _analyse(self, *, channels: int | None) -> Plan:
        plan = analyse(
            self.compose,
            device_ops(self._ops),
            refusal=refusal(),
            same_pixels=self._same_pixels,
            channels=channels,
        )
        return self._explained(plan)

    def in_worker(self, *, on_device: bool) -> ComposeWorker:
        """Return the part that runs on each sample in the side process.

        Args:
            on_device: leave to the device what can run there; else all of it runs in the worker.
        """
        if not (on_device and self.plan.defers):
            return ComposeWorker(self.compose, self._fields, None, self._ops)
        return ComposeWorker(
            self.compose,
            self._fields,
            self._any_size,
            self._ops,
            self._crop,
            geometry=self._geometry,
        )

    def for_samples(self, samples: Iterable[Any]) -> BatchTransform:
        """Return the transform for a dataset, of which these are samples from all over it.

        What the device can do depends on the channels of the images, some operations being there
        for three alone. If all images have one size that is not much larger than what the pipeline
        makes of it, the device crops, too. Samples of another size are still right, but cost more
        than without.

        Args:
            samples: Is read no further than until two sizes differ, or the first is too large.
        """
        worker = ComposeWorker(self.compose, self._fields, None, self._ops)
        forms = map(worker.form_of, samples)
        first = next(forms, None)
        if first is None:
            return self
        size, channels = first
        crop = None
        if size is not None:
            crop = crop_on_device(
                self.compose,
                device_ops(self._ops),
                size,
                refusal=refusal(),
                same_pixels=self._same_pixels,
                channels=channels,
            )
        if crop is not None and any(other != size for other, _ in forms):
            crop = None
        fitted = copy.copy(self)
        fitted._foreign = None
        fitted._any_size = self._analyse(channels=channels)
        fitted._crop = crop
        fitted.plan = fitted._any_size if crop is None else self._explained(crop.plan)
        return fitted

    def _explained(self, plan: Plan) -> Plan:
        return explain_joins(plan, self.compose) if self._geometry == "fused" else plan

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Carry out what was drawn.

        The image field is ``[n, H, W, C]`` or ``[n, H, W]`` as the worker left it; afterwards it
        has the layout that the pipeline yields: ``[n, C, H, W]`` behind ``ToTensorV2``, else
        ``[n, H, W, C]``.

        Raises:
            BatchError: the image field is missing, or has another number of samples than was drawn.
        """
        if draws is None or not draws.programs:
            return batch
        found = find_fields(batch, self._fields, batched=True)
        with plain_tensors():
            values: dict[Location, Any] = {}
            for target, program in draws.programs.items():
                location = _location(found, target)
                value = get_field(batch, location)
                if not isinstance(value, torch.Tensor) or len(value) != draws.samples:
                    raise BatchError(
                        f"The field {location!r} should be a tensor of {draws.samples} samples, "
                        f"as many as were drawn for, but is {describe(value)}. A collate_fn must "
                        "stack the images of a batch in order, and keep them at their place."
                    )
                add_channel = program.role == "image" and value.ndim == 3
                value = value.unsqueeze(-1) if add_channel else value
                value = replay(program, draws.blob, value, device_ops(self._ops))
                tensor_form = any(step.name == "ToTensorV2" for step in program.steps)
                drop = add_channel and not tensor_form and value.shape[-1] == 1
                values[location] = value.squeeze(-1) if drop else value
            return put_fields(batch, values)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw here and carry out, for a batch ``[n, C, H, W]`` or ``[n, H, W, C]``.

        On the CPU the pipeline itself runs on every sample.

        Raises:
            BatchError: there is no image batch of uint8, or float32 in [0, 1].
            TransformError: the pipeline needs boxes or keypoints, which a collated batch has lost.
        """
        if self.compose.processors:
            names = " and ".join(sorted(self.compose.processors))
            raise TransformError(
                f"The pipeline transforms {names} too, and those cannot be told apart in a batch "
                "that another loader has collated. Give the pipeline to "
                "FastDataModule(augment=...) and let FastDataModule load the data."
            )
        found = find_fields(batch, self._fields, batched=True)
        if self._foreign is None:
            ops = device_ops(self._ops)
            self._foreign = ForeignBatches(
                self.compose,
                ops,
                refusal(),
                same_pixels=self._same_pixels,
                geometry=self._geometry,
            )
        with plain_tensors():
            return self._foreign.run(batch, found, key)

    def explain(self) -> str:
        """Return a table: operation, where it runs, why."""
        told = table([(place.name, place.where, place.why) for place in self.plan.placements])
        reason = refusal()
        return told if reason is None else f"{told}\n{what_it_means(reason)}"


def _is_albumentations(transform: Any) -> bool:
    modules = {cls.__module__.split(".")[0] for cls in type(transform).__mro__}
    return "albumentations" in modules


def _location(found: Found, target: str) -> Location:
    return {"image": found.image, "mask": found.mask}.get(target, target)

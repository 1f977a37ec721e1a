"""Transforms of a batch on the device, whatever they were written with."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
import torch

from lightning_fastdata.augment.callables import CallableTransform, plain_tensors, table
from lightning_fastdata.augment.fields import (
    Fields,
    Found,
    Location,
    describe,
    find_fields,
    get_field,
    mask_to_numpy,
    put_fields,
    to_hwc,
)
from lightning_fastdata.augment.foreign import ForeignBatches
from lightning_fastdata.augment.plan import Plan, analyse
from lightning_fastdata.augment.program import Draws, compile_tapes
from lightning_fastdata.augment.replay_torch import replay
from lightning_fastdata.augment.seeds import reseed
from lightning_fastdata.augment.tape import Recorder, Tape, refusal, target_roles
from lightning_fastdata.errors import BatchError, TransformError

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.types import Batch, SampleKey

__all__ = ["BatchTransform", "Draws", "WorkerTransform", "as_batch_transform"]


class WorkerTransform(Protocol):
    """The part of a batch transform that runs on each sample in the side process; picklable."""

    needs_batches: bool
    """Whether something is left to do once samples are collated, even with nothing on a device."""

    def __call__(self, sample: Any, key: SampleKey) -> tuple[Any, Any]:
        """Return the sample as the worker leaves it, and what it drew for the device."""

    def collate(self, drawn: Sequence[Any], /) -> Draws:
        """Return what was drawn for the samples of a batch, in their order."""

    def finish(self, batch: Batch, drawn: Sequence[Any], /) -> Batch:
        """Return a collated batch after what was left to do, where no device takes part."""


@runtime_checkable
class BatchTransform(Protocol):
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


def as_batch_transform(
    transform: Any,
    *,
    image: int | str | None = None,
    mask: int | str | None = None,
    same_pixels: bool = False,
) -> BatchTransform:
    """Return a transform of batches.

    Args:
        transform: an ``A.Compose`` or any single Albumentations transform; an ``nn.Module`` or
            callable; or a ``BatchTransform``, which is returned as it is. A callable gets the whole
            batch and returns the whole batch; with ``image=`` it gets that field alone, and its
            result replaces the field.
        image: key or index of the image in a sample and in a batch; None finds it.
        mask: key or index of the mask; None takes the key ``"mask"``.
        same_pixels: for Albumentations, leave noise, elastic fields and other operations that draw
            numbers for every pixel to the worker. On the device they keep the distribution of
            Albumentations' result, not its pixels.

    Raises:
        TransformError: it is none of these.
    """
    if isinstance(transform, BatchTransform):
        return transform
    fields = Fields(image=image, mask=mask)
    if callable(transform) and not isinstance(transform, type):
        if _is_albumentations(transform):
            return ComposeTransform(transform, fields, same_pixels=same_pixels)
        return CallableTransform(transform, fields)
    raise TransformError(
        f"{transform!r} cannot transform a batch. Pass an albumentations Compose (an instance), an "
        "nn.Module, or a callable that takes a batch and returns a batch."
    )


class ComposeTransform:
    """An Albumentations pipeline: drawn per sample in the worker, carried out on the batch."""

    def __init__(
        self,
        compose: Any,
        fields: Fields,
        ops: Mapping[str, DeviceOp] | None = None,
        *,
        same_pixels: bool = False,
    ) -> None:
        import albumentations

        self.name = type(compose).__name__
        self.starts_in_worker = True
        if not isinstance(compose, albumentations.Compose):
            compose = albumentations.Compose([compose])
        self.compose = compose
        self._ops = ops
        self.plan = analyse(compose, device_ops(ops), refusal=refusal(), same_pixels=same_pixels)
        self._same_pixels = same_pixels
        self._fields = fields
        self._foreign: ForeignBatches | None = None

    def check_sample(self, sample: Any) -> None:
        """Raise BatchError if a sample of the dataset holds no image that can be read."""
        found = find_fields(sample, self._fields, batched=False)
        to_hwc(get_field(sample, found.image))

    def in_worker(self, *, on_device: bool) -> ComposeWorker:
        """Return the part that runs on each sample in the side process.

        Args:
            on_device: leave to the device what can run there; else all of it runs in the worker.
        """
        plan = self.plan if on_device and self.plan.defers else None
        return ComposeWorker(self.compose, self._fields, plan, self._ops)

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
                self.compose, ops, refusal(), same_pixels=self._same_pixels
            )
        with plain_tensors():
            return self._foreign.run(batch, found, key)

    def explain(self) -> str:
        """Return a table: operation, where it runs, why."""
        return table([(place.name, place.where, place.why) for place in self.plan.placements])


class ComposeWorker:
    """The part of a pipeline that runs on each sample in the side process; picklable.

    Several threads may call it: each has its own copy of the pipeline.
    """

    needs_batches = False

    def __init__(
        self,
        compose: Any,
        fields: Fields,
        plan: Plan | None,
        ops: Mapping[str, DeviceOp] | None = None,
    ) -> None:
        self._compose = compose
        self._ops = ops
        self._fields = fields
        self._plan = plan
        self._roles = target_roles(compose)
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _local=threading.local())

    def __call__(self, sample: Any, key: SampleKey) -> tuple[Any, Tape | None]:
        """Return the sample as the worker leaves it, and what the device has still to do to it.

        The tape is None when everything was done here. Images and masks of the sample are tensors
        ``[H, W, C]`` or ``[H, W]`` when there is a tape, else whatever the pipeline yields.

        Raises:
            BatchError: the sample has no image.
        """
        found = find_fields(sample, self._fields, batched=False)
        data, places = self._arguments(sample, found)
        if self._plan is None:
            compose = self._own("compose", lambda: copy.deepcopy(self._compose))
            reseed((compose,), key)
            result, tape = compose(**data), None
        else:
            recorder = self._own("recorder", self._new_recorder)
            reseed((recorder.compose,), key)
            result, tape = recorder(data)
            for target in places.keys() & self._roles.keys():
                if isinstance(result[target], np.ndarray):
                    result[target] = _own_tensor(result[target])
        return put_fields(sample, {places[name]: result[name] for name in places}), tape

    def collate(
        self, tapes: Sequence[Tape | None], beside: Mapping[str, np.ndarray] | None = None
    ) -> Draws:
        """Return the tapes of a batch, packed in the order of its samples, and what goes beside."""
        return compile_tapes(
            [tape if tape is not None else {} for tape in tapes], device_ops(self._ops), beside
        )

    def finish(self, batch: Batch, drawn: Sequence[Any]) -> Batch:  # noqa: ARG002
        """Return the batch: the pipeline has run whole on each sample."""
        return batch

    def _own(self, name: str, make: Callable[[], Any]) -> Any:
        if not hasattr(self._local, name):
            setattr(self._local, name, make())
        return getattr(self._local, name)

    def _new_recorder(self) -> Recorder:
        return Recorder(self._compose, cast("Plan", self._plan), device_ops(self._ops))

    def _arguments(self, sample: Any, found: Found) -> tuple[dict[str, Any], dict[str, Location]]:
        """Return the arguments of the pipeline, and where each of them sits in the sample."""
        places: dict[str, Location] = {"image": found.image}
        if found.mask is not None:
            places["mask"] = found.mask
        if isinstance(sample, Mapping):
            names = {*self._compose.additional_targets, "masks"}
            for processor in self._compose.processors.values():
                names |= {processor.default_data_name, *(processor.params.label_fields or ())}
            places.update({name: name for name in names - places.keys() if name in sample})
        data = {name: get_field(sample, place) for name, place in places.items()}
        for name in data.keys() & self._roles.keys():
            is_image = self._roles[name] == "image"
            if data[name] is not None:
                data[name] = to_hwc(data[name])[0] if is_image else mask_to_numpy(data[name])
        return data, places


def device_ops(ops: Mapping[str, DeviceOp] | None = None) -> Mapping[str, DeviceOp]:
    """Return the device forms of Albumentations' transforms by class name; ours by default."""
    if ops is not None:
        return ops
    # Looked up where it is used: a registry does not travel with a pickled transform.
    from lightning_fastdata.augment.ops import DEVICE_OPS

    return DEVICE_OPS


def _is_albumentations(transform: Any) -> bool:
    modules = {cls.__module__.split(".")[0] for cls in type(transform).__mro__}
    return "albumentations" in modules


def _location(found: Found, target: str) -> Location:
    return {"image": found.image, "mask": found.mask}.get(target, target)


def _own_tensor(array: np.ndarray) -> torch.Tensor:
    # The pipeline may hand back the dataset's own read-only array (a memory map).
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())

"""A pipeline on a batch that another loader has collated."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import torch

from lightning_fastdata import registry
from lightning_fastdata.augment.pipeline.dtypes import BYTES, why_no_forms
from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    describe,
    get_field,
    mask_as_given,
    numpy_dtype,
    put_fields,
)
from lightning_fastdata.augment.pipeline.plan import analyse
from lightning_fastdata.augment.record.tape import Recorder, phantom
from lightning_fastdata.augment.record.targets import (
    channels_as_given,
    channels_behind,
    check_images,
    places_of,
    size_of,
    target_roles,
)
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.replay.torch import replay_image, with_rows
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.randomness.seeds import reseed

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import DeviceOp, Tape
    from lightning_fastdata.augment.pipeline.dtypes import DType
    from lightning_fastdata.augment.pipeline.plan import Plan
    from lightning_fastdata.augment.pipeline.tree import Node
    from lightning_fastdata.types import Batch, SampleKey


OnCpu: TypeAlias = Literal["albumentations", "torch"]
"""What makes the pixels of a batch that lies on the CPU: Albumentations itself, or what would make
them on a device."""


class ForeignBatches:
    """Runs one pipeline on batches that another loader has collated.

    On the CPU Albumentations itself does, sample by sample, unless ``on_cpu`` says otherwise; on
    devices so it does where there is a ``refusal``, and in samples for which an operation without a
    device form was drawn.
    """

    def __init__(
        self,
        compose: Node,
        ops: Mapping[str, DeviceOp],
        refusal: str | None,
        *,
        on_cpu: OnCpu = "albumentations",
    ) -> None:
        self._compose = copy.deepcopy(compose)
        self._ops = ops
        self._refusal = refusal
        self._on_cpu = on_cpu
        self._recorders: dict[object, Recorder | None] = {}
        self._looked = False

    def run(self, batch: Batch, fields: Fields, key: SampleKey) -> Batch:
        """Return a batch, on any device, with its images and masks transformed.

        Images are ``[n, C, H, W]`` or ``[n, H, W, C]``; sample ``i`` draws with ``key.index + i``.

        Raises:
            BatchError: the image is no batch, or one of floats outside of [0, 1]; or a mask or
                another image is no tensor of as many samples.
            TransformError: the pipeline needs boxes or keypoints.
        """
        if self._compose.processors:
            names = " and ".join(sorted(self._compose.processors))
            raise TransformError(
                f"The pipeline transforms {names} too, and those cannot be told apart in a batch "
                "that another loader has collated. Give the pipeline to "
                "FastDataModule(augment=...) and let FastDataModule load the data."
            )
        places = places_of(batch, fields, self._compose)
        image = get_field(batch, places["image"])
        check_images(image, values=not self._looked)
        # A device is asked once, as the host waits for it.
        self._looked = image.device.type != "cpu"
        size = size_of(image)
        given = {name: get_field(batch, place) for name, place in places.items()}
        for place in places.values():
            if not isinstance(mask := get_field(batch, place), torch.Tensor) or len(mask) != len(
                image
            ):
                raise BatchError(
                    f"The field {place!r} is {describe(mask)}. Expected a tensor of {len(image)} "
                    "samples, as the images are. If some samples lack it, give the pipeline to "
                    "FastDataModule(augment=...), which sees samples before they are collated."
                )
        tensors, turned = channels_behind(given, size)
        channels = int(tensors["image"].shape[3]) if image.ndim == 4 else None
        roles = target_roles(self._compose)
        recorder = None
        if image.device.type != "cpu" or self._on_cpu == "torch":
            images, masks = (
                {numpy_dtype(one.dtype) for name, one in tensors.items() if roles[name] == role}
                for role in ("image", "mask")
            )
            if why_no_forms(images, masks) is None:
                recorder = self._recorder(size, channels, *images)
        replayed = None if recorder is None else replay_all(tensors, key, recorder, self._ops)
        results, is_chw = replayed or run_each(tensors, key, self._compose)
        results = channels_as_given(results, turned, self._compose, images_are_chw=is_chw)
        return put_fields(batch, {places[name]: results[name] for name in places})

    def plan(self, size: tuple[int, int], channels: int | None = 3, dtype: DType = BYTES) -> Plan:
        """Return where operations run for images of one form."""
        return analyse(
            self._compose,
            self._ops,
            size=size,
            refusal=self._refusal,
            channels=channels,
            dtype=dtype,
        )

    def _recorder(
        self, size: tuple[int, int], channels: int | None, dtype: DType
    ) -> Recorder | None:
        """Return the recorder for images of one form, or None if nothing may be deferred."""
        form = (size, channels, dtype)
        if form not in self._recorders:
            plan = self.plan(size, channels, dtype)
            possible = (plan.defers or not plan.placements) and plan.opaque_until < 0
            self._recorders[form] = Recorder(self._compose, plan, self._ops) if possible else None
        return self._recorders[form]


def run_each(
    tensors: Mapping[str, torch.Tensor], key: SampleKey, compose: Node
) -> tuple[dict[str, torch.Tensor], bool]:
    """Run a pipeline on every sample on the CPU; also say whether images came out as CHW."""
    device = tensors["image"].device
    arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    outs: dict[str, list[torch.Tensor]] = {name: [] for name in tensors}
    is_chw = False
    for row in range(len(tensors["image"])):
        reseed((compose,), key._replace(index=key.index + row))
        # Copies: Albumentations writes to a gray image that it equalizes.
        result = compose(**{name: array[row].copy() for name, array in arrays.items()})
        is_chw = isinstance(result["image"], torch.Tensor)
        for name in tensors:
            outs[name].append(_as_tensor(result[name], tensors[name]))
    for name, rows in outs.items():
        if len(sizes := {tuple(one.shape) for one in rows}) > 1:
            raise TransformError(
                f"The pipeline makes {name}s of different shapes of one batch: {sorted(sizes)}. "
                "End it with an operation that makes them one size: Resize, RandomCrop, ..."
            )
    return {name: torch.stack(rows).to(device) for name, rows in outs.items()}, is_chw


def replay_all(
    tensors: Mapping[str, torch.Tensor],
    key: SampleKey,
    recorder: Recorder,
    ops: Mapping[str, DeviceOp],
) -> tuple[dict[str, torch.Tensor], bool] | None:
    """Draw every sample here, and compute the draws where the batch lies.

    Samples in which an operation needs real pixels are fetched one by one and put back. None: by
    then they have another shape or dtype than the others, so that nothing can be left to the
    device.
    """
    samples = len(tensors["image"])
    shown = {
        name: phantom(tuple(tensor.shape[1:]), numpy_dtype(tensor.dtype))
        for name, tensor in tensors.items()
    }
    tapes: list[Tape] = []
    is_chw = False
    ran: dict[str, dict[int, torch.Tensor]] = {name: {} for name in tensors}
    for row in range(samples):
        reseed((recorder.compose,), key._replace(index=key.index + row))
        sources = {name: functools.partial(_fetch, tensor, row) for name, tensor in tensors.items()}
        result, tape = recorder(shown, sources)
        tapes.append(tape)
        is_chw = is_chw or isinstance(result["image"], torch.Tensor)
        for name, tensor in tensors.items():
            if not callable(result[name]):
                ran[name][row] = _as_tensor(result[name], tensor)
    for name, tensor in tensors.items():
        rows = [*ran[name].values(), *([] if len(ran[name]) == samples else [tensor[0]])]
        if len({(row.shape, row.dtype) for row in rows}) > 1:
            return None
    draws = compile_tapes(tapes, fuse=registry.fuse())
    draws = draws.to(tensors["image"].device, non_blocking=True)
    results = {name: with_rows(tensor, ran[name]) for name, tensor in tensors.items()}
    for name, program in draws.programs.items():
        results[name] = replay_image(program, draws.blob, results[name], ops)
    image = draws.programs.get("image")
    return results, is_chw or (image is not None and image.makes_tensor)


def _fetch(tensor: torch.Tensor, row: int) -> np.ndarray:
    pixels: np.ndarray = tensor[row].cpu().numpy()
    return pixels


def _as_tensor(made: Any, batch: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", mask_as_given(torch.from_numpy(np.asarray(made).copy()), batch))

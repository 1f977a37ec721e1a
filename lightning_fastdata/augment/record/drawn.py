"""Draws that are made without a batch at hand, for any tensors of their form."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from lightning_fastdata.augment.collated_batches import refuse_pixels
from lightning_fastdata.augment.pipeline.fields import describe, numpy_dtype
from lightning_fastdata.augment.pipeline.values import Values
from lightning_fastdata.augment.record.tape import Recorder, phantom
from lightning_fastdata.augment.record.targets import (
    channels_as_given,
    channels_behind,
    target_roles,
)
from lightning_fastdata.augment.replay.program import Draws, compile_tapes
from lightning_fastdata.augment.replay.torch import replay_image
from lightning_fastdata.errors import BatchError, OptionsError
from lightning_fastdata.randomness.seeds import reseed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from albumentations import BaseCompose

    from lightning_fastdata.augment.ops.operation import DeviceOp, Tape
    from lightning_fastdata.types import Batch, SampleKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """What draws depend on of the images that they are for."""

    size: tuple[int, int]
    """Height and width in pixels, of masks too."""
    channels: int
    """Channels of the images."""
    dtype: torch.dtype
    """``torch.uint8``, or ``torch.float32`` for values in [0, 1]."""

    @property
    def values(self) -> Values:
        """What is known of the values of the images."""
        return Values(numpy_dtype(self.dtype))

    def __post_init__(self) -> None:
        if self.dtype not in {torch.uint8, torch.float32}:
            raise OptionsError(f"dtype is {self.dtype}; draw for torch.uint8 or torch.float32.")
        if min(*self.size, self.channels) < 1:
            raise OptionsError(
                f"size is {self.size} and channels is {self.channels}; give the height, the width "
                "and the channels of the images, each at least 1."
            )


class ExplicitDraws(Draws):
    """What a pipeline drew for images of one form that it has not seen; picklable."""

    __slots__ = ("form", "targets")

    def __init__(
        self, drawn: Draws, form: ImageForm, targets: tuple[dict[str, Any], ...] | None
    ) -> None:
        super().__init__(drawn.samples, drawn.programs, drawn.blob, drawn.beside)
        self.form = form
        """Images that they are for."""
        self.targets = targets
        """Boxes, keypoints and labels of each sample as the pipeline returns them; None if none
        were given."""

    def describe(self, sample: int, target: str = "image") -> list[tuple[str, dict[str, Any]]]:
        """Return the operations that one sample drew, in their order.

        It reads what is sent to the device, and waits for the device if the draws are there.

        Args:
            sample: number of the sample, from 0.
            target: the image or mask that they are for.

        Returns:
            Class names, and settings and numbers by name: of some operations what was drawn, of
            others what follows from it, such as a matrix or a table of 256 values.

        Raises:
            OptionsError: there is no such sample or target.
        """
        if not 0 <= sample < self.samples or target not in self.programs:
            raise OptionsError(
                f"There is no {target!r} of sample {sample}: drawn were {self.samples} samples, "
                f"each with {', '.join(self.programs)}."
            )
        blob = self.blob.cpu()
        described = []
        for step in self.programs[target].steps:
            for part in step.parts:
                rows = range(self.samples) if part.rows is None else part.rows.view(blob).tolist()
                if sample in rows:
                    place = rows.index(sample)
                    arrays = {name: slot.view(blob)[place] for name, slot in part.arrays.items()}
                    numbers = {name: array.tolist() for name, array in arrays.items()}
                    described.append((step.name, {**dict(part.static), **numbers}))
        return described


def draw_samples(
    recorder: Recorder,
    ops: Mapping[str, DeviceOp],
    form: ImageForm,
    samples: int,
    key: SampleKey,
    targets: Sequence[Mapping[str, Batch]] | None = None,
) -> ExplicitDraws:
    """Return what a pipeline draws for images and masks of which only the form is known.

    Sample ``i`` draws with ``key.index + i``; ``targets`` are the boxes, keypoints and labels of
    each sample, as the pipeline takes them.

    Raises:
        BatchError: ``targets`` are not of so many samples, or not what the pipeline needs.
        TransformError: what was drawn needs the pixels.
    """
    _check_targets(targets, recorder.compose, samples)
    roles = target_roles(recorder.compose)
    shown = {
        name: phantom((*form.size, form.channels), form.values.dtype)
        if role == "image"
        else phantom(form.size, np.dtype(np.uint8))
        for name, role in roles.items()
    }
    tapes: list[Tape] = []
    returned: list[dict[str, Batch]] = []
    for row in range(samples):
        reseed((recorder.compose,), key._replace(index=key.index + row))
        sources = dict.fromkeys(roles, functools.partial(_refuse, recorder, row))
        given = {} if targets is None else dict(targets[row])
        result, tape = recorder({**shown, **given}, sources)
        tapes.append(tape)
        returned.append({name: result[name] for name in given})
    drawn = compile_tapes(tapes, ops)
    return ExplicitDraws(drawn, form, None if targets is None else tuple(returned))


def carry_out(
    tensors: Mapping[str, torch.Tensor],
    draws: ExplicitDraws,
    ops: Mapping[str, DeviceOp],
    compose: BaseCompose,
) -> dict[str, torch.Tensor]:
    """Return images and masks, by the pipeline's names for them, after what was drawn.

    Images are ``[n, H, W, C]`` or ``[n, C, H, W]`` (``[n, H, W]`` of one channel), masks
    ``[n, H, W]``, ``[n, H, W, C]`` or ``[n, C, H, W]``, all on one device; the draws follow them.

    Raises:
        BatchError: a tensor is of another form than was drawn for.
    """
    roles = target_roles(compose)
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, draws, is_image=roles[name] == "image")
    behind, turned = channels_behind(tensors, draws.form.size)
    device = next(iter(tensors.values())).device
    local = draws if draws.blob.device == device else draws.to(device, non_blocking=True)
    results = {
        name: replay_image(local.programs[name], local.blob, tensor, ops)
        for name, tensor in behind.items()
    }
    images_are_chw = draws.programs["image"].makes_tensor
    return channels_as_given(results, turned, compose, images_are_chw=images_are_chw)


def _refuse(recorder: Recorder, row: int) -> NoReturn:
    raise refuse_pixels(recorder.reading, row)


def _check_targets(
    targets: Sequence[Mapping[str, Batch]] | None, compose: BaseCompose, samples: int
) -> None:
    if samples < 1:
        raise OptionsError(f"n is {samples}; draw for at least 1 sample.")
    needed = [
        name
        for processor in compose.processors.values()
        for name in (processor.default_data_name, *(processor.params.label_fields or ()))
    ]
    if targets is None and not needed:
        return
    example = ", ".join(f"{name!r}: ..." for name in needed)
    if targets is None or len(targets) != samples:
        got = "none" if targets is None else len(targets)
        raise BatchError(
            f"The pipeline needs targets for {samples} samples, but got {got}: give "
            f"targets=[{{{example}}}, ...], one for each sample."
        )
    for row, one in enumerate(targets):
        if set(one) != set(needed):
            raise BatchError(
                f"The targets of sample {row} are {sorted(one)}. The pipeline takes "
                f"{sorted(needed) or 'none: it has no bbox_params or keypoint_params'}."
            )


def _check_tensor(name: str, tensor: object, draws: ExplicitDraws, *, is_image: bool) -> None:
    form, ok = draws.form, False
    if isinstance(tensor, torch.Tensor) and tensor.ndim in {3, 4} and len(tensor) == draws.samples:
        shape, size = tuple(tensor.shape[1:]), form.size
        if is_image:
            layouts = {(*size, form.channels), (form.channels, *size)}
            flat = form.channels == 1 and shape == size
            ok = (flat or shape in layouts) and tensor.dtype == form.dtype
        else:
            ok = size in {shape[:2], shape[-2:]}
    if not ok:
        what = f"{form.dtype} with {form.channels} channels" if is_image else "any dtype"
        raise BatchError(
            f"The {name} is {describe(tensor)}, but was drawn for {draws.samples} samples of "
            f"{form.size[0]} x {form.size[1]} pixels (height x width), {what}. Draw with the n, "
            "size, channels and dtype of the tensors."
        )

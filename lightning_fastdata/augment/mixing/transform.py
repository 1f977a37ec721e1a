"""A pipeline, repeated augmentation and mixing behind them, as one transform of batches."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightning_fastdata.augment.mixing.fields import Mixer, Places
from lightning_fastdata.augment.mixing.step import MixStep
from lightning_fastdata.augment.ops.operation import Tape
from lightning_fastdata.augment.ops.output import OutputForm, check_form, output_form
from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    find_fields,
    get_field,
    listed,
    put_fields,
)
from lightning_fastdata.augment.record.targets import convert_images
from lightning_fastdata.augment.record.worker import ComposeWorker
from lightning_fastdata.augment.replay.program import Draws, compile_tapes
from lightning_fastdata.augment.stage_transform import plain_tensors, table
from lightning_fastdata.augment.transform import BatchTransform, as_batch_transform
from lightning_fastdata.errors import OptionsError, TransformError
from lightning_fastdata.types import Batch, SampleKey

if TYPE_CHECKING:
    import torch

    from lightning_fastdata.augment.pipeline.tree import Node
    from lightning_fastdata.augment.replay.warm_up import Variant
    from lightning_fastdata.augment.stage_transform import PlaceSwitch


def repeated_key(key: SampleKey, repeats: int, number: int) -> SampleKey:
    """Return the key of one augmentation of a sample, as if the dataset were so much longer."""
    return key._replace(index=key.index * repeats + number)


def repeat_batch(batch: Batch, samples: int, repeats: int) -> Batch:
    """Return a batch in which every sample stands ``repeats`` times, one after the other."""
    if not isinstance(batch, Mapping | list | tuple):
        return repeat_entries(batch, samples, repeats)
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return put_fields(batch, {at: repeat_entries(one, samples, repeats) for at, one in entries})


def repeat_entries(field: Batch, samples: int, repeats: int) -> Batch:
    """Return a field with each entry ``repeats`` times; a field of no entries as it is."""
    if isinstance(field, Tensor) and field.ndim and len(field) == samples:
        return field.repeat_interleave(repeats, 0)
    if isinstance(field, list | tuple) and len(field) == samples:
        return [one for one in field for _ in range(repeats)]
    return field


_NUMBERS, _ORDER = "mixing numbers", "mixing order"


def mixed(
    *steps: object,
    image: int | str | None = None,
    mask: int | str | None = None,
    stays: int | str | Sequence[int | str] = (),
    label: int | str | Sequence[int | str] | None = None,
    boxes: int | str | None = None,
    classes: int | str | None = None,
    num_classes: int | Sequence[int | None] | None = None,
    repeats: int = 1,
    same_pixels: bool = False,
    out: str | None = None,
    channels_last: bool = False,
) -> MixedTransform:
    """Return a transform that mixes the samples of a batch, behind a pipeline or alone.

    For example ``FastDataModule(augment=mixed(compose, CutMix(), RandomErasing(),
    num_classes=10))``. What is drawn for a sample depends on ``(seed, epoch, dataset index)``
    alone; who it is mixed with, also on which samples are in its batch, not on their order.

    Args:
        steps: an ``A.Compose`` first, if there is one; then ``MixUp``, ``CutMix``, ``Mosaic``,
            ``RandomErasing`` or ``OneOfMixes``, in the order in which they run.
        image: key or index of the image in a sample and in a batch; None finds it.
        mask: key or index of the mask; None takes the key ``"mask"`` where there is one.
        stays: what is left as it is, as :func:`as_batch_transform` takes it.
        label: key or index of the labels: classes ``[n]`` or one-hot ``[n, classes]``; they become
            shares ``[n, classes]``, float32, in every batch. None takes the key ``"label"``,
            ``"labels"``, ``"target"`` or ``"targets"``, or the field behind the image in a tuple;
            with ``boxes`` there are none. Several, for a model with several heads, are a list.
        boxes: key or index of the boxes: a list of ``[k, 4]`` tensors of left, top, right, bottom
            in pixels. None: there are none.
        classes: key or index of what belongs to each box: a list of ``[k, ...]`` tensors.
        num_classes: number of classes; needed where labels are not one-hot. For several labels a
            list, one entry for each.
        repeats: augmentations of each sample in a batch, which then has so many times as many
            samples as the loader's ``batch_size``. A sample is read once for all of them, and a
            ``collate_fn`` gets them all.
        same_pixels: as :func:`as_batch_transform` takes it.
        out: the same; images are mixed as the pipeline makes them, and then converted.
        channels_last: the same.

    Raises:
        TransformError: nothing to mix with was given, or a pipeline that is not the first, or one
            that transforms what the mixing would leave as it is: keypoints, additional targets, or
            boxes without ``boxes=``.
        OptionsError: ``repeats`` is below 1, there are not as many ``num_classes`` as labels, or
            ``out`` is no dtype.
    """
    output = output_form(out, channels_last=channels_last)
    if repeats < 1:
        raise OptionsError(f"repeats is {repeats}; give the augmentations per sample, at least 1.")
    rest = list(steps)
    pipeline = None
    if rest and not isinstance(rest[0], MixStep):
        first = as_batch_transform(
            rest.pop(0), image=image, mask=mask, stays=stays, same_pixels=same_pixels
        )
        if not isinstance(first, BatchTransform):
            raise TransformError(
                f"{first.name} comes before what mixes, and only an albumentations Compose can. "
                "Register a callable by itself, behind the mixing."
            )
        output = output if output.converts else first.form
        check_form(output, first.compose)
        pipeline = copy.copy(first)
        pipeline.form = OutputForm()  # What it makes is mixed before it is converted.
    mixes = tuple(step for step in rest if isinstance(step, MixStep))
    wrong = [step for step in rest if not isinstance(step, MixStep)]
    if wrong or (not rest and repeats == 1):
        what = f"{wrong[0]!r} does not mix" if wrong else "There is nothing that mixes"
        raise TransformError(
            f"{what}. Give mixed() an albumentations Compose first, if you have one, and then "
            "MixUp, CutMix, Mosaic, RandomErasing or OneOfMixes."
        )
    if pipeline is not None and any(step.sees_others for step in mixes):
        _check_all_is_mixed(pipeline, boxes)
    labels = listed(label)
    counts = listed(num_classes) or (None,) * max(1, len(labels))
    if len(counts) != max(1, len(labels)):
        raise OptionsError(
            f"num_classes={num_classes!r} for label={label!r}: give one number for each label, in "
            "the same order; None for one that is one-hot."
        )
    fields = Fields(image=image, mask=mask, stays=listed(stays))
    places = Places(fields=fields, labels=labels, boxes=boxes, classes=classes)
    return MixedTransform(pipeline, Mixer(mixes, places, counts, output), repeats)


def _check_all_is_mixed(pipeline: BatchTransform, boxes: int | str | None) -> None:
    """Refuse to mix images whose keypoints, boxes or further images would stay behind."""
    processors = pipeline.compose.processors
    others = sorted(pipeline.compose.additional_targets)
    if "bboxes" in processors and boxes is None:
        raise TransformError(
            "The pipeline transforms boxes, and mixing has to know where they are in a batch: "
            'mixed(..., boxes="bboxes"). Only RandomErasing and repeats leave them alone.'
        )
    if "keypoints" in processors or others:
        what = f"the additional targets {', '.join(others)}" if others else "keypoints"
        raise TransformError(
            f"The pipeline transforms {what}, which cannot be mixed, so that they would no longer "
            "belong to their images. Only RandomErasing and repeats leave them alone."
        )


class MixedTransform:
    """An Albumentations pipeline or none, and what mixes the batch behind it; see :func:`mixed`.

    Attributes:
        pipeline: what runs on each sample before the mixing, or None.
        repeats: how often each sample of the loader is in a batch.
    """

    starts_in_worker = True
    switch: PlaceSwitch | None = None
    defers = True

    def __init__(self, pipeline: BatchTransform | None, mixer: Mixer, repeats: int = 1) -> None:
        self.name = ", ".join([*([pipeline.name] if pipeline else []), *map(_name, mixer.steps)])
        self.pipeline = pipeline
        self.repeats = repeats
        self._mixer = mixer

    @property
    def compose(self) -> Node | None:
        """The ``A.Compose`` that runs before the mixing, or None."""
        return None if self.pipeline is None else self.pipeline.compose

    def redrawn(self) -> tuple[str, ...]:
        """Return the operations of which a device makes other pixels of the same distribution."""
        return () if self.pipeline is None else self.pipeline.redrawn()

    def kernels(self, device: torch.device, sample: Batch) -> tuple[Variant, ...]:  # noqa: ARG002
        """Return nothing: the kernels of a pipeline that mixing follows are compiled when used."""
        return ()

    def check_sample(self, sample: Batch) -> None:
        """Raise BatchError if a sample of the dataset holds no image that can be read."""
        if self.pipeline is not None:
            self.pipeline.check_sample(sample)
        else:
            find_fields(sample, self._mixer.places.fields, batched=False)

    def for_samples(self, samples: Iterable[Any]) -> MixedTransform:
        """Return the transform for a dataset, of which these are samples from all over it."""
        pipeline = None if self.pipeline is None else self.pipeline.for_samples(samples)
        return MixedTransform(pipeline, self._mixer, self.repeats)

    def made_of(self) -> tuple[object, ...]:
        """Return the pipeline, and what mixes."""
        return (self.compose, *self._mixer.steps)

    def renewed(self) -> MixedTransform:
        """Return the transform as the pipeline is now: itself, if nothing of that has changed."""
        pipeline = None if self.pipeline is None else self.pipeline.renewed()
        if pipeline is self.pipeline:
            return self
        return MixedTransform(pipeline, self._mixer, self.repeats)

    def in_worker(self, *, on_device: bool) -> MixedWorker:
        """Return the part that runs on each sample in the side process."""
        inner = None if self.pipeline is None else self.pipeline.in_worker(on_device=on_device)
        return MixedWorker(inner, self._mixer, self.repeats)

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Run the pipeline, then the mixing; BatchError if a field has not the form it needs."""
        if draws is None:
            return batch
        if self.pipeline is not None:
            batch = self.pipeline.apply(batch, draws)
        return _mix(self._mixer, batch, draws)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw and apply in one go, for a batch of another loader."""
        if self.repeats > 1:
            batch = repeat_batch(batch, len(self._images(batch)), self.repeats)
            key = repeated_key(key, self.repeats, 0)
        if self.pipeline is not None:
            batch = self.pipeline.apply_unprepared(batch, key)
        images = self._images(batch)
        keys = [key._replace(index=key.index + row) for row in range(len(images))]
        drawn = [draw_numbers(self._mixer.steps, own) for own in keys]
        return _mix(self._mixer, batch, _pack(drawn).to(images.device, True))

    def _images(self, batch: Batch) -> Tensor:
        found = find_fields(batch, self._mixer.places.fields, batched=True)
        images: Tensor = get_field(batch, found.image)
        return images

    def explain(self) -> str:
        """Return where each operation runs and why, as text."""
        placed = () if self.pipeline is None else self.pipeline.plan.placements
        rows = [(row.name, row.where, row.why) for row in placed]
        steps = [(_name(step), "batch", "mixes its samples") for step in self._mixer.steps]
        if self.repeats > 1:
            steps.insert(0, ("repeats", "worker", f"{self.repeats} augmentations of each sample"))
        return table(rows + steps)


class MixedWorker:
    """The part of a mixed transform that runs on each sample; picklable."""

    needs_batches = True

    def __init__(self, inner: ComposeWorker | None, mixer: Mixer, repeats: int = 1) -> None:
        self._inner = inner
        self._mixer = mixer
        self.repeats = repeats

    def __call__(self, sample: Batch, key: SampleKey) -> tuple[Batch, object]:
        """Return the sample as the worker leaves it, and what was drawn for it.

        With repeats, these are a list of samples and a list of draws.
        """
        if self.repeats == 1:
            return self._once(sample, key)
        keys = [repeated_key(key, self.repeats, number) for number in range(self.repeats)]
        each = [self._once(sample, own) for own in keys]
        return [one for one, _ in each], [drawn for _, drawn in each]

    def _once(self, sample: Batch, key: SampleKey) -> tuple[Batch, object]:
        self._mixer.check_classes(sample)
        tape: Tape | None = None
        if self._inner is not None:
            sample, tape = self._inner(sample, key)
        return sample, (tape, draw_numbers(self._mixer.steps, key))

    def words(self, sample: Batch, key: SampleKey) -> list[tuple[str, ...]]:
        """Return what is drawn for each repeat of a sample, in words; steps show all numbers."""
        said = []
        for number in range(self.repeats):
            own = repeated_key(key, self.repeats, number) if self.repeats > 1 else key
            numbers = iter(draw_numbers(self._mixer.steps, own)[0])
            steps = (
                f"{step!r}: {', '.join(f'{value:.4g}' for value in islice(numbers, step.count()))}"
                for step in self._mixer.steps
            )
            inner = () if self._inner is None else self._inner.words(sample, own)[0]
            said.append((*inner, *steps))
        return said

    def _each(self, drawn: Sequence[Any]) -> list[Any]:
        return list(drawn) if self.repeats == 1 else [one for each in drawn for one in each]

    def collate(self, drawn: Sequence[Any]) -> Draws:
        """Return what was drawn for a batch, packed in the order of its samples."""
        each = self._each(drawn)
        numbers = [own for _, own in each]
        if self._inner is None:
            return _pack(numbers)
        return self._inner.collate([tape for tape, _ in each], stack_drawn(numbers))

    def stacks(self, samples: Sequence[Batch], drawn: Sequence[Any], batch: Batch = None) -> bool:
        """Return whether what waits for the device can be one tensor, or is one in a batch."""
        tapes = [tape for tape, _ in self._each(drawn)]
        return self._inner is None or self._inner.stacks(self._each(samples), tapes, batch)

    def finish_each(
        self, samples: Sequence[Batch], drawn: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return samples of which only the mixing waits for the device, and what it drew."""
        if self._inner is None:
            return list(samples), list(drawn)
        tapes, numbers = zip(*self._each(drawn), strict=True)
        done, left = self._inner.finish_each(self._each(samples), tapes)
        each = list(zip(left, numbers, strict=True))
        if self.repeats == 1:
            return done, each
        firsts = range(0, len(done), self.repeats)
        return [done[at : at + self.repeats] for at in firsts], [
            each[at : at + self.repeats] for at in firsts
        ]

    def finish(self, batch: Batch, drawn: Sequence[Any]) -> Batch:
        """Return a batch that was collated here, mixed; for where nothing runs on the device."""
        return _mix(self._mixer, batch, _pack([numbers for _, numbers in self._each(drawn)]))


def _mix(mixer: Mixer, batch: Batch, draws: Draws) -> Batch:
    if mixer.steps:
        numbers, order = (draws.beside[name].view(draws.blob) for name in (_NUMBERS, _ORDER))
        batch = mixer.mix(batch, numbers, order)
    with plain_tensors():
        return convert_images(batch, mixer.places.fields, {}, mixer.output)


def draw_numbers(steps: Sequence[MixStep], key: SampleKey) -> tuple[list[float], list[int]]:
    """Return all numbers of one sample: those of the steps, and one to find partners by per step.

    They belong to the key, and to no other key; the pipeline's own draws are independent of them.
    """
    text = b"mixing %d,%d,%d" % key
    digest = hashlib.blake2b(text, digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, np.uint64)))
    numbers: list[float] = []
    order = []
    for step in steps:
        order.append(int(generator.integers(0, 2**63, dtype=np.uint64)))
        numbers += step.draw(generator)
    return numbers, order


def stack_drawn(drawn: Sequence[tuple[list[float], list[int]]]) -> dict[str, np.ndarray]:
    """Return the numbers of a batch: float64 ``[n, count]`` and int64 ``[n, steps]``."""
    return {
        _NUMBERS: np.array([numbers for numbers, _ in drawn], np.float64).reshape(len(drawn), -1),
        _ORDER: np.array([order for _, order in drawn], np.int64).reshape(len(drawn), -1),
    }


def _pack(drawn: Sequence[tuple[list[float], list[int]]]) -> Draws:
    return compile_tapes([{}] * len(drawn), beside=stack_drawn(drawn))


def _name(step: MixStep) -> str:
    return type(step).__name__

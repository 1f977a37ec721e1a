"""A pipeline, and mixing behind it, as one transform of batches."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lightning_fastdata.augment.callables import plain_tensors, table
from lightning_fastdata.augment.fields import (
    Fields,
    Location,
    channels_first,
    describe,
    find_fields,
    get_field,
    has_field,
    put_fields,
)
from lightning_fastdata.augment.mixing.parts import MixStep, Parts
from lightning_fastdata.augment.program import Draws, compile_tapes
from lightning_fastdata.augment.transform import ComposeTransform, as_batch_transform
from lightning_fastdata.errors import BatchError, TransformError

if TYPE_CHECKING:
    from lightning_fastdata.augment.tape import Tape
    from lightning_fastdata.augment.transform import ComposeWorker
    from lightning_fastdata.types import Batch, SampleKey

_LABEL_KEYS = ("label", "labels", "target", "targets")
_NUMBERS, _ORDER = "mixing numbers", "mixing order"


def mixed(
    *steps: Any,
    image: int | str | None = None,
    mask: int | str | None = None,
    label: int | str | None = None,
    boxes: int | str | None = None,
    classes: int | str | None = None,
    num_classes: int | None = None,
    same_pixels: bool = False,
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
        label: key or index of the labels: classes ``[n]`` or one-hot ``[n, classes]``; they become
            shares ``[n, classes]``, float32, in every batch. None takes the key ``"label"``,
            ``"labels"``, ``"target"`` or ``"targets"``, or the field behind the image in a tuple.
        boxes: key or index of the boxes: a list of ``[k, 4]`` tensors of left, top, right, bottom
            in pixels. None: there are none.
        classes: key or index of what belongs to each box: a list of ``[k, ...]`` tensors.
        num_classes: number of classes; needed where labels are not one-hot.
        same_pixels: as :func:`as_batch_transform` takes it.

    Raises:
        TransformError: nothing to mix with was given, or a pipeline that is not the first.
    """
    rest = list(steps)
    pipeline = None
    if rest and not _is_step(rest[0]):
        first = as_batch_transform(rest.pop(0), image=image, mask=mask, same_pixels=same_pixels)
        if not isinstance(first, ComposeTransform):
            raise TransformError(
                f"{first.name} comes before what mixes, and only an albumentations Compose can. "
                "Register a callable by itself, behind the mixing."
            )
        pipeline = first
    wrong = [step for step in rest if not _is_step(step)]
    if wrong or not rest:
        what = f"{wrong[0]!r} does not mix" if wrong else "There is nothing that mixes"
        raise TransformError(
            f"{what}. Give mixed() an albumentations Compose first, if you have one, and then "
            "MixUp, CutMix, Mosaic, RandomErasing or OneOfMixes."
        )
    places = Places(
        fields=Fields(image=image, mask=mask), label=label, boxes=boxes, classes=classes
    )
    return MixedTransform(pipeline, tuple(rest), places, num_classes)


def _is_step(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("count", "draw", "mix"))


class Places(NamedTuple):
    """Where the fields are that mixing changes."""

    fields: Fields
    """Image and mask."""
    label: int | str | None
    """Labels of whole images."""
    boxes: int | str | None
    """Boxes."""
    classes: int | str | None
    """What belongs to each box."""


class MixedTransform:
    """An Albumentations pipeline or none, and what mixes the batch behind it; see :func:`mixed`."""

    starts_in_worker = True
    ends_on_batch = True
    """Whether it has to see the batch even where the pipeline runs whole in the workers."""

    def __init__(
        self,
        pipeline: ComposeTransform | None,
        steps: tuple[MixStep, ...],
        places: Places,
        num_classes: int | None,
    ) -> None:
        self.name = ", ".join([*([pipeline.name] if pipeline else []), *map(_name, steps)])
        self.steps = steps
        self._pipeline = pipeline
        self._places = places
        self._num_classes = num_classes

    def check_sample(self, sample: Any) -> None:
        """Raise BatchError if a sample of the dataset holds no image that can be read."""
        if self._pipeline is not None:
            self._pipeline.check_sample(sample)
        else:
            find_fields(sample, self._places.fields, batched=False)

    def in_worker(self, *, on_device: bool) -> MixedWorker:
        """Return the part that runs on each sample in the side process."""
        pipeline = self._pipeline
        inner = None if pipeline is None else pipeline.in_worker(on_device=on_device)
        return MixedWorker(inner, self.steps)

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Carry out what was drawn: first the pipeline, then what mixes.

        Raises:
            BatchError: a field is missing or has another form than mixing needs.
        """
        if draws is None:
            return batch
        if self._pipeline is not None:
            batch = self._pipeline.apply(batch, draws)
        numbers, order = (draws.beside[name].view(draws.blob) for name in (_NUMBERS, _ORDER))
        return self._mix(batch, numbers, order)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw here and carry out, for a batch of another loader."""
        if self._pipeline is not None:
            batch = self._pipeline.apply_unprepared(batch, key)
        image = get_field(batch, find_fields(batch, self._places.fields, batched=True).image)
        drawn = [
            draw_numbers(self.steps, key._replace(index=key.index + row))
            for row in range(len(image))
        ]
        draws = _pack(drawn).to(image.device)
        numbers, order = (draws.beside[name].view(draws.blob) for name in (_NUMBERS, _ORDER))
        return self._mix(batch, numbers, order)

    def explain(self) -> str:
        """Return where each operation runs and why, as text."""
        rows = [] if self._pipeline is None else list(self._pipeline.plan.placements)
        return table([(row.name, row.where, row.why) for row in rows] + self._step_rows())

    def explain_on_batch(self) -> str:
        """Return the same for what mixes alone."""
        return table(self._step_rows())

    def _step_rows(self) -> list[tuple[str, str, str]]:
        return [(_name(step), "batch", "mixes samples; drawn by sample") for step in self.steps]

    def _mix(self, batch: Batch, numbers: torch.Tensor, order: torch.Tensor) -> Batch:
        with plain_tensors():
            found = self._find(batch)
            image = get_field(batch, found["image"])
            if not isinstance(image, torch.Tensor) or image.ndim not in {3, 4}:
                raise BatchError(
                    f"Mixing needs a batch of images of one size, but the image field is "
                    f"{describe(image)}."
                )
            if len(image) != len(numbers):
                raise BatchError(
                    f"The image field is {describe(image)}, but was drawn for {len(numbers)} "
                    "samples. A collate_fn must keep the samples of a batch, in order."
                )
            form = _Form(image)
            parts = self._parts(batch, found, form)
            start = 0
            for number, step in enumerate(self.steps):
                own = numbers[:, start : start + step.count()]
                parts = step.mix(parts, own, order[:, number])
                start += step.count()
            values = {
                "image": form.restored(parts.image),
                "label": parts.labels,
                "mask": None
                if parts.mask is None
                else _mask_restored(parts.mask, get_field(batch, found["mask"])),
                "boxes": None if parts.boxes is None else list(parts.boxes),
                "classes": None if parts.classes is None else list(parts.classes),
            }
            return put_fields(batch, {found[name]: values[name] for name in found})

    def _find(self, batch: Batch) -> dict[str, Location]:
        image, mask = find_fields(batch, self._places.fields, batched=True)
        found = {"image": image}
        given = {"mask": mask, **self._places._asdict()}
        for name in ("mask", "label", "boxes", "classes"):
            place = given[name]
            if place is None and name == "label":
                place = _label_place(batch, image)
            elif place is not None and not has_field(batch, place):
                raise BatchError(
                    f"There is no field {place!r} (given as {name}=) in {describe(batch)}."
                )
            if place is not None:
                found[name] = place
        return found

    def _parts(self, batch: Batch, found: Mapping[str, Location], form: _Form) -> Parts:
        def field(name: str) -> Any:
            return get_field(batch, found[name]) if name in found else None

        mask = field("mask")
        labels = None if "label" not in found else self._shares(field("label"), form.image.device)
        return Parts(
            image=form.image,
            labels=labels,
            mask=None if mask is None else _mask_parts(mask, form.image),
            boxes=_ragged(field("boxes"), len(form.image), "boxes"),
            classes=_ragged(field("classes"), len(form.image), "classes"),
        )

    def _shares(self, labels: Any, device: torch.device) -> torch.Tensor:
        if not isinstance(labels, torch.Tensor) or labels.ndim not in {1, 2}:
            raise BatchError(
                f"The labels are {describe(labels)}. Mixing needs classes [n] or one-hot rows "
                "[n, classes]; say where they are with label=<key or index>."
            )
        if labels.ndim == 2:
            return labels.float()
        if self._num_classes is None or labels.is_floating_point():
            raise BatchError(
                f"The labels are {describe(labels)}. To mix classes their number is needed: "
                "mixed(..., num_classes=10)."
            )
        # By comparison: one_hot would ask the device for the largest class.
        return (labels[:, None] == torch.arange(self._num_classes, device=device)).float()


def _label_place(batch: Batch, image: Location) -> Location:
    if isinstance(batch, Mapping):
        return next((key for key in _LABEL_KEYS if key in batch), None)
    if isinstance(batch, Sequence) and isinstance(image, int) and len(batch) > image + 1:
        return image + 1
    return None


class _Form:
    """The images of a batch as ``[n, C, H, W]``, and the way back to how they came."""

    def __init__(self, image: torch.Tensor) -> None:
        self._gray = image.ndim == 3
        self._last = image.ndim == 4 and not channels_first(tuple(image.shape[1:]))
        image = image[:, None] if self._gray else image
        self.image = image.permute(0, 3, 1, 2) if self._last else image

    def restored(self, image: torch.Tensor) -> torch.Tensor:
        if self._gray:
            return image[:, 0]
        return image.permute(0, 2, 3, 1).contiguous() if self._last else image


def _mask_parts(mask: Any, image: torch.Tensor) -> torch.Tensor:
    size = tuple(image.shape[2:])
    if isinstance(mask, torch.Tensor) and mask.ndim in {3, 4}:
        if tuple(mask.shape[1:3]) == size:
            return mask if mask.ndim == 3 else mask.permute(0, 3, 1, 2)
        if tuple(mask.shape[2:]) == size:
            return mask
    raise BatchError(
        f"The masks are {describe(mask)} beside images of {size[0]} x {size[1]} pixels. Mixing "
        "needs masks of the size of the images."
    )


def _mask_restored(mask: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    same = tuple(mask.shape) == tuple(given.shape)
    return mask if same else mask.permute(0, 2, 3, 1).contiguous()


def _ragged(value: Any, samples: int, name: str) -> tuple[torch.Tensor, ...] | None:
    if value is None:
        return None
    ok = isinstance(value, list | tuple) and len(value) == samples
    if not ok or not all(isinstance(one, torch.Tensor) for one in value):
        raise BatchError(
            f"The field for {name} is {describe(value)}. Mixing needs a list of {samples} tensors, "
            "one per sample, as a detection collate_fn gives them."
        )
    return tuple(value)


class MixedWorker:
    """The part of a mixed transform that runs on each sample; picklable."""

    def __init__(self, inner: ComposeWorker | None, steps: tuple[MixStep, ...]) -> None:
        self._inner = inner
        self._steps = steps

    def __call__(self, sample: Any, key: SampleKey) -> tuple[Any, Any]:
        """Return the sample as the worker leaves it, and what was drawn for it."""
        tape: Tape | None = None
        if self._inner is not None:
            sample, tape = self._inner(sample, key)
        return sample, (tape, draw_numbers(self._steps, key))

    def collate(self, drawn: Sequence[Any]) -> Draws:
        """Return what was drawn for a batch, packed in the order of its samples."""
        numbers = [own for _, own in drawn]
        if self._inner is None:
            return _pack(numbers)
        return self._inner.collate([tape for tape, _ in drawn], stack_drawn(numbers))


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

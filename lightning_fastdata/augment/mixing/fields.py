"""The fields of a batch that mixing changes: found, brought into one form, and put back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.mixing.step import MixStep, Parts
from lightning_fastdata.augment.ops.output import OutputForm
from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    Location,
    channels_first,
    describe,
    find_fields,
    get_field,
    has_field,
    put_fields,
)
from lightning_fastdata.augment.pipeline.roles import Mover, check_beside
from lightning_fastdata.augment.stage_transform import plain_tensors
from lightning_fastdata.errors import BatchError
from lightning_fastdata.types import Batch

_BOX_KEYS = ("boxes", "bboxes")
_LABEL_KEYS = ("label", "labels", "target", "targets")


class Places(NamedTuple):
    """Where the fields are that mixing changes."""

    fields: Fields
    """Image and mask."""
    labels: tuple[int | str, ...]
    """Labels of whole images; none: to be found."""
    boxes: int | str | None
    """Boxes."""
    classes: int | str | None
    """What belongs to each box."""


class Mixer:
    """Runs steps on whole batches, wherever their fields are."""

    def __init__(
        self,
        steps: tuple[MixStep, ...],
        places: Places,
        num_classes: tuple[int | None, ...],
        output: OutputForm | None = None,
    ) -> None:
        self.steps = steps
        self.places = places
        self.output = output or OutputForm()
        self._num_classes = num_classes

    @property
    def _sees_others(self) -> bool:
        return any(step.sees_others for step in self.steps)

    def check_classes(self, sample: Batch) -> None:
        """Raise BatchError if a class of a sample is none of ``num_classes``.

        It would train as if it had no label: so would -100, which a loss leaves out, as a share of
        a mixture it cannot. On the device a look at it would have to wait.
        """
        if not self._sees_others or not any(self._num_classes):
            return
        image = find_fields(sample, self.places.fields, batched=False).image
        places = self._label_places(sample, image)
        for place, classes in zip(places, self._num_classes, strict=False):
            value = get_field(sample, place) if has_field(sample, place) else None
            if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
                value = value.item()
            if classes is not None and isinstance(value, int | np.integer):
                _check_class(int(value), classes, f"The label {place!r} of a sample")

    def mix(self, batch: Batch, numbers: Tensor, order: Tensor) -> Batch:
        """Return a collated batch with its samples mixed.

        By the numbers drawn for it, float64 ``[n, count]``, and a random number of each sample for
        each step, int64 ``[n, steps]``. BatchError: a field has not the form that mixing needs.
        """
        with plain_tensors():
            found = self._find(batch)
            labels = self._find_labels(batch, found["image"])
            image = get_field(batch, found["image"])
            if not isinstance(image, Tensor) or image.ndim not in {3, 4}:
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
            shares = [
                self._shares(get_field(batch, place), classes, form.image.device)
                for place, classes in zip(labels, self._num_classes, strict=False)
            ]
            self._check_beside(batch, {*found.values(), *labels}, form.image)
            parts = _parts(batch, found, form.image, shares)
            start = 0
            for number, step in enumerate(self.steps):
                own = numbers[:, start : start + step.count()]
                parts = step.mix(parts, own, order[:, number])
                start += step.count()
            changed: dict[Location, object] = {found["image"]: form.restored(parts.image)}
            if parts.mask is not None:
                given = get_field(batch, found["mask"])
                changed[found["mask"]] = _mask_restored(parts.mask, given)
            for name, values in (("boxes", parts.boxes), ("classes", parts.classes)):
                if values is not None:
                    changed[found[name]] = list(values)
            if parts.labels is not None:
                widths = [one.shape[1] for one in shares]
                changed.update(zip(labels, torch.split(parts.labels, widths, 1), strict=True))
            return put_fields(batch, changed)

    def _find(self, batch: Batch) -> dict[str, Location]:
        image, mask = find_fields(batch, self.places.fields, batched=True)
        if not self._sees_others:
            return {"image": image}
        unnamed = [name for name in _BOX_KEYS if isinstance(batch, Mapping) and name in batch]
        if unnamed and self.places.boxes is None:
            raise BatchError(
                f"The batch holds {unnamed[0]!r}, which mixing would leave where they are while "
                f"the images change. Say that these are boxes: mixed(..., boxes={unnamed[0]!r})."
            )
        given = {"mask": mask, "boxes": self.places.boxes, "classes": self.places.classes}
        others = {
            name: _existing(batch, place, name)
            for name, place in given.items()
            if place is not None
        }
        return {"image": image, **others}

    def _check_beside(self, batch: Batch, known: Collection[Location], image: Tensor) -> None:
        """Raise BatchError if something of the images' size would not be mixed."""
        name = next((type(step).__name__ for step in self.steps if step.sees_others), None)
        if name is not None:
            height, width = image.shape[2:]
            mover = Mover(name, takes_boxes=self.places.boxes is not None)
            known = {*known, *self.places.fields.stays}
            check_beside(batch, known, (height, width), mover, samples=len(image))

    def _find_labels(self, batch: Batch, image: Location) -> Sequence[int | str]:
        if not self._sees_others:
            return []
        places = self._label_places(batch, image)
        if not self.places.labels:
            return places
        return [_existing(batch, place, "label") for place in places]

    def _label_places(self, item: Batch, image: Location) -> Sequence[int | str]:
        if self.places.labels or self.places.boxes is not None:
            return list(self.places.labels)
        if isinstance(item, Mapping):
            return [key for key in _LABEL_KEYS if key in item][:1]
        if isinstance(item, Sequence) and isinstance(image, int) and len(item) > image + 1:
            return [image + 1]
        return []

    @staticmethod
    def _shares(labels: object, num_classes: int | None, device: torch.device) -> Tensor:
        if not isinstance(labels, Tensor) or labels.ndim not in {1, 2}:
            raise BatchError(
                f"The labels are {describe(labels)}. Mixing needs classes [n] or one-hot rows "
                "[n, classes]; say where they are with label=<key or index>."
            )
        if labels.ndim == 2:
            return labels.float()
        if labels.is_floating_point():
            dtype = str(labels.dtype).removeprefix("torch.")
            raise BatchError(
                f"The labels are {describe(labels)}, numbers of {dtype}. Classes are integers: "
                "have the dataset return int(label). One number for each sample to regress on is "
                "mixed as rows of one, [n, 1]: torch.tensor([value])."
            )
        if num_classes is None:
            raise BatchError(
                f"The labels are {describe(labels)}. To mix classes their number is needed: "
                "mixed(..., num_classes=10)."
            )
        if labels.device.type == "cpu" and len(labels):
            for value in labels.long().aminmax():
                _check_class(int(value), num_classes, "A label of the batch")
        # By comparison: one_hot would ask the device for the largest class.
        return (labels[:, None] == torch.arange(num_classes, device=device)).float()


def _check_class(value: int, classes: int, what: str) -> None:
    if not 0 <= value < classes:
        raise BatchError(
            f"{what} is class {value}, but num_classes={classes} means classes 0 to {classes - 1}. "
            "What has no class cannot be mixed: leave such samples out of the dataset."
        )


def _existing(batch: Batch, place: int | str, name: str) -> int | str:
    if not has_field(batch, place):
        raise BatchError(f"There is no field {place!r} (given as {name}=) in {describe(batch)}.")
    return place


def _parts(
    batch: Batch, found: Mapping[str, Location], image: Tensor, shares: Sequence[Tensor]
) -> Parts:
    given = {name: get_field(batch, place) for name, place in found.items()}
    return Parts(
        image=image,
        labels=torch.cat(list(shares), 1) if shares else None,
        mask=_mask_parts(given["mask"], image) if "mask" in given else None,
        boxes=_ragged(given.get("boxes"), len(image), "boxes"),
        classes=_ragged(given.get("classes"), len(image), "classes"),
    )


class _Form:
    """The images of a batch as ``[n, C, H, W]``, and the way back to how they came."""

    def __init__(self, image: Tensor) -> None:
        self._gray = image.ndim == 3
        self._last = image.ndim == 4 and not channels_first(tuple(image.shape[1:]))
        image = image[:, None] if self._gray else image
        last = image.is_contiguous(memory_format=torch.channels_last)
        keeps = last and not image.is_contiguous()
        self._format = torch.channels_last if keeps else torch.contiguous_format
        self.image = image.permute(0, 3, 1, 2) if self._last else image

    def restored(self, image: Tensor) -> Tensor:
        if self._gray:
            return image[:, 0]
        if self._last:
            return image.permute(0, 2, 3, 1).contiguous()
        # Nothing is copied where a step has kept it.
        return image.contiguous(memory_format=self._format)


def _mask_parts(mask: object, image: Tensor) -> Tensor:
    size = tuple(image.shape[2:])
    if isinstance(mask, Tensor) and mask.ndim in {3, 4}:
        if tuple(mask.shape[1:3]) == size:
            return mask if mask.ndim == 3 else mask.permute(0, 3, 1, 2)
        if tuple(mask.shape[2:]) == size:
            return mask
    raise BatchError(
        f"The masks are {describe(mask)} beside images of {size[0]} x {size[1]} pixels. Mixing "
        "needs masks of the size of the images."
    )


def _mask_restored(mask: Tensor, given: Tensor) -> Tensor:
    same = tuple(mask.shape) == tuple(given.shape)
    return mask if same else mask.permute(0, 2, 3, 1).contiguous()


def _ragged(value: object, samples: int, name: str) -> tuple[Tensor, ...] | None:
    if value is None:
        return None
    entries = value if isinstance(value, list | tuple) else ()
    tensors = tuple(one for one in entries if isinstance(one, Tensor))
    if not isinstance(value, list | tuple) or not len(tensors) == len(value) == samples:
        raise BatchError(
            f"The field for {name} is {describe(value)}. Mixing needs a list of {samples} tensors, "
            "one per sample, as a detection collate_fn gives them."
        )
    return tensors

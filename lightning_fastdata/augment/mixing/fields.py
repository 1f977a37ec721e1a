"""The fields of a batch that mixing changes: found, brought into one form, and put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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

    def check_classes(self, sample: Any) -> None:
        """Refuse a sample whose class is none; it would train as if it had no label.

        Here, because on a device nobody could look at it without waiting.

        Raises:
            BatchError: a class is not below ``num_classes``.
        """
        if not self._sees_others or not any(self._num_classes):
            return
        image = find_fields(sample, self.places.fields, batched=False).image
        for place, classes in zip(
            self._label_places(sample, image), self._num_classes, strict=False
        ):
            value = get_field(sample, place) if has_field(sample, place) else None
            if classes is None or not isinstance(value, int | np.integer):
                continue
            if value >= classes:
                raise BatchError(
                    f"The label {place!r} of a sample is class {value}, but num_classes={classes} "
                    f"means classes 0 to {classes - 1}."
                )

    def mix(self, batch: Batch, numbers: Tensor, order: Tensor) -> Batch:
        """Return a batch with its samples mixed.

        Args:
            batch: a collated batch.
            numbers: what was drawn, float64 ``[n, count]``.
            order: a random number of each sample for each step, int64 ``[n, steps]``.

        Raises:
            BatchError: a field is missing or has another form than mixing needs.
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
            parts = self._parts(batch, found, form, shares)
            start = 0
            for number, step in enumerate(self.steps):
                own = numbers[:, start : start + step.count()]
                parts = step.mix(parts, own, order[:, number])
                start += step.count()
            values = {
                "image": form.restored(parts.image),
                "mask": None
                if parts.mask is None
                else _mask_restored(parts.mask, get_field(batch, found["mask"])),
                "boxes": None if parts.boxes is None else list(parts.boxes),
                "classes": None if parts.classes is None else list(parts.classes),
            }
            changed: dict[Location, Any] = {found[name]: values[name] for name in found}
            if parts.labels is not None:
                widths = [one.shape[1] for one in shares]
                changed.update(zip(labels, torch.split(parts.labels, widths, 1), strict=True))
            return put_fields(batch, changed)

    def _find(self, batch: Batch) -> dict[str, Location]:
        image, mask = find_fields(batch, self.places.fields, batched=True)
        found = {"image": image}
        if not self._sees_others:
            return found
        untold = [name for name in _BOX_KEYS if isinstance(batch, Mapping) and name in batch]
        if untold and self.places.boxes is None:
            raise BatchError(
                f"The batch holds {untold[0]!r}, which mixing would leave where they are while the "
                f"images change. Say that these are boxes: mixed(..., boxes={untold[0]!r})."
            )
        given = {"mask": mask, "boxes": self.places.boxes, "classes": self.places.classes}
        for name, place in given.items():
            if place is not None:
                found[name] = _existing(batch, place, name)
        return found

    def _find_labels(self, batch: Batch, image: Location) -> Sequence[int | str]:
        if not self._sees_others:
            return []
        given = self.places.labels
        places = self._label_places(batch, image)
        return [_existing(batch, place, "label") for place in places] if given else places

    def _label_places(self, item: Any, image: Location) -> Sequence[int | str]:
        if self.places.labels or self.places.boxes is not None:
            return list(self.places.labels)
        if isinstance(item, Mapping):
            return [key for key in _LABEL_KEYS if key in item][:1]
        if isinstance(item, Sequence) and isinstance(image, int) and len(item) > image + 1:
            return [image + 1]
        return []

    def _parts(
        self,
        batch: Batch,
        found: Mapping[str, Location],
        form: _Form,
        shares: Sequence[Tensor],
    ) -> Parts:
        def field(name: str) -> Any:
            return get_field(batch, found[name]) if name in found else None

        mask = field("mask")
        return Parts(
            image=form.image,
            labels=torch.cat(list(shares), 1) if shares else None,
            mask=None if mask is None else _mask_parts(mask, form.image),
            boxes=_ragged(field("boxes"), len(form.image), "boxes"),
            classes=_ragged(field("classes"), len(form.image), "classes"),
        )

    @staticmethod
    def _shares(labels: Any, num_classes: int | None, device: torch.device) -> Tensor:
        if not isinstance(labels, Tensor) or labels.ndim not in {1, 2}:
            raise BatchError(
                f"The labels are {describe(labels)}. Mixing needs classes [n] or one-hot rows "
                "[n, classes]; say where they are with label=<key or index>."
            )
        if labels.ndim == 2:
            return labels.float()
        if num_classes is None or labels.is_floating_point():
            raise BatchError(
                f"The labels are {describe(labels)}. To mix classes their number is needed: "
                "mixed(..., num_classes=10)."
            )
        # By comparison: one_hot would ask the device for the largest class.
        return (labels[:, None] == torch.arange(num_classes, device=device)).float()


def _existing(batch: Batch, place: int | str, name: str) -> int | str:
    if not has_field(batch, place):
        raise BatchError(f"There is no field {place!r} (given as {name}=) in {describe(batch)}.")
    return place


class _Form:
    """The images of a batch as ``[n, C, H, W]``, and the way back to how they came."""

    def __init__(self, image: Tensor) -> None:
        self._gray = image.ndim == 3
        self._last = image.ndim == 4 and not channels_first(tuple(image.shape[1:]))
        image = image[:, None] if self._gray else image
        self._format = _memory_format(image)
        self.image = image.permute(0, 3, 1, 2) if self._last else image

    def restored(self, image: Tensor) -> Tensor:
        if self._gray:
            return image[:, 0]
        if self._last:
            return image.permute(0, 2, 3, 1).contiguous()
        # Nothing is copied where a step has kept it.
        return image.contiguous(memory_format=self._format)


def _memory_format(image: Tensor) -> torch.memory_format:
    last = image.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not image.is_contiguous() else torch.contiguous_format


def _mask_parts(mask: Any, image: Tensor) -> Tensor:
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


def _ragged(value: Any, samples: int, name: str) -> tuple[Tensor, ...] | None:
    if value is None:
        return None
    ok = isinstance(value, list | tuple) and len(value) == samples
    if not ok or not all(isinstance(one, Tensor) for one in value):
        raise BatchError(
            f"The field for {name} is {describe(value)}. Mixing needs a list of {samples} tensors, "
            "one per sample, as a detection collate_fn gives them."
        )
    return tuple(value)

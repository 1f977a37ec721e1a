"""The resized crop on the device too, for datasets whose images all have one size.

What makes all images one size runs in the worker, since images of a dataset may differ in size. If
they do not, it can be left to the device like any other operation; that is worth it while the
images are not much larger than what is left of them. Sizes are known from a few samples only, so
nothing may depend on them: an image that has another size after all is cropped in the worker by
Albumentations, and lies in a corner of an image of the usual size, with a note that the device is
to cut out that corner. A batch stays one tensor.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.augment.ops.operation import Tape, TapeOp
from lightning_fastdata.augment.pipeline.plan import OF_BYTES, analyse, device_form
from lightning_fastdata.augment.pipeline.tree import (
    CHANGES_SIZE,
    Size,
    follow_sizes,
    list_leaves,
    size_after,
)
from lightning_fastdata.augment.pipeline.values import changes_form

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
    from lightning_fastdata.augment.pipeline.plan import Plan
    from lightning_fastdata.augment.pipeline.tree import Leaf
    from lightning_fastdata.augment.pipeline.values import States

_RESAMPLES: Final = frozenset({"RandomResizedCrop", "RandomSizedCrop", "Resize"})
"""What costs the worker something. To cut out a window costs it less than a larger batch."""
MOST_BYTES_PER_BYTE: Final = 1.5
"""An image that crosses to the device is at most so many times what the crop leaves of it: more
would cost the bus and the memory more than the worker gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CropOnDevice:
    """A plan that holds for images of one size, and what to do with the others."""

    plan: Plan
    """Where each operation runs on images of that size."""
    size: tuple[int, int]
    """Height and width of all images as they leave the worker."""
    corner: TapeOp
    """Cuts the upper left corner, as large as the crop leaves an image, out of an image of
    ``size``: a copy, to the bit."""

    def fit(self, result: Mapping[str, Any], tape: Tape) -> tuple[dict[str, Any], Tape]:
        """Return a sample and its tape so that its images and masks have the usual size.

        Args:
            result: What the pipeline returned; images and masks are arrays of the usual size, or,
                if the crop ran in the worker, of the size that it makes.
            tape: What is still to be done to them.
        """
        fitted, notes = dict(result), dict(tape)
        for name, track in tape.items():
            cropped = result[name]
            if cropped.shape[:2] != self.size:
                whole = np.zeros((*self.size, *cropped.shape[2:]), cropped.dtype)
                whole[: cropped.shape[0], : cropped.shape[1]] = cropped
                fitted[name] = whole
                notes[name] = track._replace(ops=(self.corner, *track.ops), size=self.size)
        return fitted, notes


def crop_on_device(
    compose: Any,
    ops: Mapping[str, DeviceOp],
    size: tuple[int, int],
    *,
    refusal: str | None = None,
    same_pixels: bool = False,
    channels: int | None = 3,
    values: Collection[States] = OF_BYTES,
) -> CropOnDevice | None:
    """Return how to leave the crop to the device, or None if it has to stay, or had better.

    Args:
        compose: an ``A.Compose``.
        ops: device forms by class name.
        size: ``(height, width)`` that images are believed to have.
        refusal: a reason to run everything in the worker.
        same_pixels: as :func:`~lightning_fastdata.augment.pipeline.plan.analyse` takes it.
        channels: the same.
        values: the same.
    """
    leaf = follow_sizes(compose, Size()).boundary
    leaves = list_leaves(compose)
    if leaf < 0 or type(leaves[leaf].transform).__name__ not in _RESAMPLES:
        return None
    transform = leaves[leaf].transform
    op = device_form(transform, ops)
    made = size_after(transform, Size(size, size)).exact
    if op is None or made is None or not _is_worth_it(size, made):
        return None
    corner = _corner(op, transform, size, made)
    if corner is None or _corner(op, transform, size, size) is None:
        return None  # Its interpolation has no device form, or none that makes images smaller.
    plan = analyse(
        compose,
        ops,
        size=size,
        refusal=refusal,
        same_pixels=same_pixels,
        channels=channels,
        values=values,
        crop=leaf,
    )
    kept = {one.exact for one in follow_sizes(compose, Size(size, size)).before[: leaf + 1]} == {
        size
    }
    if plan.placements[leaf].where != "device" or not kept or _changes_numbers(leaves[:leaf]):
        return None
    have, makes = (f"{height} x {width}" for height, width in (size, made))
    why = f"on the batch: images have {have} pixels already, and it makes {makes} of them"
    placements = list(plan.placements)
    placements[leaf] = dataclasses.replace(placements[leaf], why=why)
    plan = dataclasses.replace(plan, placements=tuple(placements), crop=leaf)
    return CropOnDevice(plan=plan, size=size, corner=TapeOp(leaf, op.name, corner))


def _changes_numbers(before: Sequence[Leaf]) -> bool:
    """Return whether images, when they are cropped, may have other channels or another dtype.

    Samples that come cropped have them already, and would not go into a batch with the others.
    """
    names = {type(one.transform).__name__ for one in before if changes_form(one.transform)}
    return bool(names - CHANGES_SIZE)


def _is_worth_it(size: tuple[int, int], made: tuple[int, int]) -> bool:
    inside = made[0] <= size[0] and made[1] <= size[1]
    return inside and size[0] * size[1] <= MOST_BYTES_PER_BYTE * made[0] * made[1]


def _corner(
    op: DeviceOp, transform: Any, size: tuple[int, int], part: tuple[int, int]
) -> Encoded | None:
    """Return what cuts the upper left ``part`` out of images of ``size``, or None."""
    params = {"crop_coords": (0, 0, part[1], part[0])}
    return op.encode(transform, params, (*size, 3), np.dtype(np.uint8))

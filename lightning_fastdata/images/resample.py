"""How a box of pixels is resized: which filter, and how much of it inside the JPEG decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.images.crops import Box

if TYPE_CHECKING:
    from lightning_fastdata.images.crops import Crop, Placement
    from lightning_fastdata.images.decoders import Pixels, Scale
    from lightning_fastdata.images.reading import EncodedImage

Resample: TypeAlias = Literal["auto", "exact", "linear", "area"]
"""``auto``: fast for random crops (see :func:`plan_resample`), exact for all others. ``exact``:
decode fully, torchvision's antialiased bilinear resize. ``linear``: decode fully, OpenCV's
``INTER_LINEAR``, which aliases when it shrinks. ``area``: decode fully, OpenCV's ``INTER_AREA``."""

Filter: TypeAlias = Literal["linear", "area", "antialias"]

LINEAR_BELOW = 1.5
"""Downscale below which two taps per axis are enough. Against the antialiased resize, photographs
are then at 45 dB (median; the sharpest crops at 34), and a sample costs a quarter less."""


class ResamplePlan(NamedTuple):
    """What to decode and how to resize it."""

    scale: Scale
    """Divisor of the picture's sides while it is decoded."""
    filter: Filter
    """What resizes the rest."""


def plan_resample(placement: Placement, resample: Resample, *, scalable: bool) -> ResamplePlan:
    """Choose for one sample.

    ``auto`` uses ``linear`` while the box shrinks by less than 1.5 on both axes. Beyond, it decodes
    at the power of two that leaves a factor of at least 1 (below 2 on the shorter axis), and
    resizes the rest with the antialiased filter. OpenCV's ``INTER_AREA`` is no alternative: at
    fractional factors it takes longer than torch's antialiased uint8 kernel (0.9 against 0.4 ms
    for 400 to 224 pixels) and is further from torchvision (42 dB).

    Args:
        placement: Where the sample comes from.
        resample: What the user asked for.
        scalable: Whether a scaled decode of this file is cheaper than a full one.
    """
    if resample != "auto":
        return ResamplePlan(1, "antialias" if resample == "exact" else resample)
    box = placement.box
    down_rows, down_columns = box.height / placement.height, box.width / placement.width
    if max(down_rows, down_columns) < LINEAR_BELOW:
        return ResamplePlan(1, "linear")
    least = min(down_rows, down_columns)
    scale: Scale = 1
    if scalable and least >= 2:
        scale = 8 if least >= 8 else 4 if least >= 4 else 2
    return ResamplePlan(scale, "antialias")


def settle_resample(resample: Resample, crop: Crop) -> Resample:
    """Return what ``resample`` means for this crop: ``auto`` is ``exact`` unless crops are random.

    What is evaluated on pixels that differ from the ones it was compared with loses real points;
    what is trained on them does not.

    Raises:
        OptionsError: If there is no such resample.
    """
    if resample not in get_args(Resample):
        raise OptionsError(
            f"Unknown resample {resample!r}; choose one of {', '.join(get_args(Resample))}."
        )
    return "exact" if resample == "auto" and crop != "random_resized" else resample


def render(image: EncodedImage, placement: Placement, plan: ResamplePlan, out: Pixels) -> None:
    """Decode, cut, resize and mirror one picture into ``out``.

    Args:
        image: The file.
        placement: Where the sample comes from, in the picture's full-size pixels.
        plan: From :func:`plan_resample`.
        out: ``[size, size, 3]`` uint8, C-contiguous; overwritten.

    Raises:
        DatasetError: If the file is damaged.
    """
    top, left, height, width = scaled_box(placement.box, plan.scale)
    pixels = image.decode(scale=plan.scale)[top : top + height, left : left + width]
    if image.orientation != 1:
        pixels = np.ascontiguousarray(pixels)
    rows, columns = placement.height, placement.width
    whole = out.shape[:2] == (rows, columns)
    if whole and not placement.flip:
        resize(pixels, rows, columns, plan.filter, out)
        return
    resized = resize(pixels, rows, columns, plan.filter)
    top, left = placement.top, placement.left
    sample = resized[top : top + out.shape[0], left : left + out.shape[1]]
    if placement.flip:
        import cv2

        cv2.flip(sample, 1, dst=out)  # 6 us; numpy takes 210 us to copy backwards
    else:
        np.copyto(out, sample)


def scaled_box(box: Box, scale: int) -> Box:
    """Return the box in pixels of a picture decoded at 1/scale, its edges rounded to the nearest.

    The edges move by at most scale/2 full-size pixels, that is half a decoded one.
    """
    if scale == 1:
        return box
    top, left = round(box.top / scale), round(box.left / scale)
    bottom = round((box.top + box.height) / scale)
    right = round((box.left + box.width) / scale)
    return Box(top, left, max(1, bottom - top), max(1, right - left))


def resize(
    pixels: Pixels, height: int, width: int, how: Filter, out: Pixels | None = None
) -> Pixels:
    """Return ``[height, width, 3]`` pixels, in ``out`` if it is given."""
    if how == "antialias":
        return _resize_antialias(pixels, height, width, out)
    import cv2

    if how == "area" and pixels.shape[:2] != (height, width):
        # INTER_AREA averages only if no axis grows; shrink first, then let the other axis grow.
        rows, columns = min(height, pixels.shape[0]), min(width, pixels.shape[1])
        last = (rows, columns) == (height, width)
        pixels = cv2.resize(
            pixels, (columns, rows), dst=out if last else None, interpolation=cv2.INTER_AREA
        )
        if last:
            return pixels
    resized: Pixels = cv2.resize(pixels, (width, height), dst=out, interpolation=cv2.INTER_LINEAR)
    return resized


def _resize_antialias(pixels: Pixels, height: int, width: int, out: Pixels | None) -> Pixels:
    import torch
    from torchvision.transforms.v2 import functional

    # Channels last in memory: torch has a uint8 kernel for exactly this, and no float copy is made.
    # Of a view of a larger picture it would make planes, and interleaving those again takes as long
    # as the resize; copying the crop takes a twentieth of it.
    tensor = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    resized = functional.resize(tensor, [height, width], antialias=True)
    result: Pixels = resized.permute(1, 2, 0).numpy()
    if out is None:
        return result
    np.copyto(out, result)
    return out

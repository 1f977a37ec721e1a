"""How far device forms may be from Albumentations, by what they do and by the version of OpenCV."""

from __future__ import annotations

from dataclasses import dataclass

import cv2

from lightning_fastdata.tree import held


@dataclass(frozen=True, slots=True)
class Bound:
    """What is asked of the values of images, in levels of which 255 span the range."""

    largest: float
    """No difference is larger."""
    equal: float
    """Share of values of uint8 images that are equal, 0..1."""
    of_floats: float
    """No difference of float32 images is larger, where the form takes them."""
    mean: float = 1.0
    """Mean absolute difference."""


EQUAL = Bound(0, 1, 1e-3)
OPENCV = int(cv2.__version__.split(".", maxsplit=1)[0])
WARPED = Bound(0, 1, 0.01) if OPENCV < 5 else Bound(1, 0.999, 0.2, mean=0.001)
"""Between the pixels."""
BOUNDS = {
    **dict.fromkeys(("Affine", "Rotate", "ShiftScaleRotate"), WARPED),
    **dict.fromkeys(("RandomResizedCrop", "RandomSizedCrop", "Resize"), Bound(1, 0.998, 0.01)),
    # Sums of many terms, in whatever order.
    **dict.fromkeys(("Blur", "GaussianBlur", "MotionBlur"), Bound(1, 0.99, 0)),
    "HueSaturationValue": Bound(1, 0.999, 0),
}


def bound_of(transform) -> Bound:
    """Return the bound for images behind a transform of Albumentations; masks are equal."""
    name = type(transform).__name__
    if held(transform, "interpolation") == 0:
        return EQUAL
    if name == "ColorJitter":
        return Bound(3, 0.999, 0) if any(transform.hue) else Bound(0, 1, 0)
    return BOUNDS.get(name, EQUAL)

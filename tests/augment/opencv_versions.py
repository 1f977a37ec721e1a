"""How far device forms may be from Albumentations, by what they do and by the version of OpenCV.

OpenCV 4 rounds the positions that a warp reads from to 1/32 of a pixel and blends in integers, so
that its warps can be equalled. OpenCV 5 blends in float32, in an order that depends on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What is asked of the values of images, in levels of which 255 span the range."""

    largest: float
    """No difference is larger."""
    equal: float
    """Share of values of uint8 images that are equal, 0..1."""
    mean: float = 1.0
    """Mean absolute difference."""
    of_floats: float
    """No difference of float32 images is larger."""


def opencv_major(version: str = cv2.__version__) -> int:
    """Return the first number of a version, as in ``4.10.0`` or ``5.0.0-pre``."""
    return int(version.split(".", maxsplit=1)[0])


def counts_under_boolean_masks() -> bool:
    """Return whether this OpenCV takes what Albumentations gives it for ``AutoContrast(ignore=)``.

    OpenCV 4 does not: Albumentations raises there.
    """
    square: np.ndarray = np.zeros((2, 2), np.uint8)
    try:
        cv2.calcHist([square], [0], square == 0, [256], [0, 256])
    except cv2.error:
        return False
    return True


EQUAL = Bound(largest=0, equal=1, of_floats=1e-3)
RESIZE = Bound(largest=1, equal=0.998, of_floats=0.01)
SHARED = Bound(largest=1, equal=0.999, of_floats=0.01)
"""Colours that OpenCV rounds, and blurs."""
SUMS = Bound(largest=1, equal=0.99, of_floats=0.05)
"""Sums of many terms, in whatever order."""
JITTER = Bound(largest=3, equal=0.999, of_floats=0.05)
CLAHE = Bound(largest=2, equal=0.999, of_floats=2)
THROUGH_BYTES = Bound(largest=1, equal=0.999, of_floats=1)
"""float32 images are made uint8 first."""

FEW_ELSEWHERE = Bound(largest=255, equal=0.999, of_floats=255)
"""Nearest pixels at positions that differ in the last bit: few are another one's."""


def warps(version: str = cv2.__version__) -> Bound:
    """Return the bound for warps that read between the pixels."""
    if opencv_major(version) < 5:
        return Bound(largest=0, equal=1, of_floats=0.01)
    return Bound(largest=1, equal=0.999, mean=0.001, of_floats=0.2)


def fields(version: str = cv2.__version__) -> Bound:
    """Return the bound for distortions whose field is made of sums and logarithms.

    With OpenCV 4 the last bit of such a field decides between two positions in 1/32 pixel.
    """
    if opencv_major(version) < 5:
        return Bound(largest=8, equal=0.99, mean=0.01, of_floats=8)
    return Bound(largest=1, equal=0.999, mean=0.001, of_floats=0.2)

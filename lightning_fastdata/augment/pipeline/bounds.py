"""How far device forms may be from Albumentations, by what they do and by the version of OpenCV.

The tests hold each form to its bound on photographs. OpenCV 4 rounds the positions that a warp
reads from to 1/32 of a pixel and blends in integers, so that its warps can be equalled. OpenCV 5
blends in float32, in an order that depends on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_fastdata.augment.ops.positions.warp import blends_alike
from lightning_fastdata.augment.pipeline.tree import is_albumentations
from lightning_fastdata.tree import held

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.pipeline.tree import Node


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


EQUAL: Final = Bound(0, 1, 1e-3)
RESIZE: Final = Bound(1, 0.998, 0.01)
SUMS: Final = Bound(1, 0.99, 0)
"""Sums of many terms, in whatever order."""


def opencv_major(version: str | None = None) -> int:
    """Return the first number of a version, as in ``4.10.0`` or ``5.0.0-pre``; None: installed."""
    if version is None:
        import cv2

        version = str(cv2.__version__)
    return int(version.split(".", maxsplit=1)[0])


def warps(version: str | None = None) -> Bound:
    """Return the bound for warps that read between the pixels."""
    return Bound(0, 1, 0.01) if opencv_major(version) < 5 else Bound(1, 0.999, 0.2, mean=0.001)


_WARPS: Final = frozenset({"Affine", "Rotate", "ShiftScaleRotate"})
"""Of bytes, the device blends neighbours as OpenCV does on most CPUs."""
_RESIZES: Final = frozenset({"RandomResizedCrop", "RandomSizedCrop", "Resize"})
_NAMED: Final[Mapping[str, Bound]] = {
    **dict.fromkeys(("Blur", "GaussianBlur", "MotionBlur", "Sharpen"), SUMS),
    "HueSaturationValue": Bound(1, 0.999, 0),
}


def bound_of(transform: Node) -> Bound:
    """Return the bound for images behind a transform of Albumentations; masks are equal."""
    name = type(transform).__name__
    if held(transform, "interpolation") == 0:
        return EQUAL
    if name in _WARPS:
        return warps()
    if name in _RESIZES:
        return RESIZE
    if name == "ColorJitter":
        return Bound(3, 0.999, 0) if any(transform.hue) else Bound(0, 1, 0)
    return _NAMED.get(name, EQUAL)


_JUMPS: Final = "has a threshold"
_OF_HUE: Final = "turns a level into many of hue"
_AMPLIFIES: Final[Mapping[str, str]] = {
    "Posterize": _JUMPS,
    "HueSaturationValue": _OF_HUE,
    "ColorJitter": _OF_HUE,
    "Sharpen": "enlarges the differences of neighbours",
}
"""What makes many levels of one, and why."""
MOST_PER_LEVEL: Final = 3
"""So many levels may become of one that is off: contrast and gamma of usual strengths."""


def may_differ(transform: Node) -> bool:
    """Return whether the device may make other values of uint8 images, a few or by a little.

    What is drawn for every pixel on the device is not meant, nor what users registered.
    """
    if not is_albumentations(transform):
        return False
    if type(transform).__name__ in _WARPS and held(transform, "interpolation") == 1:
        return not blends_alike()
    return bound_of(transform).largest > 0


def why_amplifies(transform: Node) -> str | None:
    """Return how a transform makes many levels of one that images are off; None: it does not."""
    name = type(transform).__name__
    if not is_albumentations(transform):
        return None
    if name == "Solarize":  # in the middle, what is below becomes what is above
        jump = max(abs(255 - 510 * threshold) for threshold in transform.threshold_range)
        return _JUMPS if jump > MOST_PER_LEVEL else None
    if _levels_of_one(transform) > MOST_PER_LEVEL:
        return f"makes more than {MOST_PER_LEVEL} levels of one"
    return None if name == "ColorJitter" and not any(transform.hue) else _AMPLIFIES.get(name)


def _levels_of_one(transform: Node) -> float:
    """Return how many levels contrast or gamma makes at most of one."""
    name = type(transform).__name__
    if name == "RandomBrightnessContrast":
        return float(1 + max(transform.contrast_limit))
    if name == "ColorJitter":
        saturated = max(1, 2 * transform.saturation[1] - 1)
        return float(transform.brightness[1] * transform.contrast[1] * saturated)
    if name == "RandomGamma":  # in the dark it is steepest
        return float(round(255 * (1 / 255) ** (min(transform.gamma_limit) / 100)))
    return 1.0

"""How far device forms may be from Albumentations, by what they do and by the version of OpenCV.

The tests hold each form to its bound on photographs, and a trial holds the operations of a pipeline
to them on the user's own images. OpenCV 4 rounds the positions that a warp reads from to 1/32 of a
pixel and blends in integers, so that its warps can be equalled. OpenCV 5 blends in float32, in an
order that depends on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

SAME: Final = 1e-3
"""Levels: values that are closer are equal. float32 sums differ in the last bits."""


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

    def exceeded(self, gap: np.ndarray, *, from_floats: bool) -> bool:
        """Return whether differences, in levels, are larger than they may be.

        The share counts only where no difference is too large: small images have few values.
        """
        if not np.isfinite(gap).all():
            return True
        largest = self.of_floats if from_floats else self.largest
        if largest >= 255:
            too_many = int((gap > SAME).sum()) > max(1, (1 - self.equal) * gap.size)
            return too_many or bool(gap.size and gap.mean() > max(self.mean, 255 / gap.size))
        return bool(gap.max(initial=0) > largest + SAME)


EQUAL: Final = Bound(largest=0, equal=1, of_floats=1e-3)
RESIZE: Final = Bound(largest=1, equal=0.998, of_floats=0.01)
SHARED: Final = Bound(largest=1, equal=0.999, of_floats=0.01)
"""Colours that OpenCV rounds, and blurs."""
SUMS: Final = Bound(largest=1, equal=0.99, of_floats=0.05)
"""Sums of many terms, in whatever order."""
JITTER: Final = Bound(largest=3, equal=0.999, of_floats=0.05)
CLAHE: Final = Bound(largest=2, equal=0.999, of_floats=2)
THROUGH_BYTES: Final = Bound(largest=1, equal=0.999, of_floats=1)
"""float32 images are made uint8 first."""
UNSHARP: Final = Bound(largest=8, equal=0.99, of_floats=8)
"""Rounding decides what is below its threshold."""
FEW_ELSEWHERE: Final = Bound(largest=255, equal=0.999, of_floats=255)
"""Nearest pixels at positions that differ in the last bit: few are another one's."""

LIKE: Final = Bound(largest=255, equal=0, mean=2.5, of_floats=255)
"""Forms that users register, who say how close they are: what is alike on average."""


def opencv_major(version: str | None = None) -> int:
    """Return the first number of a version, as in ``4.10.0`` or ``5.0.0-pre``; None: installed."""
    if version is None:
        import cv2

        version = str(cv2.__version__)
    return int(version.split(".", maxsplit=1)[0])


def warps(version: str | None = None) -> Bound:
    """Return the bound for warps that read between the pixels."""
    if opencv_major(version) < 5:
        return Bound(largest=0, equal=1, of_floats=0.01)
    return Bound(largest=1, equal=0.999, mean=0.001, of_floats=0.2)


def fields(version: str | None = None) -> Bound:
    """Return the bound for distortions whose field is made of sums and logarithms.

    With OpenCV 4 the last bit of such a field decides between two positions in 1/32 pixel.
    """
    if opencv_major(version) < 5:
        return Bound(largest=8, equal=0.99, mean=0.01, of_floats=8)
    return Bound(largest=1, equal=0.999, mean=0.001, of_floats=0.2)


_SPLINES: Final = frozenset({"PiecewiseAffine", "ThinPlateSpline"})
_WARPS: Final = frozenset({"Affine", "Rotate", "SafeRotate", "ShiftScaleRotate"})
_FIELDS: Final = _SPLINES | {
    "ChromaticAberration",
    "GridDistortion",
    "OpticalDistortion",
    "Perspective",
}
_RESIZES: Final = frozenset({"RandomResizedCrop", "RandomSizedCrop", "Resize"})
_NAMED: Final[Mapping[str, Bound]] = {
    **dict.fromkeys(("AdvancedBlur", "Blur", "Defocus", "Emboss", "GaussianBlur"), SUMS),
    **dict.fromkeys(("MotionBlur", "RingingOvershoot"), SUMS),
    "CLAHE": CLAHE,
    "ColorJitter": JITTER,
    "HueSaturationValue": THROUGH_BYTES,
    "UnsharpMask": UNSHARP,
}


def bound_of(transform: Any) -> Bound:
    """Return the bound for images behind a transform of Albumentations; masks are equal."""
    name = type(transform).__name__
    if getattr(transform, "interpolation", None) == 0:
        return FEW_ELSEWHERE if name in _SPLINES else EQUAL
    if name in _WARPS:
        return warps()
    if name in _FIELDS:
        return fields()
    if name in _RESIZES:
        return RESIZE
    if name == "Downscale":
        return EQUAL if set(transform.interpolation_pair.values()) == {0} else RESIZE
    if name == "Sharpen":
        return EQUAL if transform.method == "gaussian" else SUMS
    return _NAMED.get(name, EQUAL)


def is_equal(name: str) -> bool:
    """Return whether images behind a transform of this name are equal, whatever its settings."""
    others = _WARPS | _FIELDS | _RESIZES | _NAMED.keys()
    return name not in others and name not in {"Downscale", "Sharpen"}

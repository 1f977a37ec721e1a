"""How far device forms may be from Albumentations, by what they do and by the version of OpenCV.

The tests hold each form to its bound on photographs. OpenCV 4 rounds the positions that a warp
reads from to 1/32 of a pixel and blends in integers, so that its warps can be equalled. OpenCV 5
blends in float32, in an order that depends on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.augment.pipeline.tree import list_leaves
from lightning_fastdata.tree import held

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.pipeline.tree import Node

SAME: Final = 1e-3
"""Levels: values that are closer are equal. float32 sums differ in the last bits."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What is asked of the values of images, in levels of which 255 span the range."""

    largest: float
    """No difference is larger."""
    equal: float
    """Share of values of uint8 images that are equal, 0..1."""
    of_floats: float
    """No difference of float32 images is larger."""
    mean: float = 1.0
    """Mean absolute difference."""

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


EQUAL: Final = Bound(0, 1, 1e-3)
RESIZE: Final = Bound(1, 0.998, 0.01)
SUMS: Final = Bound(1, 0.99, 0.05)
"""Sums of many terms, in whatever order."""
FEW_ELSEWHERE: Final = Bound(255, 0.999, 255)
"""Nearest pixels at positions that differ in the last bit: few are another one's."""


def opencv_major(version: str | None = None) -> int:
    """Return the first number of a version, as in ``4.10.0`` or ``5.0.0-pre``; None: installed."""
    if version is None:
        import cv2

        version = str(cv2.__version__)
    return int(version.split(".", maxsplit=1)[0])


def warps(version: str | None = None) -> Bound:
    """Return the bound for warps that read between the pixels."""
    return Bound(0, 1, 0.01) if opencv_major(version) < 5 else Bound(1, 0.999, 0.2, mean=0.001)


def fields(version: str | None = None) -> Bound:
    """Return the bound for distortions whose field is made of sums and logarithms.

    With OpenCV 4 the last bit of such a field decides between two positions in 1/32 pixel.
    """
    return Bound(8, 0.99, 8, mean=0.01) if opencv_major(version) < 5 else warps(version)


SPLINES: Final = frozenset({"PiecewiseAffine", "ThinPlateSpline"})
"""With nearest pixels, one in a million is another one's."""
_WARPS: Final = frozenset({"Affine", "Rotate", "SafeRotate", "ShiftScaleRotate"})
_FIELDS: Final = SPLINES | {
    *("ChromaticAberration", "GridDistortion", "OpticalDistortion", "Perspective"),
}
_RESIZES: Final = frozenset({"RandomResizedCrop", "RandomSizedCrop", "Resize"})
_NAMED: Final[Mapping[str, Bound]] = {
    **dict.fromkeys(("AdvancedBlur", "Blur", "Defocus", "Emboss", "GaussianBlur"), SUMS),
    **dict.fromkeys(("MotionBlur", "RingingOvershoot"), SUMS),
    "CLAHE": Bound(2, 0.999, 2),
    "ColorJitter": Bound(3, 0.999, 0.05),
    "HueSaturationValue": Bound(1, 0.999, 1),  # float32 images are made uint8 first
    "UnsharpMask": Bound(8, 0.99, 8),  # rounding decides what is below its threshold
}


def bound_of(transform: Node) -> Bound:
    """Return the bound for images behind a transform of Albumentations; masks are equal."""
    name = type(transform).__name__
    if held(transform, "interpolation") == 0:
        return FEW_ELSEWHERE if name in SPLINES else EQUAL
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


def levels_per_unit(compose: Node, dtype: np.dtype[Any]) -> float | np.ndarray:
    """Return how many of 255 levels a difference of 1 in the output of a pipeline is.

    A number, or an array that can be multiplied with an output image.
    """
    unit: float | np.ndarray = 1.0 if dtype == np.uint8 else 255.0
    first = False
    for transform in (leaf.transform for leaf in list_leaves(compose)):
        name = type(transform).__name__
        first |= name == "ToTensorV2"
        if name == "Normalize" and transform.normalization == "standard":
            unit = 255.0 * np.asarray(transform.std, np.float64)
        else:
            unit = {"ToFloat": 255.0, "FromFloat": 1.0}.get(name, unit)
    return unit[:, None, None] if first and isinstance(unit, np.ndarray) and unit.ndim else unit

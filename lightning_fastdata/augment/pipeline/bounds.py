"""Which device forms may be off from Albumentations, and what makes more of that.

The tests hold each form to a bound on photographs. OpenCV 4 rounds the positions that a warp
reads from to 1/32 of a pixel and blends in integers, so that its warps can be equalled. OpenCV 5
blends in float32, in an order that depends on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_fastdata.augment.ops.geometry import blends_alike
from lightning_fastdata.augment.pipeline.tree import is_albumentations
from lightning_fastdata.tree import held

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.pipeline.tree import Node

_WARPS: Final = frozenset({"Affine", "Rotate", "ShiftScaleRotate"})
"""Of bytes, the device blends neighbours as OpenCV does on most CPUs."""
_OFF: Final = frozenset(
    {
        *("RandomResizedCrop", "RandomSizedCrop", "Resize"),
        *("Blur", "GaussianBlur", "MotionBlur", "HueSaturationValue"),
    }
)
"""Off by a level in a few pixels; ``tests/augment/bounds.py`` has by how much."""
MOST_PER_LEVEL: Final = 3
"""So many levels may become of one that is off: contrast and gamma of usual strengths."""


def may_differ(transform: Node) -> bool:
    """Return whether the device may make other values of uint8 images, a few or by a little."""
    if not is_albumentations(transform):
        return False
    name = type(transform).__name__
    if held(transform, "interpolation") == 0:
        return False
    if name in _WARPS:
        return not blends_alike()
    return name in _OFF or (name == "ColorJitter" and any(transform.hue))


def why_amplifies(transform: Node, op: DeviceOp) -> str | None:
    """Return how a device form makes many levels of one that images are off; None: it does not."""
    name = type(transform).__name__
    if op.owner is not None:  # posterizing, say, which makes a whole step of a level
        return "may make many levels of one, as it is registered"
    if _levels_of_one(transform) > MOST_PER_LEVEL:
        return f"makes more than {MOST_PER_LEVEL} levels of one"
    changes_hue = name == "HueSaturationValue" or (name == "ColorJitter" and any(transform.hue))
    return "turns a level into many of hue" if changes_hue else None


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

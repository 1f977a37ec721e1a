"""Every operation with a device form, and the arguments that it is tried with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pairwise import pairwise

from benchmarks.parity import examples, make_example
from lightning_fastdata.augment.albumentations.plan import takes_dtype
from lightning_fastdata.augment.ops import DEVICE_OPS

CHANNELS = (1, 2, 3, 4, 6, 7)
DTYPES = (np.dtype(np.uint8), np.dtype(np.float32))
SIZES = ((53, 74), (48, 31), (1, 9), (7, 1))
BORDERS = (0, 1, 2, 4, 3)
GRAY_OR_RGB = (1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation, in one usage."""

    name: str
    """Class name of the transform."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """What it is always called with."""
    channels: tuple[int, ...] = CHANNELS
    """Those that Albumentations takes."""
    sizes: tuple[tuple[int, int], ...] = SIZES
    """Heights and widths that it takes."""
    axes: tuple[str, ...] = ()
    """Arguments that are varied: interpolation, border_mode, fill, fill_mask."""
    on_the_cpu: Callable[[dict[str, Any]], bool] = lambda _row: False
    """Which combinations have no device form."""
    refused: Callable[[dict[str, Any]], bool] = lambda _row: False
    """Which combinations OpenCV refuses."""

    def rows(self):
        """Return the combinations to try."""
        values = {
            "dtype": DTYPES if takes_dtype(DEVICE_OPS[self.name], DTYPES[1]) else DTYPES[:1],
            "channels": self.channels,
            "size": self.sizes,
            "interpolation": (0, 1),
            "border_mode": BORDERS,
            "fill": ("one number", "a whole number", "one for each channel"),
            "fill_mask": (0.0, 9.0),
        }
        names = ("dtype", "channels", "size", *self.axes)
        return [row for row in pairwise({name: values[name] for name in names}) if not hangs(row)]

    def make(self, row):
        """Return the arguments of one combination."""
        given = {name: row[name] for name in ("interpolation", "border_mode") if name in row}
        unit = 1 if row["dtype"] == np.uint8 else 255
        if "fill" in row:
            given["fill"] = {
                "one number": 77.0 / unit,
                "a whole number": 77 if unit == 1 else 1,
                "one for each channel": tuple(
                    (20.0 + 30 * c) / unit for c in range(row["channels"])
                ),
            }[row["fill"]]
        if "fill_mask" in row:
            given["fill_mask"] = row["fill_mask"]
        return self.arguments | given


def fills_each_of_five(row):
    """Whether the border differs between channels, of which OpenCV's border value has four."""
    return row["channels"] > 4 and row["fill"] == "one for each channel"


def hangs(row):
    """Whether OpenCV 5 looks for a neighbour that an edge of one pixel does not have, for ever."""
    return 1 in row["size"] and row.get("border_mode") == 4 and row.get("interpolation") == 2


def thin(row):
    """Whether Albumentations drops an axis, because an edge is one pixel long."""
    return 1 in row["size"] and row["channels"] > 1


WARP = {
    "axes": ("interpolation", "border_mode", "fill", "fill_mask"),
    "refused": fills_each_of_five,
}
PAD = {"axes": ("border_mode", "fill", "fill_mask"), "refused": fills_each_of_five}
HOLES = {"axes": ("fill", "fill_mask")}
RESIZE = {"axes": ("interpolation",)}


def case(name, arguments=None, **rest):
    return Case(name=name, arguments=arguments or {}, **rest)


CASES = (
    *(
        case(name)
        for name in (
            *("HorizontalFlip", "VerticalFlip", "Transpose", "RandomRotate90", "D4", "NoOp"),
            *("RandomBrightnessContrast", "RandomGamma", "ToFloat", "ToTensorV2"),
        )
    ),
    case("RandomBrightnessContrast", {"brightness_by_max": False}),
    case("RandomCrop", {"height": 60, "width": 45, "pad_if_needed": True}, **PAD),
    case("CenterCrop", {"height": 41, "width": 80, "pad_if_needed": True}, **PAD),
    case("PadIfNeeded", {"min_height": 60, "min_width": 61, "position": "random"}, **PAD),
    case("Resize", {"height": 37, "width": 91}, **RESIZE),
    case("RandomResizedCrop", {"size": (50, 51)}, **RESIZE),
    case("RandomSizedCrop", {"min_max_height": (1, 7), "size": (20, 31)}, **RESIZE),
    case(
        "Affine",
        {"scale": (0.6, 1.3), "rotate": (-50, 50), "shear": (-9, 9), "translate_percent": 0.2},
        **WARP,
    ),
    case("Affine", {"rotate": (20, 40), "fit_output": True, "keep_ratio": True}, **WARP),
    case("Rotate", **WARP),
    case("ShiftScaleRotate", **WARP),
    case("CoarseDropout", {"num_holes_range": (1, 6)}, **HOLES),
    case("Erasing", **HOLES),
    case("Normalize", {"mean": 0.4, "std": 0.3}),
    case("ToGray", channels=GRAY_OR_RGB, on_the_cpu=thin),
    case("HueSaturationValue", channels=GRAY_OR_RGB),
    case(
        "ColorJitter",
        channels=GRAY_OR_RGB,
        on_the_cpu=lambda row: row["channels"] == 1,
    ),
    case("Blur", {"blur_limit": (3, 9)}),
    case("GaussianBlur"),
    case("MotionBlur", {"blur_limit": (3, 9)}),
)

USUAL = {
    f"{name} {arguments or ''}".strip(): make_example(name, arguments)
    for name, arguments in examples()
}
"""Every operation with a device form as it is usually called, for images of 131 x 170 pixels."""

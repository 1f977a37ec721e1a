"""What an operation is within a run of steps that one kernel carries out.

A run reads each pixel of its result from the images, changes it by operations that make a pixel
from itself alone, and writes it. How it reads is the run's geometry. Each sample has its own
instructions, in its own order; what it skips costs nothing. Instructions are rows of five int32:
what to do, and where in the blob the numbers for it lie.

====================  ==========================================================================
code                  numbers
====================  ==========================================================================
``NOP``               none
``MIRROR``            sum of 4: rows become columns, then 1: left and right, 2: top and bottom
``TABLE``             offset of uint8 ``[256, count]``; count, 1 or 3
``HSV``               offset of uint8 ``[256, 3]``; OpenCV's lanes
``SCALE``             offset of a float64 factor
``CONTRAST``          offset of a float64 factor
``SATURATION``        offset of a float64 factor
``HUE``               offset of uint8 ``[256]``; OpenCV's lanes
``GRAY``              none
``HOLES``             offset of int32 ``[count, 4]``; count; offset of float32 ``[values]``; values
====================  ==========================================================================

A sample may begin with one way of reading of its own:

====================  ==========================================================================
``WARP``              offset of float32 ``[3, 3]``; border mode, plus 8 for the nearest pixel, plus
                      16 if OpenCV rounds once behind its vectors; offset of float32 ``[3]``, the
                      fill; the first column behind its vectors
====================  ==========================================================================
"""

# ruff: noqa: ARG001 - all functions that make instructions share one signature

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import Encoded

Instruction: TypeAlias = tuple[int, ...]
Instructions: TypeAlias = "Callable[[Encoded, Mapping[str, int]], list[Instruction] | None]"
End: TypeAlias = Literal["normalize", "to float", "channels first"]
Window: TypeAlias = Literal["window", "resize"]
Fused: TypeAlias = "Instructions | Window | End"
"""What an operation is within a run: a way of reading, a change of each pixel, or its end."""

NOP, MIRROR, TABLE, HSV, SCALE, CONTRAST, SATURATION, HUE, GRAY, HOLES, WARP = range(11)
WIDTH: Final = 5
"""Numbers of an instruction."""
CHANNELS: Final = 3
"""Of the images that are fused: others take one step after the other."""

_TRANSPOSED: Final = 4
_MIRRORS: Final = {
    (False, 0): 0,
    (True, 3): 1,
    (True, 1): 2,
    (False, 2): 3,
    (True, 0): 4,
    (False, 3): 5,
    (False, 1): 6,
    (True, 2): 7,
}
"""The symmetries of a square, named by a transposition and the quarter turns after it."""
_NEAREST: Final = 0
_WARPED_NEAREST: Final = 8
_ROUNDS_ONCE: Final = 16


def is_transposing(instruction: Instruction) -> bool:
    """Return whether an instruction makes columns of rows, which takes square images."""
    return instruction[0] == MIRROR and instruction[1] >= _TRANSPOSED


def mirror(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction]:
    """Return the instruction of a symmetry of the square."""
    static = dict(encoded.static)
    moves = _MIRRORS[static["transposed"], static["turns"]]
    return [(MIRROR, moves)] if moves else []


def table(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction] | None:
    """Return the instruction of a table for uint8, or None."""
    if dict(encoded.static).get("form") != "table":
        return None
    count = encoded.arrays["table"].shape[1]
    return [(TABLE, offsets["table"], count)] if count in (1, CHANNELS) else None


def hsv(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction] | None:
    """Return the instruction of tables for hue, saturation and value, or None."""
    static: dict[str, Any] = dict(encoded.static)
    if static["form"] == "same":
        return []
    return [(HSV, offsets["table"], static["lanes"])] if static["form"] == "hsv" else None


def jitter(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction]:
    """Return the instructions of ColorJitter in the sample's order."""
    factors, static = encoded.arrays["factors"], dict(encoded.static)
    made: list[Instruction] = []
    for turn in encoded.arrays["order"].tolist():
        if turn == 3:
            if factors[3] != 0:
                made.append((HUE, offsets["hue_table"], static["lanes"]))
        elif factors[turn] != 1:
            code = (SCALE, CONTRAST, SATURATION)[turn]
            made.append((code, offsets["factors"] + 8 * turn))
    return made


def gray(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction] | None:
    """Return the instruction of OpenCV's luminance, or None."""
    static = dict(encoded.static)
    if static["same"] or static["channels"] != CHANNELS:
        return None
    return [(GRAY,)]


def holes(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction]:
    """Return the instruction of rectangles of a constant."""
    counts = len(encoded.arrays["holes"]), len(encoded.arrays["fill"])
    return [(HOLES, offsets["holes"], counts[0], offsets["fill"], counts[1])]


def warp(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction] | None:
    """Return the reading of an affine warp, or None."""
    static: dict[str, Any] = dict(encoded.static)
    # The kernel reads between the pixels as OpenCV 5 does: without a grid.
    if static["cells"] or len(encoded.arrays["fill"]) != CHANNELS:
        return None
    how = static["border"] + _WARPED_NEAREST * (static["interpolation"] == _NEAREST)
    how += _ROUNDS_ONCE * static["rounds_once"]
    return [(WARP, offsets["inverse"], how, offsets["fill"], static["scalar_from"])]


FUSED: Final[Mapping[str, Fused]] = MappingProxyType(
    {
        **dict.fromkeys(("NoOp", "HorizontalFlip", "VerticalFlip", "Transpose"), mirror),
        **dict.fromkeys(("RandomRotate90", "D4"), mirror),
        **dict.fromkeys(("RandomCrop", "CenterCrop", "PadIfNeeded"), "window"),
        **dict.fromkeys(("Resize", "RandomResizedCrop", "RandomSizedCrop"), "resize"),
        **dict.fromkeys(("Affine", "Rotate", "ShiftScaleRotate"), warp),
        **dict.fromkeys(("RandomBrightnessContrast", "RandomGamma"), table),
        **dict.fromkeys(("CoarseDropout", "Erasing"), holes),
        "HueSaturationValue": hsv,
        "ColorJitter": jitter,
        "ToGray": gray,
        "Normalize": "normalize",
        "ToFloat": "to float",
        "ToTensorV2": "channels first",
    }
)
"""What operations are, by the name of their class in Albumentations; no run takes others."""

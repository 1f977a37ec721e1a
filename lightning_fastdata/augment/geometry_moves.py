"""How each geometric operation moves pixels, as a matrix and the border that it may meet."""

# ruff: noqa: ARG001 - all functions that make moves share one signature

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_fastdata.augment.ops.operation import Encoded
    from lightning_fastdata.augment.tape import Role, TapeOp

Size: TypeAlias = tuple[int, int]
"""Height and width."""
Rectangle: TypeAlias = tuple[float, float, float, float]
"""Left, top, right and bottom pixel, by their centres; all four belong to it."""
Kind: TypeAlias = Literal["index", "resize", "warp"]

_MARGIN_PX: Final = 1e-4
"""Positions this far outside an image are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What one geometric operation does to one image or mask."""

    kind: Kind
    """``index``: it moves whole pixels. ``resize``: it reads a box and never beyond its edges.
    ``warp``: it reads anywhere."""
    inverse: np.ndarray
    """float64 ``[3, 3]``: from the centre ``(x, y, 1)`` of an output pixel to its origin."""
    size: Size
    """Height and width of the result."""
    reads: Rectangle
    """The part of its input that it may read."""
    leaves: bool
    """Whether it reads outside of that part."""
    interpolation: int | None = None
    """OpenCV's number; None for those that move whole pixels."""
    border: int | None = None
    """What it reads outside, ``BORDER_*``; None where it never does, or reads the edge."""
    fill: np.ndarray | None = None
    """float32 ``[channels]``: the colour outside, for a constant border."""


def whole(size: Size) -> Rectangle:
    """Return the rectangle of all pixels of an image."""
    return 0.0, 0.0, size[1] - 1.0, size[0] - 1.0


def carried(matrix: np.ndarray, rectangle: Rectangle) -> Rectangle:
    """Return where a matrix that moves whole pixels takes a rectangle."""
    left, top, right, bottom = rectangle
    corners = matrix @ np.array([[left, right], [top, bottom], [1.0, 1.0]])
    low, high = corners[:2].min(1).round(), corners[:2].max(1).round()
    return float(low[0]), float(low[1]), float(high[0]), float(high[1])


def move_of(op: TapeOp, size: Size, role: Role) -> Move | None:
    """Return how an operation moves the pixels of an image of this size; None if it does more."""
    make = _MOVES.get(op.name)
    return None if make is None else make(op.encoded, size, role)


def kind_of(name: str) -> Kind | None:
    """Return what kind of operation a transform is, by its class name; None: not geometric."""
    make = _MOVES.get(name)
    return None if make is None else _KINDS[make]


def _symmetry(encoded: Encoded, size: Size, role: Role) -> Move:
    static = dict(encoded.static)
    inverse = np.eye(3)
    if static["transposed"]:
        inverse, size = np.array([[0.0, 1, 0], [1, 0, 0], [0, 0, 1]]), size[::-1]
    before = size if not static["transposed"] else size[::-1]
    for _ in range(static["turns"]):
        # A quarter turn to the left: row y comes from the column that is y from the right.
        turn = np.array([[0.0, -1, size[1] - 1], [1, 0, 0], [0, 0, 1]])
        inverse, size = inverse @ turn, size[::-1]
    return Move(kind="index", inverse=inverse, size=size, reads=whole(before), leaves=False)


def _window(encoded: Encoded, size: Size, role: Role) -> Move:
    static = dict(encoded.static)
    top, left = map(float, encoded.arrays["corner"])
    inverse = np.array([[1.0, 0, left], [0, 1, top], [0, 0, 1]])
    pads = "fill" in encoded.arrays
    return Move(
        kind="index",
        inverse=inverse,
        size=static["size"],
        reads=whole(size),
        leaves=pads,
        border=static["border"] if pads else None,
        fill=_fill(encoded.arrays, role) if pads else None,
    )


def _resize(encoded: Encoded, size: Size, role: Role) -> Move:
    static = dict(encoded.static)
    left, top, right, bottom = map(float, encoded.arrays["box"])
    height, width = static["size"]
    if (bottom - top, right - left) == (height, width):
        shift = np.array([[1.0, 0, left], [0, 1, top], [0, 0, 1]])
        return Move(
            kind="index", inverse=shift, size=(height, width), reads=whole(size), leaves=False
        )
    across, down = (right - left) / width, (bottom - top) / height
    # Edges are mapped to edges, and the centre of a pixel lies half a pixel from them.
    inverse = np.array(
        [[across, 0, left + across / 2 - 0.5], [0, down, top + down / 2 - 0.5], [0, 0, 1]]
    )
    reads = left, top, right - 1, bottom - 1
    return Move(
        kind="resize",
        inverse=inverse,
        size=(height, width),
        reads=reads,
        leaves=_leaves(inverse, (height, width), reads),
        interpolation=_interpolation(static, role),
    )


def _warp(encoded: Encoded, size: Size, role: Role) -> Move:
    static = dict(encoded.static)
    inverse = encoded.arrays["inverse"].astype(np.float64)
    return Move(
        kind="warp",
        inverse=inverse,
        size=static["size"],
        reads=whole(size),
        leaves=_leaves(inverse, static["size"], whole(size)),
        interpolation=_interpolation(static, role),
        border=static["border"],
        fill=_fill(encoded.arrays, role),
    )


def _fill(arrays: Mapping[str, np.ndarray], role: Role) -> np.ndarray:
    return arrays["fill" if role == "image" else "fill_mask"]


def _interpolation(static: Mapping[str, Any], role: Role) -> int:
    return int(static["interpolation" if role == "image" else "mask_interpolation"])


def _leaves(inverse: np.ndarray, size: Size, reads: Rectangle) -> bool:
    """Whether some output pixel comes from outside; the corners tell, as straight lines stay so."""
    right, bottom = size[1] - 1.0, size[0] - 1.0
    corners = inverse @ np.array([[0, right, 0, right], [0, 0, bottom, bottom], [1.0, 1, 1, 1]])
    if corners[2].min() <= 0:
        return True
    x, y = corners[:2] / corners[2]
    left, top, right, bottom = reads
    outside = max(left - x.min(), x.max() - right, top - y.min(), y.max() - bottom)
    return bool(outside > _MARGIN_PX)


_MOVES: Final[dict[str, Callable[[Encoded, Size, Role], Move]]] = {
    **dict.fromkeys(
        (
            *("NoOp", "HorizontalFlip", "TimeReverse", "VerticalFlip", "Transpose"),
            *("RandomRotate90", "D4", "SquareSymmetry"),
        ),
        _symmetry,
    ),
    **dict.fromkeys(("RandomCrop", "CenterCrop", "Crop", "Pad", "PadIfNeeded"), _window),
    **dict.fromkeys(("Resize", "RandomResizedCrop", "RandomSizedCrop"), _resize),
    **dict.fromkeys(("Affine", "Rotate", "ShiftScaleRotate", "SafeRotate", "Perspective"), _warp),
}
_KINDS: Final[dict[object, Kind]] = {
    _symmetry: "index",
    _window: "index",
    _resize: "resize",
    _warp: "warp",
}

"""Runs of steps that one kernel can carry out, as a small program for each sample.

A run is a resize or a crop, or neither, and then operations that make each pixel from itself alone.
Each sample has its own instructions, in its own order; what it skips costs nothing. Instructions
are rows of five int32: what to do, and where in the blob the numbers for it lie.

====================  ==========================================================================
code                  numbers
====================  ==========================================================================
``NOP``               none
``MIRROR``            1: left and right, 2: top and bottom, 3: both
``TABLE``             offset of uint8 ``[256, count]``; count, 1 or 3
``HSV``               offset of uint8 ``[256, 3]``; OpenCV's lanes
``SCALE``             offset of a float64 factor
``CONTRAST``          offset of a float64 factor
``SATURATION``        offset of a float64 factor
``HUE``               offset of uint8 ``[256]``; OpenCV's lanes
``GRAY``              none
``HOLES``             offset of int32 ``[count, 4]``; count; offset of float32 ``[values]``; values
====================  ==========================================================================
"""

# ruff: noqa: ARG001 - all functions that make instructions share one signature

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import Encoded
    from lightning_fastdata.augment.program import Slot

NOP, MIRROR, TABLE, HSV, SCALE, CONTRAST, SATURATION, HUE, GRAY, HOLES = range(10)
WIDTH: Final = 5
"""Numbers of an instruction."""
CHANNELS: Final = 3
"""Of the images that are fused: others take one step after the other."""

Instruction: TypeAlias = tuple[int, ...]
Instructions: TypeAlias = "Callable[[Encoded, Mapping[str, int]], list[Instruction] | None]"
Geometry: TypeAlias = Literal["none", "window", "resize"]
Fused: TypeAlias = "Instructions | Literal['window', 'resize', 'normalize', 'channels first']"
"""What an operation is within a run: its first step, one for each pixel, or its end."""

_LINEAR: Final = 1
_MIRRORS: Final = {(False, 0): 0, (True, 3): 1, (True, 1): 2, (False, 2): 3}
"""Of the symmetries, as a transposition and quarter turns, those that keep rows rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRun:
    """Steps ``first`` to ``last`` of a program, for one kernel."""

    first: int
    """Number of the first step."""
    last: int
    """Number of the last step; it belongs to the run."""
    code: Slot
    """int32 ``[samples, instructions, 5]``."""
    contrasts: bool
    """Some sample needs the mean luminance of its image half-way, which takes a launch more."""
    geometry: Geometry
    """How the pixels are read."""
    size: tuple[int, int] | None
    """Height and width of the result; None: those of the batch."""
    where: Slot | None
    """``window``: top and left, int32 ``[samples, 2]``; ``resize``: the box, int32
    ``[samples, 4]``; else None."""
    normalize: tuple[Slot, Slot] | None
    """Mean and gain, float32 ``[samples, 3]``; None: the result is uint8."""
    channels_first: bool
    """The result is ``[n, C, H, W]``, else ``[n, H, W, C]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step as the schedule knows it, before it is packed away."""

    fused: Fused | None
    """What it is within a run; None: no run takes it."""
    rows: tuple[tuple[int, ...], ...]
    """Samples of each part."""
    encoded: tuple[tuple[Encoded, ...], ...]
    """What each sample of each part drew."""
    arrays: tuple[Mapping[str, Slot], ...]
    """Where the numbers of each part lie."""


def fuse(
    steps: Sequence[Step], samples: int, add: Callable[[np.ndarray], Slot]
) -> tuple[FusedRun, ...]:
    """Return the runs of a program of an image, first to last; runs of one step are no use.

    Args:
        steps: All steps of the program.
        samples: Samples in the batch.
        add: Packs an array into the blob.
    """
    runs, open_run = [], _OpenRun(0, samples)
    for number, step in enumerate(steps):
        if not open_run.takes(step, samples):
            runs.append(open_run.close(number - 1, add))
            open_run = _OpenRun(number, samples)
            if not open_run.takes(step, samples):
                open_run = _OpenRun(number + 1, samples)
    runs.append(open_run.close(len(steps) - 1, add))
    return tuple(run for run in runs if run is not None)


class _OpenRun:
    def __init__(self, first: int, samples: int) -> None:
        self.first = first
        self.code: list[list[Instruction]] = [[] for _ in range(samples)]
        self.taken = 0
        self.geometry: Geometry = "none"
        self.size: tuple[int, int] | None = None
        self.where: Slot | None = None
        self.normalize: tuple[Slot, Slot] | None = None
        self.channels_first = False

    def takes(self, step: Step, samples: int) -> bool:
        """Take a step and return True, or leave the run as it is and return False."""
        taken = self._take_end(step, samples) or self._take_geometry(step, samples)
        if not taken and (self.normalize is not None or self.channels_first):
            return False
        taken = taken or self._take_pixels(step)
        self.taken += taken
        return taken

    def _take_end(self, step: Step, samples: int) -> bool:
        whole = len(step.rows) == 1 and len(step.rows[0]) == samples
        if not whole or self.channels_first:
            return False
        if step.fused == "normalize" and self.normalize is None:
            arrays = step.arrays[0]
            if "mean" not in arrays or arrays["mean"].shape[1:] != (CHANNELS,):
                return False
            self.normalize = arrays["mean"], arrays["gain"]
            return True
        self.channels_first = step.fused == "channels first"
        return self.channels_first

    def _take_geometry(self, step: Step, samples: int) -> bool:
        whole = len(step.rows) == 1 and len(step.rows[0]) == samples
        if self.taken or not whole:
            return False
        static, arrays = dict(step.encoded[0][0].static), step.arrays[0]
        if step.fused == "resize" and static["interpolation"] == _LINEAR:
            self.geometry, self.where = "resize", arrays["box"]
        elif step.fused == "window" and "fill" not in arrays:
            self.geometry, self.where = "window", arrays["corner"]
        else:
            return False
        self.size = static["size"]
        return True

    def _take_pixels(self, step: Step) -> bool:
        instructions = step.fused
        if instructions is None or isinstance(instructions, str):
            return False
        found: list[tuple[int, list[Instruction]]] = []
        for rows, encoded, arrays in zip(step.rows, step.encoded, step.arrays, strict=True):
            for place, (row, one) in enumerate(zip(rows, encoded, strict=True)):
                offsets = {name: _row_offset(slot, place) for name, slot in arrays.items()}
                made = instructions(one, offsets)
                if made is None:
                    return False
                found.append((row, made))
        if any(_contrasts(self.code[row]) and _contrasts(made) for row, made in found):
            return False
        for row, made in found:
            self.code[row] += made
        return True

    def close(self, last: int, add: Callable[[np.ndarray], Slot]) -> FusedRun | None:
        if self.taken < 2:
            return None
        length = max(1, *map(len, self.code))
        code = np.zeros((len(self.code), length, WIDTH), np.int32)
        for row, listed in enumerate(self.code):
            for number, instruction in enumerate(listed):
                code[row, number, : len(instruction)] = instruction
        return FusedRun(
            first=self.first,
            last=last,
            code=add(code),
            contrasts=any(map(_contrasts, self.code)),
            geometry=self.geometry,
            size=self.size,
            where=self.where,
            normalize=self.normalize,
            channels_first=self.channels_first,
        )


def _contrasts(code: Sequence[Instruction]) -> bool:
    return any(instruction[0] == CONTRAST for instruction in code)


def _row_offset(slot: Slot, row: int) -> int:
    return slot.offset + row * slot.dtype.itemsize * int(np.prod(slot.shape[1:], dtype=np.int64))


def mirror(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction] | None:
    """Return the instruction of a symmetry that keeps rows rows, or None."""
    static = dict(encoded.static)
    axes = _MIRRORS.get((static["transposed"], static["turns"]))
    if axes is None:
        return None
    return [(MIRROR, axes)] if axes else []


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
    if static["method"] != "weighted_average" or static["channels"] != CHANNELS:
        return None
    return [(GRAY,)]


def holes(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction]:
    """Return the instruction of rectangles of a constant."""
    holes, fill = encoded.arrays["holes"], encoded.arrays["fill"]
    return [(HOLES, offsets["holes"], len(holes), offsets["fill"], len(fill))]

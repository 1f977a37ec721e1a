"""Runs of steps that one kernel carries out, made when a batch is packed.

:mod:`~lightning_fastdata.augment.replay.instructions` says what an operation is within a run. A run
takes steps as long as it can: a sample is read first, as all samples are (a window, a resize) or in
its own way (a warp, or a filter), then changed pixel by pixel, and written. What comes too late for
that begins the next run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from lightning_fastdata.augment.replay.instructions import (
    BOTH_AXES,
    CHANNELS,
    CONTRAST,
    ENDS,
    LATE_HOLES,
    WARP,
    WIDTH,
    holes,
    is_reading,
    is_transposing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from lightning_fastdata.augment.ops.operation import (
        Encoded,
        Fused,
        Instruction,
        Instructions,
        Role,
    )

Geometry: TypeAlias = Literal["none", "window", "resize", "warp", "filter"]
_REPLICATE: Final = 1
_READ: Final = {
    "image": ("interpolation", 1, "fill"),
    "mask": ("mask_interpolation", 0, "fill_mask"),
}
"""The setting of how a resize reads, the value that runs know of it (linear for images, the nearest
pixel for masks), and the array of what lies outside."""


@dataclass(frozen=True, slots=True)
class ArrayAt:
    """Where one array lies in the blob of its batch."""

    offset: int
    """First byte; a multiple of 16."""
    dtype: torch.dtype
    """Type of its elements."""
    shape: tuple[int, ...]
    """Its shape."""

    @property
    def row_bytes(self) -> int:
        """Bytes from one sample's part of the array to the next one's."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def view(self, blob: torch.Tensor) -> torch.Tensor:
        """Return the array as a view of the blob, wherever that is."""
        count = math.prod(self.shape) * self.dtype.itemsize
        return blob[self.offset : self.offset + count].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRun:
    """Steps ``first`` to ``last`` of a program, for one kernel."""

    first: int
    """Number of the first step."""
    last: int
    """Number of the last step; it belongs to the run."""
    code: ArrayAt
    """int32 ``[samples, instructions, 5]``."""
    idle: bool
    """It leaves every sample as it is, so nothing is launched."""
    contrasts: bool
    """Some sample needs the mean luminance of its image half-way, which takes a launch more."""
    role: Role
    """Whether it is a run on images or on masks."""
    geometry: Geometry
    """How the pixels are read: by all samples alike, or by some samples as their first instruction
    says (``warp``, ``filter``) and by the others as they are."""
    size: tuple[int, int] | None
    """Height and width of the result; None: those of the batch."""
    where: ArrayAt | None
    """``window``: top and left, int32 ``[samples, 2]``; ``resize``: the box, int32
    ``[samples, 4]``; else None."""
    border: int
    """``window``: the border mode."""
    fill: ArrayAt | None
    """``window`` that reaches outside: float32 ``[samples, 3]``, of masks ``[samples, 4]``; else
    None."""
    both_axes: ArrayAt | None
    """Samples that are filtered along their rows and then along their columns, int32 ``[count]``:
    the rows take a launch of their own. None: there are none."""
    keeps_size: bool
    """Some sample is read as it is, so ``size`` has to be that of the batch."""
    square: bool
    """Some sample is turned on its side, so the result has to be square."""
    normalize: tuple[ArrayAt, ArrayAt] | None
    """Mean and gain, float32 ``[samples, 3]``; None: it is not normalized."""
    limit: ArrayAt | None
    """What the values are divided by, float32 ``[samples, 1]``; None: they are not. If neither this
    nor ``normalize`` is there, the result is uint8."""
    channels_first: bool
    """The result is ``[n, C, H, W]``, else ``[n, H, W, C]``."""

    @property
    def launches(self) -> int:
        """Kernels to launch."""
        return 0 if self.idle else 1 + self.contrasts + (self.both_axes is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """One step as the schedule knows it, before it is packed away."""

    fused: Fused | None
    """What it is within a run; None: no run takes it."""
    rows: tuple[tuple[int, ...], ...]
    """Samples of each part."""
    encoded: tuple[tuple[Encoded, ...], ...]
    """What each sample of each part drew."""
    arrays: tuple[Mapping[str, ArrayAt], ...]
    """Where the numbers of each part lie."""


def fuse(
    steps: Sequence[ScheduledStep],
    samples: int,
    add: Callable[[np.ndarray], ArrayAt],
    role: Role = "image",
) -> tuple[FusedRun, ...]:
    """Return the runs of a program of an image or a mask, first to last.

    Args:
        steps: All steps of the program.
        samples: Samples in the batch.
        add: Packs an array into the blob.
        role: What the program is for.
    """
    runs, open_run = [], _OpenRun(0, samples, role)
    for number, step in enumerate(steps):
        if open_run.takes(step, samples):
            continue
        runs.append(open_run.close(number - 1, add))
        ended, open_run = open_run.ends, _OpenRun(number, samples, role)
        if ended or not open_run.takes(step, samples):
            open_run = _OpenRun(number + 1, samples, role)
        if ended or step.fused in ENDS:
            # What follows are no bytes any more.
            break
    runs.append(open_run.close(len(steps) - 1, add))
    return tuple(run for run in runs if run is not None)


class _OpenRun:
    def __init__(self, first: int, samples: int, role: Role) -> None:
        self.first = first
        self.role = role
        self.code: list[list[Instruction]] = [[] for _ in range(samples)]
        self.taken = 0
        self.geometry: Geometry = "none"
        self.size: tuple[int, int] | None = None
        self.where: ArrayAt | None = None
        self.border = _REPLICATE
        self.fill: ArrayAt | None = None
        self.normalize: tuple[ArrayAt, ArrayAt] | None = None
        self.limit: ArrayAt | None = None
        self.channels_first = False

    def takes(self, step: ScheduledStep, samples: int) -> bool:
        """Take a step and return True, or leave the run as it is and return False."""
        if self.ends:
            taken = self._take_end(step, samples) or self._take_late_holes(step)
        else:
            taken = (
                self._take_end(step, samples)
                or self._take_geometry(step, samples)
                or self._take_pixels(step)
            )
        self.taken += taken
        return taken

    @property
    def ends(self) -> bool:
        """Whether the run makes something else of bytes ``[n, H, W, C]``."""
        return self.normalize is not None or self.limit is not None or self.channels_first

    def _take_end(self, step: ScheduledStep, samples: int) -> bool:
        whole = len(step.rows) == 1 and len(step.rows[0]) == samples
        if not whole or self.channels_first:
            return False
        arrays, bytes_ = step.arrays[0], self.normalize is None and self.limit is None
        fixed = "mean" in arrays and _is_of_colours(arrays["mean"])
        if step.fused == "normalize" and bytes_ and fixed:
            self.normalize = arrays["mean"], arrays["gain"]
            return True
        if step.fused == "to float" and bytes_ and "limit" in arrays:
            self.limit = arrays["limit"]
            return True
        self.channels_first = step.fused == "channels first"
        return self.channels_first

    def _take_geometry(self, step: ScheduledStep, samples: int) -> bool:
        whole = len(step.rows) == 1 and len(step.rows[0]) == samples
        if self.taken or not whole:
            return False
        static, arrays = dict(step.encoded[0][0].static), step.arrays[0]
        interpolation, known, fill = _READ[self.role]
        if step.fused == "resize" and static[interpolation] == known:
            self.geometry, self.where = "resize", arrays["box"]
        elif step.fused == "window" and (self.role == "mask" or _is_of_colours(arrays.get(fill))):
            self.geometry, self.where = "window", arrays["corner"]
            self.border, self.fill = static["border"], arrays.get(fill)
        else:
            return False
        self.size = static["size"]
        return True

    def _take_pixels(self, step: ScheduledStep) -> bool:
        instructions = step.fused
        if instructions is None or isinstance(instructions, str):
            return False
        found: list[tuple[int, list[Instruction]]] = []
        sizes = {self.size} - {None}
        for row, one, made in _instructions(step, instructions):
            if made is None or not self._fits(row, made):
                return False
            if made and made[0][0] == WARP:
                sizes.add(dict(one.static)["size"])
            found.append((row, made))
        readings = [made[0] for _, made in found if made and is_reading(made[0])]
        ways: set[Geometry] = {"warp" if one[0] == WARP else "filter" for one in readings}
        if len(sizes) > 1 or len({self.geometry} | ways) > 1 + (self.geometry == "none"):
            return False
        for row, made in found:
            self.code[row] += made
        if ways:
            (self.geometry,) = ways
            self.size = next(iter(sizes), None)
        return True

    def _take_late_holes(self, step: ScheduledStep) -> bool:
        if self.channels_first or step.fused is not holes:
            return False
        found = list(_instructions(step, holes))
        if any(made is None for _, _, made in found):
            return False
        for row, _, made in found:
            self.code[row] += [(LATE_HOLES, *one[1:]) for one in made or []]
        return True

    def _fits(self, row: int, made: list[Instruction]) -> bool:
        """Return whether instructions may follow those that a sample has."""
        code = self.code[row]
        if _contrasts(code) and _contrasts(made):
            return False
        return not (code and made and is_reading(made[0]))

    def _changes_nothing(self) -> bool:
        return self.geometry == "none" and not any(self.code) and not self.ends

    def close(self, last: int, add: Callable[[np.ndarray], ArrayAt]) -> FusedRun | None:
        if not self.taken:
            return None
        length = max(1, *map(len, self.code))
        code = np.zeros((len(self.code), length, WIDTH), np.int32)
        for row, listed in enumerate(self.code):
            for number, instruction in enumerate(listed):
                code[row, number, : len(instruction)] = instruction
        both_axes = np.flatnonzero(code[:, 0, 0] == BOTH_AXES)
        code[both_axes, 0, 3] = np.arange(len(both_axes))
        return FusedRun(
            first=self.first,
            last=last,
            code=add(code),
            idle=self._changes_nothing(),
            role=self.role,
            contrasts=any(map(_contrasts, self.code)),
            geometry=self.geometry,
            size=self.size,
            where=self.where,
            border=self.border,
            fill=self.fill,
            both_axes=add(both_axes.astype(np.int32)) if len(both_axes) else None,
            keeps_size=self.geometry == "warp" and bool((code[:, 0, 0] != WARP).any()),
            square=any(is_transposing(one) for listed in self.code for one in listed),
            normalize=self.normalize,
            limit=self.limit,
            channels_first=self.channels_first,
        )


def _is_of_colours(slot: ArrayAt | None) -> bool:
    """Return whether an array has a number for each channel of RGB, if there is one."""
    return slot is None or slot.shape[1:] == (CHANNELS,)


def _instructions(
    step: ScheduledStep, instructions: Instructions
) -> Iterator[tuple[int, Encoded, list[Instruction] | None]]:
    """Yield each sample of a step, what it drew and what it has to do."""
    for rows, encoded, arrays in zip(step.rows, step.encoded, step.arrays, strict=True):
        strides = [(name, slot.offset, slot.row_bytes) for name, slot in arrays.items()]
        for place, (row, one) in enumerate(zip(rows, encoded, strict=True)):
            offsets = {name: first + place * stride for name, first, stride in strides}
            yield row, one, instructions(one, offsets)


def _contrasts(code: Sequence[Instruction]) -> bool:
    return any(instruction[0] == CONTRAST for instruction in code)

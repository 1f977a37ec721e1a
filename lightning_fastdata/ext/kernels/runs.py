"""Runs of steps that one kernel carries out, made when a batch is packed.

:mod:`~lightning_fastdata.ext.kernels.instructions` says what an operation is within a run. A run
takes steps as long as it can: a sample is read first, as all samples are (a window, a resize) or in
its own way (a warp), then changed pixel by pixel, and written. What comes too late for
that begins the next run. Kernels carry a run out on CUDA; without Triton, and for what has no
kernel, torch carries out one step after the other (:mod:`lightning_fastdata.augment.replay.torch`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import Encoded
from lightning_fastdata.augment.replay.program import ArrayAt, ScheduledStep
from lightning_fastdata.device import current
from lightning_fastdata.ext.kernels import instructions
from lightning_fastdata.ext.kernels.instructions import (
    CHANNELS,
    FUSED,
    End,
    Instruction,
    Instructions,
)

Geometry: TypeAlias = Literal["none", "window", "resize", "warp"]
_ENDS: Final[frozenset[object]] = frozenset(get_args(End))
"""What makes something else of bytes ``[n, H, W, C]``, so that no other run follows."""
REPLICATE: Final = 1
_LINEAR: Final = 1
_BLOCK: Final = 512
"""Pixels that one program of a kernel computes: four for each thread, which fit its registers."""
_MOST: Final = 1 << 31
"""Values of one image: kernels count those with 32 bits."""
_GEOMETRIES: Final = {"none": 0, "window": 1, "resize": 2, "warp": 3}


class Reading(NamedTuple):
    """How a run reads its pixels."""

    geometry: Geometry = "none"
    """By all samples alike, or by some as their first instruction says (``warp``) and by the others
    as they are."""
    size: tuple[int, int] | None = None
    """Height and width of the result; None: those of the batch."""
    where: ArrayAt | None = None
    """``window``: top and left, int32 ``[samples, 2]``; ``resize``: the box, int32
    ``[samples, 4]``; else None."""
    border: int = REPLICATE
    """``window``: the border mode."""
    fill: ArrayAt | None = None
    """``window`` that reaches outside: float32 ``[samples, 3]``."""
    step: ArrayAt | None = None
    """``resize``: source pixels per output pixel, down and across, float64 ``[samples, 2]``."""


class Ending(NamedTuple):
    """What a run makes of the bytes ``[n, H, W, C]`` in the end."""

    normalize: tuple[ArrayAt, ArrayAt] | None = None
    """Mean and gain, float32 ``[samples, 3]``; None: it is not normalized."""
    limit: ArrayAt | None = None
    """What the values are divided by, float32 ``[samples, 1]``; None: they are not."""
    channels_first: bool = False
    """The result is ``[n, C, H, W]``."""

    @property
    def keeps_bytes(self) -> bool:
        """Whether the result is uint8."""
        return self.normalize is None and self.limit is None


class Launch(NamedTuple):
    """One launch of a kernel."""

    grid: tuple[int]
    """Programs: one for each block of pixels of each sample."""
    arguments: tuple[torch.Tensor | int, ...]
    constants: Mapping[str, int]
    """What it is compiled for, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRun:
    """Steps ``first`` to ``last`` of a program, for one kernel."""

    first: int
    last: int
    code: ArrayAt
    """int32 ``[samples, instructions, 5]``."""
    reading: Reading
    ending: Ending
    idle: bool = False
    """It leaves every sample as it is, so nothing is launched."""
    contrasts: bool = False
    """Some sample needs the mean luminance of its image half-way, which takes a launch more."""
    keeps_size: bool = False
    """Some sample is read as it is, so the size has to stay that of the batch."""
    square: bool = False
    """Some sample is turned on its side, so the result has to be square."""

    def takes(self, batch: torch.Tensor) -> bool:
        """Return whether the run knows a batch of this form and size.

        One that reads some samples as they are keeps the size of the batch, and one that turns some
        samples on their side has square images. Otherwise torch carries out its steps, or says why
        not.
        """
        if not is_fusible(batch):
            return False
        before = batch.shape[1], batch.shape[2]
        height, width = after = self.reading.size or before
        if height * width * CHANNELS >= _MOST:
            return False
        return (not self.keeps_size or after == before) and (not self.square or height == width)

    def __call__(self, blob: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Return a batch that the run takes after it; ``blob`` holds the arrays of its program."""
        from lightning_fastdata.ext.kernels.fused import OPTIONS, fused_kernel

        out, launches = self.prepare(blob, batch)
        with current(batch.device):
            for grid, arguments, constants in launches:
                fused_kernel[grid](*arguments, **constants, **OPTIONS)
        return out

    def prepare(self, blob: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, list[Launch]]:
        """Return the memory for the result, and the launches that fill it.

        It asks the device for no value: everything it decides by lies on the host.
        """
        code, reading, ending = self.code, self.reading, self.ending
        batch = batch.contiguous()
        samples, height, width, _ = batch.shape
        size = reading.size or (height, width)
        shape = (CHANNELS, *size) if ending.channels_first else (*size, CHANNELS)
        dtype = torch.uint8 if ending.keeps_bytes else torch.float32
        out = batch.new_empty((samples, *shape), dtype=dtype)
        normalize, limit, _ = ending
        mean, gain = normalize or (limit or code, code)
        views = [blob.view(dtype) for dtype in (torch.int32, torch.float32, torch.float64)]
        sums = blob.view(torch.int64)
        if self.contrasts:
            sums = batch.new_zeros(samples, dtype=torch.int64)
        # What is not there lies at any place.
        where, numbers = reading.where or code, reading.fill or reading.step or code
        at = code.offset // 4, where.offset // 4, reading.border, numbers.offset // 4
        given = *at, mean.offset // 4, gain.offset // 4
        sizes = height, width, *size, code.shape[1], math.prod(size)
        grid = (samples * -(-math.prod(size) // _BLOCK),)
        launches = []
        # Luminance is added up first.
        for adds_up in (True, False) if self.contrasts else (False,):
            # What adds up writes no pixels: one kernel does for all that could be written.
            constants = {
                "GEOMETRY": _GEOMETRIES[reading.geometry],
                "SUMS": adds_up,
                "ENDS": 0 if adds_up or ending.keeps_bytes else 1 if normalize else 2,
                "PLANES": ending.channels_first and not adds_up,
                "BLOCK": _BLOCK,
            }
            tensors = (batch, blob if adds_up else out, blob, *views, sums)
            launches.append(Launch(grid, (*tensors, *given, *sizes), constants))
        return out, launches


def is_fusible(batch: torch.Tensor) -> bool:
    """Return whether the kernels know batches of this form: uint8 RGB images ``[n, H, W, 3]``."""
    known = batch.dtype == torch.uint8 and batch.ndim == 4 and batch.shape[-1] == CHANNELS
    return known and 0 < math.prod(batch.shape[1:]) < _MOST


def fuse(
    steps: Sequence[ScheduledStep],
    samples: int,
    add: Callable[[np.ndarray], ArrayAt],
) -> tuple[FusedRun, ...]:
    """Return the runs of the program of an image; ``add`` packs an array into the blob."""
    runs, open_run = [], _OpenRun(0, samples)
    for number, step in enumerate(steps):
        if open_run.takes(step):
            continue
        runs.append(open_run.close(number - 1, add))
        ended, open_run = open_run.ends, _OpenRun(number, samples)
        if ended or not open_run.takes(step):
            open_run = _OpenRun(number + 1, samples)
        if ended or FUSED.get(step.name) in _ENDS:
            # What follows are no bytes any more.
            break
    runs.append(open_run.close(len(steps) - 1, add))
    return tuple(run for run in runs if run is not None)


def _made(
    step: ScheduledStep, encode: Instructions
) -> Iterator[tuple[int, Encoded, list[Instruction] | None]]:
    """Yield each sample of a step, what it drew and what it has to do."""
    for group in step.groups:
        strides = [(name, one.offset, one.row_bytes) for name, one in group.arrays.items()]
        for place, (row, one) in enumerate(zip(group.rows, group.encoded, strict=True)):
            offsets = {name: first + place * stride for name, first, stride in strides}
            yield row, one, encode(one, offsets)


class _OpenRun:
    def __init__(self, first: int, samples: int) -> None:
        self.first = first
        self.code: list[list[Instruction]] = [[] for _ in range(samples)]
        self.taken = 0
        self.reading = Reading()
        self.ending = Ending()

    def takes(self, step: ScheduledStep) -> bool:
        """Take a step and return True, or leave the run as it is and return False."""
        whole = len(step.groups) == 1 and len(step.groups[0].rows) == len(self.code)
        taken = whole and self._take_end(step)
        if not self.ends:
            taken = taken or (whole and self._take_geometry(step)) or self._take_pixels(step)
        self.taken += taken
        return taken

    @property
    def ends(self) -> bool:
        """Whether the run makes something else of bytes ``[n, H, W, C]``."""
        return self.ending != Ending()

    def _take_end(self, step: ScheduledStep) -> bool:
        ending, arrays, fused = self.ending, step.groups[0].arrays, FUSED.get(step.name)
        if ending.channels_first:
            return False
        if fused == "channels first":
            self.ending = ending._replace(channels_first=True)
        elif not ending.keeps_bytes:
            return False
        elif fused == "normalize" and "mean" in arrays and _is_of_colours(arrays["mean"]):
            self.ending = ending._replace(normalize=(arrays["mean"], arrays["gain"]))
        elif fused == "to float" and "limit" in arrays:
            self.ending = ending._replace(limit=arrays["limit"])
        else:
            return False
        return True

    def _take_geometry(self, step: ScheduledStep) -> bool:
        if self.taken:
            return False
        static, arrays = dict(step.groups[0].encoded[0].static), step.groups[0].arrays
        fused = FUSED.get(step.name)
        if fused == "resize" and static["interpolation"] == _LINEAR:
            self.reading = Reading("resize", static["size"], arrays["box"], step=arrays["step"])
            return True
        outside = arrays.get("fill")
        if fused != "window" or not _is_of_colours(outside):
            return False
        self.reading = Reading(
            "window", static["size"], arrays["corner"], static["border"], outside
        )
        return True

    def _take_pixels(self, step: ScheduledStep) -> bool:
        fused = FUSED.get(step.name)
        if fused is None or isinstance(fused, str):
            return False
        found: list[tuple[int, list[Instruction]]] = []
        geometry, size = self.reading.geometry, self.reading.size
        warps = geometry == "warp"
        sizes = {size} - {None}
        for row, one, made in _made(step, fused):
            if made is None or not self._fits(row, made):
                return False
            if _warps(made):
                warps = True
                sizes.add(dict(one.static)["size"])
            found.append((row, made))
        if len(sizes) > 1 or (warps and geometry not in ("none", "warp")):
            return False
        for row, made in found:
            self.code[row] += made
        self.reading = self.reading._replace(
            geometry="warp" if warps else geometry, size=next(iter(sizes), None)
        )
        return True

    def _fits(self, row: int, made: list[Instruction]) -> bool:
        """Return whether instructions may follow those that a sample has."""
        code = self.code[row]
        if _contrasts(code) and _contrasts(made):
            return False
        return not (code and _warps(made))

    def close(self, last: int, add: Callable[[np.ndarray], ArrayAt]) -> FusedRun | None:
        """Return the run, packed; None if it took nothing."""
        if not self.taken:
            return None
        longest = max(1, *map(len, self.code))
        code = np.zeros((len(self.code), longest, instructions.WIDTH), np.int32)
        for row, listed in enumerate(self.code):
            for number, instruction in enumerate(listed):
                code[row, number, : len(instruction)] = instruction
        geometry = self.reading.geometry
        return FusedRun(
            first=self.first,
            last=last,
            code=add(code),
            reading=self.reading,
            ending=self.ending,
            idle=geometry == "none" and not any(self.code) and not self.ends,
            contrasts=any(map(_contrasts, self.code)),
            keeps_size=geometry == "warp" and bool((code[:, 0, 0] != instructions.WARP).any()),
            square=any(instructions.is_transposing(one) for listed in self.code for one in listed),
        )


def _is_of_colours(slot: ArrayAt | None) -> bool:
    """Return whether an array has a number for each channel of RGB, if there is one."""
    return slot is None or slot.shape[1:] == (CHANNELS,)


def _warps(code: Sequence[Instruction]) -> bool:
    return bool(code) and code[0][0] == instructions.WARP


def _contrasts(code: Sequence[Instruction]) -> bool:
    return any(instruction[0] == instructions.CONTRAST for instruction in code)

"""Runs of steps that one kernel carries out, made when a batch is packed.

A run reads each pixel of its result from the images, changes it by operations that make a pixel
from itself alone, and writes it. It takes steps as long as they fit this order: a sample is read,
as all samples are (a window, a resize) or in its own way (a warp), then changed pixel by pixel, and
written. A step that does not fit begins the next run. Kernels carry out runs on CUDA. Without
Triton, and for steps that have no kernel, torch carries out one step after the other
(:mod:`lightning_fastdata.augment.replay.torch`).

Each sample has its own instructions, in its own order; operations that it skips cost nothing.
Instructions are rows of five int32: what to do, and where in the blob its numbers lie.

====================  ==========================================================================
code                  numbers
====================  ==========================================================================
``NOP``               none
``MIRROR``            sum of 4: rows become columns, then 1: left and right, 2: top and bottom
``TABLE``             offset of uint8 ``[256, 3]``
``HSV``               offset of uint8 ``[256, 3]``; OpenCV's lanes
``SCALE``             offset of a float64 factor
``CONTRAST``          offset of a float64 factor
``SATURATION``        offset of a float64 factor
``HUE``               offset of uint8 ``[256]``; OpenCV's lanes
``GRAY``              none
``HOLES``             offset of int32 ``[count, 4]``; count; offset of float32 ``[3]``
====================  ==========================================================================

The first instruction of a sample may say how it is read:

====================  ==========================================================================
``WARP``              offset of float32 ``[3, 3]``; border mode, plus 8 for the nearest pixel, plus
                      16 if OpenCV rounds once behind its vectors; offset of float32 ``[3]``, the
                      fill; the first column behind its vectors
====================  ==========================================================================
"""

# ruff: noqa: ARG001 - all functions that make instructions share one signature

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch

from lightning_fastdata.augment.ops.geometry import LINEAR, NEAREST, REPLICATE, TRANSPOSES
from lightning_fastdata.augment.ops.operation import Encoded
from lightning_fastdata.augment.replay.program import ArrayAt, ProgramStep, ScheduledStep
from lightning_fastdata.device.backend import current

Instruction: TypeAlias = tuple[int, ...]
Instructions: TypeAlias = "Callable[[Encoded, Mapping[str, int]], list[Instruction] | None]"
End: TypeAlias = Literal["normalize", "to float", "channels first"]
Window: TypeAlias = Literal["window", "resize"]
Fused: TypeAlias = "Instructions | Window | End"
"""Role of an operation in a run: a way of reading, a change of each pixel, or the run's end."""
Geometry: TypeAlias = Literal["none", "window", "resize", "warp"]
_GEOMETRIES: Final = {"none": 0, "window": 1, "resize": 2, "warp": 3}
_ENDS: Final[frozenset[object]] = frozenset(get_args(End))
"""Operations whose result is not bytes ``[n, H, W, C]``, so that no other run follows."""
_BLOCK: Final = 512
"""Number of pixels that one program computes: four for each thread, which fit its registers."""
_MOST: Final = 1 << 31
"""Limit of the number of values of one image, as kernels count them with 32 bits."""

NOP, MIRROR, TABLE, HSV, SCALE, CONTRAST, SATURATION, HUE, GRAY, HOLES, WARP = range(11)
WIDTH: Final = 5
"""Number of integers in an instruction."""
CHANNELS: Final = 3
"""Number of channels that kernels take; other images take one step after the other."""

_WARPED_NEAREST: Final = 8
_ROUNDS_ONCE: Final = 16


def mirror(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction]:
    """Return the instruction of a symmetry of the square."""
    moves = dict(encoded.static)["moves"]
    return [(MIRROR, moves)] if moves else []


def table(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction] | None:
    """Return the instruction of a table for uint8, or None."""
    return [(TABLE, offsets["table"])] if encoded.arrays["table"].shape[1] == CHANNELS else None


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
    return [(HOLES, offsets["holes"], len(encoded.arrays["holes"]), offsets["fill"])]


def warp(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction] | None:
    """Return the instruction that reads a sample by an affine warp, or None."""
    static: dict[str, Any] = dict(encoded.static)
    # The kernel reads between pixels as OpenCV 5 does: at positions that are on no grid.
    if static["cells"] or len(encoded.arrays["fill"]) != CHANNELS:
        return None
    how = static["border"] + _WARPED_NEAREST * (static["interpolation"] == NEAREST)
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
"""Role of each operation in a run, by its class name in Albumentations; runs take no others."""


class Reading(NamedTuple):
    """How a run reads its pixels."""

    geometry: Geometry = "none"
    """Way of reading, alike for all samples; ``warp``: some samples are read as their first
    instruction says, and the others as they are."""
    size: tuple[int, int] | None = None
    """Height and width of the result in pixels; None: those of the batch."""
    where: ArrayAt | None = None
    """Place in the image, int32: top and left ``[samples, 2]`` for a ``window``; left, top, right
    and bottom ``[samples, 4]`` for a ``resize``; else None."""
    border: int = REPLICATE
    """OpenCV's border mode of a ``window``; not used otherwise."""
    fill: ArrayAt | None = None
    """Values outside the image, float32 ``[samples, 3]``; None: no ``window`` reaches there."""
    step: ArrayAt | None = None
    """Source pixels per output pixel of a ``resize``, down and across, float64 ``[samples, 2]``."""


class Ending(NamedTuple):
    """What a run makes of its bytes ``[n, H, W, C]`` in the end."""

    normalize: tuple[ArrayAt, ArrayAt] | None = None
    """Mean and gain, float32 ``[samples, 3]``; None: values are not normalized."""
    limit: ArrayAt | None = None
    """Divisor of the values, float32 ``[samples, 1]``; None: values are not divided."""
    channels_first: bool = False
    """Whether the result is ``[n, C, H, W]``."""

    @property
    def keeps_bytes(self) -> bool:
        """Whether the result is uint8."""
        return self.normalize is None and self.limit is None


class Launch(NamedTuple):
    """One launch of a kernel."""

    grid: tuple[int]
    """Number of programs: one for each block of pixels of each sample."""
    arguments: tuple[torch.Tensor | int, ...]
    constants: Mapping[str, int]
    """Constants for which the kernel is compiled, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRun:
    """Steps ``first`` to ``last`` of a program, for one kernel."""

    first: int
    last: int
    code: ArrayAt
    """Instructions of the samples, int32 ``[samples, instructions, 5]``."""
    reading: Reading
    ending: Ending
    idle: bool = False
    """Whether it leaves every sample as it is, so that nothing is launched."""
    contrasts: bool = False
    """Whether some sample needs its mean luminance half-way, which takes one more launch."""
    keeps_size: bool = False
    """Whether some sample is read as it is, so that the size has to stay that of the batch."""
    square: bool = False
    """Whether some sample is turned on its side, so that the result has to be square."""

    def takes(self, batch: torch.Tensor) -> bool:
        """Return whether the run can take a batch of this form and size.

        A run that reads some samples as they are must keep the size of the batch, and one that
        turns some samples on their side must make square images. Otherwise torch carries out its
        steps, or raises the error.
        """
        if not is_fusible(batch):
            return False
        before = batch.shape[1], batch.shape[2]
        height, width = after = self.reading.size or before
        if height * width * CHANNELS >= _MOST:
            return False
        return (not self.keeps_size or after == before) and (not self.square or height == width)

    def __call__(self, blob: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Return a batch after the run; ``blob`` holds the arrays of its program."""
        from lightning_fastdata.ext.kernels.fused import OPTIONS, fused_kernel

        out, launches = self.prepare(blob, batch)
        with current(batch.device):
            for grid, arguments, constants in launches:
                fused_kernel[grid](*arguments, **constants, **OPTIONS)
        return out

    def prepare(self, blob: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, list[Launch]]:
        """Return the memory for the result, and the launches that fill it.

        It asks the device for no value: all that it needs to decide lies on the host.
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
        # An array that is not there may lie at any place.
        where, numbers = reading.where or code, reading.fill or reading.step or code
        at = code.offset // 4, where.offset // 4, reading.border, numbers.offset // 4
        given = *at, mean.offset // 4, gain.offset // 4
        sizes = height, width, *size, code.shape[1], math.prod(size)
        grid = (samples * -(-math.prod(size) // _BLOCK),)
        launches = []
        # Luminance is added up first.
        for adds_up in (True, False) if self.contrasts else (False,):
            # The launch that adds up writes no pixels: one kernel serves for all kinds of results.
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
    """Return whether the kernels take batches of this form: uint8 RGB images ``[n, H, W, 3]``."""
    known = batch.dtype == torch.uint8 and batch.ndim == 4 and batch.shape[-1] == CHANNELS
    return known and 0 < math.prod(batch.shape[1:]) < _MOST


def fuse(
    steps: Sequence[ScheduledStep],
    samples: int,
    add: Callable[[np.ndarray], ArrayAt],
) -> tuple[FusedRun, ...]:
    """Return the runs of the program of an image; ``add`` packs an array into the blob."""
    runs, open_run = [], _OpenRun(0, samples)
    for number, scheduled in enumerate(steps):
        if open_run.takes(scheduled):
            continue
        runs.append(open_run.close(number - 1, add))
        ended, open_run = open_run.ends, _OpenRun(number, samples)
        if ended or not open_run.takes(scheduled):
            open_run = _OpenRun(number + 1, samples)
        if ended or FUSED.get(scheduled.step.name) in _ENDS:
            # The steps that follow are not given bytes any more.
            break
    runs.append(open_run.close(len(steps) - 1, add))
    return tuple(run for run in runs if run is not None)


def _made(
    scheduled: ScheduledStep, encode: Instructions
) -> Iterator[tuple[int, Encoded, list[Instruction] | None]]:
    """Yield for each sample of a step its row, what it drew, and its instructions."""
    for part, (rows, encoded) in zip(scheduled.step.parts, scheduled.drawn, strict=True):
        strides = [(name, one.offset, one.row_bytes) for name, one in part.arrays.items()]
        for place, (row, one) in enumerate(zip(rows, encoded, strict=True)):
            offsets = {name: first + place * stride for name, first, stride in strides}
            yield row, one, encode(one, offsets)


class _OpenRun:
    def __init__(self, first: int, samples: int) -> None:
        self.first = first
        self.code: list[list[Instruction]] = [[] for _ in range(samples)]
        self.taken = 0
        self.reading = Reading()
        self.ending = Ending()

    def takes(self, scheduled: ScheduledStep) -> bool:
        """Take a step and return True, or leave the run as it is and return False."""
        step = scheduled.step
        whole = step.parts[0].rows is None  # one part with all samples
        taken = whole and self._take_end(step)
        if not self.ends:
            taken = taken or (whole and self._take_geometry(step)) or self._take_pixels(scheduled)
        self.taken += taken
        return taken

    @property
    def ends(self) -> bool:
        """Whether the result of the run is no longer bytes ``[n, H, W, C]``."""
        return self.ending != Ending()

    def _take_end(self, step: ProgramStep) -> bool:
        ending, arrays, fused = self.ending, step.parts[0].arrays, FUSED.get(step.name)
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

    def _take_geometry(self, step: ProgramStep) -> bool:
        if self.taken:
            return False
        static, arrays = dict(step.parts[0].static), step.parts[0].arrays
        fused = FUSED.get(step.name)
        if fused == "resize" and static["interpolation"] == LINEAR:
            self.reading = Reading("resize", static["size"], arrays["box"], step=arrays["step"])
            return True
        outside = arrays.get("fill")
        if fused != "window" or not _is_of_colours(outside):
            return False
        self.reading = Reading(
            "window", static["size"], arrays["corner"], static["border"], outside
        )
        return True

    def _take_pixels(self, scheduled: ScheduledStep) -> bool:
        fused = FUSED.get(scheduled.step.name)
        if fused is None or isinstance(fused, str):
            return False
        found: list[tuple[int, list[Instruction]]] = []
        geometry, size = self.reading.geometry, self.reading.size
        warps = geometry == "warp"
        sizes = {size} - {None}
        for row, one, made in _made(scheduled, fused):
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
        code = np.zeros((len(self.code), longest, WIDTH), np.int32)
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
            keeps_size=geometry == "warp" and bool((code[:, 0, 0] != WARP).any()),
            square=any(
                one[0] == MIRROR and one[1] & TRANSPOSES for listed in self.code for one in listed
            ),
        )


def _is_of_colours(slot: ArrayAt | None) -> bool:
    """Return whether an array has a number for each channel of RGB, if there is one."""
    return slot is None or slot.shape[1:] == (CHANNELS,)


def _warps(code: Sequence[Instruction]) -> bool:
    return bool(code) and code[0][0] == WARP


def _contrasts(code: Sequence[Instruction]) -> bool:
    return any(instruction[0] == CONTRAST for instruction in code)

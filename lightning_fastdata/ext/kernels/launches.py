"""Carry out fused runs of a program with kernels, on CUDA.

Without Triton, and for what has no kernel, torch carries out one step after the other
(:mod:`lightning_fastdata.augment.replay.torch`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from lightning_fastdata.device.backend import current
from lightning_fastdata.ext.kernels.instructions import CHANNELS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.ext.kernels.runs import FusedRun

_BLOCK: Final = 512
"""Pixels that one program of a kernel computes: four for each thread, which fit its registers."""
_MOST: Final = 1 << 31
"""Values of one image: kernels count those with 32 bits."""
_GEOMETRIES: Final = {"none": 0, "window": 1, "resize": 2, "warp": 3}


class Launch(NamedTuple):
    """One launch of a kernel."""

    grid: tuple[int]
    """Programs: one for each block of pixels of each sample."""
    arguments: tuple[torch.Tensor | int, ...]
    constants: Mapping[str, int]
    """What it is compiled for, by name."""


def is_fusible(batch: torch.Tensor) -> bool:
    """Return whether the kernels know batches of this form: uint8 RGB images ``[n, H, W, 3]``."""
    known = batch.dtype == torch.uint8 and batch.ndim == 4 and batch.shape[-1] == CHANNELS
    return known and 0 < math.prod(batch.shape[1:]) < _MOST


def takes(run: FusedRun, batch: torch.Tensor) -> bool:
    """Return whether a run knows a batch of this form and size.

    A run that reads some samples as they are keeps the size of the batch, and one that turns some
    samples on their side has square images. Otherwise torch carries out its steps, or says why not.
    """
    if not is_fusible(batch):
        return False
    before = batch.shape[1], batch.shape[2]
    height, width = after = run.reading.size or before
    if height * width * CHANNELS >= _MOST:
        return False
    return (not run.keeps_size or after == before) and (not run.square or height == width)


def run_fused(run: FusedRun, blob: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Return a batch after a run.

    Args:
        run: What to do.
        blob: The arrays of the program, on the device of ``batch``.
        batch: uint8 images ``[n, H, W, 3]``, which the run :func:`takes`; never written to.
    """
    from lightning_fastdata.ext.kernels.fused import OPTIONS, fused_kernel

    out, launches = prepare(run, blob, batch)
    with current(batch.device):
        for grid, arguments, constants in launches:
            fused_kernel[grid](*arguments, **constants, **OPTIONS)
    return out


def prepare(
    run: FusedRun, blob: torch.Tensor, batch: torch.Tensor
) -> tuple[torch.Tensor, list[Launch]]:
    """Return the memory for the result of :func:`run_fused`, and the launches that fill it.

    It asks the device for no value: everything it decides by lies on the host.
    """
    batch = batch.contiguous()
    samples, height, width, _ = batch.shape
    size = run.reading.size or (height, width)
    shape = (CHANNELS, *size) if run.ending.channels_first else (*size, CHANNELS)
    dtype = torch.uint8 if run.ending.keeps_bytes else torch.float32
    out = batch.new_empty((samples, *shape), dtype=dtype)
    normalize, limit, _ = run.ending
    mean, gain = normalize or (limit or run.code, run.code)
    views = [blob.view(dtype) for dtype in (torch.int32, torch.float32, torch.float64)]
    sums = batch.new_zeros(samples, dtype=torch.int64) if run.contrasts else blob.view(torch.int64)
    # What is not there lies at any place.
    where, numbers = run.reading.where or run.code, run.reading.fill or run.reading.step or run.code
    at = run.code.offset // 4, where.offset // 4, run.reading.border, numbers.offset // 4
    given = *at, mean.offset // 4, gain.offset // 4
    sizes = height, width, *size, run.code.shape[1], math.prod(size)
    grid = (samples * -(-math.prod(size) // _BLOCK),)
    launches = []
    # Luminance is added up first.
    for adds_up in (True, False) if run.contrasts else (False,):
        # What adds up writes no pixels: one kernel does for all that could be written.
        constants = {
            "GEOMETRY": _GEOMETRIES[run.reading.geometry],
            "SUMS": adds_up,
            "ENDS": 0 if adds_up or run.ending.keeps_bytes else 1 if normalize else 2,
            "PLANES": run.ending.channels_first and not adds_up,
            "BLOCK": _BLOCK,
        }
        tensors = (batch, blob if adds_up else out, blob, *views, sums)
        launches.append(Launch(grid, (*tensors, *given, *sizes), constants))
    return out, launches

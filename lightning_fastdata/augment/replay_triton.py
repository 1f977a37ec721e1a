"""Carry out fused runs of a program with one kernel each, on CUDA.

Triton comes with torch where torch has CUDA. Without it, and for what has no kernel, torch carries
out one step after the other (:mod:`~lightning_fastdata.augment.replay_torch`), with the same bytes
as a result.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import torch

from lightning_fastdata.augment.fusion import CHANNELS

if TYPE_CHECKING:
    from lightning_fastdata.augment.fusion import FusedRun

_BLOCK: Final = 1024
"""Pixels that one program of the kernel computes."""
_GEOMETRIES: Final = {"none": 0, "window": 1, "resize": 2}


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


def has_kernels(device: torch.device) -> bool:
    """Return whether runs are fused on a device: CUDA, if Triton is installed."""
    return device.type == "cuda" and has_triton()


def is_fusible(batch: torch.Tensor) -> bool:
    """Return whether the kernels know batches of this form: uint8 RGB images ``[n, H, W, 3]``."""
    return (
        batch.dtype == torch.uint8
        and batch.ndim == 4
        and batch.shape[-1] == CHANNELS
        and 0 < batch.shape[1] * batch.shape[2] * CHANNELS < 1 << 31
    )


def run_fused(run: FusedRun, blob: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Return a batch after a run: one launch, or two if contrast needs means of images.

    Args:
        run: What to do.
        blob: The arrays of the program, on the device of ``batch``.
        batch: uint8 ``[n, H, W, 3]``, for which :func:`is_fusible`; never written to.

    Returns:
        uint8, or float32 if it was normalized; ``[n, H, W, 3]`` or ``[n, 3, H, W]``.
    """
    from lightning_fastdata.augment.kernels import fused_kernel

    batch = batch.contiguous()
    samples, height, width, _ = batch.shape
    out_height, out_width = run.size or (height, width)
    shape = (CHANNELS, out_height, out_width) if run.channels_first else (out_height, out_width, 3)
    dtype = torch.uint8 if run.normalize is None else torch.float32
    out = batch.new_empty((samples, *shape), dtype=dtype)
    sums = batch.new_zeros(samples if run.contrasts else 1, dtype=torch.int64)
    mean, gain = run.normalize or (run.code, run.code)
    where = run.where or run.code
    grid = (samples, -(-out_height * out_width // _BLOCK))
    passes = (True, False) if run.contrasts else (False,)
    for adds_up in passes:
        fused_kernel[grid](
            batch,
            out,
            blob,
            blob.view(torch.int32),
            blob.view(torch.float32),
            blob.view(torch.float64),
            sums,
            run.code.offset // 4,
            where.offset // 4,
            mean.offset // 4,
            gain.offset // 4,
            height,
            width,
            out_height,
            out_width,
            run.code.shape[1],
            GEOMETRY=_GEOMETRIES[run.geometry],
            SUMS=adds_up,
            NORMALIZE=run.normalize is not None,
            CHANNELS_FIRST=run.channels_first,
            WHERE=where.shape[-1],
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
    return out

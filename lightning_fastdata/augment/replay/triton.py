"""Carry out fused runs of a program with kernels, on CUDA.

Triton comes with torch where torch has CUDA. Without it, and for what has no kernel, torch carries
out one step after the other (:mod:`~lightning_fastdata.augment.replay.torch`).
"""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from lightning_fastdata.augment.ops.positions.warp import still_on_cells
from lightning_fastdata.augment.replay.instructions import CHANNELS
from lightning_fastdata.errors import FastDataWarning

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from lightning_fastdata.augment.replay.runs import ArrayAt, FusedRun

_BLOCK: Final = 512
"""Pixels that one program of a kernel computes: four for each thread, which fit its registers."""
_INTEGERS: Final = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_ENDS: Final = {"bytes": 0, "normalized": 1, "divided": 2}
_MOST: Final = 1 << 31
"""Values of one image: kernels count those with 32 bits."""
_NO_KERNELS: Final = (
    "Triton cannot compile kernels for {device} ({error}), so torch carries out one operation of a "
    "pipeline after the other: the same images, but slower. Triton needs a C compiler and Python's "
    "headers (apt-get install gcc python3-dev), and a directory that it can write to "
    "(TRITON_CACHE_DIR)."
)
_GEOMETRIES: Final = {"none": 0, "window": 1, "resize": 2, "warp": 3, "filter": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of a kernel."""

    kernel: Literal["fused", "across", "mask"]
    """Which one."""
    grid: tuple[int]
    """Programs: one for each block of pixels of each sample."""
    arguments: tuple[torch.Tensor | int, ...]
    """What it is called with, in order."""
    constants: Mapping[str, Any]
    """What it is compiled for, by name."""


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether runs are fused on a device: CUDA, if Triton is installed and works there.

    The first call for a device tries it out, and warns if Triton fails. (A Triton that does not
    suit torch, or a machine without a compiler, would otherwise end a training.)
    """
    if device.type != "cuda" or torch.version.cuda is None or not has_triton():
        return False
    error = kernel_fault(device)
    if error is not None:
        warnings.warn(_NO_KERNELS.format(device=device, error=error), FastDataWarning, stacklevel=2)
    return error is None


def kernel_fault(device: torch.device) -> str | None:
    """Return why no kernel can be compiled and launched on a device, or None."""
    try:
        from lightning_fastdata.augment.replay.kernels.fused import trial_kernel

        with _current(device):
            trial_kernel[(1,)](torch.empty(1, dtype=torch.int32, device=device))
    except Exception as error:
        # Compilers, drivers and file systems fail in their own ways, and training goes on without.
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return None


def is_fusible(batch: torch.Tensor) -> bool:
    """Return whether the kernels know batches of this form: uint8 RGB images ``[n, H, W, 3]``."""
    return (
        batch.dtype == torch.uint8
        and batch.ndim == 4
        and batch.shape[-1] == CHANNELS
        and 0 < batch.shape[1] * batch.shape[2] * CHANNELS < _MOST
    )


def is_movable(masks: torch.Tensor) -> bool:
    """Return whether the kernels know masks of this form: integers ``[n, H, W]`` or with channels.

    bool is not among them.
    """
    return masks.dtype in _INTEGERS and masks.ndim in (3, 4) and 0 < masks[:1].numel() < _MOST


def takes(run: FusedRun, batch: torch.Tensor) -> bool:
    """Return whether a run knows a batch of this form and size.

    A run that reads some samples as they are keeps the size of the batch, and one that turns some
    samples on their side has square images. Otherwise torch carries out its steps, or says why it
    cannot.
    """
    if not (is_fusible(batch) if run.role == "image" else is_movable(batch)):
        return False
    if run.role == "mask" and run.geometry == "warp" and still_on_cells(batch):
        return False  # the kernel reads at the nearest pixel as OpenCV 5 mostly does
    before = batch.shape[1], batch.shape[2]
    height, width = after = run.size or before
    if height * width * math.prod(batch.shape[3:]) >= _MOST:
        return False
    return (not run.keeps_size or after == before) and (not run.square or height == width)


def run_fused(
    run: FusedRun,
    blob: torch.Tensor,
    batch: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    channels_last: bool = False,
) -> torch.Tensor:
    """Return a batch after a run.

    Args:
        run: What to do.
        blob: The arrays of the program, on the device of ``batch``.
        batch: uint8 images ``[n, H, W, 3]`` or masks of integers ``[n, H, W]`` or ``[n, H, W, C]``,
            which the run :func:`takes`; never written to.
        out_dtype: A floating dtype for the result, rounded to the nearest, halves to even; None:
            float32 if the run ends in Normalize or ToFloat, else uint8.
        channels_last: The result of a run that ends in ToTensorV2 lies in memory with the channels
            of a pixel side by side (``torch.channels_last``).

    Returns:
        images ``[n, h, w, 3]`` or ``[n, 3, h, w]``; masks ``[n, h, w]`` or ``[n, h, w, C]``.
    """
    from lightning_fastdata.augment.replay.kernels import fused as kernels

    known = {
        "fused": kernels.fused_kernel,
        "across": kernels.across_kernel,
        "mask": kernels.mask_kernel,
    }
    out, launches = prepare(run, blob, batch, out_dtype=out_dtype, channels_last=channels_last)
    with _current(batch.device):
        for launch in launches:
            known[launch.kernel][launch.grid](
                *launch.arguments, **launch.constants, enable_fp_fusion=False
            )
    return out


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a device is the current one: Triton launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def prepare(
    run: FusedRun,
    blob: torch.Tensor,
    batch: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    channels_last: bool = False,
) -> tuple[torch.Tensor, list[Launch]]:
    """Return the memory for the result of :func:`run_fused`, and the launches that fill it.

    It asks the device for no value: everything it decides by lies on the host.
    """
    batch = batch.contiguous()
    if run.role == "mask":
        return _prepare_masks(run, blob, batch)
    samples, height, width, _ = batch.shape
    out_height, out_width = run.size or (height, width)
    planes = run.channels_first and not channels_last
    shape = (CHANNELS, out_height, out_width) if planes else (out_height, out_width, CHANNELS)
    ends = "normalized" if run.normalize else "divided" if run.limit else "bytes"
    dtype = out_dtype or (torch.uint8 if ends == "bytes" else torch.float32)
    out = batch.new_empty((samples, *shape), dtype=dtype)
    sums = batch.new_zeros(samples, dtype=torch.int64) if run.contrasts else blob.view(torch.int64)
    ints, floats = blob.view(torch.int32), blob.view(torch.float32)
    launches, middle = [], floats
    if run.both_axes is not None:
        (some,) = run.both_axes.shape
        middle = floats.new_empty((some, height, width, CHANNELS))
        rows_at, code_at = run.both_axes.offset // 4, run.code.offset // 4
        launches.append(
            Launch(
                kernel="across",
                grid=(some * _blocks(height * width),),
                arguments=(
                    *(batch, middle, ints, floats, rows_at, code_at),
                    *(height, width, run.code.shape[1]),
                ),
                constants={"BLOCK": _BLOCK},
            )
        )
    mean, gain = run.normalize or (run.limit or run.code, run.code)
    code, where, fill = (slot.offset // 4 for slot in _slots(run))
    pixels = out_height * out_width
    for adds_up in (True, False) if run.contrasts else (False,):
        # What adds up writes no pixels: one kernel does for all that could be written.
        launches.append(
            Launch(
                kernel="fused",
                grid=(samples * _blocks(pixels),),
                arguments=(
                    *(batch, batch if adds_up else out, blob, ints, floats),
                    *(blob.view(torch.float64), sums, middle),
                    *(code, where, run.border, fill, mean.offset // 4, gain.offset // 4),
                    *(height, width, out_height, out_width, run.code.shape[1], pixels),
                ),
                constants={
                    "GEOMETRY": _GEOMETRIES[run.geometry],
                    "SUMS": adds_up,
                    "ENDS": 0 if adds_up else _ENDS[ends],
                    "PLANES": planes and not adds_up,
                    "BLOCK": _BLOCK,
                },
            )
        )
    return (out.permute(0, 3, 1, 2) if run.channels_first and not planes else out), launches


def _prepare_masks(
    run: FusedRun, blob: torch.Tensor, masks: torch.Tensor
) -> tuple[torch.Tensor, list[Launch]]:
    samples, height, width, *rest = masks.shape
    out_height, out_width = run.size or (height, width)
    channels = rest[0] if rest else 1
    out = masks.new_empty((samples, out_height, out_width, *rest))
    values = out_height * out_width * channels
    code, where, fill = (slot.offset // 4 for slot in _slots(run))
    launch = Launch(
        kernel="mask",
        grid=(samples * _blocks(values),),
        arguments=(
            *(masks, out, blob.view(torch.int32), blob.view(torch.float32)),
            *(code, where, run.border, fill),
            *(height, width, out_height, out_width, run.code.shape[1], channels, values),
        ),
        constants={"GEOMETRY": _GEOMETRIES[run.geometry], "BLOCK": _BLOCK},
    )
    return out, [launch]


def _slots(run: FusedRun) -> tuple[ArrayAt, ArrayAt, ArrayAt]:
    """Return where the instructions, the geometry and the fill lie; any place if they are not."""
    return run.code, run.where or run.code, run.fill or run.code


def _blocks(pixels: int) -> int:
    return -(-pixels // _BLOCK)

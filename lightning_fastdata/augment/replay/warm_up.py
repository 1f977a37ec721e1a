"""Find out whether Triton works on a device: compile and launch a kernel, and warn if it fails.

Triton comes with torch where torch has CUDA. A Triton that does not suit torch, or a machine
without a compiler, would otherwise end a training.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from typing import Final

import torch

from lightning_fastdata.device.backend import current
from lightning_fastdata.errors import FastDataWarning

_NO_KERNELS: Final = (
    "Triton cannot compile kernels for {device} ({error}), so torch carries out one operation of a "
    "pipeline after the other: the same images, but slower. Triton needs a C compiler and Python's "
    "headers (apt-get install gcc python3-dev), and a directory that it can write to "
    "(TRITON_CACHE_DIR)."
)


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether Triton's kernels work on a device: on CUDA, where Triton is installed.

    The first call for a device tries it out, and warns if Triton fails.
    """
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    error = kernel_fault(device)
    if error is not None:
        warnings.warn(_NO_KERNELS.format(device=device, error=error), FastDataWarning, stacklevel=2)
    return error is None


def kernel_fault(device: torch.device) -> str | None:
    """Return why no kernel can be compiled and launched on a device, or None."""
    try:
        from lightning_fastdata.augment.replay.triton import trial_kernel

        with current(device):
            trial_kernel[(1,)](torch.empty(1, dtype=torch.int32, device=device))
    except Exception as error:
        # Compilers, drivers and file systems raise many errors; training goes on without kernels.
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return None

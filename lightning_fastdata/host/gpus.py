"""The GPUs of a machine, as their driver lists them.

Nothing here opens a CUDA context, which takes hundreds of MiB on a GPU that may be at work.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from lightning_fastdata.host.memory import DeviceMemory

_ASKED: Final = ("--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits")
_MIB: Final = 2**20
_MOST_S: Final = 20.0
"""A driver that is not kept loaded takes seconds."""


def read_gpus(
    count: Callable[[], int] | None = None,
    run: Callable[[Sequence[str]], str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[tuple[str, DeviceMemory | None]]:
    """Return name and memory of each GPU that torch may use; None: the driver does not tell.

    Args:
        count: returns how many there are; None: as torch does, which asks the driver.
        run: returns what a command prints, or raises OSError; None: as a process of its own.
        environ: the environment, in which ``CUDA_VISIBLE_DEVICES`` may leave GPUs out.
    """
    gpus = (count or _count)()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={visible}"] if visible else []
    try:
        told = (run or _run)(["nvidia-smi", *chosen, *_ASKED]) if gpus else ""
    except OSError:
        told = ""
    lines = told.strip().splitlines()
    if len(lines) == gpus:
        return [_parsed(line) for line in lines]
    return [(f"GPU {number}", None) for number in range(gpus)]


def _parsed(line: str) -> tuple[str, DeviceMemory | None]:
    name, free, total = (part.strip() for part in line.rsplit(",", 2))
    # A GPU that shares memory with the CPU says "[N/A]".
    known = free.isdecimal() and total.isdecimal()
    return name, DeviceMemory(int(free) * _MIB, int(total) * _MIB) if known else None


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_S, check=True)
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    return done.stdout


def _count() -> int:
    from lightning_fastdata.device.backend import gpu_count  # loads torch

    return gpu_count()

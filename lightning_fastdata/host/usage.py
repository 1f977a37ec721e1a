"""What the training takes of its machine at one moment, as counters; compare two readings."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fastdata.host.cpu import CpuThrottling, read_cpu_throttling
from lightning_fastdata.host.processes import (
    CpuUse,
    ReadBytes,
    read_cpu_use,
    read_io_each,
    read_pressure,
    read_pss,
    read_queued,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUsage:
    """Counters of the host and of this process with its workers."""

    at_s: float
    """When it was read, in seconds of a monotonic clock."""
    workers: int
    """Side processes of this process that are alive."""
    cpu_pressure_us: int | None = None
    """Time in which something on the machine was ready to run but had no CPU."""
    io_pressure_us: int | None = None
    """Time in which something on the machine waited for storage."""
    throttling: CpuThrottling | None = None
    """Of the most throttled cgroup around this process."""
    read: Mapping[int, ReadBytes]
    """What this process and its workers have read, by process number."""
    cpu: CpuUse | None = None
    """CPU seconds of the machine, and of this process with its workers."""
    queued_ns: int | None = None
    """Time in which the workers that are alive were ready but without a CPU, together."""
    shm_used_share: float | None = None
    """Part of ``/dev/shm`` that is taken, 0 to 1. A full one kills workers with a bus error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """Memory of one GPU, and how hard it was to get."""

    peak_bytes: int
    """Most that tensors of this process took at once."""
    never_used_bytes: int
    """What no process took, even when this one held most."""
    total_bytes: int
    """What the device has."""
    alloc_retries: int
    """How often the allocator had to free its cache and try again."""


def worker_processes() -> list[int]:
    """Process numbers of what this process has started through ``multiprocessing`` and is alive."""
    alive = multiprocessing.active_children()
    return [process.pid for process in alive if process.pid is not None]


def read_host_usage(
    workers: Iterable[int], *, at_s: float, own: int | None = None, root: Path = Path("/")
) -> HostUsage:
    """Read the counters, in about a millisecond; what the system does not tell is None.

    Args:
        workers: Their process numbers.
        at_s: The time, in seconds of a monotonic clock.
        own: The process that trains; None: this one.
        root: Folder that holds ``proc``, ``sys`` and ``dev``.
    """
    workers = list(workers)
    cpu, io = read_pressure("cpu", root=root), read_pressure("io", root=root)
    processes = [os.getpid() if own is None else own, *workers]
    return HostUsage(
        at_s=at_s,
        workers=len(workers),
        cpu_pressure_us=None if cpu is None else cpu.some_total_us,
        io_pressure_us=None if io is None else io.some_total_us,
        throttling=read_cpu_throttling(root=root),
        read=read_io_each(processes, root=root),
        cpu=read_cpu_use(processes, root=root),
        queued_ns=read_queued(workers, root=root),
        shm_used_share=_used_share(root / "dev" / "shm"),
    )


def read_memory_together(workers: Iterable[int], *, root: Path = Path("/")) -> int | None:
    """Bytes that this process and its workers take together; None if the system does not tell.

    The kernel walks through all of their pages, which takes some 10 ms for a process that has
    loaded torch.

    Args:
        workers: Their process numbers.
        root: Folder that holds ``proc``.
    """
    return read_pss([os.getpid(), *workers], root=root)


def read_device_usage(device: torch.device) -> DeviceUsage | None:
    """Read the memory counters of a CUDA device; None for a device of another kind."""
    if device.type != "cuda":
        return None
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    # Others' memory may change as well; what they take now is taken off.
    room = free_bytes + torch.cuda.memory_reserved(device)
    return DeviceUsage(
        peak_bytes=torch.cuda.max_memory_allocated(device),
        never_used_bytes=max(0, room - torch.cuda.max_memory_reserved(device)),
        total_bytes=total_bytes,
        alloc_retries=torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    )


def _used_share(folder: Path) -> float | None:
    try:
        status = os.statvfs(folder)
    except (OSError, AttributeError):  # no such folder; no such call on Windows
        return None
    return 1 - status.f_bfree / status.f_blocks if status.f_blocks else None

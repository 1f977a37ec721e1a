"""What processes, threads and devices use, as counters of the system; compare two readings."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from lightning_fastdata.host.cpu import CpuThrottling, read_cpu_throttling, read_text

if TYPE_CHECKING:
    import torch


Resource: TypeAlias = Literal["cpu", "io", "memory"]
"""What tasks can wait for."""
_BUSY: Final = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq and steal: what ``/proc/stat`` counts for work of somebody."""
_USED: Final = slice(11, 15)
"""utime, stime, cutime and cstime of ``/proc/PID/stat``, behind the name of the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBytes:
    """Counters of one process since it began; compare two readings."""

    asked_bytes: int
    """Bytes that read calls returned, cached or not (``rchar``). Memory maps are not in it."""
    storage_bytes: int
    """Bytes that were fetched from storage (``read_bytes``). Far below ``asked_bytes``: the file
    cache serves the rest. Network file systems may count nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Pressure stall information of the whole machine for one resource.

    ``some``: at least one task waited for it. https://docs.kernel.org/accounting/psi.html
    """

    some_10s_percent: float
    """Share of the last 10 s, 0 to 100."""
    some_60s_percent: float
    """Share of the last minute, 0 to 100."""
    some_total_us: int
    """Microseconds since the machine began; compare two readings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """CPU seconds used since some moment in the past; compare two readings."""

    all_s: float
    """Of all processes on all CPUs of the machine."""
    own_s: float
    """Of one process and its workers, and of those children of theirs that have ended."""
    cpus: int
    """CPUs of the machine."""


def parse_cpu_use(machine: str, processes: Iterable[str]) -> CpuUse | None:
    """CPU seconds from ``/proc/stat`` and ``/proc/PID/stat``, see proc(5); None if not stated.

    Args:
        machine: The text of ``/proc/stat``.
        processes: The texts of the processes; those that are empty have ended.
    """
    lines = [line.split() for line in machine.splitlines() if line.startswith("cpu")]
    if len(lines) < 2 or len(lines[0]) < 9:
        return None
    ticks_s = 1 / os.sysconf("SC_CLK_TCK")
    busy = sum(int(lines[0][1 + place]) for place in _BUSY)
    # The name of a program, in brackets, may hold spaces and brackets.
    told = [text.rpartition(")")[2].split() for text in processes]
    own = sum(int(field) for fields in told for field in fields[_USED])
    return CpuUse(all_s=busy * ticks_s, own_s=own * ticks_s, cpus=len(lines) - 1)


def read_cpu_use(processes: Iterable[int], *, root: Path = Path("/")) -> CpuUse | None:
    """CPU seconds of the machine, and of a process with its workers; None if it does not tell.

    Args:
        processes: Numbers of the process and of its workers. Those of them that have ended since
            count as long as the first one has waited for them, as ``multiprocessing`` does.
        root: Folder that holds ``proc``.
    """
    machine = read_text(root, PurePosixPath("/proc/stat")) or ""
    return parse_cpu_use(machine, [_read_of(process, "stat", root) for process in processes])


def read_queued(processes: Iterable[int], *, root: Path = Path("/")) -> int | None:
    """Nanoseconds in which processes were ready but without a CPU, together.

    Of their main threads, since they began; None if none of them tells.
    https://docs.kernel.org/scheduler/sched-stats.html

    Args:
        processes: Their process numbers.
        root: Folder that holds ``proc``.
    """
    texts = [_read_of(process, "schedstat", root).split() for process in processes]
    told = [int(text[1]) for text in texts if len(text) > 1]
    return sum(told) if told else None


def parse_pss(text: str) -> int | None:
    """Proportional set size in bytes, from ``/proc/PID/smaps_rollup``; None if it states none.

    Pages that several processes share count in equal parts, so that the sum over processes is the
    memory they take together.
    """
    found = re.search(r"^Pss:\s+(\d+) kB$", text, flags=re.MULTILINE)
    return None if found is None else int(found.group(1)) * 1024


def parse_io(text: str) -> ReadBytes | None:
    """Bytes read by a process, from ``/proc/PID/io``; None if it does not state them."""
    counts = dict(re.findall(r"^(\w+): (\d+)$", text, flags=re.MULTILINE))
    if "rchar" not in counts or "read_bytes" not in counts:
        return None
    return ReadBytes(asked_bytes=int(counts["rchar"]), storage_bytes=int(counts["read_bytes"]))


def parse_pressure(text: str) -> Pressure | None:
    """Pressure from ``/proc/pressure/*``; None if the text holds no line for ``some``.

    Example:
        >>> parse_pressure("some avg10=1.50 avg60=0.20 avg300=0.00 total=77").some_total_us
        77
    """
    found = re.search(
        r"^some avg10=([\d.]+) avg60=([\d.]+) avg300=[\d.]+ total=(\d+)", text, flags=re.MULTILINE
    )
    if found is None:
        return None
    return Pressure(
        some_10s_percent=float(found.group(1)),
        some_60s_percent=float(found.group(2)),
        some_total_us=int(found.group(3)),
    )


def read_pss(processes: Iterable[int], *, root: Path = Path("/")) -> int | None:
    """Memory that processes take together, in bytes; None if none of them tells.

    A process that has ended counts nothing. Reading takes about a millisecond for each process, as
    the kernel walks through its pages.

    Args:
        processes: Their process numbers.
        root: Folder that holds ``proc``.
    """
    texts = [_read_of(process, "smaps_rollup", root) for process in processes]
    told = [pss for text in texts if (pss := parse_pss(text)) is not None]
    return sum(told) if told else None


def read_io(processes: Iterable[int], *, root: Path = Path("/")) -> ReadBytes | None:
    """Bytes that processes have read together; None if none of them tells.

    Args:
        processes: Their process numbers.
        root: Folder that holds ``proc``.
    """
    told = read_io_each(processes, root=root).values()
    if not told:
        return None
    return ReadBytes(
        asked_bytes=sum(counts.asked_bytes for counts in told),
        storage_bytes=sum(counts.storage_bytes for counts in told),
    )


def read_io_each(processes: Iterable[int], *, root: Path = Path("/")) -> dict[int, ReadBytes]:
    """Bytes that each process has read, by its number; those that do not tell are left out.

    Args:
        processes: Their process numbers.
        root: Folder that holds ``proc``.
    """
    texts = {process: _read_of(process, "io", root) for process in processes}
    return {
        process: counts for process, text in texts.items() if (counts := parse_io(text)) is not None
    }


def read_pressure(resource: Resource, *, root: Path = Path("/")) -> Pressure | None:
    """Pressure on a resource of this machine; None where the kernel keeps none.

    Args:
        resource: ``"cpu"``, ``"io"`` or ``"memory"``.
        root: Folder that holds ``proc``.
    """
    return parse_pressure(read_text(root, PurePosixPath("/proc/pressure") / resource) or "")


def _read_of(process: int, name: str, root: Path) -> str:
    return read_text(root, PurePosixPath("/proc") / str(process) / name) or ""


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


_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentTime:
    """Time of one process, its children left out."""

    wall_s: float = 0.0
    """Seconds that passed."""
    cpu_s: float = 0.0
    """CPU seconds of all its threads."""
    runqueue_s: float = 0.0
    """Seconds in which the thread that reads this was ready to run, but had no CPU. 0 where the
    kernel does not tell."""

    def __add__(self, other: SpentTime) -> SpentTime:
        return SpentTime(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def __sub__(self, other: SpentTime) -> SpentTime:
        return SpentTime(
            **{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)}
        )


def queued_s(schedstat: Path = _SCHEDSTAT) -> float:
    """Return the seconds this thread was ready to run and had no CPU; 0 where it is not counted.

    The second number of https://docs.kernel.org/scheduler/sched-stats.html, in nanoseconds.
    """
    try:
        return int(schedstat.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def read_spent(schedstat: Path = _SCHEDSTAT) -> SpentTime:
    """Return what the process has used since some moment in the past: compare two readings."""
    return SpentTime(
        wall_s=time.monotonic(), cpu_s=time.process_time(), runqueue_s=queued_s(schedstat)
    )


class SpentMeter:
    """Adds up what is used between each begin and the pause that follows.

    Args:
        read: The reading of two moments that are compared.
    """

    def __init__(self, read: Callable[[], SpentTime] = read_spent) -> None:
        self._read = read
        self._total = SpentTime()
        self._began: SpentTime | None = None

    def began(self) -> None:
        """Measure from now on, if it is not measured already."""
        if self._began is None:
            self._began = self._read()

    def paused(self) -> None:
        """Do not measure until it begins again."""
        self._total, self._began = self.used(), None

    def used(self) -> SpentTime:
        """Return what was used so far."""
        if self._began is None:
            return self._total
        return self._total + (self._read() - self._began)

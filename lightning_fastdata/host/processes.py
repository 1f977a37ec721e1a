"""What processes take of the machine, as ``/proc`` tells, and how long they last."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from lightning_fastdata.host.cpu import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable

Resource: TypeAlias = Literal["cpu", "io", "memory"]
"""What tasks can wait for."""
_PR_SET_PDEATHSIG: Final = 1
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


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends, if it is the child of that process (Linux)."""
    if sys.platform.startswith("linux") and os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)

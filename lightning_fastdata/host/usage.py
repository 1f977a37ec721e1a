"""What processes and threads use, as counters of the system; compare two readings."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import CpuThrottling, counters, read_cpu_throttling, read_text

T = TypeVar("T")

_BUSY: Final = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq and steal: where ``/proc/stat`` counts work of any process."""
_USED: Final = slice(11, 15)
"""utime, stime, cutime and cstime of ``/proc/PID/stat``, behind the name of the program."""
_BATCHES: Final = ("/dev/shm/torch_", "/memfd:fastdata ")
"""How files begin that are batches of torch's workers, and of this package's."""
_ALONE: Final = 1 << 56
"""In an entry of ``/proc/PID/pagemap``: no other process has this page (Linux 4.2)."""
_MOST_READINGS: Final = 300


class Few(list[T]):
    """At most 300 of the readings that were added, as far from each other at all times."""

    _each, _added = 1, 0

    def add(self, reading: T) -> None:
        """Keep a reading, if it is its turn."""
        if self._added % self._each == 0:
            self.append(reading)
        self._added += 1
        if len(self) > _MOST_READINGS:
            del self[1::2]
            self._each *= 2


class CpuUse(NamedTuple):
    """CPU seconds used since some moment in the past."""

    all_s: float
    """Of all processes on all CPUs of the machine."""
    own_s: float
    """Of one process and its workers, and of those children of theirs that have ended."""
    cpus: int
    """CPUs of the machine."""


class HostUsage(NamedTuple):
    """Counters of the host and of this process with its workers; None: not known."""

    at_s: float
    """When it was read, in seconds of a monotonic clock."""
    throttling: CpuThrottling | None = None
    """Of the most throttled cgroup around this process."""
    cpu: CpuUse | None = None
    """Of the machine, and of this process with its workers."""


class SpentTime(NamedTuple):
    """Time of the calling process, its children left out."""

    wall_s: float = 0.0
    """That passed."""
    cpu_s: float = 0.0
    """Of all its threads on CPUs."""
    runqueue_s: float = 0.0
    """In which the thread that reads this was ready to run, but had no CPU; 0 where not known."""


def read_spent() -> SpentTime:
    """Return what the process has used since some moment in the past."""
    return SpentTime(
        wall_s=clock.monotonic(), cpu_s=clock.process_time(), runqueue_s=clock.queued_s()
    )


class SpentMeter:
    """Adds up what is used between each begin and the pause that follows."""

    def __init__(self, read: Callable[[], SpentTime] = read_spent) -> None:
        self._read = read
        self._total = SpentTime()
        self._began: SpentTime | None = None

    def began(self) -> None:
        """Measure from now on, if it is not measured already."""
        self._began = self._began or self._read()

    def paused(self) -> None:
        """Do not measure until it begins again."""
        self._total, self._began = self.used(), None

    def used(self) -> SpentTime:
        """Return what was used so far."""
        if self._began is None:
            return self._total
        readings = zip(self._total, self._read(), self._began, strict=True)
        return SpentTime(*(total + (now - began) for total, now, began in readings))


def read_cpu_use(processes: Iterable[int], *, root: Path = Path("/")) -> CpuUse | None:
    """CPU seconds of the machine, and of a process with its workers; None if not stated.

    Of ``/proc/stat`` and ``/proc/PID/stat``, see proc(5). Workers that have ended since count as
    long as the first process has waited for them, as ``multiprocessing`` does.
    """
    machine = (read_text(root, "/proc/stat") or "").splitlines()
    lines = [line.split() for line in machine if line.startswith("cpu")]
    if len(lines) < 2 or len(lines[0]) < 9:
        return None
    ticks_s = 1 / os.sysconf("SC_CLK_TCK")
    busy = sum(int(lines[0][1 + place]) for place in _BUSY)
    texts = [_text_of(process, "stat", root) for process in processes]
    # The name of a program, in brackets, may hold spaces and brackets.
    own = sum(int(field) for text in texts for field in text.rpartition(")")[2].split()[_USED])
    return CpuUse(busy * ticks_s, own * ticks_s, len(lines) - 1)


def read_queued(processes: Iterable[int], *, root: Path = Path("/")) -> dict[int, int]:
    """Nanoseconds in which main threads were ready to run without a CPU, by process, if counted."""
    texts = {each: _text_of(each, "schedstat", root).split() for each in processes}
    return {each: int(text[1]) for each, text in texts.items() if len(text) > 1}


class Pages(NamedTuple):
    """Memory of one process, in bytes."""

    anonymous_bytes: int
    """What belongs to no file, as objects do: also what it has in common with its parent."""
    own_bytes: int
    """Of this, at least so much is in pages that no other process has."""
    file_bytes: int
    """Of files that are mapped; pages of several processes count by parts."""


def pages_of(smaps_rollup: str) -> Pages | None:
    """Return what ``/proc/PID/smaps_rollup`` says; None: nothing.

    A page of a memory file counts there as dirty and private where one process alone has mapped it,
    and so does one of a file that was just written.
    """
    kib = counters(smaps_rollup)
    if "Pss" not in kib:
        return None
    dirty = max(0, kib.get("Private_Dirty", 0) - kib.get("Pss_Shmem", 0))
    own = min(dirty, kib.get("Pss_Anon", dirty))
    parts = kib.get("Anonymous", 0), own, kib.get("Pss_File", 0)
    return Pages(*(1024 * size for size in parts))


def read_pages(process: int, *, root: Path = Path("/")) -> Pages | None:
    """Return the memory of a process, see :func:`pages_of`; None: not known.

    It takes some 10 ms for one that has loaded torch, as the kernel walks through its pages.
    """
    return pages_of(_text_of(process, "smaps_rollup", root))


def read_alone(process: int, addresses: Sequence[int], *, root: Path = Path("/")) -> float | None:
    """Return which part of some addresses is in pages that no other process has; None: not known.

    https://docs.kernel.org/admin-guide/mm/pagemap.html
    """
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        with (root / f"proc/{process}/pagemap").open("rb", buffering=0) as file:
            entries = [os.pread(file.fileno(), 8, each // page * 8) for each in addresses]
    except OSError:
        return None
    alone = [bool(int.from_bytes(entry, sys.byteorder) & _ALONE) for entry in entries if entry]
    return sum(alone) / len(alone) if alone else None


def read_batch_files(
    processes: Iterable[int], *, root: Path = Path("/")
) -> dict[tuple[int, int], int]:
    """Return the bytes of each batch in shared memory that processes have, by its file's number.

    One on its way may be mapped by none, but is open in the process that sent it.
    """
    found = {}
    for process in processes:
        with suppress(OSError):  # it has ended
            for link in (root / f"proc/{process}/fd").iterdir():
                with suppress(OSError):
                    if str(link.readlink()).startswith(_BATCHES):
                        file = link.stat()
                        found[file.st_dev, file.st_ino] = file.st_blocks * 512
    return found


def read_mapped_bytes(*, root: Path = Path("/")) -> int:
    """Bytes of files, libraries among them, that this process has mapped and used; 0: not known."""
    return 1024 * counters(_text_of(os.getpid(), "status", root)).get("RssFile", 0)


def read_own_bytes(process: int, *, root: Path = Path("/")) -> int | None:
    """Return what a process takes that belongs to no file and is not shared; None: not known.

    In some 15 us. After a fork, memory of the parent counts until the parent writes to it.
    """
    numbers = _text_of(process, "statm", root).split()
    if len(numbers) < 3:
        return None
    return (int(numbers[1]) - int(numbers[2])) * os.sysconf("SC_PAGE_SIZE")


adopted: Final[set[int]] = set()
"""Numbers of processes of this machine that work for this one, and that others have started."""


def worker_processes() -> list[int]:
    """Numbers of living processes that work for this one.

    ``multiprocessing`` has started them here, or they are :data:`adopted`.
    """
    alive = [process.pid for process in multiprocessing.active_children()]
    started = [number for number in alive if number is not None]
    return started + [number for number in adopted if Path("/proc", str(number)).exists()]


def name_of_machine() -> str | None:
    """Return what two processes have in common that know each other by number; None: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def read_host_usage(workers: Sequence[int], *, at_s: float, root: Path = Path("/")) -> HostUsage:
    """Read the counters, in about a millisecond; workers are given by process number."""
    return HostUsage(
        at_s=at_s,
        throttling=read_cpu_throttling(root=root),
        cpu=read_cpu_use([os.getpid(), *workers], root=root),
    )


def _text_of(process: int, name: str, root: Path) -> str:
    return read_text(root, f"/proc/{process}/{name}") or ""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where times are read, each in seconds from any start."""

    clock_s: Callable[[], float] = clock.monotonic
    cpu_s: Callable[[], float] = clock.thread_time
    """CPU time of the calling thread, or of its process."""
    queue_s: Callable[[], float] = clock.queued_s
    """In which the calling thread waited for a CPU."""

    def of(self, work: Callable[[], T]) -> tuple[T, float, float]:
        """Return what ``work`` returns, the milliseconds it takes one thread, and those of CPU."""
        queued, cpu, wall = self.queue_s(), self.cpu_s(), self.clock_s()
        made = work()
        cpu, wall = self.cpu_s() - cpu, self.clock_s() - wall
        return made, 1000 * max(cpu, wall - (self.queue_s() - queued)), 1000 * cpu

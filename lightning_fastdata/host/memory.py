"""Free memory (RAM, the cgroup's share, ``/dev/shm``), memory of processes, and open files."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from lightning_fastdata.host.cpu import counters, read_cgroup_folders, read_process, read_text

T = TypeVar("T")

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Numbers of two options of glibc's ``mallopt()``, from its ``malloc.h``."""
_KEPT_BYTES: Final = 256 << 20
"""Free bytes at the end of the heap above which glibc gives them back to the system."""
_BLOCK_BYTES: Final = (64 << 20, 32 << 20)
"""Size of a block above which glibc gives it back as soon as it is freed, in bytes; the second is
the most that older versions accept."""
_MIB: Final = 2**20
_GIB: Final = 2**30
_V1_NO_LIMIT_BYTES = 2**62
"""Limit of a v1 cgroup from which on it has none: it then states almost 2**63."""
_ALONE: Final = 1 << 56
"""Bit in an entry of ``/proc/PID/pagemap``: no other process has this page (Linux 4.2)."""
_MOST_READINGS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory that was available when it was read, and limits of open files; None: no limit."""

    ram_available_bytes: int
    """RAM that programs can get without swapping (``MemAvailable``), of the whole machine."""
    cgroup_available_bytes: int | None
    """Bytes that the tightest memory limit of a cgroup leaves; beyond it the kernel kills."""
    shm_free_bytes: int | None
    """Free space of ``/dev/shm``, where batches of worker processes live (64 MiB in a Docker
    container by default). A full one kills workers with a bus error. None: there is none."""
    open_files_soft: int | None
    """Most file descriptors that this process may hold."""
    open_files_hard: int | None
    """Value up to which this process may raise ``open_files_soft`` itself."""

    @property
    def available_bytes(self) -> int:
        """RAM this process can count on: the smaller of the machine's and the cgroup's."""
        limit = self.cgroup_available_bytes
        return self.ram_available_bytes if limit is None else min(self.ram_available_bytes, limit)


class DeviceMemory(NamedTuple):
    """Memory of one GPU, as its driver counts it: all processes together."""

    free_bytes: int
    """Bytes that a new allocation can get. Memory that torch keeps cached counts as used here."""
    total_bytes: int


def read_host_memory(*, root: Path = Path("/")) -> HostMemory:
    """Free memory and open-file limits of this process.

    The open-file limits are always this process's own.
    """
    soft, hard = read_open_file_limits()
    return HostMemory(
        ram_available_bytes=_read_ram_available(root),
        cgroup_available_bytes=min(_read_cgroup_available(root), default=None),
        shm_free_bytes=_read_free(root / "dev" / "shm"),
        open_files_soft=soft,
        open_files_hard=hard,
    )


def read_open_file_limits() -> tuple[int | None, int | None]:
    """Return the soft and the hard limit of open files; None: no limit, or it is not known."""
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    return None if soft == endless else soft, None if hard == endless else hard


def allow_open_files(more: int) -> None:
    """Raise the soft limit of open files so that ``more`` of them fit, as far as the hard limit.

    It is left alone if they fit already, or if it may not be raised.
    """
    soft, hard = read_open_file_limits()
    if soft is None:
        return
    try:
        wanted = len(list(Path("/proc/self/fd").iterdir())) + more
    except OSError:  # no Linux, or the limit of open files is reached
        wanted = soft + more
    if wanted > soft and (hard is None or hard > soft):
        import resource

        new = 2 * wanted if hard is None else min(2 * wanted, hard)
        limits = (new, resource.RLIM_INFINITY if hard is None else hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def keep_freed_memory() -> bool:
    """Have this process keep freed memory for the next batch; False: the C library cannot do so.

    glibc gives large blocks back at once, and the system clears each page of the next one: for a
    batch of 12 MB that is 3000 page faults, a third of what a worker spends on decoded images.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    kept = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(kept and any(mallopt(_M_MMAP_THRESHOLD, size) for size in _BLOCK_BYTES))


def read_oom_kills(*, root: Path = Path("/")) -> int | None:
    """Return how many processes the kernel has killed as memory ran out; None: not counted.

    The count is of the cgroups around this process, else of the whole machine (Linux 4.13).
    """
    for folder in read_cgroup_folders("memory", root=root):
        for name in ("memory.events", "memory.oom_control"):
            kills = counters(read_text(root, folder / name) or "").get("oom_kill")
            if kills is not None:
                return kills
    return counters(read_text(root, "/proc/vmstat") or "").get("oom_kill")


def _read_ram_available(root: Path) -> int:
    kib = counters(read_text(root, "/proc/meminfo") or "").get("MemAvailable")
    if kib is not None:
        return kib * 1024
    import psutil  # macOS and Windows have no /proc

    return int(psutil.virtual_memory().available)


def _read_cgroup_available(root: Path) -> Iterator[int]:
    """Yield the bytes that each cgroup around this process with a limit may still take.

    Usage counts cached file pages. Those on the inactive list are given back before anything is
    killed, so they count as available, as in the kubelet's working set
    (https://kubernetes.io/docs/reference/instrumentation/node-metrics/).
    """
    for folder in read_cgroup_folders("memory", root=root):
        for names in (
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = ((read_text(root, folder / name) or "").strip() for name in names)
            if limit.isdecimal() and usage.isdecimal() and int(limit) < _V1_NO_LIMIT_BYTES:
                counts = counters(read_text(root, folder / "memory.stat") or "")
                # v1 gives both; the one with "total_" includes the cgroups below, as usage does.
                inactive = counts.get("total_inactive_file") or counts.get("inactive_file") or 0
                yield max(0, int(limit) - max(0, int(usage) - inactive))


def _read_free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def reserve_bytes(total_bytes: int) -> int:
    """Return the memory to leave free: the larger of 5 % of the device and 512 MiB.

    It covers what a measured peak misses, fragmentation, and growth of others.
    """
    return max(math.ceil(total_bytes / 20), 512 * _MIB)


def size_text(count: int) -> str:
    """Return bytes in words."""
    return f"{count / _GIB:.2f} GiB" if abs(count) >= _GIB else f"{count / _MIB:.0f} MiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or page-locked memory, is full."""
    from lightning_fastdata.device import backend  # it imports torch, which only this needs

    return backend.is_out_of_memory(error)


# Memory of processes


class Pages(NamedTuple):
    """Memory of one process, in bytes."""

    anonymous_bytes: int
    """Memory that belongs to no file, such as objects, including pages shared with its parent."""
    own_bytes: int
    """Lower bound of the part of ``anonymous_bytes`` that no other process has."""


def read_pages(process: int, *, root: Path = Path("/")) -> Pages | None:
    """Return the memory of a process, as ``/proc/PID/smaps_rollup`` states it; None: not known.

    It takes some 10 ms for a process that has loaded torch, as the kernel walks through its pages.
    """
    kib = counters(read_process(process, "smaps_rollup", root))
    if "Pss" not in kib:
        return None
    # A page of a memory file counts as dirty and private, too, if only one process has mapped it,
    # and so does a page of a file that was just written.
    dirty = max(0, kib.get("Private_Dirty", 0) - kib.get("Pss_Shmem", 0))
    own = min(dirty, kib.get("Pss_Anon", dirty))
    return Pages(1024 * kib.get("Anonymous", 0), 1024 * own)


def read_alone(process: int, addresses: Sequence[int], *, root: Path = Path("/")) -> float | None:
    """Return the share of addresses in pages that no other process has, 0 to 1; None: not known.

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


def read_own_bytes(process: int, *, root: Path = Path("/")) -> int | None:
    """Return the bytes of a process that belong to no file and are not shared; None: not known.

    It takes some 15 us. After a fork, the parent's memory counts, too.
    """
    numbers = read_process(process, "statm", root).split()
    if len(numbers) < 3:
        return None
    return (int(numbers[1]) - int(numbers[2])) * os.sysconf("SC_PAGE_SIZE")


class Few(list[T]):
    """A list of at most 300 of the readings that were added, evenly spread over them."""

    _each, _added = 1, 0

    def add(self, reading: T) -> None:
        """Keep a reading, if its turn has come."""
        if self._added % self._each == 0:
            self.append(reading)
        self._added += 1
        if len(self) > _MOST_READINGS:
            del self[1::2]
            self._each *= 2

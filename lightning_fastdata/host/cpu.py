"""How many CPUs one rank may use (affinity, cgroup quotas, ranks on this host), and CPU time used.

``os.cpu_count()`` sees the whole machine and ``os.sched_getaffinity`` does not see the quota of a
container (``docker --cpus=4`` on 128 cores still shows 128), so neither can size a worker pool.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

_LOCAL_SIZE_VARIABLES = (
    "LOCAL_WORLD_SIZE",  # torchrun, torch elastic
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # Intel MPI, MPICH
)
_BUSY: Final = (0, 1, 2, 5, 6, 7)
"""Columns of ``/proc/stat`` that count work: user, nice, system, irq, softirq and steal."""
_USED: Final = slice(11, 15)
"""Columns of ``/proc/PID/stat`` after the program's name: utime, stime, cutime and cstime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimit:
    """The limits of the CPUs of this process, and the CPUs that are left for one rank."""

    affinity_cpus: int
    """CPUs the scheduler may run this process on (``taskset``, cpuset, Slurm binding)."""
    quota_cpus: float | None
    """CPU seconds per second that the tightest cgroup grants; None: no quota. It bounds computing,
    not waiting: workers that wait for a disk may be more."""
    quota_source: str | None
    """File that states the quota; None: no quota."""
    ranks_on_host: int
    bound_to_rank: bool = False
    """Whether the launcher gave each rank an affinity of its own, so that it is not divided."""

    @property
    def usable_cpus(self) -> int:
        """CPUs for one rank: at least 1 and at most ``affinity_cpus``."""
        ranks = self.ranks_on_host
        own = self.affinity_cpus if self.bound_to_rank else self.affinity_cpus // ranks
        # Half a CPU of quota can still run one thread, so a fraction counts as one CPU more.
        granted = own if self.quota_cpus is None else math.ceil(self.quota_cpus) // ranks
        return max(1, min(own, granted))

    @property
    def reason(self) -> str:
        """One sentence that derives ``usable_cpus``."""
        usable, ranks, quota = self.usable_cpus, self.ranks_on_host, "no cgroup quota"
        if self.quota_cpus is not None:
            quota = f"quota {self.quota_cpus:g} ({self.quota_source})"
        return (
            f"{usable} CPU{'s' * (usable != 1)} for this rank: affinity {self.affinity_cpus}"
            f"{' of its own' * self.bound_to_rank}, {quota}, "
            f"{ranks} rank{'s' * (ranks != 1)} on this host"
        )


class CpuThrottling(NamedTuple):
    """Counters of a cgroup with a quota, since it was made; compare two readings."""

    periods: int
    """Number of quota periods (100 ms by default) in which something ran."""
    throttled_periods: int
    """Number of periods in which the quota was used up."""
    throttled_us: int
    """Microseconds in which runnable threads were held back, summed over CPUs."""


class CgroupMount(NamedTuple):
    """One mounted cgroup hierarchy."""

    controllers: frozenset[str]
    """Controllers of a v1 hierarchy; empty for v2, which carries all of them."""
    root: PurePosixPath
    """Cgroup shown at the mount point; not ``/`` inside many containers."""
    mount_point: PurePosixPath


def counters(text: str) -> dict[str, int]:
    """Return the numbers of lines ``name 5``, ``name: 5`` or ``name:  5 kB`` of a system file."""
    found = re.findall(r"^(\w+):?\s+(\d+)(?: kB)?$", text, flags=re.MULTILINE)
    return {name: int(number) for name, number in found}


def parse_cpu_max(text: str) -> float | None:
    """CPUs granted by a quota and its period: ``"150000 100000"`` is 1.5; None: there is no limit.

    Without a limit, a v2 ``cpu.max`` has ``max``, and a v1 ``cpu.cfs_quota_us`` has -1. A text of
    another form gives None, too: a limit we cannot read must not stop a training run.
    https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
    https://docs.kernel.org/scheduler/sched-bwc.html
    """
    match re.findall(r"-?\d+", text):
        case [quota, period] if int(quota) > 0 and int(period) > 0:
            return int(quota) / int(period)
    return None


def parse_cpu_stat(text: str) -> CpuThrottling | None:
    """Throttling counters of a cgroup's ``cpu.stat`` (v1 or v2); None if it counts none."""
    counts = counters(text)
    if "nr_throttled" not in counts:
        return None
    microseconds = counts.get("throttled_usec", counts.get("throttled_time", 0) // 1000)
    return CpuThrottling(counts.get("nr_periods", 0), counts["nr_throttled"], microseconds)


def parse_cgroup_membership(text: str) -> dict[str, PurePosixPath]:
    """Cgroup of this process by controller, from ``/proc/self/cgroup``; v2 is under ``""``.

    Lines look like ``4:cpu,cpuacct:/docker/0123`` (v1) and ``0::/user.slice`` (v2).
    """
    lines = [line.split(":", maxsplit=2) for line in text.splitlines() if line.count(":") > 1]
    return {
        controller: PurePosixPath(path)
        for _, controllers, path in lines
        for controller in controllers.split(",")
    }


@functools.lru_cache(maxsize=1)  # a run asks again and again, and the text hardly ever changes
def parse_cgroup_mounts(text: str) -> tuple[CgroupMount, ...]:
    r"""Mounted cgroup hierarchies, from ``/proc/self/mountinfo``.

    A line is ``31 23 0:28 <root> <mount point> <options> [tags] - cgroup2 <source> <options>``;
    see proc(5). Spaces in paths are written ``\040``.
    """
    mounts = []
    for line in text.splitlines():
        where, _, what = line.partition(" - ")
        match where.split(), what.split():
            case [_, _, _, root, mount_point, *_], [("cgroup" | "cgroup2") as kind, _, options]:
                controllers = options.split(",") if kind == "cgroup" else ()
                mount = CgroupMount(
                    frozenset(controllers), _unescaped(root), _unescaped(mount_point)
                )
                mounts.append(mount)
    return tuple(mounts)


def read_cgroup_folders(controller: str, *, root: Path = Path("/")) -> tuple[PurePosixPath, ...]:
    """Folders of this process's cgroup and of those above it, whose limits hold, too; inner first.

    ``controller`` is a name of v1, as ``"cpu"`` or ``"memory"``. It lives in the v1 or in the v2
    hierarchy; folders of the other one lack its files.
    """
    membership = parse_cgroup_membership(read_text(root, "/proc/self/cgroup") or "")
    folders: list[PurePosixPath] = []
    for mount in parse_cgroup_mounts(read_text(root, "/proc/self/mountinfo") or ""):
        is_v2 = not mount.controllers
        path = membership.get("" if is_v2 else controller)
        if path is None or not (is_v2 or controller in mount.controllers):
            continue
        inside = path.is_relative_to(mount.root) and ".." not in path.parts
        # A path from outside the mount (another cgroup namespace) has no name here; the mount
        # point is then the innermost cgroup that can be read.
        below = path.relative_to(mount.root) if inside else PurePosixPath()
        folder = mount.mount_point / below
        folders += [folder, *folder.parents[: len(below.parts)]]
    return tuple(dict.fromkeys(folders))


def tasks_on_node(tasks_per_node: str, node: int) -> int | None:
    """Entry of one node in Slurm's compressed list: ``"4(x2),1"`` is 4, 4, 1; None if not there."""
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", tasks_per_node):
        return None
    for tasks, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        node -= int(repeat or 1)
        if node < 0:
            return int(tasks)
    return None


def ranks_on_host(environ: Mapping[str, str]) -> int:
    """Training processes on this host by the launcher's environment variables; 1 if unknown.

    Known are torchrun, Open MPI, Intel MPI, MPICH and Slurm. Lightning's own launcher sets no such
    variable: pass its number of devices to ``read_cpu_limit`` instead.
    """
    numbers = [_number(environ, name) for name in _LOCAL_SIZE_VARIABLES]
    return next((n for n in [*numbers, _slurm_tasks(environ)] if n), 1)


def read_affinity() -> int:
    """CPUs this process may run on; all CPUs of the machine if the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_cpu_limit(
    *,
    root: Path = Path("/"),
    local_ranks: int | None = None,
    environ: Mapping[str, str] = os.environ,
    affinity: Callable[[], int] = read_affinity,
) -> CpuLimit:
    """CPU limit of this process, read from ``/proc``, ``/sys`` and the environment.

    ``local_ranks``: ranks on this host; None: as the launcher's environment variables say.
    """
    ranks = ranks_on_host(environ) if local_ranks is None else local_ranks
    affinity_cpus = affinity()
    quota_cpus, quota_source = min(_read_quotas(root), default=(None, None))
    # srun binds each task to its own CPUs. When the ranks are the tasks, an affinity of
    # cpus-per-task is already one rank's share, and dividing it again would leave CPUs idle.
    bound = ranks > 1 and _slurm_tasks(environ) == ranks
    return CpuLimit(
        affinity_cpus=affinity_cpus,
        quota_cpus=quota_cpus,
        quota_source=quota_source,
        ranks_on_host=ranks,
        bound_to_rank=bound and affinity_cpus <= (_number(environ, "SLURM_CPUS_PER_TASK") or 0),
    )


def read_cpu_throttling(*, root: Path = Path("/")) -> CpuThrottling | None:
    """Counters of the most throttled cgroup around this process; None without such counters."""
    texts = (read_text(root, f / "cpu.stat") or "" for f in read_cgroup_folders("cpu", root=root))
    found = filter(None, map(parse_cpu_stat, texts))
    return max(found, key=lambda stat: stat.throttled_us, default=None)


def read_text(root: Path, path: PurePosixPath | str) -> str | None:
    """Text of an absolute path below another root; None if it cannot be read."""
    try:
        return (root / PurePosixPath(path).relative_to("/")).read_text()
    except OSError:
        return None


def _read_quotas(root: Path) -> Iterator[tuple[float, str]]:
    for folder in read_cgroup_folders("cpu", root=root):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            texts = [read_text(root, folder / name) or "" for name in files]
            cpus = parse_cpu_max(" ".join(texts))
            if cpus is not None:
                yield cpus, str(folder / files[0])


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _slurm_tasks(environ: Mapping[str, str]) -> int | None:
    node = _number({"SLURM_NODEID": "0", **environ}, "SLURM_NODEID")
    step = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks = None if node is None else tasks_on_node(step, node)
    return tasks or _number(environ, "SLURM_NTASKS_PER_NODE")


def _unescaped(path: str) -> PurePosixPath:
    return PurePosixPath(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path))


# CPU time that was used: counters; compare two readings


class CpuUse(NamedTuple):
    """CPU seconds used since some moment in the past."""

    all_s: float
    """CPU seconds of all processes on all CPUs of the machine."""
    own_s: float
    """CPU seconds of one process and its workers, and of children of theirs that have ended."""
    cpus: int
    """Number of CPUs of the machine."""


def read_cpu_use(processes: Iterable[int], *, root: Path = Path("/")) -> CpuUse | None:
    """CPU seconds of the machine, and of a process with its workers; None if not stated.

    Read from ``/proc/stat`` and ``/proc/PID/stat``, see proc(5). Workers that have ended since
    count if the first process has waited for them, as ``multiprocessing`` does.
    """
    machine = (read_text(root, "/proc/stat") or "").splitlines()
    lines = [line.split() for line in machine if line.startswith("cpu")]
    if len(lines) < 2 or len(lines[0]) < 9:
        return None
    ticks_s = 1 / os.sysconf("SC_CLK_TCK")
    busy = sum(int(lines[0][1 + place]) for place in _BUSY)
    texts = [read_process(process, "stat", root) for process in processes]
    # The name of a program, in brackets, may itself hold spaces and brackets.
    own = sum(int(field) for text in texts for field in text.rpartition(")")[2].split()[_USED])
    return CpuUse(busy * ticks_s, own * ticks_s, len(lines) - 1)


def read_queued(processes: Iterable[int], *, root: Path = Path("/")) -> dict[int, int]:
    """Nanoseconds in which main threads were ready but had no CPU, by process, where counted."""
    texts = {each: read_process(each, "schedstat", root).split() for each in processes}
    return {each: int(text[1]) for each, text in texts.items() if len(text) > 1}


def read_process(process: int, name: str, root: Path) -> str:
    """Text of the file ``/proc/PID/name`` of a process; empty if it cannot be read."""
    return read_text(root, f"/proc/{process}/{name}") or ""


adopted: Final[set[int]] = set()
"""Numbers of processes on this machine that work for this one but were started by others."""


def worker_processes() -> list[int]:
    """Numbers of living processes that work for this one.

    They were started here by ``multiprocessing``, or are :data:`adopted`.
    """
    alive = [process.pid for process in multiprocessing.active_children()]
    started = [number for number in alive if number is not None]
    return started + [number for number in adopted if Path("/proc", str(number)).exists()]


def name_of_machine() -> str | None:
    """Return a name that processes with common process numbers share; None: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None

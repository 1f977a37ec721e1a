"""What the training took of its machine: what findings rest on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lightning_fastdata.batches.bad_samples import FaultLog
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import HostUsage, read_host_usage, read_queued, worker_processes
from lightning_fastdata.insight.memory import MemoryMeter

_FAULTS: Final = {
    "samples": "bad samples were replaced or left out {} times",
    "retries": "reads were repeated {} times",
    "deaths": "{} workers died and were replaced",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSeen:
    """What a training had of its machine. None: not known; shares are from 0 to 1."""

    queued_share: float | None = None
    """Of the time of the training process, and of a worker, that in which they were ready to run,
    but had no CPU; known of any loader."""
    throttled_share: float | None = None
    """Of the scheduler's periods, those in which the cgroup's CPU quota was used up."""
    throttled_cpus: float | None = None
    """CPUs, the mean over time, that had threads to run and were held back by the quota."""
    other_cpus: float | None = None
    """CPUs of the machine that other programs used, the mean over time."""
    machine_cpus: float | None = None
    """CPUs of the machine; more than there are for this training, maybe."""

    @classmethod
    def between(cls, begin: HostUsage, end: HostUsage) -> MachineSeen:
        """Return what the machine reports between two readings."""
        seconds = end.at_s - begin.at_s
        found: dict[str, Any] = {"throttled_share": throttled_share(begin, end)}
        if begin.throttling is not None and end.throttling is not None and seconds > 0:
            held_us = max(0, end.throttling.throttled_us - begin.throttling.throttled_us)
            found["throttled_cpus"] = held_us / seconds / 1e6
        if begin.cpu is not None and end.cpu is not None and seconds > 0:
            others_s = (end.cpu.all_s - begin.cpu.all_s) - (end.cpu.own_s - begin.cpu.own_s)
            found["other_cpus"] = max(0.0, others_s) / seconds
            found["machine_cpus"] = float(end.cpu.cpus)
        return cls(**found)

    def taken_of(self, cpus: float | None) -> float:
        """Return how many of so many CPUs for this training other programs use."""
        if cpus is None or self.other_cpus is None or self.machine_cpus is None:
            return 0.0
        return min(cpus, max(0.0, cpus - (self.machine_cpus - self.other_cpus)))


NO_MACHINE: Final = MachineSeen()
"""Nothing is known of it."""


def queued_share(seen: Mapping[int, tuple[float, float]], own: int) -> float | None:
    """Return the part of its time in which what a step goes through had no CPU; None: not seen.

    That is the training process, ``own``, and a worker, where there are any: their mean.

    Args:
        seen: Process -> the seconds for which it was seen, and of these, those in which it was
            ready to run and had no CPU.
        own: The training process.
    """

    def share(those: Sequence[tuple[float, float]]) -> float:
        lasted_s = sum(lasted_s for lasted_s, _ in those)
        return sum(queued_s for _, queued_s in those) / lasted_s if lasted_s > 0 else 0.0

    if not any(lasted_s > 0 for lasted_s, _ in seen.values()):
        return None
    workers = [each for process, each in seen.items() if process != own]
    return min(1.0, share(workers) + share([seen[own]] if own in seen else []))


def throttled_share(before: HostUsage, after: HostUsage) -> float | None:
    """Return the part of the quota's periods in which it was used up; None without a quota."""
    if before.throttling is None or after.throttling is None:
        return None
    periods = after.throttling.periods - before.throttling.periods
    held = after.throttling.throttled_periods - before.throttling.throttled_periods
    return min(1.0, max(0, held) / periods) if periods > 0 else None


_LOOK_EACH_S: Final = 0.25
"""Workers may be gone when the machine is read for the next time."""
_REST: Final = 1000
"""Memory that took a second to read is read again after so many: a thousandth of the time goes."""


class HostMeter:
    """The machine's side of one training, from its construction on."""

    def __init__(
        self,
        *,
        clock_s: Callable[[], float] = clock.monotonic,
        workers: Callable[[], list[int]] = worker_processes,
    ) -> None:
        self.memory = MemoryMeter()
        self.epoch = self._steps = 0
        """Those of the training that have begun."""
        self._clock_s = clock_s
        self._workers = workers
        self._began = read_host_usage(workers(), at_s=clock_s())
        self._memory_due_s = self._look_due_s = clock_s()
        self._first: dict[int, tuple[float, int]] = {}
        """Of each process, when it was seen first, and for how many ns it had queued by then."""
        self._queued: dict[int, tuple[float, float]] = {}
        """As of :func:`queued_share`; also of workers that have ended."""

    def step_ended(self) -> None:
        """Look, now and then, at what this process and its workers have of CPUs and memory."""
        self._steps += 1
        now_s = self._clock_s()
        if now_s >= self._look_due_s:
            self._look(now_s)

    def read_memory(self, *, at_once: bool = False) -> None:
        """Look at the pages of all processes, if it is time for it; ``at_once``: it is."""
        began_s = self._clock_s()
        if began_s < self._memory_due_s and not at_once:
            return
        self.memory.read(self._workers())
        self._memory_due_s = self._clock_s() + _REST * (self._clock_s() - began_s)

    def seen(self) -> MachineSeen:
        """Return what the machine reports of the training so far."""
        self._look(self._clock_s())
        now = read_host_usage(self._workers(), at_s=self._clock_s())
        queued = queued_share(self._queued, os.getpid())
        return replace(MachineSeen.between(self._began, now), queued_share=queued)

    def _look(self, now_s: float) -> None:
        workers = self._workers()
        self.memory.look(workers, step=self._steps, epoch=self.epoch)
        for process, queued_ns in read_queued([os.getpid(), *workers]).items():
            first_s, first_ns = self._first.setdefault(process, (now_s, queued_ns))
            self._queued[process] = now_s - first_s, (queued_ns - first_ns) / 1e9
        self._look_due_s = now_s + _LOOK_EACH_S


def fault_scalars(logs: Iterable[FaultLog]) -> dict[str, float]:
    """Return what went wrong in reading so far, in all loaders; without what has not."""
    counts = _faults(logs)
    return {f"data_faults/{n}": float(counts[n]) for n in ("samples", "deaths") if n in counts}


def _faults(logs: Iterable[FaultLog]) -> dict[str, int]:
    logs = list(logs)
    counts = {name: sum(getattr(log, name) for log in logs) for name in _FAULTS}
    return {name: count for name, count in counts.items() if count}


def fault_notes(logs: Iterable[FaultLog]) -> tuple[str, ...]:
    """Return in one sentence what went wrong in reading; empty: nothing has."""
    logs = list(logs)
    said = [_FAULTS[name].format(count) for name, count in _faults(logs).items()]
    if not said:
        return ()
    files = sorted({str(log.rule.quarantine_file) for log in logs if log.samples} - {"None"})
    listed = f" Bad samples are listed in {', '.join(files)}." if files else ""
    return (f"Faults in reading: {', '.join(said)}.{listed}",)

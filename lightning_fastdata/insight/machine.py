"""What a training takes of its machine, CPUs and memory: seen now and then, and told apart."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from math import ceil, prod
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from lightning_fastdata.batches.bad_samples import FaultLog
from lightning_fastdata.host import clock, memory
from lightning_fastdata.host.cpu import (
    CpuThrottling,
    CpuUse,
    read_cpu_throttling,
    read_cpu_use,
    read_queued,
    worker_processes,
)
from lightning_fastdata.host.memory import Few, Pages, read_host_memory, size_text
from lightning_fastdata.insight.finding import Advice, Finding, Rule
from lightning_fastdata.sources.shared import HeldObjects, held_objects

if TYPE_CHECKING:
    from lightning_fastdata.insight.evidence import Evidence

Usage: TypeAlias = tuple[float, CpuThrottling | None, CpuUse | None]
"""When counters were read, in seconds, that of the quota, and that of the CPUs; None: not known."""
_FAULTS: Final = {
    "samples": "bad samples were replaced or left out {} times",
    "retries": "reads were repeated {} times",
    "deaths": "{} workers died and were replaced",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSeen:
    """What was seen of a machine during a training. None: not known; shares are from 0 to 1."""

    queued_share: float | None = None
    """Share of time ready to run but without a CPU: that of the training process plus the mean of
    the workers. It is known of any loader."""
    queued_most: float | None = None
    """The larger of these two shares."""
    throttled_cpus: float | None = None
    """Number of CPUs, mean over time, that had threads to run but were held back by the quota."""
    other_cpus: float | None = None
    """Number of CPUs of the machine that other programs used, the mean over time."""
    machine_cpus: float | None = None
    """Number of CPUs of the machine; this training may be allowed fewer."""

    @classmethod
    def between(cls, begin: Usage, end: Usage) -> MachineSeen:
        """Return what the machine reports between two readings."""
        (began_s, held, used), (ended_s, held_now, used_now) = begin, end
        seconds = ended_s - began_s
        seen: dict[str, float] = {}
        if held is not None and held_now is not None and seconds > 0:
            held_us = held_now.throttled_us - held.throttled_us
            seen["throttled_cpus"] = max(0, held_us) / seconds / 1e6
        if used is not None and used_now is not None and seconds > 0:
            others_s = (used_now.all_s - used.all_s) - (used_now.own_s - used.own_s)
            seen["other_cpus"] = max(0.0, others_s) / seconds
            seen["machine_cpus"] = float(used_now.cpus)
        return cls(**seen)

    def taken_of(self, cpus: float | None) -> float:
        """Return how many of the training's ``cpus`` other programs use."""
        if cpus is None or self.other_cpus is None or self.machine_cpus is None:
            return 0.0
        return min(cpus, max(0.0, cpus - (self.machine_cpus - self.other_cpus)))

    def left_of(self, cpus: int) -> int:
        """Return how many of the training's ``cpus`` other programs leave to it, at least 1."""
        return max(1, cpus - round(self.taken_of(cpus)))


NO_MACHINE: Final = MachineSeen()
"""A machine of which nothing is known."""
_LOOK_EACH_S: Final = 0.25
"""Least seconds between two looks at the processes: workers may be gone when the training ends."""
_REST: Final = 1000
"""Memory is read again after this many times as long as reading took: a thousandth of the time."""


class HostMeter:
    """Watches what one training has of its machine, from construction on."""

    def __init__(self, workers: Callable[[], list[int]] = worker_processes) -> None:
        self.memory = MemoryMeter()
        self.epoch = self._steps = 0
        """Number of the epoch that runs, counted from 0, and number of steps that have ended."""
        self._workers = workers
        self._began = self._usage()
        self._memory_due_s = self._look_due_s = clock.monotonic()
        self._first: dict[int, tuple[float, int]] = {}
        """Process -> when it was seen first, in s, and how many ns it had queued by then."""
        self._queued: dict[int, tuple[float, float]] = {}
        """Process -> for how many seconds it was seen, and for how many of them it was ready to run
        but had no CPU. Workers that have ended are kept."""

    def step_ended(self) -> None:
        """Look, now and then, at what this process and its workers have of CPUs and memory."""
        self._steps += 1
        now_s = clock.monotonic()
        if now_s >= self._look_due_s:
            self._look(now_s)

    def read_memory(self, *, at_once: bool = False) -> None:
        """Look at the pages of all processes, if it is time for that or ``at_once`` is set."""
        began_s = clock.monotonic()
        if began_s < self._memory_due_s and not at_once:
            return
        self.memory.read(self._workers())
        self._memory_due_s = clock.monotonic() + _REST * (clock.monotonic() - began_s)

    def seen(self) -> MachineSeen:
        """Return what the machine reports of the training so far."""
        self._look(clock.monotonic())
        found = MachineSeen.between(self._began, self._usage())
        shares = self._queued_shares()
        together = min(1.0, sum(shares)) if shares else None
        return replace(found, queued_share=together, queued_most=max(shares, default=None))

    def _usage(self) -> Usage:
        used = read_cpu_use([os.getpid(), *self._workers()])
        return clock.monotonic(), read_cpu_throttling(), used

    def _queued_shares(self) -> list[float]:
        """Return the training process's share of time without a CPU, and the workers' mean."""
        own, workers = list[tuple[float, float]](), list[tuple[float, float]]()
        for process, times in self._queued.items():
            (own if process == os.getpid() else workers).append(times)
        sums = [map(sum, zip(*group, strict=True)) for group in (own, workers) if group]
        return [queued_s / lasted_s for lasted_s, queued_s in sums if lasted_s > 0]

    def _look(self, now_s: float) -> None:
        workers = self._workers()
        self.memory.look(workers, step=self._steps, epoch=self.epoch)
        for process, queued_ns in read_queued([os.getpid(), *workers]).items():
            first_s, first_ns = self._first.setdefault(process, (now_s, queued_ns))
            self._queued[process] = now_s - first_s, (queued_ns - first_ns) / 1e9
        self._look_due_s = now_s + _LOOK_EACH_S


def fault_scalars(logs: Iterable[FaultLog]) -> dict[str, float]:
    """Return how often reading went wrong so far, over all loaders; a count of 0 has no key."""
    counts = _faults(logs)
    return {f"data_faults/{n}": float(counts[n]) for n in ("samples", "deaths") if n in counts}


def _faults(logs: Iterable[FaultLog]) -> dict[str, int]:
    logs = list(logs)
    counts = {name: sum(getattr(log, name) for log in logs) for name in _FAULTS}
    return {name: count for name, count in counts.items() if count}


def fault_notes(logs: Iterable[FaultLog]) -> tuple[str, ...]:
    """Return in one sentence how reading went wrong; empty: it did not."""
    logs = list(logs)
    said = [_FAULTS[name].format(count) for name, count in _faults(logs).items()]
    if not said:
        return ()
    files = sorted({str(log.rule.quarantine_file) for log in logs if log.samples} - {"None"})
    listed = f" Bad samples are listed in {', '.join(files)}." if files else ""
    return (f"Faults in reading: {', '.join(said)}.{listed}",)


MemoryCause: TypeAlias = Literal["copied", "leak", "cache"]

_LEAST_BYTES: Final = 64 * 2**20
"""Bytes in all processes together below which a use of memory is no finding. A forked worker copies
10 to 40 MiB of what Python itself and torch hold, whatever the dataset is."""
_USUAL_BYTES: Final = 24 * 2**20
_COPIED_PART: Final = 0.2
"""Share of a dataset's object, 0 to 1, that workers have to copy before it is blamed."""
_STEADY: Final = 0.5
_FEWEST: Final = 9
_EARLY: Final = 0.25
"""Share of an epoch, from when a process is first seen, in which its growth does not count."""
_TELLING: Final = 0.8
"""Share of its growth in the first epoch from which on a cache could not be told from a leak."""
_NEARLY: Final = 0.9
_REMEDIES: Final[dict[MemoryCause, str]] = {
    "copied": "from lightning_fastdata import share; dataset = share(dataset)",
    "leak": "look for what each sample adds to: a list of the dataset, a log, a global; "
    "workers that are not kept give it back after each epoch",
    "cache": "a bound for it (functools.lru_cache(maxsize=...)), or one for all workers: "
    "CachedDataset(dataset)",
}


class Look(NamedTuple):
    """How large processes were at some moment: the workers, or this process if there are none."""

    step: int
    epoch: int
    sizes: Mapping[int, int]
    """Process -> bytes of its memory that belong to no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """What was seen of the memory of a training's processes, without the memory of devices."""

    workers: int = 0
    forked: bool = True
    """Whether workers began with the pages of this process; else each was sent the dataset."""
    copied_bytes: int = 0
    """Mean bytes of a worker in pages that it had in common with this process and now has alone."""
    own_parts: Mapping[str, float] = field(default_factory=dict)
    """Name of an object -> share of it in pages that workers have alone; empty: not known."""
    looks: tuple[Look, ...] = ()
    """How large processes were at some moments, in the order of time."""
    objects: tuple[HeldObjects, ...] = ()
    """Objects that the dataset holds, the largest first."""
    left_bytes: int | None = None
    """Bytes of memory that the machine or the container has left; None: not known."""


class MemoryUse(NamedTuple):
    """One cause that takes memory, and how much it takes in all processes together."""

    cause: MemoryCause
    size_bytes: int
    objects: HeldObjects | None = None


class MemoryMeter:
    """Meters the memory of processes: when they were first seen, and as it has become.

    Args:
        readers: The module ``host.memory``, or one like it. It reads a process's own bytes (in some
            15 us), its pages (10 ms), and which part of some addresses it has alone (0.3 ms).
    """

    def __init__(self, readers: Any = memory) -> None:
        self._readers = readers
        self._parts: dict[str, float] = {}
        self._first: dict[int, int] = {}
        """Worker -> its bytes when first seen, at most those of this process at the first look."""
        self._here: int | None = None
        self._read: dict[int, Pages] = {}
        self._looks = Few[Look]()
        self._workers = 0

    def look(self, workers: Sequence[int], *, step: int, epoch: int) -> None:
        """See how large the workers are, or this process if the run has had no workers."""
        self._workers = len(workers) or self._workers
        processes = workers or ([] if self._workers else [os.getpid()])
        sizes = {each: self._readers.read_own_bytes(each) for each in processes}
        known = {each: size for each, size in sizes.items() if size is not None}
        if workers and self._here is None:  # workers begin with as much
            self._here = self._readers.read_own_bytes(os.getpid())
        for worker in known if workers else ():
            self._first.setdefault(worker, min(known[worker], self._here or known[worker]))
        if known:
            self._looks.add(Look(step, epoch, known))

    def read(self, workers: Sequence[int]) -> None:
        """Look at the pages of all processes."""
        read = {each: self._readers.read_pages(each) for each in (os.getpid(), *workers)}
        now = {each: pages for each, pages in read.items() if pages is not None}
        self._read = now if workers or not self._workers else {**self._read, **now}

    @property
    def copied_bytes(self) -> int:
        """Mean bytes of a worker in pages that it had in common with this process, now its own."""
        read = [
            (self._read[each], first) for each, first in self._first.items() if each in self._read
        ]
        of = [pages.own_bytes - max(0, pages.anonymous_bytes - first) for pages, first in read]
        return max(0, sum(of) // len(of)) if of else 0

    def seen(self, dataset: object, *, forked: bool) -> MemorySeen:
        """Return what was seen so far of a training that reads a dataset."""
        objects = held_objects(dataset)
        return MemorySeen(
            workers=self._workers,
            forked=forked,
            copied_bytes=self.copied_bytes,
            own_parts=self._own_parts(objects),
            looks=tuple(self._looks),
            objects=objects,
            left_bytes=read_host_memory().available_bytes,
        )

    def _own_parts(self, objects: Sequence[HeldObjects]) -> dict[str, float]:
        """Return which share of each object lies in pages that workers have of their own.

        It is not known of a single worker: pages that this process writes to stay with it alone.
        """
        workers = self._read.keys() & self._first.keys()
        for held in objects if len(workers) > 1 else ():
            parts = [self._readers.read_alone(each, held.places) for each in workers]
            known = [part for part in parts if part is not None]
            if known:
                self._parts[held.name] = sum(known) / len(known)
        return dict(self._parts)


def memory_uses(seen: MemorySeen) -> tuple[MemoryUse, ...]:
    """Return the uses of memory, the largest first; empty: none is worth a word."""
    count = max(1, seen.workers)
    found = []
    for held in seen.objects:
        size = count * _copied(seen, held)
        if size:
            found.append(MemoryUse("copied", size, held))
            break  # the sum does not say how the other objects are read
    if seen.looks:
        cause: MemoryCause = "leak" if leaks(seen.looks) else "cache"
        found.append(MemoryUse(cause, int(count * _grown(seen.looks))))
    large = [use for use in found if use.size_bytes >= _LEAST_BYTES]
    return tuple(sorted(large, key=lambda use: -use.size_bytes))


def _copied(seen: MemorySeen, held: HeldObjects) -> int:
    """Return the bytes of an object that each worker has copied; 0: too little of it."""
    if seen.workers and not seen.forked:
        return held.size_bytes
    part, most = seen.own_parts.get(held.name), held.counted_bytes
    if part is None:  # only the sum is known then, which may be of anything else
        enough = seen.copied_bytes - _USUAL_BYTES >= _COPIED_PART * most
        return min(seen.copied_bytes, most) if enough else 0
    return min(seen.copied_bytes, int(part * most)) if part >= _COPIED_PART else 0


def _grown(looks: Sequence[Look]) -> float:
    """Return the mean growth in bytes of the processes of the last look.

    Growth early on comes from buffers and libraries, and does not count.
    """
    early = ceil(_EARLY * max(Counter(look.epoch for look in looks).values()))
    each = ([look.sizes[of] for look in looks if of in look.sizes] for of in looks[-1].sizes)
    return fmean(sizes[-1] - sizes[min(early, len(sizes) - 1)] for sizes in each)


def leaks(looks: Sequence[Look]) -> bool | None:
    """Return whether memory grows for ever, and not as a cache that each worker fills.

    The cache of a single worker is full after an epoch. Several workers meet samples that they have
    not read before ever more rarely: n epochs later, (1 - 1/workers)**n of the first epoch's growth
    is left. None: not known, as leak and cache look the same within one epoch, or in workers that
    are started anew in each. In the last epoch, processes count that read in an earlier one.
    """
    epochs = [_read(list(of)) for _, of in groupby(looks, key=lambda look: look.epoch)]
    *before, (parts, grown) = [epoch for epoch in epochs if any(epoch[0].values())] or [({}, {})]
    unread = {each: prod(1 - of.get(each, 0) for of, _ in before) for each in parts}
    old = [each for each in parts if parts[each] and unread[each] < 1]
    if len(looks) < _FEWEST or not old:
        return None
    first = sum(before[0][1].values()) / sum(before[0][0].values())
    last = sum(grown[each] for each in old) / sum(parts[each] for each in old)
    left = fmean(unread[each] for each in old)
    if first <= 0 or left > _TELLING:
        return None
    # In the middle between a cache's growth and a leak's.
    return last >= first * max(_STEADY, (1 + left) / 2)


def _read(looks: Sequence[Look]) -> tuple[dict[int, float], dict[int, float]]:
    """Return, by process, which part of an epoch each has read, and its growth in bytes a step."""
    parts, grown = defaultdict[int, float](float), defaultdict[int, float](float)
    steps = max(1, looks[-1].step - looks[0].step)
    for before, after in pairwise(looks):
        for process in before.sizes.keys() & after.sizes.keys():
            parts[process] += (after.step - before.step) / len(after.sizes) / steps
            grown[process] += (after.sizes[process] - before.sizes[process]) / steps
    return parts, grown


def memory_text(seen: MemorySeen, use: MemoryUse) -> str:
    """Return in words what takes memory."""
    several = f"each of {seen.workers} workers" if seen.workers > 1 else "the worker"
    where = several if seen.workers else "the training process"
    count, held = max(1, seen.workers), use.objects
    whole, each = size_text(use.size_bytes), size_text(use.size_bytes // count)
    if held is not None:
        size = size_text(held.size_bytes)
        how = "by reference counting" if seen.forked else "as workers are not forked"
        so_far = " so far" if use.size_bytes < _NEARLY * count * held.counted_bytes else ""
        return f"{held.name} ({held.kind}, {size}) is copied in {where} {how}: {whole}{so_far}"
    or_leak = "; whether it leaks is not known" if leaks(seen.looks) is None else ""
    if use.cause == "leak":
        return f"{where} has grown by {each}, and grows on from epoch to epoch: {whole}"
    return (
        f"{where} keeps {each} more than soon after the start, as in a cache, or as malloc keeps "
        f"what was freed: {whole}{or_leak}"
    )


def memory_notes(seen: MemorySeen) -> tuple[str, ...]:
    """Return what takes memory but needs no action, a sentence each."""
    uses = [use for use in memory_uses(seen) if _finding(seen, use) is None]
    return tuple(f"Memory: {memory_text(seen, use)}." for use in uses)


def _finding(seen: MemorySeen, use: MemoryUse) -> Finding | None:
    more = use.size_bytes  # what has grown by this much may do so once more
    if use.objects is not None:  # in the end the whole object is copied
        more = seen.workers * use.objects.counted_bytes - use.size_bytes
    short = seen.left_bytes is not None and more > seen.left_bytes
    if use.cause == "cache" and not short:
        return None
    return Finding(
        severity="high" if short else "moderate",
        cause=memory_text(seen, use),
        advice=(Advice(text=_REMEDIES[use.cause], for_speed=False),),
    )


def _find(e: Evidence, cause: MemoryCause) -> Finding | None:
    uses = (use for use in memory_uses(e.memory) if use.cause == cause)
    return next((_finding(e.memory, use) for use in uses), None)


RULES: Final = (
    Rule("FD334", "workers copy what the dataset holds", partial(_find, cause="copied")),
    Rule("FD335", "memory grows for ever", partial(_find, cause="leak")),
    Rule("FD336", "each worker fills a cache", partial(_find, cause="cache")),
)

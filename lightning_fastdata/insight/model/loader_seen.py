"""What the stamps of a loader tell: how busy workers were; of actors, their link and nodes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightning_fastdata.host.usage import SpentTime
from lightning_fastdata.insight.measure.metrics import StageSummary
from lightning_fastdata.insight.model.finding import STALL_LOW
from lightning_fastdata.stamps.batch_stamps import BatchStamps
from lightning_fastdata.tuning.simulate import TrainingTimes, by_epoch

_COMPUTES: Final = 0.9
"""Of the time of steps."""
_SEVERAL_THREADS: Final = 1.3
"""CPUs: up to there, what sends batches away explains it."""


def stage_times(
    summary: StageSummary, stamps: Sequence[BatchStamps], used: SpentTime
) -> TrainingTimes:
    """Return what the training process did in a stage: with its newest stamps, and what it used."""
    warm_ms = 0.0 if summary.wait is None else summary.wait.mean_ms
    warm_steps = summary.steps - summary.cold_steps
    waited_ms = warm_ms * warm_steps + (summary.cold_wait_ms or 0.0) * summary.cold_steps
    own_ns = [
        task.ended_ns - task.began_ns if task.cpu_ns is None else task.cpu_ns
        for batch in stamps
        for task in batch.tasks
        if task.process < 0
    ]
    return TrainingTimes(
        cpu_s=used.cpu_s,
        wall_s=used.wall_s,
        waited_s=waited_ms / 1e3,
        runqueue_s=used.runqueue_s,
        loading_cpu_s=sum(own_ns) / 1e9 / max(1, len(stamps)) * summary.steps,
    )


def model_computes(summary: StageSummary, times: TrainingTimes) -> bool:
    """Return whether the time of steps was seen to be the model's own.

    Where the host computes, its thread had a CPU nearly all the time; a device had work while the
    host waited for it, and hardly a gap.
    """
    step, wait, stall, gap = (
        0.0 if phase is None else phase.mean_ms
        for phase in (summary.step, summary.wait, summary.stall, summary.gap)
    )
    if summary.device == "cpu":
        return times.step_cpus >= _COMPUTES and times.step_queued <= 1 - _COMPUTES
    return wait - stall >= STALL_LOW * step > 0 and gap <= (1 - _COMPUTES) * step


def busy_share(stamps: Sequence[BatchStamps], workers: int) -> float | None:
    """Return the busy part of the time that steady batches took, 0 to 1; None for 0 workers."""
    busy = span = 0.0
    for epoch in by_epoch(stamps):
        began, ended = epoch[0].delivered_ns, epoch[-1].delivered_ns
        span += ended - began
        for batch in epoch:
            for task in batch.tasks:
                busy += max(0, min(task.ended_ns, ended) - max(task.began_ns, began))
    return min(1.0, busy / span / workers) if workers and span > 0 else None


def worker_threads(stamps: Sequence[BatchStamps]) -> float:
    """Return how many CPUs a worker uses while its reading thread computes, at least 1."""
    known = [task for batch in stamps for task in batch.tasks if task.helpers_ns is not None]
    own = sum(task.cpu_ns or 0 for task in known)
    found = 1 + sum(task.helpers_ns or 0 for task in known) / own if own else 1.0
    return found if found >= _SEVERAL_THREADS else 1.0


def runqueue_share(stamps: Sequence[BatchStamps]) -> float | None:
    """Return the part of the workers' busy time in which they were ready, but without a CPU."""
    known = [task for batch in stamps for task in batch.tasks if task.runqueue_ns is not None]
    length = sum(task.ended_ns - task.began_ns for task in known)
    return sum(task.runqueue_ns or 0 for task in known) / length if length else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """A node whose actors made batches."""

    name: str
    """Its machine and, in short, its id."""
    batches: int
    sample_ms: float
    """What a sample of its batches took, collation included: the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSeen:
    """What was seen of a cluster."""

    batch_bytes: float
    """Of a batch, the mean."""
    way_ms: float | None = None
    """From its end in an actor until it is here, while it is waited for: the median."""
    nodes: tuple[NodeSeen, ...] = ()
    """The slowest first."""
    free_cpus: float | None = None
    """CPUs of the cluster that nobody held, as last seen."""
    store_used_share: float | None = None
    """Of all object stores, what held objects, as last seen, 0 to 1."""
    spilled_bytes: int | None = None
    """What more of objects was on disk than when it was first seen."""

    @classmethod
    def of(cls, stamps: Sequence[BatchStamps]) -> RemoteSeen | None:
        """Return it by the stamps of a loader; None: no actor made its batches."""
        made = [(batch, task) for batch in stamps for task in batch.tasks]
        ways = [(batch, task, task.way) for batch, task in made if task.way is not None]
        if not ways:
            return None
        sample_ms: defaultdict[str, list[float]] = defaultdict(list)
        for _, task, way in ways:
            spent_ns = task.ended_ns - task.began_ns
            sample_ms[way.node].append(spent_ns / max(1, task.samples) / 1e6)
        nodes = [
            NodeSeen(name=name, batches=len(each), sample_ms=statistics.median(each))
            for name, each in sample_ms.items()
        ]
        lasted = [
            max(0, way.landed_ns - task.ended_ns)
            for batch, task, way in ways
            if batch.requested_ns <= task.ended_ns
        ]
        seen = [way.cluster for *_, way in ways if way.cluster is not None]
        spilled = [each.spilled_bytes for each in seen if each.spilled_bytes is not None]
        return cls(
            batch_bytes=statistics.fmean(way.size_bytes for *_, way in ways),
            way_ms=statistics.median(lasted) / 1e6 if lasted else None,
            nodes=tuple(sorted(nodes, key=lambda node: -node.sample_ms)),
            free_cpus=seen[-1].free_cpus if seen else None,
            store_used_share=_share(seen[-1].store_used_bytes, seen[-1].store_bytes)
            if seen
            else None,
            spilled_bytes=max(0, max(spilled) - spilled[0]) if spilled else None,
        )


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole else None

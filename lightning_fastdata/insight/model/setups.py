"""What the training process did, and how busy the workers of its loader were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from lightning_fastdata.host.usage import SpentTime
from lightning_fastdata.insight.measure.metrics import StageSummary
from lightning_fastdata.stamps.batch_stamps import BatchStamps
from lightning_fastdata.tuning.simulate import TrainingTimes, by_epoch

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


def interpreter_share(epochs: Sequence[Sequence[BatchStamps]]) -> float | None:
    """Return how many CPUs the reading threads of the busiest process used."""
    ran: defaultdict[int, float] = defaultdict(float)
    threads: defaultdict[int, set[int]] = defaultdict(set)
    span = 0.0
    for epoch in epochs:
        began, ended = epoch[0].delivered_ns, epoch[-1].delivered_ns
        span += ended - began
        for task in (task for batch in epoch for task in batch.tasks):
            inside = min(task.ended_ns, ended) - max(task.began_ns, began)
            if task.cpu_ns is not None and inside > 0:
                ran[task.process] += task.cpu_ns * inside / max(1, task.ended_ns - task.began_ns)
                threads[task.process].add(task.thread)
    shares = [used / span for process, used in ran.items() if len(threads[process]) > 1 and span]
    return max(shares, default=None)

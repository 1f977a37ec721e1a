"""How busy a loader's workers were, and how many CPUs they used, by the stamps of its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_fastdata.stamps.batch_stamps import BatchStamps

_SEVERAL_THREADS: Final = 1.3
"""CPUs: up to there, what sends batches away explains it."""


def by_epoch(stamps: Sequence[BatchStamps]) -> list[list[BatchStamps]]:
    """Return the stamps of each epoch."""
    epochs: list[list[BatchStamps]] = []
    for batch in stamps:
        if batch.first or not epochs:
            epochs.append([])
        epochs[-1].append(batch)
    return epochs


def busy_share(stamps: Sequence[BatchStamps], workers: int) -> float | None:
    """Return the busy part of the time that the steady batches of all epochs took, 0 to 1.

    Args:
        stamps: Of one loader, in the order in which batches were delivered.
        workers: That shared the work; None is returned for 0.
    """
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
    ran: dict[int, float] = {}
    threads: dict[int, set[int]] = {}
    span = 0.0
    for epoch in epochs:
        began, ended = epoch[0].delivered_ns, epoch[-1].delivered_ns
        span += ended - began
        for task in (task for batch in epoch for task in batch.tasks):
            inside = min(task.ended_ns, ended) - max(task.began_ns, began)
            if task.cpu_ns is None or inside <= 0:
                continue
            used = task.cpu_ns * inside / max(1, task.ended_ns - task.began_ns)
            ran[task.process] = ran.get(task.process, 0.0) + used
            threads.setdefault(task.process, set()).add(task.thread)
    shares = [used / span for process, used in ran.items() if len(threads[process]) > 1 and span]
    return max(shares, default=None)

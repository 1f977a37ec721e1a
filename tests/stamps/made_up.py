"""Stamps of tasks and of batches, made up: in milliseconds."""

from __future__ import annotations

from typing import Any

from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps

MS = 1_000_000


def ns_of(ms: float) -> int:
    return round(ms * MS)


def task(
    began: float,
    ended: float,
    *,
    read: float | None = None,
    collate: float = 0.0,
    cpu: float | None = 0.0,
    queued: float | None = 0.0,
    samples: int = 8,
    slowest: float = 0.0,
    index: int = 0,
    process: int = 0,
    **more: Any,
) -> TaskStamps:
    """Return what a thread did for a batch: it read, but for what it collated."""
    on_cpu, in_queue = (None if ms is None else ns_of(ms) for ms in (cpu, queued))
    read = ended - began - collate if read is None else read
    return TaskStamps(
        process, ns_of(began), ns_of(ended), on_cpu, in_queue, samples, ns_of(read),
        ns_of(collate), ns_of(slowest), index, **more,
    )  # fmt: skip


def batch(requested: float, delivered: float, *tasks: TaskStamps) -> BatchStamps:
    samples = sum(each.samples for each in tasks)
    return BatchStamps(1, samples, ns_of(requested), ns_of(delivered), tasks)

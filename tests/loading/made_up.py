"""What batches cost and how they are loaded, made up: in milliseconds."""

from __future__ import annotations

from typing import Any

from lightning_fastdata.loading.simulate import BatchCost, LoaderSetup

MS = 1e6


def cost(
    *,
    cpu: float = 0.0,
    blocked: float = 0.0,
    collate: float = 0.0,
    step: float = 10.0,
    slowest: float | None = None,
    handover: float = 0.1,
    taking: float = 0.05,
    samples: int = 16,
) -> BatchCost:
    """Return what a batch costs, whose samples take alike unless ``slowest`` says otherwise."""
    return BatchCost(
        samples=samples,
        cpu_ns=cpu * MS,
        blocked_ns=blocked * MS,
        collate_ns=collate * MS,
        slowest_ns=((cpu + blocked) / samples if slowest is None else slowest) * MS,
        handover_ns=handover * MS,
        taking_ns=taking * MS,
        step_ns=step * MS,
    )


def setup(workers: int = 1, **other: Any) -> LoaderSetup:
    """Return a loader that is some batches ahead, on CPUs that the training hardly needs."""
    usual = {"look_ahead": max(8, 2 * workers), "cpus": 8.0, "step_cpus": 0.1}
    return LoaderSetup(workers=workers, **usual | other)

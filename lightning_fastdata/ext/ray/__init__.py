"""Actors of a Ray cluster that fetch batches, on this machine or on others."""

from __future__ import annotations

from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import AnyExecutor, Executor, ExecutorKind, Resources


def _start(plan: FetchPlan, given: Resources) -> Executor:
    from lightning_fastdata.ext.ray.crew import RayExecutor

    return RayExecutor(plan, given)


def _room(executor: AnyExecutor, ranks: int) -> int:
    from lightning_fastdata.ext.ray.crew import room_for_actors

    return room_for_actors(executor, ranks)


KIND = ExecutorKind(
    what="actors of a Ray cluster, on this machine or on others",
    start=_start,
    reads_streams=False,
    side_processes=True,
    room_elsewhere=_room,
)

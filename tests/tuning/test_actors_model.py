"""The model knows actors: whole batches, made side by side by CPUs that the training has not."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps
from lightning_fastdata.stamps.travel import Way
from lightning_fastdata.tuning.moves import Window, propose
from lightning_fastdata.tuning.simulate import BatchCost, LoaderSetup, batch_costs, simulate

MS = 10**6


def cost(
    *, cpu: float = 0.0, blocked: float = 0.0, step: float = 0.0, taking: float = 1.0,
    way: float = 0.0,
) -> BatchCost:  # fmt: skip
    return BatchCost(
        samples=16, cpu_ns=cpu * MS, blocked_ns=blocked * MS, collate_ns=0.0, slowest_ns=0.0,
        handover_ns=(taking + way) * MS, taking_ns=taking * MS, step_ns=step * MS,
    )  # fmt: skip


def setup(workers: int, **how: Any) -> LoaderSetup:
    ahead = max(8, 2 * workers)
    how = {"cpus": 2.0, "step_cpus": 0.1, "scheduling": "actors", **how}
    return LoaderSetup(workers=workers, look_ahead=ahead, **how)


@pytest.mark.parametrize("actors", [1, 2, 4, 8])
def test_actors_make_a_batch_each_side_by_side(actors) -> None:
    found = simulate([cost(blocked=100.0)], setup(actors))
    assert found.step_ms == pytest.approx(100 / actors, rel=0.03)


def test_actors_elsewhere_take_no_cpu_of_the_training() -> None:
    costs = [cost(cpu=40.0, step=10.0)]
    far, near = (simulate(costs, setup(4, scheduling=how)).step_ms for how in ("actors", "queue"))
    assert far == pytest.approx(11.0, rel=0.05)
    assert near > 20.0


def stamps(count: int = 24, *, way_ms: float = 20.0) -> list[BatchStamps]:
    """Batches of one actor that takes 30 ms for each, all waited for; the step is nothing."""
    found = []
    for number in range(count):
        began = 30 * number * MS
        ended = began + 30 * MS
        landed = ended + round(way_ms * MS)
        way = Way("far/1", True, True, 4 * 10**6, 2 * MS, landed)
        task = TaskStamps(0, began, ended, 6 * MS, 0, 16, 30 * MS, 0, 2 * MS, 0, way=way)
        requested = 0 if not number else began + round(way_ms * MS)
        found.append(BatchStamps(number, 16, requested, landed, (task,), 0, not number))
    return found


def test_recorded_batches_tell_what_taking_them_costs_and_their_way() -> None:
    costs = batch_costs(stamps())
    assert {each.taking_ns for each in costs} == {2 * MS}
    assert {each.handover_ns for each in costs} == {20 * MS}


@pytest.mark.parametrize("how", ["queue", "actors"])
def test_actors_elsewhere_may_be_more_than_this_machine_has_cpus(how) -> None:
    costs = [cost(cpu=100.0, step=5.0)] * 24
    steps = simulate(costs, setup(2, scheduling=how))
    window = Window(24, steps.step_ms, steps.wait_ms)
    found = propose(window, costs, lambda number: setup(number, scheduling=how), 2, [1, 3, 4, 6, 8])
    assert (found is not None and found.workers == 8) is (how == "actors")

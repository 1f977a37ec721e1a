"""The model knows actors: whole batches, two under way each, a link, CPUs of other machines."""

from __future__ import annotations

import math

import pytest

from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps
from lightning_fastdata.stamps.travel import Way
from lightning_fastdata.tuning.costs import BatchCost, LoaderSetup, Placement
from lightning_fastdata.tuning.moves import Window, propose
from lightning_fastdata.tuning.simulate import batch_costs, simulate

MS = 10**6


def cost(
    *, cpu: float = 0.0, blocked: float = 0.0, step: float = 0.0, taking: float = 1.0,
    way: float = 0.0, megabytes: float = 0.0,
) -> BatchCost:  # fmt: skip
    return BatchCost(
        samples=16, cpu_ns=cpu * MS, blocked_ns=blocked * MS, collate_ns=0.0, slowest_ns=0.0,
        handover_ns=(taking + way) * MS, taking_ns=taking * MS, step_ns=step * MS,
        size_bytes=megabytes * 1e6,
    )  # fmt: skip


def setup(workers: int, **how: float) -> LoaderSetup:
    ahead = max(8, 2 * workers)
    how = {"cpus": 2.0, "step_cpus": 0.1, "far_share": 1.0, "sent_share": 1.0, **how}
    return LoaderSetup(workers=workers, look_ahead=ahead, scheduling="actors", **how)


@pytest.mark.parametrize("actors", [1, 2, 4, 8])
def test_actors_make_a_batch_each_side_by_side(actors) -> None:
    found = simulate([cost(blocked=100.0)], setup(actors))
    assert found.step_ms == pytest.approx(100 / actors, rel=0.03)


def test_taking_a_batch_costs_the_training_however_many_actors_there_are() -> None:
    found = simulate([cost(blocked=10.0, step=20.0, taking=5.0)], setup(32))
    assert found.step_ms == pytest.approx(25.0, rel=0.01)
    assert found.wait_ms == pytest.approx(5.0, rel=0.01)


def test_the_link_is_shared_by_all_actors() -> None:
    costs = [cost(blocked=10.0, way=20.0, megabytes=2.0)]
    many = simulate(costs, setup(32, link_bytes_per_s=1e8))
    assert many.step_ms == pytest.approx(20.0, rel=0.02)
    one = simulate(costs, setup(1, link_bytes_per_s=1e8))
    assert one.step_ms == pytest.approx(20.0, rel=0.02)  # it makes a batch while one is sent
    near = simulate(costs, setup(32, link_bytes_per_s=1e8, sent_share=0.0))
    assert near.step_ms < 2.0


def test_a_link_that_is_not_busy_costs_what_was_measured_and_no_more() -> None:
    costs = [cost(blocked=100.0, way=20.0, megabytes=2.0)]
    alone = simulate(costs, setup(1))
    assert simulate(costs, setup(1, link_bytes_per_s=1e8)).step_ms == pytest.approx(alone.step_ms)


def test_actors_elsewhere_take_no_cpu_of_the_training() -> None:
    costs = [cost(cpu=40.0, step=10.0)]
    far, near = (simulate(costs, setup(4, far_share=share)).step_ms for share in (1.0, 0.0))
    assert far == pytest.approx(11.0, rel=0.05)
    assert near > 20.0


def test_an_actor_that_is_given_two_batches_idles_through_a_step_that_lasts_longer() -> None:
    # One is under way and one waits: the third is given when the training looks again.
    bursts = [cost(blocked=10.0, step=0.0)] * 7 + [cost(blocked=10.0, step=400.0)]
    found = simulate(bursts, setup(1))
    assert found.step_ms == pytest.approx((400 + 6 * 10) / 8, rel=0.1)


def stamps(count: int = 24, *, way_ms: float = 20.0, other: bool = True) -> list[BatchStamps]:
    """Batches of one actor that takes 30 ms for each, all waited for; the step is nothing."""
    found = []
    for number in range(count):
        began = 30 * number * MS
        ended = began + 30 * MS
        landed = ended + round(way_ms * MS)
        way = Way("far/1", other, other, 4 * 10**6, 2 * MS, landed)
        task = TaskStamps(0, began, ended, 6 * MS, 0, 16, 30 * MS, 0, 2 * MS, 0, way=way)
        requested = 0 if not number else began + round(way_ms * MS)
        found.append(BatchStamps(number, 16, requested, landed, (task,), 0, not number))
    return found


def test_recorded_batches_tell_their_way_and_the_link() -> None:
    costs = batch_costs(stamps())
    assert {each.taking_ns for each in costs} == {2 * MS}
    assert {each.handover_ns for each in costs} == {20 * MS}
    assert {each.size_bytes for each in costs} == {4e6}
    seen = Placement.of(stamps())
    assert seen.far_share == seen.sent_share == 1.0
    assert seen.link_bytes_per_s == pytest.approx(4e6 / 0.020)
    assert Placement.of(stamps(other=False)) == Placement(0.0, 0.0, math.inf)


def test_what_was_recorded_is_predicted_for_the_same_number_of_actors() -> None:
    one = Placement.of(stamps()).applied(setup(1, far_share=0.0, sent_share=0.0))
    assert simulate(batch_costs(stamps()), one).step_ms == pytest.approx(30.0, rel=0.03)


@pytest.mark.parametrize("far", [0.0, 1.0])
def test_actors_elsewhere_may_be_more_than_this_machine_has_cpus(far) -> None:
    costs = [cost(cpu=100.0, step=5.0)] * 24
    steps = simulate(costs, setup(2, far_share=far))
    window = Window(24, steps.step_ms, steps.wait_ms)
    found = propose(window, costs, lambda number: setup(number, far_share=far), 2, [1, 3, 4, 6, 8])
    assert (found is not None and found.workers == 8) is (far == 1.0)


def test_costs_of_batches_that_no_actor_made_have_no_bytes() -> None:
    local = [
        batch._replace(tasks=tuple(task._replace(way=None) for task in batch.tasks))
        for batch in stamps()
    ]
    assert {each.size_bytes for each in batch_costs(local)} == {0}
    assert Placement.of(local) == Placement()

"""The model of a loader keeps the laws of queues, and what is recorded adds up."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loading import made_up
from loading.made_up import MS
from misses import each
from stamps import made_up as stamped
from stamps.made_up import batch
from thoroughness import max_examples

from lightning_fastdata.loading.simulate import (
    LoaderSetup,
    batch_costs,
    scaled,
    simulate,
    slowdowns,
)
from lightning_fastdata.stamps.batch_stamps import Way

SCHEDULINGS = ("batch", "queue", "sample")
few = max_examples(30)


cost = partial(made_up.cost, slowest=0.0, handover=0.0, taking=0.0)


def setup(workers, *, ahead=None, cpus=1000.0, **other):
    return LoaderSetup(workers=workers, look_ahead=ahead or 2 * workers, cpus=cpus, **other)


def work_ms(each):
    return (each.cpu_ns + each.blocked_ns + each.collate_ns) / MS


@st.composite
def cost_lists(draw):
    found = []
    cpu, blocked, step = st.floats(0, 40), st.floats(0, 60), st.floats(0.5, 30)
    for _ in range(draw(st.integers(1, 12))):
        taking = draw(st.floats(0, 1))
        late = draw(st.floats(0, 2))
        found.append(
            cost(
                cpu=draw(cpu), blocked=draw(blocked), collate=draw(cpu) / 10, step=draw(step),
                taking=taking, handover=taking + late,
            )
        )  # fmt: skip
    return [
        replace(each, slowest_ns=draw(st.floats(0, 1)) * (each.cpu_ns + each.blocked_ns))
        for each in found
    ]


setups = st.builds(
    setup,
    st.integers(1, 8),
    ahead=st.integers(1, 24),
    scheduling=st.sampled_from(SCHEDULINGS),
    cpus=st.sampled_from([1.0, 2.0, 4.0]),
    step_cpus=st.floats(0, 3),
)


def recursion(costs, how, steps, warm_up):
    """The mean step in order, without any want of CPUs: each time from the times before it."""
    ahead, workers = how.look_ahead, how.workers
    free = [(0.0, lane) for lane in range(workers)]
    requested, delivered = [0.0], []
    done = []
    for number in range(warm_up + steps + ahead):
        if number < ahead:
            given_at = 0.0
        elif how.scheduling == "batch":
            given_at = delivered[number - ahead]
        else:
            given_at = requested[number - ahead + 1]
        if how.scheduling == "batch":
            began = max(given_at, free[number % workers][0])
            done.append(began + work_ms(costs[number % len(costs)]))
            free[number % workers] = done[-1], number % workers
        else:
            at, lane = heapq.heappop(free)
            done.append(max(given_at, at) + work_ms(costs[number % len(costs)]))
            heapq.heappush(free, (done[-1], lane))
        # A batch can be told about as soon as all that were given before it are.
        while len(delivered) <= number and len(delivered) + ahead <= number + 1:
            now = len(delivered)
            each = costs[now % len(costs)]
            on_its_way = (each.handover_ns - each.taking_ns) / MS
            delivered.append(max(requested[now], done[now] + on_its_way) + each.taking_ns / MS)
            requested.append(delivered[-1] + each.step_ns / MS)
    return (requested[warm_up + steps] - requested[warm_up]) / steps


@few
@given(
    costs=cost_lists(), workers=st.integers(1, 6), ahead=st.integers(1, 14),
    scheduling=st.sampled_from(["batch", "queue"]),
)  # fmt: skip
def test_with_cpus_for_everybody_the_model_is_a_recursion_over_times(
    costs, workers, ahead, scheduling
):
    how = setup(workers, ahead=ahead, scheduling=scheduling)
    steps = math.ceil(200 / len(costs)) * len(costs)
    expected = recursion(costs, how, steps, ahead + 2 * workers)
    assert simulate(costs, how).step_ms == pytest.approx(expected, rel=1e-6)


@few
@given(
    cpu=st.floats(1, 100), workers=st.integers(1, 8), cpus=st.floats(1, 8),
    scheduling=st.sampled_from(SCHEDULINGS),
)  # fmt: skip
def test_work_on_cpus_takes_as_long_as_the_cpus_there_are(cpu, workers, cpus, scheduling):
    how = setup(workers, ahead=24, cpus=cpus, scheduling=scheduling, step_cpus=0.0)
    expected = cpu / min(workers, cpus)
    found = simulate([cost(cpu=cpu, step=0.001)], how).step_ms
    assert found == pytest.approx(expected, rel=(workers + 1) / 200 + 0.01)


@few
@given(costs=cost_lists(), how=setups)
def test_no_setup_is_faster_than_its_work_or_slower_than_one_thing_after_the_other(costs, how):
    found = simulate(costs, how).step_ms
    count = len(costs)
    work = sum(map(work_ms, costs)) / count
    on_cpu = sum(each.cpu_ns + each.collate_ns for each in costs) / MS / count
    stretch = max(1.0, how.step_cpus / how.cpus)
    own = sum(each.step_ns * stretch + each.taking_ns for each in costs) / MS / count
    floor = max(work / how.workers, on_cpu / how.cpus)
    # What was made before the first step that counts may be used by those that do, and out of
    # order not every batch is delivered equally often.
    steps = math.ceil(200 / count) * count
    biggest = max(work_ms(each) + each.handover_ns / MS for each in costs)
    slack = (how.look_ahead + 1) * biggest / steps
    assert found >= floor - slack - 1e-6
    assert found >= own - slack - 1e-6
    assert found <= work + own + max(each.handover_ns for each in costs) / MS + slack


@few
@given(costs=cost_lists())
def test_without_workers_everything_is_done_in_turn(costs):
    found = simulate(costs, setup(0, ahead=1))
    work = sum(map(work_ms, costs)) / len(costs)
    assert found.wait_ms == pytest.approx(work, abs=1e-6)
    assert found.step_ms == pytest.approx(
        work + sum(each.step_ns for each in costs) / MS / len(costs)
    )


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_without_slow_samples_no_batch_is_held_up(scheduling):
    usual = cost(blocked=16.0, step=10.0, slowest=1.0)
    slow = cost(blocked=316.0, step=10.0, slowest=301.0)
    costs = ([usual] * 9 + [slow]) * 2
    how = setup(6, ahead=12, scheduling=scheduling)
    without = simulate(scaled(costs, slow_samples=False), how).step_ms
    assert without == pytest.approx(10.0, rel=0.05)
    assert without < 0.7 * simulate(costs, how).step_ms


@few
@given(
    costs=cost_lists(),
    factors=st.tuples(*[st.floats(0.1, 3)] * 3),
)
def test_scaling_scales_each_cost_and_nothing_else(costs, factors):
    cpu, blocked, collate = factors
    found = scaled(costs, cpu=cpu, blocked=blocked, collate=collate)
    for before, after in zip(costs, found, strict=True):
        assert after.cpu_ns == pytest.approx(before.cpu_ns * cpu)
        assert after.blocked_ns == pytest.approx(before.blocked_ns * blocked)
        assert after.collate_ns == pytest.approx(before.collate_ns * collate)
        assert after.slowest_ns <= after.cpu_ns + after.blocked_ns + 1e-3
        assert (after.samples, after.step_ns) == (before.samples, before.step_ns)
    assert scaled(found) == found


# Sharing CPUs


@max_examples(200)
@given(
    jobs=st.integers(0, 32), share=st.floats(0.01, 1), own=st.floats(0, 8), cpus=st.floats(0.5, 16),
)  # fmt: skip
def test_what_shares_the_cpus_fills_them_and_no_more(jobs, share, own, cpus):
    slow, own_slow = slowdowns(jobs, share, own, cpus)
    assert slow >= 1
    assert own_slow >= 1
    one = min(1.0, own)
    used = jobs * share / (1 - share + share * slow)
    used += max(1.0, own) * one / (1 - one + one * own_slow) if own else 0.0
    wanted = jobs * share + own
    assert used == pytest.approx(min(wanted, cpus), rel=1e-6, abs=1e-6)
    if own_slow > 1 + 1e-9 and jobs:
        assert slow == pytest.approx(own_slow, rel=1e-6)


# What is recorded


task = partial(stamped.task, samples=4)


def test_time_that_is_not_on_a_cpu_and_not_queued_is_blocked():
    made = task(0, 20, cpu=8, queued=2, collate=3, slowest=6)
    first, *_ = batch_costs([batch(0, 20, made), batch(30, 50, task(20, 50, cpu=1))])
    assert (first.cpu_ns, first.collate_ns, first.blocked_ns) == (5 * MS, 3 * MS, 10 * MS)
    assert (first.slowest_ns, first.step_ns, first.samples) == (6 * MS, 10 * MS, 4)


def test_what_the_kernel_tells_late_of_one_task_is_right_in_the_sum_of_a_batch():
    late = [task(0, 2, cpu=0), task(2, 4, cpu=4)]
    first, *_ = batch_costs([batch(0, 4, *late), batch(4, 9, task(4, 9, cpu=5))])
    assert (first.cpu_ns, first.blocked_ns) == (4 * MS, 0.0)


def test_what_collation_waits_for_is_of_collation_and_not_of_reading():
    made = task(0, 20, cpu=1, queued=0, collate=16)
    first, *_ = batch_costs([batch(0, 20, made), batch(30, 50, made)])
    assert (first.collate_ns, first.blocked_ns) == (1 * MS, 19 * MS)
    assert first.collate_blocked_ns == 15 * MS
    (faster,), (read_at_once,) = scaled([first], collate=0), scaled([first], blocked=0)
    assert (faster.blocked_ns, read_at_once.blocked_ns) == (4 * MS, 15 * MS)


def test_where_the_kernel_tells_nothing_reading_counts_as_blocked():
    made = task(0, 20, cpu=None, queued=None, collate=3)
    first, *_ = batch_costs([batch(0, 20, made), batch(30, 50, made)])
    assert (first.cpu_ns, first.collate_ns, first.blocked_ns) == (0.0, 3 * MS, 17 * MS)


def test_the_hand_over_is_that_of_late_batches_and_the_taking_that_of_those_that_were_there():
    stamps = [
        batch(0, 12, task(0, 10, cpu=0)),
        batch(20, 21, task(10, 15, cpu=0)),
        batch(30, 30, task(15, 20, cpu=0)),
    ]
    for found in batch_costs(stamps):
        assert (found.handover_ns, found.taking_ns) == (2 * MS, 0.5 * MS)


def test_pauses_of_a_busy_worker_count_as_its_work():
    """A worker has less time for samples than passes, by what it needs between two tasks."""
    stamps = [
        batch(10 * n, 10 * n + 10, task(10 * n + 0.5, 10 * n + 9.5, cpu=0)) for n in range(20)
    ]
    for found in batch_costs(stamps):
        assert found.task_ns == pytest.approx(0.5 * MS)  # no longer than the hand-over of 0.5
        assert found.blocked_ns + found.task_ns == pytest.approx(9.5 * MS)


def test_what_a_task_costs_is_told_apart_from_what_its_samples_cost():
    """So that batches shared out into more tasks cost more."""
    read = [
        task(5 * n, 5 * n + 5, cpu=5)._replace(read_ns=round(3 * MS), process=n) for n in range(4)
    ]
    first, *_ = batch_costs([batch(0, 20, *read), batch(30, 50, *read)])
    assert first.task_ns == 2 * MS
    assert (first.cpu_ns, first.blocked_ns) == (12 * MS, 0.0)


@given(queued=st.floats(0, 1))
def test_a_step_is_as_long_as_it_would_be_with_a_cpu_at_once(queued):
    made = task(0, 20, cpu=8)
    first, *_ = batch_costs([batch(0, 20, made), batch(30, 50, made)], step_queued=queued)
    assert first.step_ns == pytest.approx(10 * MS * (1 - queued))


def test_the_costs_of_the_last_batch_are_not_known_and_none_is_an_error():
    assert batch_costs([batch(0, 20, task(0, 20, cpu=8))]) == []
    with pytest.raises(ValueError, match="no batch was recorded"):
        simulate([], setup(1))


# Actors: whole batches, made side by side by CPUs that the training has not


@each("actors", [1, 2, 4, 8])
def test_actors_make_a_batch_each_side_by_side(actors):
    how = setup(actors, ahead=max(8, 2 * actors), scheduling="actors")
    found = simulate([cost(blocked=100.0, step=0.0)], how)
    assert found.step_ms == pytest.approx(100 / actors, rel=0.03)


def test_actors_elsewhere_take_no_cpu_of_the_training():
    costs = [cost(cpu=40.0, step=10.0, handover=1.0, taking=1.0)]
    kept = {"ahead": 8, "cpus": 2.0, "step_cpus": 0.1}
    far, near = (
        simulate(costs, setup(4, scheduling=each, **kept)).step_ms for each in ("actors", "queue")
    )
    assert far == pytest.approx(11.0, rel=0.05)
    assert near > 20.0


def test_recorded_batches_of_actors_tell_what_taking_them_costs_and_their_way():
    stamps = []
    for number in range(24):  # of one actor that takes 30 ms for each, all waited for
        made = task(30 * number, 30 * number + 30, cpu=6)
        landed = round((30 * number + 50) * MS)
        way = Way(round(2 * MS), landed)
        requested = 30 * number + 20 if number else 0
        stamps.append(batch(requested, 30 * number + 50, made._replace(way=way)))
    costs = batch_costs(stamps)
    assert {each.taking_ns for each in costs} == {2 * MS}
    assert {each.handover_ns for each in costs} == {20 * MS}

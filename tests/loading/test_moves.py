"""Which number of workers is proposed: pure laws of the policy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loading import made_up
from loading.made_up import MS, setup
from misses import each

from lightning_fastdata.loading.simulate import simulate
from lightning_fastdata.loading.tuner import (
    ALL_NUMBERS,
    Move,
    Window,
    numbers_to_try,
    paid,
    propose,
    still_open,
    window_of,
    without_pauses,
)

cost = partial(made_up.cost, step=5.0)
with_workers = partial(setup, scheduling="queue", cpus=4.0, step_cpus=0.0)


def window(costs, number):
    found = simulate(costs, with_workers(number))
    return Window(24, found.step_ms, found.wait_ms)


def proposed(costs, now, *, most=64):
    numbers = numbers_to_try(now, most=most)
    return propose(window(costs, now), costs, with_workers, now, numbers)


@given(
    blocked=st.floats(0.0, 30), cpu=st.floats(0.0, 5), step=st.floats(1.0, 40),
    now=st.sampled_from((2, 4, 8, 16, 24)),
)  # fmt: skip
def test_fewer_workers_leave_the_step_as_it_is_even_if_samples_get_slower(blocked, cpu, step, now):
    costs = [cost(blocked=blocked, cpu=cpu, step=step)] * 4
    found = proposed(costs, now)
    if found is None or found.workers >= now:
        return
    assert 0 < found.workers <= 0.75 * now
    slower = [cost(blocked=1.25 * blocked, cpu=1.25 * cpu, step=step)] * 4
    for these in (costs, slower):
        step_ms = [simulate(these, with_workers(n)).step_ms for n in (now, found.workers)]
        assert step_ms[1] <= 1.02 * step_ms[0]


def test_fewer_workers_are_tried_where_they_leave_the_training_more_cpus():
    # Two share the CPU that is left by a training which needs another for itself; one worker keeps
    # up, but would not if samples took a quarter longer.
    costs = [cost(cpu=24.0, step=21.0)] * 8
    setup_with = partial(setup, look_ahead=8, scheduling="sample", cpus=2.0, step_cpus=1.0)
    seen = simulate(costs, setup_with(2))
    found = propose(Window(24, seen.step_ms, seen.wait_ms), costs, setup_with, 2, [1, 3, 4])
    assert found.workers == 1
    assert found.step_ms <= 0.95 * seen.step_ms
    assert "more CPUs" in found.why


@each("scheduling", ["queue", "actors"])
def test_actors_elsewhere_may_be_more_than_this_machine_has_cpus(scheduling):
    setup_with = partial(setup, scheduling=scheduling, cpus=2.0)
    costs = [cost(cpu=100.0)] * 24
    steps = simulate(costs, setup_with(2))
    seen = Window(24, steps.step_ms, steps.wait_ms)
    found = propose(seen, costs, setup_with, 2, [1, 3, 4, 6, 8])
    assert (found is not None and found.workers == 8) is (scheduling == "actors")


def test_where_the_model_is_wrong_one_step_further_is_tried():
    costs = [cost(blocked=8.0)] * 8
    seen = window(costs, 2)
    late = Window(24, 1.3 * seen.step_ms, 0.4 * seen.step_ms)
    found = propose(late, costs, with_workers, 2, numbers_to_try(2, most=16))
    assert found.workers == 3
    assert found.step_ms == pytest.approx(0.95 * late.step_ms)
    assert "no reason" in found.why
    idle = [cost(blocked=1.0)] * 8  # by which one worker would do
    assert propose(window(idle, 8), idle, with_workers, 8, [1, 2, 4]).workers < 8
    seen_ms = window(idle, 8).step_ms
    assert propose(Window(24, 2 * seen_ms, seen_ms), idle, with_workers, 8, [1, 2, 4]) is None
    assert propose(seen, costs, with_workers, 2, numbers_to_try(2, most=2)) is None


@each("most", [12, 64])
def test_where_the_model_is_wrong_and_fewer_would_do_by_it_too_many_are_not_made_more(most):
    idle = [cost(blocked=1.0)] * 8  # by which one worker would do
    seen_ms = window(idle, 12).step_ms
    late = Window(24, 2 * seen_ms, seen_ms)
    found = propose(late, idle, with_workers, 12, numbers_to_try(12, most=most))
    assert found.workers == 4
    assert "late" in found.why
    # They stay away if steps are no longer, and come back otherwise.
    move = Move(
        batch=53, before=12, after=4, step_before_ms=late.step_ms, wait_before_ms=late.wait_ms,
        step_expected_ms=found.step_ms, why=found.why,
    )  # fmt: skip
    assert paid(move, late)
    assert not paid(move, Window(24, 1.1 * late.step_ms, late.wait_ms + 0.1 * late.step_ms))


@each(
    ("before", "after", "expected_ms", "seen_ms", "kept"),
    [
        (2, 6, 10.0, 12.0, True),
        (2, 6, 10.0, 19.0, False),  # less than a third of what was expected
        (2, 6, 19.0, 19.8, False),  # noise
        (2, 6, 19.0, 19.4, False),  # more than a third, but still noise
        (2, 6, 19.0, 19.1, True),
        (6, 2, 20.0, 20.5, True),
        (6, 2, 20.0, 21.5, False),
        (6, 3, None, 40.0, True),  # memory was short
    ],
)
def test_a_move_is_kept_if_it_paid(before, after, expected_ms, seen_ms, kept):
    wait_ms = 1.0 if kept else 1.0 + max(0.0, seen_ms - 20.0)
    move = Move(
        batch=53, before=before, after=after, step_before_ms=20.0, wait_before_ms=1.0,
        step_expected_ms=expected_ms, why="batches are late",
    )  # fmt: skip
    assert paid(move, Window(24, seen_ms, wait_ms)) is kept


def test_fewer_workers_must_not_be_waited_for_longer_though_the_training_is_faster_by_chance():
    move = Move(
        batch=53, before=12, after=8, step_before_ms=20.0, wait_before_ms=1.0,
        step_expected_ms=20.0, why="",
    )  # fmt: skip
    assert paid(move, Window(24, 19.0, 1.3))
    assert not paid(move, Window(24, 19.0, 1.5))
    for_speed = replace(move, step_expected_ms=17.0)
    assert paid(for_speed, Window(24, 19.0, 1.5))
    assert not paid(for_speed, Window(24, 19.5, 1.5))


def test_a_window_in_which_the_work_became_another_is_not_steady():
    same = [1_000_000] * 24
    assert window_of([500_000] * 24, same).steady
    assert not window_of([500_000] * 14 + [9_000_000] * 10, same).steady
    assert not window_of([9_000_000] * 14 + [500_000] * 10, same).steady


def taken_back(before, after, seen_ms):
    return Move(
        batch=53, before=before, after=after, step_before_ms=20.0, wait_before_ms=1.0,
        step_expected_ms=10.0, why="", step_seen_ms=seen_ms, outcome="taken back",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "seen_ms", "left"),
    [
        (2, 8, 20.0, {1}),  # nothing was gained: no larger number will
        (2, 8, 25.0, {1, 3, 4, 6}),  # they hindered each other: fewer more may not
        (8, 2, 25.0, {3, 4, 6, 12, 16}),
    ],
)
def test_what_did_not_pay_rules_out_what_cannot_either(before, after, seen_ms, left):
    left_open = still_open(ALL_NUMBERS, taken_back(before, after, seen_ms))
    numbers = {*numbers_to_try(before, most=16)} - {before}
    assert numbers & {*left_open} & set(range(17)) == left - {before}


def test_a_validation_between_two_steps_is_no_step():
    found = window_of([1_000_000] * 20, [5_000_000] * 19 + [3_000_000_000])
    assert found.step_ms == pytest.approx(6.5)
    costs = [cost(step=5.0)] * 19 + [cost(step=3000.0)]
    assert {each.step_ns for each in without_pauses(costs)} == {5.0 * MS}

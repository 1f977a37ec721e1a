"""Ranks that wait for each other keep the laws of a synchronous training."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.tuning.simulate import BatchCost, LoaderSetup, simulate

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from scale_sim import Line, Rank, coupled

MS = 1e6
few = max_examples(30)
WARM, STEPS = 20, 60


@st.composite
def ranks(draw, least=1, most=4):
    """Batches of some ranks, as many of each; some of them late."""
    count = draw(st.integers(1, 8))
    return [
        [
            BatchCost(
                samples=16,
                cpu_ns=draw(st.floats(0, 30)) * MS,
                blocked_ns=draw(st.sampled_from([0.0, 5.0, 20.0, 200.0])) * MS,
                collate_ns=0.0,
                slowest_ns=0.0,
                handover_ns=0.2 * MS,
                taking_ns=0.1 * MS,
                step_ns=draw(st.floats(1, 20)) * MS,
            )
            for _ in range(count)
        ]
        for _ in range(draw(st.integers(least, most)))
    ]


setups = st.builds(
    LoaderSetup,
    workers=st.integers(1, 6),
    look_ahead=st.integers(1, 16),
    scheduling=st.sampled_from(["batch", "queue", "sample"]),
    cpus=st.sampled_from([1.0, 2.0, 4.0, 100.0]),
    step_cpus=st.sampled_from([0.0, 0.5, 1.0]),
)


def steps_of(costs, how, steps=STEPS, warm_up=WARM, **other):
    return coupled(costs, how, steps=steps, warm_up=warm_up, **other)


@few
@given(costs=ranks(most=1), how=setups)
def test_one_rank_is_the_training_that_the_package_simulates(costs, how):
    # As `simulate` has it: whole rounds of the batches, after as long a warm-up.
    steps = -(-200 // len(costs[0])) * len(costs[0])
    rounds = 2 * how.workers
    if how.scheduling == "sample":
        rounds = -(-rounds // min(costs[0][0].samples, rounds))
    found = steps_of(costs, how, steps, how.look_ahead + rounds)
    expected = simulate(costs[0], how)
    assert found.step_ms == pytest.approx(expected.step_ms, rel=1e-9)
    assert found.waited_ms == pytest.approx(expected.wait_ms, rel=1e-6, abs=1e-6)


@few
@given(costs=ranks(least=2), how=setups)
def test_together_they_are_never_faster_than_the_slowest_alone(costs, how):
    assume(how.scheduling != "sample")  # which shares out samples by how long they took so far
    # Who waits leaves its workers a CPU, which changes how long the others take.
    how = replace(how, cpus=how.workers + 2.0)
    together = sum(steps_of(costs, how, warm_up=0).took_ms)
    for rank in costs:
        alone = sum(steps_of([rank], how, warm_up=0).took_ms)
        assert together >= alone * 0.999


@few
@given(costs=ranks(), how=setups, exchange_ms=st.floats(0, 5))
def test_no_step_is_shorter_than_the_longest_computing_and_the_exchange(costs, how, exchange_ms):
    found = steps_of(costs, how, sync_ns=exchange_ms * MS)
    for number, took in enumerate(found.took_ms, WARM):
        computing = max(rank[number % len(rank)].step_ns for rank in costs) / MS
        assert took >= computing + exchange_ms - 1e-6


@few
@given(costs=ranks(least=2), how=setups)
def test_equal_ranks_are_one(costs, how):
    one = steps_of(costs[:1], how)
    assert steps_of([costs[0]] * 3, how).took_ms == pytest.approx(one.took_ms)


@few
@given(costs=ranks(), how=setups)
def test_more_cpus_are_never_slower(costs, how):
    assume(how.scheduling != "sample")
    took = [
        steps_of(costs, replace(how, cpus=cpus), warm_up=0).step_ms for cpus in (1, 2, 4, 8, 100)
    ]
    assert all(more <= fewer * 1.02 for fewer, more in pairwise(took))


@few
@given(costs=ranks(), how=setups, line_ms=st.floats(0, 20))
def test_a_line_carries_every_batch_once_and_none_is_lost(costs, how, line_ms):
    lines = [Line(line_ms * MS) for _ in costs]
    found = steps_of(costs, how, lines=lines)
    for line in lines:
        assert len(set(line.carried)) == len(line.carried)
        # What was trained with was carried, and no more than the look-ahead is under way.
        assert set(range(WARM + STEPS)) <= set(line.carried)
        assert max(line.carried) < WARM + STEPS + how.look_ahead
    assert sum(found.took_ms) >= line_ms * (STEPS - how.look_ahead) - 1e-6


@few
@given(costs=ranks(), how=setups)
def test_a_line_that_takes_no_time_is_none(costs, how):
    lines = [Line(0.0) for _ in costs]
    assert steps_of(costs, how, lines=lines) == steps_of(costs, how)


@few
@given(costs=ranks(most=1), how=setups, pause_ms=st.floats(0, 50))
def test_a_training_that_rests_is_as_much_later_and_its_workers_go_on(costs, how, pause_ms):
    model = Rank(costs[0], how)
    model.step()
    before = model.now_ns
    model.rest_until(before + pause_ms * MS)
    assert model.now_ns == pytest.approx(before + pause_ms * MS)
    model.rest_until(before)  # it is later already
    assert model.now_ns == pytest.approx(before + pause_ms * MS)
    other = Rank(costs[0], how)
    other.step()
    assert model.step() <= other.step() + 1e-3


def test_a_late_batch_is_hidden_by_what_is_ahead_and_no_longer():
    usual = BatchCost(
        samples=1, cpu_ns=0.0, blocked_ns=10 * MS, collate_ns=0.0, slowest_ns=0.0, handover_ns=0.0,
        taking_ns=0.0, step_ns=10 * MS,
    )  # fmt: skip
    late = replace(usual, blocked_ns=500 * MS)
    costs = [[*[usual] * 100, late, *[usual] * 99], [usual] * 200]
    how = LoaderSetup(workers=4, look_ahead=8, scheduling="queue", cpus=8.0, step_cpus=0.0)
    longest = max(coupled(costs, how, steps=200, warm_up=0).took_ms)
    # Eight batches were under way, so that it began up to eight steps before it was needed.
    assert 500 - 8 * 10 <= longest <= 500 + 10
    deep = replace(how, look_ahead=150, workers=8)
    assert max(coupled(costs, deep, steps=200, warm_up=0).took_ms[1:]) == pytest.approx(10.0)

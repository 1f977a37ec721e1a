"""Ranks that wait for each other keep the laws of a synchronous training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.tuning.simulate import BatchCost, LoaderSetup, simulate

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from scale_sim import Line, coupled

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
def test_equal_ranks_are_one(costs, how):
    one = steps_of(costs[:1], how)
    assert steps_of([costs[0]] * 3, how).took_ms == pytest.approx(one.took_ms)


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

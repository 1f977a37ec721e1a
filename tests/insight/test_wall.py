"""The wall time of a run in parts that add up to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples
from verdicts.known import evidence_with
from virtual_time import VirtualClock

from lightning_fastdata.insight.steps import NO_STEPS, PhaseSummary
from lightning_fastdata.insight.verdict import findings, judge, ranked
from lightning_fastdata.insight.wall import (
    PART_NAMES,
    Activity,
    WallClock,
    WallTime,
    wall_text,
)

PARTS = st.sampled_from(sorted(PART_NAMES))
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), PARTS, st.sampled_from(["", "a", "b"])),
        st.tuples(st.just("leave")),
        st.tuples(st.just("turn"), PARTS),
        st.tuples(st.just("pass"), st.floats(0.0, 10.0)),
        st.tuples(st.just("forget")),
    )
)


def ticking():
    """Return a clock that stands still until it is told to go on, and what counts by it."""
    time = VirtualClock()
    return time, WallClock(time.monotonic_ns)


@max_examples(300)
@given(moves=MOVES)
def test_the_parts_add_up_whatever_is_announced(moves):
    time, wall = ticking()
    began_ns = time.monotonic_ns()
    for move, *what in moves:
        if move == "enter":
            wall.enter(Activity(*what))
        elif move == "leave":
            wall.leave()
        elif move == "turn":
            wall.turn_to(Activity(*what))
        elif move == "forget":
            wall.forget()
        else:
            time.sleep(what[0])
    found = wall.read()
    assert found.total_s == pytest.approx((time.monotonic_ns() - began_ns) / 1e9, abs=1e-8)
    assert sum(found.parts_s.values()) == pytest.approx(found.total_s, abs=1e-9)
    assert all(seconds >= 0 for seconds in found.parts_s.values())
    for part, seconds in found.parts_s.items():
        assert sum(s for _, s in found.names_of(part)) <= seconds + 1e-9


def test_the_innermost_counts_and_blocks_of_one_part_are_one():
    time, wall = ticking()
    wall.turn_to(Activity("other"))
    wall.enter(Activity("checkpoints", "ModelCheckpoint.on_train_batch_end"))
    time.sleep(1)
    wall.enter(Activity("checkpoints", "save_checkpoint"))
    time.sleep(2)
    wall.enter(Activity("callbacks", "Mine.on_save_checkpoint"))
    time.sleep(4)
    for _ in range(3):
        wall.leave()
    time.sleep(8)
    found = wall.read()
    assert found.parts_s == {"checkpoints": 3, "callbacks": 4, "other": 8}
    assert found.names_of("checkpoints") == [("ModelCheckpoint.on_train_batch_end", 3)]


def wall_of(**parts_s):
    return WallTime(
        total_s=sum(parts_s.values()),
        parts_s=parts_s,
        named_s={"callbacks": {"Slow.on_train_batch_end": parts_s.get("callbacks", 0.0)}},
        steps=100,
        samples=800,
    )


def test_the_line_tells_all_parts_that_can_be_seen():
    text = wall_text(wall_of(wait=0.1, compute=0.5, epoch_starts=69.5, validation=2.1, other=0.01))
    assert text == (
        "of 72.2 s: training steps 0.6 (wait 0.1, compute 0.5), starts of epochs 69.5, "
        "validation 2.1"
    )


def test_the_rate_of_the_run_is_without_the_setup():
    assert wall_of(setup=10.0, compute=8.0).samples_per_s == 100
    assert wall_of(setup=10.0).samples_per_s is None


@pytest.mark.parametrize(
    ("callbacks_s", "wait_s", "severity", "first"),
    [
        (4.0, 0.0, None, False),
        (7.0, 0.0, "moderate", False),
        (20.0, 0.0, "high", True),
        (20.0, 30.0, "high", False),
    ],
)
def test_a_pause_is_the_verdict_where_it_costs_most(callbacks_s, wait_s, severity, first):
    wall = wall_of(compute=100.0 - callbacks_s - wait_s, callbacks=callbacks_s, wait=wait_s)
    evidence = evidence_with(step_ms=1000.0, stall_ms=10 * wait_s, wall=wall)
    found = {each.code: each for each in findings(evidence)}
    assert ("FD320" in found) == (severity is not None)
    assert (ranked(evidence)[1] is not None) == first
    if severity is not None:
        told = found["FD320"]
        assert told.severity == severity
        assert "Slow.on_train_batch_end" in told.cause + told.remedy
        assert told.gain.before_ms - told.gain.after_ms == pytest.approx(10 * callbacks_s)


@each(
    ("phase", "ms", "kind", "first"),
    [
        ("transfer_ms", 15.0, "held up", "FD320"),
        ("transfer_ms", 40.0, "balanced", "FD312"),
        ("augment_ms", 15.0, "held up", "FD320"),
        ("augment_ms", 40.0, "balanced", "FD313"),
    ],
)
def test_a_pause_is_the_verdict_unless_a_part_of_the_step_costs_more(phase, ms, kind, first):
    wall = wall_of(compute=8.0, callbacks=2.0)
    times = {"step_ms": 80.0, "wait_ms": 0.0, "stall_ms": 0.0, phase: ms}
    steps = PhaseSummary(mean_ms=80.0, p50_ms=80.0, p95_ms=80.0, share=1.0)
    summary = replace(NO_STEPS, steps=100, samples=800, step=steps)
    evidence = evidence_with(summary=summary)
    verdict = judge(evidence_with(evidence, **times, device="cuda", wall=wall))
    assert (verdict.kind, verdict.code) == (kind, first)
    assert "FD320" in {each.code for each in verdict.findings}


@each(
    ("hook", "seconds", "told"),
    [
        ("on_train_batch_end", 0.9, False),
        ("on_train_batch_end", 1.1, True),
        ("on_train_epoch_end", 8.0, True),
        *((hook, 8.0, False) for hook in ("setup", "teardown", "on_fit_end", "on_train_start")),
    ],
)
def test_what_runs_once_or_for_less_than_a_second_is_no_finding(hook, seconds, told):
    named_s = {"callbacks": {f"Slow.{hook}": seconds}}
    wall = replace(wall_of(compute=2.0, callbacks=seconds), named_s=named_s)
    found = {each.code: each for each in findings(evidence_with(wall=wall))}
    assert ("FD320" in found) == told


def test_hooks_that_run_once_are_no_part_of_what_others_take():
    once, often = "A.on_train_start", "B.on_save"
    parts_s = wall_of(compute=8.0, callbacks=7.0, checkpoints=3.0)
    wall = replace(parts_s, named_s={"callbacks": {once: 5.0, often: 2.0}})
    (found,) = findings(evidence_with(wall=wall))
    assert found.cause == "checkpoints took 3.0 s of 18 s"
    wall = replace(wall, named_s={"callbacks": {once: 1.0, often: 6.0}})
    (found,) = findings(evidence_with(wall=wall))
    assert found.cause == "callbacks took 6.0 s of 18 s, 6.0 s of it in B.on_save"

"""Batches of actors: other machines' clocks are aligned, and their way is a part of the wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fastdata.insight.waits import PARTS, WaitCutter
from lightning_fastdata.stamps.batch_stamps import (
    BatchStamps,
    ClockOffset,
    OwnStamps,
    TaskStamps,
    Way,
)

MS = 10**6
S = 10**9


class Clock:
    """The clock of another machine: set to anything, and a little fast or slow."""

    def __init__(self, ahead_ns: int, drift: float) -> None:
        self.ahead_ns, self.drift = ahead_ns, drift

    def at(self, now_ns: int) -> int:
        return round(now_ns * (1 + self.drift)) + self.ahead_ns


clocks = st.builds(
    Clock, st.integers(-(10**15), 10**15), st.floats(-5e-5, 5e-5, allow_subnormal=False)
)
spans = st.integers(0, 300 * MS)
calls = st.lists(st.tuples(spans, spans, spans, st.integers(0, 100 * S)), min_size=1, max_size=20)


def error_ns(offset: ClockOffset) -> float:
    """Return by how much the offset may be wrong at most."""
    least, most = offset.bounds_ns
    return max(offset.offset_ns - least, most - offset.offset_ns)


@given(clocks, calls)
def test_the_offset_is_never_further_off_than_is_said(clock, calls) -> None:
    offset, now = ClockOffset(), 10 * S
    for there, work, back, pause in calls:
        asked, began = now, now + there
        ended = began + work
        now = ended + back
        offset.note(asked, clock.at(began), clock.at(ended), now)
        true = clock.at(now) - now
        assert abs(offset.offset_ns - true) <= error_ns(offset) + 2
        found = offset.aligned(asked, clock.at(began), clock.at(ended), now)
        assert asked <= found[0] <= found[1] <= now
        # An exchange bounds its own times by no more than what was spent on the way.
        assert abs(found[1] - ended) <= there + back + work * 2e-4 + 2
        now += pause


def test_an_idle_actor_shows_its_clock_however_late_its_later_answers_are_taken() -> None:
    clock, offset = Clock(123 * S, 0.0), ClockOffset()
    offset.note(S, clock.at(S + MS // 2), clock.at(S + MS // 2), S + MS)
    assert error_ns(offset) <= MS
    for second in range(2, 12):  # each waits half a second for its turn, and to be taken
        at = second * S
        offset.note(at, clock.at(at + S // 2), clock.at(at + S // 2 + MS), at + S)
    assert abs(offset.offset_ns - 123 * S) <= error_ns(offset) <= 4 * MS


def test_a_clock_that_is_set_anew_is_believed() -> None:
    offset = ClockOffset()
    for ahead in (0, 5 * S, -7 * S):
        for at in (S, 2 * S):
            offset.note(at, at + ahead, at + ahead, at + MS)
        assert abs(offset.offset_ns - ahead) <= error_ns(offset) <= 2 * MS


def batch_of(number: int, times: tuple[int, int, int, int], task: TaskStamps) -> BatchStamps:
    requested, delivered, queued, _ = times
    own = OwnStamps(runqueue_ns=queued)
    return BatchStamps(number, 4, requested, delivered, (task,), number == 0, None, own)


@given(clocks, st.lists(st.tuples(spans, spans, spans, spans, spans), min_size=1, max_size=12))
def test_parts_of_waits_add_up_and_none_is_negative_whatever_the_clocks(clock, batches) -> None:
    offset, cutter, now, stamped = ClockOffset(), WaitCutter(), 10 * S, []
    for number, (step, out, work, back, queued) in enumerate(batches):
        asked = now
        began = asked + out
        ended = began + work
        got = ended + back
        requested = asked + step
        landed = got + back // 3
        delivered = max(requested, landed)
        offset.note(asked, clock.at(began), clock.at(ended), got)
        at = offset.aligned(asked, clock.at(began), clock.at(ended), got)
        way = Way(back // 3, landed)
        task = TaskStamps(
            0, *at, work // 2, work // 4, 4, work // 2, work // 4, work // 8, 1, way=way
        )
        batch = batch_of(number, (requested, delivered, queued, 0), task)
        cutter.note(batch)
        stamped.append(batch)
        now = delivered
    for batch in stamped:
        parts, _ = cutter.cut(batch)
        assert min(parts) >= -1e-3  # of a nanosecond
        assert sum(parts) == pytest.approx(batch.delivered_ns - batch.requested_ns, abs=10)


def test_the_way_of_a_batch_is_its_network_part_and_what_the_actor_does_next_is_not() -> None:
    def task(began: int, ended: int, landed: int) -> TaskStamps:
        way = Way(MS, landed * MS)
        spent = (ended - began) * MS
        return TaskStamps(0, began * MS, ended * MS, spent, 0, 4, spent, 0, spent // 4, 1, way=way)

    first = batch_of(0, (0, 50 * MS, 0, 0), task(0, 20, 45))
    later = batch_of(1, (60 * MS, 70 * MS, 0, 0), task(20, 48, 58))
    cutter = WaitCutter()
    for batch in (first, later):
        cutter.note(batch)
    parts = dict(zip(PARTS, (ns / MS for ns in cutter.cut(first)[0]), strict=True))
    assert parts["network_ms"] == 25
    assert parts["handover_ms"] == 5
    assert parts["read_cpu_ms"] == 20

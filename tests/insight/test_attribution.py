from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from insight.cut_waits import Cutter
from misses import each
from stamps.made_up import MS, batch, ns_of, task
from thoroughness import max_examples

from lightning_fastdata.insight.waits import CauseTotals, WaitParts
from lightning_fastdata.loading.simulate import batch_costs
from lightning_fastdata.stamps.batch_stamps import BatchStamps, OwnStamps, TaskStamps


def parts(stamps: BatchStamps) -> dict[str, float]:
    found = Cutter().cut(stamps).parts
    return {
        f.name.removesuffix("_ms"): round(getattr(found, f.name), 6)
        for f in fields(found)
        if getattr(found, f.name)
    }


@each(
    ("stamps", "expected"),
    [
        (batch(0, 10), {"idle": 10}),
        (batch(0, 10, task(-9, -2, read=7)), {"handover": 10}),
        (batch(0, 10, task(0, 10, read=10, cpu=10)), {"read_cpu": 10}),
        (batch(0, 10, task(0, 10, read=10, cpu=0)), {"read_blocked": 10}),
        (
            batch(0, 10, task(0, 10, read=10, cpu=2, queued=8)),
            {"read_cpu": 2, "read_runqueue": 8},
        ),
        (batch(0, 10, task(0, 10, read=10, cpu=None, queued=None)), {"read": 10}),
        (batch(0, 10, task(0, 10, collate=10, cpu=10)), {"collate": 10}),
        (
            batch(0, 10, task(0, 10, read=8, collate=2, cpu=2)),
            {"read_blocked": 8, "collate": 2},
        ),
        (batch(5, 10, task(0, 8, read=8, cpu=8)), {"read_cpu": 3, "handover": 2}),
        (
            batch(0, 10, task(2, 8, read=6, cpu=6), task(0, 3, read=3, process=1)),
            {"idle": 2, "read_cpu": 6, "handover": 2},
        ),
    ],
)
def test_a_wait_is_what_the_last_thread_did_meanwhile(stamps, expected) -> None:
    assert parts(stamps) == expected


def test_a_thread_that_was_busy_with_the_batch_before_is_charged_for_that() -> None:
    cutter = Cutter()
    cutter.cut(batch(-20, -20, task(-5, 4, read=9, cpu=9)))
    found = cutter.cut(batch(0, 10, task(4, 10, collate=6, cpu=6))).parts
    assert found == WaitParts(read_cpu_ms=4, collate_ms=6)


def test_the_excess_of_a_slow_sample_is_its_own_part_and_names_it() -> None:
    cutter = Cutter()
    cutter.cut(batch(0, 0, task(-8, 0, read=8, slowest=1)))
    wait = cutter.cut(batch(0, 57, task(0, 57, read=57, slowest=50, index=77)))
    assert wait.parts.slow_sample_ms == pytest.approx(49)
    assert wait.parts.read_blocked_ms == pytest.approx(8)
    assert wait.slow_task is not None
    assert (wait.slow_task.slowest_index, wait.slow_task.slowest_ns) == (77, 50 * MS)


def test_a_sample_that_waited_for_a_cpu_is_not_called_slow() -> None:
    cutter = Cutter()
    cutter.cut(batch(0, 0, task(-8, 0, read=8, slowest=1)))
    late = task(0, 57, read=57, cpu=8, queued=49, slowest=50)
    wait = cutter.cut(batch(0, 57, late))
    assert wait.slow_task is None
    assert wait.parts.slow_sample_ms == 0
    assert wait.parts.read_runqueue_ms == pytest.approx(49)


def test_samples_that_are_all_slow_are_not_called_slow() -> None:
    cutter = Cutter()
    for at in range(0, 20 * 80, 80):
        assert cutter.cut(batch(at, at + 80, task(at, at + 80, slowest=12))).slow_task is None


@st.composite
def runs(draw: st.DrawFn) -> list[BatchStamps]:
    """Batches whose tasks follow each other in each thread, asked for one after the other."""
    free = {0: 0, 1: 0, 2: 0}
    now, batches = 0, []
    for number in range(draw(st.integers(1, 8))):
        tasks = []
        for _ in range(draw(st.integers(0, 4))):
            process = draw(st.integers(0, 2))
            began = free[process] + draw(st.integers(0, 5 * MS))
            length = draw(st.integers(1, 40 * MS))
            ended = free[process] = began + length
            read = draw(st.integers(0, length))
            cpu = draw(st.none() | st.integers(0, length + MS))
            samples = draw(st.integers(0, 16))
            tasks.append(
                TaskStamps(
                    process,
                    began,
                    ended,
                    cpu,
                    None if cpu is None else draw(st.integers(0, length)),
                    samples,
                    read,
                    draw(st.integers(0, length - read)),
                    draw(st.integers(0, read)) if samples else 0,
                    number,
                )
            )
        requested = now
        complete = max((task.ended_ns for task in tasks), default=0)
        now = max(now, complete) + draw(st.integers(0, 3 * MS))
        batches.append(BatchStamps(number, 8, requested, now, tuple(tasks)))
        now += draw(st.integers(0, 20 * MS))
    return batches


@given(runs())
@max_examples(200)
def test_the_parts_of_every_wait_add_up_to_it_and_none_is_negative(run) -> None:
    cutter = Cutter()
    for stamps in run:
        found = cutter.cut(stamps).parts
        waited = (stamps.delivered_ns - stamps.requested_ns) / MS
        assert found.total_ms == pytest.approx(waited, abs=1e-6)
        assert all(getattr(found, f.name) >= -1e-9 for f in fields(found))


def test_a_complete_batch_waits_for_what_its_thread_goes_on_to_do() -> None:
    totals = CauseTotals()
    totals.add(batch(5, 30, task(0, 10, read=10, cpu=10)))
    totals.add(batch(31, 31, task(10, 28, read=18, cpu=18)))
    found = totals.summary()
    assert found is not None
    # 5 to 10: the batch itself. 10 to 28: the next one. Then it is handed over.
    assert found.wait == WaitParts(read_cpu_ms=23 / 2, handover_ms=2 / 2)


def test_a_hand_over_costs_no_time_in_which_its_worker_makes_the_next_batch() -> None:
    stamps = [
        batch(5, 30, task(0, 10, read=10, cpu=10)),
        batch(31, 40, task(10, 28, read=18, cpu=18)),
        batch(41, 41, task(39, 40, read=1, cpu=1)),
    ]
    # Of two that were complete when they were asked for: 9 - 1 ms, and 0. The first was late by
    # 30 - 28 ms, which is less.
    first = batch_costs(stamps)[0]
    assert (first.handover_ns, first.taking_ns) == (4 * MS, 4 * MS)


def test_a_worker_that_waits_leaves_the_hand_over_what_it_takes() -> None:
    totals = CauseTotals()
    totals.add(batch(5, 30, task(0, 10, read=10, cpu=10)))
    totals.add(batch(31, 31, task(10, 28, read=18, cpu=0)))
    found = totals.summary()
    assert found is not None
    assert found.wait == WaitParts(read_cpu_ms=5 / 2, handover_ms=20 / 2)


def owned(requested_ms, delivered_ms, *tasks, sampled=(), unpacked=(), queued=None):
    def ns(spans):
        return tuple((ns_of(begin), ns_of(end)) for begin, end in spans)

    own = OwnStamps(ns(sampled), ns(unpacked), None if queued is None else ns_of(queued))
    return batch(requested_ms, delivered_ms, *tasks)._replace(own=own)


def test_what_the_training_process_does_after_a_batch_was_made_is_no_hand_over():
    made = task(0, 10, read=10, cpu=10)
    found = parts(owned(12, 30, made, sampled=[(12, 18)], unpacked=[(19, 23)], queued=3.0))
    assert (found["sampler"], found["unpack"], found["queued"], found["handover"]) == (6, 4, 3, 5)
    assert sum(found.values()) == pytest.approx(18)


def test_a_training_process_that_loads_and_loses_its_cpu_hands_nothing_over():
    # The kernel was asked about the second task only, as the one before the first was short.
    for known in ({"cpu": None, "queued": None}, {"cpu": 1, "queued": 27}):
        alone = task(0, 28, read=0.5, collate=0.5, process=-1, **known)
        found = parts(owned(0, 28, alone, queued=27.0))
        assert found.get("handover", 0) <= 0.5
        assert found["queued"] + found.get("read_runqueue", 0) == pytest.approx(27)
        assert sum(found.values()) == pytest.approx(28)


def test_what_it_does_while_workers_still_work_holds_up_nothing():
    made = task(0, 20, read=20, cpu=20)
    found = parts(owned(10, 21, made, sampled=[(10, 19)], unpacked=[(11, 12)]))
    assert found == {"read_cpu": 10, "handover": 1}


def test_workers_that_nobody_told_what_to_read_wait_for_the_sampler():
    made = task(18, 20, read=2, cpu=2)
    found = parts(owned(10, 20, made, sampled=[(10, 17)]))
    assert (found["sampler"], found["idle"], found["read_cpu"]) == (7, 1, 2)

"""Waits add up to causes, in numbers and in words."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from insight.made_up import stage
from stamps import made_up
from stamps.made_up import MS
from verdicts.known import evidence_with, judge

from lightning_fastdata.insight.report import RunReport
from lightning_fastdata.insight.waits import CauseTotals, cause_lines
from lightning_fastdata.insight.wall import WallTime
from lightning_fastdata.stamps.batch_stamps import BatchStamps
from lightning_fastdata.stamps.lines import Place


def batch(at_ms, wait_ms, *, first=False, **task):
    """A batch that one thread made while it was waited for, from its request to its delivery."""
    ends_ms = at_ms + wait_ms
    made = made_up.batch(at_ms, ends_ms, made_up.task(at_ms, ends_ms, **task))
    return made._replace(first=first)


def totals_of(*batches):
    totals = CauseTotals()
    for each in batches:
        totals.add(each)
    return totals


def test_first_batches_of_epochs_are_left_out_unless_there_are_no_others():
    cold = batch(0, 900, first=True)
    assert totals_of(cold).summary().wait.total_ms == pytest.approx(900)
    totals = totals_of(cold, batch(1000, 10), batch(1100, 20), batch(2000, 500, first=True))
    assert (totals.summary().batches, totals.summary().wait.total_ms) == (2, pytest.approx(15))


def test_a_window_holds_the_waits_since_the_last_one_under_names_with_units():
    totals = totals_of(batch(0, 10, cpu=4, queued=6))
    window = totals.window()
    assert window["_wait/read_cpu_ms"] == pytest.approx(4)
    assert window["_wait/read_runqueue_ms"] == pytest.approx(6)
    assert sum(window.values()) == pytest.approx(10)
    assert totals.window() == {}
    totals.add(batch(100, 30, cpu=30, queued=0))
    assert totals.window()["_wait/read_cpu_ms"] == pytest.approx(30)
    assert totals.summary().wait.total_ms == pytest.approx(20)


def test_what_was_not_measured_has_no_name():
    told = {"read_cpu", "read_runqueue", "read_blocked"}
    rest = {"slow_sample", "collate", "handover", "idle"}

    def names(*batches):
        window = totals_of(*batches).window()
        return {name.removeprefix("_wait/").removesuffix("_ms") for name in window}

    assert names(batch(0, 10)) == told | rest
    assert names(batch(0, 10, cpu=None, queued=None)) == {"read"} | rest
    assert names(batch(0, 10), batch(20, 10, cpu=None, queued=None)) == told | {"read"} | rest
    assert names(batch(0, 10)._replace(delivered_ns=12 * MS, pinned_ns=(10 * MS, 11 * MS))) == (
        told | {"pin"} | rest
    )


def test_batches_that_were_made_before_stamps_were_taken_do_not_count():
    early = BatchStamps(1, 0, 0, 5 * MS, ())
    totals = totals_of(early, early)
    assert totals.summary() is None
    totals.add(batch(10, 10))
    totals.add(early._replace(requested_ns=30 * MS, delivered_ns=35 * MS))
    assert totals.summary().batches == 2


def test_slow_samples_are_told_slowest_first_once_each_with_their_files():
    batches = [batch(0, 8, slowest=1)]
    for number, (index, ms) in enumerate([(7, 90), (np.int64(9), 300), (7, 200), (11, 60)]):
        batches.append(batch(1000 * (number + 1), ms, slowest=ms - 5, index=index))
    causes = totals_of(*batches).summary(lambda loader, index: f"/{loader}/{index}.jpg")
    assert [(s.index, s.ms, s.path) for s in causes.slow_samples] == [
        (9, 295, "/0/9.jpg"), (7, 195, "/0/7.jpg"), (11, 55, "/0/11.jpg"),
    ]  # fmt: skip
    json.dumps(asdict(causes), allow_nan=False)


def test_slow_samples_take_bounded_memory():
    totals = CauseTotals()
    totals.add(batch(0, 8, slowest=1))
    for number in range(2000):
        totals.add(batch(1000 * (number + 1), 90, slowest=50 + number / 100, index=number))
    assert len(totals._slow) <= 256
    assert [s.index for s in totals.summary().slow_samples] == [1999, 1998, 1997, 1996, 1995]


def test_each_part_above_five_percent_is_put_into_words_largest_first():
    lines = cause_lines(totals_of(batch(0, 100, cpu=20, queued=76)).summary())
    assert len(lines) == 2
    assert lines[0].startswith("76% of the wait (76.0 ms a batch): reading was ready")
    assert lines[1].startswith("20% of the wait (20.0 ms a batch): reading and transforming")


def test_no_sample_is_said_to_take_no_time():
    causes = totals_of(batch(0, 0.08, slowest=0.01), batch(1, 0.6, slowest=0.5, index=133))
    lines = cause_lines(causes.summary())
    assert any(line.startswith("sample 133 took 0.5 ms, others ") for line in lines), lines


def test_what_waits_are_made_of_is_told_once_beside_a_pause_that_leads():
    summary = replace(stage(30.0, 20.0), causes=totals_of(batch(0, 30)).summary())
    parts_s = {"callbacks": 8.0, "compute": 1.0, "wait": 1.0}
    wall = WallTime(total_s=10.0, parts_s=parts_s, steps=100, samples=800)
    verdict = judge(summary, evidence=evidence_with(wall=wall))
    text = " ".join(RunReport(stages=(summary,), verdict=verdict).text().split())
    assert verdict.kind == "held up"
    assert "waiting for storage, a network or a lock is 100% of the wait for data" in text
    assert "reading waited for storage" not in text


def report(stall_ms):
    lines = (
        (Place("rows.py", 1, "Rows.read", ""), 40 * MS),
        (Place("rows.py", 2, "Rows.read", "albumentations Blur.apply"), 20 * MS),
        (Place("rows.py", 2, "Rows.read", "albumentations Flip.apply"), 30 * MS),
    )
    causes = totals_of(
        batch(0, 8, slowest=1),
        batch(100, 60, slowest=50, index=133, lines=lines),
    ).summary(lambda _loader, _index: "/data/a/very/long/folder/of/images/number/133.jpg")
    summary = replace(stage(stall_ms, 50.0), causes=causes)
    return RunReport(stages=(summary,), verdict=judge(summary))


def test_the_summary_tells_why_and_names_the_sample():
    text = " ".join(report(30.0).text().split())
    assert "of the wait" in text
    assert "sample 133 (/data/a/very/long/folder/of/images/number/133.jpg) took 50 ms" in text
    assert "of the time to read a sample: albumentations Flip 33%, albumentations Blur 22%" in text
    assert "56% of reading is in Rows.read (rows.py:2), in albumentations Flip.apply" in text
    assert max(map(len, report(30.0).text(72).splitlines())) <= 72


def test_nothing_is_said_of_waits_that_cost_nothing():
    assert "of the wait" not in report(0.2).text()

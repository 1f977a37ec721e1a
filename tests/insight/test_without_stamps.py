"""What is said of loaders that take no stamps."""

from __future__ import annotations

import pytest
from insight.made_up import stage
from verdicts.known import evidence_with, judge

from lightning_fastdata.insight.finding import LoaderFacts
from lightning_fastdata.insight.waits import WaitParts


def waiting(stall_ms):
    return stage(stall_ms, 60.0 - stall_ms, steps=100, device="cuda")


@pytest.mark.parametrize(
    ("workers", "cpus", "code", "after_ms"),
    [
        (1, 3, "FD102", 30.0),  # one CPU is for the training process
        (2, 5, "FD102", 30.0),
        (1, 17, "FD102", 10.0),  # no less than what is computed
        (0, 5, "FD101", 12.5),
    ],
)
def test_a_gain_is_no_larger_than_that_many_workers_can_make_it(workers, cpus, code, after_ms):
    facts = LoaderFacts(num_workers=workers, usable_cpus=cpus)
    found = judge(waiting(50.0), facts).findings[0]
    assert found.code == code
    assert found.gain.before_ms == pytest.approx(60.0)
    assert found.gain.after_ms == pytest.approx(after_ms)


def test_who_takes_stamps_is_not_told_to_take_some():
    facts = LoaderFacts(num_workers=4, usable_cpus=4)
    parts = WaitParts(collate_ms=1.2, queued_ms=1.5, handover_ms=0.5, unpack_ms=0.6)
    seen = evidence_with(step_ms=60.0, wait_ms=20.0, stall_ms=20.0, parts=parts)
    blind, told = (judge(waiting(20.0), facts, each).findings[0] for each in (None, seen))
    assert blind.code == told.code == "FD104"
    assert "FastDataLoader" in blind.remedy
    assert told.remedy == ""
    assert "no single cost stands out: the training process was ready" in told.cause

"""Which rank holds up the others: its figures, its name, and what rank 0 makes of it."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from insight.made_up import stage
from verdicts.known import evidence_with, judge

from lightning_fastdata.insight.finding import LoaderFacts
from lightning_fastdata.insight.ranks import (
    RankTiming,
    mean_stall_ms,
    rank_metrics,
    ranks_line,
    slowest,
)
from lightning_fastdata.insight.report import RunReport
from lightning_fastdata.insight.verdict import findings
from lightning_fastdata.insight.wall import WallTime

MS = st.none() | st.floats(0, 1e4)


def ranks(*stalls, step_ms=30.0):
    """Ranks in step: what one stalls, the others compute."""
    return tuple(
        RankTiming(
            rank=number, host=f"host-{'ab'[number % 2]}", steps=10, step_ms=step_ms, wait_ms=stall,
            stall_ms=stall, compute_ms=None if stall is None else step_ms - stall,
        )
        for number, stall in enumerate(stalls)
    )  # fmt: skip


@given(st.lists(MS, max_size=6))
def test_the_slowest_rank_stalls_longest_of_those_that_are_known(stalls):
    told = {i: s for i, s in enumerate(stalls) if s is not None}
    worst = slowest(ranks(*stalls))
    if len(told) < 2:
        assert worst is None
    else:
        assert told[worst.rank] == max(told.values())
        assert mean_stall_ms(ranks(*stalls)) == pytest.approx(statistics.fmean(told.values()))


def test_of_equal_stalls_the_rank_that_computes_least_holds_up_the_others():
    alike = ranks(5.0, 5.0, 5.0)
    assert slowest((alike[0], replace(alike[1], compute_ms=3.0), alike[2])).rank == 1


def test_loggers_get_the_longest_stall():
    assert rank_metrics(ranks(1.0, 21.0, 2.0)) == {"data_ranks/stall_max_ms": 21.0}
    assert rank_metrics(ranks(1.0)) == {}


def test_ranks_that_stall_alike_are_told_so():
    assert ranks_line(ranks(1.0, 1.2)) == (
        "2 ranks stall 1.1 ms a step on average, rank 1 on host-b 1.2"
    )
    assert ranks_line(ranks(1.0)) is ranks_line(()) is ranks_line(ranks(None, None)) is None


def evidence(*stalls, own=None, **arguments):
    own = stalls[0] if own is None else own
    return evidence_with(step_ms=30.0, wait_ms=own, stall_ms=own, ranks=ranks(*stalls), **arguments)


def test_a_slower_rank_is_the_first_finding_and_data_is_not_called_free():
    found = findings(evidence(0.1, 21.0, transfer_ms=10.0))
    assert [each.code for each in found] == ["FD316", "FD312"]
    assert found[0].cause.startswith("rank 1 on host-b stalls 21.0 ms a step")
    assert found[0].severity == "high"
    # What is left is what the next slowest stalls.
    assert found[0].gain.after_ms == pytest.approx(30.0 - 20.9)


def test_on_the_slowest_rank_itself_its_own_causes_come_first():
    found = findings(evidence(21.0, 0.1, transfer_ms=10.0))
    assert [each.code for each in found] == ["FD312", "FD316"]
    assert "rank 0 on host-a" in found[1].cause


def test_ranks_that_stall_alike_give_no_finding():
    for stalls in ((20.0, 20.0), (0.1, 0.3), (20.0, 21.0, 20.5)):
        assert "FD316" not in {each.code for each in findings(evidence(*stalls))}


def test_the_reason_is_that_of_the_slow_rank():
    told = [replace(each, reason=f"reason {each.rank}") for each in ranks(0.1, 21.0)]
    found = findings(evidence_with(step_ms=30.0, stall_ms=0.1, ranks=tuple(told)))
    assert found[0].cause.endswith("; there, reason 1")


def summary(stall):
    return stage(stall, 30.0 - stall)


def test_a_run_that_waits_for_another_rank_is_data_bound():
    verdict = judge(summary(0.1), LoaderFacts(num_workers=0), evidence(0.1, 21.0))
    assert (verdict.code, verdict.kind) == ("FD316", "data-bound")
    assert verdict.sentence == verdict.findings[0].cause
    assert judge(summary(0.1), None, evidence(0.1, 2.5)).kind == "balanced"
    assert judge(summary(0.1), None, evidence(0.1, 0.2)).kind == "compute-bound"


@pytest.mark.parametrize(("stalls", "codes"), [
    ((5.0, 21.0), ["FD316", "FD101"]),
    ((21.0, 5.0), ["FD316", "FD101"]),
    ((21.0, 21.0), ["FD101"]),
])  # fmt: skip
def test_what_outsiders_see_of_this_rank_is_told_too(stalls, codes):
    facts = LoaderFacts(num_workers=0, usable_cpus=4)
    verdict = judge(summary(stalls[0]), facts, evidence(*stalls))
    assert [each.code for each in verdict.findings] == codes


def test_a_rate_of_one_rank_is_not_called_that_of_the_whole_training():
    ran = WallTime(total_s=10.0, parts_s={"compute": 10.0}, steps=20, samples=1280)
    report = RunReport(stages=(summary(1.0),), wall=ran)
    assert " 128 samples/s in the whole training\n" in report.text()
    assert (
        " 128 samples/s in the whole training of this rank\n"
        in replace(report, ranks=ranks(1.0, 21.0)).text()
    )


def test_the_report_holds_every_rank_and_one_line_on_them():
    told = ranks(1.0, 21.0)
    report = RunReport(stages=(summary(1.0),), ranks=told)
    assert json.loads(json.dumps(report.as_dict()))["ranks"] == [asdict(each) for each in told]
    told = " ranks 2 ranks stall 11.0 ms a step on average, rank 1 on host-b 21.0\n"
    assert told in report.text()
    alone = RunReport(stages=(summary(1.0),))
    assert alone.as_dict()["ranks"] == []
    assert "ranks" not in alone.text()
    assert str(report) == report.text()

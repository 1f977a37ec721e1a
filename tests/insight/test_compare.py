"""Two reports are compared as arithmetic says, and nothing passes that was not measured."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from misses import each

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.insight.measure.metrics import StepHistory, StepTiming
from lightning_fastdata.insight.report.compare import compare_files, report_metrics
from lightning_fastdata.insight.report.run_report import RunReport

PLAIN = st.floats(min_value=0.01, max_value=1e5, allow_nan=False)


def report(stall=32.1, compute=41.6, **facts):
    history = StepHistory()
    for i in range(20):
        history.append(
            StepTiming(
                step=i,
                wait_ms=stall,
                stall_ms=stall,
                compute_ms=compute,
                step_ms=stall + compute,
                samples=64,
                cold=False,
            )
        )
    train = history.summarize("train", duration_s=94.0)
    val = history.summarize("val", duration_s=9.0)
    return RunReport(stages=(train, val), **facts)


@pytest.fixture
def files(tmp_path):
    """The files of a run with 73.7 ms a step and of one with 83.7 ms."""
    paths = tmp_path / "a.json", tmp_path / "b.json"
    report(machine={"device": "cpu"}).write_json(paths[0])
    report(stall=42.1, machine={"device": "cuda"}).write_json(paths[1])
    return paths


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Returns what a condition says of two reports."""
    folder = tmp_path_factory.mktemp("reports")

    def of(a, b, text):
        paths = a.write_json(folder / "a.json"), b.write_json(folder / "b.json")
        (found,) = compare_files(*paths, [text]).outcomes
        return found

    return of


@each(
    ("text", "found", "holds"),
    [
        ("step_ms > +10%", 13.6, True),
        ("step_ms>+14%", 13.6, False),
        ("samples_per_s<-5%", -11.9, True),
        ("stall_percent >= 5", 50.3, True),
        ("  stall_share > +.02 ", 0.067, True),
        ("stall_ms <= - 1e-1", 10.0, False),
        ("val.step_p95_ms > +3 %", 13.6, True),
        ("train.step_ms > 50", 83.7, True),
        ("steps < 20", 20, False),
    ],
)
def test_a_condition_says_what_it_reads_as(files, text, found, holds):
    (outcome,) = compare_files(*files, [text]).outcomes
    assert (outcome.found, outcome.holds) == (pytest.approx(found, abs=0.05), holds)
    assert outcome.text == text.strip()


@each(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("step_ms", "cannot be read"),
        ("step_ms > ", "cannot be read"),
        ("step_ms > ten", "cannot be read"),
        ("step_ms == 5", "cannot be read"),
        ("step_ms > 5 ms", "cannot be read"),
        ("step_ms > +10% or stall_ms > 3", "cannot be read"),
        ("step_ms > nan", "cannot be read"),
        ("step_ms > 10%", r"'step_ms > \+10%'"),
        ("step > +10%", "Known are: .*step_ms"),
        ("throughput > 3", "samples_per_s"),
    ],
)
def test_what_cannot_be_decided_is_refused_with_a_way_out(files, text, said):
    with pytest.raises(OptionsError, match=said):
        compare_files(*files, [text])


@given(a=PLAIN, b=PLAIN, limit=st.floats(min_value=-90, max_value=200))
def test_a_change_in_percent_is_of_the_first_run(outcome, a, b, limit):
    runs = report(stall=0.0, compute=a), report(stall=0.0, compute=b)
    steps = [report_metrics(run.as_dict())["step_ms"] for run in runs]
    found = outcome(*runs, f"step_ms > {limit:+.3f}%")
    change = 100 * (steps[1] - steps[0]) / steps[0]
    assert found.found == pytest.approx(change)
    assert found.holds == (found.found > float(f"{limit:+.3f}"))


def test_signed_limits_are_of_the_difference_and_plain_ones_of_the_second_run(outcome):
    runs = report(stall=10.0, compute=30.0), report(stall=20.0, compute=30.0)
    assert outcome(*runs, "stall_percent > 39.9").found == pytest.approx(40.0)
    assert outcome(*runs, "stall_percent > 39.9").holds
    assert not outcome(*runs, "stall_percent > 40.1").holds
    assert outcome(*runs, "stall_percent > +14.9").found == pytest.approx(15.0)
    assert outcome(*runs, "stall_share < +0.16").holds
    assert not outcome(*runs, "samples_per_s < -25%").holds
    assert outcome(*runs, "samples_per_s < -19%").found == pytest.approx(-20.0)
    assert outcome(*runs, "val.step_ms >= 50").holds


def test_something_from_nothing_is_an_endless_change_and_nothing_from_nothing_is_none(outcome):
    assert outcome(report(stall=0.0), report(stall=1.0), "stall_ms > +1000%").found == math.inf
    assert outcome(report(stall=0.0), report(stall=0.0), "stall_ms > +0%").found == 0.0


def test_what_either_run_did_not_measure_is_never_passed(files):
    with pytest.raises(OptionsError, match=r"transfer_ms was not measured in .*a\.json and .*b"):
        compare_files(*files, ["transfer_ms > 5"])
    first = json.loads(files[0].read_text())
    del first["stages"]["val"]
    files[0].write_text(json.dumps(first))
    with pytest.raises(OptionsError, match=r"val\.step_ms was not measured in .*a\.json\."):
        compare_files(*files, ["val.step_ms > +5%"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "not JSON"),
        (b"[1, 2]", "no schema_version"),
        (b'{"stages": {}}', "no schema_version"),
        (b'{"schema_version": 99, "stages": {}}', "schema version 99; .* reads 10"),
        (b'{"schema_version": 10}', "no whole report"),
        (b'{"schema_version": 10, "stages": {"train": {"step": {"mean_ms": NaN}}}}', "NaN"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_file_that_is_no_report_is_named_with_the_reason(files, content, said):
    if content is None:
        files[1].unlink()
    else:
        files[1].write_bytes(content)
    with pytest.raises(OptionsError, match=rf"(?s)b\.json.*{said}"):
        compare_files(*files)


def test_the_table_shows_both_numbers_the_change_and_each_condition(files):
    comparison = compare_files(*files, ["step_ms > +10%", "stall_percent > 60", "steps < 20"])
    lines = {line.split()[0]: line.split() for line in comparison.text().splitlines() if line}
    assert lines["step_ms"] == ["step_ms", "73.7", "83.7", "+10", "+13.6%"]
    assert lines["steps"] == ["steps", "20", "20", "+0", "+0.0%"]
    assert "transfer_ms" not in lines
    text = comparison.text()
    assert " FAIL  step_ms > +10%      it is +13.6%" in text
    assert " ok    stall_percent > 60  it is 50.3" in text
    assert "device: cpu in a, cuda in b" in text
    assert comparison.failed
    assert text.replace(str(files[0].parent), "").isascii()


def test_json_holds_every_metric_and_the_outcome(files):
    read = json.loads(
        json.dumps(compare_files(*files, ["step_ms > +10%"]).as_dict(), allow_nan=False)
    )
    assert read["failed"] is True
    assert read["metrics"]["step_ms"]["a"] == pytest.approx(73.7)
    assert read["conditions"] == [
        {"text": "step_ms > +10%", "found": pytest.approx(13.57, abs=0.01), "holds": True}
    ]

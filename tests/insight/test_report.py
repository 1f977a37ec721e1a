"""Numbers, verdicts and texts say what was measured, and leave out what was not."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from insight.made_up import history_of, stage, timing
from misses import each
from verdicts.known import judge, of_loop

from lightning_fastdata.insight.evidence import evidence_of
from lightning_fastdata.insight.finding import Finding, Gain, LoaderFacts, duration_text
from lightning_fastdata.insight.report import RunReport, as_ascii, bar
from lightning_fastdata.insight.stage import window_means
from lightning_fastdata.insight.verdict import Verdict
from lightning_fastdata.insight.waits import OperationShare, WaitCauses, WaitParts

FLIP = OperationShare(name="albumentations Flip", share=0.6, augments=True)


def phases(stall=32.1, transfer=1.1, augment=3.2):
    return {"stall": stall, "compute": 41.6, "transfer_ms": transfer, "augment_ms": augment}


def summary(steps=20, name="train", device="cuda", **measured):
    return stage(steps=steps, name=name, device=device, **phases(**measured))


def run_report(**measured):
    first = summary(**measured)
    facts = LoaderFacts(num_workers=4, usable_cpus=8)
    return RunReport(stages=(first, summary(name="val")), verdict=judge(first, facts))


def test_one_cpu_is_no_cpus():
    facts = LoaderFacts(num_workers=0, usable_cpus=1)
    verdict = judge(summary(), facts)
    assert "0 workers, 1 usable CPU" in verdict.evidence
    assert verdict.findings[0].remedy == "num_workers 0 -> 1  (1 CPU is usable)"


def test_window_means_agree_with_numpy_and_leave_out_cold_steps():
    rng = np.random.default_rng(0)
    stalls, computes = rng.uniform(1, 40, 30), rng.uniform(20, 60, 30)
    warm = (
        timing(i, stall, compute, augment_ms=3.2)
        for i, (stall, compute) in enumerate(zip(stalls, computes, strict=True), start=1)
    )
    steps = history_of(timing(0, 9000.0, transfer_ms=1.1, cold=True), *warm)
    scalars = window_means(steps.window())
    steps = stalls + computes + 3.2
    assert scalars["/stall_percent"] == pytest.approx(100 * stalls.sum() / steps.sum())
    assert scalars["/step_ms"] == pytest.approx(steps.mean())
    assert scalars["/throughput_samples_per_s"] == pytest.approx(64e3 / steps.mean())
    assert scalars["/throughput_if_data_were_free_samples_per_s"] == pytest.approx(
        64e3 * 30 / (steps - stalls).sum()
    )
    assert scalars["_band/stall_p95_ms"] == pytest.approx(np.percentile(stalls, 95))
    assert "_step/transfer_ms" not in scalars


@each(
    ("measured", "facts", "code", "kind"),
    [
        ({"steps": 4}, {}, "FD000", "unknown"),
        ({"stall": 0.1, "augment": 1.0}, {}, "FD001", "compute-bound"),
        ({"stall": 2.5, "augment": 1.0}, {}, "FD002", "balanced"),
        ({}, {"num_workers": 0, "usable_cpus": 4}, "FD101", "data-bound"),
        ({}, {"num_workers": 2, "usable_cpus": 4}, "FD102", "data-bound"),
        ({}, {"num_workers": 3, "usable_cpus": 4}, "FD104", "data-bound"),
        ({}, {}, "FD104", "data-bound"),
    ],
)
def test_each_measured_situation_has_its_code(measured, facts, code, kind):
    verdict = judge(summary(**measured), LoaderFacts(**facts))
    assert (verdict.code, verdict.kind) == (code, kind)
    assert bool(verdict.findings[0].remedy) == (code not in ("FD001", "FD002"))


def test_too_few_steps_are_told_as_such_and_more_are_asked_for_where_more_would_do():
    few = judge(summary(steps=1))
    assert few.findings[0].family == "too few steps"
    assert few.findings[0].remedy == "run at least 5 steps"
    assert few.evidence[0] == "1 step was timed"
    unseen = judge(replace(summary(steps=40), stall=None))
    assert (unseen.code, unseen.findings[0].remedy) == ("FD000", "")
    assert unseen.evidence == ("40 steps were timed", "waits for batches were not seen")
    one = replace(summary(steps=1), duration_s=2.0)
    assert one.title == "train · 1 step in 2.0 s"
    assert "train 1 step>" in repr(RunReport(stages=(one,)))


@pytest.mark.parametrize(("phase", "code"), [("transfer", "FD312"), ("augment", "FD313")])
def test_what_makes_steps_longer_is_told_of_any_loader(phase, code):
    measured = summary(**{"stall": 0.1, "augment": 1.0, phase: 9.0})
    verdict = judge(measured, evidence=of_loop(measured))
    assert (verdict.code, verdict.kind) == (code, "balanced")


CPU_FACTS = {"num_workers": 3, "usable_cpus": 4, "augment_on": "cpu"}


@each(
    ("device", "facts", "transforms", "could"),
    [
        ("cuda", CPU_FACTS, (), True),
        ("cuda", {}, (FLIP,), True),
        ("cpu", CPU_FACTS, (FLIP,), False),
        ("cpu", {}, (FLIP,), False),
        ("cuda", {}, (), False),
        ("cuda", CPU_FACTS | {"augment_on": "device"}, (FLIP,), False),
        ("cuda", CPU_FACTS | {"augment_settled": True}, (FLIP,), False),
        ("cuda", {"augment_settled": True}, (FLIP,), False),
    ],
)
def test_a_device_could_augment_what_workers_do_beside_it_unless_they_were_found_to_be_faster(
    device, facts, transforms, could
):
    measured = summary(device=device)
    if transforms:
        causes = WaitCauses(batches=20, wait=WaitParts(), operations=transforms)
        measured = replace(measured, causes=causes)
    assert evidence_of(measured, LoaderFacts(**facts)).device_could_augment is could


def test_costly_epoch_starts_are_named_when_steps_themselves_are_fine():
    starts = [i % 10 == 0 for i in range(40)]
    steps = (timing(i, 2000.0 if cold else 0.1, 46.0, cold=cold) for i, cold in enumerate(starts))
    s = history_of(*steps).summarize("train", duration_s=10.0)
    assert (s.cold_steps, s.cold_wait_ms) == (4, 2000.0)
    for kept in (None, True, False):
        facts = LoaderFacts(persistent_workers=kept)
        first = judge(s, facts, of_loop(s, facts)).findings[0]
        assert first.code == "FD310"
        assert ("persistent_workers=True" in first.remedy) is (kept is False)


def test_bars_grow_by_eighths_of_a_cell_and_stay_within_their_width():
    lengths = [bar(i / 80, 10) for i in range(81)]
    assert len(set(lengths)) == 81
    assert lengths[0] == ""
    assert lengths[-1] == bar(2.0, 10) == "█" * 10
    assert as_ascii(bar(0.55, 10)) == "######"
    assert as_ascii(bar(0.54, 10)).rstrip() == "#####"


def test_durations_read_as_people_say_them():
    seconds = (0, 0.0404, 0.0949, 0.095, 0.84, 34.2, 59.7, 94, 7500)
    assert [duration_text(s) for s in seconds] == [
        "0 ms", "40 ms", "95 ms", "0.1 s",
        "0.8 s", "34 s", "1 min 00 s", "1 min 34 s", "2 h 05 min",
    ]  # fmt: skip


@each("ascii_only", [False, True])
@each("width", [60, 72, 80, 120, 200])
def test_no_line_is_wider_than_asked(width, ascii_only):
    text = run_report().text(width, ascii=ascii_only)
    assert max(len(line) for line in text.splitlines()) <= width
    assert not ascii_only or text.isascii()


def test_the_summary_tells_the_finding_the_gain_and_the_remedy():
    text = run_report().text()
    assert "DATA-BOUND   the GPU waits 41% of each step (32.1 of 78.0 ms)" in text
    assert "821 samples/s in a step  ·  1394 if data were free  ·  1.70x to gain" in text
    assert "num_workers 4 -> 7" in text
    assert "[too few workers, FD102]" in text


def test_the_summary_tells_two_remedies_at_most_and_paths_by_their_last_parts():
    paths = [f"/data/of/a/team/photos/train/cats/{i}.jpg" for i in range(3)]
    found = tuple(
        Finding(
            code=f"FD30{i}",
            severity="high",
            cause=f"cause {i}",
            remedy=f"repair {path} (80 ms), or use 1/2 of LoaderOptions(num_workers=4)",
            gain=Gain(before_ms=78.0, after_ms=52.0, basis="simulated"),
        )
        for i, path in enumerate(paths)
    )
    verdict = Verdict(kind="data-bound", sentence="it waits", evidence=("a", "b"), findings=found)
    text = RunReport(stages=(summary(),), verdict=verdict).text(120)
    words = " ".join(text.split())
    assert [line[7:] for line in text.splitlines() if "cause" in line] == ["cause 0", "cause 1"]
    for i in range(2):
        told = f"repair .../cats/{i}.jpg (80 ms), or use 1/2 of LoaderOptions(num_workers=4): 1.50x"
        assert told in words
    assert "2.jpg" not in words
    assert f"{paths[2]}" in json.dumps(RunReport(stages=(), verdict=verdict).as_dict())


def test_a_phase_that_was_not_measured_has_no_row():
    text = run_report(transfer=None).text()
    assert "\n augment " in text
    assert "\n transfer " not in text


def test_a_run_without_steps_can_be_told():
    empty = stage(steps=0)
    text = RunReport(stages=(empty,), verdict=judge(empty)).text()
    assert "too little was measured" in text
    assert "nothing was measured" in RunReport(stages=()).text()


def test_a_prompt_shows_one_line():
    report = run_report()
    assert len(repr(report)) < 120
    assert "data-bound" in repr(report)
    assert repr(report.verdict).startswith("<Verdict: data-bound, ")
    assert repr(report.verdict).endswith(f" [{report.verdict.code}]>")
    assert len(repr(report.verdict)) < 160
    (first, *_) = report.stages
    assert repr(first).startswith(f"<StageSummary: train {first.steps} steps in ")
    assert len(repr(first)) < 100


def test_a_report_of_a_run_that_goes_on_says_so_everywhere():
    report = replace(run_report(), ended=False)
    assert report.as_dict()["ended"] is False
    assert " so far" in report.text().splitlines()[0]
    assert " so far" in repr(report)
    assert " so far" not in run_report().text()

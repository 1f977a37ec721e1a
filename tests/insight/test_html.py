"""The page holds what was measured, opens without a network, and runs nothing."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from insight.made_up import history_of, timing
from verdicts.known import judge

from lightning_fastdata.insight.html import report_html, timeline_chart
from lightning_fastdata.insight.ranks import RankTiming
from lightning_fastdata.insight.report import RunReport
from lightning_fastdata.insight.steps import StepHistory, StepTiming
from lightning_fastdata.insight.waits import OperationShare, SlowSample, WaitCauses, WaitParts

HOSTILE = """/data/<script>alert(1)</script>"'&.jpg"""


class Page(HTMLParser):
    """Elements with their attributes, and the text that is seen."""

    VOID = frozenset(("meta", "rect", "line", "path"))

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID or (tag == "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in self.VOID and tag not in self.open:
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def history(stalls=(30.0, 34.0) * 10, transfer_ms=1.1):
    known = {"transfer_ms": transfer_ms}
    return history_of(
        *(timing(i, ms, 40.0, cold=i % 10 == 0, **known) for i, ms in enumerate(stalls))
    )


def causes(path="photos/7.jpg", name="Resize"):
    return WaitCauses(
        batches=18,
        wait=WaitParts(**{f.name: 1.0 + i for i, f in enumerate(dataclasses.fields(WaitParts))}),
        slow_samples=(SlowSample(index=7, ms=80.0, typical_ms=4.0, path=path),),
        operations=(OperationShare(name=name, share=0.6),),
    )


def report(steps=None, **facts):
    steps = history() if steps is None else steps
    train = dataclasses.replace(steps.summarize("train", duration_s=9.0), causes=causes(**facts))
    val = steps.summarize("val", duration_s=2.0)
    return RunReport(
        stages=(train, val),
        verdict=judge(train),
        recent={"train": steps.newest()},
        notes=("Page-locked memory was refused.",),
        versions={"torch": "2.15.0"},
        machine={"usable_cpus": 8},
    )


def test_the_page_holds_verdict_findings_phases_causes_notes_and_machine():
    run = report()
    text = Page(report_html(run)).text
    for said in (
        run.verdict.kind,
        run.verdict.sentence,
        *(found.remedy for found in run.verdict.findings),
        "train · 20 steps in 9.0 s",
        "newest 20 steps",
        "reading and transforming samples, on a CPU",
        "photos/7.jpg",
        "Resize 60%",
        "val 20 2.0 s",
        "Page-locked memory was refused.",
        "torch 2.15.0",
        "usable cpus 8",
    ):
        assert said in text, said


def test_nothing_is_fetched_and_no_script_can_run():
    elements = Page(report_html(report())).elements
    assert not {tag for tag, _ in elements} & {"script", "link", "img", "iframe", "object", "base"}
    assert not [name for _, attrs in elements for name in attrs if name.startswith("on")]
    assert not [name for _, attrs in elements for name in attrs if name == "src"]
    assert not [name for _, attrs in elements for name in attrs if name == "href"]
    (policy,) = [a["content"] for _, a in elements if a.get("http-equiv")]
    assert policy.startswith("default-src 'none'")
    assert "url(" not in report_html(report())


def test_names_of_files_and_classes_are_shown_and_do_not_run():
    page = Page(report_html(report(path=HOSTILE, name="</table><script>x</script>")))
    assert "script" not in {tag for tag, _ in page.elements}
    assert HOSTILE in page.text
    assert "</table><script>x</script>" in page.text


def test_the_chart_has_a_column_with_its_figures_for_each_step():
    chart = ElementTree.fromstring(timeline_chart(history().newest()))
    titles = [title.text.splitlines() for title in chart.iter("title")]
    assert len(titles) == 20
    assert titles[1] == ["step 1", "75.1 ms in all", "wait 34.0 ms", "transfer 1.1 ms",
                         "compute 40.0 ms"]  # fmt: skip
    assert titles[10][0] == "step 10, first of its epoch"
    epochs = [line.get("x1") for line in chart.iter("line") if line.get("class") == "epoch"]
    assert epochs == ["10"]


@pytest.mark.parametrize(
    "steps",
    [
        StepHistory(),
        history(stalls=[5.0]),
        history(stalls=[0.0] * 6, transfer_ms=None),
        history(stalls=[1.0] * 50 + [9000.0]),
    ],
    ids=["none", "one", "no waiting", "a spike"],
)
def test_any_run_can_be_shown(steps):
    assert Page(report_html(report(steps))).text


def test_steps_that_were_not_timed_leave_a_gap():
    steps = history()
    steps.append(StepTiming(step=20, samples=64, cold=False, wait_ms=3.0))
    titles = [t.text for t in ElementTree.fromstring(timeline_chart(steps.newest())).iter("title")]
    assert titles[-1] == "step 20\nnot timed"
    only = history_of(StepTiming(step=0, samples=64, cold=True, wait_ms=3.0))
    assert timeline_chart(only.newest()) is None


def test_a_run_that_goes_on_and_a_report_without_steps_or_with_ranks_can_be_shown():
    assert " so far" in report_html(dataclasses.replace(report(), ended=False))
    assert " so far" not in report_html(report())
    assert "nothing was measured" in Page(report_html(RunReport(stages=()))).text
    rank = RankTiming(
        rank=0, host="a", steps=9, step_ms=70.0, wait_ms=1.0, compute_ms=60.0, reason="storage"
    )
    told = dataclasses.replace(report(), ranks=(rank,))
    assert (
        "Ranks rank host step ms stall wait compute most of its waits 0 a 70.0 - 1.0 60.0 storage"
        in Page(report_html(told)).text
    )


def test_what_waiting_costs_is_told_of_devices_that_do_not_load():
    run = report()
    free = f"{run.stages[0].samples_per_s_if_data_were_free:.0f} if data were free"
    assert free not in Page(report_html(run)).text  # a CPU may load, too
    on_gpu = dataclasses.replace(run.stages[0], device="cuda"), run.stages[1]
    page = report_html(dataclasses.replace(run, stages=on_gpu, device_minutes_waited=75.3))
    assert free in Page(page).text
    assert "75.3 GPU minutes waited" in Page(page).text

"""The callback tells the cause of slow steps, what to change, and what that would gain."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from conformance.pieces import Rows
from conformance.test_causes import Waits, fit, module
from rig.virtual_crew import on_machine
from torch.utils.data import DataLoader

from lightning_fastdata.insight.measure.metrics import TIMED
from lightning_fastdata.plugin.watch.measured_run import RunJudge


@pytest.fixture(autouse=True)
def machine():
    """Let the samples take their time on a virtual machine."""
    with on_machine() as virtual:
        yield virtual


@pytest.mark.cases(1)
@pytest.mark.parametrize("executor", ["torch", "workers"])
def test_reads_that_wait_are_told_apart_with_a_gain_if_they_are_independent(tmp_path, executor):
    report, _ = fit(tmp_path, module(Waits(160, sleep_s=0.01), executor=executor))
    assert report.verdict.kind == "data-bound"
    found = report.verdict.findings[0]
    assert found.code == report.verdict.code == "FD303", report.text()
    assert found.remedy.startswith("LoaderOptions(num_workers=")
    assert found.gain.basis == "independent"
    assert "if the workers share nothing" in " ".join(report.text().split())
    assert found.gain.factor > 1.5
    assert f"{found.gain.factor:.2f}x" in report.text()


def test_a_loader_without_stamps_is_judged_from_outside(tmp_path):
    loader = DataLoader(Waits(32, sleep_s=0.01), batch_size=4)
    report, _ = fit(tmp_path, {"train_dataloaders": loader})
    assert report.verdict.code == "FD101"
    assert report.verdict.findings[0].gain.basis == "floor"


def test_the_json_holds_the_findings_and_the_newest_steps(tmp_path):
    report, _ = fit(tmp_path, module(Waits(160, sleep_s=0.01), executor="workers"))
    read = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    first = read["verdict"]["findings"][0]
    assert {
        "code", "family", "severity", "cause", "remedy", "gain", "leave_alone", "left_out",
    } == set(first)  # fmt: skip
    assert set(first["gain"]) == {"before_ms", "after_ms", "basis", "factor"}
    recent = read["stages"]["train"]["recent"]
    assert set(TIMED) < set(recent)
    assert recent["step"] == list(range(40))
    assert all(value is None or np.isfinite(value) for value in recent["wait_ms"])


def test_a_healthy_run_has_nothing_to_try(tmp_path):
    report, _ = fit(tmp_path, module(Rows(64), executor="torch", num_workers=0))
    codes = {found.code for found in report.verdict.findings}
    assert not codes & {f"FD3{number:02d}" for number in range(2, 10)} or (
        report.stages[0].stall_share > 0.03
    )


def test_verdicts_take_no_more_than_a_hundredth_of_a_run():
    now = [0.0]
    judge = RunJudge(SimpleNamespace(), SimpleNamespace(), clock_s=lambda: now[0])
    assert judge.affordable
    with judge.spending():
        now[0] += 2.0
    assert not judge.affordable
    now[0] = 399.0
    assert not judge.affordable
    now[0] = 401.0
    assert judge.affordable

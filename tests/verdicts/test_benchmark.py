"""The benchmark of verdicts counts what it says it counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from misses import each

# At the end, so that its verdicts.py does not hide this package.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from trainings.followed import predicted, setting_of
from trainings.parts import Accepted, Healthy
from trainings.registry import TRAININGS
from trainings.tools import Opinion, simple_profiler, told

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "verdicts.py"


def verdict(*, kind="data-bound", code="FD303", severity="high", cause="reading", remedy="more"):
    first = {"code": code, "severity": severity, "cause": cause, "remedy": remedy}
    return {"kind": kind, "findings": [first]}


def test_there_are_as_many_trainings_as_the_documentation_says():
    ill = [each for each in TRAININGS.values() if not isinstance(each.accepted, Healthy)]
    causes = Counter(each.cause for each in ill)
    assert len(ill) >= 60
    assert sum(count >= 2 for count in causes.values()) >= 30
    assert len(TRAININGS) - len(ill) >= 20


def test_an_answer_is_right_if_kind_and_code_and_words_are():
    accepted = Accepted(codes=("FD303", "FD304"), words=("num_workers", "unlabelled"))
    assert accepted.is_right(verdict(remedy="num_workers=4"))
    assert accepted.is_right(verdict(code="FD304", cause="unlabelled: reading"))
    assert not accepted.is_right(verdict())
    assert not accepted.is_right(verdict(code="FD305", remedy="num_workers=4"))
    assert not accepted.is_right(verdict(kind="balanced", remedy="num_workers=4"))
    assert replace(accepted, words=()).is_right(verdict())


def test_of_a_healthy_training_data_is_not_blamed_and_nothing_severe():
    assert Healthy().is_right(verdict(kind="compute-bound", code="FD319", severity="fine"))
    assert Healthy().is_right(verdict(kind="balanced", severity="moderate"))
    assert not Healthy().is_right(verdict(kind="balanced"))
    assert not Healthy().is_right(verdict(severity="moderate"))


@each(
    ("remedy", "changed"),
    [
        ("LoaderOptions(num_workers=6)", {"num_workers": 6}),
        (
            "LoaderOptions(prefetch_factor=9, in_order=False), or repair or cache these samples: 7",
            {"prefetch_factor": 9, "in_order": False},
        ),
        ("LoaderOptions(executor='workers')", {"executor": "workers"}),
        ("num_workers 0 -> 2  (2 CPUs are usable)", {"num_workers": 2}),
        # These ask for more than a setting.
        ("LoaderOptions(pin_memory=True), and send uint8 and normalize on the device", {}),
        ("leave out collate_fn, with LoaderOptions(executor='workers')", {}),
        ("", {}),
    ],
)
def test_only_what_is_a_setting_is_followed(remedy, changed):
    assert setting_of(remedy) == changed


def report(step_ms, wall_ms, steps=100):
    wall = {"total_s": 1 + wall_ms * steps / 1e3, "parts_s": {"setup": 1.0}, "steps": steps}
    return {"stages": {"train": {"step": {"mean_ms": step_ms}}}, "wall": wall}


def test_a_prediction_is_held_against_what_it_was_about():
    before, after = report(10.0, 40.0), report(9.0, 20.0)
    gain = {"before_ms": 39.0, "after_ms": 10.0, "basis": "floor"}
    assert predicted(gain, before, after).measured_ms == pytest.approx(20.0)
    gain = {"before_ms": 10.5, "after_ms": 9.5, "basis": "simulated"}
    assert predicted(gain, before, after).measured_ms == pytest.approx(9.0)


@each(
    ("basis", "measured_ms", "holds"),
    [
        ("floor", 20.0, True),
        ("independent", 9.1, True),
        ("independent", 8.9, False),
        ("simulated", 10.9, True),
        ("simulated", 20.0, False),
        ("measured", 8.5, False),
    ],
)
def test_a_bound_may_be_missed_upwards_alone(basis, measured_ms, holds):
    gain = {"before_ms": 30.0, "after_ms": 10.0, "basis": basis}
    assert predicted(gain, report(30.0, 90.0), report(measured_ms, 90.0)).holds is holds


def test_other_tools_tell_a_cause_if_they_say_so_of_no_other():
    said = [
        Opinion(cause=cause, right=right, verdict=verdict)
        for cause, right, verdict in [
            ("storage", True, "next (80% of the epochs)"),
            ("collation", True, "next (70% of the epochs)"),
            ("callback", True, "Plotter (20% of the epochs)"),
            ("callback", True, "Plotter (40% of the epochs)"),
            ("logger", False, "step (90% of the epochs)"),
        ]
    ]
    assert told(said) == 2
    seconds = {"run_training_epoch": 10.0, "[_TrainingEpochLoop].train_dataloader_next": 6.0}
    assert simple_profiler(seconds)[0] == "data"
    assert simple_profiler({**seconds, "[Callback]Plotter.on_train_batch_end": 7.0}) == (
        "between steps",
        "[Callback]Plotter.on_train_batch_end (70% of the epochs)",
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a busy machine may be slow
def test_two_trainings_are_fitted_judged_and_followed(tmp_path):
    names = ["latency, no workers: 2 ms, torch's DataLoader", "healthy: 5 ms, tensors"]
    file = tmp_path / "verdicts.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--once", "--only", *names, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["results"]
    assert {row["name"] for row in results["runs"]} == set(names)
    for row in results["runs"]:
        assert "error" not in row
        assert row["same_report"]
        assert row["found"] == [each["code"] for each in row["report"]["verdict"]["findings"]]
    assert results["summary"]["trainings"] == results["summary"]["healthy"] == 1
    for row in results["followed"]:
        assert set(row["changed"]) == {"num_workers"}
        assert row["measured_ms"] > 0
    assert names[0] in done.stdout

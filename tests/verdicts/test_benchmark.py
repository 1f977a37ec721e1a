"""The benchmark of verdicts counts what it says it counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from misses import each

# At the end, so that its verdicts.py does not hide this package.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from trainings.followed import setting_of
from trainings.parts import Healthy
from trainings.registry import TRAININGS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "verdicts.py"


def test_there_are_as_many_trainings_as_the_documentation_says():
    ill = [each for each in TRAININGS.values() if not isinstance(each.accepted, Healthy)]
    causes = Counter(each.cause for each in ill)
    assert len(ill) >= 60
    assert sum(count >= 2 for count in causes.values()) >= 30
    assert len(TRAININGS) - len(ill) >= 20


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

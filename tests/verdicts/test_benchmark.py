"""The benchmark of verdicts counts what it says it counts."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from misses import each

# At the end, so that its verdicts.py does not hide this package.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from trainings.followed import setting_of
from trainings.parts import Healthy
from trainings.registry import TRAININGS


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
        ("LoaderOptions(persistent_workers=True), if it stays", {"persistent_workers": True}),
        ("num_workers 0 -> 12 for the validation loader", {}),
        # These ask for more than a setting.
        ("LoaderOptions(pin_memory=True), and send uint8 and normalize on the device", {}),
        ("leave out collate_fn, with LoaderOptions(executor='workers')", {}),
        ("", {}),
    ],
)
def test_only_what_is_a_setting_is_followed(remedy, changed):
    assert setting_of(remedy) == changed

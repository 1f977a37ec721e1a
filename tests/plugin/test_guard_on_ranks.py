"""The batch-size guard where two ranks train together: they decide the same, by the smaller one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conformance.forked_ranks import launched
from misses import each

PROGRAM = Path(__file__).with_name("guard_on_ranks.py")
RUNS = {
    "roomy": {"memory": [64, 64]},
    "different": {"memory": [64, 10]},
    "refused": {"memory": [1, 64], "norm": False},
    "broken": {"memory": [64, 64], "breaks": True},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guard")
    launched(PROGRAM, str(folder), json.dumps(RUNS))
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]
        for name in RUNS
    }


@each("name", ["roomy", "different", "refused"])
def test_ranks_decide_the_same_and_train_the_same(found, name):
    one, other = found[name]
    for what in ("action", "batch_size", "accumulate", "steps", "weights"):
        assert one[what] == pytest.approx(other[what]), what


def test_a_batch_that_fits_everywhere_stays(found):
    one = found["roomy"][0]
    assert (one["action"], one["batch_size"], one["accumulate"]) == ("keep", 16, 1)
    assert one["steps"] == 4  # 128 rows in batches of 16 on two ranks
    assert one["changed"]


def test_the_rank_with_the_least_memory_decides(found):
    for rank in found["different"]:
        assert (rank["action"], rank["batch_size"], rank["accumulate"]) == ("accumulate", 8, 2)
        assert rank["trained_on"] == 8
        assert rank["steps"] == 4
        assert rank["error"] == ""


def test_where_one_rank_has_no_room_for_one_row_the_run_ends_on_each(found):
    for rank in found["refused"]:
        assert rank["error"].startswith("BatchSizeError")
        assert rank["steps"] == 0


def test_an_error_on_one_rank_ends_the_trial_on_all(found):
    assert "a label is missing" in found["broken"][1]["error"]
    assert "failed on another rank" in found["broken"][0]["error"]

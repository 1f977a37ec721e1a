"""A training that is preempted again and again takes the steps of one that is left alone."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from conformance.forked_ranks import launched
from processes import until
from resilience.runs import lines
from thoroughness import LONG

pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(__file__).with_name("preempted.py")
SIGNALS = 20 if LONG else 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preempted")
    names = shared_memory()
    launched(PROGRAM, str(folder), "4", str(SIGNALS))
    # Other programs have names there too, for as long as they open what they share.
    until(lambda: not shared_memory() - names)
    return folder


def shared_memory():
    return {path for path in Path("/dev/shm").iterdir() if path.is_file()}


def told(folder, run):
    return [json.loads(line) for line in lines(folder / run / "told")]


def takes(folder, run):
    """Step -> each time that it was taken, as the samples of all ranks in order."""
    found = defaultdict(list)
    for number, life in enumerate(told(folder, run)):
        by_rank = [folder / run / f"life-{number}-{rank}" for rank in range(life.get("ranks", 1))]
        records = [[line.split(" ") for line in lines(file)] for file in by_rank]
        # A rank may be killed before it writes down what the other has written.
        for steps in zip(*records, strict=False):
            assert len({step[0] for step in steps}) == 1
            samples = sorted(sample for step in steps for sample in step[1:])
            found[int(steps[0][0])].append(samples)
    return found


def test_the_straight_run_takes_each_sample_once(folder):
    straight = takes(folder, "straight")
    samples = [sample.split(":")[0] for (step,) in straight.values() for sample in step]
    assert len(straight) >= 4 * SIGNALS
    assert len(set(samples)) == len(samples) == 8 * len(straight)


@pytest.mark.parametrize("run", ["lives", "requeued"])
def test_each_step_is_that_of_the_straight_run_however_often_it_is_taken(folder, run):
    straight, preempted = takes(folder, "straight"), takes(folder, run)
    assert sorted(preempted) == sorted(straight)
    for step, samples in straight.items():
        assert all(taken == samples[0] for taken in preempted[step]), step


def test_signals_ended_lives_and_left_nothing(folder):
    *preempted, last = told(folder, "lives")
    assert last["codes"] == [0]
    assert {life["ranks"] for life in preempted} == {1, 2}
    for life in preempted:
        assert life["left"] == 0, life
        assert any(life["codes"]), life
    assert sum(life["took"] > 0 for life in preempted) >= SIGNALS // 2


def test_slurm_is_asked_and_the_next_life_goes_on_by_itself(folder):
    assert [life["codes"] for life in told(folder, "requeued")] == [[-9], [-9], [0]]
    assert not any(life["left"] for life in told(folder, "requeued"))
    assert lines(folder / "requeued" / "asked") == ["requeue 7"] * 2
    # It took no step of those before the file again.
    second = int(lines(folder / "requeued" / "life-1-0")[0].split(" ")[0])
    assert second >= 4

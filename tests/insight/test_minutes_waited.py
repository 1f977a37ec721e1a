"""How long devices waited for data is the sum of their stalls, and people are told of GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from insight.made_up import history_of, stage, timing
from thoroughness import max_examples
from virtual_time import virtual_time

from lightning_fastdata import StepTimer
from lightning_fastdata.insight.report import RunReport
from lightning_fastdata.insight.steps import StepHistory


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 1)), min_size=1, max_size=50))
@max_examples(60)
def test_stalls_add_up_with_and_without_first_steps(steps):
    history = StepHistory(window=4)
    for i, (stall, cold) in enumerate(steps):
        history.append(timing(i, stall, cold=cold))
    assert history.stalled_s() == pytest.approx(sum(stall for stall, _ in steps) / 1e3)
    warm = sum(stall for stall, cold in steps if cold != 1)
    assert history.stalled_s(cold=False) == pytest.approx(warm / 1e3)


def test_a_step_without_figures_counts_as_the_others():
    steps = [timing(number, stall) for number, stall in enumerate((10.0, None, 30.0))]
    assert history_of(*steps).stalled_s() == pytest.approx(0.06)


def report(device, minutes):
    return RunReport(stages=(stage(1.0, device=device),), device_minutes_waited=minutes)


def test_people_are_told_once_how_long_gpus_waited():
    found = report("cuda", 75.26)
    assert found.text().count("75.3 GPU minutes waited") == 1
    for other in (report("cpu", 75.26), report("cuda", 0.0), replace(found, stages=())):
        assert "GPU minutes" not in other.text()
    assert report("cpu", 75.26).as_dict()["device_minutes_waited"] == 75.26


def test_a_plain_loop_waited_as_long_as_its_batches_took():
    with virtual_time() as virtual:

        class Loader:
            def __iter__(self):
                for i in range(3):
                    virtual.sleep(6)
                    yield i

        timer = StepTimer("cpu")
        assert timer.report().device_minutes_waited is None
        for stage in ("train", "val", "train", "test"):
            for _ in timer.batches(Loader(), stage):
                virtual.sleep(1)
    # The stage "test" is no part of training.
    assert timer.report().device_minutes_waited == pytest.approx(3 * 3 * 6 / 60)

"""What waiting costs is arithmetic: hours of devices, times a price, times a power."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata import StepTimer
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host.usage import read_gpu_watts
from lightning_fastdata.insight.measure.metrics import StepHistory, StepTiming
from lightning_fastdata.insight.measure.timeline import HostClock
from lightning_fastdata.insight.measure.waiting_cost import (
    GpuRates,
    WaitingCost,
    amount_text,
    cost_text,
    waiting_cost,
)
from lightning_fastdata.insight.report.html import report_html
from lightning_fastdata.insight.report.run_report import RunReport

PRICE, WATTS = "LIGHTNING_FASTDATA_COST_PER_GPU_HOUR", "LIGHTNING_FASTDATA_GPU_WATTS"
positive = st.floats(1e-3, 1e6)


def cost(price=2.5, watts=400.0, **known):
    given_ = {
        "device": "cuda", "devices": 8, "idle_s": 900.0, "elapsed_s": 3600.0,
        "idle_per_epoch_s": 90.0,
    }  # fmt: skip
    rates = GpuRates(cost_per_gpu_hour=price, gpu_watts=watts)
    return waiting_cost(rates, **{**given_, **known})


def test_a_quarter_of_eight_gpus():
    found = cost()
    assert found.idle_share == 0.25
    assert found.so_far.device_hours == pytest.approx(8 * 0.25)
    assert found.per_epoch.device_hours == pytest.approx(8 * 90 / 3600)
    assert found.per_day.device_hours == pytest.approx(48)
    assert found.per_day.money == pytest.approx(120)
    assert found.per_day.energy_kwh == pytest.approx(19.2)
    assert cost_text(found) == (
        "waiting for data idles 48 GPU hours a day (120 at 2.5 per GPU hour, 19.2 kWh at 400 W), "
        "0.2 an epoch (0.5, 0.08 kWh)"
    )


@given(
    devices=st.integers(1, 10_000), share=st.floats(0, 1), elapsed_s=positive, price=positive,
    watts=positive, epochs=st.integers(1, 1000),
)  # fmt: skip
@max_examples(200)
def test_days_hold_what_they_are_made_of(devices, share, elapsed_s, price, watts, epochs):
    idle_s = share * elapsed_s
    found = cost(
        price, watts, devices=devices, idle_s=idle_s, elapsed_s=elapsed_s,
        idle_per_epoch_s=idle_s / epochs,
    )  # fmt: skip
    days = elapsed_s / 86400
    for loss in (found.so_far, found.per_epoch, found.per_day):
        assert loss.money == pytest.approx(loss.device_hours * price)
        assert loss.energy_kwh * 1e3 == pytest.approx(loss.device_hours * watts)
    assert 0 <= found.per_day.device_hours <= 24 * devices * (1 + 1e-9)
    assert found.per_day.device_hours * days == pytest.approx(found.so_far.device_hours)
    assert found.per_epoch.device_hours * epochs == pytest.approx(found.so_far.device_hours)
    assert found.so_far.device_hours * 3600 == pytest.approx(devices * idle_s)
    assert WaitingCost.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    assert bool(cost_text(found)) == (found.idle_share >= 0.01)


def test_what_is_not_known_is_absent():
    found = cost(price=None, watts=None, idle_per_epoch_s=None)
    assert cost_text(found) == "waiting for data idles 48 GPU hours a day"
    assert set(found.scalars()) == {
        "data_cost/device_hours_so_far",
        "data_cost/device_hours_per_day",
    }
    assert WaitingCost.from_dict(found.as_dict()) == found
    assert cost(elapsed_s=0.0) is None


def test_cpus_cost_nothing_unless_somebody_says_so():
    assert cost(None, None, device="cpu") is None
    assert "GPU" not in cost_text(cost(device="cpu"))
    assert cost_text(cost(2.5, None, device="cpu", devices=1, idle_per_epoch_s=None)) == (
        "waiting for data takes 6 hours a day (15 at 2.5 per hour)"
    )


def test_people_are_not_told_of_less_than_a_hundredth():
    for share, told in ((0.0099, False), (0.011, True)):
        found = cost(idle_s=share * 3600)
        history = StepHistory()
        history.append(StepTiming(step=0, samples=1, cold=0, stall_ms=1.0, step_ms=2.0))
        stage = history.summarize("train", duration_s=1.0)
        report = RunReport(stages=(stage,), waiting_cost=found)
        assert ("cost" in report.text()) == told
        assert ("What waiting for data costs" in report_html(report.as_dict())) == told
        assert report.as_dict()["waiting_cost"]["devices"] == 8
    unknown = replace(report, waiting_cost=None)
    assert "cost" not in unknown.text()


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), True, "2.5", [1]])
def test_a_rate_that_is_no_number_above_0_is_an_error(bad):
    for name in ("cost_per_gpu_hour", "gpu_watts"):
        with pytest.raises(OptionsError, match=f"{name} is .*; allowed are None and numbers above"):
            StepTimer("cpu", **{name: bad})


def test_the_environment_is_asked_for_what_was_not_said():
    environment = {PRICE: " 2.5 ", WATTS: "400"}
    assert GpuRates.given(None, None, {}) == GpuRates()
    assert GpuRates.given(None, None, {PRICE: "", WATTS: " "}) == GpuRates()
    assert GpuRates.given(None, None, environment) == GpuRates(
        cost_per_gpu_hour=2.5, gpu_watts=400.0
    )
    assert GpuRates.given(np.float32(4), 300, environment) == GpuRates(
        cost_per_gpu_hour=4.0, gpu_watts=300.0
    )
    for text in ("2,5", "-1", "nan"):
        with pytest.raises(OptionsError, match=f"{PRICE} is .*; allowed are"):
            GpuRates.given(None, None, {PRICE: text})


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 2)), min_size=1, max_size=50))
@max_examples(60)
def test_stalls_add_up_with_and_without_first_steps(steps):
    history = StepHistory(window=4)
    for i, (stall, cold) in enumerate(steps):
        history.append(StepTiming(step=i, samples=1, cold=cold, stall_ms=stall, step_ms=stall + 1))
    assert history.stalled_s() == pytest.approx(sum(stall for stall, _ in steps) / 1e3)
    warm = sum(stall for stall, cold in steps if cold != 1)
    assert history.stalled_s(cold=False) == pytest.approx(warm / 1e3)


def test_a_step_without_figures_counts_as_the_others():
    history = StepHistory()
    for i, stall in enumerate((10.0, None, 30.0)):
        history.append(StepTiming(step=i, samples=1, cold=0, stall_ms=stall))
    assert history.stalled_s() == pytest.approx(0.06)


def test_a_plain_loop_is_told_what_it_loses():
    now = [0]

    def read():
        for i in range(3):
            now[0] += 200_000_000
            yield torch.full((2,), float(i))

    class Loader:
        def __len__(self):
            return 3

        def __iter__(self):
            return read()

    timer = StepTimer("cpu", clock=HostClock(lambda: now[0]), cost_per_gpu_hour=3.6)
    for _ in range(2):
        for _ in timer.batches(Loader()):
            now[0] += 1000
    found = timer.report().waiting_cost
    assert (found.device, found.devices) == ("cpu", 1)
    # 0.6 s an epoch at 0.001 a second.
    assert found.per_epoch.money == pytest.approx(0.6e-3)
    assert StepTimer("cpu").report().waiting_cost is None


def test_amounts_are_written_with_three_digits():
    written = [amount_text(each) for each in (0, 1e-6, 0.01234, 1.234, 99.96, 12345.6)]
    assert written == ["0", "below 0.001", "0.0123", "1.23", "100", "12,346"]


def test_a_cpu_has_no_power_to_be_read():
    assert read_gpu_watts(torch.device("cpu")) is None

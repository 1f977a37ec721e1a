from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from misses import each

from lightning_fastdata.device.backend import DeviceUsage
from lightning_fastdata.host.cpu import CpuThrottling
from lightning_fastdata.host.usage import HostUsage
from lightning_fastdata.insight.measure import host_metrics
from lightning_fastdata.insight.measure.host_metrics import (
    HostMeter,
    MachineSeen,
    full_in_s,
)


def usage(at_s, *, periods=None, throttled=0, held_us=0):
    throttling = None
    if periods is not None:
        throttling = CpuThrottling(
            periods=periods, throttled_periods=throttled, throttled_us=held_us
        )
    return HostUsage(at_s=at_s, workers=2, throttling=throttling)


def device(retries=0, never_used=1, total=4):
    return DeviceUsage(
        peak_bytes=3 * 2**20, never_used_bytes=never_used, total_bytes=total, alloc_retries=retries
    )


def test_a_quota_that_was_used_up_is_told():
    before = usage(10, periods=100, throttled=7)
    after = usage(12, periods=120, throttled=12, held_us=3_000_000)
    assert MachineSeen.between(before, after) == MachineSeen(
        throttled_share=0.25, throttled_cpus=1.5
    )


def test_what_nobody_tells_is_not_known():
    assert MachineSeen.between(usage(0), usage(1)) == MachineSeen()


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.floats(0, 1e6))
def test_no_pair_of_readings_leaves_the_scale(begin, end, seconds):
    before = usage(0, periods=begin, throttled=end)
    after = usage(seconds, periods=end, throttled=begin)
    share = MachineSeen.between(before, after).throttled_share
    assert share is None or 0 <= share <= 1


def test_what_the_device_tells_is_since_the_begin():
    found = MachineSeen.between(usage(0), usage(1), device(retries=2), device(retries=5))
    assert found == MachineSeen(alloc_retries=3, device_headroom_share=0.25)


MIB = 2**20


def readings(sizes_mib):
    return [(10.0 * number, int(size * MIB)) for number, size in enumerate(sizes_mib)]


@given(st.floats(0.5, 50), st.lists(st.floats(0, 400), min_size=30, max_size=60))
def test_memory_that_grows_from_step_to_step_is_full_when_it_says(step_mib, batches_mib):
    """Above what is held there are batches of any size, now and then none."""
    above = [0 if number % 3 == 0 else each for number, each in enumerate(batches_mib)]
    held = readings(100 + number * step_mib + each for number, each in enumerate(above))
    found = full_in_s(held, room_bytes=1000 * MIB)
    assert found == pytest.approx(10.0 * 1000 / step_mib, rel=0.35)


@each(
    "sizes",
    [
        [100] * 40,
        [100, 400] * 20,
        [100] * 3 + [300] * 37,  # the optimizer's state
        [100] * 15 + [300] * 25,  # a cache that was filled once
        [min(100 + 10 * number, 250) for number in range(60)],  # it levels off
        [500 - number for number in range(40)],
        [100 + number for number in range(9)],  # too few
        [],
    ],
)
def test_memory_that_is_kept_once_is_no_growth(sizes):
    assert full_in_s(readings(sizes), room_bytes=1000 * MIB) is None


def test_a_meter_of_a_device_that_fills_up_says_so_and_keeps_few_readings(monkeypatch):
    now = iter(range(10**6))
    held = iter(range(10 * MIB, 10**15, MIB))

    def read(_):
        found = device(never_used=100 * MIB)
        return replace(found, held_bytes=next(held))

    monkeypatch.setattr(host_metrics, "read_device_usage", read)
    meter = HostMeter(torch.device("cpu"), clock_s=lambda: float(next(now)), workers=list)
    for _ in range(1000):
        meter.step_ended()
    found = meter.seen().device_full_in_s
    assert found == pytest.approx(100 * (next(now) / 1001), rel=0.1)
    assert len(meter._held) <= 300

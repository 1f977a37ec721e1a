"""What a training takes of its machine: what it saw, read seldom enough."""

from __future__ import annotations

import gc
import sys

import pytest
from conformance.pieces import Linear, Rows, make_trainer
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_fastdata import DataThroughputCallback
from lightning_fastdata.host.cpu import CpuThrottling, HostUsage
from lightning_fastdata.insight.measure import host_metrics
from lightning_fastdata.insight.measure.host_metrics import HostMeter, MachineSeen
from lightning_fastdata.insight.memory import MemoryMeter

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux' /proc")


def usage(at_s, *, periods=None, throttled=0, held_us=0):
    throttling = None
    if periods is not None:
        throttling = CpuThrottling(
            periods=periods, throttled_periods=throttled, throttled_us=held_us
        )
    return HostUsage(at_s=at_s, throttling=throttling)


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


@linux
def test_memory_is_added_up_again_only_after_a_thousand_times_as_long(virtual):
    read = []

    def workers():
        virtual.sleep(0.005)
        read.append(virtual.monotonic_ns())
        return []

    meter = HostMeter(workers=workers)
    meter.read_memory()
    made = len(read)
    for later, rest_s in ((0, 4), (1, 4)):
        virtual.sleep(rest_s)
        meter.read_memory()
        assert len(read) == made + later
    meter.read_memory(at_once=True)
    assert len(read) == made + 2


@linux
def test_pages_are_read_at_the_end_of_an_epoch_while_its_workers_live(tmp_path, monkeypatch):
    seen = []

    def read(_, workers):
        seen.append((trainer.current_epoch, len(workers)))

    monkeypatch.setattr(MemoryMeter, "read", read)
    monkeypatch.setattr(host_metrics, "_REST", 0)
    gc.collect()
    loader = DataLoader(Rows(8), 4, num_workers=1)
    callback = DataThroughputCallback(summary=False, report=False)
    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=[callback])
    trainer.fit(Linear(), loader)
    assert seen[:2] == [(0, 1), (1, 1)]

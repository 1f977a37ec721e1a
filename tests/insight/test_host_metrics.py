"""What a training takes of its machine: what it saw, read seldom enough."""

from __future__ import annotations

import gc
import sys

import pytest
from conformance.pieces import Linear, Rows, make_trainer
from torch.utils.data import DataLoader

from lightning_fastdata import DataThroughputCallback
from lightning_fastdata.host.cpu import CpuThrottling
from lightning_fastdata.insight import machine
from lightning_fastdata.insight.machine import HostMeter, MachineSeen, MemoryMeter

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux' /proc")


def usage(at_s, held_us=None):
    held = None if held_us is None else CpuThrottling(9, 1, throttled_us=held_us)
    return at_s, held, None


def test_what_a_quota_held_back_is_told():
    assert MachineSeen.between(usage(10, 0), usage(12, 3_000_000)).throttled_cpus == 1.5
    assert MachineSeen.between(usage(10, 5), usage(12, 0)).throttled_cpus == 0


def test_what_nobody_tells_is_not_known():
    assert MachineSeen.between(usage(0), usage(1)) == MachineSeen()
    assert MachineSeen.between(usage(0, 1), usage(0, 2)) == MachineSeen()


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
    monkeypatch.setattr(machine, "_REST", 0)
    gc.collect()
    loader = DataLoader(Rows(8), 4, num_workers=1)
    callback = DataThroughputCallback(summary=False, report=False)
    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=[callback])
    trainer.fit(Linear(), loader)
    assert seen[:2] == [(0, 1), (1, 1)]

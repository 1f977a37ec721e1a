"""What the training takes of its machine is read seldom enough, and while its workers live."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from conformance.pieces import Linear, Rows, make_trainer
from torch.utils.data import DataLoader

from lightning_fastdata import DataThroughputCallback
from lightning_fastdata.insight.measure import host_metrics
from lightning_fastdata.insight.measure.host_metrics import HostMeter
from lightning_fastdata.insight.memory import MemoryMeter

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux' /proc")
CPU = torch.device("cpu")


class Ticks:
    """A clock that goes on by as much at each look, and by what it is told."""

    def __init__(self, each_s):
        self.now_s = 0.0
        self.each_s = each_s

    def __call__(self):
        self.now_s += self.each_s
        return self.now_s


@linux
def test_memory_is_added_up_again_only_after_a_thousand_times_as_long():
    clock, read = Ticks(each_s=0.0), []

    def workers():
        clock.now_s += 0.005
        read.append(clock.now_s)
        return []

    meter = HostMeter(clock_s=clock, workers=workers)
    meter.read_memory()
    made = len(read)
    clock.now_s += 4
    meter.read_memory()
    assert len(read) == made
    clock.now_s += 4
    meter.read_memory()
    assert len(read) == made + 1
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

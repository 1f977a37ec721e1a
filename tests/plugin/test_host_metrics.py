"""What the training takes of its machine is read at log steps, and seldom enough."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from conformance.pieces import Linear, Rows, make_trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_fastdata import DataThroughputCallback, FastDataLoader
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


def test_a_reading_is_made_again_only_after_a_thousand_times_as_long():
    clock = Ticks(each_s=0.01)
    meter = HostMeter(CPU, clock_s=clock, workers=list)
    assert meter.metrics()["data_workers/active"] == 0
    assert meter.metrics() == {}
    clock.now_s += 10
    assert meter.metrics() == {}
    clock.now_s += 20
    assert meter.metrics()


@linux
def test_memory_is_added_up_again_only_after_a_thousand_times_as_long():
    clock = Ticks(each_s=0.0)
    took_s = iter([0.0, 0.001, 0.01, 0.001, 0.001, 0.01])  # a reading, the memory, a reading, ...

    def workers():
        clock.now_s += next(took_s)
        return []

    meter = HostMeter(CPU, clock_s=clock, workers=workers)
    assert "data_host/pss_mib" in meter.metrics()
    clock.now_s += 5
    found = meter.metrics()
    assert found
    assert "data_host/pss_mib" not in found
    clock.now_s += 5
    assert "data_host/pss_mib" in meter.metrics()


def test_the_share_of_busy_workers_is_logged_if_it_is_known():
    assert HostMeter(CPU, busy_share=lambda: 0.5).metrics()["data_workers/busy_percent"] == 50
    assert "data_workers/busy_percent" not in HostMeter(CPU).metrics()


@linux
def test_pages_are_read_at_the_end_of_an_epoch_while_its_workers_live(tmp_path, monkeypatch):
    seen = []

    def read(_, workers):
        seen.append((trainer.current_epoch, len(workers)))
        return 1

    monkeypatch.setattr(MemoryMeter, "read", read)
    monkeypatch.setattr(host_metrics, "_REST", 0)
    gc.collect()
    loader = DataLoader(Rows(8), 4, num_workers=1)
    callback = DataThroughputCallback(summary=False, report=False)
    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=[callback])
    trainer.fit(Linear(), loader)
    assert seen[:2] == [(0, 1), (1, 1)]


@linux
@pytest.mark.parametrize("executor", ["torch", "workers"])
def test_a_run_logs_its_machine(tmp_path, executor):
    logged = {}
    gc.collect()  # workers of loaders that nobody has any more would count

    class Keeps(CSVLogger):
        def log_metrics(self, metrics, step=None):
            logged.setdefault(step, {}).update(metrics)

    loader = FastDataLoader(Rows(64), 4, num_workers=2, executor=executor)
    callback = DataThroughputCallback(summary=False, report=False, scalars="all", every_n_steps=4)
    trainer = make_trainer(tmp_path, logger=Keeps(tmp_path), callbacks=[callback])
    trainer.fit(Linear(), loader)
    first = logged[3]
    assert {"data_host/pss_mib", "data_host/copied_mib"} <= set(first)
    assert first["data_workers/active"] == 2
    assert 0 <= first["data_workers/busy_percent"] <= 100
    assert callback.report.verdict is not None

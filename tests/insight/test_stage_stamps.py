"""The stamps of a stage belong to its loaders, and go with them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.host import clock
from lightning_fastdata.insight.finding import LoaderFacts
from lightning_fastdata.insight.stage import StageMeter, StageStamps
from lightning_fastdata.stamps.batch_stamps import ReadRates

pytestmark = pytest.mark.usefixtures("virtual")


class Files(Dataset):
    """Samples that have files, of which the last one takes long."""

    def __init__(self, folder, length=24, slow_s=0.1):
        self.samples = [(f"/{folder}/{number}.jpg", 0) for number in range(length)]
        self.slow_s = slow_s

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        clock.sleep(self.slow_s if i == len(self) - 1 else 0.001)
        return torch.zeros(2)


def test_slow_samples_have_the_files_of_their_own_loader():
    stamps = StageStamps()
    how = {"batch_size": 4, "num_workers": 0, "executor": "torch"}
    loaders = [FastDataLoader(Files(folder), **how) for folder in "abc"]
    stamps.watch(loaders[:2])
    list(loaders[0])
    del loaders[0]
    gc.collect()
    stamps.watch(loaders)
    for loader in loaders:
        list(loader)
    # The file of the one that is gone is not known any more.
    paths = {sample.path for sample in stamps.summary().slow_samples}
    assert paths == {"/b/23.jpg", "/c/23.jpg", None}


def test_where_all_steps_are_first_ones_their_causes_are_of_the_whole_wait(virtual):
    loader = FastDataLoader(Files("a", 4, 0.001), batch_size=4, num_workers=0, executor="torch")
    meter = StageMeter("train", torch.device("cpu"))
    meter.stamps.watch([loader])
    for _ in range(6):
        meter.timeline.epoch_began()
        meter.wait_began()
        clock.sleep(0.05)  # as workers start
        next(iter(loader))
        meter.timeline.wait_ended()
        virtual.work(0.01)
        meter.step_ended(4)
    found = meter.summary()
    assert found.cold_wait_ms == pytest.approx(54)
    for causes in (found.causes, meter.evidence(found, LoaderFacts()).causes):
        assert causes.wait.total_ms == pytest.approx(54)
        assert causes.wait.idle_ms == pytest.approx(50)


class Queued(Dataset):
    """Samples for which the reading thread is ready, but has no CPU for a while."""

    def __len__(self):
        return 80

    def __getitem__(self, i):
        clock.sleep(0.001)
        self.clock.queue(0.008)
        return torch.zeros(2)


def step_cpus(dataset, step):
    """Return the CPUs that steps are taken to use; each is done by ``step``, given its number."""
    loader = FastDataLoader(dataset, batch_size=4, num_workers=0, executor="torch")
    meter = StageMeter("train", torch.device("cpu"))
    meter.stamps.watch([loader])
    batches = iter(loader)
    for number in range(len(loader)):
        meter.wait_began()
        next(batches)
        meter.timeline.wait_ended()
        step(number)
        meter.step_ended(4)
    facts = LoaderFacts(num_workers=0, usable_cpus=2)
    return meter.evidence(meter.summary(), facts).setup.step_cpus


def test_what_the_first_step_compiles_is_no_cpu_that_the_others_take(virtual):
    def step(number):
        virtual.work(0.01 if number else 10.0)
        virtual.advance(30_000_000)

    assert step_cpus(Files("a", 80), step) == pytest.approx(0.25)


def test_a_cpu_that_reading_lacked_is_not_taken_off_the_time_of_the_steps(virtual):
    def step(_):
        virtual.work(0.01)
        virtual.advance(10_000_000)
        virtual.queue(0.004)

    dataset = Queued()
    dataset.clock = virtual
    assert step_cpus(dataset, step) == pytest.approx(0.5)


def test_what_ran_before_a_restart_tells_nothing():
    stamps = StageStamps()
    loader = FastDataLoader(Files("a"), batch_size=4, num_workers=0, executor="torch")
    stamps.watch([loader, DataLoader(Files("b"))])
    list(loader)
    loader.records[-1] = loader.records[-1]._replace(rates=ReadRates(2, 100.0, 4, 104.0))
    assert stamps.slowest().rates is not None
    assert "a DataLoader does not tell" in stamps.missing()
    stamps.restart()
    stamps.watch([loader])
    assert stamps.missing() == "executor 'torch' does not tell", "nothing has come yet"
    list(loader)
    assert stamps.missing() is None
    assert stamps.slowest().rates is None
    assert stamps.summary().batches == 5

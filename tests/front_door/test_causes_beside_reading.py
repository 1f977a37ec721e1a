"""Batches that are late for other reasons than reading, in trainings on a virtual machine."""

from __future__ import annotations

import lightning.pytorch as lightning
import pytest
import torch
from rig.machine import VirtualLock, sleep, work
from rig.virtual_crew import on_machine
from torch.utils.data import Dataset, Sampler
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataLoader


@pytest.fixture(autouse=True)
def machine():
    with on_machine() as virtual:
        yield virtual


class Sleeper(lightning.LightningModule):
    """A step that leaves the CPUs alone, as one on a device does."""

    def __init__(self, step_s=0.003):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.step_s = step_s

    def training_step(self, batch, batch_idx):
        sleep(self.step_s)
        return (self.weight * 1.0).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Cheap(Dataset):
    def __len__(self):
        return 8 * 120

    def __getitem__(self, index):
        return torch.zeros(4)


class SlowSampler(Sampler):
    def __iter__(self):
        for number in range(8 * 120):
            sleep(0.001)
            yield number

    def __len__(self):
        return 8 * 120


class Words:
    """What Lightning does not look into when it moves batches, and takes some time to unpickle."""

    def __reduce__(self):
        return unpickled, ()


def unpickled():
    work(0.004)
    return Words()


class Locked(Cheap):
    def __init__(self):
        self.lock = VirtualLock()

    def __getitem__(self, index):
        with self.lock:
            sleep(0.002)
        return torch.zeros(4)


def as_words(samples):
    return Words()


def verdict_of(loader, folder, epochs=1):
    callback = DataThroughputCallback(summary=False)
    trainer = quiet_trainer(folder, max_epochs=epochs, callbacks=[callback])
    trainer.fit(Sleeper(), loader)
    return callback.report.verdict


@pytest.mark.parametrize("executor", ["workers", "inline"])
def test_a_slow_sampler_is_named(executor, tmp_path):
    loader = FastDataLoader(
        Cheap(), batch_size=8, sampler=SlowSampler(), executor=executor,
        num_workers=0 if executor == "inline" else 1,
    )  # fmt: skip
    found = verdict_of(loader, tmp_path).findings[0]
    assert found.code == "FD323"
    assert "sampler" in found.cause


def test_unpickling_thousands_of_objects_is_named(tmp_path):
    loader = FastDataLoader(
        Cheap(), batch_size=8, collate_fn=as_words, executor="workers", num_workers=1
    )
    assert verdict_of(loader, tmp_path).findings[0].code == "FD324"


def test_a_lock_that_workers_share_is_no_reason_for_more_of_them(tmp_path):
    loader = FastDataLoader(Locked(), batch_size=8, num_workers=2, executor="workers")
    found = verdict_of(loader, tmp_path, epochs=2).findings[0]
    assert found.code == "FD304"
    assert "num_workers" not in found.remedy

"""Batches that are late for other reasons than reading, in real trainings."""

from __future__ import annotations

import multiprocessing
import time

import lightning.pytorch as lightning
import pytest
import torch
from torch.utils.data import Dataset, Sampler

from lightning_fastdata import DataThroughputCallback, FastDataLoader

# What is told of real times is wrong now and then where other programs take the CPUs meanwhile.
pytestmark = pytest.mark.flaky(reruns=2)


class Sleeper(lightning.LightningModule):
    """A step that leaves the CPUs alone, as one on a device does."""

    def __init__(self, step_s=0.003):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.step_s = step_s

    def training_step(self, batch, batch_idx):
        time.sleep(self.step_s)
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
            time.sleep(0.001)
            yield number

    def __len__(self):
        return 8 * 120


class Words:
    """What Lightning does not look into when it moves batches."""

    def __init__(self, words):
        self.words = words


class ManyObjects(Cheap):
    def __init__(self):
        self.words = [{"word": str(number), "at": [number, number]} for number in range(1000)]

    def __getitem__(self, index):
        return self.words


class Locked(Cheap):
    def __init__(self):
        self.lock = multiprocessing.get_context("fork").Lock()

    def __getitem__(self, index):
        with self.lock:
            time.sleep(0.002)
        return torch.zeros(4)


def as_it_is(samples):
    return Words([list(map(dict, sample)) for sample in samples])


def verdict_of(loader, folder, epochs=1):
    callback = DataThroughputCallback(summary=False)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        default_root_dir=folder,
    )
    trainer.fit(Sleeper(), loader)
    return callback.report.verdict


@pytest.mark.cases(1)
@pytest.mark.parametrize("executor", ["torch", "workers", "inline"])
def test_a_slow_sampler_is_named(executor, tmp_path):
    loader = FastDataLoader(
        Cheap(), batch_size=8, sampler=SlowSampler(), executor=executor,
        num_workers=0 if executor == "inline" else 1,
    )  # fmt: skip
    found = verdict_of(loader, tmp_path).findings[0]
    assert found.code == "FD323"
    assert "sampler" in found.cause


@pytest.mark.cases(1)
@pytest.mark.parametrize("executor", ["torch", "workers"])
def test_unpickling_thousands_of_objects_is_named(executor, tmp_path):
    loader = FastDataLoader(
        ManyObjects(), batch_size=8, collate_fn=as_it_is, executor=executor, num_workers=1
    )
    verdict = verdict_of(loader, tmp_path)
    assert "FD324" in {found.code for found in verdict.findings}


def test_a_lock_that_workers_share_is_no_reason_for_more_of_them(tmp_path):
    # Whether two workers read more than one is measured in a few tasks, so that a busy machine may
    # hide it: of three runs, one has to show it.
    for _ in range(3):
        loader = FastDataLoader(Locked(), batch_size=8, num_workers=2, executor="workers")
        found = verdict_of(loader, tmp_path, epochs=2).findings[0]
        assert found.code in ("FD303", "FD304")
        if found.code == "FD304":
            break
    assert found.code == "FD304"
    assert "num_workers" not in found.remedy

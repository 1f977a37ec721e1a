"""The callback tells why batches were late: in its metrics, its report and its summary."""

from __future__ import annotations

import json
from collections import deque

import numpy as np
import pytest
import torch
from conformance.pieces import Linear, Rows, make_trainer, quiet
from conformance.test_logging import ours, read_csv
from conformance.test_timing import Several
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from PIL import Image
from rig.machine import sleep, work
from rig.virtual_crew import on_machine
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions
from lightning_fastdata.insight.steps import TIMED


@pytest.fixture(autouse=True)
def machine():
    """Trainings live on a virtual machine; torch's workers each in a time of their own."""
    with on_machine() as virtual:
        yield virtual


class Waits(Rows):
    """Every sample waits, and then is transformed."""

    def __init__(self, length=32, sleep_s=0.003, work_s=0.0, slow=-1):
        super().__init__(length)
        self.each_s, self.work_s, self.slow = sleep_s, work_s, slow
        self.transform = v2.Compose([v2.Identity(), self.costly])

    def costly(self, x):
        work(self.work_s)
        return x

    def __getitem__(self, i):
        sleep(0.3 if i == self.slow else self.each_s)
        x, i = super().__getitem__(i)
        return self.transform(x), i


def module(train, val=None, executor="torch", num_workers=1, **arguments):
    options = LoaderOptions(executor=executor, num_workers=num_workers, probe=False)
    return FastDataModule.from_datasets(train, val, batch_size=4, options=options, **arguments)


def fit(tmp_path, data, *, model=None, **arguments):
    """Return the report of a fit and the metrics it logged."""
    logger, callback = CSVLogger(tmp_path), quiet(every_n_steps=2)
    trainer = make_trainer(tmp_path, logger=logger, callbacks=[callback], **arguments)
    where = {"datamodule": data} if isinstance(data, LightningDataModule) else data
    trainer.fit(model or Linear(), **where)
    return callback.report, read_csv(logger.log_dir)


@pytest.mark.parametrize(
    ("executor", "workers"), [("torch", 0), ("torch", 1), ("inline", 0), ("workers", 1)]
)
def test_the_parts_of_the_wait_are_logged_and_reported_for_every_executor(
    tmp_path, executor, workers
):
    report, rows = fit(
        tmp_path, module(Waits(), Waits(16), executor, workers), num_sanity_val_steps=2
    )
    names = ours(rows, "data_wait/")
    assert {f"data_wait/read_{kind}_ms" for kind in ("cpu", "runqueue", "blocked")} == names.keys()
    assert names["data_wait/read_blocked_ms"] == [1, 3, 5, 7]
    train, val = report.stages
    for stage, batches in ((train, 7), (val, 3)):
        assert stage.causes.batches == batches
        if executor != "torch" or not workers:
            assert stage.causes.wait.shares()["read_blocked"] > (0.95 if workers else 0.999)
            assert stage.causes.wait.total_ms == pytest.approx(stage.wait.mean_ms)
    assert not [note for note in report.notes if "not known" in note]


@pytest.mark.parametrize(("executor", "workers"), [("torch", 0), ("workers", 1)])
def test_a_slow_file_is_named(tmp_path, executor, workers):
    folder = tmp_path / "images" / "class"
    folder.mkdir(parents=True)
    for number in range(32):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / f"{number:03}.png")

    def load(path):
        sleep(0.4 if path.endswith("021.png") else 0.001)
        return torch.zeros(4)

    images = ImageFolder(str(tmp_path / "images"), loader=load)
    subset = Subset(ConcatDataset([images, images]), list(range(63, 31, -1)))
    report, _ = fit(tmp_path, module(subset, None, executor, workers), limit_val_batches=0)
    slow = report.stages[0].causes.slow_samples[0]
    assert slow.path.endswith("021.png")
    assert images.samples[31 - slow.index][0] == slow.path
    read = json.loads(json.dumps(report.as_dict()))
    assert read["stages"]["train"]["causes"]["slow_samples"][0]["path"] == slow.path


def test_reads_that_wait_are_told_apart_with_a_gain_if_they_are_independent(tmp_path):
    report, _ = fit(tmp_path, module(Waits(160, sleep_s=0.01), executor="workers"))
    assert report.verdict.kind == "data-bound"
    found = report.verdict.findings[0]
    assert found.code == report.verdict.code == "FD303", report.text()
    assert found.remedy.startswith("LoaderOptions(num_workers=")
    assert found.gain.basis == "independent"
    assert "if the workers share nothing" in " ".join(report.text().split())
    assert found.gain.factor > 1.5
    assert f"{found.gain.factor:.2f}x" in report.text()
    read = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    first = read["verdict"]["findings"][0]
    assert {
        "code", "family", "severity", "cause", "remedy", "gain", "leave_alone",
    } == set(first)  # fmt: skip
    assert set(first["gain"]) == {"before_ms", "after_ms", "basis", "factor"}
    recent = report.recent["train"]
    assert set(TIMED) < set(recent)
    assert recent["step"].tolist() == list(range(40))


def test_a_foreign_loader_is_mentioned_once_and_logs_nothing(tmp_path):
    loaders = {
        "train_dataloaders": DataLoader(Waits(16), batch_size=4),
        "val_dataloaders": DataLoader(Waits(8), batch_size=4),
    }
    report, rows = fit(tmp_path, loaders)
    assert ours(rows, "data_wait/") == {}
    assert [stage.causes for stage in report.stages] == [None, None]
    notes = [note for note in report.notes if "not known" in note]
    assert len(notes) == 1
    assert "for train and val: a DataLoader does not tell" in notes[0]
    assert " ".join(report.text().split()).count("does not tell") == 1


class OwnModule(Linear):
    def train_dataloader(self):
        return FastDataLoader(Waits(16), 4, num_workers=1)


class OwnData(LightningDataModule):
    def train_dataloader(self):
        return {"a": FastDataLoader(Waits(16), 4), "b": FastDataLoader(Waits(16), 4)}


def test_loaders_are_found_wherever_they_come_from(tmp_path):
    """Also pins the object that Lightning asks for loaders."""
    loader = FastDataLoader(Waits(16), 4, num_workers=1)
    combined = {"train_dataloaders": CombinedLoader({"a": FastDataLoader(Waits(16), 4)})}
    for data, model, batches in (
        ({"train_dataloaders": loader}, None, 3),
        ({}, OwnModule(), 3),
        (OwnData(), Several(), 2 * 3),
        (combined, Several(), 3),
    ):
        report, _ = fit(tmp_path, data, model=model)
        assert report.stages[0].causes.batches == batches
    assert loader.records is None


@pytest.mark.parametrize("executor", ["torch", "workers"])
def test_loaders_that_lightning_makes_anew_go_on_recording(tmp_path, executor):
    with pytest.warns(UserWarning, match="overfit"):
        report, _ = fit(tmp_path, module(Waits(64), executor=executor), overfit_batches=4)
    assert report.stages[0].causes.batches == 3
    report, _ = fit(
        tmp_path, module(Waits(16), executor=executor), max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    assert report.stages[0].causes.batches == 9


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_a_loader_that_is_given_tells_in_every_method(tmp_path, method):
    """Of any loader that is given to predict, Lightning makes another."""

    callback = quiet()
    trainer = make_trainer(tmp_path, callbacks=[callback])
    getattr(trainer, method)(Linear(), FastDataLoader(Waits(32), 4, num_workers=1))
    assert callback.report.stages[0].causes.batches == 7
    assert not any("not known" in note for note in callback.report.notes)


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(24):
            sleep(0.002)
            yield torch.full((4,), float(i)), i


def test_iterable_datasets_and_several_epochs_are_counted(tmp_path):
    report, _ = fit(tmp_path, module(Stream(), Stream(), "inline", 0), max_epochs=2)
    train, val = report.stages
    assert train.causes.batches in (10, 11)  # the first one may be fetched before the start
    assert val.causes.batches == 10
    assert train.causes.wait.read_blocked_ms == pytest.approx(8)


def test_somebody_who_takes_the_stamps_keeps_them(tmp_path):
    mine, loader = deque(), FastDataLoader(Waits(16), 4)
    loader.record_stamps(mine)
    report, _ = fit(tmp_path, {"train_dataloaders": loader})
    assert len(mine) == 4
    assert loader.records is mine
    assert any("other code takes the stamps" in note for note in report.notes)

"""Nothing of a dataset is read or opened in the training process, unless that is asked to read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import albumentations as A
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from trainers import Learner, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    LoaderOptions,
)

SAMPLES = 96
SIDE = 8


def fit(way, **settings):
    """Return label and mean of each sample that the steps of a training got."""

    def of_batch(batch):
        x, y = batch[0] if len(batch) == 1 else batch
        return list(zip(y.tolist(), x.flatten(1).float().mean(1).tolist(), strict=True))

    module = Learner(of_batch)
    trainer = quiet_trainer(tempfile.gettempdir(), use_distributed_sampler=False, **settings)
    trainer.fit(module, **way)
    return module.joined


def note(folder: Path, what: str) -> None:
    with (folder / str(os.getpid())).open("a") as file:
        file.write(what + "\n")


def touched_here(folder: Path) -> list[str]:
    file = folder / str(os.getpid())
    return file.read_text().split() if file.exists() else []


class Watched(Dataset):
    """Notes which process reads it, or asks it for something that it would have to open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        note(self.folder, "__getitem__")
        return torch.full((3, SIDE, SIDE), index, dtype=torch.uint8), index

    def __getattr__(self, name):
        if name.startswith("__") or "folder" not in self.__dict__:
            raise AttributeError(name)
        note(self.folder, name)
        raise AttributeError(name)


for opens in ("dataset", "datasets", "samples", "transform"):
    setattr(Watched, opens, property(lambda self, name=opens: self.__getattr__(name)))


class WatchedInBatches(Watched):
    def __getitems__(self, indices):
        note(self.folder, "__getitems__")
        return [Watched.__getitem__(self, index) for index in indices]


class WatchedImages(Watched):
    """Calls an Albumentations pipeline of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pipeline = A.Compose([A.HorizontalFlip(), A.ToTensorV2()])

    def __getitem__(self, index):
        note(self.folder, "__getitem__")
        image = np.full((SIDE, SIDE, 3), index, np.uint8)
        return self.pipeline(image=image)["image"], index


class WatchedStream(IterableDataset):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self):
        note(self.folder, "__iter__")
        for index in range(SAMPLES):
            yield torch.full((3, SIDE, SIDE), index, dtype=torch.uint8), index


class HandWritten(FastDataModule):
    def __init__(self, dataset, **arguments) -> None:
        super().__init__(**arguments)
        self.train = dataset

    def train_dataset(self):
        return self.train


class OwnLoader(HandWritten):
    def train_dataloader(self):
        return self.make_loader(self.train, stage="train", batch_size=4)


FLIP = A.Compose([A.HorizontalFlip()])
WAYS = {
    "from_datasets": lambda d: {"datamodule": FastDataModule.from_datasets(d, batch_size=8)},
    "subclass": lambda d: {"datamodule": HandWritten(d, batch_size=8)},
    "make_loader": lambda d: {"datamodule": OwnLoader(d)},
    "several, wrapped": lambda d: {
        "datamodule": HandWritten([Subset(d, range(SAMPLES))], batch_size=8)
    },
    "some workers": lambda d: {
        "datamodule": HandWritten(d, options=LoaderOptions(num_workers=1), batch_size=8)
    },
    "torch": lambda d: {
        "datamodule": HandWritten(
            d, options=LoaderOptions(executor="torch", num_workers=1), batch_size=8
        )
    },
    "augment": lambda d: {
        "datamodule": HandWritten(d, augment=FLIP, augment_on="gpu", batch_size=8)
    },
    "FastDataLoader, auto": lambda d: {
        "train_dataloaders": FastDataLoader(d, 8, executor="auto", num_workers=1)
    },
    "DataLoader": lambda d: {"train_dataloaders": DataLoader(d, 8, num_workers=1)},
}


def labels_of(way) -> list[int]:
    return [label for label, _ in fit(way, callbacks=[DataThroughputCallback()])]


@pytest.mark.cases(3)
@pytest.mark.parametrize("way", WAYS)
def test_the_training_process_reads_no_sample(way, tmp_path):
    # Dear to read, so that no choice is to read it in the training process, however slowly workers
    # start beside other programs.
    labels = labels_of(WAYS[way](Dear(tmp_path)))
    assert labels
    assert set(labels) <= set(range(SAMPLES))
    assert not touched_here(tmp_path)


class Dear(Watched):
    def __getitem__(self, index):
        sum(range(1_000_000))
        return super().__getitem__(index)


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", [WatchedInBatches, WatchedImages, WatchedStream])
@pytest.mark.parametrize("way", ["subclass", "FastDataLoader, auto", "some workers"])
@pytest.mark.filterwarnings("ignore:.*num_workers is 1 of")
def test_neither_are_batches_pipelines_and_streams_touched(kind, way, tmp_path):
    labels = labels_of(WAYS[way](kind(tmp_path)))
    here = touched_here(tmp_path)
    if kind is WatchedStream or way != "subclass":
        assert not here
    # What costs next to nothing may be read in the training process, by index and not before.
    assert set(here) <= {"__getitem__", "__getitems__"}
    assert sorted(labels) == list(range(SAMPLES))


def test_explaining_reads_nothing_here(tmp_path):
    assert "num_workers" in HandWritten(Watched(tmp_path)).explain()
    assert not touched_here(tmp_path)


class Caching(Dataset):
    """Keeps what its random pipeline returned the first time, as some do by mistake."""

    def __init__(self) -> None:
        self.pipeline = A.Compose([A.RandomBrightnessContrast((-0.9, 0.9), p=1), A.ToTensorV2()])
        self.cache: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index):
        if index not in self.cache:
            image = np.full((SIDE, SIDE, 3), 100, np.uint8)
            self.cache[index] = self.pipeline(image=image)["image"]
        return self.cache[index], index


def test_a_trial_leaves_nothing_in_a_cache():
    runs = []
    for workers in (0, 1):
        options = LoaderOptions(num_workers=workers)
        data = FastDataModule.from_datasets(Caching(), batch_size=4, options=options, seed=5)
        runs.append(dict(fit({"datamodule": data})))
    assert runs[0] == runs[1]
    assert len(set(runs[0].values())) > 12

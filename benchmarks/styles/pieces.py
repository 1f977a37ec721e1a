"""What the scripts of the styles share: some work for a sample, and what a training has seen."""

from __future__ import annotations

import hashlib
import os
import sys

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

HOW = os.environ.get("STYLE", "plain")
"""``plain``, ``callback`` (two lines) or ``module`` (FastDataModule)."""


class Photos(Dataset):
    """Samples ``(image [3, 32, 32] float32, index)``, each of about 2 ms of work."""

    def __init__(self, length: int = 640) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return make_image(index), index


def make_image(index: int) -> torch.Tensor:
    image = np.random.default_rng(index).random((256, 256, 3), np.float32)
    for _ in range(2):
        image = np.sort(image, axis=1)
    return torch.from_numpy(image[::8, ::8].transpose(2, 0, 1).copy())


class Model(pl.LightningModule):
    """Keeps a digest of the indices it has seen, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
        )
        self.seen = hashlib.sha256()
        self.samples = 0

    def step(self, images: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        self.seen.update(indices.to(torch.int64).numpy().tobytes())
        self.samples += len(images)
        return nn.functional.cross_entropy(self.network(images), indices % 10)

    def training_step(self, batch, batch_idx):
        return self.step(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(dataset: Dataset | None = None, **settings) -> DataLoader:
    return DataLoader(dataset or Photos(), 16, **{"shuffle": True, **settings})


def trainer(**settings) -> pl.Trainer:
    """Return a Trainer as scripts make them; with the callback where that is asked for."""
    callbacks = []
    if HOW in ("callback", "module"):
        from lightning_fastdata import DataThroughputCallback

        callbacks.append(DataThroughputCallback())
    return pl.Trainer(
        max_epochs=2,
        callbacks=callbacks,
        accelerator="cpu",
        logger=pl.loggers.CSVLogger("logs"),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def fit(model: Model, loaders: object, **settings) -> None:
    """Train as the style does, or with the loaders given to a FastDataModule."""
    own = trainer(**settings)
    if HOW == "module":
        from lightning_fastdata import FastDataModule

        own.fit(model, datamodule=FastDataModule.from_loaders(loaders))
    else:
        own.fit(model, loaders)
    result(model)


def result(model: nn.Module) -> None:
    """Print what the training came to, for adoption.py."""
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    seen = model.seen.hexdigest()[:12]
    print("RESULT", model.samples, seen, hashlib.sha256(weights).hexdigest()[:12])
    sys.stdout.flush()

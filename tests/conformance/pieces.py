"""Small real models, datasets and trainers that the conformance tests share."""

from __future__ import annotations

import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import Dataset

from lightning_fastdata import FastDataModule


class Rows(Dataset):
    """``length`` samples ``(float32[4] filled with the index, index)``."""

    def __init__(self, length=32, sleep_s=None):
        self.length = length
        self.sleep_s = sleep_s or {}

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        time.sleep(self.sleep_s.get(i, 0))
        return torch.full((4,), float(i)), i


class Images(Dataset):
    """``length`` uint8 images HWC whose pixels depend on the index, with a label."""

    def __init__(self, length=16, height=12, width=10):
        self.shape = (height, width, 3)
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randint(0, 256, self.shape, dtype=torch.uint8, generator=generator).numpy(), i


class Linear(LightningModule):
    """Learns on :class:`Rows` and remembers every batch it saw, by stage."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen = {"train": [], "val": [], "test": [], "predict": []}

    def _step(self, stage, batch):
        self.seen[stage].append(batch)
        x = batch[0] if isinstance(batch, list | tuple) else batch
        return self.layer(x.to(self.layer.weight.dtype) * 1e-3).pow(2).mean()

    def training_step(self, batch, batch_idx):
        return self._step("train", batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self._step("val", batch)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self._step("test", batch)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self._step("predict", batch)
        return batch[1] if isinstance(batch, list | tuple) else batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Pixels(LightningModule):
    """Learns on images and remembers them; ``x`` is the batch's first element."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LazyLinear(1)
        self.seen = {"train": [], "val": [], "test": []}

    def _step(self, stage, batch):
        x = batch["image"] if isinstance(batch, dict) else batch[0]
        self.seen[stage].append(x.detach().clone())
        return self.layer(x.flatten(1)).float().pow(2).mean()

    def training_step(self, batch, batch_idx):
        return self._step("train", batch)

    def validation_step(self, batch, batch_idx):
        self._step("val", batch)

    def test_step(self, batch, batch_idx):
        self._step("test", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class RowsModule(FastDataModule):
    """A data module over :class:`Rows` for every stage, without workers."""

    def __init__(self, batch_size=8, length=32, **arguments):
        super().__init__(batch_size, **arguments)
        self.length = length

    def train_dataset(self):
        return Rows(self.length)

    def val_dataset(self):
        return Rows(self.length // 2)

    def test_dataset(self):
        return Rows(self.length // 2)

    def predict_dataset(self):
        return Rows(self.length // 2)


def make_trainer(tmp_path, **arguments):
    """A quiet CPU trainer that writes below ``tmp_path``."""
    quiet = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(tmp_path),
    }
    return Trainer(**{**quiet, **arguments})

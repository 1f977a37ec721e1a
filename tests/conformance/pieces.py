"""Small real models, datasets and trainers that the conformance tests share."""

from __future__ import annotations

import torch
from conformance.datasets import Images, Rows
from lightning.pytorch import LightningModule
from trainers import quiet_trainer as make_trainer

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions

__all__ = [
    "Images",
    "Linear",
    "Manual",
    "Pixels",
    "Rows",
    "RowsModule",
    "add_one",
    "make_trainer",
    "quiet",
]


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

    def added(self, stage="train"):
        """What has been added to the rows of a stage on their way: each amount once."""
        return {float(amount) for x, i in self.seen[stage] for amount in x[:, 0] - i}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def quiet(**arguments):
    """Return a callback that measures, and shows and writes nothing unless it is told to."""
    return DataThroughputCallback(**{"summary": False, "report": False, **arguments})


def add_one(batch):
    """A transform of batches of rows."""
    return [batch[0] + 1, batch[1]]


class Manual(Linear):
    """Has two optimizers, each of which it steps by hand behind so many batches."""

    def __init__(self, every=1):
        super().__init__()
        self.automatic_optimization, self.every = False, every

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % self.every == 0:
            self.update()

    def update(self):
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], lr=1e-3) for weight in self.layer.parameters()]


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
    """A data module over :class:`Rows` for every stage, without workers.

    It would choose none by itself, for which it tries each dataset in a process of its own.
    """

    def __init__(self, batch_size=8, length=32, **arguments):
        inline = LoaderOptions(num_workers=0, probe=False)
        super().__init__(batch_size, **{"options": inline, **arguments})
        self.length = length

    def train_dataset(self):
        return Rows(self.length)

    def val_dataset(self):
        return Rows(self.length // 2)

    def test_dataset(self):
        return Rows(self.length // 2)

    def predict_dataset(self):
        return Rows(self.length // 2)

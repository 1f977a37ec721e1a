"""Trainings that write down each step as it happens, are stopped anywhere, and go on from a file.

A line of a record is ``epoch batch_idx digest indices``: the digest is of the bytes of every tensor
of the batch, in their order, with shapes and types. How many lines there were when a checkpoint was
written is kept in it, so that the law of a resume is short: ``rest == straight[lines:]``.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import warnings
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, TensorDataset

from lightning_fastdata.errors import FastDataWarning

LINES = "lines"
"""Under this key a checkpoint tells how many steps were recorded before it."""


class Images(Dataset):
    """Small images that differ in each pixel, with their index."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        image = np.arange(8 * 8 * 3, dtype=np.int64).reshape(8, 8, 3) * 7 + 31 * index
        return {"image": (image % 251).astype(np.uint8), "index": index}


def rows(length):
    """A dataset that is tensors: values, and indices."""
    return TensorDataset(torch.arange(length * 4).reshape(length, 4).float(), torch.arange(length))


def leaves(batch):
    """Each tensor or value of a batch, in order."""
    if isinstance(batch, dict):
        return [leaf for key in batch for leaf in leaves(batch[key])]
    if isinstance(batch, list | tuple):
        return [leaf for part in batch for leaf in leaves(part)]
    return [batch]


def digest(batch):
    """Bytes, shapes and types of everything in a batch, as text."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def indices(batch):
    """The indices of the samples of a batch, of all its loaders."""
    if isinstance(batch, dict) and "index" in batch:
        return batch["index"].tolist()
    if isinstance(batch, dict):
        return [index for part in batch.values() for index in indices(part)]
    if isinstance(batch, list | tuple):
        return batch[1].tolist()
    return []  # of a loader that has ended before the others


def through_a_file(state):
    """What is left of a state in a file that holds plain data only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@contextmanager
def warned():
    """Collect what this package warns of within a block."""
    texts = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in found if issubclass(one.category, FastDataWarning)]


class Stop(Exception):
    """Ends a run as whatever fails would."""


class Recorder(LightningModule):
    """Writes a line for each training step, and learns next to nothing.

    Steps that a tuner takes are no part of the training and leave no line.
    """

    def __init__(self, file, *, one_cycle=False):
        super().__init__()
        self.file, self.one_cycle = Path(file), one_cycle
        self.layer = torch.nn.Linear(1, 1)
        self.lr = 0.1
        self.lines = 0
        """Of this training, those of the runs before included."""
        self.raising = None
        """Called before a step is recorded."""

    def training_step(self, batch, batch_idx):
        if any(isinstance(callback, Marks) for callback in self.trainer.callbacks):
            if self.raising is not None:
                self.raising(self)
            self.record(batch, batch_idx)
        return self.layer(torch.ones(1)).sum()

    def record(self, batch, batch_idx):
        found = ",".join(map(str, indices(batch)))
        with self.file.open("a") as file:
            file.write(f"{self.current_epoch} {batch_idx} {digest(batch)} {found}\n")
        self.lines += 1

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    def on_save_checkpoint(self, checkpoint):
        checkpoint[LINES] = self.lines

    def on_load_checkpoint(self, checkpoint):
        self.lines = checkpoint[LINES]

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), self.lr)
        if not self.one_cycle:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, 0.1, max(steps, 2))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Marks(Callback):
    """A training that is recorded; tuners take all callbacks away."""


def train(model, data, folder, *, resume=None, callbacks=(), **arguments):
    """Fit on a CPU, quietly; ``data`` is a data module or a train loader."""
    own = {"max_epochs": 3, "limit_val_batches": 0, **arguments}
    saves = any(isinstance(each, Checkpoint) for each in callbacks)
    # Nothing that is kept of a run rests on the global generators.
    for anew in (torch.seed, np.random.seed, random.seed):
        anew()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
        trainer = Trainer(
            **{"devices": 1, **own},
            accelerator="cpu",
            logger=False,
            enable_checkpointing=saves,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[Marks(), *callbacks],
        )
        trainer.fit(model, data, ckpt_path=resume)
    return trainer


def lines(file):
    """The record of a run."""
    return Path(file).read_text().splitlines() if Path(file).exists() else []


def lines_before(checkpoint):
    """How many steps a checkpoint has seen; it holds nothing but numbers, texts and tensors."""
    return torch.load(checkpoint, weights_only=True)[LINES]


def first_difference(got, expected):
    """Where two records differ, as text; None: nowhere."""
    for at, (one, other) in enumerate(zip(got, expected, strict=False)):
        if one != other:
            return f"line {at}: {one!r}, not {other!r}"
    if len(got) == len(expected):
        return None
    return f"{len(got)} lines, not {len(expected)}"

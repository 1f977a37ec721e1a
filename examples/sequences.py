"""Sequences of different lengths, in batches of like length, so that little is padding.

A small recurrent network learns to spell the licence of this package, byte by byte.

python examples/sequences.py [--small]
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lightning_fastdata import BucketBatchSampler, DataThroughputCallback, FastDataModule

SMALL = "--small" in sys.argv
LICENSE = Path(__file__).resolve().parents[1] / "LICENSE"
PADDING = 0


class Lines(Dataset):
    """Lines of a text, as int64 tensors of the bytes of each."""

    def __init__(self, path):
        self.lines = [line for line in path.read_bytes().splitlines() if len(line) > 1]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return torch.tensor(list(self.lines[index]))


def collate(lines):
    """Return bytes int64 [n, longest], padded at the end, and the lengths int64 [n]."""
    lengths = torch.tensor([len(line) for line in lines])
    return pad_sequence(lines, batch_first=True, padding_value=PADDING), lengths


class Speller(LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.read_out = nn.Linear(64, 256)

    def training_step(self, batch):
        text, lengths = batch
        states, _ = self.recurrent(self.embed(text[:, :-1]))
        loss = nn.functional.cross_entropy(
            self.read_out(states).flatten(0, 1), text[:, 1:].flatten(), ignore_index=PADDING
        )
        self.log_dict({"loss": loss, "longest": lengths.max().float()}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


class Data(FastDataModule):
    """Batches of at most 512 bytes, padding included."""

    def train_dataset(self):
        return Lines(LICENSE)

    def train_dataloader(self):
        lines = self.train_dataset()
        batches = BucketBatchSampler([len(line) for line in lines.lines], tokens=512)
        return self.make_loader(lines, stage="train", batch_sampler=batches, collate_fn=collate)


if __name__ == "__main__":
    data = Data()
    trainer = Trainer(
        max_epochs=2 if SMALL else 20, callbacks=[DataThroughputCallback()], log_every_n_steps=10
    )
    trainer.fit(Speller(), datamodule=data)

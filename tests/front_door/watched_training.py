"""A program that trains and then hangs, for those who watch it.

Arguments: where it hangs (``worker``, or ``step`` of the last rank), ranks, and the log folder.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import Dataset

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions

SLOW = 61


class Slow(Dataset):
    def __init__(self, hangs):
        self.hangs = hangs

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if index == SLOW and self.hangs:
            self.ask_a_server()
        return torch.full((4,), float(index))

    def ask_a_server(self):
        time.sleep(600)


class Model(LightningModule):
    def __init__(self, hangs):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.hangs = hangs

    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        if self.hangs and batch_idx == 30:
            self.wait_for_ever()
        return self.layer(batch).mean()

    def wait_for_ever(self):
        time.sleep(600)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


if __name__ == "__main__":
    where, ranks, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    last = int(os.environ.get("LOCAL_RANK", "0")) == ranks - 1
    data = FastDataModule.from_datasets(
        Slow(where == "worker"),
        batch_size=2,
        num_workers=2 if where == "worker" else 0,
        shuffle=False,
        options=LoaderOptions(tune="off", stall_timeout_s=0),
    )
    Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=1,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[DataThroughputCallback(report=False, summary=False)],
    ).fit(Model(where == "step" and last), data)

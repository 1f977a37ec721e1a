"""Two trainings that hang, for those who watch: one in a worker, one in a step of its second rank.

Argument: the folder for their logs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from conformance.forked_ranks import on_ranks
from conformance.pieces import make_trainer
from lightning.pytorch import LightningModule
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


def train(where, folder, ranks=1):
    last = int(os.environ.get("LOCAL_RANK", "0")) == ranks - 1
    # Chosen, as "auto" tries samples, of which one hangs.
    executor = "workers" if where == "worker" else "inline"
    data = FastDataModule.from_datasets(
        Slow(where == "worker"),
        batch_size=2,
        num_workers=2 if where == "worker" else 0,
        shuffle=False,
        options=LoaderOptions(executor=executor, tune="off", stall_timeout_s=0),
    )
    callback = DataThroughputCallback(report=False, summary=False)
    options = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {}
    trainer = make_trainer(Path(folder) / f"logs-{where}", callbacks=[callback], **options)
    trainer.fit(Model(where == "step" and last), data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.fork() == 0:
        train("worker", sys.argv[1])
    else:
        on_ranks(2, lambda: train("step", sys.argv[1], ranks=2))

"""Does the replayed step agree with a training whose data are in memory?

    python benchmarks/headroom.py [steps]

One training reads slowly and measures its headroom; another one of the same model has all of its
batches in memory. Their ideal steps are compared as a ratio.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata import DataThroughputCallback, FastDataLoader


class Images(Dataset):
    def __init__(self, length, sleep_s):
        self.length = length
        self.sleep_s = sleep_s
        self.image = torch.rand(3, 32, 32)

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        time.sleep(self.sleep_s)
        return self.image, i % 10


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
            torch.nn.Conv2d(32, 32, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.LazyLinear(10),
        )  # fmt: skip
        self.net(torch.zeros(2, 3, 32, 32))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def stage_of(loader, headroom):
    with tempfile.TemporaryDirectory() as folder:
        callback = DataThroughputCallback(summary=False, report=False, headroom=headroom)
        trainer = Trainer(
            max_epochs=1, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            callbacks=[callback],
        )  # fmt: skip
        trainer.fit(Net(), loader)
    return callback.report.stages[0]


def main(steps=40, batch=64):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    images = Images(batch * steps, 0.0)
    slow = Images(batch * steps, 0.0015)  # slower than a step of two cores
    in_memory = DataLoader(list(DataLoader(images, batch)), batch_size=None)
    ratios = []
    for _ in range(3):
        read = stage_of(FastDataLoader(slow, batch, num_workers=1, executor="workers"), "measured")
        free = stage_of(in_memory, "modelled")
        ratios.append(read.headroom.step_ms / free.step.p50_ms)
        print(
            f"reading {read.step.mean_ms:6.1f} ms   measured {read.headroom.step_ms:6.1f}   "
            f"modelled {read.step.mean_ms - read.stall.mean_ms:6.1f}   "
            f"in memory {free.step.p50_ms:6.1f}   ratio {ratios[-1]:.2f}"
        )
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

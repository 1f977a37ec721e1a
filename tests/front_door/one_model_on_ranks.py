"""Two ranks that compute one model together: each writes which samples it had, and what was drawn.

Argument: the folder to write to.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import albumentations as A
import torch
from conformance.forked_ranks import on_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader, Dataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import BucketBatchSampler, DataThroughputCallback, FastDataModule

RANKS, COUNT = 2, 24


class Pictures(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"image": torch.full((4, 4, 3), 100, dtype=torch.uint8), "index": index}


def noisy(batch):
    return {**batch, "image": batch["image"] * torch.rand(())}


class Whole(Learner):
    """Is computed by each rank alone."""

    def configure_model(self):
        pass


class Module(FastDataModule):
    """``bucketed``: reads batches of like length."""

    def __init__(self, bucketed, **arguments):
        super().__init__(4, num_workers=0, seed=3, **arguments)
        self.bucketed = bucketed

    def train_dataset(self):
        return Pictures()

    def train_dataloader(self):
        if not self.bucketed:
            return super().train_dataloader()
        batches = BucketBatchSampler([5 + index % 7 for index in range(COUNT)], tokens=40)
        return self.make_loader(self.train_dataset(), stage="train", batch_sampler=batches)


def trained(data, **arguments):
    """Return the samples of each step, and what was drawn for it."""
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=RANKS)
    model = Whole(lambda batch: [batch["index"].tolist(), float(batch["image"].float().mean())])
    quiet_trainer(strategy=strategy, devices=RANKS, max_epochs=2, **arguments).fit(model, data)
    return model.seen


def main(folder):
    torch.set_num_threads(1)
    drawn = A.Compose([A.RandomBrightnessContrast(p=1)], seed=0)
    callback = DataThroughputCallback(drawn, summary=False, report=False)
    seen = {
        "augment": trained(Module(bucketed=False, augment=noisy)),
        "callback": trained(DataLoader(Pictures(), 4), callbacks=[callback]),
        "bucketed": trained(Module(bucketed=True, augment=noisy)),
    }
    (folder / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    on_ranks(RANKS, partial(main, Path(sys.argv[1])))

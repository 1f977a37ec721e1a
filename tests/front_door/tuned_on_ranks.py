"""Two ranks train, tuned or not; one reads samples that wait longer. Each writes what it saw.

The workers of each are on a virtual machine of its own.

Argument: folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from conformance.forked_ranks import on_ranks
from rig.machine import sleep
from rig.virtual_crew import on_machine
from torch.utils.data import Dataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataModule, LoaderOptions

BATCH, STEPS = 8, 100


class Waiting(Dataset):
    def __len__(self):
        return 2 * BATCH * STEPS

    def __getitem__(self, index):
        sleep(0.006 if os.environ.get("LOCAL_RANK") == "1" else 0.001)
        return torch.full((4,), float(index))


class Data(FastDataModule):
    def train_dataset(self):
        return Waiting()


def run(folder, name, **given):
    rank = int(os.environ["LOCAL_RANK"])
    module = Learner(lambda batch: (sleep(0.004), batch.tolist())[1])
    options = LoaderOptions(executor="workers", **given)
    trainer = quiet_trainer(devices=2, strategy="ddp")
    trainer.fit(module, Data(batch_size=BATCH, seed=5, options=options))
    tuner = trainer.train_dataloader.training.tuner
    moves = [] if tuner is None else [str(move) for move in tuner.moves]
    found = {"seen": module.seen, "moves": moves}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    folder = Path(sys.argv[1])

    def both():
        for name, given in {"calm": {"num_workers": 2, "probe": False}, "tuned": {}}.items():
            with on_machine():
                run(folder, name, **given)

    on_ranks(2, both)

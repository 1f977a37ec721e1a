"""A program of two ranks, which train on a wrapped loader and on FastDataModule.

Argument: the folder that each rank writes what it read to, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from conformance.forked_ranks import on_ranks
from resilience.runs import Images, Recorder, lines, train
from torch.utils.data import DataLoader

from lightning_fastdata import FastDataModule

SAMPLES, BATCH = 24, 4


class Wrapped:
    """Hands on the batches of a loader, as many home-made prefetchers do."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return iter(self.loader)


def main(folder):
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    found = {}
    for name in ("wrapped", "ours"):
        record = folder / f"{name}-{rank}"
        data = (
            Wrapped(DataLoader(Images(SAMPLES), batch_size=BATCH))
            if name == "wrapped"
            else FastDataModule.from_datasets(Images(SAMPLES), batch_size=BATCH, num_workers=0)
        )
        train(Recorder(record), data, folder, strategy="ddp", devices=2, max_epochs=1)
        found[name] = [int(i) for line in lines(record) for i in line.split(" ")[3].split(",")]
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    on_ranks(2, lambda: main(Path(sys.argv[1])))

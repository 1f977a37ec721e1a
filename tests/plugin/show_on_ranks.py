"""A program of two ranks: each trains, and the first shows its first batch on the board.

Arguments: the folder of the board, and that of the batches that the steps saw.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from conformance.forked_ranks import on_ranks
from conformance.pieces import Images, Pixels, make_trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.errors import FastDataWarning


class Floats(Images):
    def __getitem__(self, i):
        image, label = super().__getitem__(i)
        return torch.from_numpy(image).permute(2, 0, 1) / 255, label


class Learns(Pixels):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(12 * 10 * 3, 1)


def main(board, batches):
    torch.set_num_threads(1)
    warnings.simplefilter("error", FastDataWarning)
    model = Learns()
    data = FastDataModule.from_datasets(
        Floats(16), batch_size=4, options=LoaderOptions(num_workers=0)
    )
    callback = DataThroughputCallback(log_images=True, report=False, summary=False)
    make_trainer(
        batches,
        strategy="ddp",
        devices=2,
        max_epochs=2,
        logger=TensorBoardLogger(board, name="run", version=0),
        callbacks=[callback],
    ).fit(model, datamodule=data)
    rank = int(os.environ["LOCAL_RANK"])
    torch.save(model.seen["train"], Path(batches) / f"{rank}.pt")


if __name__ == "__main__":
    on_ranks(2, partial(main, sys.argv[1], sys.argv[2]))

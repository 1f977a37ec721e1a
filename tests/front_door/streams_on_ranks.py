"""A program of two ranks, each of which trains on its part of a stream of another library.

Arguments: the folder of the library's files, one to write to, and the names of cases: a library's,
and when its stream is made.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from conformance.forked_ranks import on_ranks
from front_door.other_streams import LIBRARIES, as_it_is
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataModule, FastDataWarning

BATCH, EPOCHS, RANKS = 4, 2, 2


def trained(data):
    """Return what each step of a training had, by epoch."""
    epochs = [[] for _ in range(EPOCHS)]
    model = Learner(lambda batch: epochs[model.current_epoch].append(batch["number"].tolist()))
    quiet_trainer(strategy="ddp", devices=RANKS, max_epochs=EPOCHS).fit(model, datamodule=data)
    return epochs


def made_in_time(make):
    """Return a data module that makes its stream when Lightning asks, where ranks are known."""

    class Made(FastDataModule):
        def train_dataset(self):
            return make()

    return Made(BATCH, num_workers=1)


def run(files, case):
    library, how = case.split(", ")
    make = partial(LIBRARIES[library].opened, files, False, as_it_is)
    epochs, failed = [], []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            if how == "made before":
                data = FastDataModule.from_datasets(make(), batch_size=BATCH, num_workers=1)
                epochs = trained(data)
            else:
                epochs = trained(made_in_time(make))
        except Exception as error:
            failed = [f"{type(error).__name__}: {error}"]
    texts = [str(each.message) for each in told if each.category is FastDataWarning]
    return {"epochs": epochs, "told": texts + failed}


def main(files, folder, cases):
    torch.set_num_threads(1)
    found = {}
    for case in cases:
        found[case] = run(files, case)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    (folder / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    on_ranks(RANKS, partial(main, Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))

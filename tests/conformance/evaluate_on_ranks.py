"""A program of several ranks, or one: each evaluates, and writes what it saw.

Arguments: numbers of ranks, one after another, folder to write to, and lists of [samples, batch
size] as JSON.
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
from conformance.pieces import Rows, RowsModule, make_trainer
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler

from lightning_fastdata import LoaderOptions


class Normed(LightningModule):
    """Has buffers to broadcast, and makes the ranks wait for each other in every step."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.seen = {"val": [], "test": [], "predict": []}

    def _evaluate(self, stage, batch, dataloader_idx):
        x, index = batch
        self.seen[stage].append([dataloader_idx, index.tolist()])
        loss = self.layers(x).square().mean()
        self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log(f"{stage}_worst", loss, reduce_fx="max", sync_dist=True)
        self.all_gather(loss)

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self._evaluate("val", batch, dataloader_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self._evaluate("test", batch, dataloader_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.all_gather(batch[1].sum())
        self.seen["predict"].append([dataloader_idx, batch[1].tolist()])
        return self.layers(batch[0])[:, 0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epoch = [], None

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, *_):
        self.batches.append(indices)

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.epoch = indices


class Looks(Callback):
    """Looks at batches on the first rank alone, as callbacks that log pictures do."""

    looked = ()

    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            data = trainer.datamodule
            loaders = data.train_dataloader(), data.val_dataloader()
            self.looked = [next(iter(loader))[1].tolist() for loader in loaders]


class Uneven(RowsModule):
    """``length`` rows for all evaluation; two loaders for validation if ``second`` is given.

    ``sampled``: they come by samplers of the user's own, backwards. ``bad``: what becomes of
    samples that cannot be read.
    """

    def __init__(self, length, second=None, sampled=False, bad="raise", **arguments):
        options = LoaderOptions(num_workers=0, probe=False, on_bad_sample=bad)
        super().__init__(length=8 * int(os.environ["RANKS"]), options=options, **arguments)
        self.rows, self.second, self.sampled = length, second, sampled

    def val_dataset(self):
        return Rows(self.rows) if self.second is None else [Rows(self.rows), Rows(self.second)]

    def test_dataset(self):
        return Rows(self.rows)

    def predict_dataset(self):
        return Rows(self.rows)

    def test_dataloader(self):
        own = {"sampler": self.backwards()} if self.sampled else {}
        return self.make_loader(Rows(self.rows), stage="test", **own)

    def predict_dataloader(self):
        batches = BatchSampler(self.backwards(), self.batch_size, drop_last=True)
        own = {"batch_sampler": batches} if self.sampled else {}
        return self.make_loader(Rows(self.rows), stage="predict", **own)

    def backwards(self):
        return list(range(self.rows))[::-1]


def evaluate(ranks, folder, method, module, **arguments):
    """Run one method of a new trainer; return what this rank saw, measured and was told."""
    seed_everything(1)
    model, writer, looks = Normed(), Writer(), Looks()
    parallel = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {}
    trainer = make_trainer(folder, callbacks=[writer, looks], **parallel, **arguments)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        predicted = None
        quiet = {"verbose": False} if method in ("validate", "test") else {}
        try:
            predicted = getattr(trainer, method)(model, datamodule=module, **quiet)
            error = None
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "seen": model.seen,
        "metrics": metrics,
        "batches": writer.batches,
        "looked": looks.looked,
        "epoch": writer.epoch,
        "predicted": [p.tolist() for p in predicted] if method == "predict" and not error else None,
        "warned": [str(w.message) for w in heard],
        "error": error,
    }


class Logs(Normed):
    """Logs its training steps over all ranks, too."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss


def in_turn(ranks, folder, runs, **arguments):
    """Run methods of one trainer in turn; return the logged mean of each, or what was raised."""
    seed_everything(1)
    model, module = Logs(), Uneven(11, batch_size=3)
    parallel = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {}
    trainer, logged = make_trainer(folder, **parallel, **arguments), []
    for method in runs:
        quiet = {} if method == "fit" else {"verbose": False}
        try:
            getattr(trainer, method)(model, datamodule=module, **quiet)
        except MisconfigurationException as raised:
            return str(raised)
        name = "test_loss" if method == "test" else "val_loss"
        logged.append(float(trainer.callback_metrics[name]))
        trainer.fit_loop.max_epochs += 1  # for a further fit
    return logged


TURNS = {
    "fits": {"runs": ["fit", "fit"]},
    "evaluations": {"runs": ["validate", "test", "validate", "test"]},
    "validates late": {
        "runs": ["fit"],
        "max_epochs": 4,
        "check_val_every_n_epoch": 2,
        "num_sanity_val_steps": 0,
    },
}
"""Runs of one trainer, in turn."""


def main(ranks, folder, cases):
    torch.set_num_threads(1)
    os.environ["RANKS"] = str(ranks)
    results = {}

    def record(name, method, module, **arguments):
        results[name] = evaluate(ranks, folder, method, module, **arguments)

    for length, size in cases:
        for method in ("validate", "test", "predict"):
            record(f"{method} {length} {size}", method, Uneven(length, batch_size=size))
    record("fit", "fit", Uneven(11, batch_size=2, bad="replace"))
    record("several", "validate", Uneven(7, second=11, batch_size=3))
    record("limited", "validate", Uneven(40, batch_size=4), limit_val_batches=0.5)
    record("unshared", "validate", Uneven(7, batch_size=2), use_distributed_sampler=False)
    record("sampled", "test", Uneven(9, sampled=True, batch_size=2))
    record("sampled to predict", "predict", Uneven(10, sampled=True, batch_size=2))
    if ranks > 1:
        record("fewer", "validate", Uneven(ranks - 1, batch_size=2))
        record("ones", "validate", Uneven(2 * ranks + 1, batch_size=1))
        record("ones to predict", "predict", Uneven(2 * ranks, batch_size=1))
        record("few to predict", "predict", Uneven(ranks - 1, batch_size=2))
    for name, how in TURNS.items():
        results[name] = in_turn(ranks, folder, **how)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    (Path(folder) / f"{ranks}-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    for ranks in map(int, sys.argv[1].split(",")):
        on_ranks(ranks, partial(main, ranks, sys.argv[2], json.loads(sys.argv[3])))

"""A program of several ranks: each trains as the cases say, and writes what it measured.

Each lives in a time of its own, in which samples and steps take exactly what the cases say. Ranks
that wait for each other's gradients wait in it: the slowest one says how late it is.

Arguments: number of ranks, folder to write to, and the cases as JSON: name -> settings.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from conformance.forked_ranks import on_ranks
from conformance.pieces import Linear, make_trainer
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, IterableDataset
from virtual_time import virtual_time

from lightning_fastdata import DataThroughputCallback, FastDataLoader
from lightning_fastdata.host import clock


class Stream(IterableDataset):
    """So many samples on this rank, each after so long."""

    def __init__(self, samples, sleep_s):
        self.samples, self.sleep_s = samples, sleep_s

    def __iter__(self):
        for i in range(self.samples):
            clock.sleep(self.sleep_s)
            yield torch.full((4,), float(i)), i


class Paced(Linear):
    """A step takes so long, and ends on all ranks at once."""

    def __init__(self, virtual, step_s):
        super().__init__()
        self.virtual, self.step_s = virtual, step_s

    def training_step(self, batch, batch_idx):
        clock.sleep(self.step_s)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        latest_ns = torch.tensor(clock.monotonic_ns())
        dist.all_reduce(latest_ns, dist.ReduceOp.MAX)
        self.virtual.advance_to(int(latest_ns))


class Turn(Callback):
    """Ranks end an epoch one after the other: who hears of others does so when they have written.

    Put before the callback that measures on the rank that is to be last, behind it on others.
    """

    def on_train_epoch_end(self, trainer, pl_module):
        dist.barrier()


def train(
    ranks,
    folder,
    *,
    batches,
    sleep_s,
    step_s=0.01,
    measured=(0, 1),
    ours=True,
    counted=False,
    in_turns=False,
    **arguments,
):
    """Train once; ``batches`` and ``sleep_s`` (of one sample) have an entry for each rank.

    ``measured``: the ranks that have the callback.
    """
    rank = int(os.environ["LOCAL_RANK"])
    dataset = Stream(2 * batches[rank], sleep_s[rank])
    loader = (FastDataLoader if ours else DataLoader)(dataset, batch_size=2, num_workers=0)
    callback = DataThroughputCallback(summary=False, report=False)
    callbacks = [callback]
    if in_turns:
        callbacks.insert(int(rank > 0), Turn())
    logger = CSVLogger(folder)
    trainer = make_trainer(
        folder,
        strategy="ddp",
        devices=ranks,
        logger=logger,
        callbacks=callbacks if rank in measured else [],
        log_every_n_steps=1000,
        **{"limit_val_batches": 0, **arguments},
    )
    profiler = profile(activities=[ProfilerActivity.CPU]) if counted else None
    with profiler or nullcontext(), virtual_time() as virtual:
        trainer.fit(Paced(virtual, step_s), loader)
    logger.save()
    file = Path(logger.log_dir) / "metrics.csv"
    rows = list(csv.DictReader(file.open())) if rank == 0 and file.exists() else []
    report = callback.report
    return {
        "steps": trainer.global_step,
        "report": None if report is None else report.as_dict(),
        "text": None if report is None else report.text(120),
        "rows": [{k: v for k, v in row.items() if v} for row in rows],
        "collectives": profiler
        and sum(event.name.startswith("c10d::") for event in profiler.events()),
    }


def main(ranks, folder, cases):
    torch.set_num_threads(1)
    results = {
        name: train(ranks, Path(folder) / name, **settings) for name, settings in cases.items()
    }
    rank = int(os.environ["LOCAL_RANK"])
    (Path(folder) / f"{ranks}-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    ranks, folder, cases = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    on_ranks(ranks, lambda: main(ranks, folder, cases))

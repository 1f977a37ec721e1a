"""Ranks with different memory train behind the guard; each writes what it decided and trained on.

Arguments: folder, and runs as JSON: name -> the GiB that each rank has.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lightning
import torch
from conformance.forked_ranks import on_ranks
from plugin.counted_device import GIB, Device
from torch import nn
from torch.utils.data import TensorDataset
from trainers import quiet_trainer

from lightning_fastdata import FastDataModule
from lightning_fastdata.plugin.bindings import BatchSizeGuard

BATCH, ROWS = 16, 128


class Module(lightning.LightningModule):
    def __init__(self, device, breaks, norm):
        super().__init__()
        self.memory, self.breaks, self.rows = device, breaks, []
        normalised = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.layer = nn.Sequential(nn.Linear(4, 4), normalised, nn.Linear(4, 1))

    def training_step(self, batch, _index):
        if self.breaks and self.global_rank == 1:
            raise ValueError("a label is missing")
        self.memory.take(GIB + GIB * len(batch[0]))
        self.rows.append(len(batch[0]))
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


class Data(FastDataModule):
    def train_dataset(self):
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(ROWS, 4, generator=generator))


def run(folder, name, memory, *, breaks=False, norm=True):
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = Device(memory[rank] * GIB)
    module, guard = Module(device, breaks, norm), BatchSizeGuard(device)
    torch.manual_seed(0)
    trainer = quiet_trainer(devices=2, strategy="ddp", callbacks=[guard])
    error = ""
    before = [p.detach().clone() for p in module.parameters()]
    try:
        trainer.fit(module, Data(batch_size=BATCH, guard="accumulate", seed=1))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    decision = guard.decision
    found = {
        "error": error,
        "action": decision and decision.action,
        "batch_size": decision and decision.batch_size,
        "accumulate": decision and decision.accumulate_grad_batches,
        "trained_on": module.rows[-1:] and module.rows[-1],
        "steps": trainer.global_step,
        "changed": any(
            not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)
        ),
        "weights": [float(p.sum()) for p in module.parameters()],
    }
    (folder / f"{name}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])

    def all_of_them():
        for name, how in runs.items():
            run(folder, name, **how)

    on_ranks(2, all_of_them)

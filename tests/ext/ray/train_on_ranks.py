"""What each rank of a training does: with actors, then with workers of its own, noting what it saw.

As a program, of torchrun: its argument is the folder that it writes to.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import Dataset

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.errors import FastDataWarning

LENGTH = 160


class Rows(Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.rand(2000)


class Data(FastDataModule):
    def __init__(self, executor: str) -> None:
        super().__init__(4, options=LoaderOptions(num_workers=4, executor=executor), seed=5)

    def train_dataset(self) -> Any:
        return Rows()


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, drawn = batch
        digest = hashlib.sha256(drawn.numpy().tobytes()).hexdigest()
        self.seen.append([self.current_epoch, rows.tolist(), digest])
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def train(folder: str, how: dict[str, Any], prepare: Any = lambda trainer: trainer) -> None:
    """Train with either executor, and write what this rank saw and heard."""
    found: dict[str, Any] = {}
    for executor in ("ray", "workers"):
        model, arguments = Model(), {key: make() for key, make in how.items()}
        trainer = Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_checkpointing=False, default_root_dir=folder, **arguments,
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prepare(trainer).fit(model, datamodule=Data(executor))
        found[executor] = model.seen
        found.setdefault("told", []).extend(
            str(each.message) for each in caught if issubclass(each.category, FastDataWarning)
        )
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")


def read(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """Return what each rank saw."""
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


if __name__ == "__main__":
    train(sys.argv[1], {"devices": lambda: 2, "strategy": lambda: "ddp"})

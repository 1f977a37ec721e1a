"""Time from ``fit`` to the first training step, by what a sample costs.

The trainings have validation, without its sanity check. "chosen" leaves the number of workers to
``from_datasets``, and "kept" gives plain loaders without workers to ``from_loaders``. Ratios are to
the loaders of torch that are told, without workers and with two, which is what ``chosen`` starts.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset
from turns import arguments, in_turn, ratio, spread, write

from lightning_fastdata import FastDataModule

SAMPLES, BATCH, COSTS_MS = 20_000, 64, (0.01, 0.1, 5.0)


class Costly(Dataset):
    """Samples that compute for so many milliseconds."""

    def __init__(self, cost_ms: float) -> None:
        self.cost_s = cost_ms / 1000

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.perf_counter() + self.cost_s
        while time.perf_counter() < until:
            pass
        return torch.full((4,), float(index))


class Net(LightningModule):
    """Notes when its first step begins, at which the training ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.began_s: float | None = None

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.began_s = self.began_s or time.perf_counter()
        return self.layer(batch).mean()

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def first_step_s(arguments: Callable[[], dict[str, Any]]) -> float:
    """Return the seconds from ``fit`` to the first step, with loaders that are made before."""
    model, given = Net(), arguments()
    trainer = Trainer(
        max_steps=1,
        accelerator="cpu",
        num_sanity_val_steps=0,
        limit_val_batches=0.01,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    began_s = time.perf_counter()
    trainer.fit(model, **given)
    return (model.began_s or 0.0) - began_s


def contenders(data: Dataset[Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    def pair(workers: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        shuffled = DataLoader(data, BATCH, shuffle=True, num_workers=workers)
        return shuffled, DataLoader(data, BATCH, num_workers=workers)

    def plain(workers: int) -> dict[str, Any]:
        train, val = pair(workers)
        return {"train_dataloaders": train, "val_dataloaders": val}

    return {
        "torch, 0 workers": lambda: plain(0),
        "torch, 2 workers": lambda: plain(2),
        "kept": lambda: {"datamodule": FastDataModule.from_loaders(*pair(0))},
        "chosen": lambda: {
            "datamodule": FastDataModule.from_datasets(data, data, batch_size=BATCH)
        },
    }


def main() -> None:
    parser = arguments(__doc__)
    chosen = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    table: dict[str, Any] = {}
    for cost_ms in COSTS_MS:
        ways = contenders(Costly(cost_ms))
        spent = in_turn(
            {name: lambda make=make: first_step_s(make) for name, make in ways.items()},
            rounds=chosen.rounds,
        )
        beside = {"kept": "torch, 0 workers", "chosen": "torch, 2 workers"}
        for name, seconds in spent.items():
            in_ms = [1000 * each for each in seconds]
            over = ratio(seconds, spent[beside[name]]) if name in beside else None
            table[f"{cost_ms} ms, {name}"] = {"ms": in_ms, "ratio": over}
            said = "" if over is None else f"  {over:.2f} of {beside[name]}"
            print(f"{cost_ms:5} ms a sample, {name:18s}{spread(in_ms)} ms{said}", flush=True)
    write(chosen.json, "first_step", table)


if __name__ == "__main__":
    main()

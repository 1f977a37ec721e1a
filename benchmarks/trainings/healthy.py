"""Trainings to which data is no matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from trainings.decoding import Records, Rows
from trainings.parts import Healthy, Load, Made, Model, several, spin
from trainings.storage import ObjectStore


class Mapped(Dataset[torch.Tensor]):
    """Rows of a file that is mapped into memory."""

    def __init__(self, file: Path, count: int, floats: int) -> None:
        np.lib.format.open_memmap(file, "w+", np.float32, (count, floats))[:] = 0.5
        self.rows = np.load(file, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[index].copy())


class Chatty(Model):
    """A step that looks at its losses one by one, in Python, before it returns."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        self.seen = [loss.item() + n for n in range(2000)]
        spin(0.02)
        return loss


def healthy(
    folder: Path, kind: str, form: Any, step_s: float, batches: int, on: Any = "host", **more: Any
) -> Made:
    batch_size = more.pop("batch_size", 16)
    count = batch_size * batches
    dataset: Any = {
        "tensors": lambda: TensorDataset(torch.rand(count, 64)),
        "rows": lambda: Rows(count, 500),
        "records": lambda: Records(count, 500),
        "store": lambda: ObjectStore(count, 0.0005),
        "mapped": lambda: Mapped(folder / "rows.npy", count, 500),
    }[kind]()
    model = Chatty(step_s, on) if more.pop("chatty", False) else Model(step_s, on)
    load = Load(dataset=dataset, form=form, batch_size=batch_size, options=more)
    return Made(load=load, model=model)


QUIET: dict[str, dict[str, Any]] = {
    "2 ms, tensors": {"kind": "tensors", "form": "module", "step_s": 0.002, "batches": 1000},
    "5 ms, tensors": {"kind": "tensors", "form": "module", "step_s": 0.005, "batches": 500},
    "10 ms, our worker": {
        "kind": "rows", "form": "fast", "step_s": 0.01, "batches": 300, "num_workers": 1,
        "executor": "workers",
    },
    "20 ms, torch's worker": {
        "kind": "rows", "form": "fast", "step_s": 0.02, "batches": 180, "num_workers": 1,
    },
    "50 ms, records": {
        "kind": "records", "form": "own", "step_s": 0.05, "batches": 80, "num_workers": 1,
    },
    "100 ms, torch's DataLoader": {
        "kind": "records", "form": "torch", "step_s": 0.1, "batches": 40, "num_workers": 1,
    },
    "200 ms, store": {
        "kind": "store", "form": "fast", "step_s": 0.2, "batches": 24, "num_workers": 2,
    },
    "8 ms, records, no workers": {
        "kind": "records", "form": "torch", "step_s": 0.008, "batches": 200,
    },
    "6 ms, torch's DataLoader": {
        "kind": "rows", "form": "torch", "step_s": 0.006, "batches": 300, "num_workers": 1,
    },
}  # fmt: skip

HEALTHY = [
    *several("healthy", Healthy(), healthy, QUIET),
    *several("healthy beside a hog", Healthy(allowed=("FD315",)), healthy, QUIET, hogs=1),
    *several(
        "healthy on a device", Healthy(), healthy,
        {
            "20 ms, torch's DataLoader": {
                "kind": "rows", "form": "torch", "on": "device", "step_s": 0.02, "batches": 160,
                "num_workers": 1,
            },
            "50 ms, FastDataModule, store": {
                "kind": "store", "form": "module", "on": "device", "step_s": 0.05, "batches": 70,
            },
        },
    ),
    *several(
        "healthy, mapped file", Healthy(), healthy,
        {
            "20 ms": {
                "kind": "mapped", "form": "fast", "step_s": 0.02, "batches": 160, "num_workers": 1,
            },
            "50 ms, no workers": {"kind": "mapped", "form": "torch", "step_s": 0.05, "batches": 80},
        },
    ),
    *several(
        "healthy, slow Python in training_step", Healthy(), healthy,
        {
            "10 + 20 ms": {
                "kind": "rows", "form": "fast", "step_s": 0.01, "batches": 100, "on": "device",
                "num_workers": 1, "chatty": True,
            },
            "30 + 20 ms, tensors": {
                "kind": "tensors", "form": "module", "step_s": 0.03, "batches": 80, "on": "device",
                "chatty": True,
            },
        },
    ),
]  # fmt: skip

"""Trainings in which more wants a CPU than there are: workers, threads, other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from trainings.decoding import Records, decoding
from trainings.parts import CPUS, Accepted, Load, Made, Model, several, spin


class Filtered(Dataset[torch.Tensor]):
    """Signals that are filtered by torch, which takes as many threads as it is told."""

    def __init__(self, count: int, channels: int) -> None:
        self.count = count
        self.signal = torch.rand(1, channels, 2048)
        self.filters = torch.rand(channels, channels, 15)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.nn.functional.conv1d(self.signal, self.filters)[0, 0]


def many_threads(worker: int) -> None:
    torch.set_num_threads(4)


class Matrices(Model):
    """A model on the CPU, whose matrices take all threads of torch."""

    def __init__(self, size: int) -> None:
        super().__init__(0.0)
        self.weights = torch.nn.Parameter(torch.rand(size, size) / size)

    def loss_of(self, batch: Any) -> torch.Tensor:
        return super().loss_of(batch) + (self.weights @ self.weights).mean()


def crowded(_: Path, kind: str, form: Any, workers: int, batches: int, size: int) -> Made:
    dataset: Any = Filtered(16 * batches, size)
    options: dict[str, Any] = {"num_workers": workers, "worker_init_fn": many_threads}
    model = Model(0.008, "host")
    if kind == "model":
        dataset, model = Records(16 * batches, size), Matrices(640)
        del options["worker_init_fn"]
    return Made(load=Load(dataset=dataset, form=form, options=options), model=model)


class Chores(Dataset[torch.Tensor]):
    """Samples that take a CPU for a given time."""

    def __init__(self, count: int, sample_s: float) -> None:
        self.count, self.sample_s = count, sample_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        spin(self.sample_s)
        return torch.full((200,), float(index))


def beside_hogs(_: Path, form: Any, workers: int, sample_s: float, batches: int) -> Made:
    options = {"num_workers": workers}
    return Made(load=Load(dataset=Chores(16 * batches, sample_s), form=form, options=options))


CROWD = Accepted(codes=("FD306",))

CROWDS = [
    *several(
        "too many workers", CROWD, decoding,
        {
            f"{5 * CPUS} workers": {
                "kind": "records", "form": "fast", "workers": 5 * CPUS, "size": 4000,
                "batches": 200, "on": "host", "step_s": 0.005,
            },
            f"{8 * CPUS} workers that tokenize": {
                "kind": "texts", "form": "fast", "workers": 8 * CPUS, "size": 800,
                "batches": 200, "on": "host", "step_s": 0.003,
            },
        },
    ),
    *several(
        "threads of torch in workers", Accepted(codes=("FD306", "FD315")), crowded,
        {
            "2 workers of 4": {
                "kind": "filters", "form": "fast", "workers": 2, "size": 64, "batches": 60,
            },
            "4 workers of 4": {
                "kind": "filters", "form": "own", "workers": 4, "size": 48, "batches": 100,
            },
        },
    ),
    *several(
        "model takes all CPUs",
        # Workers slow down the step as much as they lack.
        Accepted(codes=("FD306",), kinds=("data-bound", "balanced")), crowded,
        {
            "2 workers": {
                "kind": "model", "form": "fast", "workers": 2, "size": 12_000, "batches": 50,
            },
            "4 workers": {
                "kind": "model", "form": "fast", "workers": 4, "size": 8000, "batches": 70,
            },
        },
        threads=CPUS,
    ),
    *several(
        "only the hogs make it slow",
        Accepted(codes=("FD315",), kinds=("held up by other programs",)), beside_hogs,
        {"8 of 10 ms": {"form": "fast", "workers": 1, "sample_s": 0.0005, "batches": 150}},
        hogs=2 * CPUS,
    ),
    *several(
        "slow, and hogs beside it",
        Accepted(codes=("FD305", "FD315"), kinds=("data-bound", "held up by other programs")),
        beside_hogs,
        {"24 ms a batch": {"form": "fast", "workers": 1, "sample_s": 0.0015, "batches": 100}},
        hogs=CPUS,
    ),
]  # fmt: skip

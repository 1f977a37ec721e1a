"""A data set of the size of CIFAR-10 that is held in memory: do its workers outlive short epochs?

    python benchmarks/in_memory.py [--rounds 5] [--json figures.json]

It has 153 MB in one array. Whole epochs in turn: torch's DataLoader with two workers that are kept
(``persistent_workers=True``, the quickest that it can do) and with new ones in each epoch, and
ours with two workers that are kept while nothing has changed, and with ``num_workers="auto"``.
Printed besides: how long it takes to compare the data set with what it was, in CPU time, and in how
many of the epochs the workers were those of the epoch before.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from turns import arguments, in_turn, ratio, spread, write

from lightning_fastdata import FastDataLoader
from lightning_fastdata.fingerprint import fingerprint

TORCH_KEPT, TORCH_NEW = "torch, kept", "torch, new in each epoch"
OURS, AUTO = "ours, kept while unchanged", "ours, auto"


class Pictures(Dataset):
    """Pictures of 32 x 32, of which half are flipped, as numbers around 0."""

    def __init__(self) -> None:
        self.data = np.random.default_rng(0).integers(0, 256, (50_000, 32, 32, 3), np.uint8)
        self.labels = [index % 10 for index in range(len(self.data))]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = torch.from_numpy(self.data[index]).permute(2, 0, 1).float().div_(255)
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return (picture - 0.5) / 0.25, self.labels[index]


def epoch_s(loader: DataLoader) -> float:
    """Return how long an epoch takes."""
    began = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - began


def workers_of(loader: Any) -> set[int]:
    """Return the process numbers of the workers that wait for the next epoch."""
    kept = loader._iterator
    return set() if kept is None else {child.pid for child in kept.children.values()}


def main() -> None:
    """Print the table."""
    given = arguments(__doc__.splitlines()[0]).parse_args()
    data = Pictures()
    how: dict[str, Any] = {"batch_size": 128, "shuffle": True}
    loaders = {
        TORCH_KEPT: DataLoader(data, num_workers=2, persistent_workers=True, **how),
        TORCH_NEW: DataLoader(data, num_workers=2, **how),
        OURS: FastDataLoader(data, num_workers=2, persistent_workers="unchanged", **how),
        AUTO: FastDataLoader(data, num_workers="auto", **how),
    }
    compared_ms = []
    for _ in range(5):
        began = time.thread_time()
        fingerprint(data)
        compared_ms.append(1e3 * (time.thread_time() - began))
    print(f"a comparison, ms of CPU time: {spread(compared_ms)}")
    kept = dict.fromkeys((OURS, AUTO), 0)

    def epoch(name: str) -> float:
        before = workers_of(loaders[name]) if name in kept else set()
        took = epoch_s(loaders[name])
        if name in kept:
            kept[name] += bool(before) and before == workers_of(loaders[name])
        return took

    times = in_turn({name: lambda n=name: epoch(n) for name in loaders}, rounds=given.rounds)
    best = min((TORCH_KEPT, TORCH_NEW), key=lambda name: np.median(times[name]))
    for name, seconds in times.items():
        more = f"; kept for {kept[name]} of {given.rounds} epochs" if name in kept else ""
        print(f"{name:28} {spread(seconds)} s, x {ratio(times[best], seconds):.2f}{more}")
    write(given.json, "in_memory", {"compared_ms": compared_ms, "epochs_s": times, "kept": kept})


if __name__ == "__main__":
    main()

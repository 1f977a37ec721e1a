"""Shuffled batches of 64 uint8 images from a warm memory map: ours and torch's, in turn."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata.loading.loader import FastDataLoader

COUNT, SHAPE, BATCH = 4000, (256, 256, 3), 64


class Cached(Dataset):
    def __init__(self, path: str) -> None:
        self.images = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.images[index].copy())


def rate(loader) -> float:
    began, count = time.perf_counter(), 0
    for batch in loader:
        count += len(batch)
    return count / (time.perf_counter() - began)


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    print(
        platform.platform(),
        os.cpu_count(),
        "CPUs, torch",
        torch.__version__,
        "load",
        os.getloadavg(),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/images.npy"
        images = np.lib.format.open_memmap(path, "w+", np.uint8, (COUNT, *SHAPE))
        images[:] = np.random.default_rng(0).integers(0, 255, SHAPE, np.uint8)
        del images
        data = Cached(path)
        how = {"batch_size": BATCH, "shuffle": True, "drop_last": True, "persistent_workers": True}
        loaders = {
            "torch 2 workers": DataLoader(data, num_workers=2, **how),
            "ours workers": FastDataLoader(data, num_workers=2, executor="workers", **how),
            "ours gather": FastDataLoader(data.images, num_workers=1, executor="gather", **how),
        }
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for number in range(rounds + 1):
            for name, loader in loaders.items():
                if number:
                    rates[name].append(rate(loader))
                else:
                    rate(loader)
        base = rates["torch 2 workers"]
        for name, found in rates.items():
            ratio = statistics.median(a / b for a, b in zip(found, base, strict=True))
            print(f"{name:18s} median {statistics.median(found):9,.0f} images/s  x{ratio:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

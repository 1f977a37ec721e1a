"""Shuffled batches of 64 uint8 images of 256x256x3 from a warm memory map of 790 MB.

    python benchmarks/cached.py [--rounds 7] [--json results.json] [--publish]

torch's DataLoader with 0, 1, 2 and 4 workers, our executors, and, as the limit, the same bytes
copied in order into memory that is used again: all in one process, in turn, warm, with nothing done
to the batches.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from peers import ffcv_images
from published import TORCH_WORKERS, add_publish, over_best, publish
from rates import compare, show, summary
from torch.utils.data import DataLoader, Dataset
from turns import arguments, machine, write

from lightning_fastdata.loading.loader import FastDataLoader

COUNT, SHAPE, BATCH = 4000, (256, 256, 3), 64
BASE = "torch DataLoader, 0 workers"


class Cached(Dataset):
    def __init__(self, path: str) -> None:
        self.images = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.images[index].copy())


def torchs(workers: int) -> str:
    return f"torch DataLoader, {workers} workers"


def kept(workers: int) -> dict:
    return {"num_workers": workers, "persistent_workers": workers > 0}


def read(loader) -> int:
    return sum(len(batch) for batch in loader)


def copy_all(images, out) -> int:
    for start in range(0, COUNT - BATCH + 1, BATCH):
        np.copyto(out, images[start : start + BATCH])
    return COUNT // BATCH * BATCH


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    add_publish(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/images.npy"
        images = np.lib.format.open_memmap(path, "w+", np.uint8, (COUNT, *SHAPE))
        images[:] = np.random.default_rng(0).integers(0, 255, SHAPE, np.uint8)
        images.flush()
        del images
        data = Cached(path)
        how = {"batch_size": BATCH, "shuffle": True, "drop_last": True}
        two = {**how, **kept(2)}
        loaders = {
            **{torchs(n): DataLoader(data, **how, **kept(n)) for n in TORCH_WORKERS},
            "ours, workers": FastDataLoader(data, **two, executor="workers"),
            "ours, gather": FastDataLoader(data.images, **how, executor="gather"),
            "ours, gather ahead": FastDataLoader(
                data.images, **how, executor="gather", num_workers=1
            ),
        }
        ways = {name: partial(read, loader) for name, loader in loaders.items()}
        epoch = ffcv_images(data.images, Path(folder), batch=BATCH, workers=2)
        if isinstance(epoch, str):
            print(f"FFCV is not compared: {epoch}")
        else:
            ways["FFCV, 2 threads"] = lambda: sum(len(batch) for batch in epoch())
        out = np.zeros((BATCH, *SHAPE), np.uint8)
        ways["memcpy in order, the limit"] = partial(copy_all, data.images, out)
        turns = compare(ways, asked.rounds)
        rows = summary(turns, BASE)
        show(f"Cached images, {asked.rounds} rounds", "images", rows)
        raw = {name: [asdict(turn) for turn in found] for name, found in turns.items()}
        write(asked.json, "cached", {"medians": rows, "turns": raw})
        spent = {name: [1 / turn.per_s for turn in found] for name, found in turns.items()}
        by_workers = {n: spent[torchs(n)] for n in TORCH_WORKERS}
        named = {name: f"cached/{name.removeprefix('ours, ').partition(',')[0]}" for name in spent}
        ours = [name for name in spent if name.startswith(("ours", "FFCV"))]
        ratios = {named[name]: over_best(spent[name], by_workers) for name in ours}
        publish(ratios, machine(), asked=asked.publish)


if __name__ == "__main__":
    main()

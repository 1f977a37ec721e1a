"""Streams of other libraries: samples a second through FastDataLoader and torch's DataLoader.

    python benchmarks/streams.py [--rounds 5] [--samples 1000]

Both read the same files, with two workers kept between epochs, in turn in one process. Files are
written by each library's own writer; libraries that are not installed are left out.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from turns import arguments, in_turn, machine, ratio, write

from lightning_fastdata import FastDataModule

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
other = importlib.import_module("front_door.other_streams")
BATCH, WORKERS = 32, 2


def rate(loader: Any) -> float:
    """Return samples a second of one epoch."""
    began_s = time.perf_counter()
    samples = sum(len(batch["number"]) for batch in loader)
    assert samples == other.COUNT
    return samples / (time.perf_counter() - began_s)


def loaders_of(opened: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    """Return what reads an epoch with each loader, whose workers stay."""
    data = FastDataModule.from_datasets(opened(), batch_size=BATCH, num_workers=WORKERS)
    theirs = DataLoader(opened(), BATCH, num_workers=WORKERS, persistent_workers=True)
    return {"ours": partial(rate, data.train_dataloader()), "theirs": partial(rate, theirs)}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000, help="in the files of each library")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    other.COUNT, other.SIDE = asked.samples, 32
    found = {}
    print("| library | ours / DataLoader, median | lowest-highest |")
    print("| --- | ---: | ---: |")
    for name, library in other.LIBRARIES.items():
        if not other.importable(library.module):
            continue
        with tempfile.TemporaryDirectory() as folder:
            library.write(Path(folder), other.SHARDS)
            opened = partial(library.opened, Path(folder), False, other.as_it_is)
            rates = in_turn(loaders_of(opened), rounds=asked.rounds)
        ratios = sorted(a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True))
        found[name] = rates
        middle = ratio(rates["ours"], rates["theirs"])
        print(f"| {name} | {middle:.2f} | {ratios[0]:.2f}-{ratios[-1]:.2f} |", flush=True)
    write(asked.json, "streams", {"machine": machine(), "rates": found})


if __name__ == "__main__":
    main()

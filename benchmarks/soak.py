"""A long run under faults: is the stream exact, and do memory and descriptors stay where they are?

Batches of samples that draw random numbers are read by workers, of which one is killed every 200
batches, while a sample in 500 batches cannot be read (``on_bad_sample="replace"``). An undisturbed
loader without workers reads the same beside it, and each batch is compared byte by byte. Memory
(PSS) and descriptors are of this process with its workers, over time.

``--batches 200000`` is the whole; it takes two to twenty minutes on two cores.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, RandomSampler
from turns import arguments, tree_pss_bytes, write

from lightning_fastdata import FastDataLoader

BATCH, KILL_EVERY, BAD_EVERY, ROWS = 32, 200, 500, 12
LENGTH = 4 * BAD_EVERY * BATCH


class Rows(Dataset):
    """A row of its index and drawn numbers; of some samples, an error."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index % (BAD_EVERY * BATCH) == 7:
            raise ValueError(f"sample {index} cannot be read")
        return torch.cat([torch.full((64,), float(index)), torch.rand(8)]), index


def batches(loader: FastDataLoader, most: int) -> Iterator[Any]:
    """Yield the batches of as many epochs as it takes."""
    given = 0
    while given < most:
        for batch in loader:
            yield batch
            given += 1
            if given == most:
                return


def kill_one(loader: FastDataLoader, chance: random.Random) -> bool:
    """Kill a worker that has answered before; return whether there was one."""
    # A worker may be gone, or half made, at any moment.
    with contextlib.suppress(RuntimeError, IndexError, AttributeError, ValueError):
        children = [child for child in loader._iterator.children.values() if child.answers]
        chance.choice(children).process.kill()
        return True
    return False


def descriptors() -> int:
    """Return how many files and pipes this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def differs(one: Any, other: Any) -> bool:
    """Return whether a byte of two batches differs."""
    return not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    how: dict[str, Any] = {"batch_size": BATCH, "on_bad_sample": "replace"}
    loaders = [
        FastDataLoader(
            Rows(),
            executor=executor,
            num_workers=workers,
            persistent_workers=workers > 0,
            sampler=RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(0)),
            **how,
        )
        for executor, workers in (("workers", chosen.workers), ("inline", 0))
    ]
    ours = loaders[0]
    chance = random.Random(0)
    kills = wrong = seen = 0
    table = []
    began = time.perf_counter()
    print("  batch      s  kills  deaths  bad  PSS MiB  descriptors  wrong batches")
    for one, other in zip(*(batches(loader, chosen.batches) for loader in loaders), strict=True):
        seen += 1
        wrong += differs(one, other)
        if seen % KILL_EVERY == 0:
            kills += kill_one(ours, chance)
        if seen % max(1, chosen.batches // ROWS) == 0 or seen == chosen.batches:
            row = {
                "batch": seen,
                "s": round(time.perf_counter() - began, 1),
                "kills": kills,
                "deaths": ours.faults.deaths,
                "bad": ours.faults.samples,
                "pss_mib": round(tree_pss_bytes() / 2**20, 1),
                "descriptors": descriptors(),
                "wrong": wrong,
            }
            table.append(row)
            widths = (7, 7, 7, 8, 5, 9, 13, 15)
            texts = (
                f"{value!s:>{width}}" for value, width in zip(row.values(), widths, strict=True)
            )
            print("".join(texts), flush=True)
    ours.close()
    complete = seen == chosen.batches
    print("the stream was exact" if complete and not wrong else f"{wrong} of {seen} batches wrong")
    write(chosen.json, "soak", {"rows": table, "wrong": wrong, "batches": seen})


if __name__ == "__main__":
    main()

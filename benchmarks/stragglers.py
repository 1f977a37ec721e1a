"""Slow samples among fast ones: how many steps stall, and for how long.

3,200 samples of which 6 % sleep for 20 ms and the others for 1 ms, in batches of 16, for a step of
12 ms: four workers need 9 ms for a batch, so that no step need ever wait once the first batch is
there. A step is stalled if it waited for more than 1 ms.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from turns import arguments, in_turn, spread, write

from lightning_fastdata.loading.loader import FastDataLoader

SAMPLES, BATCH, WORKERS, STEP_S, STALL_S = 3200, 16, 4, 0.012, 0.001


class Uneven(Dataset):
    """Its samples sleep for 1 ms, or for 20 ms."""

    def __init__(self) -> None:
        draws = random.Random(0)
        self.sleeps_s = [0.02 if draws.random() < 0.06 else 0.001 for _ in range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        time.sleep(self.sleeps_s[index])
        return index


def epoch(loader: Any, steps: int) -> tuple[float, float, float]:
    """Return the first wait in ms, the mean wait per later step in ms, and the stalled share."""
    waits = []
    began = time.perf_counter()
    for _batch in loader:
        waits.append(time.perf_counter() - began)
        if len(waits) > steps:
            break
        time.sleep(STEP_S)
        began = time.perf_counter()
    first, later = waits[0], waits[1:]
    stalled = sum(wait > STALL_S for wait in later) / len(later)
    return first * 1000, statistics.mean(later) * 1000, stalled


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=SAMPLES // BATCH - 1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    data = Uneven()
    how: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": WORKERS}
    loaders = {
        "torch, in_order": DataLoader(data, persistent_workers=True, **how),
        "torch, in_order=False": DataLoader(data, persistent_workers=True, in_order=False, **how),
        "ours, workers": FastDataLoader(data, persistent_workers=True, executor="workers", **how),
        "ours, auto": FastDataLoader(data, batch_size=BATCH, shuffle=True, num_workers="auto"),
    }
    print(f"ours, auto: {loaders['ours, auto'].num_workers} workers")
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in loaders}

    def contender(name: str) -> Any:
        def once() -> float:
            results[name].append(epoch(loaders[name], chosen.steps))
            return results[name][-1][2]

        return once

    found = in_turn({name: contender(name) for name in loaders}, rounds=chosen.rounds)
    print(f"{'':24s}{'stalled steps %':>24s}{'wait ms a step':>26s}{'first batch ms':>26s}")
    table = {}
    for name, shares in found.items():
        firsts, means, _ = zip(*results[name][1:], strict=True)
        table[name] = {"stalled": shares, "wait_ms": means, "first_ms": firsts}
        percent = spread([100 * share for share in shares])
        print(f"{name:24s}{percent:>24s}{spread(list(means)):>26s}{spread(list(firsts)):>26s}")
    write(chosen.json, "stragglers", table)


if __name__ == "__main__":
    main()

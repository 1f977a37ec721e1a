"""How the number of workers is tuned, on the machine of the tests, where times are exact.

    python benchmarks/tune_exactly.py

That machine has two CPUs, which its processes share, and a clock of its own, so that every run
gives the same figures. But one step more or less may lead a tuner elsewhere, so that a single
training tells little: each workload is trained on five times, with steps of 5.8 to 6.2 ms. A
training has 700 steps, in batches of 16 samples, and begins with 4, or with 14 workers. Told are
median and highest of the mean steps of its second half, beside those of the best fixed number.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rig.machine import sleep
from rig.virtual_crew import on_machine

from lightning_fastdata import FastDataLoader
from lightning_fastdata.host import clock
from lightning_fastdata.loading.loader import Training
from lightning_fastdata.loading.tuner import Pressure, Tuner

BATCH, STEPS, STEPS_S = 16, 700, (0.0058, 0.0059, 0.006, 0.0061, 0.0062)
BEGUN_WITH, FIXED = (4, 14), (2, 4, 8, 14, 24)
_DRAWN = random.Random(0)
CHANCES = [_DRAWN.random() for _ in range(BATCH * STEPS)]
WORKLOADS: dict[str, Callable[[int], float]] = {
    "stragglers: 3 % wait 60 ms": lambda index: 0.06 if CHANCES[index] < 0.03 else 0.001,
    "bursts: 1 shard of 8 waits 10 ms": lambda index: 0.01 if index // 512 % 8 == 0 else 0.0005,
    "rare stragglers: 1 % wait 150 ms": lambda index: 0.15 if CHANCES[index] < 0.01 else 0.0005,
    "waits of 3 ms, spread exponentially": lambda index: -0.003 * math.log(1 - CHANCES[index]),
}
"""Workload -> the seconds that a sample waits."""


class Waiting(Dataset):
    """Samples that wait as a workload says."""

    def __init__(self, waits_s: Callable[[int], float]) -> None:
        self.waits_s = waits_s

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        sleep(self.waits_s(index))
        return torch.tensor(index)


def step_ms(waits_s: Callable[[int], float], workers: int, step_s: float, *, tuned: bool) -> float:
    """Return the mean step of the second half of a training, in milliseconds."""
    steps = []
    with on_machine():  # whose clock the tuner has from its beginning
        tuner = Tuner(most_workers=32, cpus=2.0, pressure=Pressure) if tuned else None
        loader = FastDataLoader(
            Waiting(waits_s), BATCH, executor="workers", num_workers=workers,
            training=Training(tuner=tuner),
        )  # fmt: skip
        began_s = clock.monotonic()
        for _ in loader:
            sleep(step_s)
            now_s = clock.monotonic()
            steps.append(1000 * (now_s - began_s))
            began_s = now_s
        loader.close()
    return statistics.fmean(steps[len(steps) // 2 :])


def main() -> None:
    """Print a table."""
    begun = " | ".join(f"from {workers} workers" for workers in BEGUN_WITH)
    print(f"| workload | {begun} | best number, fixed |\n| --- | ---: | ---: | ---: |")
    for name, waits_s in WORKLOADS.items():
        tuned = [
            _told([step_ms(waits_s, workers, step_s, tuned=True) for step_s in STEPS_S])
            for workers in BEGUN_WITH
        ]
        fixed = {
            workers: [step_ms(waits_s, workers, step_s, tuned=False) for step_s in STEPS_S]
            for workers in FIXED
        }
        best = min(fixed, key=lambda workers: statistics.median(fixed[workers]))
        print(f"| {name} | {' | '.join(tuned)} | {_told(fixed[best])} ({best}) |")


def _told(found_ms: list[float]) -> str:
    return f"{statistics.median(found_ms):.1f}, {max(found_ms):.1f}"


if __name__ == "__main__":
    main()

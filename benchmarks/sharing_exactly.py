"""What workers do for a training on their own CPUs, on the machine of the tests.

    python benchmarks/sharing_exactly.py

Times are exact there, so that every run gives the same figures. Samples compute, in batches of 64,
and so do the steps, of 50 ms: together they need 80 or 100 % of the CPUs. Told is the time of an
epoch over that with workers which read as beside a device: which share out each batch, and are as
far ahead at an epoch's end as ever. In the last rows one sample in 500 waits for half a second.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import Dataset, default_collate

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rig.machine import Machine, sleep, work
from rig.virtual_crew import USUAL, VirtualExecutor

from lightning_fastdata.executors.fetch import FetchPlan

BATCH, STEP_S, EPOCHS = 64, 0.05, (40, 160)
LOADS, CREWS = (0.8, 1.0), ((2, 2), (2, 4), (4, 4), (8, 8))
_DRAWN = random.Random(0)
WAITS = [_DRAWN.random() < 0.002 for _ in range(BATCH * max(EPOCHS))]


class Samples(Dataset):
    """Samples that do what ``cost`` does."""

    def __init__(self, cost: Callable[[int], None]) -> None:
        self.cost = cost

    def __getitem__(self, index: int) -> torch.Tensor:
        self.cost(index)
        return torch.tensor(index)


def epoch_s(
    cost: Callable[[int], None], cpus: int, workers: int, steps: int, known: float
) -> float:
    """Return the seconds of an epoch; ``known``: CPUs that the plan says are shared."""
    machine = Machine(cpus)
    with machine.installed():
        plan = FetchPlan(
            dataset=Samples(cost), collate_fn=default_collate, default_collation=True,
            timeout_s=0, cpus=known, look_ahead=max(9, 2 * workers),
        )  # fmt: skip
        pool = VirtualExecutor(machine, plan, costs=USUAL, processes=workers)
        began_ns = machine.now_ns
        pool.start_epoch(
            iter([list(range(at, at + BATCH)) for at in range(0, steps * BATCH, BATCH)]), 0
        )
        for _ in pool:
            work(STEP_S)
        took_s = (machine.now_ns - began_ns) / 1e9
        pool.close()
    return took_s


def main() -> None:
    """Print a table."""
    columns = [(load, steps) for load in LOADS for steps in EPOCHS]
    print(
        "| samples | " + " | ".join(f"{load:.0%}, {steps} steps" for load, steps in columns) + " |"
    )
    print("| --- |" + " ---: |" * len(columns))
    for name, waits in {"alike": False, "one in 500 waits 0.5 s": True}.items():
        for cpus, workers in CREWS:
            told = []
            for load, steps in columns:
                each_s = (load * cpus * STEP_S - STEP_S) / BATCH

                def cost(index: int, each_s: float = each_s, waits: bool = waits) -> None:
                    work(each_s)
                    if waits and WAITS[index]:
                        sleep(0.5)

                shared, apart = (
                    epoch_s(cost, cpus, workers, steps, known) for known in (cpus, math.inf)
                )
                told.append(f"{shared / apart:.2f}")
            print(f"| {name}; {cpus} CPUs, {workers} workers | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()

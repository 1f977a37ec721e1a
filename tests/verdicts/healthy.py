"""Trainings to which data is no matter: whoever calls one of them input-bound is wrong.

Cheap data under a heavier step, with several executors, workers, batch sizes and kinds of data, on
a virtual machine. Each is drawn from its number, so that the fiftieth is the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from rig.machine import sleep, work
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lightning_fastdata.insight.evidence import Evidence
from lightning_fastdata.insight.verdict import findings
from verdicts.workloads import CPUS, Samples, Training

HEALTHY = 50
INPUT_BOUND = frozenset(f"FD3{row:02}" for row in range(2, 9))
"""Findings that blame the loading of batches: FD302 to FD308."""
_STALL_MODERATE = 0.03


def blames_data(evidence: Evidence) -> bool:
    """Return whether data is said to cost 3 % of the step or more, or loading is blamed."""
    share = evidence.times.stall_share
    stalls = share is not None and share >= _STALL_MODERATE
    return stalls or any(found.code in INPUT_BOUND for found in findings(evidence))


class Uneven(Dataset[torch.Tensor]):
    """Samples that take some time more or less, as files of different size do."""

    def __init__(self, count: int, mean_s: float, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.seconds = draw.gamma(4.0, mean_s / 4.0, count)
        self.sample = torch.zeros(256)

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 2:
            sleep(self.seconds[index])
        else:
            work(self.seconds[index])
        return self.sample


class Stream(IterableDataset[torch.Tensor]):
    """Samples that come one after the other."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        here, all_of_them = (0, 1) if info is None else (info.id, info.num_workers)
        for _ in range(here, self.count, all_of_them):
            yield torch.zeros(64)


def healthy(number: int) -> Training:
    """Return one training, whose data would suffice for a step half as long."""
    draw = random.Random(number)
    batch_size = draw.choice((4, 8, 16, 32, 64))
    step_s = draw.choice((0.025, 0.04, 0.06, 0.12))
    count = max(12, round(1.0 / step_s)) * batch_size
    workers = draw.choice((1, 1, 2))
    # What one worker needs for a batch is at most a third of the step.
    each_s = draw.uniform(0.05, 0.33) * step_s / batch_size
    loader: dict[str, Any] = {"num_workers": workers}
    kind = number % 8
    dataset: Any
    if kind == 0:
        dataset = Samples(count, cpu_s=each_s)
    elif kind == 1:
        dataset = Samples(count, blocked_s=each_s)
    elif kind == 2:
        dataset = Uneven(count, each_s, number)
    elif kind == 3:
        dataset, loader = TensorDataset(torch.zeros(count, 32)), {"executor": "gather"}
    elif kind == 4:
        dataset, loader = Stream(count), {"executor": "inline"}
    elif kind == 5:
        dataset, loader = (
            Samples(count, floats=64),
            {"executor": "inline"},
        )
    elif kind == 6:
        dataset = Samples(count, blocked_s=each_s)
        loader = {"num_workers": 4}
    else:
        dataset = Samples(count, cpu_s=each_s / 2, blocked_s=each_s / 2, floats=2000)
        loader["persistent_workers"] = True
        loader["shuffle"] = True
    jitter = draw.choice((0.0, 0.0, 0.2))
    uneven = random.Random(number)

    def step(batch: Any, timeline: Any) -> None:
        length = step_s * uneven.uniform(1 - jitter, 1 + jitter)
        if CPUS > 1 and number % 5 == 0:
            work(length / 4)  # some of it on the host
            length *= 0.75
        sleep(length)

    epochs = 2 if loader.get("persistent_workers") else 1
    return Training(dataset=dataset, step=step, batch_size=batch_size, epochs=epochs, loader=loader)

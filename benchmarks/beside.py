"""Workers beside other busy programs: torch's DataLoader and FastDataLoader with two workers each.

    python benchmarks/beside.py [--rounds 5] [--json figures.json]

The other programs compute without end. They run in the session of this one, or each in a session
of its own, as what is started in another terminal or by a service: Linux shares out its CPUs among
sessions first. Seconds of whole epochs in turn, with workers that are kept; the ratio is the median
over rounds of torch's time over ours. In the last rows the training process computes, too.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from turns import arguments, hogs, spread, write

from lightning_fastdata import FastDataLoader

WORKLOADS = (
    # ms of a sample, samples of a batch, batches, ms of a step
    (3.0, 16, 20, 0),
    (0.3, 32, 60, 0),
    (0.025, 128, 90, 0),
    (1.0, 16, 50, 20),
    (0.1, 64, 150, 6),
)
_BEGIN_S = 0.3
"""Seconds that the other programs have to begin."""
OTHERS = ((0, False), (1, False), (2, False), (1, True), (2, True), (4, True))
"""How many other programs there are, and whether each has a session of its own."""


class Computes(Dataset):
    """Samples that compute for some milliseconds of CPU time."""

    def __init__(self, ms: float, length: int) -> None:
        self.ms, self.length = ms, length
        self.numbers = np.random.default_rng(0).random((60, 60), np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        compute(self.ms, self.numbers)
        return torch.zeros(3, 64, 64), index


def compute(ms: float, numbers: np.ndarray) -> None:
    """Compute for so long on one thread."""
    until = time.thread_time() + ms / 1e3
    while time.thread_time() < until:
        (numbers * numbers).sum()


def epoch_s(loader: DataLoader, step_ms: float) -> float:
    """Return how long an epoch takes, with steps that compute."""
    began, numbers = time.perf_counter(), np.ones((60, 60), np.float32)
    for _ in loader:
        compute(step_ms, numbers)
    return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    given = arguments(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    found = []
    for ms, batch_size, batches, step_ms in WORKLOADS:
        data = Computes(ms, batch_size * batches)
        how = {"batch_size": batch_size, "num_workers": 2, "persistent_workers": True}
        loaders = DataLoader(data, **how), FastDataLoader(data, **how)
        for loader in loaders:
            epoch_s(loader, step_ms)
        for programs, apart in OTHERS:
            with hogs(programs, apart=apart):
                time.sleep(_BEGIN_S)
                times = [[epoch_s(each, step_ms) for each in loaders] for _ in range(given.rounds)]
            ratios = [one / other for one, other in times]
            torchs, ours = map(statistics.median, zip(*times, strict=True))
            where = "sessions of their own" if apart else "this session"
            print(
                f"{ms:g} ms, step {step_ms} ms, {programs} in {where}: torch {torchs:.2f} s, "
                f"ours {ours:.2f} s, ratio {spread(ratios)}",
                flush=True,
            )
            row = {"sample_ms": ms, "step_ms": step_ms, "programs": programs, "apart": apart}
            found.append({**row, "torch_s": torchs, "ours_s": ours, "ratios": ratios})
    write(given.json, "beside", found)


if __name__ == "__main__":
    main()

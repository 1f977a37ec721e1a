"""What it costs to have side processes make batches: the constants that ``auto`` decides by.

    python benchmarks/handing_over.py [--rounds 5]

Batches of samples that are there already, read by two workers and by the training process itself.
CPU time of the training process and of the workers for each batch, from which a line through the
batch sizes gives a part for each batch and one for each row; what the training process itself
spends on reading and collating is taken off the workers'. The lowest of the rounds counts. Then the
time that a worker more makes an epoch longer that starts its workers anew. Put the figures into
``loading/plan_for.py`` (and the known work into ``loading/facts.py``).
"""

from __future__ import annotations

import time

import lightning.pytorch  # noqa: F401  # which makes a fork dearer
import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset
from turns import arguments, write

from lightning_fastdata import FastDataLoader
from lightning_fastdata.loading.facts import known_work
from lightning_fastdata.randomness.global_generators import GENERATORS
from lightning_fastdata.randomness.seeds import seed_global_generators

SIZES = (1, 32, 512)
LEAST_BATCHES, ROWS = 40, 10_000
STARTED = 4


class Ready(Dataset):
    def __init__(self, length: int) -> None:
        self.length, self.rows = length, torch.zeros(64, 16)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        return self.rows[index % 64], index


def spent_s() -> tuple[float, float]:
    """CPU seconds of this process, and of those below it."""
    below = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time(), sum(times.user + times.system for times in below)


def per_batch_ms(loader) -> tuple[float, float]:
    """Milliseconds of CPU time for each batch of an epoch, here and below."""
    here, below = spent_s()
    count = sum(1 for _ in loader)
    here_now, below_now = spent_s()
    return 1000 * (here_now - here) / count, 1000 * (below_now - below) / count


def lowest(loader, rounds: int) -> tuple[float, float]:
    per_batch_ms(loader)
    found = [per_batch_ms(loader) for _ in range(rounds)]
    return min(here for here, _ in found), min(below for _, below in found)


def start_ms(method: str, rounds: int) -> float:
    """Milliseconds to start one worker and to end it, in a program that has imported Lightning."""
    loader = FastDataLoader(
        Ready(4), 4, executor="workers", num_workers=STARTED, multiprocessing_context=method
    )
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        list(loader)
        took.append(time.perf_counter() - began)
    return 1000 * min(took) / STARTED


def line(sizes: list[int], ms: list[float]) -> tuple[float, float]:
    """Milliseconds for a batch and for a row; relative errors count alike."""
    rows = np.array(sizes, float)
    weights = 1 / np.maximum(ms, 1e-3)
    slope, at_none = np.polyfit(rows, ms, 1, w=weights)
    return max(0.0, float(at_none)), max(0.0, float(slope))


def main() -> None:
    asked = arguments(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    gives, takes = [], []
    print(f"{'batch':>6s} {'alone':>9s} {'training process':>17s} {'workers':>9s}   CPU ms a batch")
    for size in SIZES:
        data = Ready(size * max(LEAST_BATCHES, ROWS // size))
        alone, _ = lowest(DataLoader(data, size), asked.rounds)
        loader = FastDataLoader(
            data, size, executor="workers", num_workers=2, persistent_workers=True
        )
        here, below = lowest(loader, asked.rounds)
        loader.close()
        gives.append(here)
        takes.append(max(0.0, below - alone))
        print(f"{size:6d} {alone:9.3f} {here:17.3f} {below:9.3f}", flush=True)
    keyed = []
    for index in range(3000):
        began = time.thread_time()
        seed_global_generators(0, 0, index, (GENERATORS[index % 3],))
        keyed.append(time.thread_time() - began)
    give, take = line(list(SIZES), gives), line(list(SIZES), takes)
    constants = {
        "_GIVE_MS": give[0],
        "_GIVE_ROW_MS": give[1],
        "_TAKE_MS": take[0],
        "_TAKE_ROW_MS": take[1],
        "_KEY_MS": 1000 * float(np.median(keyed)),
        "_FORK_MS": start_ms("fork", asked.rounds),
        "_FRESH_MS": start_ms("spawn", asked.rounds),
        "_KNOWN_MS": 1000 * float(np.median([known_work() for _ in range(200)])),
    }
    for name, value in constants.items():
        print(f"{name} = {value:.4f}")
    write(asked.json, "handing_over", constants)


if __name__ == "__main__":
    main()

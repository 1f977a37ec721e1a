"""Whether memory, open files and objects stay flat over many small batches.

    python benchmarks/memory.py --batches 50000

PSS divides memory that several processes map among them, so that sums over processes hold. Program
files are left out, since what other programs map of them changes the numbers.
"""

from __future__ import annotations

import argparse
import gc
import os
import time

import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata import FastDataLoader

CASES = ("workers", "stream")


class Rows(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((512,), index), index


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        for index in range(self.length):
            yield torch.full((512,), index), f"row {index}"


def pss_bytes(pid):
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        own = [line for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    return sum(int(line.split()[1]) * 1024 for line in own)


def reading(pids):
    gc.collect()
    return {
        "training_mib": pss_bytes(os.getpid()) / 2**20,
        "side_mib": sum(map(pss_bytes, pids)) / 2**20,
        "files": len(os.listdir("/proc/self/fd")),
        "side_files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "objects": len(gc.get_objects()),
    }


def run(case, batches, workers):
    """Return what was read after the first tenth and at the end of one epoch, and us per batch."""
    kind = Stream if case == "stream" else Rows
    executor = "workers" if case == "stream" else case
    loader = FastDataLoader(
        kind(4 * batches // (workers if case == "stream" else 1)),
        batch_size=4,
        num_workers=workers,
        persistent_workers=True,
        executor=executor,
    )
    running = iter(loader)
    pids = [child.process.pid for child in loader._iterator.children.values()]
    warm = batches // 10
    for _ in range(warm):
        next(running)
    before, began = reading(pids), time.perf_counter()
    for _ in range(batches - warm - 4):
        next(running)
    spent_s = time.perf_counter() - began
    after = reading(pids)
    loader.close()
    return before, after, 1e6 * spent_s / (batches - warm - 4)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        before, after, us = run(case, arguments.batches, arguments.workers)
        print(f"{case}: {arguments.batches} batches, {us:.0f} us each")
        for name in before:
            grown = after[name] - before[name]
            print(f"  {name:14} {before[name]:12,.1f} -> {after[name]:12,.1f}  ({grown:+,.1f})")


if __name__ == "__main__":
    main()

"""Memory, open files and objects stay flat over many small batches.

``benchmarks/memory.py`` does the same for as many batches as one likes.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

BATCHES = 1400

# In a program of its own, since forked processes come to have copies of what a large one holds.
SCRIPT = """
import gc, json, os, sys
import torch
from torch.utils.data import Dataset, IterableDataset
from lightning_fastdata.loading.loader import FastDataLoader

kind, warm, batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])
torch.set_num_threads(1)

class Rows(Dataset):
    def __len__(self):
        return 4 * batches

    def __getitem__(self, index):
        return torch.full((64,), index), f"row {index}" if kind == "collated" else index

class Stream(IterableDataset):
    def __iter__(self):
        return map(Rows().__getitem__, range(4 * batches))

def own_bytes(pid):
    # Without program files: what other programs map of them changes the numbers.
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        lines = [line for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    assert len(lines) == 2
    return sum(int(line.split()[1]) * 1024 for line in lines)

def reading(pids):
    gc.collect()
    return {
        "bytes": sum(map(own_bytes, pids)),
        "files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "objects": len(gc.get_objects()),
    }

loader = FastDataLoader(Stream() if kind == "stream" else Rows(), batch_size=4, num_workers=1,
                        persistent_workers=True, executor="workers")
running = iter(loader)
for _ in range(warm):
    next(running)
pids = [os.getpid(), *(child.process.pid for child in loader._iterator.children.values())]
reading(pids)  # which takes memory itself, the first time
before = reading(pids)
for _ in range(batches - warm - 10):
    next(running)
print(json.dumps([before, reading(pids)]))
loader.close()
"""


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "warm"),
    [("rows", 1000), ("collated", 1000), ("stream", 4100)],  # so many positions are remembered
)
def test_nothing_grows_with_the_number_of_batches(kind: str, warm: int) -> None:
    command = [sys.executable, "-c", SCRIPT, kind, str(warm), str(BATCHES)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    before, after = json.loads(said)
    assert after["objects"] - before["objects"] < BATCHES / 10
    # A batch that was kept for longer than others has a slot of its own made.
    assert after["files"] - before["files"] <= 8
    assert after["bytes"] - before["bytes"] < 2 * 2**20

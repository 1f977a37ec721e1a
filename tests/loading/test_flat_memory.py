"""Memory, open files and objects stay flat over many small batches.

``benchmarks/memory.py`` does the same for as many batches as one likes.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata.loading.loader import FastDataLoader

BATCHES = 4000
WARM = 1000


class Rows(Dataset):
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> Any:
        return torch.full((64,), index), index


class Named(Rows):
    def __getitem__(self, index: int) -> Any:
        return torch.full((64,), index), f"row {index}"


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return map(Named().__getitem__, range(4 * BATCHES))


def own_bytes(pid: int) -> int:
    """Return the memory of a process without program files, shared parts divided by their users.

    What other programs map of the same files would change the numbers otherwise.
    """
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        lines = [line for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    assert len(lines) == 2
    return sum(int(line.split()[1]) * 1024 for line in lines)


def reading(pids: list[int]) -> tuple[int, int, int]:
    gc.collect()
    files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *pids)]
    return sum(map(own_bytes, (os.getpid(), *pids))), sum(files), len(gc.get_objects())


@pytest.mark.parametrize(
    ("executor", "dataset"),
    [("workers", Rows()), ("workers", Named()), ("sidecar", Rows()), ("workers", Stream())],
    ids=["rows", "collated", "sidecar", "stream"],
)
def test_nothing_grows_with_the_number_of_batches(executor: str, dataset: Any) -> None:
    loader = FastDataLoader(
        dataset, batch_size=4, num_workers=1, persistent_workers=True, executor=executor
    )
    running = iter(loader)
    pids = [side.process.pid for side in loader._iterator._sides.values()]
    for _ in range(WARM):
        next(running)
    memory, files, objects = reading(pids)
    for _ in range(BATCHES - WARM - 10):
        next(running)
    memory_end, files_end, objects_end = reading(pids)
    loader.close()
    assert objects_end - objects < (BATCHES - WARM) / 10
    # Slots are made while the first batches are kept for longer than others.
    assert files_end - files <= 8
    assert memory_end - memory < 4 * 2**20

"""A small object store: what is under way stays within its share, and a full one loses nothing.

The training is a task of Ray on a node whose store is about the smallest that Ray allows, and its
actors are there, too: what does not fit is on disk, where a test sees it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ext.ray.clusters import patiently
from torch.utils.data import Dataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.executors.ray import Ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

STORE, MIB = 80 * 2**20, 2**20


class Large(Dataset):
    """Samples of which so many MiB make a batch of one."""

    def __init__(self, mib: int, length: int = 24) -> None:
        self.mib, self.length = mib, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.mib, MIB), index, dtype=torch.uint8)


@pytest.fixture(scope="module")
def small(cluster):
    """A node with a small store."""
    how = {"num_cpus": 1, "object_store_memory": STORE, "resources": {"small": 1}}
    node = patiently(lambda: cluster.add_node(**how))
    yield node
    cluster.remove_node(node)


def on_small(function: Any, *arguments: Any) -> Any:
    """Return what a function returns that is called on the node with the small store."""
    task = ray.remote(num_cpus=0, resources={"small": 0.1}, max_retries=0)(function)
    return ray.get(task.remote(*arguments))


def spilled() -> int:
    """Return how many files this node's store has on disk, for want of memory."""
    context = ray.get_runtime_context()
    folder = Path(context.get_temp_dir(), context.get_session_name())
    return sum(1 for _ in folder.glob(f"ray_spilled_objects_{context.get_node_id()}*/*"))


def read(mib: int, loaders: int, filled: int) -> tuple[list[list[int]], int]:
    """Read with so many loaders in turn, in a store that so many MiB of ours fill.

    Also returns how many files of the store were on disk at once.
    """
    held = [ray.put(np.ones(MIB, np.uint8)) for _ in range(filled)]
    there = Ray(resources={"small": 0.01}, num_cpus=0.1)
    how = {"executor": there, "num_workers": 4, "prefetch_factor": 4}
    each = [FastDataLoader(Large(mib), 1, **how) for _ in range(loaders)]
    seen: list[list[int]] = [[] for _ in each]
    most = 0
    for batches in zip(*each, strict=True):
        for numbers, batch in zip(seen, batches, strict=True):
            assert batch.min() == batch.max()
            numbers.append(int(batch[0, 0, 0]))
        time.sleep(0.1)  # as a step takes, while actors read ahead
        most = max(most, spilled())
    for loader in each:
        loader.close()
    assert all(int(ray.get(mine).sum()) == MIB for mine in held)
    return seen, most


def test_loaders_of_a_node_keep_within_their_share_of_its_store(small) -> None:
    seen, files = on_small(read, 8, 2, 0)
    assert seen == [list(range(24))] * 2
    assert files == 0


def test_a_store_that_is_full_neither_loses_nor_reorders(small) -> None:
    seen, files = on_small(read, 20, 1, 60)
    assert seen == [list(range(24))]
    assert files > 0


def too_large() -> str:
    from lightning_fastdata.errors import BatchError

    loader = FastDataLoader(Large(96, 2), 1, executor="ray", num_workers=1)
    try:
        next(iter(loader))
    except BatchError as error:
        return str(error)
    finally:
        loader.close()
    return "no error"


def test_a_batch_that_is_larger_than_the_store_is_an_error_with_both_sizes(small) -> None:
    told = on_small(too_large)
    assert "The batch has 96.0 MiB" in told
    assert "80.0 MiB: it does not fit" in told
    assert "batch_size" in told
    assert "--object-store-memory" in told

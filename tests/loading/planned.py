"""Plans of loaders for machines, datasets and samples that tests make up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lightning_fastdata.host.cpu import CpuLimit
from lightning_fastdata.host.memory import HostMemory
from lightning_fastdata.loading.facts import DatasetFacts, SampleCost
from lightning_fastdata.loading.options import LoaderOptions
from lightning_fastdata.loading.plan_for import (
    TORCH,
    ExecutorChoice,
    LoaderPlan,
    LoaderSpec,
    Machine,
    Planner,
)

GIB = 2**30


class Stream(IterableDataset):
    """Not to be read."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("It has no length.")
        return self.length

    def __iter__(self) -> Any:
        raise AssertionError("it is read")


class Planted(Dataset):
    """Samples of a known kind of work, which note when they are read."""

    def __init__(self, work: Callable[[], object] = int, length: int = 40) -> None:
        self.work, self.length = work, length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        self.work()
        return torch.full((4,), float(index)), index


class WithoutLength:
    """A dataset with an index, of which nobody knows how long it is."""

    def __getitem__(self, index: int) -> int:
        return index


def cost(*, wall_ms: float, cpu_ms: float, **how: Any) -> SampleCost:
    return SampleCost(
        **{"wall_ms": wall_ms, "cpu_ms": cpu_ms, "size_bytes": 100, "samples": 8, **how}
    )


def cpus(count: int, ranks: int = 1) -> CpuLimit:
    return CpuLimit(
        affinity_cpus=count * ranks,
        quota_cpus=None,
        quota_source=None,
        ranks_on_host=ranks,
    )


def memory(
    ram: int = 64 * GIB,
    *,
    cgroup: int | None = None,
    shm: int | None = 32 * GIB,
    soft: int | None = 65536,
) -> HostMemory:
    return HostMemory(
        ram_available_bytes=ram,
        cgroup_available_bytes=cgroup,
        shm_free_bytes=shm,
        open_files_soft=soft,
        open_files_hard=soft,
    )


def machine(**changes: Any) -> Machine:
    """A roomy machine with a GPU, apart from the changes."""
    roomy: dict[str, Any] = {"cpu": cpus(8), "memory": memory(), "accelerator": "cuda"}
    return Machine(**{**roomy, **changes})


def plan(
    options: LoaderOptions | None = None,
    *,
    choice: ExecutorChoice = TORCH,
    dataset_length: int | None = 50_000,
    iterable: bool = False,
    in_memory: bool = False,
    batch_size: int = 64,
    stage: Any = "train",
    facts: DatasetFacts | None = None,
    **about_machine: Any,
) -> LoaderPlan:
    """Return a plan for a roomy machine, apart from what is said."""
    length = 0 if dataset_length is None else dataset_length
    dataset: Any = range(length) if dataset_length is not None else WithoutLength()
    if iterable:
        dataset = Stream(dataset_length)
    elif in_memory:
        dataset = TensorDataset(torch.empty(length, dtype=torch.uint8))
    spec = LoaderSpec(
        dataset=dataset,
        name="made up",
        options=options or LoaderOptions(),
        batch_size=batch_size,
        stage=stage,
    )
    return Planner(spec, facts or DatasetFacts(), machine(**about_machine)).decide(choice)

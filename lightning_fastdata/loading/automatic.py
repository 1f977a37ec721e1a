"""The plan of a loader that was built without a data module."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import TensorDataset

from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.loading.executors.suited import look_at, suited_executor
from lightning_fastdata.loading.keyed import fetches_in_batches
from lightning_fastdata.loading.loader_plan import LoaderPlan, plan_loader
from lightning_fastdata.loading.options import LoaderOptions
from lightning_fastdata.loading.order import dataset_length

if TYPE_CHECKING:
    from torch.utils.data import Dataset


def plan_alone(
    dataset: Dataset[Any],
    *,
    num_workers: int | None,
    prefetch_factor: int | None,
    persistent_workers: bool | None,
    multiprocessing_context: Any,
    default_collation: bool,
    transformed: bool,
    batch_size: int | None,
    read: bool = True,
) -> LoaderPlan:
    """Look at the dataset and the machine, and choose executor and workers as a data module would.

    Args:
        dataset: The dataset to load.
        num_workers: Set by the user; None: chosen.
        prefetch_factor: Set by the user; None: chosen.
        persistent_workers: Set by the user; None: chosen.
        multiprocessing_context: A context, the name of a start method, or None for Python's own.
        default_collation: Batches are collated by default.
        transformed: An Albumentations pipeline of the loader runs on each sample.
        batch_size: Samples in a batch; None: samples are delivered, or batches of unknown size.
        read: Whether samples may be read, by their positions from 0.
    """
    method = multiprocessing_context
    if method is not None and not isinstance(method, str):
        method = method.get_start_method()
    options = LoaderOptions(
        num_workers="auto" if num_workers is None else num_workers,
        prefetch_factor="auto" if prefetch_factor is None else prefetch_factor,
        persistent_workers="auto" if persistent_workers is None else persistent_workers,
        executor="auto",
    )
    look = look_at(dataset, default_collation=default_collation, transformed=transformed, read=read)
    cost = look.cost
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return plan_loader(
        options,
        stage="train",
        cpu=read_cpu_limit(),
        memory=read_host_memory(),
        accelerator="cpu" if device is None else device.type,
        sample_bytes=None if cost is None else cost.size_bytes,
        batch_size=batch_size or 1,
        dataset_length=dataset_length(dataset),
        iterable=look.stream,
        batched_fetch=fetches_in_batches(dataset) or isinstance(dataset, TensorDataset),
        in_memory=isinstance(dataset, TensorDataset),
        suited=suited_executor(
            look, workers="auto" if num_workers is None else num_workers, batch_size=batch_size
        ),
        cost=cost,
        split=look.split and batch_size is not None,
        start_method=method or multiprocessing.get_start_method(),
    )

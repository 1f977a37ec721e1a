"""The plan of a loader: what its dataset and this machine are found to be, and what follows."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import IterableDataset, TensorDataset

from lightning_fastdata.batches.keyed import fetches_in_batches
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.planning.choose_executor import Batches, suited_executor
from lightning_fastdata.planning.facts.inspection import DatasetFacts, Questions, inspect_dataset
from lightning_fastdata.planning.facts.probe import sample_bytes
from lightning_fastdata.planning.loader_plan import LoaderPlan, Suited, plan_loader
from lightning_fastdata.planning.options import LoaderOptions
from lightning_fastdata.planning.stream_split import splits_itself
from lightning_fastdata.randomness.seeds import find_composes

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lightning_fastdata.types import Stage

_SHARED: Final = (
    "{file} was opened in the training process and is read by a position that forked workers would "
    "share with each other, so {then}. Open it on first use in __getitem__ and not in __init__."
)


def needs_look(options: LoaderOptions) -> bool:
    """Return whether the options leave something open that rests on what samples cost."""
    if options.executor == "auto":
        return True
    return options.num_workers == "auto" and not KINDS[options.executor].is_torch


def reads_here(options: LoaderOptions) -> bool:
    """Return whether the options have the training process read samples itself."""
    if options.num_workers == 0:
        return True
    return options.executor != "auto" and KINDS[options.executor].caller_reads


def plan_for(
    dataset: Dataset[Any],
    facts: DatasetFacts,
    *,
    options: LoaderOptions,
    stage: Stage,
    batch_size: int | None,
    accelerator: str,
    local_ranks: int = 1,
    worker_init_fn: Callable[[int], None] | None = None,
    transformed: bool = False,
    recorded: bool = False,
) -> LoaderPlan:
    """Read the limits of this machine, and make the plan of a loader.

    Args:
        dataset: The dataset to load.
        facts: What was found out about it.
        options: What the user set.
        stage: What the loader is for.
        batch_size: Samples in one batch of this rank; None: samples are delivered, or batches of
            unknown size.
        accelerator: ``"cpu"``, ``"cuda"`` or another device type.
        local_ranks: Training processes that share this host.
        worker_init_fn: Called in each worker; it may give a stream's copy there its part.
        transformed: An Albumentations pipeline of the loader runs on each sample.
        recorded: The dataset's own pipelines leave something to the device.
    """
    stream = None
    if isinstance(dataset, IterableDataset):
        wrapped = transformed or bool(find_composes(dataset))
        stream = splits_itself(dataset, worker_init_fn=worker_init_fn, wrapped=wrapped)
    look = facts.look
    cpu = read_cpu_limit(local_ranks=local_ranks)
    suited = Suited("torch", KINDS["torch"].what)
    if facts.shared_file is not None and options.num_workers == "auto":
        why = f"workers would share the position in {facts.shared_file}, which is open here"
        suited = Suited("inline", why)
    elif look is not None:
        suited = suited_executor(
            look, workers=options.num_workers, batch_size=batch_size, cpus=cpu.usable_cpus
        )
    cost = None if look is None else look.cost
    size = None if cost is None else cost.size_bytes
    plan = plan_loader(
        options,
        suited=suited,
        cost=cost,
        split=look is not None and look.split and not recorded and batch_size is not None,
        start_method=facts.start_method or multiprocessing.get_start_method(),
        instead_of_fork=facts.start_method,
        stage=stage,
        cpu=cpu,
        memory=read_host_memory(),
        accelerator=accelerator,
        sample_bytes=size if facts.sample is None else sample_bytes(facts.sample),
        batch_size=batch_size or 1,
        dataset_length=dataset_length(dataset),
        iterable=isinstance(dataset, IterableDataset),
        stream=stream,
        batched_fetch=fetches_in_batches(dataset) or isinstance(dataset, TensorDataset),
        in_memory=isinstance(dataset, TensorDataset),
    )
    if facts.shared_file is None:
        return plan
    alone = KINDS[plan.executor].caller_reads or not plan.num_workers
    then = "the training process reads it" if alone else "samples will be mixed up"
    return replace(plan, limits=(*plan.limits, _SHARED.format(file=facts.shared_file, then=then)))


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
    collate_fn: Callable[[Any], Any] | None,
    worker_init_fn: Callable[[int], None] | None,
    sampler: Any = None,
    batch_sampler: Any = None,
) -> LoaderPlan:
    """Choose executor and workers of a loader without a data module, as a data module would.

    Args:
        dataset: The dataset to load.
        num_workers: Set by the user; None: chosen.
        prefetch_factor: Set by the user; None: chosen.
        persistent_workers: Set by the user; None: chosen.
        multiprocessing_context: A context, the name of a start method, or None for Python's own.
        default_collation: Batches are collated by default.
        transformed: An Albumentations pipeline of the loader runs on each sample.
        batch_size: Samples in a batch; None: samples are delivered, or batches of unknown size.
        collate_fn: The user's own collation.
        worker_init_fn: Called in each worker with its number; it may give a stream's copy its part.
        sampler: The user's own.
        batch_sampler: The user's own.
    """
    method = multiprocessing_context
    if method is not None and not isinstance(method, str):
        method = method.get_start_method()
    options = LoaderOptions(
        num_workers="auto" if num_workers is None else num_workers,
        prefetch_factor="auto" if prefetch_factor is None else prefetch_factor,
        persistent_workers="auto" if persistent_workers is None else persistent_workers,
        multiprocessing_context="auto" if method is None else method,
        executor="auto",
    )
    facts = inspect_dataset(
        dataset,
        Questions(look=Batches(default_collation, transformed, batch_size, collate_fn)),
        name=type(dataset).__name__,
        start_method=method,
        worker_init_fn=worker_init_fn,
        sampler=sampler,
        batch_sampler=batch_sampler,
        reads_here=reads_here(options),
    )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    plan = plan_for(
        dataset,
        facts,
        options=options,
        stage="train",
        batch_size=batch_size,
        accelerator="cpu" if device is None else device.type,
        worker_init_fn=worker_init_fn,
        transformed=transformed,
    )
    # Limits of the machine are in plan.explain(); these are about the samples themselves.
    shared = plan.limits[-1:] if facts.shared_file is not None else ()
    for warning in (*facts.warnings, *shared):
        warnings.warn(f"{type(dataset).__name__}: {warning}", FastDataWarning, stacklevel=4)
    return plan

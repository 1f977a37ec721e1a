"""One loader of a data module: the look at its dataset, its plan, and its construction."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import Dataset, IterableDataset, SequentialSampler, TensorDataset

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.loading.executors.suited import look_at, suited_executor
from lightning_fastdata.loading.keyed import fetches_in_batches
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.loader_plan import LoaderPlan, plan_loader
from lightning_fastdata.loading.options import LoaderOptions
from lightning_fastdata.loading.order import (
    EvaluationBatchSampler,
    ShuffleSampler,
    dataset_length,
)
from lightning_fastdata.loading.probe import further_samples, probe_sample, sample_bytes

if TYPE_CHECKING:
    from lightning_fastdata.augment.contract import StageTransform
    from lightning_fastdata.types import Stage

_NEEDS_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
_REPLACED_BY_BATCH_SAMPLER = ("batch_size", "sampler", "drop_last")
_FURTHER_SAMPLES = 7
"""Read beside the first one to see whether all images have one size."""
_ORDERS = ("shuffle", "sampler", "batch_sampler")


def checked_sample(
    dataset: Dataset[Any], name: str, transforms: Sequence[StageTransform], *, read: bool
) -> Any:
    """Return a sample of the dataset that suits the transforms, or None if none may be read.

    Args:
        dataset: The dataset of one loader.
        name: How the user knows it.
        transforms: What will run on its samples.
        read: Whether to read a sample, or only to look at the length.

    Raises:
        DatasetError: The dataset is empty, or its first sample cannot be read.
        BatchError: The sample lacks what a transform needs.
    """
    if not read:
        if dataset_length(dataset) == 0:
            raise DatasetError(f"{name} returned an empty {type(dataset).__name__} (length 0).")
        return None
    sample = probe_sample(dataset, name)
    if sample is not None:
        for transform in transforms:
            transform.check_sample(sample)
    return sample


def some_samples(dataset: Dataset[Any], sample: Any) -> Iterator[Any]:
    """Return the sample that was read and some from all over the dataset, each read when asked for.

    Args:
        dataset: The dataset of one loader.
        sample: What :func:`checked_sample` returned; without one there are none.
    """
    if sample is not None:
        yield sample
        yield from further_samples(dataset, _FURTHER_SAMPLES)


def plan_for(
    dataset: Dataset[Any],
    *,
    options: LoaderOptions,
    stage: Stage,
    sample: Any,
    batch_size: int,
    accelerator: str,
    local_ranks: int,
    collate_fn: Any = None,
    transformed: bool = False,
) -> LoaderPlan:
    """Read what the plan of a loader rests on, and make the plan.

    Args:
        dataset: The dataset to load.
        options: What the user set.
        stage: What the loader is for.
        sample: A sample of the dataset; None if unknown.
        batch_size: Samples in one batch of this rank.
        accelerator: ``"cpu"``, ``"cuda"`` or another device type.
        local_ranks: Training processes that share this host.
        collate_fn: Of the user; None: the default collation.
        transformed: An Albumentations pipeline runs on each sample.
    """
    look = suited = None
    if options.executor == "auto" or (
        options.executor != "torch" and options.num_workers == "auto"
    ):
        look = look_at(dataset, default_collation=collate_fn is None, transformed=transformed)
        suited = suited_executor(look, workers=options.num_workers, batch_size=batch_size)
    return plan_loader(
        options,
        suited=suited or ("torch", "torch's own iterator"),
        cost=None if look is None else look.cost,
        split=look is not None and look.split,
        start_method=multiprocessing.get_start_method(),
        stage=stage,
        cpu=read_cpu_limit(local_ranks=local_ranks),
        memory=read_host_memory(),
        accelerator=accelerator,
        sample_bytes=None if sample is None else sample_bytes(sample),
        batch_size=batch_size,
        dataset_length=dataset_length(dataset),
        iterable=isinstance(dataset, IterableDataset),
        batched_fetch=fetches_in_batches(dataset) or isinstance(dataset, TensorDataset),
        in_memory=isinstance(dataset, TensorDataset),
    )


def build_loader(
    dataset: Dataset[Any],
    *,
    stage: Stage,
    plan: LoaderPlan,
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any],
    ranks: int = 1,
) -> FastDataLoader:
    """Return the loader; a sharing strategy that was planned is set for the whole process.

    Args:
        dataset: The dataset to load.
        stage: Training is shuffled, by the seed in ``settings``.
        plan: The settings that were chosen for this machine.
        settings: Further arguments of :class:`FastDataLoader`.
        overrides: Arguments that win over all others; what they exclude is left out.
        ranks: Training processes. With more than one, evaluation is put into batches that can be
            shared among them, unless an override says which samples come in which order.
    """
    if plan.sharing_strategy is not None:
        torch.multiprocessing.set_sharing_strategy(plan.sharing_strategy)  # type: ignore[no-untyped-call]
    arguments = {**settings, **plan.dataloader_kwargs(), "worker_nice": plan.worker_nice}
    arguments |= {"executor": plan.executor, "page_lock": plan.page_lock}
    if plan.stall_timeout_s is not None:
        arguments["stall_timeout"] = plan.stall_timeout_s
    if stage == "train" and not isinstance(dataset, IterableDataset):
        arguments["sampler"] = ShuffleSampler(cast("Any", dataset), settings["seed"])
    if overrides.get("num_workers") == 0:
        arguments = _without(arguments, _NEEDS_WORKERS)
    arguments = {**arguments, **overrides}
    if ranks > 1 and stage != "train" and _can_be_shared(dataset, arguments):
        arguments["batch_sampler"] = EvaluationBatchSampler(
            SequentialSampler(cast("Any", dataset)), arguments["batch_size"], arguments["drop_last"]
        )
        arguments = _without(arguments, _REPLACED_BY_BATCH_SAMPLER)
    elif "batch_sampler" in overrides:
        replaced = [name for name in _REPLACED_BY_BATCH_SAMPLER if name not in overrides]
        arguments = _without(arguments, replaced)
    return FastDataLoader(dataset, **arguments)


def _can_be_shared(dataset: Dataset[Any], arguments: Mapping[str, Any]) -> bool:
    if isinstance(dataset, IterableDataset) or dataset_length(dataset) is None:
        return False
    return arguments["batch_size"] is not None and not any(
        arguments.get(name) is not None for name in _ORDERS
    )


def _without(arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}

"""How several ranks share the samples that are evaluated."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.order.epoch_order import (
    EvaluationBatchSampler,
    can_share_evenly,
    dataset_length,
)
from lightning_fastdata.plugin.seams.trainer_facts import running_stage

if TYPE_CHECKING:
    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.types import Stage

_METHOD_OF: dict[Stage, str] = {"val": "validate", "test": "test"}


def sharing_ranks(trainer: Any) -> int:
    """Return the processes among which Lightning spreads the samples of a loader, 1 without any."""
    if trainer is None:
        return 1
    # Not public; without it the answer is Lightning's default.
    connector = getattr(trainer, "_accelerator_connector", None)
    if not getattr(connector, "use_distributed_sampler", True):
        return 1
    return int(trainer.world_size)


def settle_sharing(loader: FastDataLoader, name: str, stage: Stage, trainer: Any) -> None:
    """Make sure that what the ranks share can be, and is averaged as on one device.

    Args:
        loader: For evaluation; one that Lightning shares in its own way is left alone.
        name: How messages call its dataset.
        stage: The stage it is for.
        trainer: The trainer it is for, or None.

    Raises:
        DatasetError: There is less to predict than there are ranks, whereupon Lightning ends those
            that have nothing and leaves the others waiting.
    """
    if not isinstance(loader.batch_sampler, EvaluationBatchSampler):
        return
    average_exactly(trainer.strategy)
    length = dataset_length(loader.dataset) or 0
    # Few strategies cannot say before they are set up how many share, and then it is not asked.
    if stage != "predict" or length >= trainer.world_size or running_stage(trainer) != stage:
        return
    replicas = int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
    if length < replicas:
        raise DatasetError(
            f"{name} returned {length} samples to predict on {replicas} devices, and each needs "
            "one. Predict on fewer devices."
        )


def silence_padding_warning(loaders: Iterable[FastDataLoader], stage: Stage, trainer: Any) -> None:
    """Keep Lightning from warning that samples are evaluated twice, if none is.

    Args:
        loaders: All loaders of the stage.
        stage: The stage they are for.
        trainer: The trainer they are for, or None.
    """
    if stage not in _METHOD_OF or not all(_is_shared_evenly(loader, trainer) for loader in loaders):
        return
    method = f"trainer.{_METHOD_OF[stage]}()"
    message = f"Using `DistributedSampler` with the dataloaders. During `{method}`"
    warnings.filterwarnings("ignore", message=re.escape(message), category=UserWarning)


def _is_shared_evenly(loader: FastDataLoader, trainer: Any) -> bool:
    batch_sampler = loader.batch_sampler
    if not isinstance(batch_sampler, EvaluationBatchSampler):
        return False
    length = dataset_length(loader.dataset) or 0
    return can_share_evenly(length, batch_sampler.batch_size, trainer.world_size)


def average_exactly(strategy: Any) -> None:
    """Keep a strategy from rounding the mean of whole numbers over the ranks.

    An epoch's mean in ``self.log(..., sync_dist=True)`` is the mean of the ranks' sums over the
    mean of their counts. Lightning rounds the latter down, because counts are integers: 11 samples
    on two ranks count as 2 * 5, and the logged mean is a tenth too large.

    Args:
        strategy: Of the trainer; the attribute ``reduce`` of this one object is replaced.
    """
    if not isinstance(vars(strategy).get("reduce"), _ExactReduce):
        strategy.reduce = _ExactReduce(strategy.reduce)


class _ExactReduce:
    """A strategy's ``reduce`` whose means of integers are floating-point numbers."""

    def __init__(self, reduce: Callable[..., Any]) -> None:
        self.reduce = reduce

    def __call__(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        whole = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        if whole and not tensor.is_complex() and reduce_op in ("mean", "avg"):
            tensor = tensor.to(torch.get_default_dtype())
        return self.reduce(tensor, group=group, reduce_op=reduce_op)

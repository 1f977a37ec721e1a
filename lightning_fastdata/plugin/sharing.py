"""How several ranks share the samples that are evaluated."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.loading.order import (
    EvaluationBatchSampler,
    can_share_evenly,
    dataset_length,
)
from lightning_fastdata.plugin.trainer_facts import running_stage

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


def settle_sharing(
    loaders: Sequence[tuple[str, FastDataLoader]], stage: Stage, trainer: Any
) -> None:
    """Make sure that what the ranks share is evaluated, and averaged, as on one device.

    Args:
        loaders: All loaders of the stage, with the names that messages call them by.
        stage: The stage they are for.
        trainer: The trainer that asked for them, or None.

    Raises:
        DatasetError: There is less to predict than there are ranks, whereupon Lightning ends those
            that have nothing and leaves the others waiting.
    """
    ranks = sharing_ranks(trainer)
    if ranks == 1:
        return
    shared = [
        (name, batch_sampler, dataset_length(loader.dataset) or 0)
        for name, loader in loaders
        if isinstance(batch_sampler := loader.batch_sampler, EvaluationBatchSampler)
    ]
    if stage == "predict" and running_stage(trainer) == "predict":
        for name, _, length in shared:
            # Asked only here, because some strategies have no answer before they are set up.
            if length < ranks and length < (replicas := _replicas(trainer)):
                raise DatasetError(
                    f"{name} returned {length} samples to predict on {replicas} devices, and each "
                    "needs one. Predict on fewer devices."
                )
    if shared and stage in _METHOD_OF:
        average_exactly(trainer.strategy)
    if stage in _METHOD_OF and len(shared) == len(loaders):
        batches = [(length, batch_sampler.batch_size) for _, batch_sampler, length in shared]
        if all(can_share_evenly(length, size, ranks) for length, size in batches):
            silence_padding_warning(_METHOD_OF[stage])


def silence_padding_warning(method: str) -> None:
    """Keep Lightning from warning that its sampler evaluates some samples twice.

    Where :class:`EvaluationBatchSampler` makes the batches, none is.

    Args:
        method: Of the trainer, ``"validate"`` or ``"test"``; the warning names it.
    """
    message = f"Using `DistributedSampler` with the dataloaders. During `trainer.{method}()`"
    warnings.filterwarnings("ignore", message=re.escape(message), category=UserWarning)


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


def _replicas(trainer: Any) -> int:
    return int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))

"""What of Lightning does not suit ranks that share evaluation evenly: its means and its warning."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_fastdata.order.epoch_order import (
    EvaluationBatchSampler,
    can_share_evenly,
    dataset_length,
)
from lightning_fastdata.plugin.seams.for_one_run import replace_for_one_run
from lightning_fastdata.plugin.seams.internals import data_connector

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer

_PADDED: Final = "Using `DistributedSampler` with the dataloaders. During `trainer."


def average_exactly(trainer: Trainer) -> None:
    """Keep a trainer's strategy from rounding the mean of whole numbers over the ranks, in one run.

    An epoch's mean in ``self.log(..., sync_dist=True)`` is the mean of the ranks' sums over the
    mean of their counts. Lightning rounds the latter down, because counts are integers: 11 samples
    on two ranks count as 2 * 5, and the logged mean is a tenth too large.
    """
    strategy = trainer.strategy
    if not isinstance(vars(strategy).get("reduce"), _ExactReduce):
        replace_for_one_run(trainer, strategy, "reduce", _ExactReduce(strategy.reduce))


class _ExactReduce:
    """A strategy's ``reduce`` whose means of integers are floating-point numbers."""

    def __init__(self, reduce: Callable[..., Any]) -> None:
        self.reduce = reduce

    def __call__(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        whole = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        if whole and not tensor.is_complex() and reduce_op in ("mean", "avg"):
            tensor = tensor.to(torch.get_default_dtype())
        return self.reduce(tensor, group=group, reduce_op=reduce_op)


def silence_padding_warning(trainer: Trainer) -> None:
    """Keep Lightning from warning, in one run, that samples of evenly shared loaders count twice.

    The warning of every other loader is given.
    """
    connector = data_connector(trainer)
    if connector is None:
        return
    prepare = connector._prepare_dataloader
    if not isinstance(prepare, _QuietPrepare):
        quiet = _QuietPrepare(prepare, trainer.world_size)
        replace_for_one_run(trainer, connector, "_prepare_dataloader", quiet)


class _QuietPrepare:
    """A data connector's ``_prepare_dataloader``, which warns only where there is reason to."""

    def __init__(self, prepare: Callable[..., object], ranks: int) -> None:
        self.prepare = prepare
        self.ranks = ranks

    def __call__(self, dataloader: object, *args: Any, **kwargs: Any) -> object:
        with warnings.catch_warnings():
            if is_shared_evenly(dataloader, self.ranks):
                message = re.escape(_PADDED)
                warnings.filterwarnings("ignore", message=message, category=UserWarning)
            return self.prepare(dataloader, *args, **kwargs)


def is_shared_evenly(loader: Any, ranks: int) -> bool:
    """Return whether ranks share a loader's samples, each once and in as many batches on each."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(batch_sampler, EvaluationBatchSampler):
        return False
    length = dataset_length(loader.dataset) or 0
    return can_share_evenly(length, batch_sampler.batch_size, ranks)

"""How several ranks share the samples that are evaluated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.order.epoch_order import EvaluationBatchSampler, dataset_length
from lightning_fastdata.plugin.seams.internals import spreads_samples
from lightning_fastdata.plugin.seams.loaders import average_exactly, silence_padding_warning
from lightning_fastdata.plugin.seams.trainer import running_stage

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.types import Stage


def sharing_ranks(trainer: Trainer | None) -> int:
    """Return the processes among which Lightning spreads the samples of a loader, 1 without any."""
    return 1 if trainer is None or not spreads_samples(trainer) else int(trainer.world_size)


def settle_sharing(
    loader: FastDataLoader, name: str, stage: Stage, trainer: Trainer | None
) -> None:
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
    if trainer is None or not isinstance(loader.batch_sampler, EvaluationBatchSampler):
        return
    average_exactly(trainer)
    silence_padding_warning(trainer)
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

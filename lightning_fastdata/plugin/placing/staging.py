"""Batches that wait for their transform, alone or combined from several loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_fastdata.augment.dataset_pipelines import DatasetDraws
from lightning_fastdata.batches.staged import StagedBatch

if TYPE_CHECKING:
    import torch

    from lightning_fastdata.plugin.placing.stage_transforms import StageTransforms
    from lightning_fastdata.types import Batch


def inside(batch: Batch, function: Callable[[Batch], Batch]) -> Batch:
    """Apply a function to a batch as the user knows it, leaving its draws where they are."""
    if isinstance(batch, StagedBatch):
        return batch.with_batch(function(batch.batch))
    if type(batch) is dict and _any_staged(batch.values()):
        plain = function({key: _unstaged(value) for key, value in batch.items()})
        return {key: _restaged(batch[key], value) for key, value in plain.items()}
    if type(batch) in (list, tuple) and _any_staged(batch):
        plain = function(type(batch)(_unstaged(value) for value in batch))
        return type(batch)(map(_restaged, batch, plain))
    return function(batch)


def _unstaged(value: Any) -> Any:
    return value.batch if isinstance(value, StagedBatch) else value


def _restaged(staged: Any, value: Any) -> Any:
    return staged.with_batch(value) if isinstance(staged, StagedBatch) else value


def transfer(batch: Batch, move: Callable[[Batch], Batch], device: torch.device) -> Batch:
    """Move a batch, and what was drawn for its transform, to the device.

    Args:
        batch: A batch, or several combined.
        move: Moves a batch as the user knows it.
        device: Where the draws go.
    """

    def moved(staged: StagedBatch) -> Batch:
        if staged.crossing is not None:
            return staged.crossing.land()
        draws = staged.draws
        if draws is not None:
            draws = draws.to(device, non_blocking=device.type == "cuda")
        return StagedBatch(move(staged.batch), draws, staged.stage)

    if isinstance(batch, StagedBatch):
        return moved(batch)
    if type(batch) is dict and _any_staged(batch.values()):
        return {key: transfer(value, move, device) for key, value in batch.items()}
    if type(batch) in (list, tuple) and _any_staged(batch):
        return type(batch)(transfer(value, move, device) for value in batch)
    return move(batch)


def _any_staged(values: Any) -> bool:
    return any(isinstance(value, StagedBatch) for value in values)


def finish(batch: Batch, transforms: StageTransforms) -> tuple[Batch, bool]:
    """Run what the batch waits for, and return it plain, with whether anything ran.

    Args:
        batch: A batch on the device; combined loaders give a dict, list or tuple of them.
        transforms: The transforms of each stage; a batch knows its own stage.
    """
    if isinstance(batch, StagedBatch):
        plain, draws = batch.batch, batch.draws
        if isinstance(draws, DatasetDraws):
            plain, draws = draws.apply(plain), None
        for transform in transforms[batch.stage]:
            if transform.starts_in_worker and draws is None:
                continue  # ran in the workers
            plain = transform.apply(plain, draws)
        return plain, True
    if type(batch) is dict and _any_staged(batch.values()):
        return {key: finish(value, transforms)[0] for key, value in batch.items()}, True
    if type(batch) in (list, tuple) and _any_staged(batch):
        return type(batch)(finish(value, transforms)[0] for value in batch), True
    return batch, False

"""Batches that wait for their transform, alone or combined from several loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastdata.augment.dataset_pipelines import DatasetDraws
from lightning_fastdata.batches.staged import StagedBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lightning_fastdata.plugin.placing.stage_transforms import StageTransforms
    from lightning_fastdata.types import Batch


def inside(batch: Batch, function: Callable[[Batch], Batch]) -> Batch:
    """Apply a function to a batch as the user knows it, leaving its draws where they are."""
    if isinstance(batch, StagedBatch):
        return batch.with_batch(function(batch.batch))
    if not _is_combined(batch):
        return function(batch)
    plain = function(_each(batch, _unstaged))
    if type(batch) is dict:
        return {key: _restaged(batch[key], value) for key, value in plain.items()}
    return type(batch)(map(_restaged, batch, plain))


def transfer(batch: Batch, move: Callable[[Batch], Batch], device: torch.device) -> Batch:
    """Move a batch, and what was drawn for its transform, to the device.

    Args:
        batch: A batch, or several combined.
        move: Moves a batch as the user knows it.
        device: Where the draws go.
    """
    if isinstance(batch, StagedBatch):
        if batch.crossing is not None:
            return batch.crossing.land()
        draws = batch.draws
        if draws is not None:
            draws = draws.to(device, non_blocking=device.type == "cuda")
        return StagedBatch(move(batch.batch), draws, batch.stage)
    if _is_combined(batch):
        return _each(batch, lambda part: transfer(part, move, device))
    return move(batch)


def carry_out_draws(batch: Batch, transforms: StageTransforms) -> Batch:
    """Carry out what the workers drew for a batch, or for several combined, on the device.

    Only that: it reads the batch and nothing else. Callables may read what the training writes and
    draw from generators that it draws from, so they run where they would without prefetching.
    """
    if isinstance(batch, StagedBatch):
        if isinstance(batch.draws, DatasetDraws):
            return StagedBatch(batch.draws.apply(batch.batch), None, batch.stage)
        first = next((t for t in transforms[batch.stage] if t.starts_in_worker), None)
        if batch.draws is None or first is None:
            return batch
        return StagedBatch(first.apply(batch.batch, batch.draws), None, batch.stage)
    if _is_combined(batch):
        return _each(batch, lambda part: carry_out_draws(part, transforms))
    return batch


def finish(batch: Batch, transforms: StageTransforms) -> tuple[Batch, bool]:
    """Run what the batch waits for, and return it plain, with whether anything ran.

    Args:
        batch: A batch on the device; combined loaders give a dict, list or tuple of them.
        transforms: The transforms of each stage; a batch knows its own stage.
    """
    if _is_combined(batch):
        return _each(batch, lambda part: finish(part, transforms)[0]), True
    if not isinstance(batch, StagedBatch):
        return batch, False
    drawn = carry_out_draws(batch, transforms)
    plain = drawn.batch
    for transform in transforms[batch.stage]:
        if not transform.starts_in_worker:  # else it ran there, and in carry_out_draws
            plain = transform.apply(plain, None)
    return plain, True


def _unstaged(value: Batch) -> Batch:
    return value.batch if isinstance(value, StagedBatch) else value


def _restaged(staged: Batch, value: Batch) -> Batch:
    return staged.with_batch(value) if isinstance(staged, StagedBatch) else value


def _is_combined(batch: Batch) -> bool:
    """Return whether these are batches of several loaders, of which some wait."""
    values = batch.values() if type(batch) is dict else batch
    several = type(batch) in (dict, list, tuple)
    return several and any(isinstance(value, StagedBatch) for value in values)


def _each(batches: Batch, function: Callable[[Batch], Batch]) -> Batch:
    if type(batches) is dict:
        return {key: function(batch) for key, batch in batches.items()}
    return type(batches)(map(function, batches))

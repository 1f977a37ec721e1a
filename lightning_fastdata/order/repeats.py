"""Several samples in the place of one, where a transform makes so many of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fastdata.types import Batch


def spreading(
    collate_fn: Callable[[list[Any]], Batch], worker_part: Any
) -> Callable[[list[Any]], Batch]:
    """Return what collates the samples that a transform makes.

    Args:
        collate_fn: collates samples.
        worker_part: the transform's part in the worker, or None. Where its ``repeats`` is above 1
            it returns a list of samples for each sample of the dataset.
    """
    return SpreadCollate(collate_fn) if getattr(worker_part, "repeats", 1) > 1 else collate_fn


class SpreadCollate:
    """Collates lists of samples as if each of their samples had come by itself; picklable."""

    def __init__(self, collate_fn: Callable[[list[Any]], Batch]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, lists: list[list[Any]]) -> Batch:
        """Return the batch of the samples of all lists, in their order."""
        return self.collate_fn([sample for samples in lists for sample in samples])

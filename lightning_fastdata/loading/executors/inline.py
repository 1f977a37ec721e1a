"""Batches fetched by the caller itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lightning_fastdata.loading.executors.fetch import Fetcher

if TYPE_CHECKING:
    from lightning_fastdata.loading.executors.fetch import FetchPlan


class InlineExecutor:
    """Fetches in the calling thread, with the same randomness as ``workers``."""

    def __init__(self, plan: FetchPlan) -> None:
        # The training's own draws must not depend on how its data is loaded.
        self._fetcher = Fetcher(plan, guest=True)
        self._batches: Iterator[Any] = iter(())
        self._epoch = 0

    def start_epoch(self, batches: Iterable[Any], epoch: int) -> None:
        """Begin an epoch; what is left of the one before is dropped."""
        self._batches, self._epoch = iter(batches), epoch

    def __iter__(self) -> InlineExecutor:
        return self

    def __next__(self) -> Any:
        indices = next(self._batches)
        try:
            return self._fetcher.attempt(lambda: self._fetcher.batch(indices, self._epoch))
        except Exception as error:
            at = self._fetcher.position
            if self._fetcher.plan.batched and at >= 0:
                error.add_note(f"While reading sample {indices[at]!r} of the dataset.")
            raise

    def resize(self, workers: int) -> None:
        """Do nothing: there are no workers."""

    def close(self) -> None:
        """Drop the epoch."""
        self._batches = iter(())

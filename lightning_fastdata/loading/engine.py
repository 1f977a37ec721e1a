"""One loader's executor, kept between epochs, which ``FastDataLoader`` iterates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lightning_fastdata.loading.executors import open_executor

if TYPE_CHECKING:
    from lightning_fastdata.loading.executors import Executor, ExecutorName
    from lightning_fastdata.loading.executors.fetch import FetchPlan


class Engine:
    """Iterable over epochs; starts its executor at the first one.

    Args:
        name: Which executor.
        plan: What to fetch.
        batches: Called at the start of each epoch for its batches of indices.
        epoch: Called at the start of each epoch for its number.
        workers: Side processes.
        threads: Threads of each, for a sidecar.
        keep: Keep the executor between epochs.
    """

    def __init__(
        self,
        name: ExecutorName,
        plan: FetchPlan,
        *,
        batches: Callable[[], Iterable[Any]],
        epoch: Callable[[], int],
        workers: int,
        threads: int = 8,
        keep: bool = True,
    ) -> None:
        self.name: ExecutorName = name
        self.plan = plan
        self.batches = batches
        self.epoch = epoch
        self.workers = workers
        self.threads = threads
        self.keep = keep
        # Under this name Lightning looks for workers to stop when it is done.
        self._iterator: Executor | None = None

    def __iter__(self) -> EpochIterator:
        if self._iterator is None:
            self._iterator = open_executor(
                self.name, self.plan, workers=max(1, self.workers), threads=self.threads
            )
        self._iterator.start_epoch(self.batches(), self.epoch())
        return EpochIterator(self)

    def close(self) -> None:
        """Stop the executor; the next epoch starts a new one."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


class EpochIterator:
    """The batches of one epoch."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        engine = self._engine
        if engine is None or engine._iterator is None:
            raise StopIteration
        try:
            return next(engine._iterator)
        except StopIteration:
            self._engine = None
            if not engine.keep:
                engine.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        # Lightning copies its trainer with the iterators in it; processes cannot be copied.
        return EpochIterator, (None,)

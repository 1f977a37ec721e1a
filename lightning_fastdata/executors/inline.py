"""Batches fetched by the caller itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lightning_fastdata.executors.stream_fetch import END_OF_STREAM, fetcher_of
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskWatch, WaitWatch
from lightning_fastdata.stamps.lines import LineWatch
from lightning_fastdata.stamps.operations import OperationWatch

if TYPE_CHECKING:
    from lightning_fastdata.executors.fetch import FetchPlan


class InlineExecutor:
    """Fetches in the calling thread; by index with the same randomness as ``workers``."""

    def __init__(self, plan: FetchPlan) -> None:
        # The training's own draws must not depend on how its data is loaded.
        self._fetcher = fetcher_of(plan, guest=True)
        self._batches: Iterator[Any] = iter(())
        self._epoch = 0
        self._count = 0
        self._first = True
        self._wait = WaitWatch()
        self._records: deque[BatchStamps] | None = None

    def start_epoch(self, batches: Iterable[Any], epoch: int) -> None:
        """Begin an epoch; what is left of the one before is dropped."""
        self._batches, self._epoch = self._fetcher.asks(batches), epoch
        self._first = True

    def __iter__(self) -> InlineExecutor:
        return self

    def __next__(self) -> Any:
        self._wait.requested(recorded=self._records is not None)
        indices = self._wait.sampled(self._batches)
        stamps = self._fetcher.stamps
        if stamps is not None:
            stamps.begin()
        try:
            batch = self._fetcher.attempt(lambda: self._fetcher.batch(indices, self._epoch))
        except Exception as error:
            note = self._fetcher.note(indices)
            if note is not None:
                error.add_note(note)
            if isinstance(error, StopIteration):
                # Raised from __next__, it would end the epoch early and without a word.
                reason = "\n".join([f"StopIteration: {error}", *getattr(error, "__notes__", ())])
                raise RuntimeError(f"Reading the dataset raised {reason}") from error
            raise
        finally:
            task = None if stamps is None else stamps.end()
        if batch is END_OF_STREAM:
            self._batches = iter(())
            raise StopIteration
        if task is not None and self._records is not None:
            self._count += 1
            self._records.append(
                BatchStamps.of_caller(
                    self._count,
                    self._wait.requested_ns,
                    task,
                    first=self._first,
                    own=self._wait.delivered(),
                )
            )
        self._first = False
        return batch

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each batch from now on; None: no more."""
        self._records = records
        watches = OperationWatch(self._fetcher.dataset), LineWatch()
        self._fetcher.stamps = None if records is None else TaskWatch(-1, 0, *watches)

    def resize(self, workers: int) -> None:
        """Do nothing: there are no workers."""

    def close(self) -> None:
        """Drop the epoch."""
        self._batches = iter(())
        self._fetcher.drop()

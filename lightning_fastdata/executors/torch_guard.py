"""Torch's own loader with the policy for bad samples, through what its public arguments allow.

It is given a dataset that reads on where a sample fails, and a collation that hands over, beside
the batch, what happened. The training process takes the batch out again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from lightning_fastdata.batches.bad_samples import (
    SKIPPED,
    Fault,
    Gone,
    SampleGuard,
    described,
)
from lightning_fastdata.batches.keyed import KeyedDataset, keying_of
from lightning_fastdata.errors import as_error
from lightning_fastdata.executors.fault_log import FaultLog
from lightning_fastdata.randomness.seeds import EpochCell
from lightning_fastdata.torch_internals import pinned
from lightning_fastdata.types import Batch


class Noted:
    """A batch from torch's own loader, with what happened to its samples."""

    def __init__(
        self,
        batch: Batch,
        faults: list[Fault],
        failure: Failure | None = None,
        *,
        is_empty: bool = False,
    ) -> None:
        self.batch = batch
        self.faults = faults
        self.failure = failure
        self.is_empty = is_empty

    def pin_memory(self, device: str | None = None) -> Noted:
        """Return the same with the batch in page-locked memory; torch's pin thread calls this."""
        if self.is_empty or self.failure is not None:
            return self
        return Noted(pinned(self.batch, device), self.faults)


class Failure:
    """An error that ends a batch; it is raised where the batch is handed over."""

    def __init__(self, error: Exception, where: str) -> None:
        self.error: Exception | None = error
        self.where = where
        self.kind = type(error)
        self.text = ""
        self.worker = -1

    def raised(self) -> BaseException:
        """Return the error: itself where it was raised in this process, or one of its class."""
        if self.error is not None:
            self.error.add_note(f"{self.where[0].upper()}{self.where[1:]}.")
            return self.error
        return as_error(self.kind, self.worker, self.text)

    def __getstate__(self) -> dict[str, Any]:
        # An error need not survive pickling, and its traceback never does.
        text = f"{self.where}.\n{''.join(traceback.format_exception(self.error))}"
        info = get_worker_info()
        number = -1 if info is None else info.id
        return {**vars(self), "error": None, "text": text, "worker": number}


class _Task:
    """What was read since the last batch was collated; a copy is empty."""

    def __init__(self) -> None:
        self.indices: list[Any] = []
        self.faults: list[Fault] = []
        self.failure: Failure | None = None

    def taken(self) -> tuple[list[Any], list[Fault], Failure | None]:
        """Return what was noted, and begin anew."""
        noted = self.indices, self.faults, self.failure
        self.indices, self.faults, self.failure = [], [], None
        return noted

    def __reduce__(self) -> tuple[object, ...]:
        return _Task, ()


class GuardedDataset(KeyedDataset):
    """A dataset for torch's own loader, whose bad samples go the way of all bad samples."""

    _guard: SampleGuard
    _log: FaultLog
    _task: _Task

    def __init__(
        self, dataset: Dataset[Any], guard: SampleGuard, log: FaultLog, epoch: EpochCell
    ) -> None:
        super().__init__(keying_of(dataset, guard.seed, epoch))
        object.__setattr__(self, "_guard", guard)
        object.__setattr__(self, "_log", log)
        object.__setattr__(self, "_task", _Task())

    def __getitem__(self, index: object) -> Batch:
        if self._task.failure is not None:
            return SKIPPED  # the batch is an error already
        return self._read(super().__getitem__, self._left_out([index])[0])

    def _fetch(self, indices: Sequence[int]) -> list[Batch]:
        kept, faults = self._left_out(indices), self._task.faults
        try:
            return super()._fetch([index for index in kept if type(index) is not Gone])
        except Exception as error:
            failed, begin = error, len(faults)

        def read(index: int) -> Batch:
            return super(GuardedDataset, self)._fetch([index])[0]

        # Which sample it was shows when each is read alone.
        samples = [self._read(read, index) for index in kept]
        if len(faults) == begin:
            epoch = self._keying.epoch.get()
            faults.append(self._guard.all_read_alone(failed, self, indices[0], epoch))
        return samples

    def _left_out(self, indices: Sequence[Any]) -> Sequence[Any]:
        """Return the indices without those in quarantine, and note both."""
        task = self._task
        epoch = self._keying.epoch.get()
        kept: Sequence[Any]
        kept, faults = self._log.left_out(self._guard, indices, epoch, batched=True)
        task.indices.extend(kept)
        task.faults.extend(faults)
        return kept

    def _read(self, read: Callable[[Any], Batch], index: object) -> Batch:
        if type(index) is Gone:
            return SKIPPED
        try:
            return read(index)
        except Exception as error:
            failed = error
        return self._rescued(failed, read, index)

    def _rescued(self, error: Exception, read: Callable[[Any], Batch], index: object) -> Batch:
        task, position = self._task, self._task.indices.index(index)
        how: dict[str, Any] = {"dataset": self, "position": position, "faults": task.faults}
        try:
            return self._guard.rescue(error, read, index, self._keying.epoch.get(), **how)
        except Exception as failed:
            what = described(next(f for f in reversed(task.faults) if f.outcome == "raised"))
            task.failure = Failure(failed, f"while reading sample {index!r} of the dataset{what}")
            return SKIPPED


class ReadingOn(Dataset[Any]):
    """A dataset that is tried out: in the place of a bad sample another one is read."""

    def __init__(self, dataset: Dataset[Any], guard: SampleGuard) -> None:
        self.dataset = dataset
        self.guard = guard

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: object) -> Batch:
        try:
            return self.dataset[index]
        except Exception as error:
            failed = error
        how: dict[str, Any] = {"dataset": self.dataset, "position": 0, "faults": []}
        return self.guard.rescue(failed, self.dataset.__getitem__, index, 0, **how)


class GuardedCollate:
    """Collates what a :class:`GuardedDataset` has read, and hands over what happened with it."""

    def __init__(
        self, collate_fn: Callable[[Any], Batch], dataset: GuardedDataset, *, batched: bool
    ) -> None:
        self.collate_fn = collate_fn
        self.batched = batched
        self.task = dataset._task

    def __call__(self, samples: Batch) -> Batch | Noted:
        """Return the batch, or a :class:`Noted` one if anything happened."""
        indices, faults, failure = self.task.taken()
        if failure is not None:
            return Noted(None, faults, failure)
        if faults and self.batched:
            samples = [sample for sample in samples if sample is not SKIPPED]
        if samples is SKIPPED or (faults and self.batched and not samples):
            return Noted(None, faults, is_empty=True)
        try:
            batch = self.collate_fn(samples)
        except Exception as error:
            error.add_note(f"In collate_fn of samples {indices!r}.")
            raise
        return Noted(batch, faults) if faults else batch


class OpenedNotes:
    """The batches of an epoch of torch's own loader; what happened to samples goes to the log."""

    def __init__(self, batches: Iterator[Any], log: FaultLog) -> None:
        self._batches = batches
        self._log = log

    def __iter__(self) -> OpenedNotes:
        return self

    def __next__(self) -> Batch:
        for batch in self._batches:
            if not isinstance(batch, Noted):
                return batch
            self._log.take(batch.faults)
            if batch.failure is not None:
                raise batch.failure.raised()
            if not batch.is_empty:
                return batch.batch
        raise StopIteration

    def __getattr__(self, name: str) -> object:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[object, ...]:
        # Lightning copies its trainer with the iterators in it; processes cannot be copied.
        return iter, ((),)

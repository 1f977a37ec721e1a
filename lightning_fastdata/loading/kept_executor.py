"""One loader's executor, kept between epochs, which ``FastDataLoader`` iterates."""

from __future__ import annotations

import hashlib
import math
import warnings
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_fastdata.batches.page_lock import cuda_page_locks
from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.executors.contract import ArmingExecutor
from lightning_fastdata.executors.fetch import decodes_in_place
from lightning_fastdata.executors.kinds import KINDS, open_executor
from lightning_fastdata.executors.pool.crew_trial import CrewTrial
from lightning_fastdata.torch_internals import pinned

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable

    from lightning_fastdata.batches.page_lock import PageLockName
    from lightning_fastdata.executors.contract import Executor
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.executors.kinds import ExecutorName
    from lightning_fastdata.order.epoch_order import EpochOrder
    from lightning_fastdata.stamps.batch_stamps import BatchStamps
    from lightning_fastdata.types import Stage

_TOO_MANY: Final = (
    "Length of IterableDataset was reported to be {reported} batches by len(loader), but {given} "
    "have come. If it is read by several workers, have __iter__ split it by "
    "torch.utils.data.get_worker_info(), or every worker reads all of it."
)


class KeptExecutor:
    """Iterable over epochs; starts its executor at the first one.

    Args:
        name: Which executor; not torch's own.
        plan: What to fetch.
        batches: Called at the start of each epoch for its batches of indices.
        epoch: Called at the start of each epoch for its number.
        order: Called with the number of an epoch for the plan its batches follow, if that is known;
            the first batches of such an epoch are fetched while the one before it ends.
        workers: Who fetches, as the kind of executor has it: side processes, all their threads
            together, or threads of this process.
        persistent: Keep side processes between epochs.
        staged: Deliver :class:`StagedBatch` of this stage, without draws.
        pin_memory: Copy batches into page-locked memory.
        page_lock: ``"register"``: have CUDA lock the memory that batches come in, and copy only
            what lies elsewhere.
        generator: From which torch would draw its base seed at this place; drawn from likewise,
            so that the draws after it are the same. Side processes are seeded from it: those of a
            stream as torch does, others from it, the plan's seed and the epoch they start in.
        reported_batches: Called at the start of each epoch for the length that the loader of a
            stream has reported; None if it was not asked for one, or there is an index.
    """

    def __init__(
        self,
        name: ExecutorName,
        plan: FetchPlan,
        *,
        batches: Callable[[], Iterable[Any]],
        epoch: Callable[[], int],
        order: Callable[[int], EpochOrder | None] | None = None,
        workers: int,
        persistent: bool = False,
        staged: Stage | None = None,
        pin_memory: bool = False,
        page_lock: PageLockName = "copy",
        generator: torch.Generator | None = None,
        reported_batches: Callable[[], int | None] | None = None,
    ) -> None:
        kind = KINDS[name]
        self.name = name
        self.plan = plan
        self.batches = batches
        self.epoch = epoch
        self.order = order
        self.processes = math.ceil(workers / kind.threads_per_process)
        self.threads = math.ceil(workers / max(1, self.processes))
        self.trial = CrewTrial(self.processes * self.threads)
        self.persistent = persistent
        # Threads of one process share a dataset, which is in one epoch at a time.
        self._arms = kind.threads_per_process == 1 or decodes_in_place(plan.dataset)
        # Threads and reused memory cost nothing between epochs; processes do.
        self.keep = persistent or not kind.side_processes
        self.staged = staged
        self.pin_on = _pinning_device() if pin_memory else None
        self.page_locks = cuda_page_locks(self.pin_on) if page_lock == "register" else None
        self.generator = generator
        self.records: deque[BatchStamps] | None = None
        self.reported_batches = reported_batches
        self._running: weakref.ref[EpochIterator] | None = None
        self._base_seed: int | None = None
        # Under this name Lightning looks for workers to stop when it is done.
        self._iterator: Executor | None = None

    def __iter__(self) -> EpochIterator:
        if not self.persistent or self._base_seed is None:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._base_seed = int(drawn)
        other = None if self._running is None else self._running()
        if other is not None and other.executor is None:
            other = None
        if other is not None and self.persistent:
            other.end("another epoch of its loader has begun, which keeps its workers")
            other = None
        keep = self.keep and other is None
        executor = self._iterator if keep else None
        if executor is None:
            plan = replace(self.plan, base_seed=self._seed_of_processes(self._base_seed))
            executor = open_executor(
                self.name,
                plan,
                workers=self.processes,
                threads=self.threads,
                page_locks=self.page_locks,
                trial=self.trial,
            )
            if self.records is not None:
                executor.record(self.records)
        if keep:
            self._iterator = executor
        self._start_epoch(executor)
        reported = None if self.reported_batches is None else self.reported_batches()
        running = EpochIterator(executor, self.finish, keep=keep, reported_batches=reported)
        self._running = weakref.ref(running)
        return running

    def _seed_of_processes(self, base_seed: int) -> int:
        if self.plan.seed is None:
            return base_seed
        # The threads of a sidecar draw from what the process was seeded with, and so may a
        # worker_init_fn: another epoch, seed or global seed has to give other numbers.
        text = f"{self.plan.seed},{self.epoch()},{base_seed}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def _start_epoch(self, executor: Executor) -> None:
        epoch = self.epoch()
        order = None if self.order is None else self.order(epoch)
        if order is None or not self.persistent or not isinstance(executor, ArmingExecutor):
            executor.start_epoch(self.batches(), epoch)
            return
        executor.start_epoch(self.batches(), epoch, order)
        # An epoch that is not shuffled is one of several passes over data, as a validation is, and
        # may be repeated or followed by none.
        if order.shuffle and self._arms:
            executor.arm(replace(order, epoch=epoch + 1))

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each batch from now on; None: no more."""
        self.records = records
        if self._iterator is not None:
            self._iterator.record(records)

    def finish(self, batch: Any) -> Any:
        """Return the batch as it is delivered."""
        if self.staged is not None:
            batch = StagedBatch(batch, None, self.staged)
        if self.page_locks is not None:
            self.page_locks.driver.note_consumer()
        return batch if self.pin_on is None else pinned(batch, self.pin_on)

    def close(self) -> None:
        """Stop the executor; the next epoch starts a new one."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


class EpochIterator:
    """The batches of one epoch."""

    def __init__(
        self,
        executor: Executor | None,
        finish: Callable[[Any], Any],
        *,
        keep: bool,
        reported_batches: int | None = None,
    ) -> None:
        self.executor = executor
        self._finish = finish
        self._reported = reported_batches
        self._given = 0
        self._why: str | None = None
        self._closer: Callable[[], Any] | None = None
        if executor is not None and not keep:
            self._closer = weakref.finalize(self, executor.close)

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        if self._why is not None:
            raise WorkerError(f"This iterator has ended: {self._why}. Use the newer one.")
        if self.executor is None:
            raise StopIteration
        try:
            batch = next(self.executor)
        except StopIteration:
            self.executor = None
            if self._closer is not None:
                self._closer()
            raise
        self._given += 1
        if self._reported is not None and self._given > self._reported:
            text = _TOO_MANY.format(reported=self._reported, given=self._given)
            warnings.warn(text, stacklevel=2)
        return self._finish(batch)

    def ready(self) -> bool:
        """Return whether the next batch, or the end, comes without waiting for a side process."""
        ready = getattr(self.executor, "ready", None)
        return True if ready is None else bool(ready())

    def end(self, why: str) -> None:
        """Give no more batches."""
        self.executor, self._why = None, why

    def __reduce__(self) -> tuple[Any, ...]:
        # Lightning copies its trainer with the iterators in it; processes cannot be copied.
        return _ended, ()


class RaisesNext:
    """An iterator that raises an error when it is asked for a batch."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __iter__(self) -> RaisesNext:
        return self

    def __next__(self) -> Any:
        raise self._error


def _ended() -> EpochIterator:
    return EpochIterator(None, _same, keep=True)


def _same(batch: Any) -> Any:
    return batch


def _pinning_device() -> str | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None and device.type != "mps":
        return str(device)
    warnings.warn(
        "pin_memory=True, but there is no accelerator that copies from page-locked memory; "
        "batches come in ordinary memory. Set pin_memory=False.",
        FastDataWarning,
        stacklevel=2,
    )
    return None

"""Batches gathered from tensors and arrays in one call per column, into reused memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from lightning_fastdata.batches.bad_samples import NO_SAMPLES
from lightning_fastdata.batches.memory import ALIGNMENT_BYTES, SMALL_BYTES, SlotPool, tensor_over
from lightning_fastdata.caches.cached import was_given_up
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors.columns import Rows, in_bounds, rows_of, whole_numbers
from lightning_fastdata.executors.fetch import Fetcher, copy_limit_bytes
from lightning_fastdata.host import clock
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.batches.staged import Pinned, PinThread
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.types import Batch

_JOB_BYTES: Final = 2**22
_MAX_GROUP: Final = 32
"""Most small batches that are gathered together, as waking a thread costs some 10 us."""
_PIECE_BYTES: Final = 2**20
_PIECES: Final = 8
_MAX_THREADS: Final = 4
_NAME: Final = "fastdata gather"
_LONG_S: Final = 0.0003
"""Seconds above which a job is worth a thread, however small it is (a slow disk)."""

_NO_MEMORY: Final = np.empty(0, np.uint8)


class GatherJob:
    """Rows of one or more batches on their way into one piece of memory of a pool.

    Any number of threads may work on it at once, each on piece after piece of the rows. These are
    ``index``, int64 [count], from 0 and within bounds. ``ends``: where each batch ends.
    """

    def __init__(
        self, rows: Rows, index: NDArray[np.int64], ends: list[int], pool: SlotPool
    ) -> None:
        self.rows = rows
        self.index = index
        self.ends = ends
        count, size_bytes = len(index), 0
        self._places = []
        for column in rows.columns:
            self._places.append(size_bytes)
            size_bytes += -(-column.row_bytes * count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.size_bytes = max(1, size_bytes)
        slot = pool.take(self.size_bytes)
        self._owner = np.empty(self.size_bytes, np.uint8) if slot is None else pool.lease(slot)
        self._outs = [
            np.ndarray((count, *column.shape), column.stored, self._owner, place)
            for column, place in zip(rows.columns, self._places, strict=True)
        ]
        self.pieces = max(1, min(_PIECES, size_bytes // _PIECE_BYTES))
        self._step = -(-count // self.pieces)
        self._lock = threading.Lock()
        self._next = 0
        self._left = count
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()
        self.pinned: list[Future[Pinned]] = []
        """Batches of the job in page-locked memory; empty: no thread copies them there."""

    @property
    def is_ready(self) -> bool:
        """Whether the first batch of the job can be had without waiting."""
        return self.pinned[0].done() if self.pinned else not self._left

    def pin(self, pin_thread: PinThread) -> None:
        """Have a thread help, and copy the batches into page-locked memory."""
        batches = self.batches()
        whole = partial(next, batches, NO_SAMPLES)  # the last ones of a job that has failed
        self.pinned = [pin_thread.pin(whole) for _ in self.ends]

    def given(self) -> Iterable[Batch | Future[Pinned]]:
        """Help to copy the rows, and return the batches, or their page-locked copies under way."""
        if not self.pinned:
            return self.batches()
        self.work()
        pinned, self.pinned = self.pinned, []  # let go of, like the memory of the rows
        return pinned

    def work(self) -> None:
        """Copy pieces of rows until none is left to begin."""
        count = len(self.index)
        while True:
            with self._lock:
                start = self._next
                stop = self._next = min(start + self._step, count)
            if start == stop:
                return
            try:
                index = self.index[start:stop]
                for column, out in zip(self.rows.columns, self._outs, strict=True):
                    column.take(index, out[start:stop])
            except BaseException as error:  # raised again where the batch is asked for
                self._error = error
            with self._lock:
                self._left -= stop - start
                if self._left == 0:
                    self._done.release()

    def cancel(self) -> None:
        """Begin no more rows, and release whoever waits for them."""
        for each in self.pinned:
            each.cancel()
        with self._lock:
            dropped, self._next = len(self.index) - self._next, len(self.index)
            self._left -= dropped
            if dropped and self._left == 0:
                self._done.release()

    def batches(self) -> Iterator[Batch]:
        """Help to copy until all rows are there, and yield the batches; to be called once."""
        self.work()
        self._done.acquire()
        # A thread may come to this job late, and would keep the memory until then.
        owner, self._owner = self._owner, _NO_MEMORY
        self._outs = []
        if self._error is not None:
            raise self._error
        start = 0
        for end in self.ends:
            tensors = []
            for column, place in zip(self.rows.columns, self._places, strict=True):
                shape = (end - start, *column.shape)
                tensor = tensor_over(owner, column.dtype, shape, place + start * column.row_bytes)
                tensors.append(tensor.clone() if tensor.nbytes <= SMALL_BYTES else tensor)
            start = end
            yield self.rows.batch(tensors)


class _Odd(NamedTuple):
    """A batch that the dataset itself has to make, or to refuse."""

    indices: Any
    """Indices of the batch, as the sampler gave them."""


class GatherExecutor:
    """Gathers at the moment a batch is asked for, or ahead of that in threads.

    Args:
        plan: What to fetch; the dataset is one that :func:`rows_of` recognises.
        threads: Number of threads that gather ahead, 4 at most; the caller helps them when it has
            to wait. 0: the caller gathers a batch when it asks for it, and gathers no other.
        pin_thread: Thread that copies batches into page-locked memory; None: no copies are made.

    Raises:
        OptionsError: The dataset has no columns, or its batches are not torch's default ones.
    """

    def __init__(
        self, plan: FetchPlan, *, threads: int = 1, pin_thread: PinThread | None = None
    ) -> None:
        default = plan.default_collation and plan.batched
        if not default or (rows_of(plan.dataset) is None and not was_given_up(plan.dataset)):
            raise OptionsError(
                f"executor is 'gather', but {type(plan.dataset).__name__} is neither tensors nor "
                "arrays (nor a complete cache of such samples), or its batches are not torch's "
                "default ones. Use 'auto' or 'workers'."
            )
        self._plan = plan
        self._odd = Fetcher(replace(plan, seed=None))
        self._threads = min(threads, _MAX_THREADS)
        self._pin_thread = pin_thread
        self._helpers: ThreadPoolExecutor | None = None
        """The threads, which end with this object; None: no job was large enough for any."""
        self._pool = SlotPool(limit_bytes=plan.memory_limit_bytes, shared=False)
        self._rows: Rows | None = None
        self.reads_later = True
        """Whether batches still to come are read later, from the dataset as it is by then."""
        self._indices: Iterator[Any] = iter(())
        self._epoch = 0
        self._group = 1
        self._wanted = 1
        self._long = False
        self._jobs: deque[GatherJob | _Odd] = deque()
        self._ready: deque[Batch | Future[Pinned]] = deque()
        self._pinned_ns: tuple[int, int] | None = None
        """Begin and end of the copy of the last batch into page-locked memory; None: no copy."""
        self._records: deque[BatchStamps] | None = None
        self._count = 0
        self._first, self._begun = True, 0

    def start_epoch(self, batches: Iterable[Any], epoch: int) -> None:
        """Begin an epoch; what is left of the one before is dropped."""
        self._drop()
        # Tensors of a dataset may have been replaced, and indices of a subset shuffled.
        rows = rows_of(self._plan.dataset, tried=False)
        own_bytes = 0 if rows is None else rows.own_bytes
        if rows is not None and self._plan.at_start and own_bytes <= copy_limit_bytes():
            rows, own_bytes = rows.as_now(), 0
        self._rows, self.reads_later = rows, rows is None or own_bytes > 0
        self._indices, self._epoch = iter(batches), epoch
        self._first, self._begun = True, 0

    def under_way(self) -> tuple[int, tuple[int, ...]]:
        """Return how many batches were begun, and an empty tuple: each was delivered or empty."""
        return self._begun, ()

    def __iter__(self) -> GatherExecutor:
        return self

    def __next__(self) -> Batch:
        if self._records is None:
            return self._next()
        requested_ns = clock.monotonic_ns()
        batch = self._next()
        ended_ns = clock.monotonic_ns()
        self._count += 1
        # It is not noted who copied which row: all of the wait is for the rows, and then for their
        # page-locked copy.
        pinned_ns = self._pinned_ns
        rows_ns = ended_ns if pinned_ns is None else max(requested_ns, pinned_ns[0])
        spent = rows_ns - requested_ns
        rows = TaskStamps(-1, requested_ns, rows_ns, None, None, 0, spent, 0, 0, None)
        times = requested_ns, ended_ns
        self._records.append(
            BatchStamps(self._count, 0, *times, (rows,), first=self._first, pinned_ns=pinned_ns)
        )
        self._first = False
        return batch

    def ready(self) -> bool | None:
        """Return whether the next batch comes without waiting; None: this process makes it."""
        if self._ready:
            first = self._ready[0]
            return not isinstance(first, Future) or first.done()
        job = self._jobs[0] if self._jobs else None
        return job.is_ready if isinstance(job, GatherJob) else None

    def _next(self) -> Batch:
        if not self._ready:
            self._look_ahead()
            if not self._jobs:
                self._rows = None  # they may be a copy of the whole dataset
                raise StopIteration
            job = self._jobs.popleft()
            if isinstance(job, _Odd):
                indices = job.indices
                if isinstance(indices, np.ndarray):
                    indices = indices.tolist()
                odd = self._read_odd(indices)
                pin = self._pin_thread
                self._ready.append(odd if pin is None else pin.pin(lambda: odd))
            else:
                began = clock.monotonic()
                self._ready.extend(job.given())
                self._long |= clock.monotonic() - began > _LONG_S
        self._begun += 1
        batch, self._pinned_ns = self._ready.popleft(), None
        if isinstance(batch, Future):
            pinned = batch.result()
            batch, self._pinned_ns = pinned.batch, (pinned.began_ns, pinned.ended_ns)
        return self._next() if batch is NO_SAMPLES else batch

    def _read_odd(self, indices: Sequence[object]) -> Batch:
        plan = self._plan
        indices, left_out = plan.faults.left_out(plan.guard, indices, self._epoch, batched=True)
        try:
            return self._odd.batch(indices, self._epoch)
        finally:
            plan.faults.take([*left_out, *self._odd.faults])

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each batch to ``records`` from now on; None: stop."""
        self._records = records

    def close(self) -> None:
        """End the threads; batches handed out stay valid."""
        self._drop()
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)
            self._helpers = None

    def _drop(self) -> None:
        for each in (*self._jobs, *self._ready):
            if isinstance(each, GatherJob | Future):
                each.cancel()
        self._jobs.clear()
        self._ready.clear()
        self._rows, self._indices = None, iter(())

    def _look_ahead(self) -> None:
        while len(self._jobs) < self._wanted:
            group = list(islice(self._indices, self._group))
            if not group:
                return
            self._begin(group)

    def _begin(self, group: list[Any]) -> None:
        rows = self._rows
        parts = [part for part in map(whole_numbers, group) if part is not None]
        index = None
        if rows is not None and len(parts) == len(group):
            index = in_bounds(np.concatenate(parts) if len(parts) > 1 else parts[0], rows.length)
        if rows is None or index is None:
            if len(group) > 1:
                for indices in group:
                    self._begin([indices])
            else:
                self._jobs.append(_Odd(group[0]))
            return
        job = GatherJob(rows, index, list(accumulate(len(part) for part in parts)), self._pool)
        self._jobs.append(job)
        if self._pin_thread is not None:
            job.pin(self._pin_thread)
        if not self._threads:
            self._group = self._wanted = 1
            return
        # A user's sampler may watch the training, and is not asked for batches long before.
        most = _MAX_GROUP if type(group[0]) is np.ndarray else self._plan.look_ahead // 4
        # With more large jobs under way, the batches would leave the processor's cache.
        self._wanted = 2 if job.size_bytes > _JOB_BYTES else 3
        self._group = max(1, min(most, _JOB_BYTES * len(group) // job.size_bytes))
        if self._long or job.size_bytes >= _PIECE_BYTES:
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(self._threads, _NAME)
            for _ in range(min(self._threads, job.pieces)):
                self._helpers.submit(job.work)

"""Batches under way: how each is divided into tasks, and where its samples are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from lightning_fastdata.batches import bad_samples
from lightning_fastdata.batches.keyed import reads_together
from lightning_fastdata.batches.layout import SampleLayout
from lightning_fastdata.batches.packed import Packed, unpack
from lightning_fastdata.batches.slots import Slot, SlotPool
from lightning_fastdata.batches.staged import Pinned, PinThread
from lightning_fastdata.errors import DatasetError, WorkerError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.pool.protocol import TaskKind, TaskRequest
from lightning_fastdata.host import clock
from lightning_fastdata.stamps.batch_stamps import BatchStamps, ReadRates, TaskStamps, WaitWatch
from lightning_fastdata.types import Batch

_TASK_NS: Final = 2_000_000
"""Cheap samples share a task of about this length, as a message costs some 20 us."""
_LONG_TASK_NS: Final = 25_000_000
"""Of a batch that is not needed soon: each task costs the training process some 40 us."""
_TASKS_PER_WORKER: Final = 3
"""Of all batches under way, so that no process has to wait for one that takes long."""


@dataclass(slots=True, eq=False)
class EpochRun:
    """An epoch whose batches are being fetched."""

    number: int
    """Part of the key of its randomness."""
    generation: int
    source: Iterator[Any]
    """The batches of indices that are still to be fetched."""
    exhausted: bool = False
    """The source has ended."""
    begun: int = 0
    """Batches that were taken from the source."""


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch that is under way; the docstring of :mod:`.protocol` draws its states."""

    number: int
    """Counts all batches of the executor."""
    generation: int
    epoch: int
    place: int
    """Counts the batches of the epoch."""
    indices: Any
    """What the plan gave, but for samples that are left out or replaced before they are read."""
    batched: bool = True
    """The indices are several; False: a single one."""
    slot: Slot | None = None
    """Where it is written; None until it has a place."""
    open_tasks: int = 0
    """Tasks whose answers are still to come."""
    packed: Packed = field(init=False)
    """Its parts, if it was collated by a side process."""
    error: tuple[int, BaseException] | None = None
    """Of its first failing sample, with its position."""
    is_empty: bool = False
    """All of its samples are left out."""
    misfit: bool = False
    """Its samples cannot be written in place; to be collated as a whole when all tasks ended."""
    in_place: bool = False
    """Its samples are written in place."""
    stamps: list[TaskStamps] = field(default_factory=list)
    """Of its tasks, if stamps are recorded."""
    faults: dict[tuple[int, int | str], bad_samples.Fault] = field(default_factory=dict)
    """By position and index: samples that could not be read at once."""
    pinning: Future[Pinned] | None = None
    """Its copy into page-locked memory; None: there is none, or it has not begun."""

    @property
    def is_ready(self) -> bool:
        """Whether it can be delivered, or raise its error."""
        return not self.open_tasks

    @property
    def comes_at_once(self) -> bool:
        """Whether it, which is ready, can be delivered without waiting for a copy of it."""
        return self.pinning is None or self.pinning.done()

    def pin(
        self, pin_thread: PinThread, slots: SlotPool, layout: SampleLayout | None = None
    ) -> None:
        """Begin its copy into page-locked memory, if it is ready and nothing was wrong with it."""
        wrong = self.error is not None or self.is_empty or self.faults
        if self.is_ready and self.pinning is None and not wrong:
            self.pinning = pin_thread.pin(self._whole(slots, layout))

    def note(self, faults: Iterable[bad_samples.Fault]) -> None:
        """Note what happened to samples; what a task that is done again tells again counts once."""
        self.faults.update({(fault.position, fault.index): fault for fault in faults})

    def index_at(self, at: int) -> object:
        """Return the index of the sample at a position."""
        return self.indices[at] if self.batched else self.indices

    def give_up(self, at: int, plan: FetchPlan, error: WorkerError) -> bool:
        """Have another index in the place of one that no process can read, or raise the error.

        Returns:
            Whether there is another one.
        """
        index, quarantine = self.index_at(at), plan.faults.quarantine
        # What kills whatever is read, as a collation may, would go on for ever.
        tried = sum(fault.position == at for fault in self.faults.values())
        allowed = tried < bad_samples.STAND_INS and len(quarantine) < plan.faults.allowed
        goes_on = plan.guard.policy != "raise" and type(index) is not bad_samples.Gone and allowed
        outcome = plan.guard.outcome if goes_on else "raised"
        self.note([bad_samples.fault_of(error, plan.dataset, at, index, self.epoch, outcome)])
        if not goes_on:
            self.error = at, error
            return False
        quarantine.add(bad_samples.plain_index(index))
        other = plan.guard.in_place_of(index, self.epoch, quarantine)
        if self.batched:  # a list of the sampler is the sampler's
            self.indices = [*self.indices[:at], other, *self.indices[at + 1 :]]
        else:
            self.indices = other
        return True

    def report(self, faults: bad_samples.FaultLog) -> None:
        """Have what happened to the samples counted, as the batch is handed over.

        It gets an error if there were too many bad ones.
        """
        if self.in_place and self.kept_rows() == []:
            self.is_empty = True
        try:
            faults.take(self.faults.values())
        except DatasetError as error:
            self.error = self.error or (0, error)

    def kept_rows(self) -> list[int] | None:
        """Return the positions of the samples that are not left out; None: all of them."""
        left_out = {fault.position for fault in self.faults.values() if fault.outcome == "skipped"}
        if not left_out:
            return None
        return [at for at in range(len(self.indices)) if at not in left_out]

    def take_parts(self, packed: Packed, files: list[int], slots: SlotPool) -> None:
        """Take what a side process collated: in the slot it was given, or in a file of its own."""
        self.packed = packed
        if files:
            self.release(slots)
            self.slot = slots.adopt(files[0])

    def data(
        self,
        slots: SlotPool,
        layout: SampleLayout | None = None,
        *,
        pin_thread: PinThread | None = None,
    ) -> Batch:
        """Return the batch, or raise its error; its slot is used again when nothing views it.

        With a ``pin_thread`` in page-locked memory. ``NO_SAMPLES``: all samples are left out.
        """
        if self.error is not None:
            self.release(slots)
            raise self.error[1]
        if self.is_empty:
            self.release(slots)
            return bad_samples.NO_SAMPLES
        if pin_thread is None:
            return self._whole(slots, layout)()
        if self.pinning is None:
            self.pinning = pin_thread.pin(self._whole(slots, layout))
        return self.pinning.result().batch

    def _whole(self, slots: SlotPool, layout: SampleLayout | None) -> Callable[[], Batch]:
        """Return what puts it together, in any thread."""
        slot, self.slot = self.slot, None
        if slot is None:
            return partial(unpack, self.packed, None)
        copy = slots.has_to_copy(slot)
        owner = slots.lease(slot)
        if self.in_place and layout is not None:
            rows = self.kept_rows()
            return partial(layout.batch, owner, len(self.indices), copy=copy, rows=rows)
        return partial(unpack, self.packed, owner, copy=copy)

    def release(self, slots: SlotPool) -> None:
        """Give back the slot of a batch that is not delivered."""
        if self.slot is not None:
            slots.give_back(self.slot)
            self.slot = None

    def all_stamps(
        self, wait: WaitWatch, ready_ahead: int, *, first: bool, rates: ReadRates | None = None
    ) -> BatchStamps:
        """Return the stamps of the batch, which is handed over now."""
        own = wait.delivered()
        pinned = None if self.pinning is None else self.pinning.result()
        return BatchStamps(
            self.number,
            sum(task.samples for task in self.stamps),
            wait.requested_ns,
            clock.monotonic_ns(),
            tuple(self.stamps),
            ready_ahead,
            first=first,
            pinned_ns=None if pinned is None else (pinned.began_ns, pinned.ended_ns),
            own=own,
            rates=rates,
        )


@dataclass(slots=True, eq=False)
class Task:
    """What a side process does in one go: as a :class:`.TaskRequest` says."""

    kind: TaskKind
    batch: PendingBatch
    start: int
    """Position in the batch of its first sample."""
    indices: Any

    @property
    def first_sample(self) -> tuple[int, int]:
        """(batch number, position): stands for the task where no sample was being read yet."""
        return self.batch.number, self.start

    def reads(self, at: int) -> bool:
        """Return whether the sample at a position of the batch is one of the task's."""
        count = len(self.indices) if self.batch.batched else 1
        return self.start <= at < self.start + count

    def renewed(self) -> Task:
        """Return the same task with the indices that its batch has now."""
        indices = self.batch.indices
        if self.batch.batched:
            indices = indices[self.start : self.start + len(self.indices)]
        return Task(self.kind, self.batch, self.start, indices)

    def request(self) -> TaskRequest:
        """Return what is sent to a side process."""
        batch = self.batch
        return TaskRequest(
            self.kind,
            batch.generation,
            batch.number,
            batch.epoch,
            self.start,
            self.indices[:1] if self.kind == "first" else self.indices,
            len(batch.indices) if self.kind == "rows" else 0,
            None if batch.slot is None else batch.slot.number,
        )


class Splitter:
    """Divides batches, by what was learnt of the samples so far."""

    def __init__(self, plan: FetchPlan, slots: SlotPool) -> None:
        self.plan = plan
        self.layout: SampleLayout | None = None
        samples = plan.default_collation and plan.batched and not reads_together(plan.dataset)
        self.in_place: bool | None = None if samples else False
        """Whether samples are written in place; None until the first one was read."""
        self._slots = slots
        self.whole_bytes = 0
        """Size of the largest batch so far that was collated as a whole."""
        self._sample_ns: float | None = None

    def begin(self, number: int, run: EpochRun, indices: Any) -> PendingBatch:
        """Return a batch that begins, with none of the samples in quarantine."""
        plan = self.plan
        if isinstance(indices, np.ndarray):
            indices = list(indices)
        indices = _own_memory(indices, batched=plan.batched)
        indices, left_out = plan.faults.left_out(
            plan.guard, indices, run.number, batched=plan.batched
        )
        batch = PendingBatch(number, run.generation, run.number, run.begun, indices, plan.batched)
        run.begun += 1
        if left_out:
            batch.note(left_out)
        return batch

    def note_time(self, sample_ns: float) -> None:
        """Note how long each sample of a task took."""
        known = self._sample_ns
        self._sample_ns = sample_ns if known is None else 0.9 * known + 0.1 * sample_ns

    def has_place(self, batches: Sequence[PendingBatch], workers: int) -> bool:
        """Return whether another batch may be begun beside those that are under way."""
        if not batches:
            return True
        if self.in_place is None:  # until a sample was seen, each process has one to read
            return _open_tasks(batches) < workers
        size = self.whole_bytes
        if self.in_place and self.layout is not None:
            size = self.layout.offsets(len(batches[-1].indices))[1]
        # Large batches take long to use, so that few of them bridge as much time.
        count = len(batches)
        if count >= max(2, workers) and (count + 1) * size > self.plan.ahead_bytes:
            return False
        return not self.in_place or self._slots.may_grow(size)

    def place(self, batch: PendingBatch) -> bool:
        """Return whether the samples of a batch have a place to be written to.

        Raises:
            WorkerError: There is no memory for it.
        """
        if self.in_place and batch.slot is None and self.layout is not None:
            batch.slot = self._slots.take(self.layout.offsets(len(batch.indices))[1])
            batch.in_place = batch.slot is not None
        return batch.in_place

    def tasks(
        self, batch: PendingBatch, batches: Sequence[PendingBatch], workers: int
    ) -> list[Task]:
        """Return the tasks of one of the batches under way; none if there is no memory for it."""
        try:
            tasks = self._split(batch, batches, workers)
        except WorkerError as error:  # raised when it is its turn
            batch.error, tasks = (0, error), []
        batch.open_tasks = len(tasks)
        return tasks

    def _split(
        self, batch: PendingBatch, batches: Sequence[PendingBatch], workers: int
    ) -> list[Task]:
        indices = batch.indices
        several = batch.batched and len(indices) > 0  # a single index may be a tensor
        if self.in_place is None and several:
            # Workers may wait for each other in their first samples: there is one for each.
            free = max(1, workers - _open_tasks(batches))
            return _parts("first", batch, -(-len(indices) // free))
        if several and self.place(batch):
            rows = rows_per_task(
                len(indices),
                self._sample_ns,
                workers=workers,
                before=batches.index(batch),
                look_ahead=self.plan.look_ahead,
            )
            return _parts("rows", batch, rows)
        if self.whole_bytes:
            batch.slot = self._slots.take(self.whole_bytes)
        return [Task("whole", batch, 0, indices)]


def _parts(kind: TaskKind, batch: PendingBatch, size: int) -> list[Task]:
    indices = batch.indices
    return [Task(kind, batch, at, indices[at : at + size]) for at in range(0, len(indices), size)]


def _open_tasks(batches: Sequence[PendingBatch]) -> int:
    return sum(batch.open_tasks for batch in batches)


def rows_per_task(
    samples: int, sample_ns: float | None, *, workers: int, before: int, look_ahead: int
) -> int:
    """Return how many samples of a batch a process reads in one go.

    ``before`` of the ``look_ahead`` batches under way are needed before this one.
    """
    spread = -(-samples // workers)
    if sample_ns is None:
        return spread
    sample_ns = max(1.0, sample_ns)
    at_once = max(1, round(_TASK_NS / sample_ns))
    rows = samples if at_once >= samples else min(spread, at_once)
    if before < 2:
        return rows
    share = -(-samples * look_ahead // (_TASKS_PER_WORKER * workers))
    return max(rows, min(-(-samples // 2), share, round(_LONG_TASK_NS / sample_ns)))


def _own_memory(indices: Any, *, batched: bool) -> Any:
    """Return indices that nobody else changes, and whose tensors do not lie in larger ones."""
    if not batched:
        return indices.clone() if isinstance(indices, torch.Tensor) else indices
    if not any(isinstance(each, torch.Tensor) for each in indices[:1]):
        return list(indices) if type(indices) is list else indices
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in indices]

"""Side processes that fetch: by index, as the executor ``"workers"``, or each a stream of its own.

The training process keeps the indices of everything that is under way, so whatever a process that
died had not finished is given to another one. A stream cannot be asked for a sample a second time,
so a process that dies before the end of its stream ends the epoch with an error, after what it had
finished was delivered. :mod:`.protocol` shows the way of a batch.
"""

from __future__ import annotations

import math
import signal
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import length_hint
from typing import Any, Final, Self

import numpy as np
import torch

from lightning_fastdata.batches.bad_samples import NO_SAMPLES, plain_index
from lightning_fastdata.batches.keyed import fetches_in_batches, reads_together
from lightning_fastdata.batches.memory import SampleLayout, SlotPool
from lightning_fastdata.errors import WorkerError, as_error
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.inline import StreamAsk
from lightning_fastdata.executors.kinds import Resources
from lightning_fastdata.executors.pool import protocol, watches
from lightning_fastdata.executors.pool.crew import (
    Answer,
    ChildProcess,
    Crew,
    EpochRun,
    Loss,
    PendingBatch,
    Task,
)
from lightning_fastdata.executors.pool.sharing import TrainingLoad
from lightning_fastdata.executors.stream_state import LanePosition, StreamHistory, StreamNote
from lightning_fastdata.host import clock
from lightning_fastdata.stamps.batch_stamps import BatchStamps, ReadRates, WaitWatch
from lightning_fastdata.types import Batch

_TASK_NS: Final = 2_000_000
"""Length of a task that cheap samples share, in ns, as a message costs some 20 us."""
_LONG_TASK_NS: Final = 25_000_000
"""Most ns of a task that is not needed soon: each costs the training process some 40 us."""
_TASKS_PER_WORKER: Final = 3
"""Number of tasks for each process in all batches under way, so that none waits for a long one."""
_LEFT_FOR_EACH: Final = 8
"""Least ratio of the batches left of an epoch to those under way, where a training competes."""
_UNEVEN: Final = 4
"""Ratio to the usual time of samples from which a task was held up by one of its samples."""
_UNEVEN_BATCHES: Final = 200
"""Number of batches after which such a task is forgotten."""
_TIMES: Final = 2
_KILLS: Final = 4
"""Deaths by SIGKILL, maybe from outside, that give a sample up; ``_TIMES`` counts other deaths."""


class _CrewExecutor(ABC):
    """Fetches in the side processes of a crew: gives tasks, takes answers, and delivers batches.

    The two classes below say which batch is next, and what is done about losses.
    """

    def __init__(self, plan: FetchPlan, given: Resources) -> None:
        self.plan = plan
        self._slots = SlotPool(limit_bytes=plan.memory_limit_bytes)
        self._pin_thread = given.pin_thread
        self._crew = self._start_crew(given.workers)
        self.children = self._crew.children
        """The side processes by their numbers."""
        self._trial = given.trial or watches.CrewTrial(given.workers)
        self._rates: ReadRates | None = None
        self._stall = watches.StallWatch(plan.timeout_s)
        self._now = EpochRun(0, 0, iter(()), exhausted=True)
        self._wait = WaitWatch()
        self._records: deque[BatchStamps] | None = None
        self.drew: bool | None = None
        """Whether reading draws from generators, as stamps of tasks tell; None: there are none."""
        self._first, self._count = True, 0
        self._whole_bytes = 0
        """Bytes of the largest batch so far that was collated as a whole."""

    def _start_crew(self, processes: int) -> Crew | Any:
        return Crew(self.plan, self._slots, processes=processes)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        self._wait.requested(recorded=self._records is not None)
        if self._pin_thread is not None:  # begins to copy what has come
            self._receive(waiting=False)
        late = False
        while True:
            self._fill()
            batch = self._first_ready()
            if batch is not None:
                delivered = self._deliver(batch)
                if delivered is NO_SAMPLES:
                    continue
                if self._records is not None:
                    rates, self._rates = self._rates, None
                    stamps = batch.all_stamps(self._wait, first=self._first)
                    self._records.append(stamps._replace(rates=rates))
                    self._trial.delivered(late=late)
                self._first = False
                return delivered
            late = True
            end = self._end()
            if end is not None:
                raise end
            self._receive()

    def ready(self) -> bool:
        """Return whether the next batch, an error or the end can be had without waiting."""
        self._fill()
        self._receive(waiting=False)
        batch = self._first_ready()
        return self._end() is not None if batch is None else batch.comes_at_once

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each delivered batch to ``records`` from now on; None: stop."""
        self._records = records
        if records is None:
            self._trial.given_up()  # without stamps the trial would never end
        self._crew.configure(protocol.SetStamps(records is not None))

    def close(self) -> None:
        """Stop all side processes and let go of the memory; batches handed out stay valid."""
        self._crew.close()
        self._slots.close()
        self._now.exhausted = True

    @abstractmethod
    def _pending(self) -> Iterable[PendingBatch]:
        """Return the batches of the epoch that were begun and not handed over."""

    @abstractmethod
    def _fill(self) -> None:
        """Begin batches, as far ahead as the plan says, and give their tasks to processes."""

    @abstractmethod
    def _first_ready(self) -> PendingBatch | None:
        """Return the batch that is delivered next, if it is ready."""

    @abstractmethod
    def _end(self) -> BaseException | None:
        """Return an error or StopIteration to raise if no batch will come; None: one will."""

    @abstractmethod
    def _deliver(self, batch: PendingBatch) -> Batch:
        """Return the data of a batch, which is then no longer under way; or raise its error."""

    @abstractmethod
    def _reads(self, child: ChildProcess) -> str | None:
        """Return in words what a side process reads just now; None: nothing."""

    @abstractmethod
    def _redo(self, loss: Loss) -> None:
        """Deal with the tasks that a side process died with."""

    def _new_batch(self, indices: Any, *, batched: bool = True) -> PendingBatch:
        self._count += 1
        run = self._now
        batch = PendingBatch(
            self._count, run, run.begun, indices, self._slots, self._pin_thread, batched
        )
        run.begun += 1
        return batch

    def _whole_task(self, batch: PendingBatch) -> Task:
        """Return the task to read and collate a batch as a whole."""
        if self._whole_bytes:
            batch.slot = self._slots.take(self._whole_bytes)
        return Task("whole", batch, 0, batch.indices)

    def _is_current(self, batch: PendingBatch) -> bool:
        return batch.run is self._now

    def _receive(self, *, waiting: bool = True) -> None:
        """Take in what has come, or wait for it; and see whether processes are stuck."""
        look_s = self._stall.next_look_s
        events = self._crew.wait(look_s if waiting else 0.0)
        for event in events or ():
            if isinstance(event, Loss):
                self._redo(event)
            else:
                self._answer(event)
        if self._pin_thread is not None:
            for batch in self._pending():
                batch.pin()
        if not waiting or (events is not None and clock.monotonic() < (look_s or math.inf)):
            return
        children = list(self.children.values())
        all_do = partial(watches.doing, children, self._reads)
        for child, hang in self._stall.look(children, all_do, self._crew.owing):
            watches.kill_hung(child, hang, watches.doing([child], self._reads)[0])

    def _answer(self, answer: Answer) -> None:
        """Take in how a task has ended."""
        batch, ended = answer.task.batch, answer.ended
        batch.open_tasks -= 1
        if ended.faults:
            batch.note(ended.faults)
        self._stall.note_task(ended.spent_ns)
        if ended.stamps is not None and not isinstance(ended.result, protocol.OldEpoch):
            batch.stamps.append(ended.stamps)
            self.drew = self.drew or ended.stamps.drew
            self._rates = self._trial.answered(ended.stamps, self._crew.under_way) or self._rates
        match ended.result:
            case protocol.Collated(packed):
                self._wait.unpacked(partial(batch.take_parts, packed, answer.files))
                self._whole_bytes = max(self._whole_bytes, packed.size_bytes)
            case protocol.TaskError(position, kind, text):
                if batch.error is None or position < batch.error[0]:
                    batch.error = position, as_error(kind, answer.child.number, text)


class PoolExecutor(_CrewExecutor):
    """Fetches batches by index in side processes, which share out their samples."""

    def __init__(self, plan: FetchPlan, given: Resources) -> None:
        super().__init__(plan, given)
        self._batches: deque[PendingBatch] = deque()
        """Batches of the epoch that are under way, in its order."""
        self._todo: deque[Task] = deque()
        self._deaths: Counter[tuple[int, int]] = Counter()
        """Number of deaths by what was being read then: batch number and position."""
        self._undivided = not plan.batched or fetches_in_batches(plan.dataset)
        """Whether indices reach the dataset together, as the sampler gave them."""
        samples = plan.default_collation and plan.batched and not reads_together(plan.dataset)
        self._is_known = not samples
        """Whether it is known if samples are written in place, which a first sample shows."""
        self._layout: SampleLayout | None = None
        """Layout by which all samples are written in place; None: they are collated."""
        self._sample_ns: float | None = None
        self._load = TrainingLoad(plan.cpus)
        self._even_from = 0
        """Number of the first batch for which the last task that was held up is forgotten."""
        self._epoch_batches = 0
        """Number of batches of the epoch; 0: not known."""

    def __next__(self) -> Batch:
        batch = super().__next__()
        self._load.delivered()
        return batch

    def start_epoch(self, batches: Iterable[Any], epoch: int) -> None:
        """Begin an epoch; what is left of the one before is dropped."""
        self._first = True
        self._load.epoch_began()
        self._epoch_batches = length_hint(batches)
        self._now = EpochRun(epoch, self._now.generation + 1, iter(batches))
        for task in self._todo:
            task.batch.open_tasks -= 1
        for batch in self._batches:
            if batch.is_ready:
                batch.release()
        self._todo.clear()
        self._batches.clear()
        self._crew.start_epoch(self._now.generation, epoch)
        for child in self.children.values():
            child.state = None  # known only until it reads again
        self._deaths.clear()
        self._trial.given_up()
        self._fill()

    def under_way(self) -> tuple[int, tuple[int, ...]]:
        """Return how many batches of the epoch were begun, and which were not handed over."""
        return self._now.begun, tuple(batch.place for batch in self._batches)

    def resize(self, workers: int, look_ahead: int | None = None) -> None:
        """Have ``workers`` side processes, and ``look_ahead``; surplus ones finish their work."""
        if look_ahead is not None:
            self.plan = replace(self.plan, look_ahead=look_ahead)
        self._crew.resize(workers)
        self._trial.resize(workers)

    def ask_states(self, within_s: float) -> None:
        """Ask each side process for the state of what it reads, as the epoch is over."""
        self._crew.ask_states(self._now.generation + 1, within_s)

    def read_the_same(self, digest: bytes, within_s: float) -> bool:
        """Return whether what the side processes read is still as the training process has it.

        ``digest``: Digest of what they should read, from the training process.
        """
        if any(child.state is None and not child.asked for child in self.children.values()):
            self.ask_states(within_s)
        while any(child.asked for child in self.children.values()):
            self._receive()
        told = [child.state for child in self.children.values()]
        return all(state is not None and (state.same or state.digest == digest) for state in told)

    def close(self) -> None:
        """Stop all side processes and let go of the memory; batches handed out stay valid."""
        super().close()
        self._batches.clear()
        self._todo.clear()

    # What is under way

    def _pending(self) -> Iterable[PendingBatch]:
        return self._batches

    def _fill(self) -> None:
        look_ahead = self._look_ahead()
        while len(self._batches) < look_ahead and self._has_place():
            if self._now.exhausted:
                break
            try:
                indices = self._wait.sampled(self._now.source)
            except StopIteration:
                self._now.exhausted = True
                break
            batch = self._begin(indices)
            self._batches.append(batch)
            self._todo.extend(self._tasks(batch))
        limit = self._trial.limit
        while self._todo and (limit is None or self._crew.under_way < limit):
            if not self._crew.give(self._todo[0]):
                break
            self._todo.popleft()

    def _competes(self) -> bool:
        """Return whether workers should spare the CPUs of the training.

        Not where single samples hold up others, which all workers have to make up for.
        """
        return self._count >= self._even_from and self._load.competes(self._crew.wanted)

    def _look_ahead(self) -> int:
        plan, workers = self.plan, self._crew.wanted
        if not self._epoch_batches or not self._competes():
            return plan.look_ahead
        left = self._epoch_batches - self._now.begun + len(self._batches)
        return min(plan.look_ahead, max(plan.prefetch * workers, left // _LEFT_FOR_EACH))

    def _first_ready(self) -> PendingBatch | None:
        for batch in self._batches:
            if batch.is_ready:
                return batch
            if self.plan.in_order:
                break
        return None

    def _end(self) -> BaseException | None:
        return StopIteration() if self._now.exhausted and not self._batches else None

    def _deliver(self, batch: PendingBatch) -> Batch:
        self._batches.remove(batch)
        if batch.faults:
            batch.report(self.plan.faults)
        return self._wait.unpacked(batch.data)

    def _reads(self, child: ChildProcess) -> str | None:
        number, at = child.progress.being_read() or (-1, -1)
        found = [batch for batch in self._batches if batch.number == number]
        return f"sample {found[0].index_at(at)!r}" if found else None

    # How a batch is divided, and where its samples are written

    def _begin(self, indices: Any) -> PendingBatch:
        """Begin a batch without the samples in quarantine, and return it."""
        plan = self.plan
        indices = _own_memory(indices, batched=plan.batched, whole=self._undivided)
        indices, left_out = plan.faults.left_out(
            plan.guard, indices, self._now.number, batched=plan.batched
        )
        batch = self._new_batch(indices, batched=plan.batched)
        if left_out:
            batch.note(left_out)
        return batch

    def _has_place(self) -> bool:
        """Return whether another batch may be begun beside those that are under way."""
        if not self._batches:
            return True
        if not self._is_known:  # until a sample was seen, each process has one to read
            return self._open_tasks() < self._crew.wanted
        size = self._whole_bytes
        if self._layout is not None:
            size = self._layout.offsets(len(self._batches[-1].indices))[1]
        # Large batches take long to use, so that few of them bridge as much time.
        count = len(self._batches)
        if count >= max(2, self._crew.wanted) and (count + 1) * size > self.plan.ahead_bytes:
            return False
        return self._layout is None or self._slots.may_grow(size)

    def _place(self, batch: PendingBatch) -> bool:
        """Return whether a batch has a slot to write its samples to, and take one if need be.

        Raises:
            WorkerError: There is no memory for it.
        """
        if self._layout is not None and batch.slot is None:
            batch.slot = self._slots.take(self._layout.offsets(len(batch.indices))[1])
            batch.layout = None if batch.slot is None else self._layout
        return batch.layout is not None

    def _tasks(self, batch: PendingBatch) -> list[Task]:
        """Return the tasks of one of the batches under way; none if there is no memory for it."""
        try:
            tasks = self._split(batch)
        except WorkerError as error:  # raised when the batch is delivered
            batch.error, tasks = (0, error), []
        batch.open_tasks = len(tasks)
        return tasks

    def _split(self, batch: PendingBatch) -> list[Task]:
        indices = batch.indices
        several = batch.batched and len(indices) > 0  # a single index may be a tensor
        if several and not self._is_known:
            # Workers may wait for each other in their first samples: each gets one.
            free = max(1, self._crew.wanted - self._open_tasks())
            return _parts("first", batch, -(-len(indices) // free))
        if several and self._place(batch):
            before = self._batches.index(batch)
            rows = rows_per_task(
                len(indices),
                self._sample_ns,
                workers=self._crew.wanted,
                before=before,
                look_ahead=self.plan.look_ahead,
                alone_ns=before / 2 * self._load.step_ns if self._competes() else 0.0,
            )
            return _parts("rows", batch, rows)
        return [self._whole_task(batch)]

    def _open_tasks(self) -> int:
        return sum(batch.open_tasks for batch in self._batches)

    # What comes back

    def _answer(self, answer: Answer) -> None:
        super()._answer(answer)
        task, ended = answer.task, answer.ended
        match ended.result:
            case protocol.RowsWritten():
                known, sample_ns = self._sample_ns, ended.spent_ns / len(task.indices)
                held_up = known is not None and sample_ns > _UNEVEN * known
                if held_up and ended.spent_ns > _LONG_TASK_NS:
                    self._even_from = self._count + _UNEVEN_BATCHES
                self._sample_ns = sample_ns if known is None else 0.9 * known + 0.1 * sample_ns
            case protocol.FirstSample(layout):
                self._crew.go_on(answer.child.number, self._learn(layout, task))
            case protocol.NothingLeft():
                task.batch.is_empty = True
            case protocol.Misfit():
                task.batch.misfit, self._layout = True, None
        self._finish_if_ready(task.batch)

    def _learn(self, layout: SampleLayout | None, task: Task) -> Task | None:
        """Return the next task of the process that has read and kept the first sample of a task.

        The first layout that is found is that of all samples. None: the process drops its sample.
        """
        batch = task.batch
        if not self._is_known:
            self._is_known, self._layout = True, layout
            self._crew.configure(protocol.SetLayout(layout))
        if batch.misfit or not self._is_current(batch):
            return None
        try:
            placed = self._place(batch)
        except WorkerError as error:  # no memory: raised when the batch is delivered
            batch.error = 0, error
            return None
        if not placed:
            batch.misfit = True
            return None
        batch.open_tasks += 1
        return Task("rows", batch, task.start, task.indices)

    def _finish_if_ready(self, batch: PendingBatch) -> None:
        if not batch.is_ready:
            return
        if not self._is_current(batch):
            batch.release()
        elif batch.misfit and batch.error is None:
            # True collation decides what becomes of samples that differ, as it would in torch.
            batch.release()
            batch.misfit, batch.layout = False, None
            self._todo.extendleft(self._tasks(batch))

    def _redo(self, loss: Loss) -> None:
        """Do again what a side process died with, but for a sample that kills all who read it."""
        killed = loss.child.exitcode == -signal.SIGKILL and loss.child.hang is None
        times = _KILLS if killed else _TIMES
        quarantine = self.plan.faults.quarantine
        killer = None
        if loss.suspect is not None:
            number, at = loss.suspect
            batches = {task.batch.number: task.batch for task in loss.tasks}
            known = number in batches and plain_index(batches[number].index_at(at)) in quarantine
            self._deaths[loss.suspect] += 1
            if known or self._deaths[loss.suspect] >= times:
                killer = loss.suspect
                del self._deaths[killer]  # they are not those of the index in its place
        for task in reversed(loss.tasks):
            batch, went_on = task.batch, True
            if killer is not None and killer[0] == batch.number and task.reads(killer[1]):
                error = watches.lost_sample(batch.index_at(killer[1]), loss.child, times)
                went_on = batch.give_up(killer[1], self.plan, error)
            if went_on and self._is_current(batch):
                self._todo.appendleft(task.renewed())
                continue
            batch.open_tasks -= 1
            self._finish_if_ready(batch)


def _parts(kind: protocol.TaskKind, batch: PendingBatch, size: int) -> list[Task]:
    indices = batch.indices
    return [Task(kind, batch, at, indices[at : at + size]) for at in range(0, len(indices), size)]


def rows_per_task(
    samples: int,
    sample_ns: float | None,
    *,
    workers: int,
    before: int,
    look_ahead: int,
    alone_ns: float = 0.0,
) -> int:
    """Return how many samples of a batch a process reads in one go.

    ``before`` of the ``look_ahead`` batches under way are needed before this one. If it is not
    needed soon, one process reads all of it that takes at most ``alone_ns`` for that.
    """
    spread = -(-samples // workers)
    if sample_ns is None:
        return spread
    sample_ns = max(1.0, sample_ns)
    at_once = max(1, round(_TASK_NS / sample_ns))
    rows = samples if at_once >= samples else min(spread, at_once)
    if before < 2:
        return rows
    if samples * sample_ns <= alone_ns:
        return samples
    share = -(-samples * look_ahead // (_TASKS_PER_WORKER * workers))
    return max(rows, min(-(-samples // 2), share, round(_LONG_TASK_NS / sample_ns)))


def _own_memory(indices: Any, *, batched: bool, whole: bool) -> Any:
    """Return indices that nobody else changes, and whose tensors do not lie in larger ones.

    ``whole``: they are not divided, and so an array stays one.
    """
    if whole and isinstance(indices, torch.Tensor):
        return indices.clone()
    if isinstance(indices, np.ndarray):
        return indices.copy() if whole else list(indices)
    if not batched:
        return indices
    if isinstance(indices, Mapping | deque) or not hasattr(indices, "__getitem__"):
        return list(indices)  # a set, for example: it has no parts
    if not any(isinstance(getattr(each, "given", each), torch.Tensor) for each in indices[:1]):
        return list(indices) if type(indices) is list else indices
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in indices]


@dataclass(slots=True, eq=False)
class _Lane:
    """What one side process has to give of its stream in this epoch."""

    child: ChildProcess
    batches: deque[PendingBatch] = field(default_factory=deque)
    """Batches asked for and not delivered, the oldest first."""
    delivered: int = 0
    """Number of batches of this epoch that were handed over."""
    ended: bool = False
    """Whether the stream has no more batches than those in ``batches``."""
    dead: bool = False
    """Whether the process died before the end of its stream."""

    @property
    def ready(self) -> bool:
        """Whether its next batch is there."""
        return bool(self.batches) and self.batches[0].is_ready

    @property
    def done(self) -> bool:
        """Whether everything was handed over."""
        return self.ended and not self.batches

    @property
    def failure(self) -> BaseException | None:
        """Why the process makes no further batch before its end; None: it does."""
        child = self.child
        if child.failure is not None or not self.dead:
            return child.failure
        hint = "" if child.answers else f" {watches.MAIN}"
        return WorkerError(
            f"Side process {child.number} {watches.death(child.exitcode)} before the end of its "
            f"stream. The {self.delivered} batches that it had made in this epoch were delivered; "
            "the rest of its stream is missing, because a stream cannot be read again from its "
            "middle. Begin the epoch anew, or use a dataset with __getitem__, whose samples are "
            f"read again.{hint}"
        )

    def drop(self, tasks: Iterable[Task]) -> None:
        """Drop tasks that its process, which has ended, did not do."""
        for task in tasks:
            task.batch.release()
            if task.batch in self.batches:
                self.batches.remove(task.batch)
        self.dead = not self.ended


class StreamExecutor(_CrewExecutor):
    """Reads a stream in side processes, each of which iterates a copy of its own.

    The order is torch's: one batch of each process in turn, those whose stream has ended left out.
    """

    def __init__(self, plan: FetchPlan, given: Resources) -> None:
        # No process can read what another was asked for, so that a trial of half shows nothing.
        super().__init__(plan, replace(given, trial=watches.CrewTrial(0)))
        self._processes = given.workers
        self._samples: int | None = 0
        self._turn = 0
        self._lanes: list[_Lane] = []
        self.history = StreamHistory(plan.dataset)
        """Positions of the stream after each of its last batches."""
        self._resume: dict[int, LanePosition] = {}
        """Positions at which processes resume that were not asked for a batch yet, by number."""

    def start_epoch(
        self, batches: Iterable[Any], epoch: int, *, resume: Sequence[LanePosition] | None = None
    ) -> None:
        """Begin an epoch; what is left of the one before is dropped.

        ``resume``: positions at which the processes resume; None: they do not.
        """
        source, workers = iter(batches), self._processes
        self._samples = next(source)
        over = all(lane.done for lane in self._lanes)
        self._now = EpochRun(epoch, self._now.generation + 1, source)
        self._first = True
        for lane in self._lanes:
            for batch in lane.batches:
                if batch.is_ready:
                    batch.release()
            lane.batches.clear()
        if self._lanes:
            self._receive(waiting=False)  # this finds a process that died after its last batch
        for lane in self._lanes:
            child = lane.child
            lives = self.children.get(child.number) is child
            if lives and child.failure is not None:
                self._crew.discard(child)
                lane.drop(child.tasks.values())
        self._resume, self._crew.wanted = dict(enumerate(resume or ())), workers
        # What was asked for before is read, too, as by torch: a stream may keep its place.
        self._crew.start_epoch(0, epoch)
        earlier = {id(lane.child) for lane in self._lanes}
        self._lanes = [_Lane(self.children[number]) for number in range(workers)]
        going_on = [n for n, lane in enumerate(self._lanes) if id(lane.child) in earlier]
        self.history.start_epoch(workers, resume, going_on=going_on, over=over)
        self._turn = self.history.first_turn
        self._fill()

    def close(self) -> None:
        """Stop all side processes and let go of the memory; batches handed out stay valid."""
        super().close()
        self._lanes.clear()

    def _pending(self) -> Iterable[PendingBatch]:
        return [batch for lane in self._lanes for batch in lane.batches]

    def _fill(self) -> None:
        each = max(1, self.plan.look_ahead // max(1, len(self._lanes)))
        for depth in range(each):
            for lane in self._lanes:
                if len(lane.batches) == depth and not lane.ended and lane.failure is None:
                    start = self._resume.pop(lane.child.number, None)
                    ask = StreamAsk(self._now.generation, self._samples, start)
                    task = self._whole_task(self._new_batch(ask))
                    task.batch.open_tasks = 1
                    lane.batches.append(task.batch)
                    self._crew.give(task, lane.child)

    def _next_lane(self) -> _Lane | None:
        """Return the lane whose turn it is; None when all have ended."""
        count = len(self._lanes)
        in_turn = [self._lanes[(self._turn + step) % count] for step in range(count)]
        open_lanes = [lane for lane in in_turn if not lane.done]
        if not open_lanes:
            return None
        if not self.plan.in_order:
            # A loss is reported at once, since in an endless stream there is always a batch ready.
            open_lanes.sort(key=lambda e: (bool(e.batches) or e.failure is None, not e.ready))
        return open_lanes[0]

    def _first_ready(self) -> PendingBatch | None:
        lane = self._next_lane()
        return lane.batches[0] if lane is not None and lane.ready else None

    def _end(self) -> BaseException | None:
        lane = self._next_lane()
        if lane is None:
            return StopIteration()
        return None if lane.batches else lane.failure

    def _deliver(self, batch: PendingBatch) -> Batch:
        number = next(n for n, lane in enumerate(self._lanes) if batch in lane.batches)
        lane = self._lanes[number]
        self._turn = (number + 1) % len(self._lanes)
        lane.batches.popleft()
        delivered = self._wait.unpacked(batch.data)
        lane.delivered += 1
        self.history.handed_over(number)
        self._fill()  # as torch does: whoever leaves the epoch now has had as much read
        return delivered

    def _reads(self, child: ChildProcess) -> str | None:
        return "its stream" if child.tasks else None

    def _answer(self, answer: Answer) -> None:
        super()._answer(answer)
        lane, batch = self._lanes[answer.child.number], answer.task.batch
        result = answer.ended.result
        if not self._is_current(batch):
            batch.release()
        elif isinstance(result, protocol.Collated):
            self.history.made(answer.child.number, result.note or StreamNote())
        elif isinstance(result, protocol.StreamEnd):
            lane.ended = True  # its other tasks will be answered likewise
            lane.batches = deque(b for b in lane.batches if b.is_ready and b is not batch)
            batch.release()

    def _redo(self, loss: Loss) -> None:
        """Give up a stream whose process has died: nobody can read what was lost."""
        self._lanes[loss.child.number].drop(loss.tasks)

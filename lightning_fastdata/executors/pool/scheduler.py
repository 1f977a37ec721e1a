"""Side processes that fetch: the executor ``"workers"``.

The training process keeps the indices of everything that is under way, so whatever a process that
died had not finished is given to another one. :mod:`.protocol` shows the way of a batch.
"""

from __future__ import annotations

import math
import signal
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from lightning_fastdata.batches.bad_samples import NO_SAMPLES, plain_index
from lightning_fastdata.batches.layout import SampleLayout
from lightning_fastdata.batches.slots import SlotPool
from lightning_fastdata.batches.staged import PinThread
from lightning_fastdata.errors import WorkerError, as_error
from lightning_fastdata.executors.crew_trial import CrewTrial
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.pool import faults, protocol
from lightning_fastdata.executors.pool.crew import Crew
from lightning_fastdata.executors.pool.process import Answer, Loss
from lightning_fastdata.executors.pool.splitter import EpochRun, PendingBatch, Splitter, Task
from lightning_fastdata.host import clock
from lightning_fastdata.stamps.batch_stamps import BatchStamps, ReadRates, WaitWatch
from lightning_fastdata.types import Batch

_TIMES: Final = 2
_KILLS: Final = 4
"""So many crash or hang with a sample that is given up; SIGKILL may come from outside."""


class PoolExecutor:
    """Fetches batches in ``processes`` side processes."""

    def __init__(
        self,
        plan: FetchPlan,
        *,
        processes: int,
        pin_thread: PinThread | None = None,
        trial: CrewTrial | None = None,
    ) -> None:
        self.plan = plan
        self._slots = SlotPool(limit_bytes=plan.memory_limit_bytes)
        self._pin_thread = pin_thread
        self._crew = self._start_crew(processes)
        self.children = self._crew.children
        """The side processes by their numbers."""
        self._splitter = Splitter(plan, self._slots)
        self._trial = CrewTrial(self._crew.wanted) if trial is None else trial
        self._rates: ReadRates | None = None
        self._now = EpochRun(0, 0, iter(()), exhausted=True)
        self._wait = WaitWatch()
        self._records: deque[BatchStamps] | None = None
        self._first, self._count = True, 0
        self._batches: deque[PendingBatch] = deque()
        self._todo: deque[Task] = deque()
        self._stall = faults.StallWatch(plan.timeout_s)
        self._deaths: Counter[tuple[int, int]] = Counter()
        """Of side processes, by batch number and position of what was being read then."""

    def _start_crew(self, processes: int) -> Crew | Any:
        return Crew(self.plan, self._slots, processes=processes)

    @property
    def respawned(self) -> int:
        """Side processes that died and were replaced."""
        return self._crew.respawned

    def start_epoch(self, batches: Iterable[Any], epoch: int) -> None:
        """Begin an epoch; what is left of the one before is dropped."""
        self._first = True
        self._now = EpochRun(epoch, self._now.generation + 1, iter(batches))
        self._crew.start_epoch(self._now.generation, epoch)
        for child in self.children.values():
            child.state = None  # which holds until they read again
        for task in [task for task in self._todo if not self._is_current(task.batch)]:
            self._todo.remove(task)
            task.batch.open_tasks -= 1
        for batch in [batch for batch in self._batches if not self._is_current(batch)]:
            self._batches.remove(batch)
            if batch.is_ready:
                batch.release(self._slots)
        self._deaths.clear()
        self._trial.given_up()
        self._fill()

    def __iter__(self) -> PoolExecutor:
        return self

    def __next__(self) -> Batch:
        self._wait.requested(recorded=self._records is not None)
        if self._pin_thread is not None:  # what has come since goes there before it is its turn
            self._receive(waiting=False)
        ahead = -1
        while True:
            self._fill()
            batch = self._first_ready()
            if batch is not None:
                self._batches.remove(batch)
                if batch.faults:
                    batch.report(self.plan.faults)
                deliver = partial(
                    batch.data, self._slots, self._splitter.layout, pin_thread=self._pin_thread
                )
                delivered = self._wait.unpacked(deliver)
                if delivered is NO_SAMPLES:
                    continue
                if self._records is not None:
                    rates, self._rates = self._rates, None
                    stamps = batch.all_stamps(
                        self._wait, max(0, ahead), first=self._first, rates=rates
                    )
                    self._records.append(stamps)
                    self._trial.delivered(late=ahead >= 0)
                self._first = False
                return delivered
            if ahead < 0 and self._records is not None:
                ahead = sum(other.is_ready for other in self._batches)
            if self._has_ended():
                raise StopIteration
            self._receive()

    def ready(self) -> bool:
        """Return whether the next batch, or the end, can be had without waiting."""
        self._fill()
        self._receive(waiting=False)
        batch = self._first_ready()
        return self._has_ended() or (batch is not None and batch.comes_at_once)

    def under_way(self) -> tuple[int, tuple[int, ...]]:
        """Return how many batches of the epoch were begun, and which were not handed over."""
        return self._now.begun, tuple(b.place for b in self._batches if self._is_current(b))

    def _has_ended(self) -> bool:
        return self._now.exhausted and not any(map(self._is_current, self._batches))

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each delivered batch from now on; None: no more."""
        self._records = records
        if records is None:
            self._trial.given_up()  # without stamps it would never end
        self._crew.configure(protocol.SetStamps(records is not None))

    def resize(self, workers: int, look_ahead: int | None = None) -> None:
        """Have so many side processes, and batches ahead; those too many finish their work."""
        if look_ahead is not None:
            self.plan = self._splitter.plan = replace(self.plan, look_ahead=look_ahead)
        self._crew.resize(workers)
        self._trial = self._trial.with_workers(workers)

    def ask_states(self, within_s: float) -> None:
        """Ask each side process what it reads: the epoch is over."""
        self._crew.ask_states(self._now.generation + 1, within_s)

    def read_the_same(self, digest: bytes, within_s: float) -> bool:
        """Return whether what side processes have read has changed nothing of what they read.

        ``digest``: What the training process would have them read.
        """
        if any(child.state is None and not child.asked for child in self.children.values()):
            self.ask_states(within_s)
        while any(child.asked for child in self.children.values()):
            self._receive()
        told = [child.state for child in self.children.values()]
        return all(state is not None and (state.same or state.digest == digest) for state in told)

    def close(self) -> None:
        """Stop all side processes and let go of the memory; batches handed out stay valid."""
        self._crew.close()
        self._slots.close()
        self._batches.clear()
        self._todo.clear()
        self._now.exhausted = True

    # What is under way

    def _fill(self) -> None:
        while len(self._batches) < self.plan.look_ahead:
            if not self._splitter.has_place(self._batches, self._crew.wanted):
                break
            if self._now.exhausted:
                break
            try:
                indices = self._wait.sampled(self._now.source)
            except StopIteration:
                self._now.exhausted = True
                break
            self._count += 1
            batch = self._splitter.begin(self._count, self._now, indices)
            self._batches.append(batch)
            self._todo.extend(self._splitter.tasks(batch, self._batches, self._crew.wanted))
        limit = self._trial.limit
        while self._todo and (limit is None or self._crew.under_way < limit):
            if not self._crew.give(self._todo[0]):
                break
            self._todo.popleft()

    # What comes back

    def _receive(self, *, waiting: bool = True) -> None:
        look_s = self._stall.next_look_s
        events = self._crew.wait(look_s if waiting else 0.0)
        for event in events or ():
            if isinstance(event, Loss):
                self._redo(event)
            else:
                self._answer(event)
        if self._pin_thread is not None:
            for batch in filter(self._is_current, self._batches):
                batch.pin(self._pin_thread, self._slots, self._splitter.layout)
        if not waiting or (events is not None and clock.monotonic() < (look_s or math.inf)):
            return
        children = list(self._crew.children.values())
        tell = partial(faults.doing, self.plan, self._batches, children)
        for child, hang in self._stall.look(children, tell, self._crew.owing):
            faults.kill_hung(child, hang, self.plan, self._batches)

    def _answer(self, answer: Answer) -> None:
        child, task, ended = answer.child, answer.task, answer.ended
        batch, result = task.batch, ended.result
        batch.open_tasks -= 1
        if ended.faults:
            batch.note(ended.faults)
        self._stall.note_task(ended.spent_ns)
        if ended.stamps is not None and not isinstance(result, protocol.OldEpoch):
            batch.stamps.append(ended.stamps)
            self._rates = self._trial.answered(ended.stamps, self._crew.under_way) or self._rates
        match result:
            case protocol.RowsWritten():
                self._splitter.note_time(ended.spent_ns / len(task.indices))
            case protocol.FirstSample(layout):
                self._crew.go_on(child.number, self._learn(layout, task))
            case protocol.Collated(packed):
                self._wait.unpacked(partial(batch.take_parts, packed, answer.files, self._slots))
                self._splitter.whole_bytes = max(self._splitter.whole_bytes, packed.size_bytes)
            case protocol.NothingLeft():
                batch.is_empty = True
            case protocol.Misfit():
                batch.misfit, self._splitter.in_place = True, False
            case protocol.TaskError(position, kind, text):
                if batch.error is None or position < batch.error[0]:
                    batch.error = position, as_error(kind, child.number, text)
        self._finish_if_ready(batch)

    def _learn(self, layout: SampleLayout | None, task: Task) -> Task | None:
        """Return what the process that read the first sample of a task, and kept it, is to do next.

        The first layout that is found is that of all samples.
        """
        batch = task.batch
        if self._splitter.in_place is None:
            self._splitter.in_place, self._splitter.layout = layout is not None, layout
            self._crew.configure(protocol.SetLayout(layout))
        if batch.misfit or not self._is_current(batch):
            return None
        try:
            placed = self._splitter.place(batch)
        except WorkerError as error:  # no memory for it, which is raised when it is its turn
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
            batch.release(self._slots)
        elif batch.misfit and batch.error is None:
            # True collation decides what becomes of samples that differ, as it would in torch.
            batch.release(self._slots)
            batch.misfit = batch.in_place = False
            tasks = self._splitter.tasks(batch, self._batches, self._crew.wanted)
            self._todo.extendleft(tasks)

    def _is_current(self, batch: PendingBatch) -> bool:
        return batch.generation == self._now.generation

    def _first_ready(self) -> PendingBatch | None:
        for batch in self._batches:
            if not self._is_current(batch):
                break
            if batch.is_ready:
                return batch
            if self.plan.in_order:
                break
        return None

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
                del self._deaths[killer]  # of this sample, and not of what takes its place
        for task in reversed(loss.tasks):
            batch, went_on = task.batch, True
            if killer is not None and killer[0] == batch.number and task.reads(killer[1]):
                error = faults.lost_sample(batch.index_at(killer[1]), loss.child, times)
                went_on = batch.give_up(killer[1], self.plan, error)
            if went_on and self._is_current(batch):
                self._todo.appendleft(task.renewed())
                continue
            batch.open_tasks -= 1
            self._finish_if_ready(batch)

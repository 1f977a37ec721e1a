"""Streams (iterable datasets): each side process reads its own copy, batches come in turn.

The order is torch's: one batch of each process in turn, those whose stream has ended left out. A
stream cannot be asked for a sample a second time, so a process that dies before the end of its
stream ends the epoch with an error, after what it had finished was delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_fastdata.batches.slots import SlotPool
from lightning_fastdata.errors import as_error
from lightning_fastdata.executors.inline import StreamAsk
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.crew import Crew
from lightning_fastdata.executors.pool.faults import StallWatch, doing_in_streams, stream_broken
from lightning_fastdata.executors.pool.process import Answer, Loss
from lightning_fastdata.executors.pool.splitter import PendingBatch, Task
from lightning_fastdata.executors.stream_state import LanePosition, StreamHistory, StreamNote
from lightning_fastdata.stamps.batch_stamps import BatchStamps, WaitWatch

if TYPE_CHECKING:
    from lightning_fastdata.batches.staged import PinThread
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.executors.pool.process import ChildProcess
    from lightning_fastdata.types import Batch


@dataclass(slots=True, eq=False)
class _Lane:
    """What one side process has to give in this epoch."""

    child: ChildProcess
    batches: deque[PendingBatch] = field(default_factory=deque)
    """Asked for and not delivered, the oldest first."""
    delivered: int = 0
    """Batches of this epoch that were handed over."""
    ended: bool = False
    """Its stream has no more batches than those in ``batches``."""
    dead: bool = False
    """It died before the end of its stream."""

    @property
    def ready(self) -> bool:
        """Whether its next batch is there."""
        return bool(self.batches) and self.batches[0].is_ready

    @property
    def done(self) -> bool:
        """Whether everything was handed over."""
        return self.ended and not self.batches

    @property
    def closed(self) -> bool:
        """Whether it makes no batch that it was not asked for yet."""
        return self.ended or self.dead or self.child.failure is not None

    @property
    def broken(self) -> bool:
        """Whether what it still has to give will not come."""
        return not self.batches and (self.dead or self.child.failure is not None)

    def error(self) -> BaseException:
        """Return why it is broken."""
        child = self.child
        if child.failure is not None:
            return child.failure
        code, answered = child.process.exitcode, child.answers > 0
        return stream_broken(child.number, code, self.delivered, answered=answered)

    def drop(self, tasks: Iterable[Task], slots: SlotPool) -> None:
        """Drop tasks that its process, which has ended, did not do."""
        for task in tasks:
            task.batch.release(slots)
            if task.batch in self.batches:
                self.batches.remove(task.batch)
        self.dead = not self.ended


class StreamExecutor:
    """Reads a stream in ``processes`` side processes, each of which iterates a copy of its own."""

    def __init__(
        self, plan: FetchPlan, *, processes: int, pin_thread: PinThread | None = None
    ) -> None:
        self.plan = plan
        self._pin_thread = pin_thread
        self._processes = processes
        self._slots = SlotPool(limit_bytes=plan.memory_limit_bytes)
        self._whole_bytes = 0
        self._samples: int | None = 0
        self._generation = 0
        self._epoch = 0
        self._count = 0
        self._stall = StallWatch(plan.timeout_s)
        self._turn = 0
        self._lanes: list[_Lane] = []
        self._wait = WaitWatch()
        self._records: deque[BatchStamps] | None = None
        self._first = True
        self.history = StreamHistory(plan.dataset)
        """Where the stream was behind each of the last batches."""
        self._resume: dict[int, LanePosition] = {}
        """Where processes go on that were not asked for a batch yet, by their numbers."""
        self._crew = Crew(plan, self._slots, processes=processes, streams=True)
        self.children = self._crew.children
        """The side processes by their numbers."""

    def start_epoch(
        self, batches: Iterable[Any], epoch: int, *, resume: Sequence[LanePosition] | None = None
    ) -> None:
        """Begin an epoch; what is left of the one before is dropped.

        ``resume``: go on there, with the first epoch.
        """
        self._samples, workers = next(iter(batches)), self._processes
        over = all(lane.done for lane in self._lanes)
        self._generation += 1
        self._epoch = epoch
        self._first = True
        for lane in self._lanes:
            for batch in lane.batches:
                if batch.is_ready:
                    batch.release(self._slots)
            lane.batches.clear()
        if self._lanes:
            self._handle(self._crew.wait(0.0))  # one that died after its last batch is found here
        for lane in self._lanes:
            child = lane.child
            lives = self.children.get(child.number) is child
            if lives and child.failure is not None:
                self._crew.discard(child)
                lane.drop(child.tasks.values(), self._slots)
        self._resume, self._crew.wanted = dict(enumerate(resume or ())), workers
        self._crew.start_epoch(self._generation, epoch)
        earlier = {id(lane.child) for lane in self._lanes}
        self._lanes = [_Lane(self.children[number]) for number in range(workers)]
        going_on = [n for n, lane in enumerate(self._lanes) if id(lane.child) in earlier]
        self.history.start_epoch(workers, resume, going_on=going_on, over=over)
        self._turn = self.history.first_turn
        self._fill()

    def __iter__(self) -> StreamExecutor:
        return self

    def __next__(self) -> Batch:
        self._wait.requested(recorded=self._records is not None)
        if self._pin_thread is not None:  # what has come since goes there before it is its turn
            self._handle(self._crew.wait(0.0))
        ahead = -1
        while True:
            self._fill()
            lane = self._next_lane()
            if lane is None:
                raise StopIteration
            if lane.ready:
                stamped = lane.batches[0]
                delivered = self._wait.unpacked(partial(self._deliver, lane))
                if self._records is not None:
                    stamps = stamped.all_stamps(self._wait, max(0, ahead), first=self._first)
                    self._records.append(stamps)
                self._first = False
                return delivered
            if ahead < 0 and self._records is not None:
                ahead = sum(batch.is_ready for lane in self._lanes for batch in lane.batches)
            if lane.broken:
                raise lane.error()
            self._receive()

    def ready(self) -> bool:
        """Return whether the next batch, an error or the end can be had without waiting."""
        self._fill()
        self._handle(self._crew.wait(0.0))
        lane = self._next_lane()
        if lane is None or lane.broken:
            return True
        return lane.ready and lane.batches[0].comes_at_once

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each delivered batch from now on; None: no more."""
        self._records = records
        self._crew.configure(protocol.SetStamps(records is not None))

    def resize(self, workers: int, look_ahead: int | None = None) -> None:
        """Do nothing: a stream is shared out among the processes that there are."""

    def close(self) -> None:
        """Stop all side processes and let go of the memory; batches handed out stay valid."""
        self._crew.close()
        self._slots.close()
        self._lanes.clear()

    # What is under way

    def _fill(self) -> None:
        each = max(1, self.plan.look_ahead // max(1, len(self._lanes)))
        for depth in range(each):
            for lane in self._lanes:
                if len(lane.batches) == depth and not lane.closed:
                    start = self._resume.pop(lane.child.number, None)
                    self._ask(lane, StreamAsk(self._generation, self._samples, start))

    def _ask(self, lane: _Lane, ask: StreamAsk) -> None:
        self._count += 1
        batch = PendingBatch(self._count, self._generation, self._epoch, 0, ask, open_tasks=1)
        if self._whole_bytes:
            batch.slot = self._slots.take(self._whole_bytes)
        lane.batches.append(batch)
        self._crew.give(Task("whole", batch, 0, ask), lane.child)

    def _next_lane(self) -> _Lane | None:
        """Return the lane whose turn it is; None when all have ended."""
        count = len(self._lanes)
        in_turn = [self._lanes[(self._turn + step) % count] for step in range(count)]
        open_lanes = [lane for lane in in_turn if not lane.done]
        if not open_lanes:
            return None
        if not self.plan.in_order:
            # A loss is reported at once, since in an endless stream there is always a batch ready.
            open_lanes.sort(key=lambda lane: (not lane.broken, not lane.ready))
        return open_lanes[0]

    def _deliver(self, lane: _Lane) -> Batch:
        self._turn = (self._lanes.index(lane) + 1) % len(self._lanes)
        batch = lane.batches.popleft()
        if batch.error is not None:
            batch.release(self._slots)
            raise batch.error[1]
        lane.delivered += 1
        data = batch.data(self._slots, pin_thread=self._pin_thread)
        self.history.handed_over(lane.child.number)
        return data

    # What comes back

    def _receive(self) -> None:
        events = self._crew.wait(self._stall.next_look_s)
        self._handle(events)
        if events is None:
            children = list(self.children.values())
            self._stall.look(children, lambda: doing_in_streams(children))

    def _handle(self, events: Iterable[Answer | Loss] | None) -> None:
        for event in events or ():
            lane = self._lanes[event.child.number]
            if isinstance(event, Loss):
                lane.drop(event.tasks, self._slots)
            else:
                self._answer(lane, event)
        if self._pin_thread is not None:
            for batch in [batch for lane in self._lanes for batch in lane.batches]:
                batch.pin(self._pin_thread, self._slots)

    def _answer(self, lane: _Lane, answer: Answer) -> None:
        batch, ended = answer.task.batch, answer.ended
        batch.open_tasks = 0
        current, result = batch.generation == self._generation, ended.result
        self._stall.note_task(ended.spent_ns)
        if ended.stamps is not None and not isinstance(result, protocol.OldEpoch):
            batch.stamps.append(ended.stamps)
        match result:
            case protocol.Collated(packed, note):
                self._wait.unpacked(partial(batch.take_parts, packed, answer.files, self._slots))
                self._whole_bytes = max(self._whole_bytes, packed.size_bytes)
                if current:
                    self.history.made(lane.child.number, note or StreamNote())
            case protocol.TaskError(position, kind, text):
                batch.error = position, as_error(kind, lane.child.number, text)
        if not current:
            batch.release(self._slots)
        elif isinstance(result, protocol.StreamEnd):
            lane.ended = True  # what it was asked for besides will be answered likewise
            lane.batches = deque(b for b in lane.batches if b.is_ready and b is not batch)
            batch.release(self._slots)

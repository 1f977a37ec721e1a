"""Streams (iterable datasets): each side process reads its own copy, batches come in turn.

The order is torch's: one batch of each process in turn, those whose stream has ended left out. A
stream cannot be asked for a sample a second time, so a process that dies before the end of its
stream ends the epoch with an error, after what it had finished was delivered.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_fastdata.batches.slots import SlotPool
from lightning_fastdata.executors.pool.faults import (
    StallWatch,
    as_error,
    doing_in_streams,
    stream_broken,
    stream_timed_out,
)
from lightning_fastdata.executors.pool.process import PendingBatch, SideProcess, Task, stop_all
from lightning_fastdata.executors.pool.task_queue import make_packet
from lightning_fastdata.executors.stream_fetch import StreamAsk
from lightning_fastdata.stamps.batch_stamps import BatchStamps
from lightning_fastdata.stamps.own_stamps import WaitWatch

if TYPE_CHECKING:
    from lightning_fastdata.executors.fetch import FetchPlan


@dataclass(slots=True, eq=False)
class _Lane:
    """What one side process has to give in this epoch."""

    side: SideProcess
    batches: deque[PendingBatch] = field(default_factory=deque)
    """Asked for and not delivered, the oldest first."""
    delivered: int = 0
    """Batches of this epoch that were handed over."""
    ended: bool = False
    """Its stream has no more batches than those in ``batches``."""
    failure: BaseException | None = None
    """It could not start."""
    dead: bool = False
    """It died before the end of its stream."""

    @property
    def ready(self) -> bool:
        """Whether its next batch is there."""
        return bool(self.batches) and not self.batches[0].open_tasks

    @property
    def done(self) -> bool:
        """Whether everything was handed over."""
        return self.ended and not self.batches

    @property
    def broken(self) -> bool:
        """Whether what it still has to give will not come."""
        return not self.batches and (self.dead or self.failure is not None)

    def error(self) -> BaseException:
        """Return why it is broken."""
        if self.failure is not None:
            return self.failure
        code, answered = self.side.process.exitcode, self.side.answers > 0
        return stream_broken(self.side.number, code, self.delivered, answered=answered)


class StreamExecutor:
    """Reads a stream in ``processes`` side processes, each of which iterates a copy of its own."""

    def __init__(self, plan: FetchPlan, *, processes: int) -> None:
        self.plan = plan
        self._wanted = processes
        self._slots = SlotPool(limit_bytes=plan.memory_limit_bytes)
        self._whole_bytes = 0
        self._samples: int | None = 0
        self._generation = 0
        self._epoch = 0
        self._count = 0
        self._stall = StallWatch(plan.stall_timeout_s)
        self._turn = 0
        self._lanes: list[_Lane] = []
        self.sides: dict[int, SideProcess] = {}
        self._wait = WaitWatch()
        self._records: deque[BatchStamps] | None = None
        self._first = True
        self._closer = weakref.finalize(self, stop_all, self.sides, os.getpid())

    def start_epoch(self, batches: Iterable[Any], epoch: int) -> None:
        """Begin an epoch; what is left of the one before is dropped."""
        self._generation += 1
        self._epoch = epoch
        self._first = True
        for lane in self._lanes:
            for batch in lane.batches:
                if not batch.open_tasks:
                    batch.release(self._slots)
            lane.batches.clear()
            if lane.side.number in self.sides:
                self._read(lane)  # one that died since the last epoch had nothing left to give
            resized = len(self._lanes) != self._wanted  # the stream is shared out anew
            if (resized or lane.failure is not None) and lane.side.number in self.sides:
                self._bury(lane)
        self._spawn_missing()
        for side in self.sides.values():
            side.marks[-1] = self._generation
        self._lanes = [_Lane(self.sides[number]) for number in range(self._wanted)]
        self._samples, self._turn = next(iter(batches)), 0
        self._fill()

    def __iter__(self) -> StreamExecutor:
        return self

    def __next__(self) -> Any:
        until = time.monotonic() + self.plan.timeout_s if self.plan.timeout_s else None
        self._wait.requested(recorded=self._records is not None)
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
                    stamps = stamped.delivered(self._wait, max(0, ahead), first=self._first)
                    self._records.append(stamps)
                self._first = False
                return delivered
            if ahead < 0 and self._records is not None:
                ahead = sum(not batch.open_tasks for lane in self._lanes for batch in lane.batches)
            if lane.broken:
                raise lane.error()
            self._receive(until)

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each delivered batch from now on; None: no more."""
        self._records = records
        for side in self.sides.values():
            side.send(("stamp", records is not None))

    def resize(self, workers: int) -> None:
        """Have so many side processes from the next epoch on, as they share out the stream."""
        self._wanted = workers

    def close(self) -> None:
        """Stop all side processes and let go of the memory; batches handed out stay valid."""
        self._closer()
        self._slots.close()
        self._lanes.clear()

    # What is under way

    def _fill(self) -> None:
        each = max(1, self.plan.look_ahead // max(1, len(self._lanes)))
        for depth in range(each):
            for lane in self._lanes:
                closed = lane.ended or lane.dead or lane.failure is not None
                if len(lane.batches) == depth and not closed:
                    self._ask(lane, StreamAsk(self._generation, self._samples))

    def _ask(self, lane: _Lane, ask: StreamAsk) -> None:
        self._count += 1
        batch = PendingBatch(self._count, self._generation, self._epoch, ask, open_tasks=1)
        if self._whole_bytes:
            batch.slot = self._slots.take(self._whole_bytes)
        lane.batches.append(batch)
        side, slot = lane.side, batch.slot
        for number in self._slots.dropped:
            for other in self.sides.values():
                if number in other.known_slots:
                    other.known_slots.discard(number)
                    other.send(("drop", number))
        self._slots.dropped.clear()
        if slot is not None and slot.number not in side.known_slots and slot.descriptor is not None:
            side.known_slots.add(slot.number)
            side.send(("slot", slot.number), slot)
        side.tasks[batch.number] = Task("whole", batch, 0, ask)
        place = None if slot is None else slot.number
        what = (batch.generation, batch.number, batch.epoch, 0, ask, 1, place)
        side.send(("task", make_packet(batch.number, ("whole", *what))))

    def _next_lane(self) -> _Lane | None:
        """Return the lane whose turn it is; None when all have ended."""
        count = len(self._lanes)
        in_turn = [self._lanes[(self._turn + step) % count] for step in range(count)]
        open_lanes = [lane for lane in in_turn if not lane.done]
        if not open_lanes:
            return None
        if not self.plan.in_order:
            # A loss is told at once, since in an endless stream there is always a batch ready.
            open_lanes.sort(key=lambda lane: (not lane.broken, not lane.ready))
        return open_lanes[0]

    def _deliver(self, lane: _Lane) -> Any:
        self._turn = (self._lanes.index(lane) + 1) % len(self._lanes)
        batch = lane.batches.popleft()
        if batch.error is not None:
            batch.release(self._slots)
            raise batch.error[1]
        lane.delivered += 1
        return batch.data(self._slots)

    # What comes back

    def _receive(self, until: float | None) -> None:
        poller = select.poll()
        lanes = [lane for lane in self._lanes if lane.side.number in self.sides]
        by_end = {end: lane for lane in lanes for end in lane.side.ends}
        for end, lane in by_end.items():
            writing = lane.side.outbox and end == lane.side.wire.fileno()
            poller.register(end, select.POLLIN | (select.POLLOUT if writing else 0))
        look = self._stall.next_look if until is None else None
        until = look or until
        left_ms = None if until is None else max(0.0, (until - time.monotonic()) * 1000)
        heard = []
        for end, event in poller.poll(left_ms):
            lane = by_end[end]
            if event & select.POLLOUT:
                lane.side.flush()
            if event & ~select.POLLOUT and lane not in heard:
                heard.append(lane)
        if not heard and until is not None and time.monotonic() >= until:
            if look is None:
                raise stream_timed_out(self.plan.timeout_s, self.sides.values())
            self._stall.look(self.sides.values(), lambda: doing_in_streams(self.sides.values()))
        for lane in heard:
            self._read(lane)

    def _read(self, lane: _Lane) -> None:
        for received in lane.side.messages():
            if received is None:
                self._bury(lane)
                return
            self._answer(lane, *received)

    def _answer(self, lane: _Lane, message: tuple[Any, ...], files: list[int]) -> None:
        kind, side = message[0], lane.side
        if kind == "failed":
            lane.failure = as_error(message[1], side.number, message[2])
            return
        batch = side.tasks.pop(message[1]).batch
        side.answers += 1
        self._stall.heard(message[2])
        batch.open_tasks = 0
        if kind != "stale" and message[3] is not None:
            batch.stamps.append(message[3])
        if kind == "whole":
            self._wait.unpacked(partial(batch.take_parts, message[4], files, self._slots))
            self._whole_bytes = max(self._whole_bytes, batch.packed.size_bytes)
        elif kind == "error":
            batch.error = message[4], as_error(message[5], side.number, message[6])
        if batch.generation != self._generation:
            batch.release(self._slots)
        elif kind == "end":
            lane.ended = True  # what it was asked for besides will be answered likewise
            lane.batches = deque(b for b in lane.batches if not b.open_tasks and b is not batch)
            batch.release(self._slots)

    # Life and death

    def _spawn_missing(self) -> None:
        for number in range(self._wanted):
            if number not in self.sides:
                ends = tuple(side.wire.fileno() for side in self.sides.values())
                side = SideProcess(self.plan, number, self._wanted, 1, ends, epoch=self._epoch)
                if self._records is not None:
                    side.send(("stamp", True))
                self.sides[number] = side

    def _bury(self, lane: _Lane) -> None:
        side = self.sides.pop(lane.side.number)
        side.stop(patience_s=5)
        for task in side.tasks.values():
            task.batch.release(self._slots)
            if task.batch in lane.batches:
                lane.batches.remove(task.batch)
        side.tasks.clear()
        self.plan = self.plan.with_other_draws()
        lane.dead = not lane.ended

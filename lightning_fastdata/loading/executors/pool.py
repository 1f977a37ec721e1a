"""Side processes that fetch: ``workers`` with one thread each, ``sidecar`` with many in one.

The training process keeps the indices of everything that is under way, so whatever a process that
died had not finished is given to another one. Nothing is shared between two side processes.
"""

from __future__ import annotations

import os
import select
import signal
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.loading.executors.processes import (
    EpochRun,
    PendingBatch,
    SideProcess,
    Task,
    stop_all,
)
from lightning_fastdata.loading.executors.reports import as_error, poisonous, stillborn, timed_out
from lightning_fastdata.loading.keyed import fetches_in_batches
from lightning_fastdata.loading.leaves import unpack
from lightning_fastdata.loading.slots import SlotPool

if TYPE_CHECKING:
    from lightning_fastdata.loading.executors.fetch import FetchPlan
    from lightning_fastdata.loading.layout import SampleLayout
    from lightning_fastdata.loading.order import EpochOrder
    from lightning_fastdata.loading.stamps import BatchStamps

_TASK_NS: Final = 2_000_000
"""Cheap samples share a task of about this length, as a message costs some 20 us."""
_MEMORY: Final = 0.9
_CRASHES: Final = 2
_KILLS: Final = 4
"""SIGKILL comes from outside, so a sample that was under way need not be the cause."""
_STILLBORN: Final = 3


class PoolExecutor:
    """Fetches batches in ``processes`` side processes of ``threads`` threads each."""

    def __init__(self, plan: FetchPlan, *, processes: int, threads: int = 1) -> None:
        self.plan = plan
        self.threads = threads
        self.respawned = 0
        self._wanted = processes
        self._slots = SlotPool(limit_bytes=plan.memory_limit_bytes)
        self._layout: SampleLayout | None = None
        # Whether batches are written in place: not known before the first sample was read.
        self._in_place = None if plan.default_collation and plan.batched else False
        if self._in_place is None and fetches_in_batches(plan.dataset):
            self._in_place = False
        self._whole_bytes = 0
        self._sample_ns: float | None = None
        self._away_ns = 0.0
        self._left_ns = time.monotonic_ns()
        self._now = EpochRun(0, 0, iter(()), exhausted=True)
        self._armed: EpochRun | None = None
        self._records: deque[BatchStamps] | None = None
        self._first = True
        self._batches: deque[PendingBatch] = deque()
        self._todo: deque[Task] = deque()
        self._count = 0
        self._task_count = 0
        self._deaths: Counter[tuple[int, int]] = Counter()
        self._stillborn = 0
        self._sides: dict[int, SideProcess] = {}
        self._closer = weakref.finalize(self, stop_all, self._sides, os.getpid())

    def start_epoch(
        self, batches: Iterable[Any], epoch: int, order: EpochOrder | None = None
    ) -> None:
        """Begin an epoch, with the batches under way if it is the one that was armed.

        What is left of the epoch before is dropped.
        """
        armed, self._armed = self._armed, None
        self._first = True
        if order is not None and armed is not None and armed.order == order:
            self._now = armed
        else:
            # An armed epoch that is not to be has the generation between.
            self._now = EpochRun(epoch, self._now.generation + 2, iter(batches))
        for side in self._sides.values():
            side.marks[-1] = self._now.generation
        left = [batch for batch in self._batches if self._is_old(batch)]
        self._batches = deque(batch for batch in self._batches if not self._is_old(batch))
        for task in [task for task in self._todo if self._is_old(task.batch)]:
            self._todo.remove(task)
            task.batch.open_tasks -= 1
        for batch in left:
            if not batch.open_tasks:
                self._release(batch)
        self._deaths.clear()
        self._spawn_missing()
        self._fill()

    def arm(self, order: EpochOrder) -> None:
        """Fetch the first batches of the next epoch as soon as there is nothing else to fetch."""
        generation = self._now.generation + 1
        self._armed = EpochRun(order.epoch, generation, order.batches(), order)

    def __iter__(self) -> PoolExecutor:
        return self

    def __next__(self) -> Any:
        until = time.monotonic() + self.plan.timeout_s if self.plan.timeout_s else None
        requested_ns = time.monotonic_ns()
        # The longest of the last steps, as far as they are still worth remembering.
        self._away_ns = max(requested_ns - self._left_ns, _MEMORY * self._away_ns)
        ahead = -1
        while True:
            self._fill()
            batch = self._next_ready()
            if batch is not None:
                delivered = self._deliver(batch)
                if self._records is not None:
                    stamps = batch.delivered(requested_ns, max(0, ahead), first=self._first)
                    self._records.append(stamps)
                self._first = False
                self._left_ns = time.monotonic_ns()
                return delivered
            if ahead < 0 and self._records is not None:
                ahead = sum(not other.open_tasks for other in self._batches)
            if self._now.exhausted and not any(map(self._is_current, self._batches)):
                raise StopIteration
            self._receive(until)

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each delivered batch from now on; None: no more."""
        self._records = records
        for side in self._sides.values():
            side.send(("stamp", records is not None))

    def resize(self, workers: int) -> None:
        """Have so many side processes from now on; those too many finish their work first."""
        self._wanted = workers
        for number, side in list(self._sides.items()):
            side.retiring = number >= workers
            self._retire(side)
        self._spawn_missing()

    def close(self) -> None:
        """Stop all side processes and let go of the memory; batches handed out stay valid."""
        self._closer()
        self._slots.close()
        self._batches.clear()
        self._todo.clear()
        self._now.exhausted, self._armed = True, None

    # What is under way

    def _fill(self) -> None:
        while len(self._batches) < self.plan.look_ahead:
            waits = self._in_place is None and self._batches
            if waits or not self._has_place():
                break
            found = self._next_indices()
            if found is None:
                break
            run, indices = found
            self._count += 1
            if self.plan.batched and hasattr(indices, "tolist"):
                indices = indices.tolist()
            batch = PendingBatch(self._count, run.generation, run.number, indices)
            self._batches.append(batch)
            self._todo.extend(self._tasks(batch))
        self._hand_out()

    def _hand_out(self) -> None:
        sides = [side for side in self._sides.values() if not side.retiring]
        # What waits behind a slow sample waits with it, so a process gets no more than will keep it
        # busy until it can be given more. At the end of an epoch nobody knows when that will be.
        unlimited = self._sample_ns is None or self._now.exhausted
        while self._todo:
            side = min(sides, key=lambda side: side.load)
            if not unlimited and len(side.tasks) > self.threads:
                queued_ns = side.load * (self._sample_ns or 0.0)
                if queued_ns > _TASK_NS + 2 * self._away_ns:
                    break
            self._give(side, self._todo.popleft())

    def _next_indices(self) -> tuple[EpochRun, Any] | None:
        for run in (self._now, self._armed):
            if run is not None and not run.exhausted:
                for indices in run.source:
                    return run, indices
                run.exhausted = True
        return None

    def _has_place(self) -> bool:
        if not self._in_place or self._layout is None or not self._batches:
            return True
        size = self._layout.offsets(len(self._batches[-1].indices))[1]
        return self._slots.may_grow(size)

    def _tasks(self, batch: PendingBatch) -> list[Task]:
        indices = batch.indices
        if self._in_place is None and indices:
            batch.open_tasks = 1
            return [Task("first", batch, 0, indices)]
        if self._in_place and self._layout is not None and indices:
            slot = self._slots.take(self._layout.offsets(len(indices))[1])
            if slot is not None:
                batch.slot, batch.in_place = slot, True
                size = self._rows_per_task(len(indices))
                starts = range(0, len(indices), size)
                batch.open_tasks = len(starts)
                return [Task("rows", batch, at, indices[at : at + size]) for at in starts]
        batch.open_tasks = 1
        if self._whole_bytes:
            batch.slot = self._slots.take(self._whole_bytes)
        return [Task("whole", batch, 0, indices)]

    def _rows_per_task(self, samples: int) -> int:
        spread = -(-samples // (self._wanted * self.threads))
        if self._sample_ns is None:
            return spread
        at_once = max(1, round(_TASK_NS / max(1.0, self._sample_ns)))
        return samples if at_once >= samples else min(spread, at_once)

    def _give(self, side: SideProcess, task: Task) -> None:
        slot = task.batch.slot
        for number in self._slots.dropped:
            for other in self._sides.values():
                if number in other.known_slots:
                    other.known_slots.discard(number)
                    other.send(("drop", number))
        self._slots.dropped.clear()
        if slot is not None and slot.number not in side.known_slots and slot.descriptor is not None:
            side.known_slots.add(slot.number)
            side.send(("slot", slot.number), (slot.descriptor,))
        self._task_count += 1
        side.tasks[self._task_count] = task
        batch = task.batch
        rows = len(batch.indices) if self.plan.batched else 1
        place = None if slot is None else slot.number
        what = (task.start, task.indices, rows, place)
        side.send((task.kind, self._task_count, batch.generation, batch.number, batch.epoch, *what))

    # What comes back

    def _receive(self, until: float | None) -> None:
        poller = select.poll()
        by_end = {side.wire.fileno(): side for side in self._sides.values()}
        for end, side in by_end.items():
            poller.register(end, select.POLLIN | (select.POLLOUT if side.outbox else 0))
        left_ms = None if until is None else max(0.0, (until - time.monotonic()) * 1000)
        events = poller.poll(left_ms)
        if not events and until is not None:
            raise timed_out(self.plan, self._batches, self._sides.values())
        for end, event in events:
            side = by_end[end]
            if event & select.POLLOUT:
                side.flush()
            if event & ~select.POLLOUT:
                self._read(side)

    def _read(self, side: SideProcess) -> None:
        while True:
            try:
                received = side.wire.receive()
            except BlockingIOError:
                break
            if received is None:
                self._bury(side)
                return
            self._answer(side, *received)
        self._retire(side)

    def _answer(self, side: SideProcess, message: tuple[Any, ...], files: list[int]) -> None:
        kind = message[0]
        if kind == "failed":
            raise as_error(message[1], side.number, message[2])
        task = side.tasks.pop(message[1])
        side.answers += 1
        self._stillborn = 0
        batch = task.batch
        batch.open_tasks -= 1
        if kind != "stale" and message[3] is not None:
            batch.stamps.append(message[3])
        if kind == "rows":
            each = message[2] / len(task.indices)
            known = self._sample_ns
            self._sample_ns = each if known is None else 0.9 * known + 0.1 * each
        elif kind == "layout":
            self._learn(side, message[4], batch)
        elif kind == "whole":
            batch.packed = message[4]
            if files:
                if batch.slot is not None:
                    self._slots.give_back(batch.slot)
                batch.slot = self._slots.adopt(files[0])
            self._whole_bytes = max(self._whole_bytes, batch.packed.size_bytes)
        elif kind == "misfit":
            batch.misfit = True
        elif kind == "error":
            at, error = message[4], as_error(message[5], side.number, message[6])
            if batch.error is None or at < batch.error[0]:
                batch.error = at, error
        if not batch.open_tasks:
            self._finish(batch)

    def _learn(self, side: SideProcess, layout: SampleLayout | None, batch: PendingBatch) -> None:
        if self._in_place is None:
            self._in_place, self._layout = layout is not None, layout
            for other in self._sides.values():
                other.send(("layout", layout))
        tasks = self._tasks(batch)
        # The process that found the layout has kept the sample it found it with.
        self._give(side, tasks[0])
        self._todo.extend(tasks[1:])

    def _finish(self, batch: PendingBatch) -> None:
        if self._is_old(batch):
            self._release(batch)
        elif batch.misfit and batch.error is None:
            # True collation decides what becomes of samples that differ, as it would in torch.
            self._in_place = False
            self._release(batch)
            batch.misfit = batch.in_place = False
            self._todo.extendleft(self._tasks(batch))

    def _release(self, batch: PendingBatch) -> None:
        if batch.slot is not None:
            self._slots.give_back(batch.slot)
            batch.slot = None

    def _is_old(self, batch: PendingBatch) -> bool:
        return batch.generation < self._now.generation

    def _is_current(self, batch: PendingBatch) -> bool:
        return batch.generation == self._now.generation

    def _next_ready(self) -> PendingBatch | None:
        for batch in self._batches:
            if not self._is_current(batch):
                break
            if not batch.open_tasks and not batch.misfit:
                self._batches.remove(batch)
                return batch
            if self.plan.in_order:
                break
        return None

    def _deliver(self, batch: PendingBatch) -> Any:
        if batch.error is not None:
            self._release(batch)
            raise batch.error[1]
        slot, batch.slot = batch.slot, None
        if slot is None:
            return unpack(batch.packed, None)
        # A user who keeps batches gets memory of their own once the slots are used up.
        copy = not self._slots.may_grow(slot.size_bytes)
        owner = self._slots.lease(slot)
        if batch.in_place and self._layout is not None:
            return self._layout.batch(owner, len(batch.indices), copy=copy)
        return unpack(batch.packed, owner, copy=copy)

    # Life and death

    def _spawn_missing(self) -> None:
        for number in range(self._wanted):
            if number not in self._sides:
                others = self._sides.values()
                side = SideProcess(
                    self.plan, number, self._wanted, self.threads, others, self._now.number
                )
                side.marks[-1] = self._now.generation
                if self._layout is not None:
                    side.send(("layout", self._layout))
                if self._records is not None:
                    side.send(("stamp", True))
                self._sides[number] = side

    def _retire(self, side: SideProcess) -> None:
        if side.retiring and not side.tasks and self._sides.get(side.number) is side:
            del self._sides[side.number]
            side.stop()

    def _bury(self, side: SideProcess) -> None:
        del self._sides[side.number]
        side.stop(patience_s=5)
        code = side.process.exitcode
        guilty = side.working_on()
        if not side.answers and not guilty:
            self._stillborn += 1
            if self._stillborn >= _STILLBORN:
                raise stillborn(side.number, code, _STILLBORN)
        self._deaths.update(guilty)
        limit = _KILLS if code == -signal.SIGKILL else _CRASHES
        lost = [task for _, task in sorted(side.tasks.items())]
        for task in reversed(lost):
            batch = task.batch
            positions = range(
                task.start, task.start + len(task.indices) if self.plan.batched else 1
            )
            poison = [
                at
                for number, at in guilty
                if number == batch.number and at in positions and self._deaths[number, at] >= limit
            ]
            if poison:
                index = batch.indices[poison[0]] if self.plan.batched else batch.indices
                batch.error = poison[0], poisonous(index, code, limit)
            if poison or self._is_old(batch):
                batch.open_tasks -= 1
                if not batch.open_tasks:
                    self._finish(batch)
            else:
                self._todo.appendleft(task)
        self.respawned += 1
        self._spawn_missing()

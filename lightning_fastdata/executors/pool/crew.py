"""The side processes of one executor: who is there, who has which task, and who died with what.

Tasks wait in one queue, from which a side process takes the next one when it is free, so that
nothing waits behind a slow sample. A process notes what it took in memory that outlives it. Should
it die between the two, the others are asked whether they have it before it is done again.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.executors.pool.child import MAX_THREADS
from lightning_fastdata.executors.pool.faults import as_error, stillborn
from lightning_fastdata.executors.pool.process import SideProcess, Task, stop_all
from lightning_fastdata.executors.pool.task_queue import TaskQueue, make_packet

if TYPE_CHECKING:
    from lightning_fastdata.batches.slots import Slot
    from lightning_fastdata.executors.fetch import FetchPlan

_STILLBORN: Final = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """A side process has ended a task."""

    side: SideProcess
    """Who."""
    task: Task
    """Which."""
    message: tuple[Any, ...]
    """What it says."""
    files: list[int]
    """Open files that came with it."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Tasks that a side process took with it when it died."""

    tasks: list[Task]
    """To be done again, in order."""
    guilty: list[tuple[int, int]]
    """(batch number, position) of the samples that were being read, or about to be."""
    code: int | None
    """Exit code of the process."""


@dataclass(slots=True, eq=False)
class _Doubt:
    """Tasks that somebody took, and nobody has noted."""

    number: int
    """Counts the doubts."""
    tasks: set[int]
    """Numbers of the tasks."""
    asked: set[int]
    """Numbers of the side processes that have not answered yet."""
    code: int | None
    """Exit code of the process that may have died with them."""


class Crew:
    """Side processes and what they have to do."""

    def __init__(self, plan: FetchPlan, *, processes: int, threads: int) -> None:
        self.plan = plan
        self.threads = threads
        # Of a process that replaces one, too, however few threads are wanted by then.
        self._places = 1 if threads == 1 else MAX_THREADS
        self.wanted = processes
        self.respawned = 0
        self._tasks: dict[int, Task] = {}
        self._count = 0
        self._generation = 0
        self._standing: dict[str, tuple[Any, ...]] = {}
        self._slots: dict[int, Slot] = {}
        self._doubts: list[_Doubt] = []
        self._doubt_count = 0
        self._stillborn = 0
        self.sides: dict[int, SideProcess] = {}
        self._poller = select.poll()
        self._by_end: dict[int, SideProcess] = {}
        self._writing: set[int] = set()
        try:
            self._queue: TaskQueue | None = TaskQueue()
        except OSError:  # without one, each process is given tasks of its own beforehand
            self._queue = None
        self._closer = weakref.finalize(self, _close, self.sides, self._queue, os.getpid())

    @property
    def under_way(self) -> int:
        """Tasks that were given and not answered."""
        return len(self._tasks) + sum(len(side.tasks) for side in self.sides.values())

    def start_epoch(self, generation: int, epoch: int) -> None:
        """Let tasks of older generations be skipped, and start missing processes."""
        self._generation = generation
        for side in self.sides.values():
            side.marks[-1] = generation
        self.spawn_missing(epoch)

    def resize(self, processes: int) -> None:
        """Have so many processes from now on; those too many finish what they have taken."""
        self.wanted = processes
        for number, side in list(self.sides.items()):
            if number >= processes and not side.retiring:
                side.retiring = True
                side.send(("retire",))
        self.spawn_missing()

    def set_threads(self, threads: int) -> None:
        """Have each process work in so many threads from now on; see :class:`PoolExecutor`."""
        self.threads = threads
        self.tell("threads", threads)

    def close(self) -> None:
        """Stop all processes."""
        self._closer()
        self.wanted = 0
        self._tasks.clear()
        self._doubts.clear()
        self._by_end.clear()
        self._poller = select.poll()

    def tell(self, *message: Any) -> None:
        """Tell all processes something, also those that are still to come."""
        self._standing[message[0]] = message
        for side in self.sides.values():
            side.send(message)

    def share(self, slot: Slot) -> None:
        """Let all processes map a slot."""
        if slot.number not in self._slots and slot.descriptor is not None:
            self._slots[slot.number] = slot
            for side in self.sides.values():
                side.send(("slot", slot.number), slot)

    def forget(self, number: int) -> None:
        """Let all processes unmap a slot."""
        if self._slots.pop(number, None) is not None:
            for side in self.sides.values():
                side.send(("drop", number))

    def give(self, task: Task, message: tuple[Any, ...]) -> bool:
        """Queue a task; False if the queue is full for now."""
        number = self._count + 1
        packet = make_packet(number, message)
        if self._queue is not None and len(packet) <= select.PIPE_BUF:
            if not self._queue.put(packet):
                return False
            self._tasks[number] = task
        else:
            # What is too long for the queue goes to the process that has least to do.
            staying = [side for side in self.sides.values() if not side.retiring]
            to = min(staying, key=lambda side: side.load)
            to.tasks[number] = task
            to.send(("task", packet))
        self._count = number
        return True

    def answer_first(
        self, side: SideProcess, rest: tuple[Task, tuple[Any, ...]] | None = None
    ) -> None:
        """Let a process go on that has read the first sample of a task, and waits for the rest.

        Args:
            side: Which; it takes nothing from the queue before it has this answer.
            rest: What is to be done and its message; None if there is nothing.
        """
        packet = None
        if rest is not None:
            self._count += 1
            packet = make_packet(self._count, rest[1])
            side.tasks[self._count] = rest[0]
        side.send(("rest", packet))

    def wait(self, until: float | None) -> Iterator[Answer | Loss] | None:
        """Wait for answers and return them; None if there is none until then (``monotonic``).

        Raises:
            WorkerError: Processes die before they do anything.
            Exception: Whatever ``worker_init_fn`` raised.
        """
        if not self.sides:
            self.spawn_missing()
        for side in self.sides.values():
            end = side.wire.fileno()
            if bool(side.outbox) != (end in self._writing):
                self._writing ^= {end}
                self._poller.modify(end, select.POLLIN | (select.POLLOUT if side.outbox else 0))
        left_ms = None if until is None else max(0.0, (until - time.monotonic()) * 1000)
        heard: list[SideProcess] = []
        for end, event in self._poller.poll(left_ms):
            side = self._by_end[end]
            if event & select.POLLOUT:
                side.flush()
            if event & ~select.POLLOUT and side not in heard:
                heard.append(side)
        if not heard and until is not None and time.monotonic() >= until:
            return None
        return self._read(heard)

    def _read(self, sides: Iterable[SideProcess]) -> Iterator[Answer | Loss]:
        for side in sides:
            for received in side.messages():
                if received is None:
                    yield from self._bury(side)
                    break
                message, files = received
                if message[0] == "failed":
                    raise as_error(message[1], side.number, message[2])
                if message[0] == "retired":
                    side.retired = True
                    if self._queue is not None:
                        self._queue.wake_again()
                    continue
                if message[0] == "pong":
                    yield from self._heard(side, *message[1:])
                    continue
                number = message[1]
                task = side.tasks.pop(number, None) or self._tasks.pop(number)
                side.answers += 1
                self._stillborn = 0
                yield Answer(side, task, message, files)
            yield from self._let_go(side)

    # Life and death

    def spawn_missing(self, epoch: int | None = None) -> None:
        """Start the processes that are wanted and not there.

        Args:
            epoch: What the dataset was told here just now. None: it may have been told of another
                since this one began, and the processes tell their own copies.
        """
        for number in range(self.wanted):
            if number in self.sides:
                continue
            ends = () if self._queue is None else self._queue.descriptors
            strangers = (*ends, *(side.wire.fileno() for side in self.sides.values()))
            side = SideProcess(
                self.plan,
                number,
                self.wanted,
                self.threads,
                strangers,
                places=self._places,
                epoch=epoch,
                queue=None if self._queue is None else self._queue.reading,
            )
            side.marks[-1] = self._generation
            for message in self._standing.values():
                side.send(message)
            for slot in self._slots.values():
                side.send(("slot", slot.number), slot)
            self.sides[number] = side
            for end in side.ends:
                self._by_end[end] = side
                self._poller.register(end, select.POLLIN)

    def _let_go(self, side: SideProcess) -> Iterator[Loss]:
        busy = side.tasks or self._tasks.keys() & side.claims()
        if side.retired and not busy and self.sides.get(side.number) is side:
            self._remove(side)
            side.stop()
            yield from self._heard(side)  # it has taken nothing else, and is not to be asked
            self.spawn_missing()  # its number may be wanted again by now

    def _remove(self, side: SideProcess) -> None:
        del self.sides[side.number]
        self._writing.discard(side.wire.fileno())
        for end in side.ends:
            del self._by_end[end]
            self._poller.unregister(end)

    def _bury(self, side: SideProcess) -> Iterator[Loss]:
        self._remove(side)
        side.stop(patience_s=5)
        code = side.process.exitcode
        claims = side.claims()
        claimed = self._tasks.keys() & claims
        lost = {**side.tasks, **{number: self._tasks.pop(number) for number in claimed}}
        guilty = side.working_on() or [_start_of(lost[number]) for number in lost.keys() & claims]
        yield Loss([lost[number] for number in sorted(lost)], guilty, code)
        if self._queue is not None:
            doubtful = self._tasks.keys() - self._queue.numbers() - self._claimed()
            if doubtful:
                self._doubt_count += 1
                asked = set(self.sides)
                self._doubts.append(_Doubt(self._doubt_count, doubtful, asked, code))
                for other in self.sides.values():
                    other.send(("ping", self._doubt_count))
        yield from self._heard(side)
        self.respawned += 1
        self.plan = self.plan.with_other_draws()
        self.spawn_missing()
        if not side.began:
            self._stillborn += 1
            if self._stillborn >= _STILLBORN:
                raise stillborn(side.number, code, self._stillborn)

    def _claimed(self) -> set[int]:
        return {number for side in self.sides.values() for number in side.claims()}

    def _heard(
        self, side: SideProcess, doubt_number: int | None = None, noted: Set[int] = frozenset()
    ) -> Iterator[Loss]:
        """A process says what it has noted, or can no longer do so: clear up the doubt about it."""
        for doubt in list(self._doubts):
            if doubt_number in (None, doubt.number):
                doubt.asked.discard(side.number)
                doubt.tasks -= noted
            if not doubt.asked:
                self._doubts.remove(doubt)
                numbers = sorted(doubt.tasks & self._tasks.keys())
                if numbers:
                    tasks = [self._tasks.pop(number) for number in numbers]
                    yield Loss(tasks, [*map(_start_of, tasks)], doubt.code)


def _start_of(task: Task) -> tuple[int, int]:
    """Return what stands for a task of which no sample was being read yet."""
    return task.batch.number, task.start


def _close(sides: dict[int, SideProcess], queue: TaskQueue | None, owner: int) -> None:
    stop_all(sides, owner)
    if queue is not None:
        queue.close()

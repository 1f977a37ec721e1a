"""The side processes of one executor: who has which task, and what is lost when one dies.

Tasks wait in one queue, from which a side process takes the next one when it is free, so that
nothing waits behind a slow sample. A process notes what it took in memory that outlives it. Should
it die between the two, the others are asked whether they have it before it is done again.
"""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from lightning_fastdata.batches.slots import Slot, SlotPool
from lightning_fastdata.errors import as_error
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.faults import Deaths, Growth, cannot_start, died_starting
from lightning_fastdata.executors.pool.process import Answer, ChildProcess, Loss, stop_all
from lightning_fastdata.executors.pool.protocol import TaskQueue, make_packet
from lightning_fastdata.executors.pool.splitter import Task
from lightning_fastdata.host import clock
from lightning_fastdata.host.system_calls import held_signals
from lightning_fastdata.sources.source import reads_ahead

_DEATHS_AT_START: Final = 3


@dataclass(slots=True, eq=False)
class _Inquiry:
    """Tasks that a process took from the queue, where none has noted that it did."""

    number: int
    """Deaths before."""
    tasks: set[int]
    asked: set[int]
    """Numbers of the side processes that have not answered yet."""
    dead: ChildProcess
    """The process that may have died with them."""


class Crew:
    """Side processes and what they have to do.

    With ``streams`` each process reads a stream of its own: there is no queue, and no process takes
    the place of a dead one before the next epoch.
    """

    def __init__(
        self,
        plan: FetchPlan,
        slots: SlotPool,
        *,
        processes: int,
        streams: bool = False,
    ) -> None:
        self.plan = plan
        self.wanted = processes
        self.respawned = 0
        self._tasks: dict[int, Task] = {}
        self._count = 0
        self._generation = 0
        self._settings: dict[type[protocol.Setting], protocol.Setting] = {}
        self._slot_pool = slots
        self._slots: dict[int, Slot] = {}
        self._inquiries: list[_Inquiry] = []
        self._died_starting = 0
        self._answered = 0
        self._deaths = Deaths()
        self._growth = Growth()
        self.children: dict[int, ChildProcess] = {}
        self._poller = select.poll()
        self._by_end: dict[int, ChildProcess] = {}
        self._writing: set[int] = set()
        self._streams = streams
        self._queue: TaskQueue | None = None
        with contextlib.suppress(OSError):  # without one, each process is sent its tasks beforehand
            # One that reads ahead has to know them, too.
            self._queue = None if streams or reads_ahead(plan.dataset) else TaskQueue()
        self._closer = weakref.finalize(self, stop_all, self.children, self._queue, os.getpid())

    @property
    def owing(self) -> list[ChildProcess]:
        """Processes that have something to do, or to answer."""
        return [
            child
            for child in self.children.values()
            if child.tasks
            or child.progress.being_read()
            or child.progress.state in self._tasks
            or child.asked
            or any(child.number in each.asked for each in self._inquiries)
        ]

    @property
    def under_way(self) -> int:
        """Tasks that were given and not answered."""
        return len(self._tasks) + sum(len(child.tasks) for child in self.children.values())

    def start_epoch(self, generation: int, epoch: int) -> None:
        """Let tasks of older generations be skipped, and start missing processes."""
        self._generation = generation
        for child in self.children.values():
            child.progress.generation = generation
        self._spawn_missing(epoch)

    def resize(self, processes: int) -> None:
        """Have so many processes from now on; those too many finish what they have taken."""
        self.wanted = processes
        for number, child in list(self.children.items()):
            if number >= processes and not child.retiring:
                child.retiring = True
                child.send(protocol.Retire())
        self._spawn_missing()

    def configure(self, setting: protocol.Setting) -> None:
        """Send a setting to all processes, also to those that are still to come."""
        self._settings[type(setting)] = setting
        self._send_all(setting)

    def ask_states(self, generation: int, within_s: float) -> None:
        """Ask each process what it reads, and have it do nothing of older generations."""
        for child in self.children.values():
            child.progress.generation = generation
            child.asked, child.state = True, None
            child.send(protocol.AskState(within_s))

    def close(self) -> None:
        """Stop all processes."""
        self._closer()
        self.wanted = 0
        for each in (self._tasks, self._inquiries, self._by_end):
            each.clear()
        self._slots.clear()
        self._poller = select.poll()

    def give(self, task: Task, to: ChildProcess | None = None) -> bool:
        """Queue a task, or send it to one process; False if the queue is full for now."""
        number, packet = self._packet(task)
        if to is None and self._queue is not None and len(packet) <= select.PIPE_BUF:
            if not self._queue.put(packet):
                return False
            self._tasks[number] = task
        else:
            # What is too long for the queue goes to the process that has least to do.
            staying = [child for child in self.children.values() if not child.retiring]
            to = to or min(staying, key=lambda child: child.load)
            to.tasks[number] = task
            to.send(protocol.GiveTask(packet))
        self._count = number
        return True

    def go_on(self, number: int, rest: Task | None) -> None:
        """Let a process go on that has read the first sample of a task; None: drop that sample.

        Before it is sent this, it takes nothing from the queue.
        """
        child, packet = self.children[number], None
        if rest is not None:
            self._count, packet = self._packet(rest)
            child.tasks[self._count] = rest
        child.send(protocol.GoOn(packet))

    def _packet(self, task: Task) -> tuple[int, bytes]:
        """Return the number and the packet of a task, whose slot all processes map from now on."""
        while self._slot_pool.dropped:
            number = self._slot_pool.dropped.popleft()
            if self._slots.pop(number, None) is not None:
                self._send_all(protocol.DropSlot(number))
        slot = task.batch.slot
        if slot is not None and slot.number not in self._slots and slot.descriptor is not None:
            self._slots[slot.number] = slot
            self._send_all(protocol.MapSlot(slot.number), slot)
        return self._count + 1, make_packet(self._count + 1, task.request())

    def _send_all(self, message: protocol.ToChild, slot: Slot | tuple[()] = ()) -> None:
        for child in self.children.values():
            child.send(message, slot)

    def wait(self, until: float | None) -> Iterator[Answer | Loss] | None:
        """Wait for events and return them; None if there is none until then (``monotonic``).

        Raises:
            WorkerError: Processes die before they do anything.
            Exception: Whatever ``worker_init_fn`` raised; of streams it is kept with the process.
        """
        if not self.children and not self._streams:
            self._spawn_missing()
        for child in self.children.values():
            end = child.wire.fileno()
            if bool(child.outbox) != (end in self._writing):
                self._writing ^= {end}
                self._poller.modify(end, select.POLLIN | (select.POLLOUT if child.outbox else 0))
        self._look_at_memory()
        left_ms = None if until is None else max(0.0, (until - clock.monotonic()) * 1000)
        readable: list[ChildProcess] = []
        for end, event in self._poller.poll(left_ms):
            child = self._by_end[end]
            if event & select.POLLOUT:
                child.flush()
            if event & ~select.POLLOUT and child not in readable:
                readable.append(child)
        if not readable and until is not None and clock.monotonic() >= until:
            return None
        return self._read(readable)

    def _read(self, children: Iterable[ChildProcess]) -> Iterator[Answer | Loss]:
        for child in children:
            for received in child.messages():
                if received is None:
                    yield from self._on_death(child)
                    break
                yield from self._handle(child, *received)
            yield from self._retire_if_idle(child)

    def _handle(
        self, child: ChildProcess, message: protocol.FromChild, files: list[int]
    ) -> Iterator[Answer | Loss]:
        match message:
            case protocol.TaskEnded(number):
                task = child.tasks.pop(number, None) or self._tasks.pop(number)
                child.answers += 1
                self._answered += 1
                self._died_starting = 0
                yield Answer(child, task, message, files)
            case protocol.TaskTaken(inquiry, number):
                yield from self._resolve(child, inquiry, number)
            case protocol.StateTold():
                child.asked, child.state = False, message
            case protocol.Retired():
                child.retired = True
                if self._queue is not None:
                    self._queue.numbers()  # wakes others for what it was woken for
            case protocol.InitFailed(kind, text):
                child.failure = as_error(kind, child.number, text)
                if not self._streams:
                    raise child.failure

    # How processes begin and end

    def _spawn_missing(self, epoch: int | None = None) -> None:
        """Start the processes that are wanted and not there.

        ``epoch`` is the one that ``set_epoch`` of the dataset was called with just now. None: it
        may have been called again since, and the processes call that of their copies.
        """
        for number in sorted(set(range(self.wanted)) - self.children.keys()):
            with held_signals():
                self._spawn(number, epoch)

    def _spawn(self, number: int, epoch: int | None) -> None:
        ends = () if self._queue is None else self._queue.descriptors
        wires = (child.wire.fileno() for child in self.children.values())
        queue = None if self._queue is None else self._queue.reading
        files = (*ends, *wires)
        try:
            child = ChildProcess(self.plan, number, self.wanted, files, epoch=epoch, queue=queue)
        except OSError as error:
            raise cannot_start(number, error) from error
        child.progress.generation = self._generation
        for setting in self._settings.values():
            child.send(setting)
        for slot in self._slots.values():
            child.send(protocol.MapSlot(slot.number), slot)
        self.children[number] = child
        for end in child.ends:
            self._by_end[end] = child
            self._poller.register(end, select.POLLIN)

    def _retire_if_idle(self, child: ChildProcess) -> Iterator[Loss]:
        if not child.retired or self.children.get(child.number) is not child:
            return
        if not (child.tasks or child.progress.state in self._tasks):
            self._forget(child)
            child.stop()
            yield from self._resolve(child)  # it has taken nothing else, and is not to be asked
            self._spawn_missing()  # its number may be wanted again by now

    def discard(self, child: ChildProcess) -> None:
        """Stop a process and forget it; one that takes its place draws other random numbers."""
        self._forget(child)
        child.stop(patience_s=5)
        self.plan = self.plan.with_other_draws()

    def _forget(self, child: ChildProcess) -> None:
        del self.children[child.number]
        self._writing.discard(child.wire.fileno())
        for end in child.ends:
            del self._by_end[end]
            self._poller.unregister(end)

    def _look_at_memory(self) -> None:
        child = self._growth.look(self.children)
        if child is not None and not (self._streams or child.retiring):
            self.plan = self.plan.with_other_draws()
            child.retiring = True
            child.send(protocol.Retire())

    def _on_death(self, child: ChildProcess) -> Iterator[Loss]:
        self.discard(child)
        taken = child.progress.state
        lost = dict(child.tasks)
        if taken in self._tasks:
            lost[taken] = self._tasks.pop(taken)
        suspect = child.hang.sample if child.hang is not None else None
        suspect = suspect or child.progress.being_read()
        if suspect is None and taken in lost:
            suspect = lost[taken].first_sample
        yield Loss(child, [lost[number] for number in sorted(lost)], suspect)
        living = {each.number: each.pid for each in self.children.values()}
        if self._streams:
            self._deaths.tell(child.process.exitcode, living, "The rest of its stream is missing.")
            return
        if self._queue is not None:
            missing = self._tasks.keys() - self._queue.numbers()
            missing -= {other.progress.state for other in self.children.values()}
            if missing:
                asked = set(self.children)
                self._inquiries.append(_Inquiry(self.respawned, missing, asked, child))
                self._send_all(protocol.AskTaken(self.respawned))
        yield from self._resolve(child)
        self.respawned += 1
        self.plan.faults.deaths += 1
        if child.hang is None:
            self._deaths.note(child.process.exitcode, self._answered, living)
        self._spawn_missing()
        if not child.began:
            self._died_starting += 1
            if self._died_starting >= _DEATHS_AT_START:
                raise died_starting(child.number, child.process.exitcode, self._died_starting)

    def _resolve(
        self, child: ChildProcess, inquiry: int | None = None, taken: int = -1
    ) -> Iterator[Loss]:
        """Settle what waited for a process, which has answered an inquiry, or is gone (None)."""
        for each in list(self._inquiries):
            if inquiry in (None, each.number):
                each.asked.discard(child.number)
                each.tasks.discard(taken)
            if not each.asked:
                self._inquiries.remove(each)
                # Of several, each was taken by another process that died meanwhile.
                for number in sorted(each.tasks & self._tasks.keys(), reverse=True):
                    task = self._tasks.pop(number)
                    yield Loss(each.dead, [task], task.first_sample)

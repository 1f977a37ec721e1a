"""The side processes of one executor: who has which task of which batch, and what a death loses.

Tasks wait in one queue, from which a side process takes the next one when it is free, so that
nothing waits behind a slow sample. A process notes what it took in memory that outlives it. Should
it die before it does so, the others are asked whether they have the task before that is done again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Final, NamedTuple, Protocol

from torch.utils.data import IterableDataset

from lightning_fastdata.batches import bad_samples, memory
from lightning_fastdata.batches.staged import Pinned, PinThread
from lightning_fastdata.errors import DatasetError, WorkerError, as_error
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import forks
from lightning_fastdata.executors.pool import protocol, watches
from lightning_fastdata.executors.pool.beside import poll
from lightning_fastdata.executors.pool.child import Inherited, child_main
from lightning_fastdata.host import clock
from lightning_fastdata.host.system_calls import files_being_read, held_signals
from lightning_fastdata.sources.source import reads_ahead
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps, WaitWatch
from lightning_fastdata.types import Batch

_CROWDED_S: Final = 0.001
"""Seconds to wait where a wire has room, but other processes have to read before it can send."""
_DEATHS_AT_START: Final = 3


@dataclass(slots=True, eq=False)
class EpochRun:
    """An epoch whose batches are being fetched."""

    number: int
    """Number of the epoch, part of the key of its randomness."""
    generation: int
    source: Iterator[Any]
    """The batches of indices that are still to be fetched."""
    exhausted: bool = False
    """Whether the source has ended."""
    begun: int = 0
    """Number of batches that were begun."""


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch that is under way; the docstring of :mod:`.protocol` draws its states."""

    number: int
    """Number of the batch among all batches of the executor, from 1."""
    run: EpochRun
    """Epoch that the batch belongs to."""
    place: int
    """Number of the batch in its epoch, from 0."""
    indices: Any
    """Indices that the plan gave, but for samples left out or replaced before they are read."""
    slots: memory.SlotPool
    """Pool from which the batch's memory is."""
    pin_thread: PinThread | None
    """Thread that copies the batch into page-locked memory; None: no copy is made."""
    batched: bool = True
    """Whether ``indices`` are several; False: a single one."""
    slot: memory.Slot | None = None
    """Slot in which the batch is written; None: it has none."""
    layout: memory.SampleLayout | None = None
    """Layout by which samples are written in place; None: they are collated."""
    open_tasks: int = 0
    """Number of tasks whose answers are still to come."""
    packed: memory.Packed = field(init=False)
    """Parts of the batch, if it was collated by a side process."""
    error: tuple[int, BaseException] | None = None
    """Position of the first failing sample, and its error; None: none has failed."""
    is_empty: bool = False
    """Whether all samples of the batch are left out."""
    misfit: bool = False
    """Whether samples do not fit in place; the batch is collated whole when all tasks ended."""
    stamps: list[TaskStamps] = field(default_factory=list)
    """Stamps of the batch's tasks; empty if none are recorded."""
    faults: dict[tuple[int, int | str], bad_samples.Fault] = field(default_factory=dict)
    """Faults of samples that could not be read at once, by position and index."""
    pinning: Future[Pinned] | None = None
    """Copy into page-locked memory; None: there is none, or it has not begun."""

    @property
    def is_ready(self) -> bool:
        """Whether the batch can be delivered, or raise its error."""
        return not self.open_tasks

    @property
    def comes_at_once(self) -> bool:
        """Whether the batch, if it is ready, can be delivered without waiting for its copy."""
        return self.pinning is None or self.pinning.done()

    def pin(self) -> None:
        """Begin the copy into page-locked memory, if the batch is ready and nothing was wrong."""
        wrong = self.error is not None or self.is_empty or self.faults
        if self.pin_thread is not None and self.is_ready and self.pinning is None and not wrong:
            self.pinning = self.pin_thread.pin(self._whole())

    def note(self, faults: Iterable[bad_samples.Fault]) -> None:
        """Note what happened to samples; what a repeated task tells again counts once."""
        self.faults.update({(fault.position, fault.index): fault for fault in faults})

    def index_at(self, at: int) -> object:
        """Return the index of the sample at a position."""
        return self.indices[at] if self.batched else self.indices

    def give_up(self, at: int, plan: FetchPlan, error: WorkerError) -> bool:
        """Put another index in place of one that no process can read, or note the error.

        Returns:
            Whether there is another one.
        """
        index, quarantine = self.index_at(at), plan.faults.quarantine
        # If every sample kills, as with a collation that does, replacing would go on for ever.
        tried = sum(fault.position == at for fault in self.faults.values())
        allowed = tried < bad_samples.STAND_INS and len(quarantine) < plan.faults.allowed
        goes_on = plan.guard.policy != "raise" and type(index) is not bad_samples.Gone and allowed
        outcome = plan.guard.outcome if goes_on else "raised"
        self.note([bad_samples.fault_of(error, plan.dataset, at, index, self.run.number, outcome)])
        if not goes_on:
            self.error = at, error
            return False
        quarantine.add(bad_samples.plain_index(index))
        other = plan.guard.in_place_of(index, self.run.number, quarantine)
        if self.batched:  # the list may still be used by the sampler
            self.indices = [*self.indices[:at], other, *self.indices[at + 1 :]]
        else:
            self.indices = other
        return True

    def report(self, faults: bad_samples.FaultLog) -> None:
        """Have the faults of the batch counted, as it is handed over.

        The batch gets an error if there were too many bad samples.
        """
        if self.layout is not None and self.kept_rows() == []:
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

    def take_parts(self, packed: memory.Packed, files: list[int]) -> None:
        """Take what a side process collated: in the slot it was given, or in a file of its own."""
        self.packed = packed
        if files:
            self.release()
            self.slot = self.slots.adopt(files[0])

    def data(self) -> Batch:
        """Return the batch, or raise its error; its slot is used again when nothing views it.

        ``NO_SAMPLES``: all samples are left out.
        """
        if self.error is not None:
            self.release()
            raise self.error[1]
        if self.is_empty:
            self.release()
            return bad_samples.NO_SAMPLES
        if self.pin_thread is None:
            return self._whole()()
        if self.pinning is None:
            self.pinning = self.pin_thread.pin(self._whole())
        return self.pinning.result().batch

    def _whole(self) -> Callable[[], Batch]:
        """Return a function that puts the batch together, in any thread."""
        slot, self.slot = self.slot, None
        if slot is None:
            return partial(memory.unpack, self.packed, None)
        copy = self.slots.has_to_copy(slot)
        owner = self.slots.lease(slot)
        if self.layout is not None:
            rows = self.kept_rows()
            return partial(self.layout.batch, owner, len(self.indices), copy=copy, rows=rows)
        return partial(memory.unpack, self.packed, owner, copy=copy)

    def release(self) -> None:
        """Give back the slot of a batch that is not delivered."""
        if self.slot is not None:
            self.slots.give_back(self.slot)
            self.slot = None

    def all_stamps(self, wait: WaitWatch, *, first: bool) -> BatchStamps:
        """Return the stamps of the batch, which is handed over now."""
        own = wait.delivered()
        pinned = None if self.pinning is None else self.pinning.result()
        return BatchStamps(
            self.number,
            sum(task.samples for task in self.stamps),
            wait.requested_ns,
            clock.monotonic_ns(),
            tuple(self.stamps),
            first=first,
            pinned_ns=None if pinned is None else (pinned.began_ns, pinned.ended_ns),
            own=own,
        )


@dataclass(slots=True, eq=False)
class Task:
    """What a side process does in one go: as a :class:`.TaskRequest` says."""

    kind: protocol.TaskKind
    batch: PendingBatch
    start: int
    """Position in the batch of the task's first sample."""
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

    def request(self) -> protocol.TaskRequest:
        """Return what is sent to a side process."""
        batch = self.batch
        return protocol.TaskRequest(
            self.kind,
            batch.run.generation,
            batch.number,
            batch.run.number,
            self.start,
            self.indices[:1] if self.kind == "first" else self.indices,
            len(batch.indices) if self.kind == "rows" else 0,
            None if batch.slot is None else batch.slot.number,
        )


class ChildProcess:
    """A side process, the wire to it, and what it was given to do.

    If it is forked it closes ``inherited_fds``: the queue, and wires of its siblings. ``epoch`` is
    the one that ``set_epoch`` of the dataset was called with; None: the process calls it. ``queue``
    is :attr:`.TaskQueue.read_by`; if it is empty, the process is sent each of its tasks.
    """

    def __init__(
        self,
        plan: FetchPlan,
        number: int,
        processes: int,
        inherited_fds: tuple[int, ...],
        *,
        epoch: int | None,
        queue: tuple[int, ...],
    ) -> None:
        self.number = number
        self.tasks: dict[int, Task] = {}
        """Tasks, by number, that were sent to this process alone, and not taken from the queue."""
        self.outbox: deque[tuple[protocol.ToChild, tuple[int, ...] | memory.Slot]] = deque()
        """Messages for which the wire had no room."""
        self.answers = 0
        """Number of tasks that the process has ended."""
        self.failed: protocol.InitFailed | None = None
        """What ``worker_init_fn`` raised in the process; None: nothing."""
        self.asked = False
        """Whether the process has still to tell the state of what it reads."""
        self.state: protocol.StateTold | None = None
        """State of what it reads, as it told last; None: it has not told since it last read."""
        self.hang: watches.Hang | None = None
        """What the process got nowhere with, and was killed for; None: it was not."""
        self.retiring = self.retired = self._killed = False
        ours, theirs = protocol.wire_pair()
        ours.setblocking(False)
        context = plan.context
        if not isinstance(context, BaseContext):
            context = multiprocessing.get_context(context)
        # The kernel takes the end of the thread that forked a child for the end of its parent.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        # A forked child holds copies of its siblings' wires, too, which would keep these open.
        inherited = Inherited()
        if forks(context):
            inherited = Inherited((ours.fileno(), *inherited_fds), files_being_read())
        self.process = context.Process(
            target=child_main,
            args=(theirs, plan, number, processes, inherited, parent, epoch),
            daemon=True,
            name=f"fastdata-{number}",
        )
        try:
            self.process.start()
        finally:
            theirs.close()
        self.wire = protocol.Wire(ours)
        # The end of the wire shows the end of the process, too, but not while a process that was
        # forked meanwhile holds a copy of the wire.
        self._pidfd: tuple[int, ...] = ()
        self._life = select.poll()
        with contextlib.suppress(OSError):  # a kernel or container that has no such descriptors
            self._pidfd = (os.pidfd_open(self.pid),)
            self._life.register(self._pidfd[0], select.POLLIN)
        self._files = [*self._pidfd]
        """Descriptors to be closed when the process has ended."""
        try:
            self.progress = protocol.ProgressMemory.create()
            self._kept(self.progress.descriptor)
            self.stacks = self._kept(memory.create_shared_memory(1))
            self._bell = self._kept(protocol.make_bell())
        except (OSError, WorkerError):  # no more files may be opened
            self.stop(0)
            raise
        os.ftruncate(self.stacks, 0)
        files = self.progress.descriptor, self.stacks, self._bell, *queue
        self.send(protocol.Start(), files)

    def _kept(self, descriptor: int) -> int:
        self._files.append(descriptor)
        return descriptor

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid or 0

    @property
    def exitcode(self) -> int | None:
        """Exit code, or the signal that ended the process as a negative number.

        None: it lives, or was killed by :meth:`stop`, which tells nothing of why it ended.
        """
        code: int | None = None if self._killed else self.process.exitcode
        return code

    @property
    def ends(self) -> tuple[int, ...]:
        """Descriptors that become readable when the process sends or dies; the wire is first."""
        return (self.wire.fileno(), *self._pidfd)

    @property
    def failure(self) -> BaseException | None:
        """Error that ``worker_init_fn`` raised in the process; None: none.

        It is a new one each time: an error that was raised holds those through which it went, who
        hold this process, and would keep all that belongs to it until the program ends.
        """
        if self.failed is None:
            return None
        return as_error(self.failed.kind, self.number, self.failed.text)

    @property
    def began(self) -> bool:
        """Whether the process has got so far as to wait for tasks."""
        return self.progress.state >= protocol.State.WAITING

    @property
    def is_starting(self) -> bool:
        """Whether the process has not even got so far as to show its stacks."""
        return self.progress.state == protocol.State.STARTING

    @property
    def load(self) -> int:
        """Number of samples in the tasks that were sent to this process alone."""
        asked = (task.indices for task in self.tasks.values())
        return sum(len(each) if isinstance(each, list) else 1 for each in asked)

    def send(self, message: protocol.ToChild, files: tuple[int, ...] | memory.Slot = ()) -> None:
        """Send a message now, or as soon as the process has read enough of the earlier ones.

        ``files``: open files that go with it, and stay open until the process ends; or the slot to
        map, for which nothing is sent if it was given up by then.
        """
        self.outbox.append((message, files))
        if len(self.outbox) == 1:
            self._post()

    def flush(self) -> None:
        """Send what had to wait, once the wire has room again."""
        if not self._post():
            clock.sleep(_CROWDED_S)

    def _post(self) -> bool:
        while self.outbox:
            message, files = self.outbox[0]
            if not isinstance(files, tuple):
                files = () if files.descriptor is None else (files.descriptor,)
            try:
                if files or not isinstance(message, protocol.MapSlot):
                    self.wire.send(message, files)
                    protocol.ring(self._bell)
            except BlockingIOError:
                return False
            except OSError:
                # Its death is seen, and its tasks are given away, when the wire is read.
                self.outbox.clear()
                return True
            self.outbox.popleft()
        return True

    def messages(self) -> Iterator[tuple[protocol.FromChild, list[int]] | None]:
        """Yield what the process has sent, with the files that came along; None if it is gone."""
        # Asked first: what the process sent before its end is there by now.
        gone = bool(self._pidfd and self._life.poll(0))
        while True:
            try:
                received = self.wire.receive()
            except BlockingIOError:
                if gone:
                    yield None
                return
            yield received
            if received is None:
                return

    def stack(self, wait_s: float = 3.0) -> str:
        """Return the Python stacks of the process's threads, asked for through SIGUSR1."""
        if self.is_stopped():
            return f"(no stack: the process is stopped, state {self._state()}; send it SIGCONT)"
        if self.is_starting:  # it knows nothing of SIGUSR1, and would die of it
            return f"(no stack: the process is starting, state {self._state()})"
        size = os.fstat(self.stacks).st_size
        try:
            os.kill(self.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return "(no stack: the process is gone)"
        until = clock.monotonic() + wait_s
        while clock.monotonic() < until:
            clock.sleep(0.05)
            now = os.fstat(self.stacks).st_size
            if now > size and now == os.fstat(self.stacks).st_size:
                clock.sleep(0.05)
                return os.pread(self.stacks, 2**16, size).decode(errors="replace")
        return f"(no stack within {wait_s:g} s, state {self._state()})"

    def is_stopped(self) -> bool:
        """Return whether the process was stopped by a signal, as SIGSTOP does."""
        return self._state().startswith("T")

    def stop(self, patience_s: float = 1.0) -> None:
        """End the process: it leaves by itself when the wire closes, or is killed."""
        self.outbox.clear()
        self.wire.close()
        self.process.join(patience_s)
        if self.process.is_alive():
            self._killed = True
            self.process.kill()
            self.process.join()
        self._pidfd = ()
        while self._files:
            os.close(self._files.pop())

    def _state(self) -> str:
        try:
            with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as status:  # noqa: PTH123
                return next((line[6:].strip() for line in status if line.startswith("State:")), "?")
        except OSError:
            return "?"


class Side(Protocol):
    """A process that does tasks, as seen by whoever gives them."""

    number: int
    hang: watches.Hang | None

    @property
    def exitcode(self) -> int | None:
        """Exit code; None: the process lives, or that is not known."""


class Answer(NamedTuple):
    """A side process has ended a task; open files came with its message."""

    child: Side
    task: Task
    ended: protocol.TaskEnded
    files: list[int]


class Loss(NamedTuple):
    """A side process died with tasks that are not done."""

    child: Side
    tasks: list[Task]
    suspect: tuple[int, int] | None
    """Batch number and position of the sample that was being read, or about to be; None: none."""


@dataclass(slots=True, eq=False)
class _Inquiry:
    """Tasks that a process took from the queue, where none has noted that it did."""

    number: int
    """Number of the inquiry: how many side processes had died before."""
    tasks: set[int]
    asked: set[int]
    """Numbers of the side processes that have not answered yet."""
    dead: ChildProcess
    """The process that may have died with them."""


class Crew:
    """Side processes and what they have to do.

    Of a stream each process reads a copy of its own: there is no queue, and no process takes the
    place of a dead one before the next epoch.
    """

    def __init__(self, plan: FetchPlan, slots: memory.SlotPool, *, processes: int) -> None:
        self.plan = plan
        self.wanted = processes
        self._tasks: dict[int, Task] = {}
        self._count = 0
        self._generation = 0
        self._settings: dict[type[protocol.Setting], protocol.Setting] = {}
        self._slot_pool = slots
        self._slots: dict[int, memory.Slot] = {}
        self._inquiries: list[_Inquiry] = []
        self._died_starting = 0
        self._answered = 0
        self._deaths = watches.Deaths()
        self._growth = watches.Growth()
        self.children: dict[int, ChildProcess] = {}
        self._poller = select.poll()
        self._by_end: dict[int, ChildProcess] = {}
        self._writing: set[int] = set()
        self._streams = isinstance(plan.dataset, IterableDataset)
        self._queue: protocol.TaskQueue | None = None
        with contextlib.suppress(OSError):  # without one, each process is sent its tasks beforehand
            # A process that reads ahead has to know them, too.
            self._queue = (
                None if self._streams or reads_ahead(plan.dataset) else protocol.TaskQueue()
            )
        self._closer = weakref.finalize(self, stop_all, self.children, self._queue, os.getpid())

    @property
    def owing(self) -> list[ChildProcess]:
        """Processes with something to do that others can do, or with a question to answer."""
        if self._streams:
            return []
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
        """Number of tasks that were given and not answered."""
        return len(self._tasks) + sum(len(child.tasks) for child in self.children.values())

    def start_epoch(self, generation: int, epoch: int) -> None:
        """Let tasks of older generations be skipped, and start missing processes."""
        self._generation = generation
        for child in self.children.values():
            child.progress.generation = generation
        self._spawn_missing(epoch)

    def resize(self, processes: int) -> None:
        """Have ``processes`` of them from now on; surplus ones finish what they have taken."""
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
        """Ask each process for the state of what it reads, and have it skip older generations."""
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
        """Queue a task, or send it to one process.

        False: the queue is full for now, or all processes leave and others are still to come.
        """
        number, packet = self._packet(task)
        if to is None and self._queue is not None and len(packet) <= select.PIPE_BUF:
            if not self._queue.put(packet):
                return False
            self._tasks[number] = task
        else:
            # What is too long for the queue goes to the process that has least to do.
            staying = [child for child in self.children.values() if not child.retiring]
            to = to or min(staying, key=lambda child: child.load, default=None)
            if to is None:
                return False
            to.tasks[number] = task
            to.send(protocol.GiveTask(packet))
        self._count = number
        return True

    def go_on(self, number: int, rest: Task | None) -> None:
        """Let a process go on that has read the first sample of a task; None: drop that sample.

        Until then the process takes nothing from the queue.
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
        return self._count + 1, protocol.make_packet(self._count + 1, task.request())

    def _send_all(self, message: protocol.ToChild, slot: memory.Slot | tuple[()] = ()) -> None:
        for child in self.children.values():
            child.send(message, slot)

    def wait(self, until: float | None) -> Iterator[Answer | Loss] | None:
        """Wait for events and return them; None: there was none ``until`` then (``monotonic``).

        Raises:
            WorkerError: Processes die before they do anything.
            Exception: Whatever ``worker_init_fn`` raised; for streams it is kept with the process.
        """
        if not self.children and not self._streams:
            self._spawn_missing()
        for child in self.children.values():
            end = child.wire.fileno()
            if bool(child.outbox) != (end in self._writing):
                self._writing ^= {end}
                self._poller.modify(end, select.POLLIN | (select.POLLOUT if child.outbox else 0))
        self._look_at_memory()
        readable: list[ChildProcess] = []
        until_ns = None if until is None else round(until * 1e9)
        for end, event in poll(self._poller, until_ns, self._starved):
            child = self._by_end[end]
            if event & select.POLLOUT:
                child.flush()
            if event & ~select.POLLOUT and child not in readable:
                readable.append(child)
        if not readable and until is not None and clock.monotonic() >= until:
            return None
        return self._read(readable)

    def _starved(self) -> bool:
        running = (each.progress for each in self.children.values())
        return any(each.starved and each.being_read() for each in running)

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
                    self._queue.numbers()  # wakes others for tasks that it was woken for
            case protocol.InitFailed(kind, text):
                child.failed = message
                if not self._streams:
                    raise as_error(kind, child.number, text)

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
        queue = () if self._queue is None else self._queue.read_by
        files = (*ends, *wires)
        try:
            child = ChildProcess(self.plan, number, self.wanted, files, epoch=epoch, queue=queue)
        except OSError as error:
            raise watches.cannot_start(number, error) from error
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
            yield from self._resolve(child)  # it has taken nothing else, and need not be asked
            self._spawn_missing()  # its number may be wanted again by now

    def discard(self, child: ChildProcess) -> None:
        """Stop a process and forget it; one that takes its place draws other random numbers."""
        self._forget(child)
        # One that cannot start still has to leave a Python that has imported torch.
        child.stop(patience_s=5 if child.began else 30)
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
            self._deaths.warn_of_memory(
                child.exitcode, living, "The rest of its stream is missing."
            )
            return
        if self._queue is not None:
            missing = self._tasks.keys() - self._queue.numbers()
            missing -= {other.progress.state for other in self.children.values()}
            if missing:
                asked = set(self.children)
                inquiry = _Inquiry(self.plan.faults.deaths, missing, asked, child)
                self._inquiries.append(inquiry)
                self._send_all(protocol.AskTaken(inquiry.number))
        yield from self._resolve(child)
        self.plan.faults.deaths += 1
        if child.hang is None:
            self._deaths.note(child.exitcode, self._answered, living)
        self._spawn_missing()
        if not child.began:
            self._died_starting += 1
            if self._died_starting >= _DEATHS_AT_START:
                raise WorkerError(
                    f"Side process {child.number} {watches.death(child.exitcode)} "
                    f"{self._died_starting} times before it read a sample. Its own message is on "
                    f"the standard error output. {watches.MAIN}"
                )

    def _resolve(
        self, child: ChildProcess, inquiry: int | None = None, taken: int = -1
    ) -> Iterator[Loss]:
        """Settle inquiries that waited for a process, which has answered one or is gone (None)."""
        for each in list(self._inquiries):
            if inquiry in (None, each.number):
                each.asked.discard(child.number)
                each.tasks.discard(taken)
            if not each.asked:
                self._inquiries.remove(each)
                # Of several tasks, each was taken by another process that died meanwhile.
                for number in sorted(each.tasks & self._tasks.keys(), reverse=True):
                    task = self._tasks.pop(number)
                    yield Loss(each.dead, [task], task.first_sample)


def stop_all(
    children: dict[int, ChildProcess], queue: protocol.TaskQueue | None, owner: int
) -> None:
    """End side processes together, and their queue, if this is the process of id ``owner``."""
    if os.getpid() != owner:  # a forked child must not end its parent's processes
        return
    for child in children.values():
        child.wire.close()
    until = clock.monotonic() + 1
    for child in children.values():
        child.stop(max(0.0, until - clock.monotonic()))
    children.clear()
    if queue is not None:
        queue.close()

"""Workers on a virtual machine: a third crew of the pool, beside processes and actors of Ray.

What decides is the package's own code, on both sides: scheduler and stall watch in the
training process, tasks, collation and stamps in each worker. Pretended are processes, wires and the
queue. So a dataset says what its samples take by ``machine.sleep()``, ``machine.work()`` and the
machine's locks, and what comes out is exact.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.utils.data import IterableDataset

from lightning_fastdata.batches.collate import for_writing
from lightning_fastdata.batches.memory import SlotPool, map_shared_memory
from lightning_fastdata.errors import as_error
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import KINDS, Resources, warn_before_fork
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.child import TaskRunner, describe_error
from lightning_fastdata.executors.pool.crew import Answer, Loss, Task
from lightning_fastdata.executors.pool.scheduler import PoolExecutor
from lightning_fastdata.executors.pool.watches import Hang
from lightning_fastdata.stamps.batch_stamps import TaskWatch
from rig.machine import KilledError, Machine, VirtualThread


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What it takes to have workers, apart from what their dataset does; seconds."""

    start_s: float = 0.0
    """Blocked, until a worker takes its first task."""
    send_s: Callable[[protocol.TaskEnded], float] = lambda _: 0.0
    """On a CPU of a worker, to send how a task ended."""
    way_s: float = 0.0
    """Until that is there."""
    take_s: Callable[[protocol.TaskEnded], float] = lambda _: 0.0
    """On a CPU of the training process, to take it in."""


USUAL = Costs(start_s=0.02, send_s=lambda _: 0.0001, way_s=0.00005, take_s=lambda _: 0.00005)
"""To hand over a batch takes about 0.2 ms, as on a small machine."""


class VirtualWorker:
    """One process of the crew, as the training process sees it, and what runs in it.

    It has the attributes of a :class:`~lightning_fastdata.executors.pool.crew.ChildProcess` that
    others than its crew use.
    """

    def __init__(self, crew: VirtualCrew, number: int, epoch: int | None) -> None:
        self.crew, self.number = crew, number
        self.tasks: dict[int, Task] = {}
        """Taken, or sent to it alone, and not answered."""
        self.hang: Hang | None = None
        self.asked = False
        self.state: protocol.StateTold | None = None
        self.retiring = False
        self.sent: deque[tuple[int, Task] | None] = deque()
        """What is to become of samples that were read first."""
        self.suspect: tuple[int, int] | None = None
        """When it died: the sample that was being read."""
        self.progress = protocol.ProgressMemory.create()
        self.progress.generation = crew.generation
        self.runs = crew.machine.process()
        self.runs.kill = self.kill
        self.process = SimpleNamespace(kill=self.kill, pid=self.runs.pid)
        # Global generators are those of the training process here, which nobody is to seed.
        plan = replace(crew.plan, seed=None, own=None, collate_fn=for_writing(crew.plan.collate_fn))
        self.runner = TaskRunner(_Wire(self), plan, number, self.progress, epoch, forked=True)
        self.runner.maps = crew.maps
        # No line watch: that is a thread that looks on by real time.
        self.runner._watch = TaskWatch(number, alone=True)
        self.thread = crew.machine.start(self.runs, self._live)

    @property
    def pid(self) -> int:
        """Its process id on the machine."""
        return self.runs.pid

    @property
    def exitcode(self) -> int | None:
        """How it ended; None: it lives."""
        return self.runs.exitcode

    @property
    def began(self) -> bool:
        """Whether it has got so far as to wait for tasks."""
        return self.progress.state >= protocol.State.WAITING

    @property
    def is_starting(self) -> bool:
        """Whether it has not even got so far as to show its stacks."""
        return self.progress.state == protocol.State.STARTING

    def is_stopped(self) -> bool:
        """Nothing stops it."""
        return False

    def stack(self) -> str:
        """Return where its code is."""
        return self.thread.stack()

    def kill(self, sign: int = signal.SIGKILL) -> None:
        """End it now, by a signal."""
        if self.exitcode is not None:
            return
        started = next((task.first_sample for task in self.tasks.values()), None)
        stuck = self.hang.sample if self.hang is not None else None
        self.suspect = stuck or self.progress.being_read() or started
        self.runs.ended(-sign)
        self.crew.send(self, None, ())

    def stop(self) -> None:
        """End it without a word."""
        self.runs.ended(0)
        self.runs.kill = lambda _: None  # the machine goes on to know the process, but not this
        if self.progress.descriptor >= 0:
            os.close(self.progress.descriptor)
            self.progress.descriptor = -1

    # What runs in it

    def _live(self) -> None:
        machine, plan = self.crew.machine, self.runner.plan
        machine.sleep(self.crew.costs.start_s)
        self.progress.state = protocol.State.INITIALISING
        if plan.worker_init_fn is not None:
            try:
                plan.worker_init_fn(self.number)
            except Exception as error:
                where = f"in worker_init_fn({self.number})"
                failed = protocol.InitFailed(*describe_error(error, where))
                self.crew.send(self, failed, ())
                return
        self.progress.state = protocol.State.WAITING
        while (taken := self._next_task()) is not None:
            number, task = taken
            self.tasks[number] = task
            self.progress.state = number
            self.runner.do(number, task.request())
        self.crew.send(self, protocol.Retired(), ())

    def _next_task(self) -> tuple[int, Task] | None:
        crew, runner = self.crew, self.runner
        while True:
            if self.sent:
                runner.awaits_rest = False
                rest = self.sent.popleft()
                if rest is not None:
                    return rest
            elif not runner.awaits_rest and self.retiring:
                return None
            elif not runner.awaits_rest and crew.queue:
                return crew.queue.popleft()
            else:
                crew.idle.append(self.thread)
                try:
                    crew.machine.wait()
                finally:
                    if self.thread in crew.idle:
                        crew.idle.remove(self.thread)


class _Wire:
    """The end of a wire that a worker has: pickles what it sends, as a real one does."""

    def __init__(self, worker: VirtualWorker) -> None:
        self._worker = worker

    def send(self, message: protocol.FromChild, files: tuple[int, ...] = ()) -> None:
        worker = self._worker
        if worker.exitcode is not None:
            raise KilledError
        crew = worker.crew
        message = protocol.decode(pickle.loads(pickle.dumps(protocol.encode(message), 5)))
        crew.machine.work(crew.costs.send_s(message))
        crew.send(worker, message, tuple(os.dup(file) for file in files))


class VirtualCrew:
    """So many workers on a machine; the crew of a :class:`PoolExecutor`."""

    def __init__(
        self, machine: Machine, plan: FetchPlan, slots: SlotPool, processes: int, costs: Costs
    ) -> None:
        self.machine, self.plan, self.costs = machine, plan, costs
        self.wanted = processes
        self.children: dict[int, VirtualWorker] = {}
        self.generation = 0
        self.queue: deque[tuple[int, Task]] = deque()
        """Tasks that nobody has taken, by their numbers."""
        self.idle: deque[VirtualThread] = deque()
        """Of workers that wait for something to do, the one that waits longest first."""
        self.maps: dict[int, Any] = {}
        self._slots, self._count = slots, 0
        self._settings: dict[type, protocol.Setting] = {}
        self._inbox: deque[tuple[VirtualWorker, Any, tuple[int, ...]]] = deque()
        self._waits: VirtualThread | None = None

    @property
    def under_way(self) -> int:
        """Tasks that were given and not answered."""
        return len(self.queue) + sum(len(each.tasks) for each in self.children.values())

    @property
    def owing(self) -> list[VirtualWorker]:
        """Workers that have something to do."""
        return [each for each in self.children.values() if each.tasks]

    def start_epoch(self, generation: int, epoch: int) -> None:
        """Begin an epoch, for which those that are missing are started."""
        self.generation = generation
        for worker in self.children.values():
            worker.progress.generation = generation
        self._start_missing(epoch)

    def resize(self, processes: int) -> None:
        """Be so many from now on; those too many finish what they have taken."""
        self.wanted = processes
        for number, worker in self.children.items():
            if number >= processes and not worker.retiring:
                worker.retiring = True
                self._wake(worker.thread)
        self._start_missing()

    def configure(self, setting: protocol.Setting) -> None:
        """Have all follow a setting, also those that are still to come."""
        self._settings[type(setting)] = setting
        for worker in self.children.values():
            _follow(worker, setting)

    def ask_states(self, generation: int, within_s: float) -> None:
        """Have all tell at once what they read, in which nothing of theirs is a copy."""
        for worker in self.children.values():
            worker.progress.generation = generation
            worker.state = worker.runner.state(within_s)

    def give(self, task: Task) -> bool:
        """Queue a task."""
        self._note_slot(task)
        self._count += 1
        self.queue.append((self._count, task))
        if self.idle:
            self._wake(self.idle[0])
        return True

    def go_on(self, number: int, rest: Task | None) -> None:
        """Let a worker go on that has read the first sample of a task."""
        worker = self.children[number]
        if rest is not None:
            self._note_slot(rest)
            self._count += 1
            worker.tasks[self._count] = rest
        worker.sent.append(None if rest is None else (self._count, rest))
        self._wake(worker.thread)

    def wait(self, until: float | None) -> Iterator[Answer | Loss] | None:
        """Wait for events and return them; None if there is none until then."""
        if not self.children:
            self._start_missing()
        until_ns = None if until is None else _ns_of(until)
        while not self._inbox and (until_ns is None or self.machine.now_ns < until_ns):
            self._waits = self.machine.current
            self.machine.wait(until_ns)
            self._waits = None
        return self._events() if self._inbox else None

    def close(self) -> None:
        """Stop all of them."""
        for worker in self.children.values():
            worker.stop()
        for _, _, files in self._inbox:
            for file in files:
                os.close(file)
        for each in (self.children, self.queue, self.idle, self.maps, self._inbox):
            each.clear()
        self.wanted = 0

    # What workers tell

    def send(self, worker: VirtualWorker, message: Any, files: tuple[int, ...]) -> None:
        """Have what a worker sends arrive; no message: its end."""

        def arrives() -> None:
            self._inbox.append((worker, message, files))
            if self._waits is not None:
                self.machine.wake(self._waits)

        way_ns = round(self.costs.way_s * 1e9)
        if way_ns:
            self.machine.at(self.machine.now_ns + way_ns, arrives)
        else:
            arrives()

    def _events(self) -> Iterator[Answer | Loss]:
        while self._inbox:
            worker, message, files = self._inbox.popleft()
            match message:
                case protocol.TaskEnded(number):
                    self.machine.work(self.costs.take_s(message))
                    if self.children.get(worker.number) is worker:
                        yield Answer(worker, worker.tasks.pop(number), message, list(files))
                case protocol.InitFailed(kind, text):
                    raise as_error(kind, worker.number, text)
                case protocol.Retired():
                    if self.children.get(worker.number) is worker:
                        del self.children[worker.number]
                        worker.stop()
                        self._start_missing()  # its number may be wanted again by now
                case None:
                    if self.children.get(worker.number) is worker:
                        yield from self._died(worker)

    def _died(self, worker: VirtualWorker) -> Iterator[Loss]:
        del self.children[worker.number]
        worker.stop()
        yield Loss(worker, list(worker.tasks.values()), worker.suspect)
        self.plan.faults.deaths += 1
        self._start_missing()
        for thread in list(self.idle):  # it may have been woken for what it has not taken
            self._wake(thread)

    # Workers that come

    def _start_missing(self, epoch: int | None = None) -> None:
        for number in sorted(set(range(self.wanted)) - self.children.keys()):
            worker = self.children[number] = VirtualWorker(self, number, epoch)
            for setting in self._settings.values():
                _follow(worker, setting)

    def _wake(self, thread: VirtualThread) -> None:
        if thread in self.idle:
            self.idle.remove(thread)
            self.machine.wake(thread)

    def _note_slot(self, task: Task) -> None:
        while self._slots.dropped:
            self.maps.pop(self._slots.dropped.popleft(), None)
        slot = task.batch.slot
        if slot is not None and slot.number not in self.maps and slot.descriptor is not None:
            self.maps[slot.number] = map_shared_memory(slot.descriptor)


def _follow(worker: VirtualWorker, setting: protocol.Setting) -> None:
    match setting:
        case protocol.SetLayout(layout):
            worker.runner.layout = layout
        case protocol.SetStamps(wanted):
            worker.runner.stamped = wanted


def _ns_of(until_s: float) -> int:
    """Return the first nanosecond that is not before some seconds of the clock."""
    ns = math.floor(until_s * 1e9)
    while ns / 1e9 < until_s:
        ns += 1
    return ns


class VirtualExecutor(PoolExecutor):
    """The pool over a virtual crew."""

    def __init__(
        self,
        machine: Machine,
        plan: FetchPlan,
        *,
        processes: int,
        costs: Costs = Costs(),
        **how: Any,
    ) -> None:
        self._machine, self._costs = machine, costs
        plan = replace(plan, cpus=machine.cpus) if math.isfinite(plan.cpus) else plan
        super().__init__(plan, Resources(executor="workers", workers=processes, **how))

    @property
    def crew(self) -> VirtualCrew:
        """Its workers."""
        assert isinstance(self._crew, VirtualCrew)
        return self._crew

    def _start_crew(self, processes: int) -> VirtualCrew:
        return VirtualCrew(self._machine, self.plan, self._slots, processes, self._costs)


@contextmanager
def virtual_workers(machine: Machine, costs: Costs = Costs()) -> Iterator[Machine]:
    """Have ``executor="workers"`` start its workers on a machine while a block runs.

    All above the crew is as it is without: loader, tuner, Trainer.
    """

    def start(plan: FetchPlan, given: Resources) -> VirtualExecutor:
        assert not isinstance(plan.dataset, IterableDataset), "the crew reads by index"
        warn_before_fork(plan)
        return VirtualExecutor(
            machine, plan, costs=costs, processes=given.workers, trial=given.trial
        )

    row = replace(KINDS["workers"], start=start)
    with mock.patch.dict(KINDS, {"workers": row}), machine.installed():
        yield machine


@contextmanager
def on_machine(costs: Costs = USUAL, *, cpus: int = 2) -> Iterator[Machine]:
    """Live on a new machine, where ``executor="workers"`` starts its workers, for a block."""
    with virtual_workers(Machine(cpus), costs) as machine:
        yield machine

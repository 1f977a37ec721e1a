"""What runs inside a side process: it takes tasks, and reads what it is sent."""

from __future__ import annotations

import faulthandler
import os
import random
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_fastdata.batches.collate import for_writing, in_own_side_process
from lightning_fastdata.batches.libraries import tell_rank
from lightning_fastdata.batches.slots import map_shared_memory
from lightning_fastdata.executors.fetch import Fetcher, FetchPlan
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.child_task import TaskRunner, describe_error
from lightning_fastdata.executors.pool.wire import Wire, number_in, read_packet, request_in
from lightning_fastdata.host.memory import keep_freed_memory
from lightning_fastdata.host.system_calls import (
    OpenFile,
    die_with,
    open_anew,
)
from lightning_fastdata.randomness.seeds import keep_own_epochs
from lightning_fastdata.sources.files import ListedFiles
from lightning_fastdata.torch_internals import set_worker_info


class Inherited(NamedTuple):
    """What a fork copied; nothing of a process that was started otherwise."""

    wires: tuple[int, ...] = ()
    """Descriptors of this process's siblings and of its parent's end, to be closed."""
    files: tuple[OpenFile, ...] = ()
    """That the training process may read, with their positions when it was forked."""


def child_main(
    end: socket.socket,
    plan: FetchPlan,
    number: int,
    processes: int,
    inherited: Inherited,
    parent: int,
    epoch: int | None,
) -> None:
    """Fetch what the training process asks for until it closes the wire.

    The arguments are those of :class:`.ChildProcess`.
    ``parent`` is the process that this one ends with; 0: it ends with the wire only.
    """
    open_anew(inherited.files)
    for descriptor in inherited.wires:
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A fork copies the handler of the training process, and Lightning's tells the other ranks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(parent)
    wire = Wire(end)
    first = wire.receive()
    if first is None:
        return
    progress_memory, stacks, *queues = first[1]
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    plan = prepare_process(plan, number, processes)
    progress = protocol.ProgressMemory(progress_memory)
    progress.state = protocol.State.INITIALISING
    runner = TaskRunner(wire, plan, number, progress, epoch, forked=bool(inherited.wires))
    child = Child(runner, queues[0] if queues else None)
    if plan.worker_init_fn is not None:
        try:
            plan.worker_init_fn(number)
        except Exception as error:
            wire.send(protocol.InitFailed(*describe_error(error, f"in worker_init_fn({number})")))
            return
    child.run()


def prepare_process(plan: FetchPlan, number: int, processes: int) -> FetchPlan:
    """Set this process up to read for a plan, as one of so many; return the plan as it reads it."""
    tell_rank(plan.rank)
    torch.set_num_threads(1)
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)
    seed = plan.base_seed + number
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    # As torch seeds NumPy in its workers.
    words = [number, plan.base_seed & 0xFFFFFFFF, plan.base_seed >> 32, 0]
    np.random.seed(np.random.SeedSequence(words).generate_state(4))
    set_worker_info(number=number, workers=processes, seed=seed, dataset=plan.dataset)
    in_own_side_process()
    keep_freed_memory()
    keep_own_epochs()
    return replace(plan, collate_fn=for_writing(plan.collate_fn))


class Child:
    """A side process: it takes tasks and does them one after the other."""

    def __init__(self, runner: TaskRunner, queue: int | None) -> None:
        self.runner = runner
        self.wire = runner.wire
        self.sent: deque[bytes] = deque()
        """Tasks that came over the wire."""
        self.queue = queue
        self.closed = False
        self.files = ListedFiles(runner.plan.dataset)
        self.poller = select.epoll()
        self.poller.register(self.wire.fileno(), select.EPOLLIN)
        if queue is not None:  # for each task one of the processes is woken
            self.poller.register(queue, select.EPOLLIN | select.EPOLLEXCLUSIVE)

    def run(self) -> None:
        """Work until the training process closes the wire."""
        self.runner.progress.state = protocol.State.WAITING
        fetcher = self.runner.fetcher
        while (task := self._next_task()) is not None:
            if isinstance(fetcher, Fetcher) and fetcher.reads_ahead:
                fetcher.coming = self._coming()
            self.files.begin(task[1].indices)
            self.runner.do(*task)

    def _coming(self) -> Sequence[Any]:
        """Return the samples of the task after the present one, if it is here."""
        if not self.sent:
            return ()
        try:
            coming: Sequence[Any] = request_in(self.sent[0]).indices
        except Exception:  # it is told when the task is taken
            return ()
        return coming

    def _next_task(self) -> tuple[int, protocol.TaskRequest] | None:
        """Wait for the next task, noted as taken; None when there will be no more."""
        runner = self.runner
        while True:
            self._read_wire(wait=runner.awaits_rest)
            if self.closed:
                return None
            if runner.awaits_rest:
                continue
            packet = self.sent.popleft() if self.sent else None
            if packet is None and self.queue is not None:
                packet = read_packet(self.queue)
            if packet is None:
                self.poller.poll()
                continue
            number, failure = number_in(packet), None
            try:
                task = request_in(packet)
            except Exception as error:
                failure = protocol.TaskError(0, *describe_error(error, "in unpickling indices"))
            runner.progress.state = number
            if failure is not None:
                runner.send(protocol.TaskEnded(number, 0, None, (), failure))
                continue
            # What it rests on was sent before it was queued, but may still be on its way.
            self._read_wire()
            while self._lacks(task) and not self.closed:
                self._read_wire(wait=True)
            return number, task

    def _lacks(self, task: protocol.TaskRequest) -> bool:
        return (task.kind == "rows" and self.runner.layout is None) or (
            task.slot is not None and task.slot not in self.runner.maps
        )

    def _read_wire(self, *, wait: bool = False) -> None:
        """Take in what the training process has sent on the wire."""
        while not self.closed:
            try:
                received = self.wire.receive(wait=wait)
            except BlockingIOError:
                return
            except OSError:
                received = None
            if received is None:
                self.closed = True
                return
            wait = False
            self._handle(*received)

    def _handle(self, message: protocol.ToChild, descriptors: list[int]) -> None:
        runner = self.runner
        match message:
            case protocol.GiveTask(packet):
                self.sent.append(packet)
            case protocol.GoOn(rest):
                runner.awaits_rest = False
                if rest is None:
                    runner.kept = None
                else:
                    self.sent.appendleft(rest)
            case protocol.MapSlot(number):
                runner.maps[number] = map_shared_memory(descriptors[0])
                os.close(descriptors[0])
            case protocol.DropSlot(number):
                runner.maps.pop(number, None)
            case protocol.SetLayout(layout):
                runner.layout = layout
            case protocol.SetStamps(wanted):
                runner.stamped = wanted
            case protocol.AskTaken(inquiry):
                # Not read from the memory later: an answer may be on its way then, and the next
                # task noted.
                runner.send(protocol.TaskTaken(inquiry, runner.progress.state))
            case protocol.AskState(within_s):
                runner.send(runner.state(within_s))
            case protocol.Retire():
                if self.queue is not None:
                    self.poller.unregister(self.queue)
                    self.queue = None
                runner.send(protocol.Retired())

"""What runs inside a side process."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import select
import signal
import sys
import threading
import traceback
from collections import deque
from dataclasses import replace
from mmap import mmap
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.batches.collate import for_writing, in_own_side_process
from lightning_fastdata.batches.keyed import tell_epoch
from lightning_fastdata.batches.layout import SampleLayout
from lightning_fastdata.batches.slots import map_shared_memory
from lightning_fastdata.executors.pool.child_task import (
    INITIALISING,
    MARK_WORDS,
    WAITING,
    Work,
    report_of,
)
from lightning_fastdata.executors.pool.task_queue import read_packet, split_packet
from lightning_fastdata.executors.pool.wire import Wire
from lightning_fastdata.host.allocator import keep_freed_memory
from lightning_fastdata.host.processes import die_with
from lightning_fastdata.randomness.shared_epoch import keep_own_epochs
from lightning_fastdata.stamps.lines import LineWatch
from lightning_fastdata.stamps.operations import OperationWatch
from lightning_fastdata.torch_internals import set_worker_info

if TYPE_CHECKING:
    import socket

    from lightning_fastdata.executors.fetch import FetchPlan

MAX_THREADS: Final = 64
"""Of one side process that has several."""


def side_main(
    end: socket.socket,
    plan: FetchPlan,
    number: int,
    processes: int,
    threads: int,
    strangers: tuple[int, ...],
    parent: int,
    epoch: int | None,
) -> None:
    """Fetch what the training process asks for until it closes the wire."""
    for descriptor in strangers:
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    wire = Wire(end)
    first = wire.receive()
    if first is None:
        return
    progress, stacks, *queues = first[1]
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    os.nice(plan.niceness)
    torch.set_num_threads(1)
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)
    if plan.sharing_strategy is not None:
        # Only a forked process has that of its parent.
        torch.multiprocessing.set_sharing_strategy(plan.sharing_strategy)  # type: ignore[no-untyped-call]
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
    plan = replace(plan, collate_fn=for_writing(plan.collate_fn))
    marks = np.frombuffer(map_shared_memory(progress), np.int64)
    marks[2] = INITIALISING
    side = Side(wire, plan, number, marks, threads, epoch)
    if queues:
        side.take_from(queues[0])
    if plan.worker_init_fn is not None:
        try:
            plan.worker_init_fn(number)
        except Exception as error:
            wire.send(("failed", *report_of(error, f"in worker_init_fn({number})")))
            return
    side.run()


def taken_last(marks: Any) -> set[int]:
    """Return the number of the task that each thread has taken from the queue last."""
    return set(marks[2:-1:MARK_WORDS].tolist())


class Side:
    """A side process: what its threads share."""

    def __init__(
        self, wire: Wire, plan: FetchPlan, number: int, marks: Any, threads: int, epoch: int | None
    ) -> None:
        self.wire = wire
        self.plan = plan
        self.number = number
        self.marks = marks
        self.wanted = threads
        self.started = 1
        self.turn = threading.Condition()
        self.telling = threading.Lock()
        self.epoch = epoch
        self.stamped = False
        self.operations = OperationWatch(plan.dataset)
        self.lines = LineWatch()
        self.layout: SampleLayout | None = None
        self.maps: dict[int, mmap] = {}
        self.kept: dict[tuple[int, int], Any] = {}
        self.own: deque[bytes] = deque()
        self.asked: deque[tuple[int, int]] = deque()
        """Parts of batches of which only the first sample was read. What is to become of the rest
        is on its way, and goes before what waits in the queue."""
        self.queue: int | None = None
        self.closed = False
        self.poller = select.epoll()
        self.poller.register(wire.fileno(), select.EPOLLIN)

    def take_from(self, queue: int) -> None:
        """Share the work of a queue with others, of whom one is woken for each task."""
        self.queue = queue
        self.poller.register(queue, select.EPOLLIN | select.EPOLLEXCLUSIVE)

    def run(self) -> None:
        """Work until the training process closes the wire."""
        self.marks[2] = WAITING
        self._start_threads()
        self._work(0)

    def _start_threads(self) -> None:
        while self.started < self.wanted:
            threading.Thread(target=self._run, args=(self.started,), daemon=True).start()
            self.started += 1

    def _run(self, number: int) -> None:
        try:
            self._work(number)
        except BaseException:
            traceback.print_exc()
        # A thread that ends alone would leave its task undone, and nobody would know.
        os._exit(1)

    def _work(self, number: int) -> None:
        work = Work(self, number)
        while True:
            # One thread waits for the next task, and does it: to hand it to another takes time.
            with self.turn:
                while number >= self.wanted:
                    self.turn.wait()
                task = self.next_task(number)
            if task is None:
                break
            work.do(task)
        if self.started > 1:
            os._exit(0)

    def next_task(self, thread: int) -> tuple[Any, ...] | None:
        """Wait for the next task, noted as taken by the thread; None when there will be no more."""
        while True:
            self._hear(wait=bool(self.asked) and not self.own)
            if self.closed:
                return None
            if self.asked and not self.own:
                continue
            packet = self.own.popleft() if self.own else None
            if packet is None and self.queue is not None:
                packet = read_packet(self.queue)
            if packet is None:
                self.poller.poll()
                continue
            number, pickled = split_packet(packet)
            try:
                message = pickle.loads(pickled)  # from our own process
            except Exception as error:
                self.marks[thread * MARK_WORDS + 2] = number
                self.say(("error", number, 0, None, 0, *report_of(error, "in unpickling indices")))
                continue
            self.marks[thread * MARK_WORDS + 2] = number
            # What it rests on was sent before it was queued, but may still be on its way.
            self._hear()
            while self._lacks(message) and not self.closed:
                self._hear(wait=True)
            return number, *message

    def begin_epoch(self, dataset: Any, generation: int, epoch: int) -> bool:
        """Tell the dataset the epoch of a task; False if the task is one of an epoch that is over.

        Tasks of an older epoch that other threads took before do not turn it back.
        """
        with self.telling:
            if generation < self.marks[-1]:
                return False
            if epoch != self.epoch:
                tell_epoch(dataset, epoch)
                self.epoch = epoch
            return True

    def say(self, message: tuple[Any, ...], files: tuple[int, ...] = ()) -> None:
        """Send a message to the training process, and end if that is gone.

        Raises:
            Exception: Something in the message cannot be pickled.
        """
        try:
            self.wire.send(message, files)
        except OSError:
            os._exit(0)

    def _lacks(self, message: tuple[Any, ...]) -> bool:
        kind, slot = message[0], message[-1]
        return (kind == "rows" and self.layout is None) or (
            slot is not None and slot not in self.maps
        )

    def _hear(self, *, wait: bool = False) -> None:
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
            self._take_in(*received)

    def _take_in(self, message: tuple[Any, ...], descriptors: list[int]) -> None:
        kind = message[0]
        if kind == "task":
            self.own.append(message[1])
        elif kind == "rest":
            self.asked.popleft()
            if message[1] is not None:
                self.own.append(message[1])
        elif kind == "slot":
            self.maps[message[1]] = map_shared_memory(descriptors[0])
            os.close(descriptors[0])
        elif kind == "drop":
            self.maps.pop(message[1], None)
        elif kind == "layout":
            self.layout = message[1]
        elif kind == "stamp":
            self.stamped = message[1]
        elif kind == "threads":
            self.wanted = message[1]
            self._start_threads()
            self.turn.notify_all()
        elif kind == "ping":
            # Not read from the memory later: an answer may be on its way then, and the next noted.
            self.say(("pong", message[1], taken_last(self.marks)))
        elif kind == "retire":
            if self.queue is not None:
                self.poller.unregister(self.queue)
                self.queue = None
            self.say(("retired",))

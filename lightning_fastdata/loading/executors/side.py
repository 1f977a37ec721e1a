"""What runs inside a side process."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from mmap import mmap
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import default_collate

from lightning_fastdata.epochs import keep_own_epochs
from lightning_fastdata.host.allocator import keep_freed_memory
from lightning_fastdata.loading.collate import collate_privately, in_own_side_process
from lightning_fastdata.loading.executors.fetch import write_image_of
from lightning_fastdata.loading.executors.queue import parse_packet, read_packet
from lightning_fastdata.loading.executors.stream_fetch import END_OF_STREAM, fetcher_of
from lightning_fastdata.loading.executors.wire import Wire
from lightning_fastdata.loading.keyed import tell_epoch
from lightning_fastdata.loading.layout import MisfitError, SampleLayout, layout_of
from lightning_fastdata.loading.leaves import pack, write_leaves
from lightning_fastdata.loading.operations import OperationWatch
from lightning_fastdata.loading.slots import create_shared_memory, map_shared_memory
from lightning_fastdata.loading.stamps import TaskWatch

if TYPE_CHECKING:
    import socket

    from lightning_fastdata.loading.executors.fetch import FetchPlan

_PR_SET_PDEATHSIG: Final = 1
_Reply: TypeAlias = tuple[tuple[Any, ...], tuple[int, ...]]
"""A message without its number, and open files that go with it."""
MAX_THREADS: Final = 64
"""Of one side process that has several."""
MARK_WORDS: Final = 3
"""int64 numbers per thread in the progress memory: the batch and the position it works on, and the
task it took last."""


def side_main(
    end: socket.socket,
    plan: FetchPlan,
    number: int,
    processes: int,
    threads: int,
    strangers: tuple[int, ...],
    parent: int,
    epoch: int,
) -> None:
    """Fetch what the training process asks for until it closes the wire."""
    for descriptor in strangers:
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(parent)
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
    # What torch.utils.data.get_worker_info() returns; a test pins that this is its place.
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=processes, seed=seed, dataset=plan.dataset
    )
    in_own_side_process()
    keep_freed_memory()
    keep_own_epochs()
    if plan.collate_fn is default_collate:
        plan = replace(plan, collate_fn=collate_privately)
    marks = np.frombuffer(map_shared_memory(progress), np.int64)
    side = _Side(wire, plan, number, marks, threads, epoch)
    if queues:
        side.take_from(queues[0])
    if plan.worker_init_fn is not None:
        try:
            plan.worker_init_fn(number)
        except Exception as error:
            wire.send(("failed", *_report(error, f"in worker_init_fn({number})")))
            return
    side.run()


def taken_last(marks: Any) -> set[int]:
    """Return the number of the task that each thread has taken from the queue last."""
    return set(marks[2:-1:MARK_WORDS].tolist())


def _die_with(parent: int) -> None:
    if sys.platform.startswith("linux") and os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def _report(error: BaseException, where: str) -> tuple[type, str]:
    return type(error), f"{where}.\n{''.join(traceback.format_exception(error))}"


class _Side:
    def __init__(
        self, wire: Wire, plan: FetchPlan, number: int, marks: Any, threads: int, epoch: int
    ) -> None:
        self.wire = wire
        self.plan = plan
        self.number = number
        self.marks = marks
        self.wanted = threads
        self.started = 1
        self.turn = threading.Condition()
        self.epoch = epoch
        self.stamped = False
        self.operations = OperationWatch(plan.dataset)
        self.layout: SampleLayout | None = None
        self.maps: dict[int, mmap] = {}
        self.kept: dict[tuple[int, int], Any] = {}
        self.own: deque[tuple[Any, ...]] = deque()
        self.queue: int | None = None
        self.closed = False
        self.poller = select.epoll()
        self.poller.register(wire.fileno(), select.EPOLLIN)

    def take_from(self, queue: int) -> None:
        """Share the work of a queue with others, of whom one is woken for each task."""
        self.queue = queue
        self.poller.register(queue, select.EPOLLIN | select.EPOLLEXCLUSIVE)

    def run(self) -> None:
        self._start_threads()
        self._work(0)

    def _start_threads(self) -> None:
        while self.started < self.wanted:
            threading.Thread(target=self._work, args=(self.started,), daemon=True).start()
            self.started += 1

    def _work(self, number: int) -> None:
        work = _Work(self, number)
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
            self._hear()
            if self.closed:
                return None
            if self.own:
                return self.own.popleft()
            packet = None if self.queue is None else read_packet(self.queue)
            if packet is not None:
                number, message = parse_packet(packet)
                self.marks[thread * MARK_WORDS + 2] = number
                # What it rests on was sent before it was queued, but may still be on its way.
                self._hear()
                while self._lacks(message) and not self.closed:
                    self._hear(wait=True)
                return number, *message
            self.poller.poll()

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
            self.own.append((message[1], *message[2]))
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
            self.wire.send(("pong", message[1], taken_last(self.marks)))
        elif kind == "retire":
            if self.queue is not None:
                self.poller.unregister(self.queue)
                self.queue = None
            self.wire.send(("retired",))


class _Work:
    """One thread of a side process."""

    def __init__(self, side: _Side, number: int) -> None:
        self.side = side
        self.number = number
        self.mark_at = number * MARK_WORDS
        alone = len(side.marks) == MARK_WORDS + 1
        self.fetcher: Any = fetcher_of(side.plan, keyed=alone)
        self.stamps = TaskWatch(side.number, number, side.operations)

    def do(self, task: tuple[Any, ...]) -> None:
        number, kind, generation, batch, epoch, start, indices, rows, slot = task
        if generation < self.side.marks[-1]:
            self._answer(("stale", number))
            return
        began = time.monotonic_ns()
        self.fetcher.stamps = self.stamps if self.side.stamped else None
        if self.side.stamped:
            self.stamps.begin()
        work: Callable[[], _Reply]
        if kind == "rows":
            work = partial(self._rows, batch, epoch, start, indices, rows, slot)
        elif kind == "first":
            work = partial(self._first, batch, epoch, indices)
        else:
            work = partial(self._whole, batch, epoch, indices, slot)
        reply: tuple[Any, ...]
        files: tuple[int, ...] = ()
        where = f"in set_epoch({epoch})"
        try:
            if epoch != self.side.epoch:
                tell_epoch(self.fetcher.dataset, epoch)
                self.side.epoch = epoch
            where = ""
            reply, files = self.fetcher.attempt(work)
        except MisfitError:
            reply = ("misfit",)
        except Exception as error:
            at = max(self.fetcher.position, 0)
            where = where or self.fetcher.where(indices)
            reply = ("error", start + at, *_report(error, where))
        self._mark(-1, -1)
        spent = time.monotonic_ns() - began
        stamps = self.stamps.end() if self.fetcher.stamps is not None else None
        self._answer((reply[0], number, spent, stamps, *reply[1:]), files)
        for descriptor in files:
            os.close(descriptor)

    def _answer(self, message: tuple[Any, ...], files: tuple[int, ...] = ()) -> None:
        try:
            self.side.wire.send(message, files)
        except OSError:  # the training process is gone, and nobody is left to tell
            os._exit(0)

    def _mark(self, batch: int, position: int) -> None:
        self.side.marks[self.mark_at + 1] = position
        self.side.marks[self.mark_at] = batch

    def _first(self, batch: int, epoch: int, indices: Any) -> _Reply:
        self.fetcher.position = 0
        self._mark(batch, 0)
        sample = self.fetcher.sample(indices[0], epoch)
        self.fetcher.position = -1
        layout = layout_of(sample, self.side.plan.collate_fn)
        if layout is not None:
            self.side.kept[batch, 0] = sample
        return ("layout", layout), ()

    def _rows(
        self, batch: int, epoch: int, start: int, indices: Any, rows: int, slot: int
    ) -> _Reply:
        layout = self.side.layout
        if layout is None:
            raise MisfitError
        memory = self.side.maps[slot]
        fetcher, kept, stamps = self.fetcher, self.side.kept, self.fetcher.stamps
        write_image = write_image_of(fetcher.dataset, layout, memory, rows, epoch)
        writers = layout.writers(memory, rows, start, start + len(indices))
        for offset, index in enumerate(indices):
            fetcher.position = offset
            self._mark(batch, start + offset)
            sample = kept.pop((batch, start + offset), kept) if kept else kept
            began_ns = time.monotonic_ns()
            if sample is kept and write_image is not None:
                write_image(index, start + offset)
                if stamps is not None:
                    stamps.read(index, began_ns)
                continue
            if sample is kept:
                sample = fetcher.sample(index, epoch)
                began_ns = time.monotonic_ns()
            layout.write(sample, writers, offset)
            if stamps is not None:
                stamps.collated(began_ns)
        return ("rows",), ()

    def _whole(self, batch: int, epoch: int, indices: Any, slot: int | None) -> _Reply:
        self._mark(batch, 0)
        result = self.fetcher.batch(indices, epoch, lambda at: self._mark(batch, at))
        if result is END_OF_STREAM:
            return ("end",), ()
        began_ns = time.monotonic_ns()
        reply = self._packed(result, slot)
        if self.fetcher.stamps is not None:
            self.fetcher.stamps.collated(began_ns)
        return reply

    def _packed(self, result: Any, slot: int | None) -> _Reply:
        packed, leaves = pack(result)
        if not packed.size_bytes:
            write_leaves(packed, leaves, bytearray(1))
            return ("whole", packed, None), ()
        mapping = self.side.maps.get(slot) if slot is not None else None
        if mapping is not None and len(mapping) >= packed.size_bytes:
            write_leaves(packed, leaves, mapping)
            return ("whole", packed, slot), ()
        descriptor = create_shared_memory(packed.size_bytes)
        write_leaves(packed, leaves, map_shared_memory(descriptor))
        return ("whole", packed, None), (descriptor,)

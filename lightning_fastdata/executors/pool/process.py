"""One side process as the training process sees it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.batches.packed import unpack
from lightning_fastdata.batches.slots import create_shared_memory, map_shared_memory
from lightning_fastdata.executors.pool.child import side_main, taken_last
from lightning_fastdata.executors.pool.child_task import MARK_WORDS, STARTING, WAITING
from lightning_fastdata.executors.pool.wire import Wire, wire_pair
from lightning_fastdata.stamps.batch_stamps import BatchStamps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_fastdata.batches.layout import SampleLayout
    from lightning_fastdata.batches.packed import Packed
    from lightning_fastdata.batches.slots import Slot, SlotPool
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.order.epoch_order import EpochOrder
    from lightning_fastdata.stamps.batch_stamps import ReadRates, TaskStamps
    from lightning_fastdata.stamps.own_stamps import WaitWatch

_CROWDED_S: Final = 0.001
"""Where a wire has room, and yet nothing can be sent, it is other processes that have to read."""


@dataclass(slots=True, eq=False)
class EpochRun:
    """An epoch whose batches are being fetched."""

    number: int
    """Part of the key of its randomness."""
    generation: int
    """Counts the epochs begun; what belongs to an older one is dropped."""
    source: Iterator[Any]
    """The batches of indices that are still to be fetched."""
    order: EpochOrder | None = None
    """The plan that ``source`` follows, if it is known."""
    exhausted: bool = False
    """The source has ended."""


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch that is under way."""

    number: int
    """Counts all batches of the executor."""
    generation: int
    """The epoch it was started for; older ones are dropped when their work has ended."""
    epoch: int
    """Part of the key of its randomness."""
    indices: Any
    """What the plan gave."""
    slot: Slot | None = None
    """Where it is written; None until it has a place."""
    open_tasks: int = 0
    """Tasks whose answers are still to come."""
    packed: Any = None
    """Its parts, if it was collated by a side process."""
    error: tuple[int, BaseException] | None = None
    """The error of its first failing sample."""
    misfit: bool = False
    """Its samples cannot be written in place; to be collated as a whole when all tasks ended."""
    in_place: bool = False
    """Its samples are written in place."""
    stamps: list[TaskStamps] = field(default_factory=list)
    """Of its tasks, if stamps are recorded."""

    def take_parts(self, packed: Packed, files: list[int], slots: SlotPool) -> None:
        """Take what a side process collated: in the slot it was given, or in a file of its own."""
        self.packed = packed
        if files:
            self.release(slots)
            self.slot = slots.adopt(files[0])

    def data(self, slots: SlotPool, layout: SampleLayout | None = None) -> Any:
        """Return the batch; its slot is used again when nothing views it any more."""
        slot, self.slot = self.slot, None
        if slot is None:
            return unpack(self.packed, None)
        copy = slots.has_to_copy(slot)
        owner = slots.lease(slot)
        if self.in_place and layout is not None:
            return layout.batch(owner, len(self.indices), copy=copy)
        return unpack(self.packed, owner, copy=copy)

    def release(self, slots: SlotPool) -> None:
        """Give back the slot of a batch that is not delivered."""
        if self.slot is not None:
            slots.give_back(self.slot)
            self.slot = None

    def delivered(
        self,
        wait: WaitWatch,
        ready_ahead: int,
        *,
        first: bool,
        rates: ReadRates | None = None,
    ) -> BatchStamps:
        """Return the stamps of the batch, which is handed over now."""
        samples = sum(task.samples for task in self.stamps)
        own = wait.delivered()
        return BatchStamps(
            self.number,
            samples,
            wait.requested_ns,
            time.monotonic_ns(),
            tuple(self.stamps),
            ready_ahead,
            first=first,
            own=own,
            rates=rates,
        )


@dataclass(slots=True, eq=False)
class Task:
    """What one thread of a side process does in one go."""

    kind: str
    """``"rows"``: write samples in place; ``"whole"``: collate; ``"first"``: find the layout by the
    first sample, and keep that for the rows."""
    batch: PendingBatch
    """The batch it belongs to."""
    start: int
    """Position in the batch of its first sample."""
    indices: Any
    """Of its samples."""


class SideProcess:
    """A process, the wire to it, and what it was given to do."""

    def __init__(
        self,
        plan: FetchPlan,
        number: int,
        processes: int,
        threads: int,
        strangers: tuple[int, ...] = (),
        *,
        places: int = 1,
        epoch: int | None = None,
        queue: int | None = None,
    ) -> None:
        self.wire: Wire
        self.number = number
        self.threads = threads
        self.tasks: dict[int, Task] = {}
        self.outbox: deque[tuple[tuple[Any, ...], tuple[int, ...] | Slot]] = deque()
        self.known_slots: set[int] = set()
        self.answers = 0
        self.retiring = False
        self.retired = False
        ours, theirs = wire_pair()
        ours.setblocking(False)
        context = plan.context
        if not isinstance(context, BaseContext):
            context = multiprocessing.get_context(context)
        forked = context.get_start_method() == "fork"
        # A child is told of the end of the thread that forked it as of that of its parent.
        lasting = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if lasting else 0
        # A forked child holds its siblings' wires too, and they would never see them closed.
        strangers = (ours.fileno(), *strangers) if forked else ()
        self.process = context.Process(
            target=side_main,
            args=(theirs, plan, number, processes, threads, strangers, parent, epoch),
            daemon=True,
            name=f"fastdata-{number}",
        )
        try:
            self.process.start()
        finally:
            theirs.close()
        self.wire = Wire(ours)
        self._life = _Life(self.process.pid)
        self.progress = create_shared_memory((places * MARK_WORDS + 1) * 8)
        self.stacks = create_shared_memory(1)
        os.ftruncate(self.stacks, 0)
        self.marks = np.frombuffer(map_shared_memory(self.progress), np.int64)
        self.marks[:-1] = -1
        self.marks[2] = STARTING
        queues = () if queue is None else (queue,)
        self.send(("start",), (self.progress, self.stacks, *queues))

    @property
    def ends(self) -> tuple[int, ...]:
        """What becomes readable when it says something or dies: the wire first."""
        return (self.wire.fileno(), *self._life.ends)

    @property
    def began(self) -> bool:
        """Whether it has got so far as to wait for tasks."""
        return bool(self.marks[2] >= WAITING)

    @property
    def is_starting(self) -> bool:
        """Whether it has not even got so far as to show its stacks."""
        return bool(self.marks[2] == STARTING)

    @property
    def load(self) -> float:
        """Samples it still has to read, per thread."""
        samples = (
            len(task.indices) if isinstance(task.indices, list) else 1
            for task in self.tasks.values()
        )
        return sum(samples) / self.threads

    def send(self, message: tuple[Any, ...], files: tuple[int, ...] | Slot = ()) -> None:
        """Send now, or as soon as the process has read enough of what it has.

        Args:
            message: What.
            files: Open files that go with it, and stay open until the process ends; or a slot, of
                which it is told nothing any more should the slot be given up before.
        """
        waits = bool(self.outbox)
        self.outbox.append((message, files))
        if not waits:
            self._post()

    def flush(self) -> None:
        """Send what had to wait, once the wire has room again."""
        if not self._post():
            time.sleep(_CROWDED_S)

    def _post(self) -> bool:
        while self.outbox:
            message, files = self.outbox[0]
            if not isinstance(files, tuple):
                files = () if files.descriptor is None else (files.descriptor,)
            try:
                if files or message[0] != "slot":
                    self.wire.send(message, files)
            except BlockingIOError:
                return False
            except OSError:
                # Its death is seen, and its tasks are given away, when the wire is read.
                self.outbox.clear()
                return True
            self.outbox.popleft()
        return True

    def messages(self) -> Iterator[tuple[tuple[Any, ...], list[int]] | None]:
        """Yield what it has said, with the files that came along; None at last if it is gone."""
        gone = self._life.is_over()  # asked first: what it said before is there by now
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

    def working_on(self) -> list[tuple[int, int]]:
        """Return (batch number, position) of each sample that is being read right now."""
        marks = self.marks[:-1].reshape(-1, MARK_WORDS)
        return [(int(batch), int(at)) for batch, at, _ in marks if batch >= 0]

    def claims(self) -> set[int]:
        """Return the numbers of the tasks that its threads have taken from the queue last."""
        return taken_last(self.marks)

    def stack(self, wait_s: float = 3.0) -> str:
        """Return the Python stacks of its threads, asked for through SIGUSR1."""
        if self.is_stopped():
            return f"(no stack: the process is stopped, state {self._state()}; send it SIGCONT)"
        if self.is_starting:  # it knows nothing of SIGUSR1, and would die of it
            return f"(no stack: the process is starting, state {self._state()})"
        size = os.fstat(self.stacks).st_size
        try:
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        except ProcessLookupError:
            return "(no stack: the process is gone)"
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            time.sleep(0.05)
            now = os.fstat(self.stacks).st_size
            if now > size and now == os.fstat(self.stacks).st_size:
                time.sleep(0.05)
                return os.pread(self.stacks, 2**16, size).decode(errors="replace")
        return f"(no stack within {wait_s:g} s, state {self._state()})"

    def is_stopped(self) -> bool:
        """Return whether it was stopped by a signal, as SIGSTOP does."""
        return self._state().startswith("T")

    def stop(self, patience_s: float = 1.0) -> None:
        """End the process: it leaves by itself when the wire closes, or is killed."""
        self.outbox.clear()
        self.wire.close()
        self.process.join(patience_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        if self.stacks >= 0:
            os.close(self.stacks)
            os.close(self.progress)
            self.stacks = -1
            self._life.close()

    def _state(self) -> str:
        try:
            with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as status:  # noqa: PTH123
                lines = status.read().splitlines()
        except OSError:
            return "?"
        return next((line[6:].strip() for line in lines if line.startswith("State:")), "?")


class _Life:
    """Tells that a process has ended.

    Its wire tells so, too, but not while a process that was forked beside it holds a copy.
    """

    def __init__(self, pid: int | None) -> None:
        self.ends: tuple[int, ...] = ()
        self._poller = select.poll()
        with contextlib.suppress(OSError):  # a kernel or container that has no such descriptors
            self.ends = (os.pidfd_open(pid or 0),)
            self._poller.register(self.ends[0], select.POLLIN)

    def is_over(self) -> bool:
        return bool(self.ends and self._poller.poll(0))

    def close(self) -> None:
        for end in self.ends:
            os.close(end)
        self.ends = ()


def stop_all(sides: dict[int, SideProcess], owner: int) -> None:
    """End side processes together; does nothing in another process than their owner."""
    if os.getpid() != owner:  # a forked child must not end its parent's processes
        return
    for side in sides.values():
        side.wire.close()
    until = time.monotonic() + 1
    for side in sides.values():
        side.stop(max(0.0, until - time.monotonic()))
    sides.clear()

"""One side process as the training process sees it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from typing import Final, NamedTuple, Protocol

from lightning_fastdata.batches.slots import Slot, create_shared_memory
from lightning_fastdata.errors import WorkerError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.child import Inherited, child_main
from lightning_fastdata.executors.pool.protocol import TaskQueue, Wire, wire_pair
from lightning_fastdata.executors.pool.splitter import Task
from lightning_fastdata.host import clock
from lightning_fastdata.host.system_calls import files_being_read

_CROWDED_S: Final = 0.001
"""Where a wire has room, and yet nothing can be sent, it is other processes that have to read."""


class Hang(NamedTuple):
    """What a side process gets nowhere with."""

    sample: tuple[int, int] | None
    """Batch number and position; None: it reads none, or which is not known."""
    seconds: float
    doing: str = ""
    """With its stack, in words."""


class ChildProcess:
    """A side process, the wire to it, and what it was given to do.

    If it is forked it closes ``inherited_fds``, what it would hold of its siblings. ``epoch`` is
    the one that ``set_epoch`` of the dataset was called with; None: it is called there. Without a
    ``queue`` it is sent each of its tasks.
    """

    def __init__(
        self,
        plan: FetchPlan,
        number: int,
        processes: int,
        inherited_fds: tuple[int, ...],
        *,
        epoch: int | None,
        queue: int | None,
    ) -> None:
        self.number = number
        self.tasks: dict[int, Task] = {}
        """Those that were sent to it alone, and not taken from the queue."""
        self.outbox: deque[tuple[protocol.ToChild, tuple[int, ...] | Slot]] = deque()
        """Messages for which its wire had no room."""
        self.answers = 0
        """Tasks that it has ended."""
        self.failure: BaseException | None = None
        """What its ``worker_init_fn`` raised."""
        self.asked = False
        """It has still to tell what it reads."""
        self.state: protocol.StateTold | None = None
        """What it has told of that last; None: it was not asked."""
        self.hang: Hang | None = None
        """Why it was killed."""
        self.retiring = False
        self.retired = False
        ours, theirs = wire_pair()
        ours.setblocking(False)
        context = plan.context
        if not isinstance(context, BaseContext):
            context = multiprocessing.get_context(context)
        forked = context.get_start_method() == "fork"
        # The kernel takes the end of the thread that forked a child for the end of its parent.
        lasting = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if lasting else 0
        # A forked child holds its siblings' wires too, and they would never see them closed.
        inherited = Inherited((ours.fileno(), *inherited_fds), files_being_read())
        self.process = context.Process(
            target=child_main,
            args=(
                theirs,
                plan,
                number,
                processes,
                inherited if forked else Inherited(),
                parent,
                epoch,
            ),
            daemon=True,
            name=f"fastdata-{number}",
        )
        try:
            self.process.start()
        finally:
            theirs.close()
        self.wire = Wire(ours)
        # The end of its wire shows its end, too, but not while a process that was forked beside it
        # holds a copy.
        self._pidfd: tuple[int, ...] = ()
        self._life = select.poll()
        with contextlib.suppress(OSError):  # a kernel or container that has no such descriptors
            self._pidfd = (os.pidfd_open(self.pid),)
            self._life.register(self._pidfd[0], select.POLLIN)
        try:
            self.progress = protocol.ProgressMemory.create()
            self.stacks = create_shared_memory(1)
        except (OSError, WorkerError):  # no more files may be open
            self.wire.close()
            self.process.kill()
            self.process.join()
            raise
        os.ftruncate(self.stacks, 0)
        queues = () if queue is None else (queue,)
        self.send(protocol.Start(), (self.progress.descriptor, self.stacks, *queues))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid or 0

    @property
    def exitcode(self) -> int | None:
        """How it ended: its exit code, or less the signal; None: it lives."""
        code: int | None = self.process.exitcode
        return code

    @property
    def ends(self) -> tuple[int, ...]:
        """Descriptors that become readable when it sends something or dies: the wire first."""
        return (self.wire.fileno(), *self._pidfd)

    @property
    def began(self) -> bool:
        """Whether it has got so far as to wait for tasks."""
        return self.progress.state >= protocol.State.WAITING

    @property
    def is_starting(self) -> bool:
        """Whether it has not even got so far as to show its stacks."""
        return self.progress.state == protocol.State.STARTING

    @property
    def load(self) -> int:
        """Samples it still has to read."""
        asked = (task.indices for task in self.tasks.values())
        return sum(len(each) if isinstance(each, list) else 1 for each in asked)

    def send(self, message: protocol.ToChild, files: tuple[int, ...] | Slot = ()) -> None:
        """Send now, or as soon as the process has read enough of what it has.

        ``files``: Open ones that go with it, and stay open until the process ends; or the slot that
        it is to map, of which nothing is sent if the slot is given up before.
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
            except BlockingIOError:
                return False
            except OSError:
                # Its death is seen, and its tasks are given away, when the wire is read.
                self.outbox.clear()
                return True
            self.outbox.popleft()
        return True

    def messages(self) -> Iterator[tuple[protocol.FromChild, list[int]] | None]:
        """Yield what it has sent, with the files that came along; None at last if it is gone."""
        # Asked first: what it sent before is there by now.
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
        """Return the Python stacks of its threads, asked for through SIGUSR1."""
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
            for descriptor in (self.stacks, self.progress.descriptor, *self._pidfd):
                os.close(descriptor)
            self.stacks, self._pidfd = -1, ()

    def _state(self) -> str:
        try:
            with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as status:  # noqa: PTH123
                return next((line[6:].strip() for line in status if line.startswith("State:")), "?")
        except OSError:
            return "?"


class Side(Protocol):
    """Who does tasks, as those see it who gave them."""

    number: int
    hang: Hang | None

    @property
    def exitcode(self) -> int | None:
        """How it ended; None: it lives, or that is not known."""


class Answer(NamedTuple):
    """A side process has ended a task; open files came with its message."""

    child: Side
    task: Task
    ended: protocol.TaskEnded
    files: list[int]


class Loss(NamedTuple):
    """A side process died, and took tasks with it, which are not done."""

    child: Side
    tasks: list[Task]
    suspect: tuple[int, int] | None
    """Batch number and position of the sample that was being read, or about to be; None: none."""


def stop_all(children: dict[int, ChildProcess], queue: TaskQueue | None, owner: int) -> None:
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

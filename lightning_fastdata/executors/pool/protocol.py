"""What the training process and its side processes (its children) send to each other, and how.

::

    training process                                               side process
    scheduler > crew                                               child

                   TaskRequest, through one queue for all
             ---------------------------------------------------->  whichever is free takes it
                   (bells wake it: of the queue, and of its wire)
                   Start, GiveTask, GoOn, MapSlot, DropSlot, SetLayout,
                   SetStamps, AskTaken, AskState, Retire
             ---------------------------------------------------->  a wire of its own
                   TaskEnded, TaskTaken, StateTold, Retired, InitFailed
             <----------------------------------------------------  the same wire
                   ProgressMemory: its state, and what it reads
             <====================================================  memory that outlives it

**A batch** is asked for when its indices are known, and divided into tasks of one kind. It is ready
when no task of it is open, and is then delivered, or its error is raised in its turn::

    asked --> first --> in place ---------> ready --> delivered, or its error
      |         |          |                  ^
      |         |          v                  |
      |         '------> misfit --> whole ----'
      '----------------------------> whole

- *first*: until the layout of samples is known, each process reads one sample and answers with its
  layout (``FirstSample``). It keeps the sample, and takes no other task before the answer: to read
  the rest (``GoOn`` with a task), or to drop the sample (``GoOn`` without).
- *in place*: each task writes its samples into rows of a slot, memory that all processes map.
- *misfit*: a sample has no layout, or another one, and cannot be written. When the other tasks have
  ended, the batch is collated *whole*, by a single task; so are all batches after it.
- *error*: a sample or the collation failed, and no other sample is to be read in its place; of
  several errors the one of the first sample counts.
- *old*: the batch belongs to an epoch that is over. It is dropped when its open tasks have ended.

**Generations.** Each epoch has a generation, larger than that of the epoch before. The training
process writes the present one into the progress memory of every process: a task of a smaller one is
answered with ``OldEpoch`` and not done. For a stream it stays at 0: all its tasks are done.

**A process**::

    starting --> initialising --> waiting --> working --> retiring --> retired --> stopped
    (no stacks   (worker_init_fn) (no task    (on a task, (asked to    (takes no   (has done
     to show)                      so far)     or after)   leave)       new tasks)  the last)

It notes in its progress memory how far it has got, and ends when its wire closes or the training
process has ended. When one dies, at any point, the tasks that were sent to it, or that it noted as
taken, are lost: another does them. A task that is neither in the queue nor noted was taken by the
dead process or, just now, by a living one. Each living one is asked (``AskTaken``), and what none
of them has is lost, too. Where a task is lost again and again with the same sample being read, that
sample gets an error, or another one is read in its place. The wire and the queue carry a message
whole or not at all, however a process ends: nothing is left half written or locked.

A process that reads a stream has no queue: it is sent its tasks, all of them *whole*, and what is
lost with it stays lost, since a stream cannot be read again from its middle. The first task of an
epoch says where it goes on, and answers bring states that it can go on from later.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import pickle
import select
import socket
import struct
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from lightning_fastdata.batches.bad_samples import Fault
from lightning_fastdata.batches.memory import (
    Packed,
    SampleLayout,
    create_shared_memory,
    map_shared_memory,
)
from lightning_fastdata.errors import WorkerError
from lightning_fastdata.executors.stream_state import StreamNote
from lightning_fastdata.host import clock
from lightning_fastdata.stamps.batch_stamps import TaskStamps

_PIPE_BYTES: Final = 2**20
"""Bytes of the pipe of tasks, of which a packet takes a page: as many as any user may ask for."""
_NUMBER: Final = struct.Struct("<q")
_LARGE_BYTES: Final = 48 * 1024
_CROWDED: Final = (errno.ETOOMANYREFS, errno.ENOBUFS)
"""Errors of sending while a user's unread messages hold as many descriptors as ``ulimit -n``."""
_CROWDED_S: Final = 0.005
_CUT_OFF: Final = int(socket.MSG_CTRUNC)  # arithmetic with the flags themselves takes 2 us
_NO_DESCRIPTORS: Final = (
    "A process may not have more open files, and lost those that were sent to it. Raise the limit "
    "(ulimit -n), or use fewer workers or a smaller prefetch_factor."
)
TaskKind: TypeAlias = Literal["first", "rows", "whole"]
"""Work of a task: read and keep one sample, write samples into the slot, or collate all of them."""


class TaskRequest(NamedTuple):
    """What a process is to do in one go; it travels with a number of its own, counted from 1."""

    kind: TaskKind
    generation: int
    batch: int
    epoch: int
    """Number of the epoch, part of the key of its randomness."""
    start: int
    """Position in the batch of the first sample of the task."""
    indices: Any
    """Indices of the samples: a list, a single index, or the request for a batch of a stream."""
    rows: int
    """Number of samples in the whole batch; 0 where they are not written in place."""
    slot: int | None


# From the training process to one side process


class Start(NamedTuple):
    """The first message. Files: progress memory, output of stacks, the queue if there is one."""


class GiveTask(NamedTuple):
    """Do a task that is too long for the queue, or that only this process can do."""

    packet: bytes


class GoOn(NamedTuple):
    """Read the rest of the batch part whose first sample was read; None: drop that sample."""

    packet: bytes | None


class MapSlot(NamedTuple):
    """Map a slot. File: its memory."""

    number: int


class DropSlot(NamedTuple):
    """Unmap a slot that was given up."""

    number: int


class SetLayout(NamedTuple):
    """All samples have this layout; None: they have none, and batches are collated whole."""

    layout: SampleLayout | None


class SetStamps(NamedTuple):
    """Send the stamps of each task from now on, or no longer."""

    wanted: bool


class AskTaken(NamedTuple):
    """Answer with :class:`TaskTaken`."""

    inquiry: int


class AskState(NamedTuple):
    """Answer with :class:`StateTold`, within ``within_s`` CPU seconds."""

    within_s: float


class Retire(NamedTuple):
    """Take nothing from the queue any more, and answer with :class:`Retired`."""


Setting: TypeAlias = SetLayout | SetStamps
"""Messages that are also sent to processes that are started later."""
ToChild: TypeAlias = (
    Start | GiveTask | GoOn | MapSlot | DropSlot | Setting | AskTaken | AskState | Retire
)

# From a side process to the training process: how a task ended, and the rest


class RowsWritten(NamedTuple):
    """The samples are in the slot."""


class FirstSample(NamedTuple):
    """The first sample was read, and is kept if it has a layout."""

    layout: SampleLayout | None


class Collated(NamedTuple):
    """The batch is in the slot, or in a file that comes with the message."""

    packed: Packed
    note: StreamNote | None = None
    """What a stream tells of its position; None: it is no stream."""


class NothingLeft(NamedTuple):
    """All samples of the batch are left out."""


class Misfit(NamedTuple):
    """A sample differs from the layout."""


class TaskError(NamedTuple):
    """An exception was raised at the sample of this position; ``text``: where, and traceback."""

    position: int
    kind: type[BaseException]
    text: str


class OldEpoch(NamedTuple):
    """The task belongs to an epoch that is over."""


class StreamEnd(NamedTuple):
    """The stream of this process has no more batches in this epoch."""


TaskResult: TypeAlias = (
    RowsWritten | FirstSample | Collated | NothingLeft | Misfit | TaskError | OldEpoch | StreamEnd
)


class TaskEnded(NamedTuple):
    """A task has ended, one way or another; with its stamps if they are wanted."""

    number: int
    spent_ns: int
    stamps: TaskStamps | None
    faults: tuple[Fault, ...]
    """Faults of the task's samples, each with its position in the batch."""
    result: TaskResult


class TaskTaken(NamedTuple):
    """The number of the task that the process had taken last when it was asked."""

    inquiry: int
    number: int


class StateTold(NamedTuple):
    """The state of what the process reads, after all that it has read."""

    digest: bytes | None
    """Digest from a forked process, as the training process would have it; None: there is none."""
    same: bool
    """Whether what a process that was not forked reads is as it was when the epoch began."""


class Retired(NamedTuple):
    """Nothing will be taken from the queue any more."""


class InitFailed(NamedTuple):
    """``worker_init_fn`` raised an exception: where, and its traceback. The process ends."""

    kind: type[BaseException]
    text: str


FromChild: TypeAlias = TaskEnded | TaskTaken | StateTold | Retired | InitFailed
Message: TypeAlias = ToChild | FromChild

_KINDS: Final = (*get_args(ToChild), *get_args(FromChild), *get_args(TaskResult))
_CODES: Final = {kind: code for code, kind in enumerate(_KINDS)}


def encode(message: Message | TaskResult) -> tuple[object, ...]:
    """Return a message as a plain tuple, which takes a quarter of the time to pickle."""
    fields: tuple[object, ...] = message
    if isinstance(message, TaskEnded):
        fields = (*message[:-1], encode(message.result))
    return (_CODES[type(message)], *fields)


def decode(encoded: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the message that was encoded."""
    kind, fields = _KINDS[encoded[0]], encoded[1:]
    if kind is TaskEnded:
        fields = (*fields[:-1], decode(fields[-1]))
    message: tuple[Any, ...] = kind(*fields)
    return message


class State(IntEnum):
    """Progress of a side process; a number above these is that of the task it took last."""

    STARTING = -2
    INITIALISING = -1
    """The process shows its stacks when it is asked."""
    WAITING = 0
    """The process takes tasks."""


_NOTES: Final = ("batch", "position", "state", "generation", "starved")


class ProgressMemory(ctypes.Structure):
    """Memory in which a side process notes how far it has got, mapped from a descriptor."""

    _fields_ = tuple((n, ctypes.c_int64) for n in _NOTES)
    batch: int
    """Batch number of the sample that is being read; -1: none is."""
    position: int
    """Position in its batch of the sample that is being read; -1: none is."""
    state: int
    """One of :class:`State`, or the number of the task that the process took last."""
    generation: int
    """Generation of the present epoch; tasks of a smaller one need not be done."""
    starved: int
    """Whether the process waits for CPUs for longer than it runs: 1 or 0."""
    descriptor: int

    @classmethod
    def mapped(cls, descriptor: int) -> ProgressMemory:
        """Return the memory behind a descriptor."""
        progress = cls.from_buffer(map_shared_memory(descriptor))
        progress.descriptor = descriptor
        return progress

    @classmethod
    def create(cls) -> ProgressMemory:
        """Return new memory for a process that is starting."""
        progress = cls.mapped(create_shared_memory(ctypes.sizeof(cls)))
        progress.read(-1, -1)
        progress.state = State.STARTING
        return progress

    def read(self, batch: int, position: int) -> None:
        """Note which sample is being read; -1 for both: none."""
        # In this order: a reader that finds a batch number finds its position, too.
        self.position = position
        self.batch = batch

    def being_read(self) -> tuple[int, int] | None:
        """Return batch number and position of the sample that is being read right now, if any."""
        batch, position, _ = self.noted()
        return (batch, position) if batch >= 0 else None

    def noted(self) -> tuple[int, int, int]:
        """Return the batch and the position that are being read, and the state."""
        return self.batch, self.position, self.state


# How messages travel


class Wire:
    """One end of a sequenced-packet socket, on which a killed writer leaves no half message."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.fileno = end.fileno
        # A message comes with five descriptors at most.
        self._ancillary_bytes = socket.CMSG_LEN(5 * array.array("i").itemsize)

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message and open files; large ones travel as an open file themselves.

        Raises:
            BlockingIOError: The receiver has too many unread messages, or the user's processes
                have too many open files on their way to each other (non-blocking ends only).
            OSError: The receiver is gone.
        """
        data = pickle.dumps(encode(message), 5)
        if len(data) <= _LARGE_BYTES:
            self._send([b"m", data], descriptors)
            return
        letter = create_shared_memory(len(data))
        try:
            os.pwrite(letter, data, 0)
            self._send([b"f"], (*descriptors, letter))
        finally:
            os.close(letter)

    def _send(self, parts: list[bytes], descriptors: tuple[int, ...]) -> None:
        while True:
            try:
                if descriptors:
                    socket.send_fds(self.end, parts, list(descriptors))
                else:
                    self.end.sendmsg(parts)
            except OSError as error:
                if error.errno not in _CROWDED:
                    raise
                if not self.end.getblocking():
                    raise BlockingIOError(error.errno, error.strerror) from error
                clock.sleep(_CROWDED_S)  # no event says when there is room
            else:
                return

    def receive(self, *, wait: bool = True) -> tuple[Any, list[int]] | None:
        """Return the next message and its open files; None when the sender is gone.

        It waits for a message if ``wait`` is set and the end is a blocking one.

        Raises:
            BlockingIOError: There is none (without waiting).
            WorkerError: This process may not open the files that came with it.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            # socket.recv_fds takes flags, and ignores them.
            data, attached, flags_out, _ = self.end.recvmsg(65536, self._ancillary_bytes, flags)
        except ConnectionResetError:
            # The sender died with unread messages: this error comes once, before what it had sent.
            return self.receive(wait=wait)
        except ConnectionError:
            return None
        if not data:
            return None
        if flags_out & _CUT_OFF:
            raise WorkerError(_NO_DESCRIPTORS)
        descriptors = [
            number
            for _level, kind, numbers in attached
            if kind == socket.SCM_RIGHTS
            for number in array.array("i", numbers)
        ]
        pickled = data[1:]
        if data[:1] == b"f":
            letter = descriptors.pop()
            pickled = os.pread(letter, os.fstat(letter).st_size, 0)
            os.close(letter)
        return decode(pickle.loads(pickled)), descriptors  # from our own process

    def close(self) -> None:
        """End the connection, also where a process that was forked since holds a copy of it."""
        with contextlib.suppress(OSError):  # the other process has ended it
            self.end.shutdown(socket.SHUT_RDWR)
        self.end.close()


def wire_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new wire, which wait for as long as it takes.

    A program may have set a time limit for all sockets that it makes.
    """
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.settimeout(None)
    return pair


def make_bell() -> int:
    """Return the descriptor of a bell that wakes a process that waits for what is sent to it.

    Linux takes who writes to a socket or a pipe for a process that is about to wait itself, and has
    the reader run on its CPU. But a training goes on: where no CPU was idle, each batch that it
    asked for was made on its own CPU, in its own time. Of an eventfd nothing of the kind is taken.
    """
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def ring(bell: int) -> None:
    """Wake who waits for a bell; who does not wait will find that it was rung."""
    os.eventfd_write(bell, 1)


class TaskQueue:
    """A pipe of tasks. The kernel gives each packet whole to one of the processes that read.

    See ``O_DIRECT`` in pipe(2). Both ends are non-blocking. Processes wait for its bell.

    Raises:
        OSError: The system has no such pipes.
    """

    def __init__(self) -> None:
        import fcntl  # which is not on all systems where this module is imported

        self._bell = make_bell()
        try:
            self.reading, self._writing = os.pipe2(os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            os.close(self._bell)
            raise
        self.read_by = self.reading, self._bell
        """What a process needs to read: the end of the pipe, and the bell."""
        self.descriptors = *self.read_by, self._writing
        # The pages of a user's pipes are limited; the default size holds 16 packets.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.reading, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def put(self, packet: bytes) -> bool:
        """Queue a task; False if the queue is full."""
        try:
            os.write(self._writing, packet)
        except BlockingIOError:
            return False
        ring(self._bell)
        return True

    def numbers(self) -> set[int]:
        """Return the numbers of the tasks that no process has taken yet.

        They are queued anew, which wakes a waiting process for each task that another one left.
        """
        packets = []
        while (packet := read_packet(self.reading)) is not None:
            packets.append(packet)
        return {number_in(packet) for packet in packets if self.put(packet)}

    def close(self) -> None:
        """Close both ends, and the bell."""
        for end in self.descriptors:
            os.close(end)


def make_packet(number: int, request: TaskRequest) -> bytes:
    """Return a task as a packet; one of more than ``select.PIPE_BUF`` bytes fits in no queue."""
    return _NUMBER.pack(number) + pickle.dumps(tuple(request), 5)


def read_packet(reading: int) -> bytes | None:
    """Take a packet, or return None if there is none."""
    try:
        return os.read(reading, select.PIPE_BUF) or None
    except BlockingIOError:
        return None


def number_in(packet: bytes) -> int:
    """Return the number of the task in a packet."""
    return int(_NUMBER.unpack_from(packet)[0])


def request_in(packet: bytes) -> TaskRequest:
    """Return the request in a packet.

    Raises:
        Exception: Whatever unpickling the indices raises.
    """
    return TaskRequest(*pickle.loads(packet[_NUMBER.size :]))  # from our own process

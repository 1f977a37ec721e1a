"""How messages travel: a wire to each side process, and one queue of tasks for all of them.

Either carries a message whole or not at all, however a process ends.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import pickle
import select
import socket
import struct
from typing import Any, Final

from lightning_fastdata.batches.slots import create_shared_memory
from lightning_fastdata.errors import WorkerError
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.protocol import TaskRequest
from lightning_fastdata.host import clock

_PIPE_BYTES: Final = 2**20
"""What an unprivileged process may ask for; each packet takes a page."""
_NUMBER: Final = struct.Struct("<q")
_LARGE_BYTES: Final = 48 * 1024
_CROWDED: Final = (errno.ETOOMANYREFS, errno.ENOBUFS)
"""A user without privileges has no more descriptors in unread messages than ``ulimit -n`` says."""
_CROWDED_S: Final = 0.005
_ANCILLARY_BYTES: Final = socket.CMSG_LEN(4 * array.array("i").itemsize)
"""A message comes with four descriptors at most."""
_CUT_OFF: Final = int(socket.MSG_CTRUNC)  # arithmetic with the flags themselves takes 2 us
_NO_DESCRIPTORS: Final = (
    "A process may not have more open files, and lost those that were sent to it. Raise the limit "
    "(ulimit -n), or use fewer workers or a smaller prefetch_factor."
)


class Wire:
    """One end of a sequenced-packet socket, on which a killed writer leaves no half message."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.fileno = end.fileno

    def send(self, message: protocol.Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message and open files; large ones travel as an open file themselves.

        Raises:
            BlockingIOError: The receiver has too many unread messages, or the user's processes
                have too many open files on their way to each other (non-blocking ends only).
            OSError: The receiver is gone.
        """
        data = pickle.dumps(protocol.encode(message), 5)
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

        Args:
            wait: Wait for one, if the end is a blocking one.

        Raises:
            BlockingIOError: There is none (without waiting).
            WorkerError: This process may not open the files that came with it.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            # socket.recv_fds takes flags, and ignores them.
            data, attached, flags_out, _ = self.end.recvmsg(65536, _ANCILLARY_BYTES, flags)
        except ConnectionResetError:
            # It died with messages unread: an error that comes once, before what it sent itself.
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
        return protocol.decode(pickle.loads(pickled)), descriptors  # from our own process

    def close(self) -> None:
        """End the connection, also where a process that was forked since holds a copy of it."""
        with contextlib.suppress(OSError):  # the other process has ended it
            self.end.shutdown(socket.SHUT_RDWR)
        self.end.close()


def wire_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new wire."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class TaskQueue:
    """A pipe of tasks. The kernel gives each packet whole to one of the processes that read.

    See ``O_DIRECT`` in pipe(2). Both ends are non-blocking.

    Raises:
        OSError: The system has no such pipes.
    """

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe2(os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC)
        self.descriptors = self.reading, self._writing
        # Users may have only so many pages in pipes; the default holds 16 packets.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.reading, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def put(self, packet: bytes) -> bool:
        """Queue a task; False if the queue is full."""
        try:
            os.write(self._writing, packet)
        except BlockingIOError:
            return False
        return True

    def numbers(self) -> set[int]:
        """Return the numbers of the tasks that no process has taken yet.

        They are queued anew, which wakes a waiting process for each that another left.
        """
        packets = []
        while (packet := read_packet(self.reading)) is not None:
            packets.append(packet)
        return {number_in(packet) for packet in packets if self.put(packet)}

    def close(self) -> None:
        """Close both ends."""
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
    """Return the number of a task."""
    return int(_NUMBER.unpack_from(packet)[0])


def request_in(packet: bytes) -> TaskRequest:
    """Return what is to be done.

    Raises:
        Exception: Whatever unpickling the indices raises.
    """
    return TaskRequest(*pickle.loads(packet[_NUMBER.size :]))  # from our own process

"""Tasks that whichever side process is free takes next."""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import struct
from typing import Any, Final

_PIPE_BYTES: Final = 2**20
"""What an unprivileged process may ask for; each packet takes a page."""
_NUMBER: Final = struct.Struct("<q")


class TaskQueue:
    """A pipe of packets. The kernel gives each packet whole to one of the processes that read.

    See ``O_DIRECT`` in pipe(2). Both ends are non-blocking.

    Raises:
        OSError: The system has no such pipes.
    """

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe2(os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.fcntl(self.reading, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            return  # users may have only so many pages in pipes; the default holds 16 packets

    @property
    def descriptors(self) -> tuple[int, int]:
        """Both ends, for a forked child to close."""
        return self.reading, self._writing

    def put(self, packet: bytes) -> bool:
        """Queue a task; False if the queue is full."""
        try:
            os.write(self._writing, packet)
        except BlockingIOError:
            return False
        return True

    def numbers(self) -> set[int]:
        """Return the numbers of the tasks that nobody has taken yet."""
        packets = []
        while (packet := read_packet(self.reading)) is not None:
            packets.append(packet)
        return {_NUMBER.unpack_from(packet)[0] for packet in packets if self.put(packet)}

    def wake_again(self) -> None:
        """Wake those that wait for a task, if one is left by a process that was woken for it."""
        self.numbers()

    def close(self) -> None:
        """Close both ends."""
        for end in self.descriptors:
            os.close(end)


def make_packet(number: int, message: tuple[Any, ...]) -> bytes:
    """Return a task as a packet; one of more than ``select.PIPE_BUF`` bytes fits in no queue."""
    return _NUMBER.pack(number) + pickle.dumps(message, 5)


def read_packet(reading: int) -> bytes | None:
    """Take a packet, or return None if there is none."""
    try:
        return os.read(reading, select.PIPE_BUF) or None
    except BlockingIOError:
        return None


def split_packet(packet: bytes) -> tuple[int, bytes]:
    """Return the number of a task and its pickled message."""
    return _NUMBER.unpack_from(packet)[0], packet[_NUMBER.size :]

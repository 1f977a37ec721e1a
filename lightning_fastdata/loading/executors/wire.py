"""Messages between the training process and one side process: whole or not at all."""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import socket
from typing import Any, Final

from lightning_fastdata.loading.slots import create_shared_memory

_LARGE_BYTES: Final = 48 * 1024
_MAX_DESCRIPTORS: Final = 4
_ANCILLARY_BYTES: Final = socket.CMSG_LEN(_MAX_DESCRIPTORS * array.array("i").itemsize)


class Wire:
    """One end of a sequenced-packet socket, on which a killed writer leaves no half message."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def fileno(self) -> int:
        """Return the descriptor, for poll."""
        return self.end.fileno()

    def send(self, message: tuple[Any, ...], descriptors: tuple[int, ...] = ()) -> None:
        """Send a message and open files; large ones travel as an open file themselves.

        Raises:
            BlockingIOError: The other side has too many unread messages (non-blocking ends only).
            OSError: The other side is gone.
        """
        data = pickle.dumps(message, 5)
        if len(data) <= _LARGE_BYTES:
            socket.send_fds(self.end, [b"m", data], list(descriptors))
            return
        letter = create_shared_memory(len(data))
        try:
            os.pwrite(letter, data, 0)
            socket.send_fds(self.end, [b"f"], [*descriptors, letter])
        finally:
            os.close(letter)

    def receive(self, *, wait: bool = True) -> tuple[tuple[Any, ...], list[int]] | None:
        """Return the next message and its open files; None when the other side is gone.

        Args:
            wait: Wait for one, if the end is a blocking one.

        Raises:
            BlockingIOError: There is none (without waiting).
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            # socket.recv_fds takes flags, and ignores them.
            data, attached, _, _ = self.end.recvmsg(65536, _ANCILLARY_BYTES, flags)
        except ConnectionResetError:
            # It died with messages unread. This is said once, and before what it had sent itself.
            return self.receive(wait=wait)
        except ConnectionError:
            return None
        if not data:
            return None
        descriptors: list[int] = []
        for _level, kind, numbers in attached:
            if kind == socket.SCM_RIGHTS:
                descriptors.extend(array.array("i", numbers))
        if data[:1] == b"f":
            letter = descriptors.pop()
            data = os.pread(letter, os.fstat(letter).st_size, 0)
            os.close(letter)
        else:
            data = data[1:]
        return pickle.loads(data), descriptors  # from our own process

    def close(self) -> None:
        """End the connection, also where a process that was forked since holds a copy of it."""
        with contextlib.suppress(OSError):  # the other side has ended it
            self.end.shutdown(socket.SHUT_RDWR)
        self.end.close()


def wire_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new wire."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

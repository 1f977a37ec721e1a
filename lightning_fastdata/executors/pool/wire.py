"""Messages between the training process and one side process: whole or not at all."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import socket
import time
from typing import Any, Final

from lightning_fastdata.batches.slots import create_shared_memory
from lightning_fastdata.errors import WorkerError

_LARGE_BYTES: Final = 48 * 1024
_MAX_DESCRIPTORS: Final = 4
_CROWDED: Final = (errno.ETOOMANYREFS, errno.ENOBUFS)
"""A user without privileges has no more descriptors in unread messages than ``ulimit -n`` says."""
_CROWDED_S: Final = 0.005
_ANCILLARY_BYTES: Final = socket.CMSG_LEN(_MAX_DESCRIPTORS * array.array("i").itemsize)
_NO_DESCRIPTORS: Final = (
    "A process may not have more open files, and lost those that were sent to it. Raise the limit "
    "(ulimit -n), or use fewer workers or a smaller prefetch_factor."
)


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
            BlockingIOError: The other side has too many unread messages, or the user's processes
                have too many open files on their way to each other (non-blocking ends only).
            OSError: The other side is gone.
        """
        data = pickle.dumps(message, 5)
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
                socket.send_fds(self.end, parts, list(descriptors))
            except OSError as error:
                if error.errno not in _CROWDED:
                    raise
                if not self.end.getblocking():
                    raise BlockingIOError(error.errno, error.strerror) from error
                time.sleep(_CROWDED_S)  # nobody tells when there is room
            else:
                return

    def receive(self, *, wait: bool = True) -> tuple[tuple[Any, ...], list[int]] | None:
        """Return the next message and its open files; None when the other side is gone.

        Args:
            wait: Wait for one, if the end is a blocking one.

        Raises:
            BlockingIOError: There is none (without waiting).
            WorkerError: This process may not open the files that came with it.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            # socket.recv_fds takes flags, and ignores them.
            data, attached, told, _ = self.end.recvmsg(65536, _ANCILLARY_BYTES, flags)
        except ConnectionResetError:
            # It died with messages unread. This is said once, and before what it had sent itself.
            return self.receive(wait=wait)
        except ConnectionError:
            return None
        if not data:
            return None
        if told & socket.MSG_CTRUNC:
            raise WorkerError(_NO_DESCRIPTORS)
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

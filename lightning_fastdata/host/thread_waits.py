"""What another thread of this process waits in at this moment, as the kernel tells."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import stat
from pathlib import Path
from typing import Final, NamedTuple

_OF_DESCRIPTOR, _POLL, _SELECT, _FUTEX, _FILE, _SOCKET, _LOCK, _SLEEP = range(8)

# Numbers of system calls: those that may wait for a device, another process or a clock.
# https://github.com/torvalds/linux/blob/master/arch/x86/entry/syscalls/syscall_64.tbl
_X86_64: Final = {
    _OF_DESCRIPTOR: (0, 1, 17, 18, 19, 20, 295, 296, 327, 328),  # read, write and their kin
    _POLL: (7, 271),
    _SELECT: (23, 270),
    _FUTEX: (202,),
    _FILE: (2, 3, 4, 5, 6, 8, 21, 74, 75, 78, 82, 83, 87, 89, 217, 257, 262, 269, 332),
    _SOCKET: (42, 43, 44, 45, 46, 47, 288, 299, 307),
    _LOCK: (64, 65, 72, 73, 220, 449),  # semop, fcntl, flock, futex_waitv
    _SLEEP: (35, 230),
}
# https://github.com/torvalds/linux/blob/master/include/uapi/asm-generic/unistd.h
_AARCH64: Final = {
    _OF_DESCRIPTOR: (63, 64, 65, 66, 67, 68, 69, 70, 286, 287),
    _POLL: (73,),
    _SELECT: (72,),
    _FUTEX: (98,),
    _FILE: (34, 35, 48, 56, 57, 61, 62, 78, 79, 80, 82, 83, 276, 291),
    _SOCKET: (202, 203, 206, 207, 211, 212, 242, 243, 269),
    _LOCK: (25, 32, 192, 193, 449),
    _SLEEP: (101, 115),
}
_KINDS: Final = {
    number: kind
    for kind, numbers in {"x86_64": _X86_64, "aarch64": _AARCH64}.get(
        platform.machine(), {}
    ).items()
    for number in numbers
}
_NAMES: Final = {_FILE: "file", _SOCKET: "socket", _LOCK: "lock", _SLEEP: "sleep"}


class ThreadState(NamedTuple):
    """Whether a thread waits, and in what."""

    blocked: bool
    """It waits for something other than a CPU or the interpreter's lock."""
    waits_in: str
    """``file`` (or pipe, or a page of a mapped file), ``socket``, ``lock``, ``sleep``; else empty.
    """


_RUNS: Final = ThreadState(False, "")


class ThreadProbe:
    """Tells what one thread of this process waits in.

    Args:
        native_id: Of the thread, as ``threading.get_native_id()`` returns it there.
    """

    def __init__(self, native_id: int) -> None:
        try:
            path = f"/proc/self/task/{native_id}/syscall"
            self._file: int | None = os.open(path, os.O_RDONLY)
        except OSError:
            self._file = None

    def state(self) -> ThreadState | None:
        """Return what the thread does now; None if the kernel does not tell."""
        if self._file is None:
            return None
        try:
            return _state_of(os.pread(self._file, 200, 0).split())
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        """Let go of the kernel's file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _state_of(fields: list[bytes]) -> ThreadState | None:
    # https://docs.kernel.org/filesystems/proc.html, /proc/<pid>/syscall
    if fields[0] == b"running":
        return _RUNS
    number = int(fields[0])
    if number < 0:  # stopped outside of system calls: a page has to be read
        return ThreadState(True, "file")
    kind, first = _KINDS.get(number), int(fields[1], 16)
    if kind == _FUTEX:
        interpreter = _interpreter_addresses()
        if interpreter is None:
            return None
        # The interpreter's own lock, which a thread has to have in order to go on.
        return _RUNS if first in interpreter else ThreadState(True, "lock")
    if kind == _OF_DESCRIPTOR:
        return ThreadState(True, _kind_of_descriptor(first))
    if kind == _POLL:
        return ThreadState(True, _kind_of_descriptor(_polled(first)))
    if kind == _SELECT:
        return ThreadState(True, "" if first else "sleep")
    return ThreadState(True, "" if kind is None else _NAMES[kind])


def _kind_of_descriptor(descriptor: int) -> str:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return ""
    if stat.S_ISSOCK(mode):
        return "socket"
    return "file" if stat.S_IFMT(mode) else ""


def _polled(address: int) -> int:
    """Return the first descriptor that ``poll`` was given; -1 if that cannot be read."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return -1
    try:
        return int.from_bytes(os.pread(memory, 4, address), "little", signed=True)
    except OSError:
        return -1
    finally:
        os.close(memory)


@functools.cache
def _interpreter_addresses() -> range | None:
    """Return where CPython keeps its own locks, apart from those that programs make."""
    try:
        runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
        maps = Path("/proc/self/maps").read_text()
    except (OSError, ValueError, AttributeError):
        return None
    for line in maps.splitlines():
        begin, end = (int(each, 16) for each in line.split(maxsplit=1)[0].split("-"))
        if begin <= runtime < end:
            return range(begin, end)
    return None

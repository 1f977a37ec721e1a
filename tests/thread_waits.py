"""What another thread of this process waits in at this moment, by the kernel's own account."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import stat
from pathlib import Path
from typing import Final, NamedTuple

# Numbers of system calls that may wait for a device, another process or a clock.
# https://github.com/torvalds/linux/blob/master/arch/x86/entry/syscalls/syscall_64.tbl
_X86_64: Final = {
    "descriptor": (0, 1, 17, 18, 19, 20, 295, 296, 327, 328),  # read, write and their kin
    "poll": (7, 271),
    "select": (23, 270),
    "futex": (202,),
    "file": (2, 3, 4, 5, 6, 8, 21, 74, 75, 78, 82, 83, 87, 89, 217, 257, 262, 269, 332),
    "socket": (42, 43, 44, 45, 46, 47, 288, 299, 307),
    "process lock": (64, 65, 72, 73, 220),  # semop, fcntl, flock
    "sleep": (35, 230),
}
# https://github.com/torvalds/linux/blob/master/include/uapi/asm-generic/unistd.h
_AARCH64: Final = {
    "descriptor": (63, 64, 65, 66, 67, 68, 69, 70, 286, 287),
    "poll": (73,),
    "select": (72,),
    "futex": (98,),
    "file": (34, 35, 48, 56, 57, 61, 62, 78, 79, 80, 82, 83, 276, 291),
    "socket": (202, 203, 206, 207, 211, 212, 242, 243, 269),
    "process lock": (25, 32, 192, 193),
    "sleep": (101, 115),
}
_CALLS: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}.get(platform.machine(), {})
_KINDS: Final = {number: kind for kind, numbers in _CALLS.items() for number in numbers}


class ThreadState(NamedTuple):
    """Whether a thread waits, and in what."""

    blocked: bool
    """It waits for something other than a CPU or the interpreter's lock."""
    waits_in: str
    """``file`` (or pipe, or a page of a mapped file), ``socket``, ``lock``, ``process lock`` (of a
    file, or a semaphore of the system), ``sleep``; else empty."""


_RUNS: Final = ThreadState(False, "")


class ThreadProbe:
    """Asks the kernel what one thread of this process waits in."""

    def __init__(self, native_id: int) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(f"/proc/self/task/{native_id}/syscall", os.O_RDONLY)

    def state(self) -> ThreadState | None:
        """Return what the thread does now; None if the kernel does not say."""
        if self._file is None:
            return None
        try:
            return _state_of(os.pread(self._file, 200, 0).split())
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        """Close the kernel's file."""
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
    kind, first = _KINDS.get(number, ""), int(fields[1], 16)
    match kind:
        case "futex":
            interpreter = _interpreter_addresses()
            if interpreter is None:
                return None
            # The interpreter's own lock, which a thread has to have in order to go on.
            return _RUNS if first in interpreter else ThreadState(True, "lock")
        case "descriptor":
            return ThreadState(True, _kind_of_descriptor(first))
        case "poll":
            return ThreadState(True, _kind_of_descriptor(_polled(first)))
        case "select":
            return ThreadState(True, "" if first else "sleep")
    return ThreadState(True, kind)


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
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            return int.from_bytes(os.pread(memory.fileno(), 4, address), "little", signed=True)
    except OSError:
        return -1


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

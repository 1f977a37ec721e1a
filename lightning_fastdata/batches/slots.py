"""Reusable batch memory: written by side processes, viewed by tensors, never overwritten.

A slot is one anonymous file in memory (``memfd_create``): it has no name that could be left over,
its pages are reserved before they are used, and it is gone when the last process that maps it is.
Tensors of a batch view the slot; it is written again only when none of them is alive. If the
process was forked meanwhile, the other one may still view it, and it is not written again.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import warnings
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.host.memory import read_host_memory, read_open_file_limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_PAGE_BYTES: Final = 4096
_HUGE_PAGE_BYTES: Final = 2**21
_LARGE_BYTES: Final = 2**25
_NO_MEMORY: Final = (
    "No memory for a batch of {mib:,.1f} MiB ({why}). Use a smaller batch_size or prefetch_factor, "
    "or give the job more memory."
)
_NO_FILES: Final = (
    "This process has all the {limit} files open that it may have, so that no memory can be shared "
    "with its workers. Raise the limit (ulimit -n {more}), or use fewer workers."
)
_COPIES: Final = (
    "Batches come as copies from now on: {slots} that were kept or are under way take two open "
    "files each, and this process may have {limit}. Raise the limit (ulimit -n {more}) or keep "
    "fewer batches."
)
_forks: Final = [0]
"""How often this process was forked, or was about to be."""
_FEW_FILES: Final = (errno.EMFILE, errno.ENFILE)
_FILES_PER_SLOT: Final = 8
"""Two in the training process, three in a forked worker, and other loaders need some as well."""


def shared_slots_supported() -> bool:
    """Return whether this system has memory files without a name (Linux)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        os.close(os.memfd_create("fastdata"))
    except OSError as error:
        return error.errno in _FEW_FILES  # else it is refused, by a seccomp filter as a rule
    return True


def create_shared_memory(
    size_bytes: int,
    *,
    available_bytes: Callable[[], int] = lambda: read_host_memory().available_bytes,
) -> int:
    """Return the descriptor of an anonymous memory file whose pages are reserved.

    ``available_bytes`` is asked before large reservations, because the kernel answers one that is
    too large by killing processes, not with an error.

    Raises:
        WorkerError: There is not so much memory, or there are too many open files.
    """
    if size_bytes >= _LARGE_BYTES and size_bytes > available_bytes():
        raise WorkerError(_NO_MEMORY.format(mib=size_bytes / 2**20, why="more than is available"))
    descriptor = None
    try:
        descriptor = os.memfd_create("fastdata", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        raise _as_worker_error(error, size_bytes) from error
    return descriptor


def _as_worker_error(error: OSError, size_bytes: int) -> WorkerError:
    limit, _ = read_open_file_limits()
    if error.errno in _FEW_FILES and limit is not None:
        return WorkerError(_NO_FILES.format(limit=limit, more=2 * limit))
    return WorkerError(_NO_MEMORY.format(mib=size_bytes / 2**20, why=error.strerror))


def map_shared_memory(descriptor: int) -> mmap.mmap:
    """Map a memory file for reading and writing.

    Raises:
        WorkerError: There are too many open files, or too many mappings.
    """
    try:
        if sys.version_info >= (3, 13):  # the mapping needs no descriptor of its own
            return _advised(mmap.mmap(descriptor, 0, trackfd=False))
        return _advised(mmap.mmap(descriptor, 0))
    except OSError as error:
        raise _as_worker_error(error, os.fstat(descriptor).st_size) from error


def _private_memory(size_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size_bytes)
    # Without the flag these are pages of a memory file, whose first use costs more.
    return _advised(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE))


def _advised(mapping: mmap.mmap) -> mmap.mmap:
    if len(mapping) >= _HUGE_PAGE_BYTES and sys.platform == "linux":
        with suppress(OSError):  # a kernel built without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


@dataclass(slots=True, eq=False)
class Slot:
    """One piece of batch memory. Made by a pool only."""

    number: int
    descriptor: int | None
    """Of the memory file; None: private memory, or closed."""
    mapping: mmap.mmap
    size_bytes: int
    """Length of the memory."""
    lease: weakref.ref[NDArray[np.uint8]] | None = None
    """The array that was handed out over it."""
    forked: bool = False
    """A process was forked while it was leased, and may view it for as long as it lives."""

    def close(self) -> None:
        """Close the file; what still views the memory has it mapped."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class SlotPool:
    """The slots of one executor; together they take ``limit_bytes`` at most.

    Two slots are granted in any case, since a batch is read while the next is written. They are
    ``shared`` memory that side processes can map, or private memory of this process.
    """

    def __init__(self, *, limit_bytes: int, shared: bool = True) -> None:
        self.limit_bytes = limit_bytes
        self.shared = shared
        self._files = read_open_file_limits()[0] if shared else None
        self._most = sys.maxsize
        if self._files is not None:
            opened = sum(1 for _ in Path("/proc/self/fd").iterdir())
            self._most = max(2, (self._files - opened) // _FILES_PER_SLOT)
        self._warned = False
        self._numbers = 0
        self.size_bytes = 0
        """What the slots take together; kept, as it is asked for several times a batch."""
        self._slots: dict[int, Slot] = {}
        self._free: list[Slot] = []
        self._returned: deque[Slot] = deque()
        self.dropped: deque[int] = deque()
        """Numbers of slots given up since this was last emptied; side processes unmap them."""
        weakref.finalize(self, _close_files, self._slots).atexit = False

    @property
    def free_count(self) -> int:
        """Slots that are neither written nor viewed."""
        self._collect()
        return len(self._free)

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, size_bytes: int) -> Slot | None:
        """Return a slot of at least so many bytes, or None while the bound allows no more."""
        self._collect()
        fitting = [slot for slot in self._free if slot.size_bytes >= size_bytes]
        if fitting:
            # The one used last is still in the processor's cache.
            slot = min(reversed(fitting), key=lambda slot: slot.size_bytes)
            self._free.remove(slot)
            return slot
        unit = _HUGE_PAGE_BYTES if size_bytes > _HUGE_PAGE_BYTES else _PAGE_BYTES
        size_bytes = max(1, -(-size_bytes // unit)) * unit
        while self._free and not self._is_within_bounds(size_bytes):
            self._drop(self._free[0])
        if not self._fits(size_bytes):
            return None
        if self.shared:
            descriptor = create_shared_memory(size_bytes)
            return self._add(descriptor, map_shared_memory(descriptor))
        return self._add(None, _private_memory(size_bytes))

    def adopt(self, descriptor: int) -> Slot:
        """Take over memory that a side process made because its batch fitted into no slot."""
        return self._add(descriptor, map_shared_memory(descriptor))

    def may_grow(self, size_bytes: int) -> bool:
        """Return whether a slot of so many bytes is free or may still be made."""
        self._collect()
        return any(s.size_bytes >= size_bytes for s in self._free) or (
            len(self._slots) < 2 or self._fits(size_bytes)
        )

    def has_to_copy(self, slot: Slot) -> bool:
        """Return whether a batch has to be copied out of its slot, since there are no others.

        So a user who keeps batches gets memory of their own once the slots are used up.
        """
        if self.may_grow(slot.size_bytes):
            return False
        if len(self._slots) >= self._most and not self._warned and self._files is not None:
            self._warned = True
            counts = {"slots": len(self._slots), "limit": self._files, "more": 4 * self._files}
            warnings.warn(_COPIES.format(**counts), FastDataWarning, stacklevel=2)
        return True

    def lease(self, slot: Slot) -> NDArray[np.uint8]:
        """Return the slot's memory, uint8 [size]; the slot is free when no view of it is left."""
        returned, shared, forks = self._returned, self.shared, _forks[0]
        owner = np.frombuffer(slot.mapping, np.uint8)

        def ended(_: object) -> None:
            slot.forked = shared and _forks[0] != forks
            # Deque appends are atomic, and a collected tensor may end its life in any thread.
            returned.append(slot)

        slot.lease = weakref.ref(owner, ended)
        return owner

    def give_back(self, slot: Slot) -> None:
        """Free a slot that was taken and is not leased."""
        self._returned.append(slot)

    def close(self) -> None:
        """Let go of all slots; tensors that view one keep its memory alive."""
        for slot in list(self._slots.values()):
            self._drop(slot)
        self._returned.clear()

    def _fits(self, size_bytes: int) -> bool:
        return len(self._slots) < 2 or self._is_within_bounds(size_bytes)

    def _is_within_bounds(self, size_bytes: int) -> bool:
        return len(self._slots) < self._most and self.size_bytes + size_bytes <= self.limit_bytes

    def _add(self, descriptor: int | None, mapping: mmap.mmap) -> Slot:
        slot = Slot(self._numbers, descriptor, mapping, len(mapping))
        self._numbers += 1
        self.size_bytes += slot.size_bytes
        self._slots[slot.number] = slot
        return slot

    def _drop(self, slot: Slot) -> None:
        del self._slots[slot.number]
        self.size_bytes -= slot.size_bytes
        if slot in self._free:
            self._free.remove(slot)
        if slot.descriptor is not None:
            slot.close()
            self.dropped.append(slot.number)

    def _collect(self) -> None:
        while self._returned:
            self._reuse(self._returned.popleft())

    def _reuse(self, slot: Slot) -> None:
        if slot.number not in self._slots:
            return
        if slot.forked:
            self._drop(slot)
            return
        self._free.append(slot)
        # Sizes that batches have outgrown would otherwise pile up.
        crowded = self.size_bytes > self.limit_bytes or len(self._slots) > self._most
        if crowded and len(self._slots) > 2:
            self._drop(slot)


def _count_fork() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork)


def _close_files(slots: dict[int, Slot]) -> None:
    for slot in slots.values():
        slot.close()

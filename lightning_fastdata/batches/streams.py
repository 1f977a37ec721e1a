"""CUDA streams that move batches ahead, and page-locked memory that they read."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.errors import FastDataWarning

if TYPE_CHECKING:
    import mmap

_PORTABLE: Final = 1
"""``cudaHostRegisterPortable``: page-locked for every device of the process."""
_REFUSED: Final = (
    "The driver did not lock {mib:,.1f} MiB of batch memory: {error} (RLIMIT_MEMLOCK is {limit}). "
    "Batches are copied into page-locked memory instead. Raise the limit (ulimit -l unlimited; "
    "docker run --ulimit memlock=-1)."
)
_in_use: weakref.WeakSet[DeviceStreams] = weakref.WeakSet()


class DeviceStreams:
    """The stream a consumer computes on, and one beside it, of a CUDA device.

    The consumer's stream is the one that is current where :meth:`aside` is not in force.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        _in_use.add(self)

    def aside(self) -> AbstractContextManager[object]:
        """Return a context in which the side stream is the current one."""
        return torch.cuda.stream(self.side)

    def mark(self) -> torch.cuda.Event:
        """Return an event behind all work that the current stream has been given so far."""
        # A host that waits for it sleeps, and leaves its CPU to the workers.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Have the current stream wait for an event; the host does not."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """Have device memory used again only when the current stream is done with it.

        That is, with all work it has been given by the time the tensor, or the batch of a graph
        library, is gone.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.device))


def device_streams(device: torch.device) -> DeviceStreams | None:
    """Return the streams of a device, or None if it has none that could run side by side."""
    return DeviceStreams(device) if device.type == "cuda" else None


class PageLocks:
    """Locks the slots of one loader."""

    def __init__(self, driver: CudaLockDriver) -> None:
        self.driver = driver
        self._refused = False

    def lock(self, mapping: mmap.mmap) -> Locked | None:
        """Lock a mapping for as long as the result lives; None if the driver refuses.

        The first refusal is warned of, and nothing is locked after it.
        """
        if self._refused:
            return None
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        error = self.driver.lock(address, len(mapping))
        if error is None:
            return Locked(self.driver, mapping, address)
        self._refused = True
        mib = len(mapping) / 2**20
        message = _REFUSED.format(mib=mib, error=error, limit=_memlock_limit())
        warnings.warn(message, FastDataWarning, stacklevel=2)
        return None

    def fence(self) -> Fence:
        """Return what has passed when all copies that were begun by now are done."""
        return Fence(self.driver.marks())


class Fence:
    """A point in the work of several streams."""

    __slots__ = ("_events",)

    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self._events = list(events)

    def passed(self) -> bool:
        """Return whether all streams have passed it. Never blocks."""
        while self._events and self._events[-1].query():  # type: ignore[no-untyped-call]
            self._events.pop()
        return not self._events


class Locked:
    """Locked memory; unlocked, and only then unmapped, when nothing refers to this any more."""

    def __init__(self, driver: CudaLockDriver, mapping: mmap.mmap, address: int) -> None:
        weakref.finalize(self, _unlock, driver, mapping, address, os.getpid())


def _unlock(driver: CudaLockDriver, _mapping: mmap.mmap, address: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has none of its parent's locks
        driver.unlock(address)


class CudaLockDriver:
    """``cudaHostRegister``, and the streams of a CUDA device.

    Copies are expected on the stream that was current when the batch was delivered, and on the side
    streams of this package. ``runtime`` has the functions of CUDA's; default: torch's.
    """

    def __init__(self, device: torch.device, runtime: Any = None) -> None:
        self.device = device
        self._runtime = torch.cuda.cudart() if runtime is None else runtime  # type: ignore[no-untyped-call]
        self._consumers: dict[int, torch.cuda.Stream] = {}

    def lock(self, address: int, size_bytes: int) -> str | None:
        """Register memory with CUDA; return None, or CUDA's error."""
        result = self._runtime.cudaHostRegister(address, size_bytes, _PORTABLE)
        if int(result) == 0:
            return None
        # CUDA keeps the error for the next caller: the first kernel to be launched.
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device).add_(1)
        return str(self._runtime.cudaGetErrorString(result))

    def unlock(self, address: int) -> None:
        """Wait until the device reads no locked memory, and unregister this."""
        with suppress(RuntimeError):  # a device that has failed reads nothing
            torch.cuda.synchronize(self.device)
            self._runtime.cudaHostUnregister(address)

    def note_consumer(self) -> None:
        """Remember the current stream as one that may copy what is delivered now."""
        stream = torch.cuda.current_stream(self.device)
        self._consumers.setdefault(stream.cuda_stream, stream)

    def marks(self) -> Sequence[torch.cuda.Event]:
        """Return events behind all work of every stream that may copy."""
        sides = [streams.side for streams in _in_use if streams.side.device == self.device]
        events = []
        for stream in (*self._consumers.values(), *sides):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            events.append(event)
        return events


def cuda_page_locks(device: str | None) -> PageLocks | None:
    """Return what locks pages for copies to a device; None if it is no CUDA device."""
    if device is None or torch.device(device).type != "cuda":
        return None
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    return PageLocks(CudaLockDriver(torch.device("cuda", index)))


def _memlock_limit() -> str:
    """Return how much memory this process may lock, as text."""
    try:
        import resource
    except ImportError:  # Windows
        return "unknown"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:,.3g} MiB"

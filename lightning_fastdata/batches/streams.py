"""The few calls of a device's streams that moving batches ahead needs."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch


class StreamEvent(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Return whether the device has passed it. Never blocks."""

    def synchronize(self) -> object:
        """Block the host until the device has passed it."""


class DeviceStreams(Protocol):
    """The stream a consumer computes on, and one beside it.

    The consumer's stream is the one that is current where :meth:`aside` is not in force.
    """

    def aside(self) -> AbstractContextManager[Any]:
        """Return a context in which the side stream is the current one."""

    def mark(self) -> StreamEvent:
        """Return an event behind all work that the current stream has been given so far."""

    def wait(self, event: StreamEvent) -> None:
        """Have the current stream wait for an event; the host does not."""

    def keep(self, tensor: Any) -> None:
        """Have the memory of a tensor used again only when the current stream is done with it.

        That is, with all work it has been given by the time the tensor is gone.
        """


_in_use: weakref.WeakSet[CudaStreams] = weakref.WeakSet()


class CudaStreams:
    """Streams of a CUDA device.

    Args:
        device: The device, with or without an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        _in_use.add(self)

    def aside(self) -> AbstractContextManager[Any]:
        """Return a context in which the side stream is the current one."""
        return torch.cuda.stream(self.side)

    def mark(self) -> StreamEvent:
        """Return an event behind all work that the current stream has been given so far."""
        # A host that waits for it sleeps, and leaves its CPU to the workers.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: StreamEvent) -> None:
        """Have the current stream wait for an event."""
        torch.cuda.current_stream(self.device).wait_event(cast("torch.cuda.Event", event))

    def keep(self, tensor: Any) -> None:
        """Call ``record_stream`` on what lies on a CUDA device."""
        if not isinstance(tensor, torch.Tensor) or tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.device))


def device_streams(device: torch.device) -> DeviceStreams | None:
    """Return the streams of a device, or None if it has none that could run side by side."""
    return CudaStreams(device) if device.type == "cuda" else None


def side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Return the side streams that are in use on a CUDA device."""
    return [streams.side for streams in _in_use if streams.side.device == device]

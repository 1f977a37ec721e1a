"""CUDA streams that move batches ahead."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class DeviceStreams:
    """The stream a consumer computes on, and one beside it, of a CUDA device.

    The consumer's stream is the one that is current where :meth:`aside` is not in force.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

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

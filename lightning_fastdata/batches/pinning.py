"""Batches that a thread copies into page-locked memory while the training goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch

from lightning_fastdata.device.backend import current_index, is_out_of_memory, set_current_index
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.host import clock
from lightning_fastdata.torch_internals import pinned

if TYPE_CHECKING:
    from lightning_fastdata.types import Batch


class Pinned(NamedTuple):
    """A batch in page-locked memory."""

    batch: Batch
    began_ns: int
    ended_ns: int


class PinThread:
    """Copies batches into page-locked memory in one thread, one after the other.

    The thread begins with the first batch, when workers were forked, and ends when this is gone.

    Args:
        device: The accelerator that will read them.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        # As torch's thread does: more threads would take the CPUs of the workers.
        self._threads = ThreadPoolExecutor(1, "fastdata pin", torch.set_num_threads, (1,))

    def pin(self, whole: Callable[[], Batch]) -> Future[Pinned]:
        """Begin to copy what a function returns, and go on without waiting for it."""
        index = current_index()
        return self._threads.submit(_pinned, whole, self._device, index)


def _pinned(whole: Callable[[], Batch], device: str, index: int) -> Pinned:
    # A thread begins with the first device, and would make a context there in each rank.
    set_current_index(index)
    batch, began_ns = whole(), clock.monotonic_ns()
    return Pinned(pinned_if_room(batch, device), began_ns, clock.monotonic_ns())


def pinned_if_room(batch: Batch, device: str) -> Batch:
    """Return a copy of a batch in page-locked memory, or the batch itself if there is none left."""
    try:
        return pinned(batch, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
    warnings.warn(
        f"There was no page-locked memory for a batch ({said}), which comes in ordinary memory. "
        "Its copy to the device takes longer. Take smaller batches, or fewer ahead "
        "(prefetch_factor).",
        FastDataWarning,
        stacklevel=2,
    )
    return batch

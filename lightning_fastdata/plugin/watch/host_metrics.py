"""Reads what the training takes of its machine, now and then, and never for long."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from lightning_fastdata.host.usage import (
    read_device_usage,
    read_host_usage,
    read_memory_together,
    worker_processes,
)
from lightning_fastdata.insight.measure.host_metrics import (
    device_scalars,
    host_evidence,
    host_scalars,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_REST: Final = 1000
"""A reading that took a second is made again after so many: a thousandth of the time is spent."""


class HostMeter:
    """The machine's side of one training, from its construction on.

    Args:
        device: What computes.
        busy_share: Return the part of the time in which the workers had a task, 0 to 1, or None.
        clock_s: Monotonic time in seconds.
        workers: Return the process numbers of the workers.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        busy_share: Callable[[], float | None] = lambda: None,
        clock_s: Callable[[], float] = time.monotonic,
        workers: Callable[[], list[int]] = worker_processes,
    ) -> None:
        self._device = device
        self._busy_share = busy_share
        self._clock_s = clock_s
        self._workers = workers
        self._began = self._last = self._newest = read_host_usage(workers(), at_s=clock_s())
        self._device_began = self._device_newest = read_device_usage(device)
        self._due_s = self._memory_due_s = clock_s()

    def metrics(self, *, memory: bool = True) -> dict[str, float]:
        """Return the scalars since the last call that returned some; empty if that is too recent.

        What is expensive to read is read more rarely still.

        Args:
            memory: Add up the memory of this process and its workers, too.
        """
        began_s = self._clock_s()
        if began_s < self._due_s:
            return {}
        self._read()
        scalars = host_scalars(self._last, self._newest)
        scalars |= device_scalars(self._device_began, self._device_newest)
        self._last = self._newest
        busy = self._busy_share()
        if busy is not None:
            scalars["data_workers/busy_percent"] = 100 * busy
        ended_s = self._clock_s()
        self._due_s = ended_s + _REST * (ended_s - began_s)
        if memory and ended_s >= self._memory_due_s:
            together = read_memory_together(self._workers())
            if together is not None:
                scalars["data_host/pss_mib"] = together / 2**20
            spent_s = self._clock_s() - ended_s
            self._memory_due_s = ended_s + _REST * spent_s
        return scalars

    def evidence(self) -> dict[str, float]:
        """Return the fields of ``Evidence`` that the machine tells, of the whole training so far.

        Of the newest reading, if there was one since the begin; otherwise a reading is made.
        """
        if self._newest is self._began:
            self._read()
        return host_evidence(self._began, self._newest, self._device_began, self._device_newest)

    def _read(self) -> None:
        self._newest = read_host_usage(self._workers(), at_s=self._clock_s())
        self._device_newest = read_device_usage(self._device)

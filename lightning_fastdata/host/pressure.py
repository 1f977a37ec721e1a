"""What the machine runs short of while a training goes on."""

from __future__ import annotations

from typing import Final, NamedTuple

from lightning_fastdata.host.cpu import CpuThrottling, read_cpu_throttling
from lightning_fastdata.host.memory import read_host_memory

_SHORT_BYTES: Final = 512 * 2**20
"""Memory is short where no more than this is left."""
_THROTTLED: Final = 0.2
"""Of the scheduler's periods: workers had to stop so often because the quota was used up."""


class Pressure(NamedTuple):
    """What the machine has no more of."""

    memory: bool = False
    throttled: bool = False


class PressureReader:
    """Compares what the machine has left with the last time it was asked."""

    def __init__(self) -> None:
        self._last: CpuThrottling | None = None

    def __call__(self) -> Pressure:
        """Return what is short now."""
        last, now = self._last, read_cpu_throttling()
        self._last = now
        throttled = False
        if last is not None and now is not None:
            held = now.throttled_periods - last.throttled_periods
            throttled = held > _THROTTLED * (now.periods - last.periods)
        return Pressure(read_host_memory().available_bytes < _SHORT_BYTES, throttled)

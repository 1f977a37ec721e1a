"""What the calling process has used of the CPUs, over intervals that have breaks."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentTime:
    """Time of one process, its children left out."""

    wall_s: float = 0.0
    """Seconds that passed."""
    cpu_s: float = 0.0
    """CPU seconds of all its threads."""
    runqueue_s: float = 0.0
    """Seconds in which the thread that reads this was ready to run, but had no CPU. 0 where the
    kernel does not tell."""

    def __add__(self, other: SpentTime) -> SpentTime:
        return SpentTime(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def __sub__(self, other: SpentTime) -> SpentTime:
        return SpentTime(
            **{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)}
        )


def queued_s(schedstat: Path = _SCHEDSTAT) -> float:
    """Return the seconds this thread was ready to run and had no CPU; 0 where it is not counted.

    The second number of https://docs.kernel.org/scheduler/sched-stats.html, in nanoseconds.
    """
    try:
        return int(schedstat.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def read_spent(schedstat: Path = _SCHEDSTAT) -> SpentTime:
    """Return what the process has used since some moment in the past: compare two readings."""
    return SpentTime(
        wall_s=time.monotonic(), cpu_s=time.process_time(), runqueue_s=queued_s(schedstat)
    )


class SpentMeter:
    """Adds up what is used between each begin and the pause that follows.

    Args:
        read: The reading of two moments that are compared.
    """

    def __init__(self, read: Callable[[], SpentTime] = read_spent) -> None:
        self._read = read
        self._total = SpentTime()
        self._began: SpentTime | None = None

    def began(self) -> None:
        """Measure from now on, if it is not measured already."""
        if self._began is None:
            self._began = self._read()

    def paused(self) -> None:
        """Do not measure until it begins again."""
        self._total, self._began = self.used(), None

    def used(self) -> SpentTime:
        """Return what was used so far."""
        if self._began is None:
            return self._total
        return self._total + (self._read() - self._began)

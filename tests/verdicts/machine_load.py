"""What other processes took of the CPUs while something was measured.

A condition on a measurement, to be looked at before its outcome: a run beside busy neighbours says
something of the neighbours.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

MOST_OTHERS = 0.15
"""Of one CPU, what other processes may take on average while a run is measured."""
MOST_TRIES = 3
"""A run that was disturbed is repeated twice; the least disturbed one counts."""

_BUSY = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq and steal of the first line of /proc/stat, see proc(5)."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """Seconds since some moment in the past."""

    wall_s: float
    all_s: float | None
    """Of all processes on all CPUs; None where the system does not tell."""
    own_s: float
    """Of this process and of those of its children that have ended and were waited for."""


def read_cpus(stat: Path = Path("/proc/stat")) -> CpuReading:
    """Return what was used of the CPUs so far."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    try:
        ticks = stat.read_text().split("\n", 1)[0].split()[1:]
        all_s = sum(int(ticks[i]) for i in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        all_s = None
    return CpuReading(
        wall_s=time.monotonic(), all_s=all_s, own_s=sum(u.ru_utime + u.ru_stime for u in own)
    )


def others_cpus(before: CpuReading, after: CpuReading) -> float:
    """Return how many CPUs others used between two readings; 0 where that is not known."""
    if before.all_s is None or after.all_s is None:
        return 0.0
    others_s = after.all_s - before.all_s - (after.own_s - before.own_s)
    return max(0.0, others_s / max(1e-3, after.wall_s - before.wall_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed(Generic[Result]):
    """A result, and how it was come by."""

    result: Result
    others_cpus: float
    """CPUs that others used meanwhile."""
    tries: int
    """How often it was measured; the earlier ones were disturbed."""

    @property
    def quiet(self) -> bool:
        """Others took no more than is allowed for."""
        return self.others_cpus <= MOST_OTHERS


def undisturbed(
    measure: Callable[[], Result], *, tries: int = MOST_TRIES, most_others: float = MOST_OTHERS
) -> Undisturbed[Result]:
    """Measure, again if others took more than so many CPUs; the outcome is not looked at.

    Every child that the measurement starts has to be waited for within it.
    """
    least: Undisturbed[Result] | None = None
    for number in range(1, tries + 1):
        before = read_cpus()
        result = measure()
        others = others_cpus(before, read_cpus())
        if least is None or others < least.others_cpus:
            least = Undisturbed(result=result, others_cpus=others, tries=number)
        if least.others_cpus <= most_others:
            break
    assert least is not None
    return Undisturbed(result=least.result, others_cpus=least.others_cpus, tries=number)

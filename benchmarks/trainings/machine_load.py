"""What other processes took of the CPUs while something was measured.

A condition on a measurement, to be looked at before its outcome: a run beside busy neighbours says
something of the neighbours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_fastdata.host.cpu import CpuUse, read_cpu_use

MOST_OTHERS = 0.15
"""Of one CPU, what other processes may take on average while a run is measured."""
MOST_TRIES = 3
"""A run that was disturbed is repeated twice; the least disturbed one counts."""

Result = TypeVar("Result")


def _read() -> tuple[float, CpuUse | None]:
    return time.monotonic(), read_cpu_use([os.getpid()])


def _others_cpus(before: tuple[float, CpuUse | None], after: tuple[float, CpuUse | None]) -> float:
    """Return how many CPUs others used between two readings; 0 where that is not known."""
    (began_s, first), (ended_s, last) = before, after
    if first is None or last is None:
        return 0.0
    others_s = last.all_s - first.all_s - (last.own_s - first.own_s)
    return max(0.0, others_s / max(1e-3, ended_s - began_s))


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
        before = _read()
        result = measure()
        others = _others_cpus(before, _read())
        if least is None or others < least.others_cpus:
            least = Undisturbed(result=result, others_cpus=others, tries=number)
        if least.others_cpus <= most_others:
            break
    assert least is not None
    return Undisturbed(result=least.result, others_cpus=least.others_cpus, tries=number)

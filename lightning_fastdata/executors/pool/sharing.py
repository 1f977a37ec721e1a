"""Whether a training computes on the CPUs that its workers need, in which case they read otherwise.

Workers that are as far ahead as they may be get one batch to make in each step. If all of them
share it out as a step begins, they take the CPUs from the training process for a while, and for the
rest of the step CPUs are idle. So where the CPUs are shared, a worker makes a batch of its own, as
those of torch's ``DataLoader`` do. CPUs are also idle while the last batches of an epoch are used,
which were made ahead. So fewer are made ahead as an epoch ends.
"""

from __future__ import annotations

import math
from typing import Final

from lightning_fastdata.host import clock

_COMPUTES: Final = 0.5
"""Least number of CPUs that a training process uses if it is slowed down by workers and never waits
for them: beside two workers on two CPUs it gets two thirds of one, and else more."""
_MOST_COMPUTING: Final = 2
"""Most workers for each CPU; more are for samples that wait, and do not keep the CPUs busy."""
_FEWEST_STEPS: Final = 4
"""Number of steps after which it is known what a step takes."""
_REMEMBERED: Final = 8
"""Number of steps over which times are averaged."""
_LONG: Final = 3
"""Ratio to the usual step to which longer ones are cut: the training may validate in between."""


class TrainingLoad:
    """Measures the steps of a training, and the CPU time of its process in them.

    ``cpus``: CPUs that it shares with its workers; infinite: none, and nothing is measured.
    """

    def __init__(self, cpus: float) -> None:
        self._cpus = cpus
        self._steps = 0
        self._delivered: tuple[int, int] | None = None
        """When the last batch was delivered, and the CPU time of the process by then."""
        self.step_ns = 0.0
        """Usual time of a step, from one delivery to the next; 0: none was measured."""
        self._used_ns = 0.0
        """Usual CPU time of the training process in a step."""

    def competes(self, workers: int) -> bool:
        """Return whether the training process and so many workers want more CPUs than there are."""
        if self._steps < _FEWEST_STEPS or workers > _MOST_COMPUTING * self._cpus:
            return False
        used_ns, step_ns = self._used_ns, self.step_ns
        return used_ns >= _COMPUTES * step_ns and used_ns + workers * step_ns > self._cpus * step_ns

    def epoch_began(self) -> None:
        """Leave out the time since the last delivery."""
        self._delivered = None

    def delivered(self) -> None:
        """Note that a batch is delivered now, which ends a step and begins the next."""
        if math.isinf(self._cpus):
            return
        now_ns, cpu_ns = clock.monotonic_ns(), clock.process_time_ns()
        if self._delivered is not None:
            step_ns, used_ns = now_ns - self._delivered[0], cpu_ns - self._delivered[1]
            part = min(1.0, _LONG * self.step_ns / step_ns) if self._steps and step_ns else 1.0
            self._steps += 1
            weight = 1 / min(self._steps, _REMEMBERED)
            self.step_ns += weight * (part * step_ns - self.step_ns)
            self._used_ns += weight * (part * used_ns - self._used_ns)
        self._delivered = now_ns, cpu_ns

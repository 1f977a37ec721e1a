"""What steps take, and what their batches cost: measured where they are taken."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from lightning_fastdata.host import clock
from lightning_fastdata.tuning.simulate import BatchCost
from lightning_fastdata.tuning.moves import Window, window_of, without_pauses
from lightning_fastdata.tuning.simulate import TrainingTimes, batch_costs, by_epoch

if TYPE_CHECKING:
    from lightning_fastdata.stamps.batch_stamps import BatchStamps

_MOST_STAMPS: Final = 100
_PAUSE: Final = 5.0
"""A step so many times as long as usual is a pause, in which batches were made ahead."""
_REMEMBERED: Final = 16
"""Steps over which it is averaged what is usual."""


class StepWatch:
    """Takes the times of steps, and what their batches cost the process that takes them."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self.stamps: deque[BatchStamps] = deque(maxlen=_MOST_STAMPS)
        self._clock_ns = clock_ns
        self._waits: list[int] = []
        self._owns: list[int] = []
        self._measures = False
        self._schedule: clock.ThreadSchedule | None = None
        self._thread = 0
        self._queued_ns = self._cpu_ns = 0
        """In steps, from delivery to request: queued for a CPU, and CPU time of the process."""
        self._usual_ns = 0.0
        """A typical time from delivery to the next request."""
        self._requested_ns = self._delivered_ns = 0
        self._at_delivery = (0, 0)
        self._wait_ns: int | None = None
        """Of the batch that was delivered last; None: it does not count."""

    @property
    def steps(self) -> int:
        """Steps that were timed."""
        return len(self._waits)

    def clear(self, *, costs: bool) -> None:
        """Forget all steps, and measure from now on what batches cost, or no longer."""
        self._waits.clear()
        self._owns.clear()
        self._queued_ns = self._cpu_ns = 0
        self.stamps.clear()
        self._measures = costs
        self._wait_ns = None

    def epoch_began(self) -> None:
        """Leave out the time until the first batch is asked for."""
        self._wait_ns = None

    def requested(self) -> bool:
        """Note that a batch is asked for now, with which the last step ends.

        Returns:
            Whether the training has paused, for a validation, a checkpoint or the like.
        """
        now_ns, scheduled = self._clock_ns(), self._read()
        own_ns = now_ns - self._delivered_ns if self._delivered_ns else 0
        usual_ns = self._usual_ns or own_ns
        paused = own_ns > _PAUSE * usual_ns
        self._usual_ns = usual_ns + (min(own_ns, 2 * usual_ns) - usual_ns) / _REMEMBERED
        if self._wait_ns is not None and not paused:
            self._waits.append(self._wait_ns)
            self._owns.append(own_ns)
            self._queued_ns += scheduled[0] - self._at_delivery[0]
            self._cpu_ns += scheduled[1] - self._at_delivery[1]
        self._requested_ns = now_ns
        return paused

    def delivered(self, *, counts: bool) -> None:
        """Note that the batch was delivered, which counts or not."""
        self._at_delivery, self._delivered_ns = self._read(), self._clock_ns()
        self._wait_ns = self._delivered_ns - self._requested_ns if counts else None

    def window(self) -> Window:
        """Return the means of the steps."""
        return window_of(self._waits, self._owns)

    def costs(self) -> tuple[float, list[BatchCost]]:
        """Return the CPUs that a step uses, and what the batches cost."""
        times = TrainingTimes(
            cpu_s=self._cpu_ns / 1e9,
            wall_s=sum(self._owns) / 1e9,
            waited_s=0.0,
            runqueue_s=self._queued_ns / 1e9,
        )
        costs = [
            cost
            for epoch in by_epoch(self.stamps)
            for cost in batch_costs(epoch, step_queued=times.step_queued)
        ]
        return times.step_cpus, without_pauses(costs) if costs else []

    def _read(self) -> tuple[int, int]:
        """Return nanoseconds that this thread was queued for a CPU, and of all threads on CPUs."""
        if not self._measures:
            return 0, 0
        thread = threading.get_native_id()
        if self._schedule is None or thread != self._thread:  # the file is of its thread
            self._thread, self._schedule = thread, clock.ThreadSchedule()
        return (self._schedule.read_ns() or (0, 0))[1], clock.process_time_ns()

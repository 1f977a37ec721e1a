"""What steps take, and what their batches cost: measured where they are taken."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from lightning_fastdata.stamps.batch_stamps import ThreadSchedule
from lightning_fastdata.tuning.events import BatchCost
from lightning_fastdata.tuning.moves import Window, window_of, without_pauses
from lightning_fastdata.tuning.simulate import batch_costs

if TYPE_CHECKING:
    from lightning_fastdata.stamps.batch_stamps import BatchStamps

_MOST_STAMPS: Final = 100
_PAUSE: Final = 5.0
"""A step so many times as long as usual is a pause, in which batches were made ahead."""
_REMEMBERED: Final = 16
"""Steps over which it is averaged what is usual."""
_ONE_THREAD: Final = 1.1
"""CPUs: up to there, taking batches explains what is above one."""
_HANDING_OVER_NS, _HANDING_A_ROW_NS = 170_000.0, 1_600.0
"""CPU time of giving out and taking in a batch, where none was measured; the constants of
``planning/worker_count.py``."""


class StepWatch:
    """Takes the times of steps, and what their batches cost the process that takes them."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self.stamps: deque[BatchStamps] = deque(maxlen=_MOST_STAMPS)
        self.rows = 1
        """Samples in a batch."""
        self._clock_ns = clock_ns
        self._waits: list[int] = []
        self._owns: list[int] = []
        self._measures = False
        self._schedule: ThreadSchedule | None = None
        self._thread = 0
        self._made: list[tuple[int, int, int, int]] = []
        """Of each batch: nanoseconds on a CPU, and queued for one; queued in the step after it, and
        CPU time of the process in it."""
        self._usual_ns = 0.0
        """A typical time from delivery to the next request."""
        self._requested_ns = self._delivered_ns = 0
        self._at_request = self._at_delivery = (0, 0, 0)
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
        self._made.clear()
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
            if self._measures:
                began, ended = self._at_request, self._at_delivery
                queued_ns, own_cpu_ns = ended[1] - began[1], scheduled[2] - ended[2]
                made = ended[0] - began[0], queued_ns, scheduled[1] - ended[1], own_cpu_ns
                self._made.append(made)
        self._requested_ns, self._at_request = now_ns, scheduled
        return paused

    def delivered(self, *, counts: bool) -> None:
        """Note that the batch was delivered, which counts or not."""
        self._at_delivery, self._delivered_ns = self._read(), self._clock_ns()
        self._wait_ns = self._delivered_ns - self._requested_ns if counts else None

    def window(self) -> Window:
        """Return the means of the steps."""
        return window_of(self._waits, self._owns)

    def costs(self, *, inline: bool) -> tuple[float, list[BatchCost]]:
        """Return the CPUs that a step uses, and what the batches cost.

        ``inline``: the training process made them.
        """
        own_ns = max(1, sum(self._owns))
        queued = sum(later for _, _, later, _ in self._made) / own_ns
        step_cpus = sum(used for *_, used in self._made) / own_ns
        step_cpus = min(1.0, step_cpus) if step_cpus <= _ONE_THREAD else step_cpus
        if inline:
            return step_cpus, without_pauses(list(self._inline_costs()))
        step_queued = min(1.0, max(0.0, queued)) * min(1.0, step_cpus)
        epochs: list[list[BatchStamps]] = []
        for batch in self.stamps:
            if batch.first or not epochs:
                epochs.append([])
            epochs[-1].append(batch)
        costs = [cost for each in epochs for cost in batch_costs(each, step_queued=step_queued)]
        return step_cpus, without_pauses(costs) if costs else []

    def _inline_costs(self) -> Iterator[BatchCost]:
        handing = _HANDING_OVER_NS + self.rows * _HANDING_A_ROW_NS
        for wait, own, (cpu, queued, *_) in zip(self._waits, self._owns, self._made, strict=False):
            blocked = max(0, wait - cpu - queued)
            yield BatchCost(
                samples=self.rows,
                cpu_ns=cpu,
                blocked_ns=blocked,
                collate_ns=0.0,
                slowest_ns=(cpu + blocked) / self.rows,
                handover_ns=handing,
                taking_ns=handing,
                step_ns=own,
                task_ns=handing,
            )

    def _read(self) -> tuple[int, int, int]:
        """Return nanoseconds of this thread on a CPU and queued for one, and of all on CPUs."""
        if not self._measures:
            return 0, 0, 0
        thread = threading.get_native_id()
        if self._schedule is None or thread != self._thread:  # the file is of its thread
            self._thread, self._schedule = thread, ThreadSchedule()
        return *(self._schedule.read_ns() or (0, 0)), time.process_time_ns()

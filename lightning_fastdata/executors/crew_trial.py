"""A short trial with half of the workers, which shows whether the other half reads any faster.

What workers wait for may be there for each of them, as the latency of a network is, or be shared by
all, as a lock or a full line is. With all of them at work all the time, both look the same. So once
in a run, while batches are waited for anyway, only half of them are given tasks for a moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from lightning_fastdata.host import clock
from lightning_fastdata.stamps.batch_stamps import ReadRates, TaskStamps

_ROUNDS: Final = 3
"""Tasks that each of the workers in the trial does."""
_KEPT: Final = 6
"""Tasks of each worker before the trial that it is compared with."""
_MOST_OF_RUN: Final = 0.03
"""Part of the time so far that a trial may cost; it is made once, so that most runs lose less."""
_REQUESTS: Final = 16
_LATE: Final = 12
"""Of the newest 16 batches, so many have to be late: else the training sets the pace."""
_BLOCKED: Final = 0.3
"""Part of the time to read: where workers wait for less, nothing that is shared costs much."""


class CrewTrial:
    """Says how many tasks may be under way, and compares what is read with all and with half."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.limit: int | None = None
        """Tasks that may be under way; None: as many as there are."""
        self._began_ns: int | None = None
        self._late: deque[bool] = deque(maxlen=_REQUESTS)
        self._with_all: deque[TaskStamps] = deque(maxlen=_KEPT * workers)
        self._with_half: list[TaskStamps] = []
        self._since_ns: int | None = None
        self._over = workers < 2

    def with_workers(self, workers: int) -> CrewTrial:
        """Return the trial of as many workers; none if it was made already."""
        other = CrewTrial(workers)
        other._over = other._over or (self._over and self.workers > 1)
        return other

    def delivered(self, *, late: bool) -> None:
        """Note a batch that was delivered, and begin the trial if it is time for it."""
        if self._over or self.limit is not None:
            return
        if self._began_ns is None:
            self._began_ns = clock.monotonic_ns()
        self._late.append(late)
        if sum(self._late) >= _LATE and self._is_worth_it(self._began_ns):
            self.limit = self.workers // 2

    def answered(self, task: TaskStamps | None, under_way: int) -> ReadRates | None:
        """Note a task that has ended, beside those still under way; return what a trial found."""
        if self._over or task is None or not task.samples:
            return None
        if self.limit is None:
            self._with_all.append(task)
            return None
        if self._since_ns is None:
            if under_way < self.limit:  # those given before the trial have ended
                self._since_ns = clock.monotonic_ns()
            return None
        if task.began_ns >= self._since_ns:
            self._with_half.append(task)
        if len(self._with_half) < _ROUNDS * self.limit:
            return None
        half, before = self._with_half, list(self._with_all)
        # Between two tasks of the trial a worker may wait for the training to give it the next.
        busy_ns = _length_ns(half) // self.limit
        # With all at work, those that a lock leaves waiting longest have not ended yet.
        span_ns = before[-1].ended_ns - before[0].ended_ns
        rates = ReadRates(
            self.limit, _per_s(half, busy_ns), self.workers, _per_s(before[1:], span_ns)
        )
        self._over, self.limit = True, None
        return rates

    def given_up(self) -> None:
        """End a trial that is under way: another epoch begins, or no more stamps are taken."""
        self.limit = self._since_ns = None
        self._with_half.clear()
        self._late.clear()

    def _is_worth_it(self, began_ns: int) -> bool:
        """Return whether workers wait in reading, and a trial costs little of the run so far."""
        timed = [task for task in self._with_all if task.cpu_ns is not None]
        length = _length_ns(timed)
        busy = sum((task.cpu_ns or 0) + (task.runqueue_ns or 0) for task in timed)
        full = len(self._with_all) == self._with_all.maxlen
        if not (full and length > 0 and 1 - busy / length >= _BLOCKED):
            return False
        each_ns = _length_ns(self._with_all) / len(self._with_all)
        lost_ns = (_ROUNDS + 0.5) * each_ns * (1 - (self.workers // 2) / self.workers)
        return lost_ns <= _MOST_OF_RUN * (clock.monotonic_ns() - began_ns)


def _length_ns(tasks: Iterable[TaskStamps]) -> int:
    return sum(task.ended_ns - task.began_ns for task in tasks)


def _per_s(tasks: Sequence[TaskStamps], span_ns: int) -> float:
    """Return the samples a second read in a span, had there been a CPU whenever it was wanted."""
    queued = sum(task.runqueue_ns or 0 for task in tasks)
    samples = sum(task.samples for task in tasks)
    return samples / max(1e-9, span_ns * (1 - queued / max(1, _length_ns(tasks)))) * 1e9

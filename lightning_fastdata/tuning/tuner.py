"""Watches the batches of a loader while it is read, and changes its workers where that pays.

It measures a few dozen steps, asks the model (:mod:`.simulate`) for a better number of workers,
changes it, and compares the steps that follow with those before. What did not pay is taken back. In
between it looks at two times a step, the wait and the rest, and measures again when these change.
Steps, and what their batches cost, are measured where they are taken.
"""

from __future__ import annotations

import logging
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from lightning_fastdata.errors import WorkerError
from lightning_fastdata.host import clock
from lightning_fastdata.host.machine import Pressure, PressureReader
from lightning_fastdata.stamps.batch_stamps import BatchStamps
from lightning_fastdata.tuning.moves import (
    ALL_NUMBERS,
    LITTLE,
    Move,
    Outcome,
    Proposal,
    Tunable,
    Window,
    numbers_to_try,
    paid,
    propose,
    still_open,
    window_of,
    without_pauses,
)
from lightning_fastdata.tuning.simulate import BatchCost, TrainingTimes, batch_costs, by_epoch
from lightning_fastdata.types import Batch

log: Final = logging.getLogger("lightning_fastdata.tuning")

FIRST_STEPS: Final = 50
"""After so many steps the plan is compared with what was measured."""
_WATCHED: Final = 16
"""Steps of a window in which only two times are taken."""
_MEASURED: Final = 24
"""Steps whose batches are measured before a decision, later in the run."""
_VERIFIED: Final = 24
"""Steps that show what a move has brought."""
_STARTING: Final = 14
"""Of the first steps, those that are not counted: processes start and learn what samples are."""
_COLD: Final = 2
"""Steps at the start of an epoch that are not counted: workers start, or begin anew."""
_MUCH: Final = 0.10
"""Of the step, waited: a change is believed at once, and not in the next window only."""
_CHANGED: Final = 0.2
"""Part by which steps differ from those of the last decision if the work has become another."""
_REST: Final = 100
"""Windows in which nothing was to be gained are followed by so many steps without another try, at
first; each time twice as many."""
_LONGEST_REST: Final = 10_000
_MOST_OF_RUN: Final = 0.02
"""Of the time so far, what may be spent on decisions."""
_LATE_IS_WORTH_S: Final = 60.0
"""Where batches are late, as much may be spent as if the training had lasted so long."""
_LOOKED_AFTER_S: Final = 1.0
"""So often the memory and the CPU quota of the machine are looked at."""
_MOST_STAMPS: Final = 100
_PAUSE: Final = 5.0
"""A step so many times as long as usual is a pause, in which batches were made ahead."""
_REMEMBERED: Final = 16
"""Steps over which it is averaged what is usual."""


class Phase(Enum):
    """What a tuner is doing."""

    WATCHING = "two times a step are taken"
    MEASURING = "stamps of each batch are taken"
    SETTLING = "batches come that were begun before the move"
    VERIFYING = "steps show what the move has brought"


_REFUSALS: Final = (WorkerError, OSError, TypeError, AttributeError, pickle.PicklingError)
"""Of the system, and of a dataset that by now cannot be sent to another process."""
_WITH_STAMPS: Final = (Phase.MEASURING, Phase.VERIFYING)


class Tuner:
    """Tunes a loader, and those that take its place: what it has learned, it keeps.

    It may use ``most_workers`` as memory and open files allow, and ``cpus`` with them; ``tell``
    takes each move in words.
    """

    def __init__(
        self,
        *,
        most_workers: int,
        cpus: float,
        tell: Callable[[str], None] = log.info,
        clock_ns: Callable[[], int] = clock.monotonic_ns,
        pressure: Callable[[], Pressure] | None = None,
    ) -> None:
        self.most_workers = most_workers
        self.moves: list[Move] = []
        """All that were made, the newest last."""
        self.workers: int | None = None
        """The number that this tuner has come to; None: that of the plan."""
        self.phase = Phase.MEASURING
        self.spent_s = 0.0
        """What decisions took so far, the start of processes included."""
        self.tell = tell
        self._cpus = cpus
        self._clock_ns = clock_ns
        self._pressure = PressureReader() if pressure is None else pressure
        self._loader: weakref.ref[Tunable] | None = None
        self._watch = StepWatch(clock_ns)
        self._watch.clear(costs=True)
        self._wanted = FIRST_STEPS - _STARTING
        self._cold, self._batches = _STARTING, 0
        self._began_ns = self._looked_ns = clock_ns()
        self._dearest_s = 0.0
        self._decided: Window | None = None
        self._rest, self._rested_until, self._differed = _REST, 0, False
        self._open, self._again = ALL_NUMBERS, False
        self._ahead = self._paused_at = 0
        """Batches that the loader is ahead; and when the training has paused."""

    def batches(self, batches: Iterator[Batch], loader: Tunable) -> Iterator[Batch]:
        """Return the batches of an epoch of a loader, watched as they are taken."""
        if self._loader is None or self._loader() is not loader:
            self._loader = weakref.ref(loader)
        self._watch.epoch_began()
        self._cold = max(self._cold, _COLD)
        self._ahead = self._look_ahead(loader)
        if self.phase in _WITH_STAMPS:
            loader.tuning_stamps(self._watch.stamps)
        return _Watched(batches, self)

    def requested(self) -> None:
        """Note that a batch is asked for now."""
        loader = self._loader() if self._loader is not None else None
        if loader is not None and self._watch.steps >= self._wanted:
            began_ns = self._clock_ns()
            self._window_ended(loader)
            took_s = (self._clock_ns() - began_ns) / 1e9
            self.spent_s += took_s
            self._dearest_s = max(self._dearest_s, took_s)
        if self._watch.requested() and self._batches - self._paused_at > 2 * self._ahead:
            # What was made meanwhile is not waited for, which says nothing of the steps to come.
            self._paused_at = self._batches
            self._cold = max(self._cold, _COLD + self._ahead)

    def delivered(self) -> None:
        """Note that the batch was delivered."""
        self._batches += 1
        self._watch.delivered(counts=not self._cold)
        if self._cold:
            self._cold -= 1
            if self._watch.stamps:
                self._watch.stamps.pop()
            loader = self._loader() if self._loader is not None else None
            if not self._cold and self.phase is Phase.SETTLING and loader is not None:
                self._measure(loader, _VERIFIED, Phase.VERIFYING)

    def _begin(self, phase: Phase, steps: int) -> None:
        self.phase, self._wanted = phase, steps
        self._watch.clear(costs=phase in _WITH_STAMPS)

    def _measure(self, loader: Tunable, steps: int, phase: Phase = Phase.MEASURING) -> None:
        self._begin(phase, steps)
        loader.tuning_stamps(self._watch.stamps)

    def _rest_now(self, loader: Tunable) -> None:
        loader.tuning_stamps(None)
        self._begin(Phase.WATCHING, _WATCHED)

    # What follows from a window of steps

    def _window_ended(self, loader: Tunable) -> None:
        window = self._watch.window()
        if self.phase is Phase.VERIFYING:
            self._judge(loader, window)
        elif self.phase is Phase.MEASURING:
            self._decide(loader, window)
        else:
            self._look(loader, window)

    def _look(self, loader: Tunable, window: Window) -> None:
        """Measure again if batches are late, or if the machine runs short of something."""
        self._watch.clear(costs=False)
        pressure = self._pressed()
        if pressure.memory and loader.num_workers > 1:
            half = loader.num_workers // 2
            self.most_workers = min(self.most_workers, half)
            self._move(loader, window, Proposal(half, None, "memory is short"))
            return
        differs = self._decided is not None and _differs(window, self._decided)
        if differs and (self._differed or window.wait_share >= _MUCH):
            self._open = ALL_NUMBERS
            self._rest, self._rested_until = _REST, 0
        self._differed = differs
        if (self._batches >= self._rested_until or pressure.throttled) and self._affordable(window):
            self._measure(loader, _MEASURED)

    def _affordable(self, window: Window) -> bool:
        lasted_s = (self._clock_ns() - self._began_ns) / 1e9
        if window.wait_share >= _MUCH:
            lasted_s = max(lasted_s, _LATE_IS_WORTH_S)
        return self.spent_s + self._dearest_s <= _MOST_OF_RUN * lasted_s

    def _pressed(self) -> Pressure:
        now_ns = self._clock_ns()
        if now_ns - self._looked_ns < _LOOKED_AFTER_S * 1e9:
            return Pressure()
        self._looked_ns = now_ns
        return self._pressure()

    def _decide(self, loader: Tunable, window: Window) -> None:
        if not window.steady and not self._again:
            self._again = True
            self._measure(loader, _MEASURED)
            return
        now, self._again = loader.num_workers, False
        self._decided = window
        numbers = numbers_to_try(now, most=self.most_workers)
        step_cpus, costs = self._watch.costs()
        cpus = {"cpus": self._cpus, "step_cpus": min(self._cpus, step_cpus)}
        proposal = propose(
            window,
            costs,
            lambda workers: loader.setup_with(workers, **cpus),
            now,
            [number for number in numbers if number in self._open],
        )
        self._rest_now(loader)
        if proposal is None:
            self._rested_until = self._batches + self._rest
            self._rest = min(_LONGEST_REST, 2 * self._rest)
            return
        self._move(loader, window, proposal)

    def _move(self, loader: Tunable, window: Window, proposal: Proposal) -> None:
        now = loader.num_workers
        if not self._set(loader, proposal.workers):
            return
        move = Move(
            batch=self._batches,
            before=now,
            after=proposal.workers,
            step_before_ms=window.step_ms,
            wait_before_ms=window.wait_ms,
            step_expected_ms=proposal.step_ms,
            why=proposal.why,
        )
        self.moves.append(move)
        self.tell(str(move))

    def _set(self, loader: Tunable, workers: int) -> bool:
        """Return whether so many are had now; else the number stays, and the loader is left alone.

        The training can do without what the system, or the dataset, refuses.
        """
        before = loader.num_workers
        try:
            loader.set_workers(workers)
        except _REFUSALS as error:
            self.most_workers = self.workers = before
            self.tell(f"num_workers stays {before}, as {workers} cannot be had: {error}")
            loader.set_workers(before)
            self._rested_until = self._batches + self._rest
            self._rest_now(loader)
            return False
        self.workers = workers
        self._ahead = self._look_ahead(loader)
        self._cold = _COLD + self._ahead
        self._begin(Phase.SETTLING, _VERIFIED)
        return True

    def _look_ahead(self, loader: Tunable) -> int:
        setup = loader.setup_with(loader.num_workers, cpus=self._cpus, step_cpus=1.0)
        return 0 if setup is None else setup.look_ahead

    def _judge(self, loader: Tunable, window: Window) -> None:
        """Keep the last move, or take it back; then go on from where that leads."""
        move = self.moves[-1]
        if move.outcome != "tried":  # it was taken back
            self._decided = window
            self._rest_now(loader)
            return
        pays = paid(move, window)
        outcome: Outcome = "kept" if pays or not self._set(loader, move.before) else "taken back"
        self.moves[-1] = move = replace(move, step_seen_ms=window.step_ms, outcome=outcome)
        self.tell(str(move))
        if pays:
            self._rest, self._decided = _REST, window
            late = window.wait_share >= LITTLE
            if late and self._affordable(window):
                self._decide(loader, window)
                return
            self._rested_until = self._batches + (0 if late else _REST)
            self._rest_now(loader)
            return
        self._open = still_open(self._open, move)


def _differs(one: Window, other: Window) -> bool:
    longer, shorter = max(one.step_ms, other.step_ms), min(one.step_ms, other.step_ms)
    return shorter < (1 - _CHANGED) * longer


class _Watched:
    """Tells a tuner of each batch that is asked for and delivered."""

    def __init__(self, batches: Iterator[Batch], tuner: Tuner) -> None:
        self._batches, self._tuner = batches, tuner

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Batch:
        self._tuner.requested()
        batch = next(self._batches)
        self._tuner.delivered()
        return batch

    def __getattr__(self, name: str) -> Any:
        if name in ("_batches", "_tuner"):
            raise AttributeError(name)
        return getattr(self._batches, name)


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

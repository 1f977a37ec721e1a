"""Watches the batches of a loader while it is read, and changes its workers where that pays.

It measures a few dozen steps, asks the model (:mod:`.simulate`) for a better number of workers,
changes it, and compares the steps that follow with those before. What did not pay is taken back. In
between it looks at two times a step, the wait and the rest, and measures again when these change.
Steps, and what their batches cost, are measured where they are taken. Which number of workers is
better, and what has paid, is decided by pure functions at the end of this module.
"""

from __future__ import annotations

import functools
import logging
import math
import pickle
import statistics
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from lightning_fastdata.errors import WorkerError
from lightning_fastdata.host import clock
from lightning_fastdata.host.clock import SpentMeter, SpentTime
from lightning_fastdata.host.cpu import CpuThrottling, read_cpu_throttling
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.loading.simulate import (
    GOOD_ENOUGH,
    WORKERS,
    BatchCost,
    LoaderSetup,
    TrainingTimes,
    batch_costs,
    by_epoch,
    scaled,
    simulate,
)
from lightning_fastdata.loading.stamped import Around
from lightning_fastdata.stamps.batch_stamps import BatchStamps
from lightning_fastdata.types import Batch

if TYPE_CHECKING:
    from lightning_fastdata.loading.loader import FastDataLoader

log: Final = logging.getLogger("lightning_fastdata.tuning")

FIRST_STEPS: Final = 50
"""Number of steps after which the plan is compared with what was measured."""
_WATCHED: Final = 16
"""Number of steps in a window in which only two times are taken."""
_MEASURED: Final = 24
"""Number of steps whose batches are measured before a decision, later in the run."""
_VERIFIED: Final = 24
"""Number of steps that show what a move has brought."""
_DRAINED: Final = 3
"""Number of steps for each batch ahead after which too few workers show: three quarters of those
that just suffice make three batches in four steps, and the fourth comes from those ahead."""
_STARTING: Final = 14
"""Number of first steps that are not counted: processes start and learn what samples are."""
_COLD: Final = 2
"""Number of steps not counted as an epoch starts: workers start, or begin anew."""
_MUCH: Final = 0.10
"""Share of a step spent waiting that is worth a try for which the model does not ask; a change is
then believed at once, and not only in the next window."""
_CHANGED: Final = 0.2
"""Share by which steps differ from those of the last decision if the work has become another."""
_REST: Final = 100
"""Number of steps without another try after a window in which nothing was to be gained, at first;
each time it doubles."""
_LONGEST_REST: Final = 10_000
_MOST_OF_RUN: Final = 0.02
"""Share of the time so far that may be spent on decisions."""
_LATE_IS_WORTH_S: Final = 60.0
"""Least seconds that the training counts as having lasted where batches are late."""
_LOOKED_AFTER_S: Final = 1.0
"""Seconds between two looks at the memory and the CPU quota of the machine."""
_SHORT_BYTES: Final = 512 * 2**20
"""Bytes of available memory below which memory is short."""
_THROTTLED: Final = 0.2
"""Share of the scheduler's periods with workers stopped, above which the CPU quota is short."""
_MOST_STAMPS: Final = 100
_LONG_PAUSE: Final = 5.0
"""Ratio to the usual step above which a step is a pause, in which batches were made ahead."""
_REMEMBERED: Final = 16
"""Number of steps over which the usual time of a step is averaged."""

# Bounds for what is proposed, and for what has paid
_LEAST_GAIN: Final = 0.05
"""Least share of a step that a change has to save: steps differ by less anyway."""
_MOST_TIMES: Final = 4
"""Greatest factor on the workers in a move, as the model was not seen to be right so far away."""
_LEAST_PART: Final = 1 / 3
"""Least share of the workers that a move leaves, as the model was not seen to be right beyond."""
_FEWER: Final = 0.75
"""Share of the workers that have to be enough for the others to be given up."""
_WRONG: Final = 1.1
"""Ratio of measured to modelled steps from which the model is wrong about what these wait for."""
_MANY: Final = 2
"""Workers for each CPU up to which more of them are tried where the model is wrong."""
_HARDLY: Final = 0.2
"""Share of blocked time in making a batch below which workers are taken to compute."""
_SURE: Final = 1.25
"""Factor on the time of samples with which fewer workers have to suffice, too."""
_AS_GOOD: Final = 1.01
_LONGER_WAIT: Final = 0.02
"""Share of a step by which the wait may grow with fewer workers."""
_NOISE: Final = 0.04
"""Share of a step by which two windows differ where nothing has changed."""
_STEADY: Final = 0.4
"""Share of a step by which the waits of two halves of a window differ only if the work changed."""
_LITTLE: Final = 0.03
"""Share of a step spent waiting below which no more workers are needed."""
_STEPS: Final = 48
"""Least number of steps to simulate: a fourth of those for verdicts, as the result is measured."""
_PAUSE: Final = 3.0
"""Ratio to a typical step above which a step was a validation, a checkpoint or the like."""
ALL_NUMBERS: Final = range(10_000)
"""Numbers of workers that are open before any was tried."""
_REFUSALS: Final = (WorkerError, OSError, TypeError, AttributeError, pickle.PicklingError)
"""Errors that refuse workers: of the system, or of a dataset that no longer can be sent to them."""

Outcome = Literal["tried", "kept", "taken back"]
Tunable: TypeAlias = "FastDataLoader[Any]"
"""A loader with workers that may be changed while it is read."""


class Window(NamedTuple):
    """What some steps took; pauses of the training are left out."""

    steps: int
    step_ms: float
    """Mean time from one request of a batch to the next."""
    wait_ms: float
    """Mean part of a step that is waited for the batch."""
    steady: bool = True
    """Whether both halves of the window waited about as long."""

    @property
    def wait_share(self) -> float:
        """Share of the step that is waited, 0 to 1."""
        return self.wait_ms / self.step_ms if self.step_ms > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change that was made to a loader while it was read."""

    batch: int
    """Number of batches that the loader had given before the move."""
    before: int
    """Number of workers before the move."""
    after: int
    step_before_ms: float
    wait_before_ms: float
    step_expected_ms: float | None
    """Time of a step expected after the move; None: it was not made for speed."""
    why: str
    step_seen_ms: float | None = None
    """Time of a step measured after the move; None: not known yet."""
    outcome: Outcome = "tried"

    def __str__(self) -> str:
        change = f"num_workers {self.before} -> {self.after} at batch {self.batch}"
        if self.step_seen_ms is not None:
            times = f"{self.step_before_ms:.3g} -> {self.step_seen_ms:.3g} ms a step"
            if self.step_expected_ms is not None:
                times += f" ({self.step_expected_ms:.3g} expected)"
            return f"{change}: {times}" + (", taken back" if self.outcome == "taken back" else "")
        if self.step_expected_ms is None:
            return f"{change}: {self.why}"
        times = f"{self.step_before_ms:.3g} -> {self.step_expected_ms:.3g} ms a step expected"
        return f"{change}: {times}, as {self.why}"


class Proposal(NamedTuple):
    """A number of workers that should be better than the present one."""

    workers: int
    step_ms: float | None
    """Expected time of a step; None: the change is not proposed for speed."""
    why: str


class Phase(Enum):
    """What a tuner is doing."""

    WATCHING = "two times a step are taken"
    MEASURING = "stamps of each batch are taken"
    SETTLING = "batches come that were begun before the move"
    VERIFYING = "steps show what the move has brought"


_WITH_STAMPS: Final = (Phase.MEASURING, Phase.SETTLING, Phase.VERIFYING)


class Tuner:
    """Tunes a loader, and those that take its place; it keeps what it has learned.

    It uses at most ``most_workers``, as memory and open files allow, and ``cpus`` with them.
    ``tell`` takes each move in words, ``pressure`` returns what the machine is short of.
    """

    def __init__(
        self,
        *,
        most_workers: int,
        cpus: float,
        tell: Callable[[str], None] = log.info,
        pressure: Callable[[], Pressure] | None = None,
    ) -> None:
        self.most_workers = most_workers
        self.moves: list[Move] = []
        """Moves that were made, the newest last."""
        self.workers: int | None = None
        """Number of workers that this tuner has come to; None: that of the plan."""
        self.phase = Phase.MEASURING
        self.spent_s = 0.0
        """Seconds that decisions took so far, the start of processes included."""
        self.tell = tell
        self._cpus = cpus
        self._pressure = PressureReader() if pressure is None else pressure
        self._loader: Callable[[], Tunable | None] = lambda: None
        self._watch = StepWatch()
        self._watch.clear(costs=True)
        self._wanted = FIRST_STEPS - _STARTING
        self._cold, self._batches = _STARTING, 0
        self._began_s = self._looked_s = clock.monotonic()
        self._dearest_s = 0.0
        self._decided: Window | None = None
        self._rest, self._rested_until, self._differed = _REST, 0, False
        self._open, self._again = ALL_NUMBERS, False
        self._dearest: Sequence[BatchCost] = ()
        """Batches of the window whose batches took longest to make."""
        self._unseen = 0
        """Number of steps that have to be as good, besides a window, for the last move to stay."""
        self._ahead = self._paused_at = 0
        """Number of batches that the loader is ahead, and number of batches that it had given
        before the last pause of the training."""

    def batches(self, batches: Iterator[Batch], loader: Tunable) -> Iterator[Batch]:
        """Return the batches of an epoch of a loader, watched as they are taken."""
        if self._loader() is not loader:
            self._loader = weakref.ref(loader)
        self._watch.epoch_began()
        self._cold = max(self._cold, _COLD)
        self._ahead = self._look_ahead(loader)
        if self.phase in _WITH_STAMPS:
            loader.tuning_stamps(self._watch.stamps)
        return _Watched(batches, self)

    def requested(self) -> None:
        """Note that a batch is asked for now."""
        loader = self._loader()
        if loader is not None and self._watch.steps >= self._wanted:
            began_s = clock.monotonic()
            self._window_ended(loader)
            took_s = clock.monotonic() - began_s
            self.spent_s += took_s
            self._dearest_s = max(self._dearest_s, took_s)
        if self._watch.requested() and self._batches - self._paused_at > 2 * self._ahead:
            # Batches made in the pause are not waited for, which says nothing of the steps to come.
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
            if not self._cold and self.phase is Phase.SETTLING:
                self._begin(Phase.VERIFYING, self._wanted)

    def _begin(self, phase: Phase, steps: int) -> None:
        self.phase, self._wanted = phase, steps
        self._watch.clear(costs=phase in _WITH_STAMPS)

    def _measure(self, loader: Tunable, steps: int, phase: Phase = Phase.MEASURING) -> None:
        if self.phase not in _WITH_STAMPS:  # the batches under way have none
            self._cold = max(self._cold, self._ahead)
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
        """Measure again after a rest, or if the CPU quota is short; halve workers if memory is."""
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
        lasted_s = clock.monotonic() - self._began_s
        if window.wait_share >= _MUCH:
            lasted_s = max(lasted_s, _LATE_IS_WORTH_S)
        return self.spent_s + self._dearest_s <= _MOST_OF_RUN * lasted_s

    def _pressed(self) -> Pressure:
        now_s = clock.monotonic()
        if now_s - self._looked_s < _LOOKED_AFTER_S:
            return Pressure()
        self._looked_s = now_s
        return self._pressure()

    def _decide(self, loader: Tunable, window: Window) -> None:
        step_cpus, costs = self._watch.costs()
        self._dearest = max(self._dearest, costs, key=_makes_ns)
        if not window.steady and not self._again:
            self._again = True
            self._measure(loader, _MEASURED)
            return
        now, self._again = loader.num_workers, False
        self._decided = window
        numbers = numbers_to_try(now, most=self.most_workers)
        cpus = {"cpus": self._cpus, "step_cpus": min(self._cpus, step_cpus)}
        proposal = propose(
            window,
            costs,
            lambda workers: loader.setup_with(workers, **cpus),
            now,
            [number for number in numbers if number in self._open],
            dearest=self._dearest,
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
        """Set the number of workers, and return whether that was possible; else it stays.

        The training can do without workers that the system, or the dataset, refuses.
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
        # The batches that are under way were begun before, and are the first to be delivered.
        begun, self._ahead = self._ahead, self._look_ahead(loader)
        self._measure(loader, _VERIFIED, Phase.SETTLING)
        self._cold = _COLD + begun
        self._unseen = 0 if workers > before else _DRAINED * self._ahead - _VERIFIED
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
        if pays and self._unseen > 0:
            self._unseen -= window.steps
            self._begin(Phase.VERIFYING, _VERIFIED)
            return
        outcome: Outcome = "kept" if pays or not self._set(loader, move.before) else "taken back"
        self.moves[-1] = move = replace(move, step_seen_ms=window.step_ms, outcome=outcome)
        self.tell(str(move))
        if pays:
            self._rest, self._decided = _REST, window
            late = window.wait_share >= _LITTLE
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


class _Watched(Around):
    """Tells a tuner of each batch that is asked for and delivered."""

    def __init__(self, batches: Iterator[Batch], tuner: Tuner) -> None:
        super().__init__(batches)
        self._tuner = tuner

    def __next__(self) -> Batch:
        self._tuner.requested()
        batch = next(self._batches)
        self._tuner.delivered()
        return batch


class Pressure(NamedTuple):
    """What the machine is short of."""

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


class StepWatch:
    """Takes the times of steps, and what their batches cost the process that takes them."""

    def __init__(self) -> None:
        self.stamps: deque[BatchStamps] = deque(maxlen=_MOST_STAMPS)
        self._waits: list[int] = []
        self._owns: list[int] = []
        self._spent: SpentMeter | None = None
        """Meter of what steps use from delivery to request; None: it is not measured."""
        self._usual_ns = 0.0
        """Typical time from delivery to the next request."""
        self._requested_ns = self._delivered_ns = 0
        self._wait_ns: int | None = None
        """Wait for the batch that was delivered last; None: it does not count."""

    @property
    def steps(self) -> int:
        """Number of steps that were timed."""
        return len(self._waits)

    def clear(self, *, costs: bool) -> None:
        """Forget all steps; from now on measure what batches cost, or do not (``costs``)."""
        self._waits.clear()
        self._owns.clear()
        self.stamps.clear()
        self._spent = SpentMeter() if costs else None
        self._wait_ns = None

    def epoch_began(self) -> None:
        """Leave out the time until the first batch is asked for."""
        self._wait_ns = None

    def requested(self) -> bool:
        """Note that a batch is asked for now, with which the last step ends.

        Returns:
            Whether the training has paused, for a validation, a checkpoint or the like.
        """
        now_ns = clock.monotonic_ns()
        own_ns = now_ns - self._delivered_ns if self._delivered_ns else 0
        usual_ns = self._usual_ns or own_ns
        paused = own_ns > _LONG_PAUSE * usual_ns
        self._usual_ns = usual_ns + (min(own_ns, 2 * usual_ns) - usual_ns) / _REMEMBERED
        wait_ns = None if paused else self._wait_ns
        if self._spent is not None:
            self._spent.paused(counts=wait_ns is not None)
        if wait_ns is not None:
            self._waits.append(wait_ns)
            self._owns.append(own_ns)
        self._requested_ns = now_ns
        return paused

    def delivered(self, *, counts: bool) -> None:
        """Note that the batch was delivered, which counts or not."""
        if counts and self._spent is not None:
            self._spent.began()
        self._delivered_ns = clock.monotonic_ns()
        self._wait_ns = self._delivered_ns - self._requested_ns if counts else None

    def window(self) -> Window:
        """Return the means of the steps."""
        return window_of(self._waits, self._owns)

    def costs(self) -> tuple[float, list[BatchCost]]:
        """Return the CPUs that a step uses, and what the batches cost."""
        used = SpentTime() if self._spent is None else self._spent.total
        times = TrainingTimes(**used._asdict(), waited_s=0.0)
        costs = [
            cost
            for epoch in by_epoch(self.stamps)
            for cost in batch_costs(epoch, step_queued=times.step_queued)
        ]
        return times.step_cpus, without_pauses(costs) if costs else []


def window_of(waits_ns: Sequence[int], own_ns: Sequence[int]) -> Window:
    """Return the means of steps, given each wait for a batch and the time until the next request.

    Pauses count as a typical step: no loader makes a validation shorter.
    """
    most = _PAUSE * statistics.median(own_ns)
    own = statistics.fmean(min(each, most) for each in own_ns)
    wait = statistics.fmean(waits_ns)
    half = len(waits_ns) // 2
    halves = [statistics.fmean(waits_ns[:half] or [0]), statistics.fmean(waits_ns[half:])]
    steady = abs(halves[1] - halves[0]) <= _STEADY * (wait + own)
    return Window(len(waits_ns), (wait + own) / 1e6, wait / 1e6, steady)


def without_pauses(costs: Sequence[BatchCost]) -> list[BatchCost]:
    """Return the costs with pauses of the training made as long as a typical step."""
    usual = statistics.median(each.step_ns for each in costs)
    most = _PAUSE * usual
    return [each if each.step_ns <= most else replace(each, step_ns=usual) for each in costs]


def numbers_to_try(now: int, *, most: int) -> list[int]:
    """Return the numbers of workers that a loader may have next, the smallest first."""
    bound = min(most, _MOST_TIMES * now)
    return [number for number in WORKERS if number <= bound and number != now]


def propose(
    window: Window,
    costs: Sequence[BatchCost],
    setup_with: Callable[[int], LoaderSetup | None],
    now: int,
    numbers: Sequence[int],
    *,
    dearest: Sequence[BatchCost] = (),
) -> Proposal | None:
    """Return the number of workers that pays; None: the present one is good.

    More workers have to make a step shorter. Fewer have to do so, too, as where the training gets
    more of the CPUs; or leave it as it is, also for the ``dearest`` batches that were seen, and if
    their samples came to take a quarter longer. The model takes milliseconds for each number, so
    that no more are looked at than needed. The smallest of ``numbers`` comes first. ``setup_with``
    is that of a loader, with the CPUs of the tuner.
    """
    here = setup_with(now)
    if not costs or here is None:
        return None
    if _computes(costs) and here.scheduling != "actors":  # actors have CPUs of their own
        # More would share the same CPUs; what they seem to gain is noise, or taken from others.
        numbers = [number for number in numbers if number <= max(now, math.ceil(here.cpus))]

    def simulated_ms(number: int, these: Sequence[BatchCost]) -> float:
        setup = setup_with(number)
        if setup is None:
            return math.inf
        steps = max(_STEPS, 2 * setup.look_ahead)
        return simulate(these, setup, least_steps=steps).step_ms

    @functools.cache
    def step_ms(number: int) -> float:
        return simulated_ms(number, costs)

    now_ms = step_ms(now)
    ratio = window.step_ms / now_ms
    late = f"batches are late by {window.wait_ms:.3g} of {window.step_ms:.3g} ms a step"
    if window.wait_share >= _LITTLE:
        best, best_ms = now, now_ms
        for number in (each for each in numbers if each > now):
            if GOOD_ENOUGH * step_ms(number) > best_ms:
                break
            best, best_ms = number, step_ms(number)
        if best_ms <= (1 - _LEAST_GAIN) * now_ms:
            return Proposal(best, ratio * best_ms, late)
    unexplained = ratio >= _WRONG and window.wait_share >= _MUCH
    more = next((number for number in numbers if number > now), None)
    hoped = None
    if unexplained and more is not None:
        hoped_ms = (1 - _LEAST_GAIN) * window.step_ms
        hoped = Proposal(more, hoped_ms, f"{late}, and the model knows no reason")
    # Many may be too many in a way that the model does not know: they take memory, start slowly.
    if unexplained and now <= _MANY * here.cpus:
        return hoped
    fewer = [number for number in numbers if _LEAST_PART * now <= number <= _FEWER * now]
    slower = scaled(dearest or costs, cpu=_SURE, blocked=_SURE, collate=_SURE)
    limit_ms, slower_limit_ms = _AS_GOOD * now_ms, _AS_GOOD * simulated_ms(now, slower)

    def gains(number: int) -> bool:
        return step_ms(number) <= (1 - _LEAST_GAIN) * now_ms

    def suffices(number: int) -> bool:
        in_time = step_ms(number) <= limit_ms
        return in_time and (gains(number) or simulated_ms(number, slower) <= slower_limit_ms)

    found = bisect_left(fewer, True, key=suffices)
    if found == len(fewer):
        return hoped
    number = fewer[found]
    why = "fewer workers leave the training more CPUs"
    why = why if gains(number) else "fewer workers make the batches in time"
    why = f"{late}, but by the model {why}" if unexplained else why
    return Proposal(number, ratio * step_ms(number), why)


def _makes_ns(costs: Sequence[BatchCost]) -> float:
    """Return the mean time to make a batch, in nanoseconds."""
    return statistics.fmean(c.cpu_ns + c.blocked_ns + c.collate_ns for c in costs) if costs else 0.0


def _computes(costs: Sequence[BatchCost]) -> bool:
    """Return whether the workers hardly wait for anything but CPUs."""
    blocked_ns = sum(cost.blocked_ns for cost in costs)
    return blocked_ns < _HARDLY * sum(c.cpu_ns + c.collate_ns + c.blocked_ns for c in costs)


def paid(move: Move, after: Window) -> bool:
    """Return whether a move is kept, by the steps after it.

    More workers have to bring a third of what was expected, and more than noise. Fewer have to do
    so, too, or leave steps as long as they were.
    """
    if move.step_expected_ms is None:
        return True
    gained_ms = move.step_before_ms - after.step_ms
    expected_ms = move.step_before_ms - move.step_expected_ms
    faster = gained_ms >= max(_NOISE * move.step_before_ms, expected_ms / 3)
    if move.after > move.before:
        return faster
    for_speed = expected_ms >= _LEAST_GAIN * move.step_before_ms
    # What the training itself takes differs from window to window, the wait hardly does.
    longer_ms = after.wait_ms - move.wait_before_ms
    as_before = longer_ms <= _LONGER_WAIT * move.step_before_ms
    return (for_speed and faster) or (as_before and gained_ms >= -_NOISE * move.step_before_ms)


def still_open(numbers: range, move: Move) -> range:
    """Return which numbers of workers may be tried after a move that was taken back.

    If more workers brought nothing, other larger numbers do not either; if steps became longer, a
    smaller increase may. If fewer were too few, so are fewer still.
    """
    if move.after < move.before:
        return range(max(numbers.start, move.after + 1), numbers.stop)
    seen_ms = move.step_before_ms if move.step_seen_ms is None else move.step_seen_ms
    too_many = seen_ms > (1 + _NOISE) * move.step_before_ms
    return range(numbers.start, min(numbers.stop, move.after if too_many else move.before + 1))

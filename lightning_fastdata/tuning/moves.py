"""Which number of workers a running loader had better have, by what its batches cost: pure."""

from __future__ import annotations

import functools
import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, Protocol

from lightning_fastdata.stamps.batch_stamps import BatchStamps
from lightning_fastdata.tuning.simulate import BatchCost, LoaderSetup, scaled, simulate

GOOD_ENOUGH: Final = 1.03
"""The smallest change within 3 % of the best one is taken."""
WORKERS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of workers that are tried."""

_LEAST_GAIN: Final = 0.05
"""Of the step: less is within what steps differ by anyway."""
_MOST_TIMES: Final = 4
"""No more times the workers in one move, as the model was not seen to be right so far away."""
_LEAST_PART: Final = 1 / 3
"""Of the workers, left by one move, for the same reason."""
_FEWER: Final = 0.75
"""Workers are given up if no more than this part of them is needed."""
_WRONG: Final = 1.1
"""If steps are so many times as long as the model says, it is wrong about what they wait for."""
_MUCH: Final = 0.10
"""Of the step, waited: worth a try that the model does not ask for."""
_HARDLY: Final = 0.2
"""Of the time to make a batch: less is waited by workers that compute."""
_SURE: Final = 1.25
"""Fewer workers have to suffice if samples took a quarter longer, too."""
_AS_GOOD: Final = 1.01
_LONGER_WAIT: Final = 0.02
"""Of the step: what the wait with fewer workers may be longer."""
_NOISE: Final = 0.04
"""Of the step: by so much two windows differ where nothing has changed."""
_STEADY: Final = 0.4
"""Of the step: if the waits of two halves of a window differ by more, the work became another."""
LITTLE: Final = 0.03
"""Of the step, waited for batches: no more workers are needed."""
ALL_NUMBERS: Final = range(10_000)
"""Of workers, before any was tried."""
_STEPS: Final = 48
"""That are simulated at least: a fourth of what verdicts rest on, as what comes of it is measured.
"""
_PAUSE: Final = 3.0
"""A step so many times as long as a typical one was a validation, a checkpoint or the like."""

Outcome = Literal["tried", "kept", "taken back"]


class Tunable(Protocol):
    """A loader whose workers may be changed while it is read."""

    @property
    def num_workers(self) -> int:
        """Side processes that read, at least 1."""

    def setup_with(self, workers: int, *, cpus: float, step_cpus: float) -> LoaderSetup | None:
        """Return the loader with so many workers, as the model knows it; None: it does not."""

    def set_workers(self, workers: int) -> None:
        """Read with so many workers from now on."""

    def tuning_stamps(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each batch from now on; None: no more."""


class Window(NamedTuple):
    """What some steps took; pauses of the training are left out."""

    steps: int
    step_ms: float
    """From one request of a batch to the next, the mean."""
    wait_ms: float
    """Of that, the wait for the batch."""
    steady: bool = True
    """The second half took as long as the first."""

    @property
    def wait_share(self) -> float:
        """The part of the step that is waited, 0 to 1."""
        return self.wait_ms / self.step_ms if self.step_ms > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change that was made to a loader while it was read."""

    batch: int
    """How many batches the loader had given by then."""
    before: int
    """Workers."""
    after: int
    step_before_ms: float
    wait_before_ms: float
    step_expected_ms: float | None
    """None: it was not made for speed."""
    why: str
    step_seen_ms: float | None = None
    """None: not known yet."""
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
    """What a step is expected to take; None: it is not made for speed."""
    why: str


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


def choose(
    costs: Sequence[BatchCost], candidates: Iterable[LoaderSetup]
) -> tuple[LoaderSetup, float]:
    """Return the first setup that is within 3 % of the best, and its predicted step in ms.

    Costs and candidates must not be empty; the smallest candidate comes first.
    """
    predicted = [(setup, simulate(costs, setup).step_ms) for setup in candidates]
    best = min(step_ms for _, step_ms in predicted)
    return next(each for each in predicted if each[1] <= GOOD_ENOUGH * best)


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
) -> Proposal | None:
    """Return the number of workers that pays; None: the present one is good.

    More workers have to make a step shorter. Fewer have to do so, too, as where the training gets
    more of the CPUs; or leave it as it is, also if samples came to take a quarter longer. Each
    number takes the model milliseconds, so that no more are looked at than it takes; of
    ``numbers`` the smallest comes first. ``setup_with``: as of :class:`Tunable`.
    """
    here = setup_with(now)
    if not costs or here is None:
        return None
    if _computes(costs) and here.scheduling != "actors":  # which have CPUs of their own
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
    if window.wait_share >= LITTLE:
        best, best_ms = now, now_ms
        for number in (each for each in numbers if each > now):
            if GOOD_ENOUGH * step_ms(number) > best_ms:
                break
            best, best_ms = number, step_ms(number)
        if best_ms <= (1 - _LEAST_GAIN) * now_ms:
            return Proposal(best, ratio * best_ms, late)
        more = next((number for number in numbers if number > now), None)
        if ratio >= _WRONG and window.wait_share >= _MUCH:
            if more is None:
                return None
            hoped_ms = (1 - _LEAST_GAIN) * window.step_ms
            return Proposal(more, hoped_ms, f"{late}, and the model knows no reason")
    fewer = [number for number in numbers if _LEAST_PART * now <= number <= _FEWER * now]
    slower = scaled(costs, cpu=_SURE, blocked=_SURE, collate=_SURE)
    limit_ms, slower_limit_ms = _AS_GOOD * now_ms, _AS_GOOD * simulated_ms(now, slower)

    def gains(number: int) -> bool:
        return step_ms(number) <= (1 - _LEAST_GAIN) * now_ms

    def suffices(number: int) -> bool:
        in_time = step_ms(number) <= limit_ms
        return in_time and (gains(number) or simulated_ms(number, slower) <= slower_limit_ms)

    found = bisect_left(fewer, True, key=suffices)
    if found == len(fewer):
        return None
    number = fewer[found]
    why = "fewer workers leave the training more CPUs"
    why = why if gains(number) else "fewer workers make the batches in time"
    return Proposal(number, ratio * step_ms(number), why)


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

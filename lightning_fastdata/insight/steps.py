"""The marks of each step become timings, and these numbers: the newest steps, a summary of a stage.

One step, in the order of its marks, on the host and (as events) on the device::

    gap | wait_began .. wait_ended | transfer_began .. transfer_ended | gap |
                                        augment_began .. augment_ended
          work_began .. work_ended | gap

Any of them may be missing; what was not marked is None, never 0.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lightning_fastdata.device.backend import current_stream, default_type, new_event
from lightning_fastdata.host import clock
from lightning_fastdata.insight.finding import (
    STALL_LOW,
    StepTimes,
    costs_much,
    duration_text,
    steps_text,
)
from lightning_fastdata.insight.waits import WaitCauses

Values: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = Mapping[str, Values]
"""Field name of `StepTiming` -> one float64 per step, oldest first; NaN = not measured."""


class StepTiming(NamedTuple):
    """What one step cost; None: not measured. A tuple is made four times as fast as a dataclass."""

    step: int
    """Number of the step in its stage, counted from 0 over all epochs."""
    samples: int
    """Number of samples in the batch."""
    cold: int
    """1 for the first step of an epoch, which is counted apart: workers start, queues are empty. In
    the first one of a run memory is allocated and ``torch.compile`` compiles, too. A later
    compilation, as for a last batch of another size, has no public sign and counts as warm."""
    wait_ms: float | None = None
    """Host time spent asking for the batch, some of it maybe while the device is busy."""
    stall_ms: float | None = None
    """Time the device stood idle because of data; equals ``wait_ms`` where the host is the device.
    This, not ``wait_ms``, is what faster data would save."""
    transfer_ms: float | None = None
    """Time of ``on_before_batch_transfer`` and of the copy from host to device, without
    augmentation within the transfer hooks."""
    augment_ms: float | None = None
    """Time of batch transforms on the device."""
    compute_ms: float | None = None
    """Time of the work on the batch, up to the end of the step: forward, backward, optimizer."""
    gap_ms: float | None = None
    """Time from the end of the previous step to this one's first wait, from the batch's arrival to
    the work on it, and of callbacks within that work: callbacks, logging, checkpoints. Not part of
    ``step_ms``; None where the stage was paused in between, as for a validation."""
    step_ms: float | None = None
    """``stall + transfer + augment + compute``: the step as the device saw it."""


PHASES: Final = {
    "wait": "stall",
    "transfer": "transfer",
    "augment": "augment",
    "compute": "compute",
}
"""Phases of a step in their order, each with the field of `StageSummary` that holds it (with
``_ms``, that of `StepTiming`). For the wait it is the stall, so that all add up to the step."""
MOST_RECENT: Final = 512
"""Number of newest steps whose single values are reported."""
_COLUMNS = StepTiming._fields
_FIRST_TIMED = _COLUMNS.index("wait_ms")
TIMED = _COLUMNS[_FIRST_TIMED:]
_SOMETIMES: Final = ("transfer_ms", "augment_ms")
"""Phases that take no time in a step that does not measure them, where others do."""
_MOST_LONG: Final = 3
"""Most steps that are left out of means as too long; more of them are what training is like."""
_LONG_TIMES: Final = 2
"""A step may be left out from this many times the 95th percentile on."""
_LONG_HIGH: Final = 0.03
"""Least share of the time of all steps that long steps take together to be left out."""
_ROUNDED_MS: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSummary:
    """One phase over the warm steps of a stage."""

    mean_ms: float
    """Mean time over all steps that measured the phase; of transfer and augmentation over all that
    were timed, as a loop may do without in some of them."""
    p50_ms: float
    """Median time over the newest steps."""
    p95_ms: float
    """95th percentile over the newest steps; far above the median it means bursts."""
    share: float
    """Share of the total step time, 0 to 1. The shares of stall, transfer, augment and compute add
    up to 1; ``wait`` may exceed the stall, and ``gap`` lies outside the step."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StageSummary:
    """Where the warm steps of one stage went; the first ones of epochs are counted apart."""

    stage: str
    """Name of the stage: ``train``, ``val``, ``test`` or ``predict``."""
    device: str = "cpu"
    """Type of the device that computed: ``cpu``, ``cuda``, ..."""
    steps: int
    """Number of all steps, cold ones included: one for each batch, however many make an update."""
    samples: int
    """Number of samples in all steps."""
    duration_s: float
    """Seconds from the first to the last step, gaps included."""
    wait: PhaseSummary | None = None
    stall: PhaseSummary | None = None
    transfer: PhaseSummary | None = None
    augment: PhaseSummary | None = None
    compute: PhaseSummary | None = None
    gap: PhaseSummary | None = None
    step: PhaseSummary | None = None
    cold_steps: int = 0
    """Number of steps that were first in an epoch."""
    cold_wait_ms: float | None = None
    """Mean host wait of the cold steps: what starting an epoch costs."""
    first_wait_ms: float | None = None
    """Host wait of the first of these, which often takes longest: workers that are kept start."""
    samples_per_s: float | None = None
    """Samples of warm steps per second of their ``step_ms``."""
    samples_per_s_if_data_were_free: float | None = None
    """Samples per second with the stall taken off ``step_ms``: the most that faster data gives."""
    long_steps: tuple[StepTiming, ...] = ()
    """Single steps, three at most, so long that with them the mean would exceed the 95th
    percentile; means, shares and rates leave them out."""
    causes: WaitCauses | None = None
    """Why batches were late, of all loaders together; None where one takes no stamps."""

    def __repr__(self) -> str:
        return f"<StageSummary: {self.stage} {', '.join(self.words)}>"

    @property
    def title(self) -> str:
        """The stage, and how long it took, e.g. ``train · 1200 steps in 1 min 34 s``."""
        return f"{self.stage} · {self.words[0]}"

    @property
    def words(self) -> list[str]:
        """How long the stage took, how much of it was waiting, and how fast it was, if known."""
        found = [f"{steps_text(self.steps)} in {duration_text(self.duration_s)}"]
        if self.stall_share is not None:
            found.append(f"wait {self.stall_share:.0%}")
        if self.samples_per_s is not None:
            found.append(f"{self.samples_per_s:.0f} samples/s")
        return found

    @property
    def phases(self) -> dict[str, PhaseSummary]:
        """Measured phases by their names in `PHASES`; they add up to the step."""
        phases = {name: getattr(self, key) for name, key in PHASES.items()}
        return {name: phase for name, phase in phases.items() if phase is not None}

    @property
    def stall_share(self) -> float | None:
        """Part of the step in which the device stood idle because of data, 0 to 1."""
        return None if self.stall is None else self.stall.share

    @property
    def stalls(self) -> bool:
        """Whether the device waits for data for 3 % of the step, and not for a mere hand-over."""
        stall = self.stall
        if stall is None or stall.share < STALL_LOW:
            return False
        return costs_much(stall.mean_ms, stall.share)

    @property
    def speedup_possible(self) -> float | None:
        """How many times faster the step would be if data were free; None if not measured.

        A lower bound where the host computes: workers take CPUs from the model meanwhile.
        """
        if not self.samples_per_s or self.samples_per_s_if_data_were_free is None:
            return None
        return self.samples_per_s_if_data_were_free / self.samples_per_s


NO_STEPS: Final = StageSummary(stage="train", steps=0, samples=0, duration_s=0.0)


def mean_ms(phase: PhaseSummary | None) -> float | None:
    """Return the mean time of a phase; None: it was not measured."""
    return None if phase is None else phase.mean_ms


def times_of(summary: StageSummary) -> StepTimes:
    """Return the mean times of the steps of a stage, and of their waits."""
    step_ms = mean_ms(summary.step)
    return StepTimes(
        step_ms=None if step_ms is None else step_ms + (mean_ms(summary.gap) or 0.0),
        wait_ms=mean_ms(summary.wait),
        stall_ms=mean_ms(summary.stall),
    )


class StepTotals:
    """Sums over steps of one kind, warm or cold."""

    # Plain numbers: a step has few values, and each call of numpy costs more than they do.
    def __init__(self) -> None:
        self.steps = self.samples = 0
        """Number of all steps, and number of samples in those that were timed."""
        self.sums, self.counts = dict.fromkeys(TIMED, 0.0), dict.fromkeys(TIMED, 0)

    def add(self, timing: StepTiming, times: int = 1) -> None:
        """Add a step; ``times=-1`` takes it away again."""
        self.steps += times
        for name, value in zip(TIMED, timing[_FIRST_TIMED:], strict=True):
            if value is not None:
                self.sums[name] += times * value
                self.counts[name] += times
        if timing.step_ms is not None:
            self.samples += times * timing.samples

    def since(self, earlier: StepTotals) -> StepTotals:
        """Return the sums without the steps of ``earlier``."""
        rest = copy.deepcopy(self)
        rest.steps, rest.samples = self.steps - earlier.steps, self.samples - earlier.samples
        for name in TIMED:
            rest.sums[name] -= earlier.sums[name]
            rest.counts[name] -= earlier.counts[name]
        return rest

    def phase(self, name: str, newest: Values) -> PhaseSummary | None:
        """Return the summary of a phase, percentiles by ``newest``; None: it was not measured."""
        count, total, step_ms = self.counts[name], self.sums[name], self.sums["step_ms"]
        if not count:
            return None
        if name in _SOMETIMES:
            count = max(count, self.counts["step_ms"])
        values = measured(newest)
        if not values.size:  # measured once, but not in the window: the mean is all that is known
            values = np.array([total / count])
        p50, p95 = p50_and_p95(values)
        return PhaseSummary(
            mean_ms=total / count,
            p50_ms=p50,
            p95_ms=p95,
            share=total / step_ms if step_ms > 0 else 0.0,
        )

    def summarize(self, newest: Columns) -> StageSummary:
        """Return the means and rates of the steps, with percentiles of the ``newest``."""
        sums = self.sums
        known = {name: self.phase(name, newest[name]) for name in TIMED}
        phases: dict[str, Any] = {name.removesuffix("_ms"): each for name, each in known.items()}
        free_rate = None
        if phases["stall"] is not None:
            free_rate = _per_second(self.samples, sums["step_ms"] - sums["stall_ms"])
        return replace(
            NO_STEPS,
            steps=self.steps,
            samples=self.samples,
            samples_per_s=_per_second(self.samples, sums["step_ms"]),
            samples_per_s_if_data_were_free=free_rate,
            **phases,
        )


class StepHistory:
    """Totals over all steps, and single values of the newest, in memory that never grows."""

    def __init__(self, window: int = 1024) -> None:
        self._rows: deque[StepTiming] = deque(maxlen=window)
        self._warm, self._cold = StepTotals(), StepTotals()
        self._told = StepTotals(), StepTotals()
        """Totals of warm and of cold steps as they were when the last window was taken."""
        self._longest: list[StepTiming] = []
        """Warm steps that took longest, three at most, the longest first."""
        self.steps = self.samples = 0
        self._first_wait_ms: float | None = None

    def append(self, timing: StepTiming) -> None:
        """Count one step; the oldest leaves the window when it is full."""
        self._rows.append(timing)
        if not self.steps:
            self._first_wait_ms = timing.wait_ms
        (self._cold if timing.cold else self._warm).add(timing)
        self.steps += 1
        self.samples += timing.samples
        longest = self._longest
        if timing.cold or timing.step_ms is None:
            return
        if len(longest) < _MOST_LONG or timing.step_ms > (longest[-1].step_ms or 0.0):
            longest = sorted([*longest, timing], key=lambda each: -(each.step_ms or 0.0))
            self._longest = longest[:_MOST_LONG]

    def _long_steps(self, columns: Columns) -> list[StepTiming]:
        """Return the fewest steps without which the mean is not above the 95th percentile.

        Empty where three would not do, or where they cost next to nothing.
        """
        values = measured(columns["step_ms"])
        whole_ms, count = self._warm.sums["step_ms"], self._warm.counts["step_ms"]
        p95 = _ROUNDED_MS + p50_and_p95(values)[1] if values.size else np.inf
        total_ms, taken = whole_ms, list[StepTiming]()
        for timing in self._longest:
            ms = timing.step_ms or 0.0
            if total_ms <= p95 * count or ms < _LONG_TIMES * p95 or count < 2:
                break
            total_ms, count = total_ms - ms, count - 1
            taken.append(timing)
        few = total_ms <= p95 * count and whole_ms - total_ms >= _LONG_HIGH * whole_ms
        return taken if few else []

    def stalled_s(self, *, cold: bool = True) -> float:
        """Return for how many seconds the device was idle because of data.

        Steps whose stall is not known count as the mean of the others. ``cold``: include the first
        steps of epochs.
        """
        return sum(
            each.sums["stall_ms"] / each.counts["stall_ms"] * each.steps / 1e3
            for each in ((self._warm, self._cold) if cold else (self._warm,))
            if each.counts["stall_ms"]
        )

    def newest(self, steps: int | None = None) -> Columns:
        """Return copies of the newest steps, oldest first; None: of all in the window."""
        have = len(self._rows)
        take = have if steps is None else max(0, min(steps, have))
        kept = list(islice(self._rows, have - take, None))
        # None becomes NaN.
        rows = np.array(kept, dtype=np.float64).reshape(take, len(_COLUMNS))
        return {name: rows[:, i].copy() for i, name in enumerate(_COLUMNS)}

    def window(self) -> StageSummary:
        """Return where the steps since the last call went: the warm ones, unless there are none."""
        warm, cold = map(StepTotals.since, (self._warm, self._cold), self._told)
        self._told = copy.deepcopy((self._warm, self._cold))
        newest = warm_steps(self.newest(warm.steps + cold.steps))
        return (warm if warm.steps else cold).summarize(newest)

    def summarize(self, stage: str, *, duration_s: float, device: str = "cpu") -> StageSummary:
        """Return where all steps so far went: the warm ones, unless there are none."""
        columns, cold = warm_steps(self.newest()), self._cold
        totals, long_steps = cold, list[StepTiming]()
        if any(self._warm.counts.values()):
            totals, long_steps = copy.deepcopy(self._warm), self._long_steps(columns)
        for timing in long_steps:
            totals.add(timing, -1)
        first_waits = cold.counts["wait_ms"]
        return replace(
            totals.summarize(columns),
            stage=stage,
            device=device,
            steps=self.steps,
            samples=self.samples,
            duration_s=duration_s,
            cold_steps=cold.steps,
            cold_wait_ms=cold.sums["wait_ms"] / first_waits if first_waits else None,
            first_wait_ms=self._first_wait_ms,
            long_steps=tuple(sorted(long_steps)),
        )


def measured(values: Values) -> Values:
    """Return the values that were measured."""
    return values[~np.isnan(values)]


def p50_and_p95(values: Values) -> tuple[float, float]:
    """Return the median and the 95th percentile."""
    p50, p95 = np.percentile(values, (50, 95)).tolist()
    return p50, p95


def warm_steps(columns: Columns) -> Columns:
    """Return the warm steps; all steps if there are none."""
    warm = columns["cold"] == 0
    return {name: values[warm] for name, values in columns.items()} if warm.any() else columns


def _per_second(samples: int, total_ms: float) -> float | None:
    return samples * 1e3 / total_ms if total_ms > 0 and samples else None


class HostClock:
    """The host's own clock in nanoseconds: exact, and it has passed every mark it made."""

    __slots__ = ("mark",)

    def __init__(self, clock_ns: Callable[[], int] | None = None) -> None:
        self.mark = clock_ns or clock.reader_ns()

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Return the milliseconds between two marks."""
        return (end - begin) / 1e6


class EventClock:
    """Events on the current stream of a device with streams, or of the current device.

    Events are recorded anew when their marks are not needed any more, so there are about seven for
    each step that the host is ahead of the device.
    """

    __slots__ = ("_device", "_free", "_make_event")

    def __init__(
        self, make_event: Callable[[], Any] | None = None, device: torch.device | None = None
    ) -> None:
        if make_event is None:
            make_event = partial(new_event, device or torch.device(default_type()), timed=True)
        self._make_event, self._device = make_event, device
        self._free: list[Any] = []

    def mark(self) -> Any:
        """Record an event and return it."""
        event = self._free.pop() if self._free else self._make_event()
        if self._device is None:
            event.record()
        else:
            event.record(current_stream(self._device))
        return event

    def ready(self, mark: Any) -> bool:
        """Return whether the device has passed the mark. Never blocks."""
        return bool(mark.query())

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Return the milliseconds between two marks that are ready."""
        return float(begin.elapsed_time(end))

    def reuse(self, marks: Iterable[Any]) -> None:
        """Take back marks that nobody needs any more."""
        self._free.extend(marks)


_POLL_AT: Final = 16
"""Number of ended steps that are recorded in one go. Each costs a third of what it costs in the
middle of a training step, where nothing of this is in the processor's caches."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """One step between its first mark and the moment the device has passed its last one."""

    began: dict[str, Any] = field(default_factory=dict)
    """Phase -> mark of its begin, while the phase is under way."""
    pairs: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)
    """Phase -> its intervals, each with marks of start and end."""
    wait_began: int | None = None
    """Host mark of the start of the wait that is under way; None: none is."""
    wait_ms: float | None = None
    marks: list[Any] = field(default_factory=list)
    """Marks of this step on a device with its own clock; empty where the host is the device."""
    compute_began: Any = None
    """Mark from which on time is compute: the end of the newest phase, or the start of the work."""
    before_work: tuple[Any, Any] | None = None
    """Marks of the batch's arrival and of the work on it, between which time is gap."""
    work_ended: Any = None
    """Mark of the end of the step's last work; None: the step ends when it is counted."""
    augment_is_outer: bool = False
    """Whether the transfer began within an augmentation."""
    index: int = 0
    cold: int = 0
    # Filled at the end of the step.
    samples: int = 0
    ended: Any = None
    previous_end: Any = None


class StepTimeline:
    """Receives the marks of one stage's steps and keeps what they cost.

    The caller marks in the order of one step. Waits may come several times before one
    `compute_ended` (loaders of unknown length fetch ahead; several loaders) and then add up. An
    ``..._ended`` without its ``..._began`` is ignored; a second ``..._began`` replaces the first. A
    step is recorded when the device has passed its last mark, in order, with no synchronisation.
    Without ``device``, whose clock serves this timeline alone, the host's clock times it, too.
    """

    def __init__(self, *, host: HostClock | None = None, device: EventClock | None = None) -> None:
        self._host = HostClock() if host is None else host
        self._device = device
        self._mark = self._host.mark if device is None else self._record
        self._step = _Step(cold=1)
        self._pending: deque[_Step] = deque()
        self._previous_end: Any = None
        self._history = StepHistory()

    @property
    def history(self) -> StepHistory:
        """All steps that the device has passed by now: their totals, and the newest ones."""
        self.poll()
        return self._history

    def epoch_began(self) -> None:
        """The next step to end is the first of an epoch; the first step of all is one anyway."""
        self._step.cold = 1

    def paused(self) -> None:
        """Do not count the time between the last step and the next one as a gap."""
        self._previous_end = None

    def wait_began(self) -> None:
        """The host asks for a batch."""
        step = self._step
        step.wait_began = now = self._host.mark()
        step.began["stall"] = now if self._device is None else self._record()

    def wait_ended(self) -> None:
        """The host has the batch."""
        step = self._step
        if step.wait_began is None:
            return
        now = self._host.mark()
        step.wait_ms = (step.wait_ms or 0.0) + self._host.elapsed_ms(step.wait_began, now)
        step.wait_began = None
        self._close("stall", now if self._device is None else self._record())

    def transfer_began(self) -> None:
        """The batch starts its way to the device."""
        step = self._step
        step.augment_is_outer = "augment" in step.began
        step.began["transfer"] = self._mark()

    def transfer_ended(self) -> None:
        """The batch is on the device; an augmentation within is taken off the transfer."""
        self._close("transfer", self._mark())

    def augment_began(self) -> None:
        """Transforms start on the device."""
        self._step.began["augment"] = self._mark()

    def augment_ended(self) -> None:
        """Transforms on the device are done."""
        step = self._step
        began, end = step.began.get("augment"), self._mark()
        self._close("augment", end)
        if began is not None and "transfer" in step.began:
            # During a transfer: cut it there, so that the two never count the same time.
            if not step.augment_is_outer:
                step.pairs.setdefault("transfer", []).append((step.began["transfer"], began))
            step.began["transfer"] = end

    def work_began(self) -> None:
        """The work on the batch starts; the time since the batch arrived counts as gap."""
        step = self._step
        began = self._mark()
        if step.compute_began is not None:
            step.before_work = step.compute_began, began
            step.compute_began = began

    def work_ended(self) -> None:
        """The last work of the step is given to the device; what comes after it is gap."""
        self._step.work_ended = self._mark()

    def aside_began(self) -> None:
        """Something that is no part of the work runs within it, and counts as gap."""
        self._step.began["aside"] = self._mark()

    def aside_ended(self) -> None:
        """The work goes on."""
        step, end = self._step, self._mark()
        began = step.began.pop("aside", None)
        if began is not None:
            step.pairs.setdefault("aside", []).append((began, end))

    def compute_ended(self, samples: int) -> None:
        """End the step, with so many samples: at the last `work_ended`, or else now."""
        step = self._step
        end = self._mark() if step.work_ended is None else step.work_ended
        step.samples, step.previous_end = samples, self._previous_end
        self._step = _Step(index=step.index + 1)
        step.ended = self._previous_end = end
        self._pending.append(step)
        if len(self._pending) >= _POLL_AT:
            self.poll()

    def drop_open_step(self) -> None:
        """Forget the marks since the last `compute_ended`: an exhausted loader, an aborted step."""
        step = self._step
        fresh = _Step(index=step.index, cold=step.cold)
        if step == fresh:
            return
        if self._device is not None:
            self._device.reuse(step.marks)
        # The time in between is not a gap: part of it was a step.
        self._previous_end = None
        self._step = fresh

    def poll(self) -> None:
        """Record the steps that the device has passed since. Never blocks."""
        device = self._device
        while self._pending and (device is None or device.ready(self._pending[0].ended)):
            step = self._pending.popleft()
            self._history.append(self._timing(step))
            if device is not None:
                # The last mark stays: the gap to the next step begins there.
                marks = [*step.marks, *([] if step.previous_end is None else [step.previous_end])]
                device.reuse([mark for mark in marks if mark is not step.ended])

    def _record(self) -> Any:
        """Return a new mark of the device."""
        assert self._device is not None
        mark = self._device.mark()
        self._step.marks.append(mark)
        return mark

    def _close(self, phase: str, end: Any) -> None:
        step = self._step
        began = step.began.pop(phase, None)
        if began is not None:
            step.pairs.setdefault(phase, []).append((began, end))
            step.pairs.pop("aside", None)  # it was before what counts as compute
            step.compute_began, step.work_ended = end, None

    def _timing(self, step: _Step) -> StepTiming:
        clock = self._device or self._host
        known = step.index, step.samples, step.cold, step.wait_ms
        stall_ms = step.wait_ms if self._device is None else self._spent_ms(step, "stall")
        transfer_ms, augment_ms = self._spent_ms(step, "transfer"), self._spent_ms(step, "augment")
        aside_ms = self._spent_ms(step, "aside") or 0.0
        compute_ms = gap_ms = step_ms = None
        if step.compute_began is not None:
            compute_ms = max(0.0, clock.elapsed_ms(step.compute_began, step.ended) - aside_ms)
            step_ms = (stall_ms or 0.0) + (transfer_ms or 0.0) + (augment_ms or 0.0) + compute_ms
        if step.previous_end is not None and "stall" in step.pairs:
            gap_ms = aside_ms + clock.elapsed_ms(step.previous_end, step.pairs["stall"][0][0])
            if step.before_work is not None:
                gap_ms += clock.elapsed_ms(*step.before_work)
        return StepTiming(*known, stall_ms, transfer_ms, augment_ms, compute_ms, gap_ms, step_ms)

    def _spent_ms(self, step: _Step, phase: str) -> float | None:
        pairs = step.pairs.get(phase)
        clock = self._device or self._host
        return sum([clock.elapsed_ms(*pair) for pair in pairs]) if pairs else None

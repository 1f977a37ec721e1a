"""The marks of each step become timings, and these numbers: the newest steps, a summary of a stage.

One step, in the order of its marks, on the host and (as events) on the device::

    gap | wait_began .. wait_ended | transfer_began .. transfer_ended | gap |
                                        augment_began .. augment_ended
          work_began .. work_ended | gap

Any of them may be missing; what was not marked is None, never 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lightning_fastdata.device import current_stream, default_type, new_event
from lightning_fastdata.host import clock
from lightning_fastdata.insight.model.finding import (
    STALL_LOW,
    costs_much,
    duration_text,
    steps_text,
)
from lightning_fastdata.insight.waits.causes import WaitCauses

Values: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = Mapping[str, Values]
"""Field name of `StepTiming` -> one float64 per step, oldest first; NaN = not measured."""


class Cold(IntEnum):
    """Why a step is counted apart from the others."""

    NO = 0
    """It is not: a warm step."""
    EPOCH = 1
    """The first of an epoch: workers start, queues are empty. In the first one of a run memory is
    allocated and ``torch.compile`` compiles, too. That it compiles anew later on, as for a last
    batch of another size, has no public sign and counts as warm."""


class StepTiming(NamedTuple):
    """What one step cost; None: not measured. A tuple is made in a quarter of the time."""

    step: int
    """Number of the step in its stage, counted from 0 over all epochs."""
    samples: int
    """Samples in the batch."""
    cold: int
    """One of `Cold`: 0 for a warm step."""
    wait_ms: float | None = None
    """Host time spent asking for the batch, some of it maybe while the device is busy."""
    stall_ms: float | None = None
    """Time the device stood idle because of data; equals ``wait_ms`` where the host is the device.
    This, not ``wait_ms``, is what faster data would save."""
    transfer_ms: float | None = None
    """Host-to-device copy, without the augmentation that runs within the transfer hooks."""
    augment_ms: float | None = None
    """Batch transforms on the device."""
    compute_ms: float | None = None
    """From the last of these marks to the end of the step: forward, backward, optimizer."""
    gap_ms: float | None = None
    """From the end of the previous step to the first wait of this one, and from the batch's arrival
    to the work on it: callbacks, logging, checkpoints, validation. Not part of ``step_ms``."""
    step_ms: float | None = None
    """``stall + transfer + augment + compute``: the step as the device saw it."""


PHASES: Final = {
    "wait": "stall",
    "transfer": "transfer",
    "augment": "augment",
    "compute": "compute",
}
"""Phases of a step, in their order, each with the field of `StageSummary` that holds it (with
``_ms``, that of `StepTiming`): of the wait, the exposed part, so that all add up to the step."""
MOST_RECENT: Final = 512
"""Steps whose single values are reported."""
_COLUMNS = StepTiming._fields
_FIRST_TIMED = _COLUMNS.index("wait_ms")
TIMED = _COLUMNS[_FIRST_TIMED:]
_STEP_MS = TIMED.index("step_ms")
_MOST_LONG: Final = 3
"""More of them come again and again, and are what the training is like."""
_LONG_TIMES: Final = 2
"""As long as the 95th percentile."""
_LONG_HIGH: Final = 0.03
"""Of the time of all steps: what takes less is no matter."""
_ROUNDED_MS: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSummary:
    """One phase over the warm steps of a stage."""

    mean_ms: float
    """Mean over all steps that measured it."""
    p50_ms: float
    """Median over the newest steps."""
    p95_ms: float
    """95th percentile over the newest steps: far above the median means bursts."""
    max_ms: float
    """Largest of all steps."""
    share: float
    """Part of the total step time, 0 to 1. The shares of stall, transfer, augment and compute add
    up to 1; ``wait`` may exceed the stall, and ``gap`` lies outside the step."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StageSummary:
    """Where the warm steps of one stage went; the others (`Cold`) are counted apart."""

    stage: str
    """``train``, ``val``, ``test`` or ``predict``."""
    device: str = "cpu"
    """Type of the device that computed: ``cpu``, ``cuda``, ..."""
    steps: int
    """All steps, cold ones included: one for each batch, however many make an update."""
    samples: int
    """Samples in all steps."""
    duration_s: float
    """Wall time from the first to the last step, gaps included."""
    wait: PhaseSummary | None = None
    stall: PhaseSummary | None = None
    transfer: PhaseSummary | None = None
    augment: PhaseSummary | None = None
    compute: PhaseSummary | None = None
    gap: PhaseSummary | None = None
    step: PhaseSummary | None = None
    cold_steps: int = 0
    """Steps that were first in an epoch."""
    cold_wait_ms: float | None = None
    """Mean host wait of the cold steps: what starting an epoch costs."""
    samples_per_s: float | None = None
    """Samples of warm steps over their ``step_ms``."""
    tokens_per_s: float | None = None
    """Tokens of these samples, padding left out, over the same time; None: not known."""
    samples_per_s_if_data_were_free: float | None = None
    """The same with the stall taken away: the most that faster data can give."""
    long_steps: tuple[StepTiming, ...] = ()
    """Single steps, three at most, so long that the mean of all would be above the 95th percentile:
    means, shares and rates are without them."""
    causes: WaitCauses | None = None
    """Why batches were late, whichever loader they are of; None where one takes no stamps."""

    def __repr__(self) -> str:
        return f"<StageSummary: {self.stage} {', '.join(self.words)}>"

    @property
    def title(self) -> str:
        """The stage, and how long it took, e.g. ``train · 1200 steps in 1 min 34 s``."""
        return f"{self.stage} · {self.words[0]}"

    @property
    def words(self) -> list[str]:
        """How long it took, how much of it was waiting, and how fast it was, if that is known."""
        found = [f"{steps_text(self.steps)} in {duration_text(self.duration_s)}"]
        if self.stall_share is not None:
            found.append(f"wait {self.stall_share:.0%}")
        if self.samples_per_s is not None:
            found.append(f"{self.samples_per_s:.0f} samples/s")
        if self.tokens_per_s is not None:
            found.append(f"{self.tokens_per_s:.0f} tokens/s")
        return found

    @property
    def phases(self) -> dict[str, PhaseSummary]:
        """The measured phases of a step, as `PHASES` has them: they add up to it."""
        phases = {name: getattr(self, key) for name, key in PHASES.items()}
        return {name: phase for name, phase in phases.items() if phase is not None}

    @property
    def stall_share(self) -> float | None:
        """Part of the step in which the device stood idle because of data, 0 to 1."""
        return None if self.stall is None else self.stall.share

    @property
    def stalls(self) -> bool:
        """The device waits for data for 3 % of the step or more, and not for a mere hand-over."""
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


class StepHistory:
    """Totals over all steps, and single values of the newest, in memory that never grows."""

    def __init__(self, window: int = 1024) -> None:
        self._rows: deque[StepTiming] = deque(maxlen=window)
        # Plain lists: a step has few numbers, and numpy's price is one per call.
        # One entry for each member of Cold.
        self._steps = [0 for _ in Cold]
        self._sum = [[0.0] * len(TIMED) for _ in Cold]
        self._count = [[0] * len(TIMED) for _ in Cold]
        self._max = [[-np.inf] * len(TIMED) for _ in Cold]
        self._measured_samples = [0 for _ in Cold]
        self._longest: list[StepTiming] = []
        """The warm steps that took longest, the longest first."""
        self.steps = self.samples = 0

    def append(self, timing: StepTiming) -> None:
        """Count one step; the oldest leaves the window when it is full."""
        self._rows.append(timing)
        kind = int(timing.cold)
        total, count, largest = self._sum[kind], self._count[kind], self._max[kind]
        for i, value in enumerate(timing[_FIRST_TIMED:]):
            if value is not None:
                total[i] += value
                count[i] += 1
                largest[i] = max(largest[i], value)
        if timing.step_ms is not None:
            self._measured_samples[kind] += timing.samples
            if kind == Cold.NO:
                self._note_longest(timing, timing.step_ms)
        self._steps[kind] += 1
        self.steps += 1
        self.samples += timing.samples

    def _note_longest(self, timing: StepTiming, step_ms: float) -> None:
        longest = self._longest
        if len(longest) < _MOST_LONG or step_ms > (longest[-1].step_ms or 0.0):
            longest.append(timing)
            longest.sort(key=lambda each: -(each.step_ms or 0.0))
            del longest[_MOST_LONG:]

    def _long_steps(self, columns: Columns) -> list[StepTiming]:
        """Return the fewest steps without which the mean is not above the 95th percentile.

        None where three would not do, or where they cost next to nothing.
        """
        values = measured(columns["step_ms"])
        whole_ms, count = self._sum[Cold.NO][_STEP_MS], self._count[Cold.NO][_STEP_MS]
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
        """Return how long the device had nothing to do because of data.

        Steps whose figures were given up count as the mean of the others. ``cold``: with the first
        steps of epochs.
        """
        stall = TIMED.index("stall_ms")
        return sum(
            self._sum[kind][stall] / self._count[kind][stall] * self._steps[kind] / 1e3
            for kind in Cold
            if self._count[kind][stall] and (cold or kind is not Cold.EPOCH)
        )

    def newest(self, steps: int | None = None) -> Columns:
        """Return copies of the newest steps, oldest first; None: of all in the window."""
        have = len(self._rows)
        take = have if steps is None else max(0, min(steps, have))
        return columns_of(list(islice(self._rows, have - take, None)))

    def summarize(self, stage: str, *, duration_s: float, device: str = "cpu") -> StageSummary:
        """Return where all steps so far went: the warm ones, unless there are none."""
        kind = next((kind for kind in Cold if any(self._count[kind])), Cold.NO)
        columns = warm_steps(self.newest())
        totals, counts = [*self._sum[kind]], [*self._count[kind]]
        samples = self._measured_samples[kind]
        long_steps = self._long_steps(columns) if kind is Cold.NO else []
        for timing in long_steps:
            samples -= timing.samples
            for i, value in enumerate(timing[_FIRST_TIMED:]):
                totals[i] -= value or 0.0
                counts[i] -= value is not None
        step_total = totals[_STEP_MS]
        phases = {
            name.removesuffix("_ms"): _phase(
                columns[name], totals[i], counts[i], self._max[kind][i], step_total
            )
            for i, name in enumerate(TIMED)
        }
        free_rate = None
        if phases["stall"] is not None:
            free_rate = _per_second(samples, step_total - totals[TIMED.index("stall_ms")])
        first_waits = self._count[Cold.EPOCH][0]
        return StageSummary(
            stage=stage,
            device=device,
            steps=self.steps,
            samples=self.samples,
            duration_s=duration_s,
            cold_steps=self._steps[Cold.EPOCH],
            cold_wait_ms=self._sum[Cold.EPOCH][0] / first_waits if first_waits else None,
            samples_per_s=_per_second(samples, step_total),
            samples_per_s_if_data_were_free=free_rate,
            long_steps=tuple(sorted(long_steps)),
            causes=None,
            tokens_per_s=None,
            **phases,
        )


def columns_of(steps: Sequence[StepTiming]) -> Columns:
    """Return the columns of single timings, in their order."""
    # None becomes NaN.
    rows = np.array(steps, dtype=np.float64).reshape(len(steps), len(_COLUMNS))
    return {name: rows[:, i].copy() for i, name in enumerate(_COLUMNS)}


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
    return float(samples * 1e3 / total_ms) if total_ms > 0 and samples else None


def _phase(
    newest: Values, total: float, count: int, largest: float, step_total: float
) -> PhaseSummary | None:
    if not count:
        return None
    values = measured(newest)
    if not values.size:  # measured once, but not in the window: the mean is all that is known
        values = np.array([total / count])
    p50, p95 = p50_and_p95(values)
    return PhaseSummary(
        mean_ms=float(total / count),
        p50_ms=p50,
        p95_ms=p95,
        max_ms=largest,
        share=float(total / step_total) if step_total > 0 else 0.0,
    )


class HostClock:
    """The host's own clock in nanoseconds: exact, and always ready."""

    __slots__ = ("mark",)

    def __init__(self, clock_ns: Callable[[], int] = clock.monotonic_ns) -> None:
        self.mark = clock_ns

    def ready(self, mark: int) -> bool:  # noqa: ARG002
        """Return True: the host has passed every mark it made."""
        return True

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Return the milliseconds between two marks."""
        return (end - begin) / 1e6

    def reuse(self, marks: Iterable[int]) -> None:
        """Do nothing: a time holds no resource."""


class EventClock:
    """Events on the current stream of a device with streams, or of the current device.

    An event is recorded anew when its mark is not needed any more, so that there are as many as
    for the steps that the host is ahead of the device, seven for each.
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


DeviceClock: TypeAlias = HostClock | EventClock
"""One clock serves one timeline."""

_POLL_AT: Final = 16
"""Ended steps to collect before they are recorded. In one go they cost a third of what each costs
in the middle of a training step, where nothing of this is in the processor's caches."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """One step between its first mark and the moment the device has passed its last one."""

    began: dict[str, Any] = field(default_factory=dict)
    """Phase -> the mark of its begin, while it is under way."""
    pairs: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)
    """Phase -> its intervals."""
    wait_began: int | None = None
    """Host mark of the wait that is under way."""
    wait_ms: float | None = None
    marks: list[Any] = field(default_factory=list)
    """Those of a device with a clock of its own."""
    compute_began: Any = None
    """Newest completed end mark: what follows it is compute."""
    before_work: tuple[Any, Any] | None = None
    """What lay between the batch's arrival and the work on it: a part of the gap."""
    work_ended: Any = None
    """Mark of the end of the step, where it came before the end was counted."""
    augment_is_outer: bool = False
    """The transfer began within an augmentation."""
    touched: bool = False
    """Whether any mark was made."""
    index: int = 0
    cold: Cold = Cold.NO
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
    Without a clock of the ``device`` the host is it; so many of the newest steps as ``window`` says
    keep their single values.
    """

    def __init__(
        self,
        *,
        host: HostClock | None = None,
        device: DeviceClock | None = None,
        window: int = 1024,
    ) -> None:
        self._host = HostClock() if host is None else host
        self._device: DeviceClock = self._host if device is None else device
        self._same = self._device is self._host
        self._step = _Step(cold=Cold.EPOCH)
        self._pending: deque[_Step] = deque()
        self._previous_end: Any = None
        self._history = StepHistory(window)

    @property
    def history(self) -> StepHistory:
        """All steps that the device has passed by now: their totals, and the newest ones."""
        self.poll()
        return self._history

    def epoch_began(self) -> None:
        """The next step to end is the first of an epoch; the first step of all is one anyway."""
        self._step.cold = Cold.EPOCH

    def paused(self) -> None:
        """What lies between the last step and the next one is no gap."""
        self._previous_end = None

    def wait_began(self) -> None:
        """The host asks for a batch."""
        step = self._step
        step.wait_began = self._host.mark()
        step.began["stall"] = self._mark(host_mark=step.wait_began)

    def wait_ended(self) -> None:
        """The host has the batch."""
        step = self._step
        if step.wait_began is None:
            return
        now = self._host.mark()
        step.wait_ms = (step.wait_ms or 0.0) + self._host.elapsed_ms(step.wait_began, now)
        step.wait_began = None
        self._close("stall", self._mark(host_mark=now))

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
        """The step itself starts; what was done since the batch arrived is gap."""
        step = self._step
        began = self._mark()
        if step.compute_began is not None:
            step.before_work = step.compute_began, began
            step.compute_began = began

    def work_ended(self) -> None:
        """The last work of the step is given to the device; what comes after it is gap."""
        self._step.work_ended = self._mark()

    def compute_ended(self, samples: int) -> None:
        """The step with so many samples is over; it ended at the last `work_ended`, or else now."""
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
        if not step.touched:
            return
        self._device.reuse(step.marks)
        # What lay between is not a gap: part of it was a step.
        self._previous_end = None
        self._step = _Step(index=step.index, cold=step.cold)

    def poll(self) -> None:
        """Record the steps that the device has passed since. Never blocks."""
        while self._pending and self._device.ready(self._pending[0].ended):
            step = self._pending.popleft()
            self._history.append(self._timing(step))
            if not self._same:
                # The last mark stays: the gap to the next step begins there.
                marks = [*step.marks, *([] if step.previous_end is None else [step.previous_end])]
                self._device.reuse([mark for mark in marks if mark is not step.ended])

    def _mark(self, host_mark: int | None = None) -> Any:
        step = self._step
        step.touched = True
        if self._same:
            return self._device.mark() if host_mark is None else host_mark
        mark = self._device.mark()
        step.marks.append(mark)
        return mark

    def _close(self, phase: str, end: Any) -> None:
        step = self._step
        began = step.began.pop(phase, None)
        if began is not None:
            step.pairs.setdefault(phase, []).append((began, end))
            step.compute_began, step.work_ended = end, None

    def _timing(self, step: _Step) -> StepTiming:
        clock = self._device
        known = step.index, step.samples, step.cold, step.wait_ms
        stall_ms = step.wait_ms if self._same else self._spent_ms(step, "stall")
        transfer_ms, augment_ms = self._spent_ms(step, "transfer"), self._spent_ms(step, "augment")
        compute_ms = gap_ms = step_ms = None
        if step.compute_began is not None:
            compute_ms = clock.elapsed_ms(step.compute_began, step.ended)
            step_ms = (stall_ms or 0.0) + (transfer_ms or 0.0) + (augment_ms or 0.0) + compute_ms
        if step.previous_end is not None and "stall" in step.pairs:
            gap_ms = clock.elapsed_ms(step.previous_end, step.pairs["stall"][0][0])
            if step.before_work is not None:
                gap_ms += clock.elapsed_ms(*step.before_work)
        return StepTiming(*known, stall_ms, transfer_ms, augment_ms, compute_ms, gap_ms, step_ms)

    def _spent_ms(self, step: _Step, phase: str) -> float | None:
        pairs = step.pairs.get(phase)
        return sum([self._device.elapsed_ms(*pair) for pair in pairs]) if pairs else None

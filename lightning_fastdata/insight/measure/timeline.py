"""The marks of each step become timings: how long it waited, moved, augmented and computed.

One step, in the order of its marks, on the host and (as events) on the device::

    gap | wait_began .. wait_ended | transfer_began .. transfer_ended | gap |
                                        augment_began .. augment_ended
          work_began .. work_ended | gap

Any of them may be missing; what was not marked is None, never 0.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from lightning_fastdata.device.backend import current_stream, default_type, new_event
from lightning_fastdata.host import clock
from lightning_fastdata.insight.measure.metrics import Cold, StepHistory, StepTiming

if TYPE_CHECKING:
    from collections.abc import Callable


class HostClock:
    """The host's own clock in nanoseconds: exact, always ready, nothing to give back."""

    __slots__ = ("mark",)

    def __init__(self, clock_ns: Callable[[], int] = clock.monotonic_ns) -> None:
        self.mark = clock_ns

    def ready(self, mark: int) -> bool:  # noqa: ARG002
        """Return True: the host has passed every mark it made."""
        return True

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Return the milliseconds between two marks."""
        return (end - begin) / 1e6

    def forget_before(self, mark: int) -> None:
        """Do nothing: a time holds no resource."""

    forget_from = forget_before


class EventClock:
    """A ring of events on the current stream of a device with streams, or of the current device.

    Events are created once and recorded again and again. A mark is given out only while its event
    is not needed for an older mark; otherwise `mark` returns None and the caller goes without. A
    step uses up to seven, so that the host may run about 140 steps ahead of the device.
    """

    __slots__ = ("_device", "_events", "_newest", "_oldest")

    def __init__(
        self,
        capacity: int = 1024,
        make_event: Callable[[], Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        if make_event is None:
            make_event = partial(new_event, device or torch.device(default_type()), timed=True)
        self._events = tuple(make_event() for _ in range(capacity))
        self._device = device
        self._oldest = self._newest = 0

    def mark(self) -> int | None:
        """Record the next free event; None if the ring is full."""
        ticket = self._newest
        if ticket - self._oldest >= len(self._events):
            return None
        event = self._event(ticket)
        if self._device is None:
            event.record()
        else:
            event.record(current_stream(self._device))
        self._newest = ticket + 1
        return ticket

    def ready(self, mark: int) -> bool:
        """Return whether the device has passed the mark. Never blocks."""
        return bool(self._event(mark).query())

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Return the milliseconds between two marks that are ready."""
        return float(self._event(begin).elapsed_time(self._event(end)))

    def forget_before(self, mark: int) -> None:
        """Give back all marks older than this one."""
        self._oldest = min(max(self._oldest, mark), self._newest)

    def forget_from(self, mark: int) -> None:
        """Give back this mark and all newer ones."""
        self._newest = max(min(self._newest, mark), self._oldest)

    def _event(self, mark: int) -> Any:
        return self._events[mark % len(self._events)]


DeviceClock: TypeAlias = HostClock | EventClock
"""One clock serves one timeline."""

_POLL_AT: Final = 16
"""Ended steps to collect before they are recorded. In one go they cost a third of what each costs
in the middle of a training step, where nothing of this is in the processor's caches."""


class _Phase:
    """All intervals of one phase within the open step."""

    __slots__ = ("began", "pairs")

    def __init__(self) -> None:
        self.began: int | None = None
        self.pairs: list[tuple[int, int]] = []

    def elapsed_ms(self, clock: DeviceClock) -> float | None:
        if not self.pairs:
            return None
        return sum(clock.elapsed_ms(begin, end) for begin, end in self.pairs)


@dataclass(slots=True, kw_only=True)
class _Step:
    """One step between its first mark and the moment the device has passed its last one."""

    stall: _Phase = field(default_factory=_Phase)
    transfer: _Phase = field(default_factory=_Phase)
    augment: _Phase = field(default_factory=_Phase)
    wait_began: int | None = None
    """Host mark of the wait that is under way."""
    wait_ms: float | None = None
    first_mark: int | None = None
    """Oldest device mark of the step: where to give marks back from."""
    compute_began: int | None = None
    """Newest completed end mark: what follows it is compute."""
    before_work: tuple[int, int] | None = None
    """What lay between the batch's arrival and the work on it: a part of the gap."""
    work_ended: int | None = None
    """Mark of the end of the step, where it came before the end was counted."""
    lost: bool = False
    """Whether the device clock had no room: no device figure of this step can be trusted."""
    touched: bool = False
    """Whether any mark was made."""
    index: int = 0
    cold: Cold = Cold.NO
    # Filled at the end of the step.
    samples: int = 0
    ended: int = 0
    previous_end: int | None = None


class StepTimeline:
    """Receives the marks of one stage's steps and keeps what they cost.

    The caller marks in the order of one step. Waits may come several times before one
    `compute_ended` (loaders of unknown length fetch ahead; several loaders) and then add up. An
    ``..._ended`` without its ``..._began`` is ignored; a second ``..._began`` replaces the first. A
    step is recorded when the device has passed its last mark, in order, with no synchronisation.

    Args:
        host: The clock for waits.
        device: The clock for all that the device does; None: the host is the device.
        window: How many of the newest steps keep their single values.
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
        self._previous_end: int | None = None
        self.dropped_steps = 0
        self._history = StepHistory(window)

    @property
    def history(self) -> StepHistory:
        """All steps that the device has passed by now: their totals, and the newest ones."""
        self.poll()
        return self._history

    def epoch_began(self) -> None:
        """The next step to end is the first of an epoch; the first step of all is one anyway."""
        self._step.cold = Cold.EPOCH

    def resumed(self) -> None:
        """The next step to end comes after a pause within its epoch."""
        self._step.cold = self._step.cold or Cold.RESUMED

    def wait_began(self) -> None:
        """The host asks for a batch."""
        step = self._step
        step.wait_began = self._host.mark()
        step.stall.began = self._mark(host_mark=step.wait_began)

    def wait_ended(self) -> None:
        """The host has the batch."""
        step = self._step
        if step.wait_began is None:
            return
        now = self._host.mark()
        step.wait_ms = (step.wait_ms or 0.0) + self._host.elapsed_ms(step.wait_began, now)
        step.wait_began = None
        self._close(step.stall, self._mark(host_mark=now))

    def transfer_began(self) -> None:
        """The batch starts its way to the device."""
        self._step.transfer.began = self._mark()

    def transfer_ended(self) -> None:
        """The batch is on the device; an augmentation within is taken off the transfer."""
        self._close(self._step.transfer, self._mark())

    def augment_began(self) -> None:
        """Transforms start on the device."""
        self._step.augment.began = self._mark()

    def augment_ended(self) -> None:
        """Transforms on the device are done."""
        step = self._step
        began, end = step.augment.began, self._mark()
        self._close(step.augment, end)
        if began is not None and end is not None and step.transfer.began is not None:
            # During a transfer: cut it there, so that the two never count the same time.
            if step.transfer.began <= began:
                step.transfer.pairs.append((step.transfer.began, began))
            step.transfer.began = end

    def work_began(self) -> None:
        """The step itself starts; what was done since the batch arrived is gap."""
        step = self._step
        began = self._mark()
        if began is not None and step.compute_began is not None:
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
        if end is None or step.lost:
            self._give_back(step)
            self._previous_end = None
            self.dropped_steps += 1
            self._history.append(self._timing(step))
        else:
            step.ended = self._previous_end = end
            self._pending.append(step)
        if len(self._pending) >= _POLL_AT:
            self.poll()

    def drop_open_step(self) -> None:
        """Forget the marks since the last `compute_ended`: an exhausted loader, an aborted step."""
        step = self._step
        if not step.touched:
            return
        self._give_back(step)
        # What lay between is not a gap: part of it was a step.
        self._previous_end = None
        self._step = _Step(index=step.index, cold=step.cold)

    def poll(self) -> None:
        """Record the steps that the device has passed since. Never blocks."""
        while self._pending and self._device.ready(self._pending[0].ended):
            step = self._pending.popleft()
            self._history.append(self._timing(step))
            # The last mark stays: the gap to the next step begins there.
            self._device.forget_before(step.ended)

    def _mark(self, host_mark: int | None = None) -> int | None:
        step = self._step
        step.touched = True
        if step.lost:
            return None
        mark = host_mark if self._same and host_mark is not None else self._device.mark()
        if mark is None:
            step.lost = True
        elif step.first_mark is None:
            step.first_mark = mark
        return mark

    def _close(self, phase: _Phase, end: int | None) -> None:
        if phase.began is not None and end is not None:
            phase.pairs.append((phase.began, end))
            self._step.compute_began = end
            self._step.work_ended = None
        phase.began = None

    def _give_back(self, step: _Step) -> None:
        if step.first_mark is not None:
            self._device.forget_from(step.first_mark)

    def _timing(self, step: _Step) -> StepTiming:
        clock = self._device
        known = step.index, step.samples, step.cold, step.wait_ms
        if step.lost:
            return StepTiming(*known)
        stall_ms = step.wait_ms if self._same else step.stall.elapsed_ms(clock)
        transfer_ms = step.transfer.elapsed_ms(clock)
        augment_ms = step.augment.elapsed_ms(clock)
        compute_ms = gap_ms = step_ms = None
        if step.compute_began is not None:
            compute_ms = clock.elapsed_ms(step.compute_began, step.ended)
            step_ms = (stall_ms or 0.0) + (transfer_ms or 0.0) + (augment_ms or 0.0) + compute_ms
        if step.previous_end is not None and step.stall.pairs:
            gap_ms = clock.elapsed_ms(step.previous_end, step.stall.pairs[0][0])
            if step.before_work is not None:
                gap_ms += clock.elapsed_ms(*step.before_work)
        return StepTiming(*known, stall_ms, transfer_ms, augment_ms, compute_ms, gap_ms, step_ms)

"""When each part of a batch was made, by whom, and what held it up.

All times are nanoseconds of ``CLOCK_MONOTONIC``, which is one clock for all processes of a machine;
those of other machines are moved to it (:class:`ClockOffset`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from lightning_fastdata.host import clock

if TYPE_CHECKING:
    from lightning_fastdata.stamps.lines import LineTimes, LineWatch

T = TypeVar("T")
_DRIFT: Final = 1e-4
"""Greatest share of the time by which two clocks drift apart: ten times as much as clocks do that
NTP looks after."""


class OwnStamps(NamedTuple):
    """What the training process did by itself during one wait; nanoseconds."""

    sampled_ns: tuple[tuple[int, int], ...] = ()
    """Begin and end of each call of the sampler or batch sampler."""
    unpacked_ns: tuple[tuple[int, int], ...] = ()
    """Begin and end of each unpickling of a batch; they lie as far apart as its CPU time."""
    runqueue_ns: int | None = None
    """Time ready to run while other threads had the CPUs; None: not reported."""


class WaitWatch:
    """Notes what the training process does by itself from one request to its delivery."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._schedule: clock.ThreadSchedule | None = None
        self._queued: tuple[int, int] | None = None
        self._recorded = False
        self._sampled: list[tuple[int, int]] = []
        self._unpacked: list[tuple[int, int]] = []
        self.requested_ns = 0

    def requested(self, *, recorded: bool) -> None:
        """Note that a batch is asked for now; the kernel is asked only for what is recorded."""
        self._queued, self._recorded = None, recorded
        if recorded:
            thread = threading.get_native_id()
            if self._schedule is None or thread != self._thread:  # the file belongs to its thread
                self._thread, self._schedule = thread, clock.ThreadSchedule()
            self._queued = self._schedule.read_ns()
        self._sampled.clear()
        self._unpacked.clear()
        self.requested_ns = clock.monotonic_ns()

    def sampled(self, sampler: Iterator[T]) -> T:
        """Return the next item of a sampler; :exc:`StopIteration` where it ends."""
        began_ns = clock.monotonic_ns()
        try:
            return next(sampler)
        finally:
            self._sampled.append((began_ns, clock.monotonic_ns()))

    def unpacked(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns, which unpacks a batch; its CPU time is noted."""
        if not self._recorded:
            return call()
        began_ns = clock.thread_time_ns()
        try:
            return call()
        finally:
            ended_ns = clock.monotonic_ns()
            self._unpacked.append((ended_ns - (clock.thread_time_ns() - began_ns), ended_ns))

    def delivered(self) -> OwnStamps:
        """Return what was noted since the batch was asked for; it is delivered now."""
        queued_ns = None
        if self._queued is not None and self._schedule is not None:
            now = self._schedule.read_ns()
            queued_ns = None if now is None else now[1] - self._queued[1]
        return OwnStamps(tuple(self._sampled), tuple(self._unpacked), queued_ns)


class Way(NamedTuple):
    """How a batch came here after it was made."""

    taken_ns: int
    """Time that the training process took to ask for the batch and to copy it."""
    landed_ns: int
    """When the copy of the batch in the training's memory was complete."""
    free_cpus: float | None = None
    """CPUs of the cluster that nobody held just before; None: they were not counted."""


class TaskStamps(NamedTuple):
    """What one process did in one go for one batch."""

    process: int
    """Number of the side process; -1 for the training process itself."""
    began_ns: int
    ended_ns: int
    cpu_ns: int | None
    """Time on a CPU; None where the kernel does not report it, or the task was too short to ask."""
    runqueue_ns: int | None
    """Time ready to run while other threads had the CPUs; None as for ``cpu_ns``."""
    samples: int
    read_ns: int
    """Time in the dataset: reading, decoding and transforming."""
    collate_ns: int
    """Time to collate the samples, or to write them into the batch."""
    slowest_ns: int
    """Time of the sample that took longest; 0 where samples are not read one at a time."""
    slowest_index: object
    """Index of the slowest sample; in an iterable dataset its place in the stream, from 0."""
    lines: LineTimes | None = None
    """Lines of the user's code in which reading spent its time; None in most tasks: not sampled."""
    helpers_ns: int | None = None
    """CPU time of the other threads of the process meanwhile, such as torch and OpenCV start; None
    in the training process, in actors, and where the task was too short to ask."""
    way: Way | None = None
    """How an actor's batch came here; None: the batch was made in memory that is shared."""
    drew: bool = False
    """Whether the process has seen reading draw from generators, in this task or before."""

    def held_ns(self, began_ns: float, ended_ns: float) -> float:
        """Return the time of an interval that the task was on a CPU, by its mean; 0: not known."""
        overlap = min(self.ended_ns, ended_ns) - max(self.began_ns, began_ns)
        if overlap <= 0 or self.cpu_ns is None:
            return 0.0
        return overlap * min(1.0, self.cpu_ns / max(1, self.ended_ns - self.began_ns))


_NOTHING: Final = OwnStamps()


class ReadRates(NamedTuple):
    """How many samples a second few workers read together, and many of them."""

    few: int
    few_per_s: float
    many: int
    many_per_s: float


class BatchStamps(NamedTuple):
    """The way of one batch that was delivered."""

    number: int
    """Number of the batch among those of the loader."""
    samples: int
    requested_ns: int
    """When the training asked for the batch."""
    delivered_ns: int
    """When the training got the batch."""
    tasks: tuple[TaskStamps, ...]
    """Tasks that made the batch, in the order in which they ended."""
    first: bool = False
    """Whether it was the first batch of its epoch."""
    pinned_ns: tuple[int, int] | None = None
    """Begin and end of the copy into page-locked memory; None: no thread makes one."""
    own: OwnStamps = _NOTHING
    """What the training process did by itself from request to delivery."""
    rates: ReadRates | None = None
    """Result of a trial with half of the workers just before; None: there was none."""


_WORTH_ASKING_NS: Final = 200_000
"""Nanoseconds of a task above which the kernel is asked, at some us each, about the next one."""


class TaskWatch:
    """Takes the stamps of the tasks of one thread, in that thread.

    Args:
        process: Number of the side process; -1 for the training process itself.
        lines: Names the lines of the user's code in which some tasks are.
        alone: Whether the process does nothing else, so that what its other threads compute is for
            these tasks.
    """

    def __init__(
        self,
        process: int,
        lines: LineWatch | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self._process = process
        self._lines = lines
        self._alone = alone
        self._schedule = clock.ThreadSchedule()
        self._long = True
        self._clear()

    def _clear(self) -> None:
        self._began_ns = clock.monotonic_ns()
        self._scheduled = self._schedule.read_ns() if self._long else None
        self._helped = _helpers_ns() if self._long and self._alone else None
        self._named: LineTimes | None = None
        self.samples = self.read_ns = self.collate_ns = self.slowest_ns = 0
        self.slowest_index: object = None

    def begin(self) -> None:
        """Start a task."""
        if self._lines is not None:
            self._lines.end()
        self._clear()
        if self._lines is not None:
            self._lines.begin()

    def read(self, index: object, began_ns: int, samples: int = 1) -> None:
        """Note that a sample, or several in one call, were read, from ``began_ns`` until now."""
        spent = clock.monotonic_ns() - began_ns
        self.samples += samples
        self.read_ns += spent
        if samples == 1 and spent > self.slowest_ns:
            self.slowest_ns, self.slowest_index = spent, index

    def collated(self, began_ns: int) -> None:
        """Note collation from ``began_ns`` until now."""
        self.collate_ns += clock.monotonic_ns() - began_ns

    def all_read(self) -> None:
        """Note that no sample will follow."""
        if self._lines is not None:
            self._named = self._lines.end() or self._named

    def end(self) -> TaskStamps:
        """Return the stamps of the task; to be called for a task that failed, too."""
        self.all_read()
        cpu = runqueue = helpers = None
        if self._scheduled is not None and (scheduled := self._schedule.read_ns()) is not None:
            cpu = scheduled[0] - self._scheduled[0]
            runqueue = scheduled[1] - self._scheduled[1]
            if self._helped is not None:
                helpers = max(0, _helpers_ns() - self._helped)
        ended_ns = clock.monotonic_ns()
        self._long = ended_ns - self._began_ns > _WORTH_ASKING_NS
        return TaskStamps(
            self._process,
            self._began_ns,
            ended_ns,
            cpu,
            runqueue,
            self.samples,
            self.read_ns,
            self.collate_ns,
            self.slowest_ns,
            self.slowest_index,
            self._named,
            helpers,
        )


def _helpers_ns() -> int:
    """Return the CPU time of all other threads of this process."""
    return clock.process_time_ns() - clock.thread_time_ns()


@dataclass(slots=True)
class ClockOffset:
    """How far another machine's clock is ahead of ours, as closely as questions and answers tell.

    A task there begins after it was asked for and ends before its answer is here. So each batch
    bounds the offset from both sides, most closely where the actor was idle and its answer was
    waited for. Bounds get looser with time, as clocks drift.
    """

    offset_ns: float = 0.0
    bounds_ns: tuple[float, float] | None = None
    """Least and greatest possible offset; None: nothing is known."""
    as_of_ns: int = 0
    """When something was last learned of the offset, by our clock."""

    def note(self, asked_ns: int, began_ns: int, ended_ns: int, got_ns: int) -> None:
        """Learn from a task that was asked for, was done on the other machine, and came back.

        ``asked_ns`` and ``got_ns`` are times of our clock, the others of the other clock.
        """
        meanwhile = _DRIFT * (got_ns - asked_ns)
        least, most = ended_ns - got_ns - meanwhile, began_ns - asked_ns + meanwhile
        known = self.bounds_ns
        if known is not None:
            loose = _DRIFT * max(0, got_ns - self.as_of_ns)
            closer = max(least, known[0] - loose), min(most, known[1] + loose)
            # Where these and the known exclude each other a clock was set anew, and only these
            # count.
            least, most = closer if closer[0] <= closer[1] else (least, most)
        if known is None or most - least <= known[1] - known[0]:
            self.offset_ns = (least + most) / 2
        self.offset_ns = min(max(self.offset_ns, least), most)
        self.bounds_ns, self.as_of_ns = (least, most), got_ns

    def aligned(self, asked_ns: int, began_ns: int, ended_ns: int, got_ns: int) -> tuple[int, int]:
        """Return when a task began and ended on the other machine, by our clock.

        That is never before it was asked for, and never after its answer was here.
        """
        began, ended = round(began_ns - self.offset_ns), round(ended_ns - self.offset_ns)
        shift = max(0, asked_ns - began) or min(0, got_ns - ended)
        began = min(max(began + shift, asked_ns), got_ns)
        return began, min(max(ended + shift, began), got_ns)

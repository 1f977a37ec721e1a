"""When each part of a batch was made, by whom, and what held it up.

All times are nanoseconds of ``CLOCK_MONOTONIC``, which is one clock for all processes of a machine;
those of other machines are moved to it (:mod:`.travel`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from lightning_fastdata.host import clock

if TYPE_CHECKING:
    from lightning_fastdata.stamps.lines import LineTime, LineWatch
    from lightning_fastdata.stamps.travel import Way

T = TypeVar("T")


class OwnStamps(NamedTuple):
    """What the training process did by itself during one wait; nanoseconds."""

    sampled_ns: tuple[tuple[int, int], ...] = ()
    """Begin and end of each call of the sampler or batch sampler."""
    unpacked_ns: tuple[tuple[int, int], ...] = ()
    """Begin and end of each unpickling of a batch; as long as that took a CPU."""
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
            if self._schedule is None or thread != self._thread:  # the file is of its thread
                self._thread, self._schedule = thread, clock.ThreadSchedule()
            self._queued = self._schedule.read_ns()
        self._sampled.clear()
        self._unpacked.clear()
        self.requested_ns = clock.monotonic_ns()

    def sampled(self, sampler: Iterator[T]) -> T:
        """Return the next of what a sampler gives; :exc:`StopIteration` where it ends."""
        began_ns = clock.monotonic_ns()
        try:
            return next(sampler)
        finally:
            self._sampled.append((began_ns, clock.monotonic_ns()))

    def unpacked(self, call: Callable[[], T]) -> T:
        """Return what a call returns that takes a batch out of what it was sent in."""
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


class TaskStamps(NamedTuple):
    """What one process did in one go for one batch."""

    process: int
    """Number of the side process; -1 for the training process itself."""
    began_ns: int
    ended_ns: int
    cpu_ns: int | None
    """Time on a CPU; None where the kernel does not report it, or the task was too short to ask."""
    runqueue_ns: int | None
    """Time ready to run while other threads had the CPUs; None as above."""
    samples: int
    read_ns: int
    """Time in the dataset: reading, decoding and transforming."""
    collate_ns: int
    """Time to collate the samples, or to write them into the batch."""
    slowest_ns: int
    """Time of the sample that took longest; 0 where samples are not read one at a time."""
    slowest_index: object
    """Its index in the dataset; of an iterable dataset its place in the stream, from 0."""
    lines: tuple[LineTime, ...] | None = None
    """In which lines of the user's code reading spent its time; None in most tasks: not sampled."""
    helpers_ns: int | None = None
    """CPU time of the other threads of the process meanwhile, such as torch and OpenCV start; None
    in the training process, and where the task was too short to ask."""
    way: Way | None = None
    """How an actor's batch came here; None: it was made in memory that is shared."""

    def held_ns(self, began_ns: float, ended_ns: float) -> float:
        """Return how much of an interval it was on a CPU, by its mean; 0 if that is not known."""
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
    """Counts the batches of the loader."""
    samples: int
    requested_ns: int
    """When the training asked for it."""
    delivered_ns: int
    """When the training got it."""
    tasks: tuple[TaskStamps, ...]
    """In the order in which they ended."""
    ready_ahead: int
    """Later batches that were complete when it was asked for."""
    first: bool = False
    """Whether it was the first batch of its epoch."""
    pinned_ns: tuple[int, int] | None = None
    """When its copy into page-locked memory began and ended; None: no thread makes one."""
    own: OwnStamps = _NOTHING
    """What the training process did by itself meanwhile."""
    rates: ReadRates | None = None
    """What a trial with half of the workers has shown just before; None: there was none."""

    @classmethod
    def of_caller(
        cls,
        number: int,
        requested_ns: int,
        task: TaskStamps,
        *,
        first: bool,
        own: OwnStamps = _NOTHING,
    ) -> BatchStamps:
        """Return the stamps of a batch that was made in one task by its caller."""
        times = requested_ns, task.ended_ns
        return cls(number, task.samples, *times, (task,), ready_ahead=0, first=first, own=own)


_WORTH_ASKING_NS: Final = 200_000
"""The kernel's answer costs some microseconds, which a thread with shorter tasks is spared."""


class TaskWatch:
    """Takes the stamps of the tasks of one thread, in that thread.

    Args:
        process: Number of the side process; -1 for the training process itself.
        lines: Names the lines of the user's code in which some tasks are.
        alone: The process does nothing else, so that what its other threads compute is for these
            tasks.
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
        self._named: tuple[LineTime, ...] | None = None
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
        """Note a sample, or several in one call, whose reading began then and has ended."""
        spent = clock.monotonic_ns() - began_ns
        self.samples += samples
        self.read_ns += spent
        if samples == 1 and spent > self.slowest_ns:
            self.slowest_ns, self.slowest_index = spent, index

    def collated(self, began_ns: int) -> None:
        """Note collation that began then and has ended."""
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

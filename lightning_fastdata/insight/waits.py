"""Why batches were late: every wait for one, cut along the way that the batch took, and added up.

A batch is late because its last task ended late. The wait for it is cut by what that task's process
did meanwhile: this task, tasks before it, or nothing; then comes the hand-over. A complete batch
may wait while its process computes the next one, which holds the interpreter that the hand-over
needs. A batch of an actor comes over a network, or out of an object store, while the actor goes on
with the next one. The parts of a wait add up to the wait.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final, SupportsInt

import numpy as np

from lightning_fastdata.errors import printable, rounded
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps
from lightning_fastdata.stamps.lines import ELSEWHERE, Place

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NS_PER_MS: Final = 1e6
SLOW_FACTOR: Final = 4.0
"""A sample is slow, and holds up batches behind it, from this many times the typical time on."""
_KEPT_TASKS: Final = 64
_TYPICAL_WEIGHT: Final = 0.05
_BY_KIND: Final = ("read_cpu_ms", "read_runqueue_ms", "read_blocked_ms")
_OPTIONAL: Final = ("read_ms", "pin_ms", "sampler_ms", "unpack_ms", "queued_ms", "network_ms")
_SLOWEST: Final = 5
_MOST_HELD: Final = 32
_KEPT_SLOW: Final = 256
_MOST_LONGEST: Final = 3
WORTH_SAYING: Final = 0.05
"""Share of a wait or of reading, 0 to 1, up to which a cost is not put into words."""
_MOST_LINES: Final = 20
_KEPT_LINES: Final = 256
_FEWEST_NS: Final = 20_000_000
"""Least time of reading that was looked at, in ns, from which on anything is said of it."""
_MOST_OF_IT: Final = 0.5
_MUCH_OF_IT: Final = 0.3
_STANDS_OUT: Final = 0.2
"""Share of reading from which on a line is named as the place of a cause."""
_LOCKS_OF_PROCESSES: Final = ("SemLock", "filelock")
"""Parts of the names of library calls that wait for what other processes hold."""
_METHODS: Final = ("__call__", "forward", "get_params", "make_params", "transform")
"""Names of the methods that torchvision's operations run in."""


@dataclass(frozen=True, slots=True)
class WaitParts:
    """Where the time of one or more waits went; ``PART_WORDS`` says what each part is.

    ``read_ms`` is reading that cannot be divided among the three parts before it.
    """

    read_cpu_ms: float = 0.0
    read_runqueue_ms: float = 0.0
    read_blocked_ms: float = 0.0
    read_ms: float = 0.0
    slow_sample_ms: float = 0.0
    collate_ms: float = 0.0
    pin_ms: float = 0.0
    sampler_ms: float = 0.0
    unpack_ms: float = 0.0
    queued_ms: float = 0.0
    network_ms: float = 0.0
    handover_ms: float = 0.0
    idle_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """Whole time waited, in ms."""
        return float(sum(astuple(self)))

    def shares(self) -> dict[str, float]:
        """Return each part as a share of the total, 0 to 1; nothing if there was no wait."""
        total = self.total_ms
        if total <= 0:
            return {}
        return {name.removesuffix("_ms"): ms / total for name, ms in asdict(self).items()}


PART_WORDS: Final[Mapping[str, str]] = {
    "read_cpu_ms": "reading and transforming samples, on a CPU",
    "read_runqueue_ms": "reading was ready to go on, but other threads had the CPUs",
    "read_blocked_ms": "reading waited for storage, a network or a lock",
    "read_ms": "reading and transforming samples",
    "slow_sample_ms": "single samples that took several times as long as the others",
    "collate_ms": "collating samples, or writing them into the batch",
    "pin_ms": "copying batches into page-locked memory",
    "sampler_ms": "asking the sampler which samples come next, in the training process",
    "unpack_ms": "unpickling batches, in the training process",
    "queued_ms": "the training process was ready to take batches, but others had the CPUs",
    "network_ms": "batches of actors on their way: object store, network, copy",
    "handover_ms": "handing complete batches over to the training process",
    "idle_ms": "nothing was being done for the batch: workers started, or had nothing to do",
}

PARTS: Final = tuple(part.name for part in fields(WaitParts))
_CPU, _RUNQUEUE, _BLOCKED, _READ, _SLOW, _COLLATE, _PIN = range(7)
_SAMPLER, _UNPACK, _QUEUED, _NETWORK, _HANDOVER, _IDLE = range(7, len(PARTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSample:
    """A sample that held up its batch."""

    index: int | str | None
    """Index of the sample in the dataset, as JSON can hold it."""
    ms: float
    """Time that the sample took, in ms."""
    typical_ms: float
    """Time that samples take as a rule, in ms."""
    path: str | None = None
    """File of the sample; None where it is not known."""


class WaitCutter:
    """Cuts the waits of one loader, in the order of its batches."""

    def __init__(self) -> None:
        self._tasks: defaultdict[int, deque[TaskStamps]] = defaultdict(
            lambda: deque(maxlen=_KEPT_TASKS)
        )
        self.typical_ns: float | None = None
        """A running estimate of the median time to read one sample; None before the first."""

    def note(self, batch: BatchStamps) -> None:
        """Keep the tasks of a delivered batch, as later batches may wait for some of them."""
        for task in batch.tasks:
            self._tasks[task.process].append(task)

    def complete(self, batch: BatchStamps) -> bool:
        """Return whether it is known what the process of a batch's last task did afterwards."""
        if not batch.tasks:
            return True
        last = max(batch.tasks, key=attrgetter("ended_ns"))
        return self._tasks[last.process][-1] is not last

    def cut(self, batch: BatchStamps) -> tuple[list[float], TaskStamps | None]:
        """Return where the wait for a noted batch went, by what is known now.

        First come ns, in the order of ``PARTS``, then the task of a slow sample that held it up.
        """
        ns = [0.0] * len(PARTS)
        start, end = batch.requested_ns, batch.delivered_ns
        tasks = batch.tasks
        if not tasks:
            ns[_IDLE] = end - start
            return ns, None
        last = tasks[0] if len(tasks) == 1 else max(tasks, key=attrgetter("ended_ns"))
        made = min(max(last.ended_ns, start), end)
        if batch.pinned_ns is not None:
            pin_began_ns, pin_ended_ns = batch.pinned_ns
            ns[_PIN] = max(0, min(pin_ended_ns, end) - max(pin_began_ns, made))
        idle, handover = made - start, end - made - ns[_PIN]
        # What the training process did by itself after the batch was made.
        sampled = min(handover, _overlap_ns(batch.own.sampled_ns, made, end))
        unpacked = min(handover - sampled, _overlap_ns(batch.own.unpacked_ns, made, end))
        handover -= sampled + unpacked
        ns[_SAMPLER], ns[_UNPACK] = sampled, unpacked
        if last.way is not None:  # an actor that goes on with the next batch does not slow it down
            ns[_NETWORK] = min(handover, max(0, last.way.landed_ns - made))
            handover -= ns[_NETWORK]
        worst: TaskStamps | None = None
        for task in reversed(self._tasks[last.process]):
            overlap = min(task.ended_ns, made) - max(task.began_ns, start)
            after = task.held_ns(made, end) if last.way is None else 0.0
            if after > 0:
                after = min(after, handover)
                handover -= after
                self._work(task, after, ns)
            if overlap > 0:
                idle -= overlap
                self._work(task, overlap, ns)
                if worst is None or task.slowest_ns > worst.slowest_ns:
                    worst = task
            elif task.ended_ns <= start:
                break
        queued_ns: float = batch.own.runqueue_ns or 0
        if last.process < 0:  # nothing is handed over, and reading may have queued already
            handover, ns[_HANDOVER] = handover + ns[_HANDOVER], 0.0
            queued_ns = max(0, queued_ns - ns[_RUNQUEUE])
        queued = min(handover, queued_ns)
        ns[_QUEUED] += queued
        ns[_HANDOVER] += handover - queued
        # No worker can begin with samples that the sampler has not drawn yet.
        sampled = min(max(0, idle), _overlap_ns(batch.own.sampled_ns, start, made))
        ns[_SAMPLER] += sampled
        ns[_IDLE] = max(0, idle - sampled)
        self._learn(tasks)
        return ns, worst if ns[_SLOW] else None

    def _work(self, task: TaskStamps, overlap_ns: float, ns: list[float]) -> None:
        """Add the time of a task that overlaps a wait to the parts it belongs to."""
        length = max(1, task.ended_ns - task.began_ns)
        # Without a CPU any sample takes long, so that time makes none slow.
        typical, slowest = self.typical_ns, task.slowest_ns - (task.runqueue_ns or 0)
        excess = 0.0
        if typical is not None and slowest >= SLOW_FACTOR * typical:
            excess = slowest - typical
        slow = min(overlap_ns, excess)
        rest = overlap_ns - slow
        usual = max(1.0, length - excess)
        read = rest * min(1.0, max(0.0, task.read_ns - excess) / usual)
        collate = min(rest - read, rest * task.collate_ns / usual)
        if task.cpu_ns is None or task.runqueue_ns is None:
            ns[_READ] += read
        else:
            # Collation hardly blocks; what the thread waited for, it waited for while it read.
            waited = max(0, length - task.cpu_ns)
            busy = max(0.0, task.read_ns - waited)
            whole = max(1.0, busy + waited)
            runqueue = read * min(task.runqueue_ns, waited) / whole
            blocked = read * max(0, waited - task.runqueue_ns) / whole
            ns[_CPU] += read - runqueue - blocked
            ns[_RUNQUEUE] += runqueue
            ns[_BLOCKED] += blocked
        ns[_SLOW] += slow
        ns[_COLLATE] += collate
        ns[_HANDOVER] += rest - read - collate

    def _learn(self, tasks: Iterable[TaskStamps]) -> None:
        """Move the typical time towards that of the tasks' samples, without each one's slowest."""
        for task in tasks:
            if task.samples > 1 and task.slowest_ns:
                each = (task.read_ns - task.slowest_ns) / (task.samples - 1)
            elif task.samples:
                each = task.read_ns / task.samples
            else:
                continue
            known = self.typical_ns
            if known is None:
                self.typical_ns = each
            elif each < SLOW_FACTOR * known:
                self.typical_ns = known + _TYPICAL_WEIGHT * (each - known)
            else:
                # One slow sample alone in its task says little about the others.
                self.typical_ns = known * (1 + _TYPICAL_WEIGHT)


def _overlap_ns(spans_ns: Iterable[tuple[int, int]], began_ns: float, ended_ns: float) -> float:
    return sum(max(0, min(end, ended_ns) - max(begin, began_ns)) for begin, end in spans_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationShare:
    """Share of reading that an operation of a pipeline, or another function of a library, takes."""

    name: str
    """Name of library and operation or function: ``albumentations Blur``, ``PIL Image.convert``."""
    share: float
    """Share of the time to read that it takes, 0 to 1."""
    augments: bool = False
    """Whether it is an operation of a pipeline, and no other function."""


def _operation_of(call: str) -> str:
    """Return the operation that a library's function belongs to; empty: it belongs to none."""
    library, _, function = call.partition(" ")
    owner, _, method = function.rpartition(".")
    of_torchvision = library == "torchvision" and method in _METHODS
    named = owner and (library in ("albumentations", "kornia") or of_torchvision)
    return f"{library} {owner}" if named else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitCauses:
    """Why the batches of a stage were late."""

    batches: int
    """Number of batches whose waits were cut; without the first of epochs, if there were others."""
    wait: WaitParts
    """Mean parts of the wait for one batch. It is the loader's own wait, without what the training
    loop spends around it."""
    slow_samples: tuple[SlowSample, ...] = ()
    """Samples that held up a batch and took longest, the slowest first."""
    operations: tuple[OperationShare, ...] = ()
    """Functions of libraries that reading calls, the most expensive first, at most 20."""
    lines: tuple[LineShare, ...] = ()
    """Lines of the user's code in which reading spends most time, the longest first, at most 20."""


NO_CAUSES: Final = WaitCauses(batches=0, wait=WaitParts())


class CauseTotals:
    """Adds up the waits of one stage, whichever objects deliver its batches in each epoch."""

    def __init__(self) -> None:
        self._cutters: dict[int, WaitCutter] = {}
        self._held: dict[int, deque[BatchStamps]] = {}
        self._warm, self._cold, self._told = np.zeros((3, len(PARTS) + 1))
        """Sums over batches within an epoch, over first batches of epochs, and of the former when
        the last window was taken: ns of each part, number of batches."""
        self._longest: list[tuple[float, NDArray[np.float64]]] = []
        """ns of the longest waits of single batches within an epoch, the longest first, and their
        parts, as in ``_warm``."""
        self._slow: dict[tuple[int, object], SlowSample] = {}
        self._lines = LineTotals()

    def add(self, batch: BatchStamps, loader: int = 0) -> None:
        """Cut the wait for a batch and add it; to be called in the order of a loader's batches."""
        cutter = self._cutters.get(loader)
        if cutter is None:
            if not batch.tasks:
                return  # made before stamps were taken
            cutter = self._cutters[loader] = WaitCutter()
        cutter.note(batch)
        # What held up a batch may only show in the next ones.
        held = self._held.setdefault(loader, deque())
        held.append(batch)
        while held and (len(held) > _MOST_HELD or cutter.complete(held[0])):
            self._cut(held.popleft(), loader)

    def _cut_held(self) -> None:
        for loader, held in self._held.items():
            while held:
                self._cut(held.popleft(), loader)

    def _cut(self, batch: BatchStamps, loader: int) -> None:
        cutter = self._cutters[loader]
        typical_ms = (cutter.typical_ns or 0.0) / _NS_PER_MS
        ns, slowest = cutter.cut(batch)
        wait = np.array([*ns, 1], np.float64)
        if batch.first:
            self._cold += wait
        else:
            self._warm += wait
            longest = sorted([*self._longest, (sum(ns), wait)], key=itemgetter(0), reverse=True)
            self._longest = longest[:_MOST_LONGEST]
        if slowest is not None:
            self._note_slow(loader, slowest, typical_ms)
        for task in batch.tasks:
            if task.lines is not None:
                self._lines.add(task.lines)

    def _note_slow(self, loader: int, task: TaskStamps, typical_ms: float) -> None:
        ms = task.slowest_ns / _NS_PER_MS
        sample = SlowSample(index=_plain(task.slowest_index), ms=ms, typical_ms=typical_ms)
        key = loader, sample.index
        known = self._slow.get(key)
        if known is None or known.ms < sample.ms:
            self._slow[key] = sample
        if len(self._slow) > _KEPT_SLOW:
            self._slow = dict(self._slowest(_KEPT_SLOW // 2))

    def _slowest(self, most: int) -> list[tuple[tuple[int, object], SlowSample]]:
        return sorted(self._slow.items(), key=lambda item: -item[1].ms)[:most]

    def window(self) -> dict[str, float]:
        """Return the mean parts of the waits since the last call.

        Each has its name for loggers, behind the prefix of the stage.
        """
        self._cut_held()
        window, self._told = self._warm - self._told, self._warm.copy()
        if not window[-1]:
            return {}
        # Parts that were not measured are left out: kinds of reading, reading as a whole, pinning.
        means = _means_ms(window)
        unknown = means["read_ms"] > 0 and not any(means[name] for name in _BY_KIND)
        optional = (*_OPTIONAL, *_BY_KIND) if unknown else _OPTIONAL
        return {f"_wait/{name}": ms for name, ms in means.items() if ms or name not in optional}

    def summary(
        self,
        path_of: Callable[[int, object], str | None] = lambda _loader, _index: None,
        *,
        without: int = 0,
    ) -> WaitCauses | None:
        """Return why batches were late; None: no waits were seen.

        ``path_of`` finds a sample's file. ``without``: how many of the longest waits to leave out.
        """
        self._cut_held()
        total = self._cold
        if warm := int(self._warm[-1]):
            left_out = self._longest[: max(0, min(without, warm - 1))]
            total = self._warm - np.sum([parts for _, parts in left_out], axis=0)
        if not total[-1]:
            return None
        return WaitCauses(
            batches=int(total[-1]),
            wait=WaitParts(**_means_ms(total)),
            slow_samples=tuple(
                replace(sample, path=path_of(loader, sample.index))
                for (loader, _), sample in self._slowest(_SLOWEST)
            ),
            operations=self._lines.operations(),
            lines=self._lines.shares(),
        )


def _means_ms(total: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean parts of waits that were added up."""
    means = total[:-1] / (total[-1] * _NS_PER_MS)
    return dict(zip(PARTS, means.tolist(), strict=True))


def cause_lines(causes: WaitCauses, *, brief: bool = False) -> list[str]:
    """Return the causes in words: parts of the wait above 5 %, largest first.

    The slowest samples follow, then library calls and lines of code above 5 % of the time to read.
    ``brief``: only the largest part, the slowest sample, the first line, and the calls.
    """
    lines = []
    total_ms = causes.wait.total_ms
    parts = {name: getattr(causes.wait, name) for name in PARTS}
    largest = sorted(parts.items(), key=lambda item: -item[1])[: 1 if brief else None]
    for name, ms in largest:
        if total_ms > 0 and ms / total_ms > WORTH_SAYING:
            lines.append(
                f"{ms / total_ms:.0%} of the wait ({ms:.1f} ms a batch): {PART_WORDS[name]}"
            )
    if parts["slow_sample_ms"] > WORTH_SAYING * total_ms:
        for sample in causes.slow_samples[: 1 if brief else 3]:
            name = f"sample {sample.index}" + (f" ({sample.path})" if sample.path else "")
            name = printable(name, keep="")
            lines.append(
                f"{name} took {rounded(sample.ms, 3)} ms, others {rounded(sample.typical_ms, 2)} ms"
            )
    places = [each for each in causes.lines if each.share > WORTH_SAYING]
    named = {each.calls for each in places}
    calls = [each for each in causes.operations if each.share > WORTH_SAYING]
    if calls := [each for each in calls if each.name not in named]:
        listed = ", ".join(f"{printable(each.name, keep='')} {each.share:.0%}" for each in calls)
        lines.append(f"of the time to read a sample: {listed}")
    lines += [line_text(each) for each in places[: 1 if brief else 3]]
    return lines


def _plain(index: object) -> int | str | None:
    """Return an index as JSON can hold it."""
    if isinstance(index, int | str) or index is None:
        return index
    try:
        return int(index) if isinstance(index, SupportsInt) else repr(index)
    except Exception:  # whatever the user's own keys raise
        return repr(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineShare:
    """Share of reading that one line of the user's code takes, with all that it calls."""

    file: str
    """Path of the file, relative to where packages are, or its last two parts."""
    line: int
    function: str
    """Qualified name of the function that the line is in."""
    calls: str
    """Library call that takes more than half of the line's time, e.g. ``PIL Image.convert``; empty:
    there is none, or it is not known."""
    share: float
    """Share of the time to read that the line takes, 0 to 1."""


class LineTotals:
    """Adds up the times of lines of code over the tasks of one stage."""

    def __init__(self) -> None:
        self._lines = Counter[Place]()
        """Line -> time in ns."""
        self._total_ns = 0

    def add(self, times: Iterable[tuple[Place, int]]) -> None:
        """Add the lines of a task, each with its time in ns."""
        for place, ns in times:
            self._total_ns += ns
            if place != ELSEWHERE:
                self._lines[place] += ns
        if len(self._lines) > _KEPT_LINES:
            self._lines = Counter(dict(self._lines.most_common(_KEPT_LINES // 2)))

    def shares(self) -> tuple[LineShare, ...]:
        """Return the longest lines, longest first; none if too little was seen."""
        lines = defaultdict[Place, Counter[str]](Counter)
        for place, ns in self._lines.items():
            lines[place._replace(calls="")][place.calls] += ns
        longest = sorted(lines.items(), key=lambda item: -item[1].total())[:_MOST_LINES]
        return tuple(
            LineShare(
                **place._replace(calls=_most_of(called))._asdict(),
                share=called.total() / self._total_ns,
            )
            for place, called in longest
            if self._total_ns >= _FEWEST_NS
        )

    def operations(self) -> tuple[OperationShare, ...]:
        """Return what the lines call in libraries, longest first; none if too little was seen."""
        called = Counter[tuple[str, bool]]()
        for place, ns in self._lines.items():
            # Where a loader runs a pipeline itself, the line is in the library's own file.
            own = _operation_of(f"{place.file.partition(os.sep)[0]} {place.function}")
            operation = own or _operation_of(place.calls)
            called[operation or place.calls, bool(operation)] += ns
        return tuple(
            OperationShare(name=name, share=ns / self._total_ns, augments=augments)
            for (name, augments), ns in called.most_common(_MOST_LINES)
            if name and self._total_ns >= _FEWEST_NS
        )


def _most_of(times_ns: Counter[str]) -> str:
    """Return the name that more than half of the time belongs to; empty: there is none."""
    name, ns = times_ns.most_common(1)[0]
    return name if ns > _MOST_OF_IT * times_ns.total() else ""


def line_text(line: LineShare) -> str:
    """Return in words what share of reading a line takes, and where it is."""
    text = f"{line.share:.0%} of reading is in {line.function} ({line.file}:{line.line})"
    if line.calls:
        text += f", in {line.calls}"
    return printable(text, keep="")


def where_text(lines: Sequence[LineShare], *, beside: float = 0.0) -> str:
    """Return the line that takes most of reading, to be added to a cause; empty if none does.

    ``beside``: share of reading with other causes, which the line has to exceed by a fifth.
    """
    line = max(lines, key=lambda each: each.share, default=None)
    stands_out = line is not None and line.share >= _STANDS_OUT + beside
    return f"; {line_text(line)}" if line is not None and stands_out else ""


def lock_between_processes(lines: Iterable[LineShare]) -> bool:
    """Return whether a line that takes much of reading waits for a lock between processes.

    Two workers that read under a lock wait for it half of the time, more workers for longer. Locks
    within a process do not count: the work of a pool of threads may be waited for.
    """
    return any(_is_lock(line.calls) for line in lines if line.share > _MUCH_OF_IT)


def seen_at_lock(operations: Iterable[OperationShare]) -> bool:
    """Return whether reading was ever seen to wait for a lock between processes.

    The wait grows with the number of workers, so that little of it is a limit for more of them.
    """
    return any(_is_lock(each.name) for each in operations)


def _is_lock(call: str) -> bool:
    return any(name in call for name in _LOCKS_OF_PROCESSES)

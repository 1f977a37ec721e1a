"""Why batches were late: the waits of a stage added up, in numbers and in words."""

from __future__ import annotations

import operator
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, SupportsInt

from lightning_fastdata.errors import printable, rounded
from lightning_fastdata.insight.waits.attribution import (
    PART_WORDS,
    PARTS,
    SlowSample,
    WaitCutter,
    WaitParts,
)
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps
from lightning_fastdata.stamps.lines import LineTime

_NS_PER_MS: Final = 1e6
_BY_KIND: Final = ("read_cpu_ms", "read_runqueue_ms", "read_blocked_ms")
_OPTIONAL: Final = ("read_ms", "pin_ms", "sampler_ms", "unpack_ms", "queued_ms", "network_ms")
_SLOWEST: Final = 5
_MOST_HELD: Final = 32
_KEPT_SLOW: Final = 256
_MOST_LONGEST: Final = 3
WORTH_SAYING: Final = 0.05
"""Smaller shares are not put into words."""
_MOST_LINES: Final = 20
_KEPT_LINES: Final = 256
_FEWEST_NS: Final = 20_000_000
"""Of less reading that was looked at, nothing is said."""
_MOST_OF_IT: Final = 0.5
_MUCH_OF_IT: Final = 0.3
_STANDS_OUT: Final = 0.2
"""Of reading, for a line to be named as the place of a cause."""
_LOCKS_OF_PROCESSES: Final = ("SemLock", "filelock")
"""How calls of libraries are named that wait for what other processes hold."""
_METHODS: Final = ("__call__", "forward", "get_params", "make_params", "transform")
"""Of torchvision's operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationShare:
    """What an operation of a pipeline takes, or another function that reading calls."""

    name: str
    """The library and the operation or function: ``albumentations Blur``, ``PIL Image.convert``."""
    share: float
    """Of the time to read, 0 to 1."""
    augments: bool = False
    """It is an operation."""


def _operation_of(call: str) -> str:
    """Return the operation that a function of a library belongs to; empty: to none."""
    library, _, function = call.partition(" ")
    owner, _, method = function.rpartition(".")
    of_torchvision = library == "torchvision" and method in _METHODS
    named = owner and (library in ("albumentations", "kornia") or of_torchvision)
    return f"{library} {owner}" if named else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitCauses:
    """Why the batches of a stage were late."""

    batches: int
    """Batches whose waits were cut; without the first ones of epochs, if there were others."""
    wait: WaitParts
    """Where the wait for one batch went, the mean over all of them. It is the loader's own wait,
    without what the training loop spends around it."""
    overtaken_share: float
    """Part of the batches for which later ones were complete before they were asked for, 0 to 1:
    single slow batches, rather than too little of everything."""
    slow_samples: tuple[SlowSample, ...] = ()
    """The slowest samples that held up a batch, slowest first."""
    operations: tuple[OperationShare, ...] = ()
    """What reading calls in libraries, the most expensive first, at most 20."""
    lines: tuple[LineShare, ...] = ()
    """The lines of the user's code that reading is in, the longest first, at most 20."""


@dataclass(slots=True)
class _Total:
    ns: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    batches: int = 0
    overtaken: int = 0

    def add(self, other: _Total) -> None:
        self.ns = [*map(operator.add, self.ns, other.ns)]
        self.batches += other.batches
        self.overtaken += other.overtaken

    def less(self, other: _Total) -> _Total:
        ns = [*map(operator.sub, self.ns, other.ns)]
        return _Total(ns, self.batches - other.batches, self.overtaken - other.overtaken)

    def means(self) -> dict[str, float]:
        unit = self.batches * _NS_PER_MS
        return {name: value / unit for name, value in zip(PARTS, self.ns, strict=True)}


class CauseTotals:
    """Adds up the waits of one stage, whichever objects deliver its batches in each epoch.

    ``prefix`` is that of the names for loggers.
    """

    def __init__(self, prefix: str = "data") -> None:
        self._prefix = prefix
        self._cutters: dict[int, WaitCutter] = {}
        self._held: dict[int, deque[BatchStamps]] = {}
        self._warm, self._cold = _Total(), _Total()
        """Batches within an epoch, and the first ones of epochs."""
        self._longest: list[_Total] = []
        """The longest waits of the former, each of one batch, the longest first."""
        self._told = _Total()
        """What the former were when the last window was taken."""
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
        # What held up a batch may show in the next ones.
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
        typical_ms = cutter.typical_sample_ms or 0.0
        ns, slowest = cutter.cut(batch)
        wait = _Total(ns, 1, int(batch.ready_ahead > 0))
        if batch.first:
            self._cold.add(wait)
        else:
            self._warm.add(wait)
            longest = sorted([*self._longest, wait], key=lambda each: -sum(each.ns))
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
        """Return the mean parts of the waits since the last call, by their names for loggers."""
        self._cut_held()
        window = self._warm.less(self._told)
        self._told = replace(self._warm)
        if not window.batches:
            return {}
        # Without what was not measured: how reading went, or that it went, or any pinning.
        means = window.means()
        unknown = means["read_ms"] > 0 and not any(means[name] for name in _BY_KIND)
        optional = (*_OPTIONAL, *_BY_KIND) if unknown else _OPTIONAL
        return {f"{self._prefix}_wait/{k}": v for k, v in means.items() if v or k not in optional}

    def summary(
        self,
        path_of: Callable[[int, object], str | None] = lambda _loader, _index: None,
        *,
        without: int = 0,
    ) -> WaitCauses | None:
        """Return why batches were late, or None; ``path_of`` knows files of a loader's samples.

        ``without``: so many of the longest waits are no part of it.
        """
        self._cut_held()
        warm = self._warm
        for wait in self._longest[: max(0, min(without, warm.batches - 1))]:
            warm = warm.less(wait)
        total = warm if warm.batches else self._cold
        if not total.batches:
            return None
        return WaitCauses(
            batches=total.batches,
            wait=WaitParts(**total.means()),
            overtaken_share=total.overtaken / total.batches,
            slow_samples=tuple(
                replace(sample, path=path_of(loader, sample.index))
                for (loader, _), sample in self._slowest(_SLOWEST)
            ),
            operations=self._lines.operations(),
            lines=self._lines.shares(),
        )


def cause_lines(causes: WaitCauses, *, brief: bool = False) -> list[str]:
    """Return the causes in words: parts of the wait above 5 %, largest first.

    Then the slowest samples, and the lines of code, and what they call, above 5 % of the time to
    read. ``brief``: only the largest part, the slowest sample, the first line, and the calls.
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
    if causes.overtaken_share > WORTH_SAYING and not brief:
        lines.append(f"{causes.overtaken_share:.0%} of the batches came after later ones were done")
    if parts["slow_sample_ms"] > WORTH_SAYING * total_ms:
        for sample in causes.slow_samples[: 1 if brief else 3]:
            name = f"sample {sample.index}" + (f" ({sample.path})" if sample.path else "")
            name = printable(name, keep="")
            lines.append(
                f"{name} took {sample.ms:.0f} ms, others {rounded(sample.typical_ms, 2)} ms"
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
    """What one line of the user's code takes, with all that it calls in libraries."""

    file: str
    """Relative to where packages are, or its last two parts."""
    line: int
    function: str
    """Qualified name."""
    calls: str
    """What the line calls for most of its time: ``PIL Image.convert``; empty: not known, or several
    things."""
    share: float
    """Of the time to read, 0 to 1."""


@dataclass(slots=True)
class _Line:
    total_ns: int = 0
    calls: Counter[str] = field(default_factory=Counter)


class LineTotals:
    """Adds up the lines of the tasks of one stage."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int, str], _Line] = {}
        self._calls = Counter[tuple[str, bool]]()
        self._total_ns = 0

    def add(self, times: Iterable[LineTime]) -> None:
        """Add the lines of a task."""
        for each in times:
            self._total_ns += each.total_ns
            if each.file:
                line = self._lines.setdefault((each.file, each.line, each.function), _Line())
                line.total_ns += each.total_ns
                line.calls[each.calls] += each.total_ns
                # Of a loader's own pipeline it is the line itself that is in a library.
                own = _operation_of(f"{each.file.partition(os.sep)[0]} {each.function}")
                operation = own or _operation_of(each.calls)
                self._calls[operation or each.calls, bool(operation)] += each.total_ns
        if len(self._calls) > _KEPT_LINES:
            self._calls = Counter(dict(self._calls.most_common(_KEPT_LINES // 2)))
        if len(self._lines) > _KEPT_LINES:
            self._lines = dict(self._longest(_KEPT_LINES // 2))

    def _longest(self, most: int) -> list[tuple[tuple[str, int, str], _Line]]:
        return sorted(self._lines.items(), key=lambda item: -item[1].total_ns)[:most]

    def shares(self) -> tuple[LineShare, ...]:
        """Return the longest lines, longest first; none if too little was seen."""
        if self._total_ns < _FEWEST_NS:
            return ()
        return tuple(
            LineShare(
                file=file,
                line=number,
                function=function,
                calls=_most_of(line.calls, line.total_ns),
                share=line.total_ns / self._total_ns,
            )
            for (file, number, function), line in self._longest(_MOST_LINES)
        )

    def operations(self) -> tuple[OperationShare, ...]:
        """Return what the lines call in libraries, likewise."""
        if self._total_ns < _FEWEST_NS:
            return ()
        longest = self._calls.most_common(_MOST_LINES)
        return tuple(
            OperationShare(name=name, share=ns / self._total_ns, augments=augments)
            for (name, augments), ns in longest
            if name
        )


def _most_of(times_ns: Counter[str], total_ns: int) -> str:
    """Return the name that more than half of the time has; empty: none has."""
    name, ns = times_ns.most_common(1)[0]
    return name if ns > _MOST_OF_IT * total_ns else ""


def line_text(line: LineShare) -> str:
    """Return what a line takes, in words."""
    text = f"{line.share:.0%} of reading is in {line.function} ({line.file}:{line.line})"
    if line.calls:
        text += f", in {line.calls}"
    return printable(text, keep="")


def where_text(lines: Sequence[LineShare], *, beside: float = 0.0) -> str:
    """Return the line that takes most of reading, to be added to a cause; empty if none does.

    ``beside``: Of reading, what is not of this cause, 0 to 1: the line has to take more than that.
    """
    line = max(lines, key=lambda each: each.share, default=None)
    stands_out = line is not None and line.share >= _STANDS_OUT + beside
    return f"; {line_text(line)}" if line is not None and stands_out else ""


def lock_between_processes(lines: Iterable[LineShare]) -> bool:
    """Return whether a line waits for a lock which one process at a time has, and that is much.

    Two workers that read under a lock wait for it half of the time, more of them for longer. A lock
    within a process may be that of a pool of threads whose work is waited for.
    """
    much = (line.calls for line in lines if line.share > _MUCH_OF_IT)
    return any(name in calls for calls in much for name in _LOCKS_OF_PROCESSES)

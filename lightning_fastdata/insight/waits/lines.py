"""In which lines of the user's code reading is, in numbers and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lightning_fastdata.errors import printable

if TYPE_CHECKING:
    from lightning_fastdata.stamps.lines import LineTime

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LineShare:
    """What one line of the user's code takes, with all that it calls in libraries."""

    file: str
    """Relative to the working directory or to where packages are, or its last two parts."""
    line: int
    function: str
    """Qualified name."""
    calls: str
    """What the line calls for most of its time: ``PIL Image.convert``; empty: not known, or several
    things."""
    share: float
    """Of the time to read, 0 to 1."""
    blocked_share: float | None
    """Of the line's time, what it waited for something other than a CPU, 0 to 1; None where the
    system does not tell."""

    @property
    def waits(self) -> bool:
        """Whether it waits for most of its time."""
        return self.blocked_share is not None and self.blocked_share > _MOST_OF_IT


@dataclass(slots=True)
class _Line:
    total_ns: int = 0
    blocked_ns: int = 0
    unmeasured: bool = False
    calls: Counter[str] = field(default_factory=Counter)


class LineTotals:
    """Adds up the lines of the tasks of one stage."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int, str], _Line] = {}
        self._total_ns = 0

    def add(self, times: Iterable[LineTime]) -> None:
        """Add the lines of a task."""
        for each in times:
            self._total_ns += each.total_ns
            if each.file:
                line = self._lines.setdefault((each.file, each.line, each.function), _Line())
                line.total_ns += each.total_ns
                line.blocked_ns += each.blocked_ns or 0
                line.unmeasured |= each.blocked_ns is None
                line.calls[each.calls] += each.total_ns
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
                blocked_share=None if line.unmeasured else line.blocked_ns / max(1, line.total_ns),
            )
            for (file, number, function), line in self._longest(_MOST_LINES)
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
    if line.waits:
        text += ", mostly waiting"
    return printable(text, keep="")


def where_text(
    lines: Sequence[LineShare], operations_share: float = 0.0, *, blocked: bool | None = None
) -> str:
    """Return the line that stands out, to be added to a cause; empty if none does.

    Args:
        lines: Of the stage.
        operations_share: Of reading, what the costliest timed operation takes, 0 to 1.
        blocked: The line that waits longest; False: that computes longest, and empty if a timed
            operation explains more; None: that takes longest, else as False.
    """

    def of_reading(line: LineShare) -> float:
        waits = line.blocked_share or 0.0
        return line.share * {True: waits, False: 1 - waits, None: 1.0}[blocked]

    line = max(lines, key=of_reading, default=None)
    if line is None or line.share < _STANDS_OUT or of_reading(line) <= 0:
        return ""
    if not blocked and operations_share >= line.share:
        return ""
    return f"; {line_text(line)}"


def lock_between_processes(lines: Iterable[LineShare]) -> LineShare | None:
    """Return the line that waits for a lock which one process at a time has, if that is much.

    Two workers that read under a lock wait for it half of the time, more of them for longer. A lock
    within a process may be that of a pool of threads whose work is waited for.
    """
    for line in lines:
        known = any(name in line.calls for name in _LOCKS_OF_PROCESSES)
        if known and line.waits and line.share > _MUCH_OF_IT:
            return line
    return None

"""Every wait for a batch, cut along the way that the batch took.

A batch is late because its last task ended late. The wait for it is what that task's thread did
meanwhile: this task, the tasks it had before, or nothing; and the hand-over after it. The parts of
a wait add up to the wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightning_fastdata.loading.stamps import BatchStamps, TaskStamps

_NS_PER_MS: Final = 1e6
_SLOW_FACTOR: Final = 4.0
"""A sample this many times as long as a typical one holds up the batches behind it."""
_KEPT_TASKS: Final = 64
_TYPICAL_WEIGHT: Final = 0.05
_WORK_PARTS: Final = 7
"""Reading on a CPU, in the run queue, blocked, unknown; a slow sample; collation; the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitParts:
    """Where the time of one or more waits went. The sum of all parts is the time waited."""

    read_cpu_ms: float = 0.0
    """Samples were read, decoded or transformed, on a CPU."""
    read_runqueue_ms: float = 0.0
    """Reading was ready to run, but other threads had the CPUs."""
    read_blocked_ms: float = 0.0
    """Reading waited for storage, a network or a lock."""
    read_ms: float = 0.0
    """Samples were read, on a system that does not tell how."""
    slow_sample_ms: float = 0.0
    """One sample took several times as long as the others."""
    collate_ms: float = 0.0
    """Samples were collated, or written into the batch."""
    pin_ms: float = 0.0
    """The batch was copied into page-locked memory."""
    handover_ms: float = 0.0
    """The batch was complete and on its way to the training process."""
    idle_ms: float = 0.0
    """Nothing was done for the batch: processes were starting, or had nothing to do."""

    @property
    def total_ms(self) -> float:
        """The time waited."""
        return float(sum(getattr(self, part.name) for part in fields(self)))

    def __add__(self, other: WaitParts) -> WaitParts:
        return WaitParts(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def shares(self) -> dict[str, float]:
        """Return each part as a share of the total, 0 to 1; nothing if there was no wait."""
        total = self.total_ms
        if total <= 0:
            return {}
        return {f.name.removesuffix("_ms"): getattr(self, f.name) / total for f in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSample:
    """A sample that held up its batch."""

    index: Any
    """Its index in the dataset."""
    ms: float
    """How long it took."""
    typical_ms: float
    """How long samples take as a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait, cut."""

    parts: WaitParts
    """Where it went."""
    overtaken: bool
    """Later batches were complete before this one was asked for: it was held up on its own."""
    slow_sample: SlowSample | None
    """The sample that held it up, if one did."""


class WaitCutter:
    """Cuts the waits of one loader, in the order of its batches."""

    def __init__(self) -> None:
        self._threads: dict[tuple[int, int], deque[TaskStamps]] = {}
        self._typical_ns: float | None = None

    @property
    def typical_sample_ms(self) -> float | None:
        """A running estimate of the median time to read one sample; None before the first."""
        return None if self._typical_ns is None else self._typical_ns / _NS_PER_MS

    def cut(self, batch: BatchStamps) -> Wait:
        """Return where the wait for a batch went."""
        for task in batch.tasks:
            thread = task.process, task.thread
            kept = self._threads.get(thread)
            if kept is None:
                kept = self._threads[thread] = deque(maxlen=_KEPT_TASKS)
            kept.append(task)
        parts, worst = self._parts(batch)
        slow = None
        if worst is not None and parts.slow_sample_ms:
            slow = SlowSample(
                index=worst.slowest_index,
                ms=worst.slowest_ns / _NS_PER_MS,
                typical_ms=(self._typical_ns or 0.0) / _NS_PER_MS,
            )
        self._learn(batch.tasks)
        return Wait(parts=parts, overtaken=batch.ready_ahead > 0, slow_sample=slow)

    def _parts(self, batch: BatchStamps) -> tuple[WaitParts, TaskStamps | None]:
        start, end = batch.requested_ns, batch.delivered_ns
        if not batch.tasks:
            return WaitParts(idle_ms=(end - start) / _NS_PER_MS), None
        last = max(batch.tasks, key=_end_of)
        made = min(max(last.ended_ns, start), end)
        handover: float = end - made
        pin = 0.0
        if batch.pinned_ns is not None:
            pin = max(0.0, min(batch.pinned_ns[1], end) - max(batch.pinned_ns[0], made))
            handover -= pin
        covered = 0
        worst: TaskStamps | None = None
        spent = [0.0] * _WORK_PARTS
        for task in reversed(self._threads[last.process, last.thread]):
            overlap = min(task.ended_ns, made) - max(task.began_ns, start)
            if overlap > 0:
                covered += overlap
                self._work(task, overlap, spent)
                if worst is None or task.slowest_ns > worst.slowest_ns:
                    worst = task
            elif task.ended_ns <= start:
                break
        cpu, runqueue, blocked, unknown, slow, collate, other = spent
        return WaitParts(
            read_cpu_ms=cpu / _NS_PER_MS,
            read_runqueue_ms=runqueue / _NS_PER_MS,
            read_blocked_ms=blocked / _NS_PER_MS,
            read_ms=unknown / _NS_PER_MS,
            slow_sample_ms=slow / _NS_PER_MS,
            collate_ms=collate / _NS_PER_MS,
            pin_ms=pin / _NS_PER_MS,
            handover_ms=(handover + other) / _NS_PER_MS,
            idle_ms=max(0, made - start - covered) / _NS_PER_MS,
        ), worst

    def _work(self, task: TaskStamps, overlap_ns: float, spent: list[float]) -> None:
        """Add the time of a task that overlaps a wait to the parts it belongs to."""
        length = max(1, task.ended_ns - task.began_ns)
        excess = self._excess_ns(task)
        slow = min(overlap_ns, excess)
        rest = overlap_ns - slow
        usual = max(1.0, length - excess)
        read = rest * min(1.0, max(0.0, task.read_ns - excess) / usual)
        collate = min(rest - read, rest * task.collate_ns / usual)
        if task.cpu_ns is None or task.runqueue_ns is None:
            spent[3] += read
        else:
            # Collation hardly blocks; what the thread waited for, it waited for while it read.
            waited = max(0, length - task.cpu_ns)
            busy = max(0.0, task.read_ns - waited)
            whole = max(1.0, busy + waited)
            runqueue = read * min(task.runqueue_ns, waited) / whole
            blocked = read * max(0, waited - task.runqueue_ns) / whole
            spent[0] += read - runqueue - blocked
            spent[1] += runqueue
            spent[2] += blocked
        spent[4] += slow
        spent[5] += collate
        spent[6] += rest - read - collate

    def _excess_ns(self, task: TaskStamps) -> float:
        typical = self._typical_ns
        if typical is None or task.slowest_ns < _SLOW_FACTOR * typical:
            return 0.0
        return task.slowest_ns - typical

    def _learn(self, tasks: Iterable[TaskStamps]) -> None:
        """Move the estimate towards the tasks' samples, each without its slowest one."""
        for task in tasks:
            if task.samples > 1 and task.slowest_ns:
                each = (task.read_ns - task.slowest_ns) / (task.samples - 1)
            elif task.samples:
                each = task.read_ns / task.samples
            else:
                continue
            known = self._typical_ns
            if known is None:
                self._typical_ns = each
            elif each < _SLOW_FACTOR * known:
                self._typical_ns = known + _TYPICAL_WEIGHT * (each - known)
            else:
                # One slow sample alone in its task says little about the others.
                self._typical_ns = known * (1 + _TYPICAL_WEIGHT)


def _end_of(task: TaskStamps) -> int:
    return task.ended_ns

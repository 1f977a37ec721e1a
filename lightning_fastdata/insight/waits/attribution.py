"""Every wait for a batch, cut along the way that the batch took.

A batch is late because its last task ended late. The wait for it is what that task's process did
meanwhile: this task, the tasks it had before, or nothing; and the hand-over after it. A complete
batch whose process has gone on to the next one and is on a CPU with it waits for that: in Python it
holds the interpreter that the hand-over needs. A batch of an actor comes over a network, or out of
an object store, and goes on while others wait for it. The parts of a wait add up to the wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from typing import Final

from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps

_NS_PER_MS: Final = 1e6
_SLOW_FACTOR: Final = 4.0
"""A sample this many times as long as a typical one holds up the batches behind it."""
_KEPT_TASKS: Final = 64
_TYPICAL_WEIGHT: Final = 0.05


@dataclass(frozen=True, slots=True)
class WaitParts:
    """Where the time of one or more waits went; ``PART_WORDS`` says what each part is.

    Of ``read_ms`` it is not known which of the three parts before it.
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
        """The time waited."""
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
    """Its index in the dataset, as JSON can hold it."""
    ms: float
    """How long it took."""
    typical_ms: float
    """How long samples take as a rule."""
    path: str | None = None
    """Its file; None where it is not known."""


class WaitCutter:
    """Cuts the waits of one loader, in the order of its batches."""

    def __init__(self) -> None:
        self._tasks: defaultdict[int, deque[TaskStamps]] = defaultdict(
            lambda: deque(maxlen=_KEPT_TASKS)
        )
        self._typical_ns: float | None = None

    @property
    def typical_sample_ms(self) -> float | None:
        """A running estimate of the median time to read one sample; None before the first."""
        return None if self._typical_ns is None else self._typical_ns / _NS_PER_MS

    def note(self, batch: BatchStamps) -> None:
        """Keep the tasks of a batch that was delivered, some of which others may wait for."""
        for task in batch.tasks:
            self._tasks[task.process].append(task)

    def complete(self, batch: BatchStamps) -> bool:
        """Return whether it is known what the process that ended a batch did until it was taken."""
        if not batch.tasks:
            return True
        last = max(batch.tasks, key=_end_of)
        return self._tasks[last.process][-1] is not last

    def cut(self, batch: BatchStamps) -> tuple[list[float], TaskStamps | None]:
        """Return where the wait for a noted batch went, by what is known now.

        In nanoseconds, in the order of ``PARTS``, and the task of a slow sample that held it up.
        """
        ns = [0.0] * len(PARTS)
        start, end = batch.requested_ns, batch.delivered_ns
        tasks = batch.tasks
        if not tasks:
            ns[_IDLE] = end - start
            return ns, None
        last = tasks[0] if len(tasks) == 1 else max(tasks, key=_end_of)
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
        queued = min(handover, batch.own.runqueue_ns or 0)
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
        # While other threads had the CPUs, no sample was slow: any of them would have been.
        typical, slowest = self._typical_ns, task.slowest_ns - (task.runqueue_ns or 0)
        excess = 0.0
        if typical is not None and slowest >= _SLOW_FACTOR * typical:
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


def _overlap_ns(spans_ns: Iterable[tuple[int, int]], began_ns: float, ended_ns: float) -> float:
    return sum(max(0, min(end, ended_ns) - max(begin, began_ns)) for begin, end in spans_ns)


def _end_of(task: TaskStamps) -> int:
    return task.ended_ns

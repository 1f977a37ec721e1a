"""Errors and warnings about side processes that fail, hang or die."""

from __future__ import annotations

import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Final

import psutil

from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.pool.process import ChildProcess
from lightning_fastdata.executors.pool.splitter import PendingBatch

_IDLE_SHOWN: Final = 4
_STALL_S: Final = 120.0
_STALL_TASKS: Final = 20
_LOOK_S: Final = 1.0
_BUSY_SHARE: Final = 0.05
"""Processes that compute have so much of a CPU, even where other programs take the CPUs."""
_BUSY_WEIGHT: Final = 0.1
"""While processes start, or compute as one that builds an index does, time counts for so much."""
_MAIN: Final = (
    'With the start methods "spawn" and "forkserver" the script needs `if __name__ == "__main__":`.'
)


class StallWatch:
    """Notices that the side processes get nowhere while the training process waits for them.

    Args:
        limit_s: How long that may go on; 0: for ever; None: 120 s, or 20 times the longest task.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._given = limit_s
        self._step_s = min(_LOOK_S, (limit_s or _STALL_S) / 8)
        self._longest_s = 0.0
        self._stalled_s = 0.0
        self._seen: list[tuple[int | None, bytes]] = []
        self._cpu_s = 0.0
        self._warned = False

    @property
    def next_look(self) -> float | None:
        """Until when (``monotonic``) to wait before :meth:`look`; None: there is no limit."""
        return None if self._given == 0 else time.monotonic() + self._step_s

    def note_task(self, task_ns: int = 0) -> None:
        """Note that a task has ended, which took so long."""
        self._stalled_s = 0.0
        self._longest_s = max(self._longest_s, task_ns / 1e9)

    def look(self, children: Iterable[ChildProcess], doing: Callable[[], list[str]]) -> None:
        """Warn, or raise, if nothing has moved for long; called when no process answered in time.

        Raises:
            WorkerError: Nothing has moved for too long.
        """
        children = list(children)
        seen = [(child.process.pid, child.progress.words.tobytes()) for child in children]
        cpu_s = sum(_cpu_s(child.process.pid) for child in children)
        busy = cpu_s - self._cpu_s > _BUSY_SHARE * self._step_s
        busy = busy or any(child.is_starting for child in children)
        moved, self._seen, self._cpu_s = seen != self._seen, seen, cpu_s
        if moved:
            self._stalled_s = 0.0
            return
        # Counted in steps, so that time in which the whole program was stopped is none.
        self._stalled_s += self._step_s * (_BUSY_WEIGHT if busy else 1)
        limit_s = self._given or max(_STALL_S, _STALL_TASKS * self._longest_s)
        if self._stalled_s >= limit_s:
            raise WorkerError("\n".join([_stalled(limit_s), *doing()]))
        if self._stalled_s >= limit_s / 2 and not self._warned:
            self._warned = True
            text = "\n".join([_stalled(limit_s / 2), f"At {limit_s:g} s it is an error.", *doing()])
            warnings.warn(text, FastDataWarning, stacklevel=2)


class Blame:
    """Which sample kills whoever reads it, as the deaths of side processes tell."""

    def __init__(self) -> None:
        self._deaths: Counter[tuple[int, int]] = Counter()
        self._apart: set[int] = set()

    def forget(self) -> None:
        """Begin anew, as batches of another epoch do."""
        self._deaths.clear()
        self._apart.clear()

    def killers(
        self, suspects: Iterable[tuple[int, int]], known: Container[tuple[int, int]], times: int
    ) -> list[tuple[int, int]]:
        """Return those samples of a process that died, as (batch number, position), that killed it.

        One is ``known``, or was read each of so many ``times``. Where that holds for several, they
        were read by threads of one process: which of them it was shows when they are read again,
        :meth:`one_by_one`.
        """
        suspects = list(suspects)
        self._deaths.update(suspects)
        found = [each for each in suspects if each in known] or [
            each for each in suspects if self._deaths[each] >= times
        ]
        if len(found) > 1:
            self._apart.update(number for number, _ in found)
            return []
        for each in found:
            del self._deaths[each]  # of this sample, and not of what takes its place
        return found

    def one_by_one(self, batches: Iterable[PendingBatch]) -> bool:
        """Return whether only one task is to be under way, until suspicious batches are ready."""
        if self._apart:
            self._apart &= {batch.number for batch in batches if not batch.is_ready}
        return bool(self._apart)


def _stalled(seconds: float) -> str:
    return (
        f"No sample was read and no batch was made for {seconds:g} s while the training waited for "
        "one. The workers are stuck, or one sample takes very long (to build an index, to reach a "
        "server). If it only takes long, raise stall_timeout (LoaderOptions: stall_timeout_s); 0 "
        "waits for ever. The side processes:"
    )


def _cpu_s(pid: int | None) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def died_starting(number: int, code: int | None, times: int) -> WorkerError:
    """Return the error for a side process that dies before it has read a sample."""
    return WorkerError(
        f"Side process {number} {_death(code)} {times} times before it read a sample. Its own "
        f"message is on the standard error output. {_MAIN}"
    )


def stream_broken(number: int, code: int | None, delivered: int, *, answered: bool) -> WorkerError:
    """Return the error for a side process that dies before the end of its stream."""
    hint = "" if answered else f" {_MAIN}"
    return WorkerError(
        f"Side process {number} {_death(code)} before the end of its stream. The {delivered} "
        "batches that it had made in this epoch were delivered; the rest of its stream is "
        "missing, because a stream cannot be read again from its middle. Begin the epoch anew, or "
        f"use a dataset with __getitem__, whose samples are read again.{hint}"
    )


def timed_out(timeout_s: float, doing: Iterable[str]) -> WorkerError:
    """Return the error for a batch that is late, with what each side process is doing."""
    late = f"No batch within timeout={timeout_s:g} s."
    head = f"{late} Reading may be slow (raise the timeout) or stuck:"
    return WorkerError("\n".join([head, *doing]))


def stream_timed_out(timeout_s: float, children: Iterable[ChildProcess]) -> WorkerError:
    """Return the error for a batch of a stream that is late."""
    return timed_out(timeout_s, doing_in_streams(children))


def doing_in_streams(children: Iterable[ChildProcess]) -> list[str]:
    """Return what the side processes that read a stream are doing."""
    return [_doing(child, "its stream") for child in children if child.tasks]


def doing(
    plan: FetchPlan, batches: Iterable[PendingBatch], children: list[ChildProcess]
) -> list[str]:
    """Return what each side process is doing: the samples it reads, and its stacks."""
    by_number = {batch.number: batch for batch in batches}
    reading = {
        child.number: ", ".join(
            repr(by_number[number].indices[at] if plan.batched else at)
            for number, at in child.progress.being_read()
            if number in by_number
        )
        for child in children
    }
    busy = [
        child for child in children if reading[child.number] or child.tasks or child.is_stopped()
    ]
    # Where no process seems to have anything to do, some of them show what they do instead.
    return [
        _doing(child, f"sample {reading[child.number] or 'none'}")
        for child in (busy or children[:_IDLE_SHOWN])
    ]


def _doing(child: ChildProcess, what: str) -> str:
    return (
        f"side process {child.number} (pid {child.process.pid}), reading {what}:\n{child.stack()}"
    )


def killer_sample(index: object, code: int | None, times: int) -> WorkerError:
    """Return the error for a sample that kills every process that reads it."""
    return WorkerError(
        f"Sample {index!r} of the dataset was being read each of the {times} times that a side "
        f"process {_death(code)}. Read dataset[{index!r}] in a script of its own to see why, and "
        "leave it out or repair it."
    )


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        hint = " (the kernel kills so when memory runs out)" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"
    return f"left with exit code {code}"

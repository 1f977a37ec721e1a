"""Side processes that fail, hang, die too often or grow: noticed, told of, and what to do."""

from __future__ import annotations

import errno
import signal
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.pool.process import ChildProcess, Hang, Side
from lightning_fastdata.executors.pool.splitter import PendingBatch
from lightning_fastdata.host import clock
from lightning_fastdata.host.memory import (
    read_host_memory,
    read_oom_kills,
    read_open_file_limits,
    read_own_bytes,
    size_text,
)

_LIMIT_S: Final = 60.0
_LIMIT_TASKS: Final = 20
_TIMES_KEPT: Final = 1000
_STALL_LOOK_S: Final = 0.5
_MOST_LOOKS: Final = 5
"""A look that comes late counts for so many: the whole program may have been stopped meanwhile."""
_BUSY_SHARE: Final = 0.05
"""Processes that compute have so much of a CPU, even where other programs take the CPUs."""
_BUSY_WEIGHT: Final = 0.1
"""While processes start, or compute as one that builds an index does, time counts for so much."""
_LONG_LOOKS: Final = 5
"""Who computes for so many looks without a new sample may be what the others wait for."""
_IDLE_SHOWN: Final = 4
_MINUTE_S: Final = 60.0
_MOST_DEATHS: Final = 30
_FEWEST_TASKS: Final = 2
"""Processes that get less than that done before they die get nowhere."""
_LOOK_S: Final = 5.0
_SMALL_BYTES: Final = 256 * 2**20
"""Growth of a process by less than this is none."""
_RENEW: Final = 4
_MIB: Final = 2**20
_MAIN: Final = (
    'With the start methods "spawn" and "forkserver" the script needs `if __name__ == "__main__":`.'
)


@dataclass(slots=True)
class _Noted:
    """What a process noted last."""

    words: tuple[int, int, int]
    looks: int = 0
    """So many times it was the same."""
    still_s: float = 0.0
    """For so long, as it counts."""
    cpu_s: float = 0.0
    """CPU time of the process and what it started, at the last look that found the same."""


class StallWatch:
    """Notices that side processes get nowhere while the training process waits for them.

    Args:
        limit_s: How long that may go on; 0: for ever; None: 60 s, or 20 times the 99th percentile
            of the times of tasks if that is more.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._given = limit_s
        self._step_s = min(_STALL_LOOK_S, (limit_s or _LIMIT_S) / 8)
        self._looked_s = clock.monotonic()
        self._times: deque[int] = deque(maxlen=_TIMES_KEPT)
        self._noted: dict[int, _Noted] = {}
        self._stalled_s = 0.0
        self._warned = False

    @property
    def next_look_s(self) -> float | None:
        """When :meth:`look` is due, on the clock; None: there is no limit."""
        return None if self._given == 0 else self._looked_s + self._step_s

    @property
    def limit_s(self) -> float:
        """How long a process may get nowhere; 0: for ever."""
        if self._given is not None:
            return self._given
        times = sorted(self._times)
        long_ns = times[-1 - len(times) // 100] if times else 0
        return max(_LIMIT_S, _LIMIT_TASKS * long_ns / 1e9)

    def note_task(self, task_ns: int) -> None:
        """Note that a task has ended, which took so long."""
        self._stalled_s = 0.0
        self._times.append(task_ns)

    def look(
        self,
        children: Sequence[ChildProcess],
        doing: Callable[[], list[str]],
        owing: Collection[ChildProcess] = (),
    ) -> list[tuple[ChildProcess, Hang]]:
        """Look how far the processes are, if that is due; warn if none moves.

        Args:
            children: All of them.
            doing: Returns in words what they do.
            owing: Those that have something to do which others can do in their place.

        Returns:
            Those of ``owing`` that got nowhere for too long.

        Raises:
            WorkerError: Nothing at all has moved for too long, though no process owes anything.
        """
        now_s = clock.monotonic()
        if self.next_look_s is None or now_s < self.next_look_s:
            return []
        spent_s = min(now_s - self._looked_s, _MOST_LOOKS * self._step_s)
        self._looked_s = now_s
        moved = self._read(children)
        limit_s = self.limit_s
        computing = [child for child in children if self._computes(child, limit_s / 4)]
        held_up = any(self._noted[child.pid].looks >= _LONG_LOOKS for child in computing)
        hangs: list[tuple[ChildProcess, Hang]] = []
        for child in children:
            slow, noted = held_up or child in computing, self._noted[child.pid]
            if child not in owing or not noted.looks:
                noted.still_s = 0.0
                continue
            noted.still_s += spent_s * (_BUSY_WEIGHT if slow else 1)
            if noted.still_s >= limit_s:
                noted.still_s = 0.0
                batch, position, _ = noted.words
                hangs.append((child, Hang((batch, position) if batch >= 0 else None, limit_s)))
        if moved or hangs:
            self._stalled_s = 0.0
            return hangs
        slow = bool(computing) or any(child.is_starting for child in children)
        self._stalled_s += spent_s * (_BUSY_WEIGHT if slow else 1)
        if self._stalled_s >= limit_s:
            raise WorkerError("\n".join([_stalled(limit_s), *doing()]))
        if self._stalled_s >= limit_s / 2 and not (owing or self._warned):
            self._warned = True
            text = [_stalled(limit_s / 2), f"At {limit_s:g} s it is an error.", *doing()]
            warnings.warn("\n".join(text), FastDataWarning, stacklevel=2)
        return []

    def _read(self, children: Sequence[ChildProcess]) -> bool:
        """Read what all processes have noted; return whether anything is new."""
        before, self._noted = self._noted, {}
        moved = before.keys() != {child.pid for child in children}
        for child in children:
            words, old = child.progress.noted(), before.get(child.pid)
            if old is not None and old.words == words:
                old.looks += 1
                self._noted[child.pid] = old
            else:
                moved = True
                self._noted[child.pid] = _Noted(words)
        return moved

    def _computes(self, child: ChildProcess, long_s: float) -> bool:
        """Return whether a process that has noted nothing new computes, or what it started."""
        noted = self._noted[child.pid]
        if not noted.looks:
            return False
        before_s = noted.cpu_s
        noted.cpu_s = clock.cpu_s_of(child.pid, noted.still_s >= long_s)
        return noted.cpu_s - before_s > _BUSY_SHARE * self._step_s


def _stalled(seconds: float) -> str:
    return (
        f"No sample was read and no batch was made for {seconds:g} s while the training waited for "
        "one. The workers are stuck, or one sample takes very long (to build an index, to reach a "
        "server). If it only takes long, raise timeout; 0 "
        "waits for ever. The side processes:"
    )


def kill_hung(
    child: ChildProcess, hang: Hang, plan: FetchPlan, batches: Iterable[PendingBatch]
) -> None:
    """Say what a process is stuck in, and kill it, so that others do what it had to do.

    Raises:
        WorkerError: It was killed before, and has not died.
    """
    what = doing(plan, batches, [child])[0]
    if child.hang is not None:
        raise WorkerError(
            f"A side process got nowhere, was killed, and has not died in {hang.seconds:g} s, as "
            f"when the kernel waits for a disk or server that does not answer. It was {what}"
        )
    child.hang = hang._replace(doing=what)
    warnings.warn(
        f"A side process has got nowhere for {hang.seconds:g} s with a sample, and is replaced; "
        "the sample is read once more. If it only takes long, raise timeout; "
        f"0 waits for ever. It was {what}",
        FastDataWarning,
        stacklevel=2,
    )
    child.process.kill()


def cannot_start(number: int, error: OSError) -> WorkerError:
    """Return the error for a side process that the system does not start."""
    soft, hard = read_open_file_limits()
    remedy = "Take fewer workers."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = (
            f"This process may have {soft} files open (hard limit: {hard}) and has about as many. "
            "Raise the limit (ulimit -n), or take fewer workers."
        )
    elif error.errno in (errno.EAGAIN, errno.ENOMEM):
        remedy = (
            "There are as many processes as the user or the container may have, or memory runs "
            "out. Raise the limit (ulimit -u; pids.max of the cgroup), or take fewer workers."
        )
    return WorkerError(f"Side process {number} cannot be started: {error}. {remedy}")


def died_starting(number: int, code: int | None, times: int) -> WorkerError:
    """Return the error for a side process that dies before it has read a sample."""
    return WorkerError(
        f"Side process {number} {death(code)} {times} times before it read a sample. Its own "
        f"message is on the standard error output. {_MAIN}"
    )


def stream_broken(number: int, code: int | None, delivered: int, *, answered: bool) -> WorkerError:
    """Return the error for a side process that dies before the end of its stream."""
    hint = "" if answered else f" {_MAIN}"
    return WorkerError(
        f"Side process {number} {death(code)} before the end of its stream. The {delivered} "
        "batches that it had made in this epoch were delivered; the rest of its stream is "
        "missing, because a stream cannot be read again from its middle. Begin the epoch anew, or "
        f"use a dataset with __getitem__, whose samples are read again.{hint}"
    )


def doing_in_streams(children: Iterable[ChildProcess]) -> list[str]:
    """Return what the side processes that read a stream are doing."""
    return [_doing(child, "its stream") for child in children if child.tasks]


def doing(
    plan: FetchPlan, batches: Iterable[PendingBatch], children: list[ChildProcess]
) -> list[str]:
    """Return what each side process is doing: the samples it reads, and its stacks."""
    by_number = {batch.number: batch for batch in batches}
    reading = dict[int, str]()
    for child in children:
        number, at = child.progress.being_read() or (-1, -1)
        if number in by_number:
            reading[child.number] = repr(by_number[number].indices[at] if plan.batched else at)
    busy = [
        child for child in children if child.number in reading or child.tasks or child.is_stopped()
    ]
    # Where no process seems to have anything to do, some of them show what they do instead.
    return [
        _doing(child, f"sample {reading.get(child.number, 'none')}")
        for child in (busy or children[:_IDLE_SHOWN])
    ]


def _doing(child: ChildProcess, what: str) -> str:
    return (
        f"side process {child.number} (pid {child.process.pid}), reading {what}:\n{child.stack()}"
    )


def lost_sample(index: object, child: Side, times: int) -> WorkerError:
    """Return the error for a sample that kills or holds up every process that reads it.

    ``child`` was the last of so many.
    """
    if child.hang is not None:
        return _hung_sample(index, child.hang)
    return WorkerError(
        f"Sample {index!r} of the dataset was being read each of the {times} times that a side "
        f"process {death(child.exitcode)}. Read dataset[{index!r}] in a script of its own "
        "to see why, and leave it out or repair it."
    )


def _hung_sample(index: object, hang: Hang) -> WorkerError:
    return WorkerError(
        f"Sample {index!r} of the dataset was read twice, by two side processes that got nowhere "
        f"with it for {hang.seconds:g} s each. Where the stack shows a lock, another thread of the "
        f"training process{_threads()} may have held it when the workers were forked: open files "
        'and clients in the workers, or use multiprocessing_context="forkserver". If the sample '
        "only takes long, raise timeout; 0 waits for ever. "
        f"The process was {hang.doing}"
    )


def _threads() -> str:
    """Return the names of the program's other threads, if there are any."""
    main = threading.main_thread()
    # Those of this package hold no lock of the user's.
    others = [
        each.name
        for each in threading.enumerate()
        if each is not main and not each.name.startswith("fastdata ")
    ]
    return f" ({', '.join(others[:_IDLE_SHOWN])})" if others else ""


def death(code: int | None) -> str:
    """Return how a process with this exit code ended, in words."""
    if code is not None and code < 0:
        hint = " (the kernel kills so when memory runs out)" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"
    if code is None:
        return "died"
    return f"left with exit code {code}"


class _Death(NamedTuple):
    at_s: float
    code: int | None
    tasks: int
    """That all processes had done before."""


class Deaths:
    """The deaths of an executor's side processes within a minute.

    Args:
        oom_kills: Returns how often the kernel has killed for memory so far; None: not known.
    """

    def __init__(self, oom_kills: Callable[[], int | None] = read_oom_kills) -> None:
        self._oom_kills = oom_kills
        self._at_first = self._killed = oom_kills()
        self._last: deque[_Death] = deque()

    def note(self, code: int | None, tasks: int, pids: Mapping[int, int]) -> None:
        """Note a death.

        Args:
            code: With which the process ended.
            tasks: Done by all processes so far.
            pids: Of the processes that live, by their numbers.

        Raises:
            WorkerError: There were more than 30 within a minute, and fewer than two tasks were done
                for each.
        """
        now_s = clock.monotonic()
        self.tell(code, pids, "It is replaced, and its samples are read again.")
        self._last.append(_Death(now_s, code, tasks))
        while self._last[0].at_s < now_s - _MINUTE_S:
            self._last.popleft()
        count, done = len(self._last), tasks - self._last[0].tasks
        if count > _MOST_DEATHS and done < _FEWEST_TASKS * count:
            kinds = Counter(death(each.code) for each in self._last).most_common()
            raise WorkerError(
                f"{count} side processes died within a minute, in which {done} tasks were done: a "
                f"process {', '.join(f'{kind} ({times} times)' for kind, times in kinds)}. "
                f"{self._from_the_kernel()} {_memory_of(pids)} The training ends, as going on "
                "would not get far. Where memory runs out, take fewer workers or smaller batches; "
                "otherwise what the processes printed says why."
            )

    def tell(self, code: int | None, pids: Mapping[int, int], then: str) -> None:
        """Warn with the figures of a death, and what comes then, if the kernel killed for memory.

        ``pids``: As of :meth:`note`.
        """
        kills = self._oom_kills()
        if code != -signal.SIGKILL or kills is None or kills <= (self._killed or 0):
            return
        self._killed = kills
        left = size_text(read_host_memory().available_bytes)
        warnings.warn(
            f"The kernel has killed a side process as memory ran out. {_memory_of(pids)} "
            f"{left} are left. {then} Take fewer workers or smaller "
            "batches, or share(dataset) where workers copy its objects.",
            FastDataWarning,
            stacklevel=3,
        )

    def _from_the_kernel(self) -> str:
        now = self._oom_kills()
        if now is None or self._at_first is None:
            return "The kernel does not say whether memory ran out."
        return f"The kernel has killed {now - self._at_first} processes for memory meanwhile."


def _memory_of(pids: Mapping[int, int]) -> str:
    sizes = {number: read_own_bytes(pid) for number, pid in pids.items()}
    told = [f"{number}: {size // _MIB} MiB" for number, size in sizes.items() if size is not None]
    return f"Memory of those that live: {', '.join(told) or 'not known'}."


class Growth:
    """How much memory side processes have come to take since they were first looked at.

    A process is told of (once an executor) when it has grown by more than is left for each process,
    and makes place for a new one when it has grown by four times as much: before the kernel kills.

    Args:
        own_bytes: Returns the memory of a process that it shares with no other; None: not known.
        left_bytes: Returns what is left on this machine, or in this container.
    """

    def __init__(
        self,
        own_bytes: Callable[[int], int | None] = read_own_bytes,
        left_bytes: Callable[[], int] = lambda: read_host_memory().available_bytes,
    ) -> None:
        self._own_bytes, self._left_bytes = own_bytes, left_bytes
        self._next_s = clock.monotonic() + _LOOK_S
        self._first: dict[int, int] = {}
        self._told = False

    def look(self, children: Mapping[int, ChildProcess]) -> ChildProcess | None:
        """Return the process that is to make place for a new one, if any; looks every 5 s."""
        now_s = clock.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + _LOOK_S
        sizes = {child: self._own_bytes(child.pid) for child in children.values()}
        before, self._first = self._first, {}
        growth = dict[ChildProcess, int]()
        for child, size in sizes.items():
            if size is not None:
                self._first[child.pid] = before.get(child.pid, size)
                growth[child] = size - self._first[child.pid]
        if max(growth.values(), default=0) < _SMALL_BYTES:
            return None
        child = max(growth, key=growth.__getitem__)
        left_bytes = self._left_bytes() // len(children)
        renew = growth[child] > _RENEW * left_bytes
        if not renew and (self._told or growth[child] <= left_bytes):
            return None
        self._told = True
        was = self._first[child.pid]
        does = "It is replaced between two tasks." if renew else "Take fewer workers, or keep less."
        warnings.warn(
            f"Side process {child.number} (pid {child.pid}) has grown from {was // _MIB} to "
            f"{(was + growth[child]) // _MIB} MiB, and {left_bytes // _MIB} MiB are left for each "
            f"of {len(children)}. So does a dataset that keeps what it has read. {does}",
            FastDataWarning,
            stacklevel=2,
        )
        return child if renew else None

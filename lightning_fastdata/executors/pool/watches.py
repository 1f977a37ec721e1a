"""What is watched of side processes: that they get nowhere, die, grow, or hold each other up.

A watch takes figures, and says what follows from them: a warning, an error, or what is to be done.
"""

from __future__ import annotations

import errno
import signal
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.host import clock
from lightning_fastdata.host.memory import (
    read_host_memory,
    read_oom_kills,
    read_open_file_limits,
    read_own_bytes,
    size_text,
)
from lightning_fastdata.stamps.batch_stamps import ReadRates, TaskStamps

if TYPE_CHECKING:
    from lightning_fastdata.executors.pool.crew import ChildProcess, Side

_LIMIT_S: Final = 60.0
_LIMIT_TASKS: Final = 20
_TIMES_KEPT: Final = 1000
_STALL_LOOK_S: Final = 0.5
_MOST_LOOKS: Final = 5
"""Most looks that a late one counts for: the whole program may have been stopped meanwhile."""
_BUSY_SHARE: Final = 0.05
"""Share of a CPU above which a process computes, even where other programs take the CPUs."""
_BUSY_WEIGHT: Final = 0.1
"""Weight of the time in which processes start, or compute as one that builds an index does."""
_LONG_LOOKS: Final = 5
"""Number of looks after which others may wait for a process that computes on the same sample."""
_IDLE_SHOWN: Final = 4
_MINUTE_S: Final = 60.0
_MOST_DEATHS: Final = 30
_FEWEST_TASKS: Final = 2
"""Least number of tasks done for each death: processes that get less done get nowhere."""
_LOOK_S: Final = 5.0
_SMALL_BYTES: Final = 256 * 2**20
"""Bytes by which a process has to grow for its growth to count."""
_RENEW: Final = 4
_MIB: Final = 2**20
MAIN: Final = (
    'With the start methods "spawn" and "forkserver" the script needs `if __name__ == "__main__":`,'
    " and a new process has to be able to import what it defines."
)
_ROUNDS: Final = 3
"""Number of tasks that each worker does in a trial."""
_KEPT: Final = 6
"""Number of tasks of each worker before a trial that the trial is compared with."""
_MOST_OF_RUN: Final = 0.03
"""Share of the time so far that a trial may cost; it is made once, so that most runs lose less."""
_REQUESTS: Final = 16
_LATE: Final = 12
"""Number of the newest 16 batches that have to be late: else the training sets the pace."""
_BLOCKED: Final = 0.3
"""Share of reading that is waiting, below which nothing that workers share costs much."""


class Hang(NamedTuple):
    """A sample, or other work, with which a side process gets nowhere."""

    sample: tuple[int, int] | None
    """Batch number and position of the sample; None: none is read, or which one is not known."""
    seconds: float
    doing: str = ""
    """What the process was doing, in words, with its stack."""


@dataclass(slots=True)
class _Noted:
    """What a process noted last."""

    words: tuple[int, int, int]
    looks: int = 0
    """Number of later looks that found the same."""
    still_s: float = 0.0
    """Seconds for which the same was noted; slow ones count less."""
    cpu_s: float = 0.0
    """CPU seconds of the process and its children at the last look that found the same."""


class StallWatch:
    """Notices that side processes get nowhere while the training process waits for them.

    Args:
        limit_s: Seconds for which that may go on; 0: for ever; None: 60 s, or 20 times the 99th
            percentile of the times of tasks if that is more.
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
        """Time of ``clock.monotonic`` when :meth:`look` is due; None: there is no limit."""
        return None if self._given == 0 else self._looked_s + self._step_s

    @property
    def limit_s(self) -> float:
        """Seconds for which a process may get nowhere; 0: for ever."""
        if self._given is not None:
            return self._given
        times = sorted(self._times)
        long_ns = times[-1 - len(times) // 100] if times else 0
        return max(_LIMIT_S, _LIMIT_TASKS * long_ns / 1e9)

    def note_task(self, task_ns: int) -> None:
        """Note that a task has ended, and how long it took."""
        self._stalled_s = 0.0
        self._times.append(task_ns)

    def look(
        self,
        children: Sequence[ChildProcess],
        doing: Callable[[], list[str]],
        owing: Collection[ChildProcess] = (),
    ) -> list[tuple[ChildProcess, Hang]]:
        """Look how far the processes have got, if that is due; warn if none moves.

        Args:
            children: All side processes.
            doing: Returns in words what the processes do.
            owing: Processes with something to do that others can do in their place.

        Returns:
            The processes of ``owing`` that got nowhere for too long, and with what.

        Raises:
            WorkerError: Nothing at all has moved for too long.
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
        """Return whether a process that noted nothing new, or one that it started, computes."""
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


def kill_hung(child: ChildProcess, hang: Hang, what: str) -> None:
    """Say ``what`` a process is stuck in, and kill it, so that others do what it had to do.

    Raises:
        WorkerError: It was killed before, and has not died.
    """
    if child.hang is not None:
        raise WorkerError(
            f"A side process got nowhere, was killed, and has not died in {hang.seconds:g} s, as "
            f"when the kernel waits for a disk or server that does not answer. It was {what}"
        )
    child.hang = hang._replace(doing=what)
    child.process.kill()  # also where a warning is an error
    warnings.warn(
        f"A side process has got nowhere for {hang.seconds:g} s with a sample, and is replaced; "
        "the sample is read once more. If it only takes long, raise timeout; "
        f"0 waits for ever. It was {what}",
        FastDataWarning,
        stacklevel=2,
    )


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


def doing(
    children: Sequence[ChildProcess], reads: Callable[[ChildProcess], str | None]
) -> list[str]:
    """Return what side processes are doing: what they read, as ``reads`` says, and their stacks."""
    reading = {child: reads(child) for child in children}
    busy = [child for child in children if reading[child] or child.tasks or child.is_stopped()]
    # Where no process seems to have anything to do, some of them show what they do instead.
    return [
        f"side process {child.number} (pid {child.pid}), reading "
        f"{reading[child] or 'sample none'}:\n{child.stack()}"
        for child in busy or children[:_IDLE_SHOWN]
    ]


def lost_sample(index: object, child: Side, times: int) -> WorkerError:
    """Return the error for a sample that kills or holds up every process that reads it.

    ``child`` is the last of ``times`` processes to which that happened.
    """
    hang = child.hang
    if hang is None:
        return WorkerError(
            f"Sample {index!r} of the dataset was being read each of the {times} times that a side "
            f"process {death(child.exitcode)}. Read dataset[{index!r}] in a script of its own "
            "to see why, and leave it out or repair it."
        )
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
    # Threads of this package hold no lock of the user's.
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
    """Number of tasks that all processes had done before."""


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
            code: Exit code of the process.
            tasks: Number of tasks that all processes have done so far.
            pids: Process ids of the living processes, by their numbers.

        Raises:
            WorkerError: More than 30 deaths came within a minute, and fewer than two tasks were
                done for each.
        """
        now_s = clock.monotonic()
        self.warn_of_memory(code, pids, "It is replaced, and its samples are read again.")
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

    def warn_of_memory(self, code: int | None, pids: Mapping[int, int], then: str) -> None:
        """Warn of a death if the kernel killed for memory, with figures and ``then``, what follows.

        ``pids``: As in :meth:`note`.
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

    A warning (one for each executor) names a process that has grown by more than is left for each.
    If it has grown by four times as much, a new process takes its place, before the kernel kills.

    Args:
        own_bytes: Returns the memory of a process that it shares with no other; None: not known.
        left_bytes: Returns the memory that is left on this machine, or in this container.
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
        growth: dict[ChildProcess, int] = {}
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


class CrewTrial:
    """Compares how much all workers read with what half of them read, which it limits for that.

    Each worker may wait for itself, as for the latency of a network, or all for something that they
    share, as a lock or a full line. While all of them work, both look the same. So once in a run,
    while batches are waited for anyway, only half of the workers are given tasks for a moment.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.limit: int | None = None
        """Most tasks that may be under way; None: no limit."""
        self._began_ns: int | None = None
        self._late: deque[bool] = deque(maxlen=_REQUESTS)
        self._with_all: deque[TaskStamps] = deque(maxlen=_KEPT * workers)
        self._with_half: list[TaskStamps] = []
        self._since_ns: int | None = None
        self._made = False

    @property
    def _over(self) -> bool:
        return self._made or self.workers < 2

    def resize(self, workers: int) -> None:
        """Compare another number of workers with half of them, if no trial was made already."""
        self.given_up()
        self.workers, self._with_all = workers, deque(maxlen=_KEPT * workers)

    def delivered(self, *, late: bool) -> None:
        """Note a batch that was delivered, and begin the trial if it is time for it."""
        if self._over or self.limit is not None:
            return
        if self._began_ns is None:
            self._began_ns = clock.monotonic_ns()
        self._late.append(late)
        if sum(self._late) >= _LATE and self._is_worth_it(self._began_ns):
            self.limit = self.workers // 2

    def answered(self, task: TaskStamps | None, under_way: int) -> ReadRates | None:
        """Note a task that has ended, beside others still under way; return what a trial found."""
        if self._over or task is None or not task.samples:
            return None
        if self.limit is None:
            self._with_all.append(task)
            return None
        if self._since_ns is None:
            if under_way < self.limit:  # tasks given before the trial have ended
                self._since_ns = clock.monotonic_ns()
            return None
        if task.began_ns >= self._since_ns:
            self._with_half.append(task)
        if len(self._with_half) < _ROUNDS * self.limit:
            return None
        half, before = self._with_half, list(self._with_all)
        # Between two tasks of the trial a worker may wait for the training to give it the next.
        busy_ns = _length_ns(half) // self.limit
        # With all at work, the tasks that a lock leaves waiting longest have not ended yet.
        span_ns = before[-1].ended_ns - before[0].ended_ns
        rates = ReadRates(
            self.limit, _per_s(half, busy_ns), self.workers, _per_s(before[1:], span_ns)
        )
        self._made, self.limit = True, None
        return rates

    def given_up(self) -> None:
        """End a trial that is under way: another epoch begins, or no more stamps are taken."""
        self.limit = self._since_ns = None
        self._with_half.clear()
        self._late.clear()

    def _is_worth_it(self, began_ns: int) -> bool:
        """Return whether workers wait in reading, and a trial costs little of the run so far."""
        timed = [task for task in self._with_all if task.cpu_ns is not None]
        length = _length_ns(timed)
        busy = sum((task.cpu_ns or 0) + (task.runqueue_ns or 0) for task in timed)
        full = len(self._with_all) == self._with_all.maxlen
        if not (full and length > 0 and 1 - busy / length >= _BLOCKED):
            return False
        each_ns = _length_ns(self._with_all) / len(self._with_all)
        lost_ns = (_ROUNDS + 0.5) * each_ns * (1 - (self.workers // 2) / self.workers)
        return lost_ns <= _MOST_OF_RUN * (clock.monotonic_ns() - began_ns)


def _length_ns(tasks: Iterable[TaskStamps]) -> int:
    return sum(task.ended_ns - task.began_ns for task in tasks)


def _per_s(tasks: Sequence[TaskStamps], span_ns: int) -> float:
    """Return the samples a second read in a span, had there been a CPU whenever it was wanted."""
    queued = sum(task.runqueue_ns or 0 for task in tasks)
    samples = sum(task.samples for task in tasks)
    return samples / max(1e-9, span_ns * (1 - queued / max(1, _length_ns(tasks)))) * 1e9

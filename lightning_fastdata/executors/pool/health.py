"""Side processes that die too often, or take more and more memory: what to say, and what to do."""

from __future__ import annotations

import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.executors.pool.faults import death
from lightning_fastdata.executors.pool.process import ChildProcess
from lightning_fastdata.host.memory import read_host_memory, read_oom_kills
from lightning_fastdata.host.usage import read_own_bytes

_MINUTE_S: Final = 60.0
_MOST_DEATHS: Final = 30
_FEWEST_TASKS: Final = 2
"""Processes that get less than that done before they die get nowhere."""
_LOOK_S: Final = 5.0
_SMALL_BYTES: Final = 256 * 2**20
"""Growth of a process by less than this is none."""
_RENEW: Final = 4
_MIB: Final = 2**20


class _Death(NamedTuple):
    at_s: float
    code: int | None
    tasks: int
    """That all processes had done before."""


class Deaths:
    """The deaths of an executor's side processes within a minute.

    Args:
        clock: Seconds that never go back.
        oom_kills: Returns how often the kernel has killed for memory so far; None: not known.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        oom_kills: Callable[[], int | None] = read_oom_kills,
    ) -> None:
        self._clock, self._oom_kills = clock, oom_kills
        self._at_first = oom_kills()
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
        now_s = self._clock()
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
        clock: Seconds that never go back.
        own_bytes: Returns the memory of a process that it shares with no other; None: not known.
        left_bytes: Returns what is left on this machine, or in this container.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        own_bytes: Callable[[int], int | None] = read_own_bytes,
        left_bytes: Callable[[], int] = lambda: read_host_memory().available_bytes,
    ) -> None:
        self._clock, self._own_bytes, self._left_bytes = clock, own_bytes, left_bytes
        self._next_s = clock() + _LOOK_S
        self._first: dict[int, int] = {}
        self._told = False

    def look(self, children: Mapping[int, ChildProcess]) -> ChildProcess | None:
        """Return the process that is to make place for a new one, if any; looks every 5 s."""
        now_s = self._clock()
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

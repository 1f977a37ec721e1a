"""Notices side processes that get nowhere, by what they note of their progress."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.executors.pool.process import ChildProcess, Hang
from lightning_fastdata.host import clock

_LIMIT_S: Final = 60.0
_LIMIT_TASKS: Final = 20
_TIMES_KEPT: Final = 1000
_LOOK_S: Final = 0.5
_MOST_LOOKS: Final = 5
"""A look that comes late counts for so many: the whole program may have been stopped meanwhile."""
_BUSY_SHARE: Final = 0.05
"""Processes that compute have so much of a CPU, even where other programs take the CPUs."""
_BUSY_WEIGHT: Final = 0.1
"""While processes start, or compute as one that builds an index does, time counts for so much."""
_LONG_LOOKS: Final = 5
"""Who computes for so many looks without a new sample may be what the others wait for."""


@dataclass(slots=True)
class _Noted:
    """What a process noted last."""

    words: tuple[int, int, int]
    looks: int = 0
    """So many times it was the same."""
    still_s: float = 0.0
    """For so long, as it counts."""


class StallWatch:
    """Notices that side processes get nowhere while the training process waits for them.

    Args:
        limit_s: How long that may go on; 0: for ever; None: 60 s, or 20 times the 99th percentile
            of the times of tasks if that is more.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._given = limit_s
        self._step_s = min(_LOOK_S, (limit_s or _LIMIT_S) / 8)
        self._looked_s = clock.monotonic()
        self._times: deque[int] = deque(maxlen=_TIMES_KEPT)
        self._noted: dict[int, _Noted] = {}
        self._cpu_s: dict[int, float] = {}
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

    def note_task(self, task_ns: int = 0) -> None:
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
            self._cpu_s.pop(child.pid, None)
            return False
        cpu_s = clock.cpu_s_of(child.pid, noted.still_s >= long_s)
        before_s = self._cpu_s.get(child.pid, 0.0)
        self._cpu_s[child.pid] = cpu_s
        return cpu_s - before_s > _BUSY_SHARE * self._step_s


def _stalled(seconds: float) -> str:
    return (
        f"No sample was read and no batch was made for {seconds:g} s while the training waited for "
        "one. The workers are stuck, or one sample takes very long (to build an index, to reach a "
        "server). If it only takes long, raise timeout; 0 "
        "waits for ever. The side processes:"
    )

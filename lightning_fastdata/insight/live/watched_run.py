"""What a process tells of a run that it measures, for `fastdata top`: its pace and its workers."""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from lightning_fastdata.host import clock
from lightning_fastdata.insight.live.status import (
    EVERY_S,
    Publisher,
    RunFacts,
    Status,
    WorkerStatus,
    process_started_s,
)
from lightning_fastdata.insight.measure.stage_stamps import sample_path
from lightning_fastdata.insight.model.finding import gain_text
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.stamps.line_names import stack_lines

if TYPE_CHECKING:
    from lightning_fastdata.executors.pool.stalls import WorkerNow
    from lightning_fastdata.insight.measure.stage import StageMeter
    from lightning_fastdata.insight.verdicts.catalogue import Verdict

_RECENT: Final = 11
"""Notes that are kept, one a second: the last ten seconds."""
_MOST_STEPS: Final = 256
"""Times of no more steps are averaged, as that is done where a step ends."""
_LONG_INDEX: Final = 80
_LONG_READ_S: Final = 10.0
_STACKS_EVERY_S: Final = 10.0
"""A process that shows its stack is interrupted for it, so it is not asked more often."""
_STACKS_AT_ONCE: Final = 4
"""Each takes a tenth of a second, and the next status waits for them."""
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_OUTERMOST: Final = "child_main"
"""The function that a worker process runs."""
Told: TypeAlias = "tuple[RunFacts, Sequence[FastDataLoader]]"
"""What is known of a run, and the loaders that it reads now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the steps of the last ten seconds went; None: not known."""

    steps_per_s: float | None = None
    step_ms: float | None = None
    stall_share: float | None = None


class PaceMeter:
    """Notes once a second, where a step ends, what the thread that tells must not read itself."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.step_ended_s = clock.monotonic()
        """When the last step ended, of whatever stage; before the first one, when this began."""
        self.steps = 0
        self._due_s = 0.0
        self._meter: StageMeter | None = None
        self._notes: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        """When each note was made, and the steps until then."""

    def step_ended(self, meter: StageMeter) -> None:
        """Note that a step of a stage has ended; to be called by the thread that measures it."""
        now_s = self.step_ended_s = clock.monotonic()
        self.steps += 1
        if now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S
        if meter is not self._meter:
            self._meter = meter
            self._notes.clear()
        history = meter.timeline.history
        self._notes.append((now_s, history.steps))
        (began_s, before), steps = self._notes[0], history.steps
        steps, seconds = steps - before, now_s - began_s
        columns = history.newest(min(_MOST_STEPS, steps or 1))
        step, stall = columns["step_ms"], columns["stall_ms"]
        timed = ~(np.isnan(step) | np.isnan(stall))
        total_ms = float(step[timed].sum())
        self.pace = Pace(
            steps_per_s=steps / seconds if steps and seconds > 0 else None,
            step_ms=total_ms / int(timed.sum()) if total_ms else None,
            stall_share=float(stall[timed].sum()) / total_ms if total_ms else None,
        )


class WorkerWatch:
    """Notices for how long each worker has been at what it does."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[tuple[int, ...], float]] = {}
        self._lines: dict[int, tuple[float, tuple[str, ...]]] = {}
        self._may_ask = 0

    def look(self, loaders: Iterable[FastDataLoader], *, hangs: bool) -> dict[str, Any]:
        """Return the fields of a `Status` that are about workers.

        Args:
            loaders: That are read now.
            hangs: No step has ended for long, so that stacks are worth their price.
        """
        now_s, self._may_ask = clock.monotonic(), _STACKS_AT_ONCE
        readers, found, ready, under_way = [], [], 0, 0
        before, self._since = self._since, {}
        known = False
        for loader in loaders:
            readers.append(_reader_text(loader))
            for executor in loader.now():
                known = True
                ready, under_way = ready + executor.ready, under_way + executor.under_way
                for worker in executor.workers:
                    key = worker.child.pid
                    noted, since_s = before.get(key, ((), now_s))
                    since_s = since_s if noted == worker.noted else now_s
                    self._since[key] = worker.noted, since_s
                    found.append(self._told(worker, loader.dataset, now_s - since_s, hangs))
        return {
            "readers": tuple(readers),
            "workers": tuple(found),
            "batches_ready": ready if known else None,
            "batches_under_way": under_way if known else None,
        }

    def _told(self, worker: WorkerNow, dataset: object, for_s: float, hangs: bool) -> WorkerStatus:
        index, child = worker.index, worker.child
        lines: tuple[str, ...] = ()
        reads = worker.state == "reading"
        if hangs and reads and for_s >= _LONG_READ_S:
            lines = self._stack(worker)
        return WorkerStatus(
            worker=child.number,
            pid=child.pid,
            state=worker.state,
            index=None if index is None or not reads else repr(index)[:_LONG_INDEX],
            path=sample_path(dataset, index) if index is not None and reads else None,
            for_s=for_s,
            lines=lines,
        )

    def _stack(self, worker: WorkerNow) -> tuple[str, ...]:
        pid = worker.child.pid
        taken_s, lines = self._lines.get(pid, (-_STACKS_EVERY_S, ()))
        if self._may_ask and clock.monotonic() - taken_s >= _STACKS_EVERY_S:
            self._may_ask -= 1
            lines = stack_lines(_frames_in(worker.child.stack(wait_s=0.5)))
            if lines:  # one that has no time to answer is asked again
                self._lines[pid] = clock.monotonic(), lines
        return lines


def _reader_text(loader: FastDataLoader) -> str:
    count = loader.num_workers
    workers = f"{count} worker{'' if count == 1 else 's'}" if count else "no workers"
    return f"{type(loader.dataset).__name__}: {workers}, executor {loader.executor!r}"


def _frames_in(text: str) -> list[tuple[str, int, str]]:
    """Return the frames of the thread that ``faulthandler`` calls the current one.

    Those outside of the worker's own work are left out: a forked process has its parent's, too.
    """
    lines = text.partition("Current thread")[2].splitlines()[1:]
    frames = itertools.takewhile(bool, (_FRAME.match(line) for line in lines))
    found = [(each[1], int(each[2]), each[3]) for each in frames if each]
    return list(itertools.takewhile(lambda frame: frame[2] != _OUTERMOST, found))


def stack_of_thread(ident: int) -> tuple[str, ...]:
    """Return where in the code a thread of this process is, innermost function first."""
    frame, frames = sys._current_frames().get(ident), []
    while frame is not None:
        code = frame.f_code
        frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return stack_lines(frames)


class WatchedRun:
    """Publishes the status of one run of this process, from now on until it is closed.

    It is made in the thread that runs it.

    Args:
        facts: Returns what is known now, and the loaders that are read; None: nothing runs, and
            nothing is shown. It is called in a thread of its own, and changes nothing.

    Raises:
        OptionsError: The folder of running trainings belongs to another user, or this is Windows.
        OSError: It cannot be made.
    """

    def __init__(self, facts: Callable[[], Told | None]) -> None:
        self.pace = PaceMeter()
        """To be told of each step that ends."""
        self._facts, self._workers = facts, WorkerWatch()
        self._thread = threading.get_ident()
        self._started_s = clock.unix_s()
        self._process_started_s = process_started_s(os.getpid()) or 0.0
        self.close = Publisher(self._status).close

    def _status(self) -> Status | None:
        told = self._facts()
        if told is None:
            return None
        facts, loaders = told
        log_dir = facts.log_dir
        status = Status(
            **asdict(facts)
            | {"log_dir": log_dir if "://" in log_dir else str(Path(log_dir).absolute())},
            **asdict(self.pace.pace),
            pid=os.getpid(),
            process_started_s=self._process_started_s,
            written_s=clock.unix_s(),
            group=_group(facts.world_size),
            script=sys.argv[0] if sys.argv else "",
            started_s=self._started_s,
            quiet_s=clock.monotonic() - self.pace.step_ended_s,
        )
        hangs = status.hangs
        with suppress(RuntimeError):  # what it goes through has changed meanwhile
            status = replace(status, **self._workers.look(loaders, hangs=hangs))
        return replace(status, stack=stack_of_thread(self._thread)) if hangs else status


def found_text(verdict: Verdict | None) -> str | None:
    """Return a verdict in words, with what to try first."""
    if verdict is None:
        return None
    first = verdict.findings[0]
    gain = "" if first.gain is None else f": {gain_text(first.gain)}"
    remedy = f". Try: {first.remedy}{gain}" if first.remedy else ""
    return f"{verdict.kind}, {verdict.sentence} [{verdict.code}]{remedy}"


def _group(world_size: int) -> str:
    """Return what is the same for all ranks of one training: where they have met."""
    if world_size == 1:
        return str(os.getpid())
    met = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return ":".join(each or f"parent {os.getppid()}" for each in met)

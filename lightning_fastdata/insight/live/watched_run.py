"""What a process tells of a run that it measures, for `fastdata top`: its pace and its workers."""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.host import clock
from lightning_fastdata.host.usage import read_own_bytes
from lightning_fastdata.insight.live.status import (
    EVERY_S,
    Publisher,
    Status,
    WorkerStatus,
    process_started_s,
)
from lightning_fastdata.insight.measure.stage_stamps import sample_path
from lightning_fastdata.insight.model.finding import gain_text
from lightning_fastdata.insight.waits.attribution import PARTS
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
Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the steps of the last ten seconds went; None: not known."""

    steps_per_s: float | None = None
    step_ms: float | None = None
    stall_share: float | None = None
    waits: Mapping[str, float] = field(default_factory=dict)
    """Part of the wait by its name in `WaitParts` -> its share, 0 to 1; below 1 % left out."""


@dataclass(frozen=True, slots=True)
class _Note:
    at_s: float
    steps: int
    waited_for: object
    """The loader that is waited for most, as its totals."""
    waited_ns: list[float]


class PaceMeter:
    """Notes once a second, where a step ends, what the thread that tells must not read itself."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.step_ended_s = clock.monotonic()
        """When the last step ended, of whatever stage; before the first one, when this began."""
        self.steps = 0
        self._due_s = 0.0
        self._meter: StageMeter | None = None
        self._notes: deque[_Note] = deque(maxlen=_RECENT)

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
        totals = meter.stamps.slowest()
        waited_ns = [] if totals is None else totals.waited_so_far_ns()
        self._notes.append(_Note(now_s, meter.timeline.history.steps, totals, waited_ns))
        self.pace = self._read(meter)

    def _read(self, meter: StageMeter) -> Pace:
        first, last = self._notes[0], self._notes[-1]
        steps, seconds = last.steps - first.steps, last.at_s - first.at_s
        columns = meter.timeline.history.newest(min(_MOST_STEPS, steps or 1))
        step, stall = columns["step_ms"], columns["stall_ms"]
        timed = ~(np.isnan(step) | np.isnan(stall))
        total_ms = float(step[timed].sum())
        return Pace(
            steps_per_s=steps / seconds if steps and seconds > 0 else None,
            step_ms=total_ms / int(timed.sum()) if total_ms else None,
            stall_share=float(stall[timed].sum()) / total_ms if total_ms else None,
            waits=_shares(first, last),
        )


def _shares(first: _Note, last: _Note) -> dict[str, float]:
    if first.waited_for is not last.waited_for:  # another of several loaders has become slow
        return {}
    pairs = zip(first.waited_ns, last.waited_ns, strict=True)
    spent_ns = [now_ns - before_ns for before_ns, now_ns in pairs]
    total_ns = sum(spent_ns)
    if total_ns <= 0:
        return {}
    parts = zip(PARTS, spent_ns, strict=False)
    return {name: ns / total_ns for name, ns in parts if ns >= 0.01 * total_ns}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run by whoever runs it; the fields are those of :class:`.Status`."""

    rank: int
    world_size: int
    log_dir: str
    method: str
    activity: str
    activity_s: float
    epoch: int
    step: int
    loaders: tuple[FastDataLoader, ...] = field(default=())
    """That are read now."""
    verdict: Verdict | None = None
    """The newest one."""
    move: str | None = None


class WatchedRun:
    """Publishes the status of one run of this process, from now on until it is closed.

    It is made in the thread that runs it.

    Args:
        facts: Returns what is known now; None: nothing runs, and nothing is shown. It is called in
            a thread of its own, and changes nothing.

    Raises:
        OptionsError: The folder of running trainings belongs to another user, or this is Windows.
        OSError: It cannot be made.
    """

    def __init__(self, facts: Callable[[], RunFacts | None]) -> None:
        self.pace = PaceMeter()
        """To be told of each step that ends."""
        self._facts, self._workers = facts, WorkerWatch()
        self._thread = threading.get_ident()
        self._started_s = clock.unix_s()
        self._process_started_s = process_started_s(os.getpid()) or 0.0
        self.close = Publisher(self._status).close

    def _status(self) -> Status | None:
        facts, pace = self._facts(), self.pace.pace
        if facts is None:
            return None
        verdict, remedy = _judged(facts.verdict)
        status = Status(
            pid=os.getpid(),
            process_started_s=self._process_started_s,
            written_s=clock.unix_s(),
            group=_group(facts.world_size),
            rank=facts.rank,
            world_size=facts.world_size,
            script=sys.argv[0] if sys.argv else "",
            log_dir=_whole(facts.log_dir),
            started_s=self._started_s,
            method=facts.method,
            activity=facts.activity,
            activity_s=facts.activity_s,
            quiet_s=clock.monotonic() - self.pace.step_ended_s,
            epoch=facts.epoch,
            step=facts.step,
            steps_per_s=pace.steps_per_s,
            step_ms=pace.step_ms,
            stall_share=pace.stall_share,
            waits=pace.waits,
            verdict=verdict,
            remedy=remedy,
            move=facts.move,
            memory_bytes=read_own_bytes(os.getpid()),
        )
        hangs = status.hangs
        with suppress(RuntimeError):  # what it goes through has changed meanwhile
            status = replace(status, **self._workers.look(facts.loaders, hangs=hangs))
        return replace(status, stack=stack_of_thread(self._thread)) if hangs else status


def watch(owner: Owner, facts: Callable[[Owner], RunFacts | None]) -> WatchedRun | None:
    """Publish the status of what an object runs for as long as the object lives.

    Returns:
        None where that is not possible, which is warned of. On Windows it never is, without a word.
    """
    if sys.platform == "win32":
        return None
    known = weakref.ref(owner)

    def facts_now() -> RunFacts | None:
        owner = known()
        return None if owner is None else facts(owner)

    try:
        watched = WatchedRun(facts_now)
    except (OptionsError, OSError) as error:
        text = f"`fastdata top` does not show this loop: {error}"
        warnings.warn(text, FastDataWarning, stacklevel=3)
        return None
    weakref.finalize(owner, watched.close)
    return watched


def _judged(verdict: Verdict | None) -> tuple[str | None, str | None]:
    """Return a verdict and its remedy in words."""
    if verdict is None:
        return None, None
    first = verdict.findings[0]
    gain = "" if first.gain is None else f": {gain_text(first.gain)}"
    remedy = f"{first.remedy}{gain}" if first.remedy else None
    return f"{verdict.kind}, {verdict.sentence} [{verdict.code}]", remedy


def _whole(log_dir: str) -> str:
    return log_dir if "://" in log_dir else str(Path(log_dir).absolute())


def _group(world_size: int) -> str:
    """Return what is the same for all ranks of one training: where they have met."""
    if world_size == 1:
        return str(os.getpid())
    met = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return ":".join(each or f"parent {os.getppid()}" for each in met)

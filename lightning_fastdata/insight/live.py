"""What trainings tell of themselves while they run, and the page that `fastdata top` makes of it.

Each process writes its part of the page into a small file of its own once a second, which its user
alone can read. The file goes away with the run; one of a process that was killed is removed by
whoever looks next.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import psutil

from lightning_fastdata.errors import OptionsError, printable
from lightning_fastdata.host import clock
from lightning_fastdata.host.system_calls import private_folder, write_atomically
from lightning_fastdata.insight.model.finding import duration_text
from lightning_fastdata.stamps.lines import look_at_thread, stack_lines

if TYPE_CHECKING:
    from lightning_fastdata.executors.pool.stalls import WorkerNow
    from lightning_fastdata.insight.measure.stage import StageMeter
    from lightning_fastdata.loading.loader import FastDataLoader

_EVERY_S: Final = 1.0
"""A part of the page is written so often."""
_numbers: Final = itertools.count()
_SHARED_MEMORY: Final = Path("/dev/shm")
_MOST_BYTES: Final = 1 << 20
_SLACK_S: Final = 2.0
"""When a process started is told to a hundredth of a second, by a clock that may be set."""
_STALE_S: Final = 60.0
"""Files of dead processes are removed when they are so old. A process that is not seen from here,
as in another container, writes its own again and again."""
_SILENT_S: Final = 5.0
_LONG_S: Final = 10.0
_LONG_STEPS: Final = 10.0
"""No step for so long, and for so many times a usual one, is worth an alarm."""
_MOST_WORKERS: Final = 24
_RECENT_S: Final = 10.0
_MOST_STEPS: Final = 256
"""Times of no more steps are averaged, as that is done where a step ends."""
_LONG_INDEX: Final = 80
_STACKS_AT_ONCE: Final = 4
"""Each takes a tenth of a second, and interrupts a process; they are asked for every 10 s."""
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_OUTERMOST: Final = "child_main"
"""The function that a worker process runs."""
NOTHING_RUNS: Final = """\
No training of this user runs on this machine with a DataThroughputCallback.
Start one with Trainer(callbacks=[DataThroughputCallback()]), and this in another terminal."""


# -- what is written, and read again --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Status:
    """What one process of a training tells."""

    rank: int
    world_size: int
    log_dir: str
    method: str
    """``fit``, ``validate``, ``test`` or ``predict``."""
    activity: str
    """What the process does now, in words."""
    epoch: int
    step: int
    """The optimizer's steps so far; batches of a run that is no fit."""
    found: str | None = None
    """What limits the run, as judged last, and what to try; None: nothing yet."""
    pid: int = field(default_factory=os.getpid)
    written_s: float = field(default_factory=clock.unix_s)
    """When this was written, seconds since 1970."""
    started_s: float = 0.0
    """When the run began, likewise."""
    group: str = ""
    """The same for all processes of one training."""
    script: str = ""
    lines: tuple[str, ...] = ()
    """Its part of the page."""

    @classmethod
    def from_json(cls, text: str | bytes) -> Status | None:
        """Return what was written as JSON; None: another version of this wrote it."""
        try:
            values = json.loads(text)
            return cls(**{**values, "lines": tuple(map(str, values["lines"]))})
        except (ValueError, TypeError, KeyError):
            return None


def live_folder() -> Path:
    """Return where the status of this user's trainings is kept.

    ``$LIGHTNING_FASTDATA_LIVE``, or else a folder in ``/dev/shm`` (Linux) or the one for temporary
    files: the same for a login session and for a job, whatever else their environments say.

    Raises:
        OptionsError: On Windows, where no such place is private.
    """
    if sys.platform == "win32":
        raise OptionsError("Trainings that run are shown on Linux and macOS only.")
    own = os.environ.get("LIGHTNING_FASTDATA_LIVE")
    if own:
        return Path(own)
    usable = sys.platform.startswith("linux") and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    root = _SHARED_MEMORY if usable else Path(tempfile.gettempdir())
    return root / f"lightning_fastdata-live-{os.getuid()}"


def read_all(folder: Path, now_s: float) -> list[Status]:
    """Return the status of each process that runs now: the trainings, each with its ranks in order.

    What processes have left that are gone is removed.

    Raises:
        OptionsError: The folder belongs to another user, or is no folder.
    """
    if private_folder(folder, make=False) is None:
        return []
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            written_s = path.stat().st_mtime
            if _runs(int(path.name.partition("-")[0]), written_s):
                with path.open("rb") as file:
                    found.append(Status.from_json(file.read(_MOST_BYTES)))
            elif now_s - written_s > _STALE_S:
                path.unlink()
        except (OSError, ValueError):
            continue  # it has ended just now, or is no file of ours
    told = [each for each in found if each is not None]
    began_s = {each.group: each.started_s for each in told}  # of any of its ranks
    return sorted(told, key=lambda each: (began_s[each.group], each.group, each.rank, each.pid))


def _runs(pid: int, written_s: float) -> bool:
    """Return whether a process runs that had this number when something was written."""
    try:
        process = psutil.Process(pid)
        gone = process.status() == psutil.STATUS_ZOMBIE
        return not gone and process.create_time() < written_s + _SLACK_S
    except psutil.Error:
        return False


def page_text(statuses: Sequence[Status], now_s: float) -> str:
    """Return trainings as text, one below the other; what files are called gives no orders in it.

    ``now_s``: seconds since 1970.
    """
    groups: dict[str, list[Status]] = {}
    for each in statuses:
        groups.setdefault(each.group, []).append(each)
    lines = [line for ranks in groups.values() for line in (*_training(ranks, now_s), "")]
    return "\n".join(printable(line, keep="") for line in lines[:-1]) or NOTHING_RUNS


def _training(ranks: Sequence[Status], now_s: float) -> Iterator[str]:
    first = ranks[0]
    of_ranks = f" · {len(ranks)} of {first.world_size} ranks" if first.world_size > 1 else ""
    lasted = duration_text(max(0.0, now_s - first.started_s))
    script = Path(first.script).name or "python"
    yield f"{script} · {first.method} · pid {first.pid}{of_ranks} · {lasted}"
    for each in ranks:
        silent_s = now_s - each.written_s
        if silent_s > _SILENT_S:
            told = f"nothing heard for {duration_text(silent_s)}, last it was {each.activity}"
            why = "the process is stopped, or code in C keeps Python's lock"
            yield f" ! {_who(each.rank, each.world_size, each.pid)}{told}: {why}"
        yield from each.lines


def _who(rank: int, world_size: int, pid: int) -> str:
    return f"rank {rank} (pid {pid}): " if world_size > 1 else ""


# -- what a process knows of its run --------------------------------------------------------------


class PaceMeter:
    """Notes once a second, where a step ends, what the thread that tells must not read itself."""

    def __init__(self) -> None:
        self.step_ended_s = clock.monotonic()
        """When the last step ended, of whatever stage; before the first one, when this began."""
        self.steps = 0
        self.steps_per_s = 0.0
        """Of the last ten seconds, or 256 steps, as are the next ones; 0: none, or not known."""
        self.means: dict[str, float] = {}
        """Of the newest steps, by their names for loggers."""
        self._due_s = 0.0
        self._newest = 1
        """How many steps those were, at the pace of the note before."""

    def step_ended(self, meter: StageMeter) -> None:
        """Note that a step of a stage has ended; to be called by the thread that measures it."""
        now_s = self.step_ended_s = clock.monotonic()
        self.steps += 1
        if now_s < self._due_s:
            return
        # `fastdata top` is light.
        from lightning_fastdata.insight.measure.metrics import measured
        from lightning_fastdata.insight.measure.stage import window_means

        self._due_s = now_s + _EVERY_S
        columns = meter.timeline.history.newest(self._newest)
        steps, gaps = measured(columns["step_ms"]), measured(columns["gap_ms"])
        taken_s = float(steps.sum() + gaps.sum()) / 1e3
        self.steps_per_s = steps.size / taken_s if taken_s > 0 else 0.0
        self._newest = min(_MOST_STEPS, max(1, round(_RECENT_S * self.steps_per_s)))
        self.means = window_means(columns)

    @property
    def quiet_s(self) -> float:
        """Seconds since the last step ended, or since the run began."""
        return clock.monotonic() - self.step_ended_s

    @property
    def hangs(self) -> bool:
        """Whether no step has ended for much longer than steps take."""
        between_s = 1 / self.steps_per_s if self.steps_per_s else 0.0
        step_s = max(self.means.get("data/step_ms", 0.0) / 1e3, between_s)
        return self.quiet_s > max(_LONG_S, _LONG_STEPS * step_s)

    def text(self) -> str:
        """Return the pace in words; empty: not known yet."""
        told = f", {self.steps_per_s:.3g} steps/s" if self.steps_per_s else ""
        if "data/step_ms" in self.means:
            told += f", {self.means['data/step_ms']:.3g} ms a step"
        if "data/stall_percent" in self.means:
            told += f", {self.means['data/stall_percent']:.0f}% of it waiting for data"
        return told


class WorkerWatch:
    """Notices for how long each worker has been at what it does."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[tuple[int, ...], float]] = {}
        self._stacks: dict[int, tuple[float, tuple[str, ...]]] = {}
        self._stacks_asked = 0

    def look(self, loaders: Sequence[FastDataLoader], *, hangs: bool) -> tuple[str, list[str]]:
        """Return in words how many batches are made, and what each worker does, the longest first.

        ``hangs``: no step has ended for long, so that stacks are worth their price.
        """
        now_s, self._stacks_asked = clock.monotonic(), 0
        before, self._since = self._since, {}
        seen = [(loader, each) for loader in loaders for each in loader.now()]
        found = [(loader, worker) for loader, each in seen for worker in each.workers]
        for _, worker in found:
            noted, since_s = before.get(worker.child.pid, ((), now_s))
            since_s = since_s if noted == worker.noted else now_s
            self._since[worker.child.pid] = worker.noted, since_s
        found.sort(key=lambda each: (each[1].state == "idle", self._since[each[1].child.pid][1]))
        lines = [self._line(*each, now_s, hangs=hangs) for each in found[:_MOST_WORKERS]]
        if len(found) > _MOST_WORKERS:
            lines.append(f"   and {len(found) - _MOST_WORKERS} workers that have less to do")
        if not seen:
            return "", lines
        ready, made = sum(each.ready for _, each in seen), sum(each.under_way for _, each in seen)
        return f", {ready} batches ready, {made} being made", lines

    def _line(self, loader: FastDataLoader, worker: WorkerNow, now_s: float, *, hangs: bool) -> str:
        from lightning_fastdata.insight.measure.stage import sample_path

        for_s, doing, at = now_s - self._since[worker.child.pid][1], str(worker.state), ""
        if worker.state == "reading" and hangs and for_s >= _LONG_S:
            stack = " < ".join(self._stack(worker))
            at = f", at {stack}" if stack else ""
        if worker.state == "reading" and worker.index is not None:
            path = sample_path(loader.dataset, worker.index)
            doing = f"sample {worker.index!r:.{_LONG_INDEX}}" + (f" ({path})" if path else "")
        who = f"worker {worker.child.number} (pid {worker.child.pid})"
        return f"   {who}: {doing} for {duration_text(for_s)}{at}"

    def _stack(self, worker: WorkerNow) -> tuple[str, ...]:
        """Return where a worker is, innermost first, as asked for in the last ten seconds."""
        pid = worker.child.pid
        taken_s, lines = self._stacks.get(pid, (-_LONG_S, ()))
        if clock.monotonic() - taken_s >= _LONG_S and self._stacks_asked < _STACKS_AT_ONCE:
            self._stacks_asked += 1
            lines = stack_lines(_frames_in(worker.child.stack(wait_s=0.5)))
            if lines:  # one that has no time to answer is asked again
                self._stacks[pid] = clock.monotonic(), lines
        return lines


def _reader_text(loader: FastDataLoader) -> str:
    count = loader.num_workers
    workers = f"{count} worker{'' if count == 1 else 's'}" if count else "no workers"
    return f" data   {type(loader.dataset).__name__}: {workers}, executor {loader.executor!r}"


def _frames_in(text: str) -> list[tuple[str, int, str]]:
    """Return the frames of the thread that ``faulthandler`` calls the current one.

    Those outside of the worker's own work are left out: a forked process has its parent's, too.
    """
    lines = text.partition("Current thread")[2].splitlines()[1:]
    frames = itertools.takewhile(bool, (_FRAME.match(line) for line in lines))
    found = [(each[1], int(each[2]), each[3]) for each in frames if each]
    return list(itertools.takewhile(lambda frame: frame[2] != _OUTERMOST, found))


def _stack_of_thread(ident: int) -> tuple[str, ...]:
    """Return where in the code a thread of this process is, innermost function first."""

    def lines(frame: FrameType | None) -> tuple[str, ...]:
        walked = () if frame is None else traceback.walk_stack(frame)
        return stack_lines((f.f_code.co_filename, line, f.f_code.co_name) for f, line in walked)

    return look_at_thread(ident, lines)


class WatchedRun:
    """Writes the status of one run of this process once a second, in a thread, until it is closed.

    It is made in the thread that runs it.

    Args:
        known: Returns what is known now, and the loaders that are read. It is called in a thread of
            its own, and changes nothing. What it raises is passed over: a training ends for nothing
            that is told of it.

    Raises:
        OptionsError: The folder of running trainings belongs to another user, or this is Windows.
        OSError: It cannot be made.
    """

    def __init__(self, known: Callable[[], tuple[Status, Sequence[FastDataLoader]]]) -> None:
        self.pace = PaceMeter()
        """To be told of each step that ends."""
        self._known, self._workers = known, WorkerWatch()
        self._runs_in = threading.get_ident()
        self._started_s = clock.unix_s()
        self._owner = os.getpid()
        folder = live_folder()
        private_folder(folder)
        read_all(folder, clock.unix_s())  # removes what killed processes have left
        self._path = folder / f"{self._owner}-{next(_numbers)}.json"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastdata live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell nothing more, and remove what was told."""
        self._ended.set()
        if os.getpid() != self._owner:  # a forked process has neither the thread nor the file
            return
        self._thread.join(2 * _EVERY_S)
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._ended.is_set():
            with suppress(Exception):
                write_atomically(self._path, json.dumps(asdict(self.status(*self._known()))))
            self._ended.wait(_EVERY_S)

    def status(self, known: Status, loaders: Sequence[FastDataLoader]) -> Status:
        """Return what is told of the run as it is now."""
        folder = known.log_dir if "://" in known.log_dir else str(Path(known.log_dir).absolute())
        return replace(
            known,
            log_dir=folder,
            started_s=self._started_s,
            group=_group(known.world_size),
            script=sys.argv[0] if sys.argv else "",
            lines=tuple(self._lines(replace(known, log_dir=folder), loaders)),
        )

    def _lines(self, known: Status, loaders: Sequence[FastDataLoader]) -> Iterator[str]:
        who, hangs = _who(known.rank, known.world_size, self._owner), self.pace.hangs
        batches, workers = "", list[str]()
        with suppress(RuntimeError):  # what it goes through has changed meanwhile
            batches, workers = self._workers.look(loaders, hangs=hangs)
        if hangs:
            yield f" ! {who}no step for {duration_text(self.pace.quiet_s)}: {known.activity}"
            yield from (f" !   at {line}" for line in _stack_of_thread(self._runs_in))
        place = f"epoch {known.epoch}, step {known.step}"
        yield f" {who}{known.activity}; {place}{self.pace.text()}{batches}"
        yield from workers
        if known.rank == 0:
            yield from map(_reader_text, loaders)
            yield from [f" found  {known.found}"] if known.found else []
            yield f" logs   {known.log_dir}"


def _group(world_size: int) -> str:
    """Return what is the same for all ranks of one training: where they have met."""
    if world_size == 1:
        return str(os.getpid())
    met = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return ":".join(each or f"parent {os.getppid()}" for each in met)

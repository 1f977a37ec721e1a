"""What trainings tell of themselves while they run, and the page that `fastdata top` makes of it.

Each process writes a small file of its own once a second, which its user alone can read. The file
goes away with the run; one of a process that was killed is removed by whoever looks next.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil

from lightning_fastdata.errors import OptionsError, printable
from lightning_fastdata.host import clock
from lightning_fastdata.host.system_calls import private_folder
from lightning_fastdata.insight.model.finding import duration_text

EVERY_S: Final = 1.0
"""A status is written so often."""
_numbers: Final = itertools.count()
_SHARED_MEMORY: Final = Path("/dev/shm")
_MOST_BYTES: Final = 1 << 20
_SAME_START_S: Final = 2.0
"""Two readings of when a process started differ by less, though the clock may be set between."""
_STALE_S: Final = 60.0
"""Files of dead processes are removed when they are so old. A process that is not seen from here,
as in another container, writes its own again and again."""
_SILENT_S: Final = 5.0
_LONG_S: Final = 10.0
_LONG_STEPS: Final = 10.0
"""No step for so long, and for so many times a usual one, is worth an alarm."""
_MOST_WORKERS: Final = 24
NOTHING_RUNS: Final = """\
No training of this user runs on this machine with a DataThroughputCallback.
Start one with Trainer(callbacks=[DataThroughputCallback()]), and this in another terminal."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What whoever runs it knows of a run."""

    rank: int
    world_size: int
    log_dir: str
    method: str
    """``fit``, ``validate``, ``test`` or ``predict``; of a loop of the user's its stage."""
    activity: str
    """What the process does now, in words."""
    activity_s: float
    """For how many seconds it has."""
    epoch: int
    step: int
    """The optimizer's steps so far; batches of a run that is no fit."""
    found: str | None = None
    """What limits the run, as judged last, and what to try; None: nothing yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a worker process does."""

    worker: int
    """Number of the process, from 0."""
    pid: int
    state: str
    """``starting``, ``reading``, or ``idle``: it has no task."""
    index: str | None
    """Of the sample that it reads; None: none, or not known."""
    path: str | None
    """The file of that sample, where the dataset lists its files."""
    for_s: float
    """So long it has done that, to a second."""
    lines: tuple[str, ...] = ()
    """Where in the code it is, innermost first; known of workers that get nowhere."""


@dataclass(frozen=True, kw_only=True)
class Status(RunFacts):
    """What one process of a training tells. None: not known, or not yet."""

    pid: int
    process_started_s: float
    """When the process started, seconds since 1970: another process may get its number."""
    written_s: float
    """When this was written, seconds since 1970."""
    group: str
    """The same for all processes of one training."""
    script: str
    started_s: float
    """When the run began, seconds since 1970."""
    quiet_s: float
    """Seconds since the last step ended, of whatever stage; since the run began before the first
    one."""
    steps_per_s: float | None = None
    """Of the last ten seconds, as are the next two."""
    step_ms: float | None = None
    stall_share: float | None = None
    """Part of the step in which the device waited for data, 0 to 1."""
    readers: tuple[str, ...] = ()
    """What reads the data, a loader each: ``Photos: 4 workers, executor 'workers'``."""
    workers: tuple[WorkerStatus, ...] = ()
    batches_ready: int | None = None
    """Batches that are made and not taken yet."""
    batches_under_way: int | None = None
    """Batches that are being made."""
    stack: tuple[str, ...] = ()
    """Where in the code the training is, innermost first; known where it gets nowhere."""

    @property
    def hangs(self) -> bool:
        """Whether no step has ended for much longer than steps take."""
        step_s = max((self.step_ms or 0.0) / 1e3, 1 / self.steps_per_s if self.steps_per_s else 0.0)
        return self.quiet_s > max(_LONG_S, _LONG_STEPS * step_s)

    def as_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Status | None:
        """Return what was written by :meth:`as_json`; None: another version of this wrote it."""
        try:
            values: dict[str, Any] = json.loads(text)
            values |= {name: tuple(values[name]) for name in ("readers", "stack")}
            values["workers"] = tuple(
                WorkerStatus(**{**each, "lines": tuple(each["lines"])})
                for each in values["workers"]
            )
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError):
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


def write_status(path: Path, status: Status) -> None:
    """Write a status into a private folder; readers see the old one or the new one.

    Raises:
        OSError: It cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(temporary, how, 0o600)
    try:
        os.write(descriptor, status.as_json().encode())
    finally:
        os.close(descriptor)
    temporary.replace(path)


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
            with path.open("rb") as file:
                status = Status.from_json(file.read(_MOST_BYTES))
            alive = _runs(int(path.name.partition("-")[0]), status)
            if not alive and now_s - path.stat().st_mtime > _STALE_S:
                path.unlink()
                path.with_suffix(".tmp").unlink(missing_ok=True)
        except (OSError, ValueError):
            continue  # it has ended just now, or is no file of ours
        if status is not None and alive:
            # Of a process that is silent, time goes on all the same.
            since_s = max(0.0, now_s - status.written_s)
            ages = {n: getattr(status, n) + since_s for n in ("quiet_s", "activity_s")}
            found.append(replace(status, **ages))
    began_s = {each.group: each.started_s for each in found}  # of any of its ranks
    return sorted(found, key=lambda each: (began_s[each.group], each.group, each.rank, each.pid))


def process_started_s(pid: int) -> float | None:
    """Return when a process started, seconds since 1970; None: there is none."""
    try:
        process = psutil.Process(pid)
        gone = process.status() == psutil.STATUS_ZOMBIE
        return None if gone else float(process.create_time())
    except psutil.Error:
        return None


def _runs(pid: int, status: Status | None) -> bool:
    started_s = process_started_s(pid)
    if started_s is None or status is None:
        return started_s is not None
    return abs(started_s - status.process_started_s) < _SAME_START_S


class Publisher:
    """Writes a status once a second, in a thread of its own, until it is closed.

    Args:
        look: Returns the status as it is now; None: nothing runs, and nothing is told. What it
            raises is passed over: a training ends for nothing that is told of it.

    Raises:
        OptionsError: The folder belongs to another user, or this is Windows.
        OSError: It cannot be made.
    """

    def __init__(self, look: Callable[[], Status | None]) -> None:
        self._look = look
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
        self._thread.join(2 * EVERY_S)
        self._remove()

    def _remove(self) -> None:
        for path in (self._path, self._path.with_suffix(".tmp")):
            path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._ended.is_set():
            with suppress(Exception):
                status = self._look()
                if status is None:
                    self._remove()
                else:
                    write_status(self._path, status)
            self._ended.wait(EVERY_S)


def chosen(statuses: Sequence[Status], run: str | None) -> list[Status]:
    """Return all ranks of those trainings that a text means.

    Args:
        statuses: Of all processes.
        run: The number of a process, or a part of a script or of a log folder; None: all.
    """
    if run is None:
        return list(statuses)
    meant = {each.group for each in statuses if run == str(each.pid)} or {
        each.group for each in statuses if run in each.log_dir or run in each.script
    }
    return [each for each in statuses if each.group in meant]


def page_text(statuses: Sequence[Status], run: str | None, now_s: float) -> str:
    """Return trainings as text, one below the other; what files are called gives no orders in it.

    Args:
        statuses: Of all processes.
        run: As of :func:`chosen`.
        now_s: Seconds since 1970.
    """
    groups: dict[str, list[Status]] = {}
    for each in chosen(statuses, run):
        groups.setdefault(each.group, []).append(each)
    if groups:
        lines = [line for ranks in groups.values() for line in (*_training(ranks, now_s), "")]
        return "\n".join(printable(line, keep="") for line in lines[:-1])
    if not statuses:
        return NOTHING_RUNS
    names = {each.group: f"{each.pid}: {each.script}, {each.log_dir}" for each in statuses}
    told = [f"No training is {run!r}. There are:", *names.values()]
    return "\n".join(printable(line, keep="") for line in told)


def _training(ranks: Sequence[Status], now_s: float) -> Iterator[str]:
    first = ranks[0]
    of_ranks = f" · {len(ranks)} of {first.world_size} ranks" if first.world_size > 1 else ""
    lasted = duration_text(max(0.0, now_s - first.started_s))
    script = Path(first.script).name or "python"
    yield f"{script} · {first.method} · pid {first.pid}{of_ranks} · {lasted}"
    for each in ranks:
        who = f"rank {each.rank} (pid {each.pid}): " if len(ranks) > 1 else ""
        yield from (f" ! {line}" for line in _alarms(each, now_s, who))
        yield f" {who}{each.activity}{_pace(each)}"
    workers = [(each, worker) for each in ranks for worker in each.workers]
    # Those that have been at one thing longest come first.
    workers.sort(key=lambda pair: (pair[1].state == "idle", -pair[1].for_s))
    for each, worker in workers[:_MOST_WORKERS]:
        doing = worker.state if worker.index is None else f"sample {worker.index}"
        doing += f" ({worker.path})" if worker.path else ""
        at = f", at {' < '.join(worker.lines)}" if worker.lines else ""
        rank = f"rank {each.rank}, " if len(ranks) > 1 else ""
        told = f"{rank}worker {worker.worker} (pid {worker.pid}): {doing}"
        yield f"   {told} for {duration_text(worker.for_s)}{at}"
    if len(workers) > _MOST_WORKERS:
        yield f"   and {len(workers) - _MOST_WORKERS} workers that have less to do"
    yield from (f" data   {reader}" for reader in first.readers)
    if first.found:
        yield f" found  {first.found}"
    yield f" logs   {first.log_dir}"


def _pace(status: Status) -> str:
    told = [f"; epoch {status.epoch}, step {status.step}"]
    if status.steps_per_s is not None:
        told.append(f"{status.steps_per_s:.3g} steps/s")
    if status.step_ms is not None:
        told.append(f"{status.step_ms:.3g} ms a step")
    if status.stall_share is not None:
        told.append(f"{status.stall_share:.0%} of it waiting for data")
    if status.batches_ready is not None:
        made = f"{status.batches_ready} batches ready, {status.batches_under_way} being made"
        told.append(made)
    return ", ".join(told)


def _alarms(status: Status, now_s: float, who: str) -> list[str]:
    silent_s = now_s - status.written_s
    if silent_s > _SILENT_S:
        silent = f"nothing heard for {duration_text(silent_s)}, last it was {status.activity}"
        return [f"{who}{silent}: the process is stopped, or code in C keeps Python's lock"]
    if not status.hangs:
        return []
    head = f"{who}no step for {duration_text(status.quiet_s)}: {status.activity}"
    return [head, *(f"  at {line}" for line in status.stack)]

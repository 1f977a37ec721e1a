"""What a training process tells of itself while it runs: small files that its user alone can read.

Each process writes its own file once a second. The file goes away with the run; one of a process
that was killed is removed by whoever looks next.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host import clock
from lightning_fastdata.host.system_calls import private_folder

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What one process of a training tells. None: not known, or not yet."""

    pid: int
    process_started_s: float
    """When the process started, seconds since 1970: another process may get its number."""
    written_s: float
    """When this was written, seconds since 1970."""
    group: str
    """The same for all processes of one training."""
    rank: int
    world_size: int
    script: str
    log_dir: str
    started_s: float
    """When the run began, seconds since 1970."""
    method: str
    """``fit``, ``validate``, ``test`` or ``predict``."""
    activity: str
    """What the process does now, in words."""
    activity_s: float
    """For how many seconds it has."""
    quiet_s: float
    """Seconds since the last step ended, of whatever stage; since the run began before the first
    one."""
    epoch: int
    step: int
    """The optimizer's steps so far; batches of a run that is no fit."""
    steps_per_s: float | None = None
    """Of the last ten seconds, as are the next three."""
    step_ms: float | None = None
    stall_share: float | None = None
    """Part of the step in which the device waited for data, 0 to 1."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Why batches were late: a part of the wait, as `WaitParts` calls it -> its share, 0 to 1."""
    readers: tuple[str, ...] = ()
    """What reads the data, a loader each: ``FastDataLoader of Photos: 4 workers``."""
    workers: tuple[WorkerStatus, ...] = ()
    batches_ready: int | None = None
    """Batches that are made and not taken yet."""
    batches_under_way: int | None = None
    """Batches that are being made."""
    verdict: str | None = None
    """What limits the run, as judged last."""
    remedy: str | None = None
    """What to try first, and what that would gain."""
    move: str | None = None
    """What the tuner changed last."""
    memory_bytes: int | None = None
    """Memory of this process that it shares with no other, without its workers."""
    stack: tuple[str, ...] = ()
    """Where in the code the training is, innermost first; known where it gets nowhere."""

    @property
    def hangs(self) -> bool:
        """Whether no step has ended for much longer than steps take."""
        step_s = max((self.step_ms or 0.0) / 1e3, 1 / self.steps_per_s if self.steps_per_s else 0.0)
        return self.quiet_s > max(_LONG_S, _LONG_STEPS * step_s)

    def silent_s(self, now_s: float) -> float:
        """Return for how many seconds nothing was heard of the process; 0: it tells regularly.

        It is stopped, or code in C keeps the interpreter's lock.
        """
        since_s = now_s - self.written_s
        return since_s if since_s > _SILENT_S else 0.0

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
            status = Status.from_json(_read(path))
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


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST_BYTES)


class Publisher:
    """Writes a status once a second, in a thread of its own, until it is closed.

    Args:
        look: Returns the status as it is now; None: nothing runs, and nothing is told. What it
            raises is passed over: a training ends for nothing that is told of it.
        folder: Where status is kept. Default: :func:`live_folder`.

    Raises:
        OptionsError: The folder belongs to another user.
        OSError: It cannot be made.
    """

    def __init__(self, look: Callable[[], Status | None], folder: Path | None = None) -> None:
        self._look = look
        self._owner = os.getpid()
        folder = live_folder() if folder is None else folder
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

"""What a process tells of a run that it measures, for ``fastdata top``."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.host.usage import read_own_bytes
from lightning_fastdata.insight.live.publisher import (
    PaceMeter,
    Publisher,
    WorkerWatch,
    stack_of_thread,
)
from lightning_fastdata.insight.live.status import Status, process_started_s
from lightning_fastdata.insight.model.finding import gain_text

if TYPE_CHECKING:
    from lightning_fastdata.insight.verdicts.catalogue import Verdict
    from lightning_fastdata.loading.loader import FastDataLoader


Owner = TypeVar("Owner")


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
        self._started_s = time.time()
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
            written_s=time.time(),
            group=_group(facts.world_size),
            rank=facts.rank,
            world_size=facts.world_size,
            script=sys.argv[0] if sys.argv else "",
            log_dir=_whole(facts.log_dir),
            started_s=self._started_s,
            method=facts.method,
            activity=facts.activity,
            activity_s=facts.activity_s,
            quiet_s=time.monotonic() - self.pace.step_ended_s,
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

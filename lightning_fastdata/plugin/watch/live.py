"""What a rank of a trainer tells of itself while it runs, for ``fastdata top``."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.host.usage import read_own_bytes
from lightning_fastdata.insight.live.publisher import (
    PaceMeter,
    Publisher,
    WorkerWatch,
    stack_of_thread,
)
from lightning_fastdata.insight.live.status import Status, process_started_s
from lightning_fastdata.insight.model.finding import gain_text
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.plugin.seams.loaders import flattened, tuned_loaders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Trainer

    from lightning_fastdata.insight.verdicts.catalogue import Verdict
    from lightning_fastdata.plugin.loggers.report_files import Misfortunes
    from lightning_fastdata.plugin.watch.recording import Recording

_DOING: Final = {
    "wait": "waiting for a batch",
    "transfer": "moving a batch to the device",
    "augment": "augmenting a batch",
    "compute": "computing a step",
    "epoch_starts": "starting an epoch",
    "validation": "validating",
    "checkpoints": "saving a checkpoint",
    "logging": "logging",
    "callbacks": "in a callback",
    "setup": "setting up",
    "measuring": "measuring",
    "other": "between steps",
}
"""Part of a run's wall time -> what is being done in it."""


class LiveRun:
    """Publishes the status of one run of a trainer on this rank, from its setup to its end.

    ``undo`` gets what ends it. Where the status cannot be published, as where the place for it
    belongs to another user, that is a warning. On Windows none is.
    """

    def __init__(
        self,
        trainer: Trainer,
        recording: Recording,
        undo: list[Callable[[], None]],
        misfortunes: Misfortunes,
    ) -> None:
        self._trainer, self._recording = trainer, recording
        self.log_dir: str = trainer.default_root_dir
        self.verdict: Verdict | None = None
        """The newest one."""
        self._pace, self._workers = PaceMeter(), WorkerWatch()
        self._thread = threading.get_ident()
        self._started_s = time.time()
        self._process_started_s = process_started_s(os.getpid()) or 0.0
        if sys.platform != "win32":
            with misfortunes.survived("`fastdata top` does not show this run"):
                undo.append(Publisher(self._status).close)

    def step_ended(self) -> None:
        """Note that a step has ended, of the main stage or of validation."""
        self._pace.step_ended(self._recording.main)

    def _loaders(self) -> Iterator[FastDataLoader]:
        loaders = self._recording.loaders()
        if self._recording.fits and self._recording.wall.clock.state.part == "validation":
            loaders = self._trainer.val_dataloaders
        return (each for each in flattened(loaders) if isinstance(each, FastDataLoader))

    def _status(self) -> Status:
        """Return the status; called in a thread of its own, which changes nothing."""
        trainer, pace = self._trainer, self._pace.pace
        activity, activity_s = self._recording.wall.clock.under_way
        doing = _DOING[activity.part] + (f" ({activity.name})" if activity.name else "")
        status = Status(
            pid=os.getpid(),
            process_started_s=self._process_started_s,
            written_s=time.time(),
            group=_group(trainer.world_size),
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            script=sys.argv[0] if sys.argv else "",
            log_dir=self.log_dir if "://" in self.log_dir else str(Path(self.log_dir).absolute()),
            started_s=self._started_s,
            method=self._recording.method,
            activity=doing,
            activity_s=activity_s,
            quiet_s=time.monotonic() - self._pace.step_ended_s,
            epoch=trainer.current_epoch,
            step=trainer.global_step if self._recording.fits else self._pace.steps,
            steps_per_s=pace.steps_per_s,
            step_ms=pace.step_ms,
            stall_share=pace.stall_share,
            waits=pace.waits,
            memory_bytes=read_own_bytes(os.getpid()),
            **self._judged(),
        )
        hangs = status.hangs
        with suppress(RuntimeError):  # what it goes through has changed meanwhile
            status = replace(status, **self._workers.look(self._loaders(), hangs=hangs))
        return replace(status, stack=stack_of_thread(self._thread)) if hangs else status

    def _judged(self) -> dict[str, Any]:
        verdict, found = self.verdict, dict[str, str | None]()
        if verdict is not None:
            first = verdict.findings[0]
            gain = "" if first.gain is None else f": {gain_text(first.gain)}"
            found["verdict"] = f"{verdict.kind}, {verdict.sentence} [{verdict.code}]"
            found["remedy"] = f"{first.remedy}{gain}" if first.remedy else None
        with suppress(RuntimeError):
            moves = [m for _, each in tuned_loaders(self._recording.loaders()) for m in each.moves]
            found["move"] = str(moves[-1]) if moves else None
        return found


def _group(world_size: int) -> str:
    """Return what is the same for all ranks of one training: where they have met."""
    if world_size == 1:
        return str(os.getpid())
    met = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return ":".join(each or f"parent {os.getppid()}" for each in met)

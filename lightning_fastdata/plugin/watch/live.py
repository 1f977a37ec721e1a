"""What a rank of a trainer tells of itself while it runs, for ``fastdata top``."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.live import RunFacts, Told, WatchedRun
from lightning_fastdata.insight.report.summary_text import verdict_line
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.plugin.seams.loaders import flattened

if TYPE_CHECKING:
    from collections.abc import Callable

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
        self._watched: WatchedRun | None = None
        if sys.platform != "win32":
            with misfortunes.survived("`fastdata top` does not show this run"):
                self._watched = WatchedRun(self._facts)
                undo.append(self._watched.close)

    def step_ended(self) -> None:
        """Note that a step has ended, of the main stage or of validation."""
        if self._watched is not None:
            self._watched.pace.step_ended(self._recording.main)

    def _facts(self) -> Told:
        trainer, recording = self._trainer, self._recording
        activity = recording.wall.clock.under_way
        steps = 0 if self._watched is None else self._watched.pace.steps
        facts = RunFacts(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            log_dir=self.log_dir,
            method=recording.method,
            activity=_DOING[activity.part] + (f" ({activity.name})" if activity.name else ""),
            epoch=trainer.current_epoch,
            step=trainer.global_step if recording.fits else steps,
            found=None if self.verdict is None else verdict_line(self.verdict),
        )
        return facts, self._loaders()

    def _loaders(self) -> tuple[FastDataLoader, ...]:
        loaders = self._recording.loaders()
        if self._recording.fits and self._recording.wall.clock.state.part == "validation":
            loaders = self._trainer.val_dataloaders
        with suppress(RuntimeError):  # what holds them has changed meanwhile
            return tuple(each for each in flattened(loaders) if isinstance(each, FastDataLoader))
        return ()

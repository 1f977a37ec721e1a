"""What DataThroughputCallback does in validation, test and prediction, within a fit or alone."""
# ruff: noqa: ARG002  # hooks are called with all that Lightning has

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_fastdata.batches.staged import batch_samples
from lightning_fastdata.plugin.loggers.report_files import harmless
from lightning_fastdata.plugin.seams.trainer import steps_logged_by

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.plugin.loggers.report_files import Misfortunes
    from lightning_fastdata.plugin.watch.measured_run import MeasuredRun
    from lightning_fastdata.types import Batch

NOT_MEASURED: Final = "A step was not measured"


class EvaluationHooks:
    """The hooks of a callback around the steps of ``validate``, ``test`` and ``predict``."""

    _run: MeasuredRun | None
    misfortunes: Misfortunes

    @harmless(NOT_MEASURED)
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the sanity check as validation."""
        if self._run is not None:
            self._run.recording.wall.validation_began()

    @harmless(NOT_MEASURED)
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back to the setup."""
        if self._run is not None:
            self._run.recording.wall.validation_ended()

    @harmless(NOT_MEASURED)
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count what follows as validation, or begin to measure where nothing else is measured."""
        run = self._run
        if run is None:
            return
        if run.recording.fits:
            run.recording.wall.validation_began()
        else:
            run.began()

    on_test_start = on_predict_start = on_validation_start

    @harmless(NOT_MEASURED)
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first step of each validation is counted apart."""
        run = self._run
        if run is None or trainer.sanity_checking:
            return
        if run.recording.fits:
            run.recording.main.paused()
            run.recording.main.timeline.resumed()
        run.recording.evaluated.epoch_opens()

    @harmless(NOT_MEASURED)
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Close a step."""
        run = self._run
        if run is None or trainer.sanity_checking:
            return
        run.recording.evaluated.step_ended(batch_samples(batch))
        run.live.step_ended()
        if not run.recording.fits:
            run.batches += 1
            if run.verdict_is_due(run.batches):
                run.judged()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @harmless("An evaluation was not logged")
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the means of this validation, test or prediction."""
        run = self._run
        if run is None or trainer.sanity_checking:
            return
        recording = run.recording
        if recording.fits:
            recording.wall.validation_ended()
        else:
            recording.wall.ended()
        recording.evaluated.timeline.drop_open_step()
        recording.evaluated.paused()
        run.log(recording.evaluated.metrics(), steps_logged_by(trainer, recording.batches_stepped))

    on_test_end = on_predict_end = on_validation_end

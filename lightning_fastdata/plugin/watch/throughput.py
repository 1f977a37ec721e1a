"""What DataThroughputCallback does, for either of Lightning's two package names."""
# ruff: noqa: ARG002  # hooks are called with all that Lightning has

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.augment import as_batch_transform
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.insight.ranks import RankRecords, rank_metrics, shared_store
from lightning_fastdata.insight.report import RunReport, verdict_line
from lightning_fastdata.planning.options import check
from lightning_fastdata.plugin.loggers import boards
from lightning_fastdata.plugin.loggers.boards import wall_scalars
from lightning_fastdata.plugin.loggers.report_files import (
    Misfortunes,
    harmless,
    print_report,
    write_report,
)
from lightning_fastdata.plugin.seams.hooks import augment_foreign_batches
from lightning_fastdata.plugin.seams.internals import count_documents
from lightning_fastdata.plugin.seams.loaders import watch_sources
from lightning_fastdata.plugin.seams.profiler_tee import attach
from lightning_fastdata.plugin.seams.trainer import (
    augmenting_stages,
    check_hooks_run,
    close_progress_bar,
    own_datamodule,
    print_line,
    steps_logged_by,
)
from lightning_fastdata.plugin.watch.measured_run import FIRST_WORD_STEPS, MeasuredRun
from lightning_fastdata.plugin.watch.recording import Recording
from lightning_fastdata.randomness.seeds import global_seed

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.types import Batch, Stage


_MOST_FIGURES: Final = 20
_NOT_MEASURED: Final = "A step was not measured"


class ThroughputHooks:
    """Measures where each step goes, logs it, and runs augmentation on the device.

    Works with every Trainer: with a FastDataModule, other data modules, plain loaders, and the
    loaders of the LightningModule. Measured are the wait for data, the transfer, the augmentation
    and the compute time of each step, on a GPU by events that are read late and never waited for.
    Validation, checkpoints and sanity checks are not part of any of them. ``fit``, ``validate``,
    ``test`` and ``predict`` each get a report of their own.

    Args:
        augment: What runs on each training batch on the device: an ``albumentations.Compose`` or a
            torchvision ``v2.Compose``, which draw for each sample, or any callable or ``nn.Module``
            that takes a batch and returns it.
        image: Where the image is in a batch: a key of a dict or a position of a tuple. Default:
            found by itself.
        mask: Where the mask is, if there is one.
        every_n_steps: Log every that many optimizer steps. Default: the trainer's
            ``log_every_n_steps``, or more rarely if loggers would need above 1 % of the time.
        figures: Add a figure of the step's phases per epoch to loggers that show figures.
        summary: Print the summary when a run of the trainer ends.
        report: Where to write the report of a fit, as JSON; beside it, it is written as a page,
            with the suffix ``.html``. Default: ``report.json`` in the trainer's ``log_dir``;
            ``False`` writes none. ``validate``, ``test`` and ``predict``
            write ``report-validate.json``, ``report-test.json`` and ``report-predict.json`` (of
            ``x.json``: ``x-test.json``). It is written after 50 steps, every two minutes, at ends
            of epochs and of the run, as long as judging takes below 1 % of the time; then loggers
            that keep files get it (W&B, MLflow, Comet, Lightning's own).

    Attributes:
        report: The report of the last run as :class:`RunReport`; None before.
        reports: The last report of each: ``"fit"``, ``"validate"``, ``"test"``, ``"predict"``.

    Raises:
        OptionsError: ``every_n_steps`` is not positive.
        TransformError: ``augment`` is not a transform; when a fit starts: the training step fetches
            its batches itself, so that no transfer hook would run.
    """

    def __init__(
        self,
        augment: Callable[..., Any] | None = None,
        *,
        image: str | int | None = None,
        mask: str | int | None = None,
        every_n_steps: int | None = None,
        figures: bool = True,
        summary: bool = True,
        report: str | Path | bool = True,
    ) -> None:
        super().__init__()
        if every_n_steps is not None and (type(every_n_steps) is not int or every_n_steps < 1):
            raise OptionsError(f"every_n_steps={every_n_steps!r} has to be at least 1, or None.")
        fine = isinstance(report, bool | str | os.PathLike)
        check("report", report, fine, "True, False and a path")
        self.augment = None
        if augment is not None:
            self.augment = as_batch_transform(augment, image=image, mask=mask)
        self.every_n_steps = every_n_steps
        self.figures = figures
        self.summary = summary
        self.report_path = report
        self.report: RunReport | None = None
        self.reports: dict[str, RunReport] = {}
        self.misfortunes = Misfortunes()
        self._run: MeasuredRun | None = None

    def __getstate__(self) -> dict[str, object]:
        # A run belongs to one trainer; a copy of the callback (and of the trainer) starts afresh.
        return {**self.__dict__, "_run": None}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register the augmentation and start to listen; Lightning calls it before any loader."""
        self._end_run()
        self.misfortunes = Misfortunes()
        # An enum of Lightning's that is equal to its word, but is printed otherwise.
        recording = Recording(trainer, self, str(stage.value if isinstance(stage, Enum) else stage))
        if stage == "fit" and self.augment is not None:
            check_hooks_run(pl_module)
        undo: list[Callable[[], None]] = []
        self._run = MeasuredRun(trainer, recording, undo, self)
        if stage == "fit" and self.augment is not None:
            undo += self._register(trainer, pl_module, recording)

        def watch(stage: Stage, loaders: object) -> None:
            with self.misfortunes.survived("A loader is not measured"):
                recording.watch(stage, loaders)

        undo.append(watch_sources(trainer, recording.stages, watch))
        recording.augments = augmenting_stages(trainer, pl_module)

        undo.append(
            attach(trainer, recording.listener, partial(self.misfortunes.tell, _NOT_MEASURED))
        )

    def _register(
        self, trainer: Trainer, pl_module: LightningModule, recording: Recording
    ) -> list[Callable[[], None]]:
        """Have the transform run on training batches, and return what has to be undone by us."""
        datamodule = own_datamodule(trainer)
        if datamodule is not None:
            return [datamodule.register_transform(self.augment, stage="train")]
        augment_foreign_batches(
            trainer,
            pl_module,
            self.augment,  # type: ignore[arg-type]
            seed=global_seed(),
            in_transfer=lambda: recording.in_transfer,
        )
        return []

    @harmless("The training is not measured")
    def on_train_start(self, run: MeasuredRun, trainer: Trainer, *_: object) -> None:
        """Forget what tuners and finders ran before, and lay out TensorBoard's charts."""
        if trainer.world_size > 1:
            run.judge.ranks = RankRecords(
                shared_store(), rank=trainer.global_rank, world_size=trainer.world_size
            )
        run.began()

    @harmless(_NOT_MEASURED)
    def on_train_epoch_start(self, run: MeasuredRun, *_: object) -> None:
        """The first step of an epoch is counted apart."""
        run.recording.main.timeline.epoch_began()

    @harmless(_NOT_MEASURED)
    def on_train_batch_start(
        self, run: MeasuredRun, trainer: Trainer, _: object, batch: Batch, batch_idx: int
    ) -> None:
        """Have logged means weigh packed documents."""
        count_documents(trainer, batch)
        if batch_idx == 0:
            run.judge.epoch_began()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: object
    ) -> None:
        """Note that this batch ends in an optimizer step."""
        if self._run is not None:
            self._run.recording.optimizer_stepped = True

    @harmless("A step was not measured or not logged")
    def on_train_batch_end(
        self,
        run: MeasuredRun,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Close the step and, every so often, log the means since the last time."""
        recording = run.recording
        recording.main.step_ended(*recording.main.size_of(batch))
        if recording.host is not None:
            recording.host.step_ended()
        if not (recording.optimizer_stepped or not pl_module.automatic_optimization):
            return
        recording.optimizer_stepped = False
        step = steps_logged_by(trainer, recording.batches_stepped)
        recording.batches_stepped += 1
        run.step_ended(step)
        if run.verdict_is_due(recording.batches_stepped):
            verdict = run.judged()
            if verdict and self.summary and recording.batches_stepped == FIRST_WORD_STEPS:
                word = f"fastdata after {FIRST_WORD_STEPS} steps: {verdict_line(verdict)}"
                print_line(trainer, word)

    @harmless("An epoch was not logged")
    def on_train_epoch_end(self, run: MeasuredRun, trainer: Trainer, *_: object) -> None:
        """Draw the epoch's phases and say what they mean, where that has changed."""
        train, host = run.recording.main, run.recording.host
        train.timeline.drop_open_step()
        if host is not None:
            host.read_memory()  # workers that are not kept end with the epoch
        summary = train.summary()
        ranks = run.judge.ranks
        if ranks is not None:
            ranks.epoch_ended(summary)
        if summary is None or not trainer.is_global_zero:
            return
        # Lightning logs what ends an epoch at the step of the epoch's last batch.
        step = run.step = max(0, steps_logged_by(trainer, run.recording.batches_stepped) - 1)
        if self.figures and run.logs and run.figures < _MOST_FIGURES:
            run.figures += 1
            draw = partial(boards.phase_figure, train.timeline.history.newest())
            with self.misfortunes.survived("A figure was not drawn"):
                boards.log_figure(trainer.loggers, "data/timeline", draw, step)
        wall = run.wall()
        if run.judge.affordable and (run.logs or self.report_path):
            run.judged()
        heard = () if ranks is None else ranks.so_far
        run.log({**rank_metrics(heard), **wall_scalars(wall)}, step)

    @harmless(_NOT_MEASURED)
    def on_train_end(self, run: MeasuredRun, *_: object) -> None:
        """Note that what follows belongs to no epoch."""
        run.recording.wall.ended()

    @harmless(_NOT_MEASURED)
    def on_sanity_check_start(self, run: MeasuredRun, *_: object) -> None:
        """Count the sanity check as validation."""
        run.recording.wall.validation_began()

    @harmless(_NOT_MEASURED)
    def on_sanity_check_end(self, run: MeasuredRun, *_: object) -> None:
        """Go back to the setup."""
        run.recording.wall.validation_ended()

    @harmless(_NOT_MEASURED)
    def on_validation_start(self, run: MeasuredRun, *_: object) -> None:
        """Count what follows as validation, or begin to measure where nothing else is measured."""
        if run.recording.fits:
            run.recording.wall.validation_began()
        else:
            run.began()

    on_test_start = on_predict_start = on_validation_start

    @harmless(_NOT_MEASURED)
    def on_validation_epoch_start(self, run: MeasuredRun, trainer: Trainer, *_: object) -> None:
        """The first step of each validation is counted apart."""
        if trainer.sanity_checking:
            return
        if run.recording.fits:
            run.recording.main.paused()
        run.recording.evaluated.timeline.epoch_began()

    @harmless(_NOT_MEASURED)
    def on_validation_batch_end(
        self,
        run: MeasuredRun,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: Batch,
        *_: int,
    ) -> None:
        """Close a step."""
        if trainer.sanity_checking:
            return
        run.recording.evaluated.step_ended(*run.recording.evaluated.size_of(batch))
        if not run.recording.fits:
            run.batches += 1
            if run.verdict_is_due(run.batches):
                run.judged()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @harmless(_NOT_MEASURED)
    def on_validation_batch_start(
        self, run: MeasuredRun, trainer: Trainer, _: object, batch: Batch, *__: int
    ) -> None:
        """Have logged means weigh packed documents."""
        count_documents(trainer, batch)

    on_test_batch_start = on_validation_batch_start

    @harmless("An evaluation was not logged")
    def on_validation_end(self, run: MeasuredRun, trainer: Trainer, *_: object) -> None:
        """Log the means of this validation, test or prediction."""
        if trainer.sanity_checking:
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

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Flush what was measured; after an exception Lightning calls no teardown."""
        self._end_run()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the report and print the summary, after the progress bar is closed."""
        self._end_run()

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        survived = self.misfortunes.survived
        for undo in (run.recording.stop, *reversed(run.undo)):
            with survived("The measuring was not ended"):
                undo()
        report, file = None, run.file
        with survived("The report was not made"):
            report = run.report()
        if report is None:
            return
        self.report = self.reports[run.recording.method] = report
        if not run.trainer.is_global_zero:
            return
        page = None
        if file is not None:
            with survived("The report was not written"):
                page = write_report(report, file)
        if file is not None and page is not None and run.logs:
            with survived("The report was not attached"):
                for each in (file, page):
                    boards.log_file(run.trainer.loggers, each)
        if report.verdict is not None:
            with survived("The verdict was not shown"):
                run.show(report)
        if self.summary:
            with survived("The summary was not printed"):
                close_progress_bar(run.trainer)
                print_report(report, page)


ThroughputHooks.__init__.__qualname__ = "DataThroughputCallback.__init__"


class AddedHooks(ThroughputHooks):
    """What ``fastdata run`` adds to a Trainer; a callback of the script measures in its place."""

    def __init__(self, *, report: str | None = None) -> None:
        super().__init__(report=report or True)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to measure, unless another callback does."""
        callbacks: list[object] = list(trainer.callbacks)  # type: ignore[attr-defined]
        if not any(isinstance(c, ThroughputHooks) and c is not self for c in callbacks):
            super().setup(trainer, pl_module, stage)

"""What DataThroughputCallback does, for either of Lightning's two package names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.insight.ranks import rank_metrics
from lightning_fastdata.insight.report import RunReport, first_word
from lightning_fastdata.insight.verdict import Verdict
from lightning_fastdata.loading.checks import check
from lightning_fastdata.loading.moving import batch_samples
from lightning_fastdata.loading.names import NeedsConstruction, refuses_unknown_names
from lightning_fastdata.plugin import boards
from lightning_fastdata.plugin.foreign import augment_foreign_batches
from lightning_fastdata.plugin.headroom import Replay
from lightning_fastdata.plugin.judging import predicted_step_ms
from lightning_fastdata.plugin.measured_run import MeasuredRun
from lightning_fastdata.plugin.pictures import PictureSettings, pictures_of
from lightning_fastdata.plugin.profiler_tee import Listener, attach
from lightning_fastdata.plugin.progress_bar import close_progress_bar, print_line
from lightning_fastdata.plugin.ranks import meet
from lightning_fastdata.plugin.recording import Recording
from lightning_fastdata.plugin.report_files import (
    Misfortunes,
    harmless,
    print_report,
    write_report,
)
from lightning_fastdata.plugin.sources import watch_sources
from lightning_fastdata.plugin.trainer_facts import (
    augmenting_stages,
    check_hooks_run,
    steps_logged_by,
)

_MOST_FIGURES = 20
_FIRST_WORD_STEPS = 50
_NOT_MEASURED = "A step was not measured"


@refuses_unknown_names
class ThroughputHooks(NeedsConstruction):
    """Measures where each step goes, logs it, and runs augmentation on the device.

    Works with every Trainer: with a FastDataModule, other data modules, plain loaders, and the
    loaders of the LightningModule. Measured are the wait for data, the transfer, the augmentation
    and the compute time of each step, on a GPU by events that are read late and never waited for.
    Validation, checkpoints and sanity checks are not part of any of them.

    Args:
        augment: What runs on each training batch on the device: an ``albumentations.Compose``, or
            any callable or ``nn.Module`` that takes a batch and returns it.
        image: Where the image is in a batch: a key of a dict or a position of a tuple. Default:
            found by itself.
        mask: Where the mask is, if there is one.
        every_n_steps: Log every that many optimizer steps. Default: the trainer's
            ``log_every_n_steps``.
        log_images: Show the first training batch of the fit, as the training step gets it, to
            loggers that take images (TensorBoard, W&B, MLflow): ``True``, or how many images of
            it. ``Normalize`` is undone in the picture, where it is known.
        images_every_n_epochs: Show a batch again every that many epochs. Default: once in a fit.
        figures: Add a figure of the step's phases per epoch to loggers that show figures.
        summary: Print the summary when the fit ends.
        headroom: Where the step without waits is known from: ``"modelled"`` takes the stall away
            from the measured step; ``"measured"`` keeps the first 4 batches where they are and,
            when the training ends, replays them for about a second on a copy of the module and
            its optimizers, which takes as much memory again. The module itself stays as it is.
        report: Where to write the report as JSON; beside it, it is written as a page, with the
            suffix ``.html``. Default: ``report.json`` in the trainer's ``log_dir``; ``False``
            writes none.

    Attributes:
        report: The report of the last fit as :class:`RunReport`; None before.

    Raises:
        OptionsError: ``every_n_steps`` or a number of images is not positive, or ``headroom`` not
            one of its values.
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
        log_images: bool | int = False,
        images_every_n_epochs: int | None = None,
        figures: bool = True,
        summary: bool = True,
        headroom: Literal["modelled", "measured"] = "modelled",
        report: str | Path | bool = True,
    ) -> None:
        self._constructed = True
        super().__init__()
        if every_n_steps is not None and (type(every_n_steps) is not int or every_n_steps < 1):
            raise OptionsError(f"every_n_steps={every_n_steps!r} has to be at least 1, or None.")
        fine = isinstance(report, bool | str | os.PathLike)
        check("report", report, fine, "True, False and a path")
        self.augment = None
        if augment is not None:
            self.augment = as_batch_transform(augment, image=image, mask=mask)
        self.every_n_steps = every_n_steps
        self.image = image
        self.picture_settings = PictureSettings.checked(log_images, images_every_n_epochs)
        self.figures = figures
        self.summary = summary
        if headroom not in ("modelled", "measured"):
            raise OptionsError(f'headroom={headroom!r} has to be "modelled" or "measured".')
        self.headroom = headroom
        self.report_path = report
        self.report: RunReport | None = None
        self.misfortunes = Misfortunes()
        self._run: MeasuredRun | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A run belongs to one trainer; a copy of the callback (and of the trainer) starts afresh.
        return {**self.__dict__, "_run": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Register the augmentation and start to listen; Lightning calls it before any loader."""
        self._end_run()
        self.misfortunes = Misfortunes()
        if stage not in ("fit", "validate"):
            return
        recording = Recording(trainer, self)
        if stage == "fit" and self.augment is not None:
            check_hooks_run(pl_module)
        undo: list[Callable[[], None]] = []
        self._run = MeasuredRun(trainer, recording, undo)
        if stage == "fit" and self.augment is not None:
            undo.append(self._register(trainer, pl_module, recording))
        guard = self.misfortunes.survived_by
        undo.append(watch_sources(trainer, guard("A loader is not measured", recording.watch)))
        recording.augments = augmenting_stages(trainer, pl_module)

        def find(action: str) -> Listener | None:
            listener = recording.listener(action)
            if listener is None:
                return None
            began, ended = listener
            return guard(_NOT_MEASURED, began), guard(_NOT_MEASURED, ended)

        undo.append(attach(trainer, find))

    def _register(self, trainer: Any, pl_module: Any, recording: Recording) -> Callable[[], None]:
        register = getattr(trainer.datamodule, "register_transform", None)
        if register is not None:
            return register(self.augment, stage="train")  # type: ignore[no-any-return]
        return augment_foreign_batches(
            trainer,
            pl_module,
            self.augment,  # type: ignore[arg-type]
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
            in_transfer=lambda: recording.in_transfer,
        )

    @harmless("The training is not measured")
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Forget what tuners and finders ran before, and tell TensorBoard how to lay out charts."""
        run = self._run
        if run is None:
            return
        run.recording.restart()
        run.replay = Replay() if self.headroom == "measured" else None
        run.every_n_steps = self.every_n_steps or trainer.log_every_n_steps or 0
        run.judge.ranks = meet(trainer)
        run.log_dir = trainer.log_dir or trainer.default_root_dir
        run.pictures = pictures_of(trainer, self.picture_settings, self.augment, self.image)
        if run.logs:
            boards.log_layout(trainer.loggers, boards.custom_scalar_layout())

    @harmless(_NOT_MEASURED)
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """The first step of an epoch is counted apart."""
        if self._run is not None:
            self._run.recording.train.epoch_opens()

    @harmless("The batch was not shown")
    def on_train_batch_start(
        self,
        trainer: Any,
        pl_module: Any,  # noqa: ARG002
        batch: Any,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Show the batch, if that was asked for."""
        run = self._run
        if run is not None and run.pictures is not None:
            step = steps_logged_by(trainer, run.recording.batches_stepped)
            run.pictures.batch_began(trainer.loggers, batch, epoch=trainer.current_epoch, step=step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: ARG002
        """Note that this batch ends in an optimizer step."""
        if self._run is not None:
            self._run.recording.optimizer_stepped = True

    @harmless("A step was not measured or not logged")
    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,  # noqa: ARG002
        batch: Any,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Close the step and, every so often, log the means since the last time."""
        run = self._run
        if run is None:
            return
        recording = run.recording
        recording.train.step_ended(batch_samples(batch))
        if run.replay is not None:
            run.replay.keep(batch)
        if recording.optimizer_stepped:
            recording.train.updated()
        if not (recording.optimizer_stepped or not pl_module.automatic_optimization):
            return
        recording.optimizer_stepped = False
        step = steps_logged_by(trainer, recording.batches_stepped)
        recording.batches_stepped += 1
        if self.summary and recording.batches_stepped == _FIRST_WORD_STEPS:
            self._say_first_word(run)
        if run.every_n_steps and (step + 1) % run.every_n_steps == 0 and run.logs:
            boards.log_to(trainer.loggers, recording.metrics(), step)

    @harmless("An epoch was not logged")
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Draw the epoch's phases and say what they mean, where that has changed."""
        run = self._run
        if run is None:
            return
        train = run.recording.train
        train.timeline.drop_open_step()
        summary = train.summary()
        ranks = run.judge.ranks
        heard = () if ranks is None else ranks.epoch_ended(train.timeline.history, summary)
        if summary is None or not trainer.is_global_zero:
            return
        # Lightning logs what ends an epoch at the step of the epoch's last batch.
        step = max(0, steps_logged_by(trainer, run.recording.batches_stepped) - 1)
        boards.log_to(trainer.loggers, rank_metrics(heard), step)
        if self.figures and run.logs and run.figures < _MOST_FIGURES:
            run.figures += 1
            columns = train.timeline.history.newest()
            boards.log_figure(
                trainer.loggers, "data/timeline", lambda: boards.phase_figure(columns), step
            )
        if not run.judge.affordable or not (run.logs or self.report_path):
            return
        with run.judge.spending():
            wall = run.wall()
            evidence = run.judge.evidence(summary, run.recording.val.summary(), wall)
            verdict = run.judge.verdict(summary, evidence)
            predicted_ms = predicted_step_ms(evidence)
            self._write(run, verdict)
        scalars = boards.wall_scalars(wall)
        if predicted_ms is not None:
            scalars[boards.PREDICTED_STEP] = predicted_ms
        boards.log_to(trainer.loggers, scalars, step)
        if run.is_news(verdict.code):
            told = boards.verdict_markdown(verdict, summary, wall)
            boards.log_text(trainer.loggers, "data/verdict", told, step)

    @harmless(_NOT_MEASURED)
    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Count the sanity check as validation."""
        if self._run is not None:
            self._run.recording.wall.validation_began()

    @harmless(_NOT_MEASURED)
    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Go back to the setup."""
        if self._run is not None:
            self._run.recording.wall.validation_ended()

    @harmless(_NOT_MEASURED)
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Count what follows as validation."""
        if self._run is not None:
            self._run.recording.wall.validation_began()

    @harmless(_NOT_MEASURED)
    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """The first step of each validation is counted apart."""
        if self._run is not None and not trainer.sanity_checking:
            self._run.recording.train.paused()
            self._run.recording.train.timeline.resumed()
            self._run.recording.val.epoch_opens()

    @harmless(_NOT_MEASURED)
    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,
        batch_idx: int,  # noqa: ARG002
        dataloader_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Close a validation step."""
        if self._run is not None and not trainer.sanity_checking:
            self._run.recording.val.step_ended(batch_samples(batch))

    @harmless("A validation was not logged")
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Log the means of this validation."""
        run = self._run
        if run is None or trainer.sanity_checking:
            return
        run.recording.wall.validation_ended()
        run.recording.val.timeline.drop_open_step()
        run.recording.val.paused()
        if run.logs:
            step = steps_logged_by(trainer, run.recording.batches_stepped)
            boards.log_to(trainer.loggers, run.recording.val.metrics(), step)

    @harmless("A step without waits was not measured")
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure a step without waits, if that was asked for."""
        run = self._run
        if run is not None:
            run.recording.wall.training_ended()
        if run is not None and run.replay is not None:
            run.replay.run(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Flush what was measured; after an exception Lightning calls no teardown."""
        self._end_run()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Write the report and print the summary, after the progress bar is closed."""
        self._end_run()

    def _say_first_word(self, run: MeasuredRun) -> None:
        """Print in one line what limits the first steps; the summary comes when the fit ends."""
        summary = run.recording.train.summary()
        if summary is None or not run.trainer.is_global_zero:
            return
        with run.judge.spending():
            val = run.recording.val.summary()
            verdict = run.judge.verdict(summary, run.judge.evidence(summary, val, run.wall()))
        print_line(run.trainer, first_word(verdict, summary.steps))

    def _write(self, run: MeasuredRun, verdict: Verdict) -> None:
        """Write the report of the run so far: it may end without a chance to write another."""
        with self.misfortunes.survived("The report was not written"):
            report = run.report(ended=False, verdict=verdict)
            if report is not None:
                write_report(report, self.report_path, run.log_dir)

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        survived = self.misfortunes.survived
        for undo in (run.recording.stop, *reversed(run.undo)):
            with survived("The measuring was not ended"):
                undo()
        report = page = None
        with survived("The report was not made"):
            report = run.report()
        if report is None:
            return
        self.report = report
        if not run.trainer.is_global_zero:
            return
        with survived("The report was not written"):
            page = write_report(report, self.report_path, run.log_dir)
        if self.summary:
            with survived("The summary was not printed"):
                close_progress_bar(run.trainer)
                print_report(report, page)

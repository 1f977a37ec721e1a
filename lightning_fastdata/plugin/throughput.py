"""What DataThroughputCallback does, for either of Lightning's two package names.

Measuring and reporting never end a training: what fails in them is a warning.
"""
# ruff: noqa: ARG002  # hooks are called with all that Lightning has

from __future__ import annotations

import multiprocessing
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, Literal, ParamSpec, TypeAlias

from lightning_fastdata.augment import as_batch_transform
from lightning_fastdata.errors import FastDataWarning, OptionsError, check, is_whole
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.machine import describe_machine, read_versions
from lightning_fastdata.host.system_calls import check_replaceable
from lightning_fastdata.insight.finding import (
    LoaderFacts,
    class_of_settings,
    closed_options,
    read_loader,
)
from lightning_fastdata.insight.machine import (
    MemorySeen,
    fault_notes,
    fault_scalars,
    memory_notes,
)
from lightning_fastdata.insight.ranks import (
    RankRecords,
    RankTiming,
    rank_metrics,
    shared_store,
    slowest,
)
from lightning_fastdata.insight.report import (
    RunReport,
    check_ours,
    page_line,
    print_lines,
    report_file,
    verdict_line,
)
from lightning_fastdata.insight.verdict import Verdict, judge
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.tuner import Tuner
from lightning_fastdata.plugin import boards, seams
from lightning_fastdata.plugin.recording import LATER_EPOCHS, Recording, attach_tee
from lightning_fastdata.plugin.transforms import augment_foreign_batches
from lightning_fastdata.randomness.seeds import global_seed

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.batches.bad_samples import FaultLog
    from lightning_fastdata.insight.stage import StageMeter
    from lightning_fastdata.insight.steps import StageSummary
    from lightning_fastdata.insight.wall import WallTime
    from lightning_fastdata.types import Batch, Stage

_MOST_FIGURES: Final = 20
_NOT_MEASURED: Final = "A step was not measured"
_FIRST_WORD_STEPS: Final = 50
"""Number of steps after which something is said for the first time."""
_MOST_OF_RUN: Final = 0.01
"""Share of a run's time that may be spent on judging it before it has ended."""
_JUDGED_EVERY_S: Final = 120.0
"""Seconds after which a report is renewed within an epoch; later where judging is dear."""
_TEXT_STAYS_S: Final = 300.0
_LOG_REST: Final = 100
"""Scalars are logged again after this many times as long as logging them took."""

_Given = ParamSpec("_Given")
_OfRun: TypeAlias = Callable[Concatenate[Any, Any, _Given], None]
_Hook: TypeAlias = Callable[Concatenate[Any, _Given], None]


def harmless(what: str) -> Callable[[_OfRun[_Given]], _Hook[_Given]]:
    """Make a hook of a callback from a function that takes the callback's run, too.

    Without a run the function is not called. The callback warns of its errors.
    """

    def guard(hook: _OfRun[_Given]) -> _Hook[_Given]:
        @wraps(hook)
        def guarded(self: Any, /, *args: _Given.args, **kwargs: _Given.kwargs) -> None:
            if self._run is not None:
                try:  # the block `survived` would cost each step some microseconds
                    hook(self, self._run, *args, **kwargs)
                except Exception as error:
                    self.survive(what, error)

        return guarded

    return guard


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
            with the suffix ``.html``. In a folder it is ``report.json``. Default: that in the
            trainer's ``log_dir``, where a file of yours that has such a name is not replaced;
            ``False`` writes none, and none is written to a URL. ``validate``, ``test`` and
            ``predict`` write ``report-validate.json``, ``report-test.json`` and
            ``report-predict.json`` (of ``x.json``: ``x-test.json``). It is written after 50 steps,
            every two minutes, at ends of epochs and of the run, as long as judging takes below 1 %
            of the time; then loggers that keep files get it (W&B, MLflow, Comet, Lightning's own).

    Attributes:
        report: The report of the last run as :class:`RunReport`; None before.
        reports: The last report of each method: ``"fit"``, ``"validate"``, ``"test"``,
            ``"predict"``.

    Raises:
        OptionsError: ``every_n_steps`` is not positive; ``report`` is empty, or the path of what
            is no file or folder: a device, say.
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
        if every_n_steps is not None and not is_whole(every_n_steps, 1):
            raise OptionsError(f"every_n_steps={every_n_steps!r} has to be at least 1, or None.")
        fine = isinstance(report, bool | str | os.PathLike)
        check("report", report, fine, "True, False and a path")
        if not isinstance(report, bool) and "://" not in os.fspath(report):
            check_replaceable(report_file(report, ".json"))
        self.augment = None
        if augment is not None:
            self.augment = as_batch_transform(augment, image=image, mask=mask)
        self.every_n_steps = every_n_steps
        self.figures = figures
        self.summary = summary
        self.report_path = report
        self.report: RunReport | None = None
        self.reports: dict[str, RunReport] = {}
        self._run: MeasuredRun | None = None
        self._warned: set[tuple[str, type]] = set()
        """What failed in this run and was warned of, each with the class of the error."""

    def __getstate__(self) -> dict[str, object]:
        # A run belongs to one trainer; a copy of the callback (and of the trainer) starts afresh.
        return {**self.__dict__, "_run": None}

    def survive(self, what: str, error: Exception) -> None:
        """Warn of an error, unless one of its kind was warned of in this run.

        ``what`` says what came of it, as in ``"The report was not written"``.
        """
        if isinstance(error, FastDataWarning):  # which the program has made an error
            raise error
        kind = (what, type(error))
        if kind in self._warned:
            return
        self._warned.add(kind)
        message = f"{what}: {type(error).__name__}: {error}. The training itself is not affected."
        warnings.warn(message, FastDataWarning, stacklevel=3)

    @contextmanager
    def survived(self, what: str) -> Iterator[None]:
        """Turn an error in the block into a warning."""
        try:
            yield
        except Exception as error:
            self.survive(what, error)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register the augmentation and start to listen; Lightning calls it before any loader."""
        if self._run is not None and self._run.trainer is not trainer:
            warnings.warn(
                "This callback still measured the run of another Trainer, whose report ends here. "
                "Give each Trainer a DataThroughputCallback of its own.",
                FastDataWarning,
                stacklevel=2,
            )
        self._end_run()
        self._warned = set()
        # Lightning's enum is equal to its word, but is printed otherwise.
        recording = Recording(trainer, self, str(stage.value if isinstance(stage, Enum) else stage))
        if stage == "fit" and self.augment is not None:
            seams.check_hooks_run(pl_module)
        run = self._run = MeasuredRun(trainer, recording, self)
        if stage == "fit" and self.augment is not None:
            datamodule = seams.own_datamodule(trainer)
            if datamodule is not None:
                run.undo.append(datamodule.register_transform(self.augment, stage="train"))
            else:
                augment_foreign_batches(
                    trainer,
                    pl_module,
                    self.augment,
                    seed=global_seed(),
                    in_transfer=lambda: recording.in_transfer,
                )

        def watch(stage: Stage, loaders: object) -> None:
            with self.survived("A loader is not measured"):
                recording.watch(stage, loaders)

        seams.watch_sources(trainer, recording.stages, watch)
        recording.augments = seams.augmenting_stages(trainer, pl_module)
        failed = partial(self.survive, _NOT_MEASURED)
        run.undo.append(attach_tee(trainer, recording.listener, failed))

    @harmless("The training is not measured")
    def on_train_start(self, run: MeasuredRun, trainer: Trainer, *_: object) -> None:
        """Forget what tuners and finders ran before, and lay out TensorBoard's charts."""
        if trainer.world_size > 1:
            run.ranks = RankRecords(
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
        seams.count_documents(trainer, batch)
        if batch_idx == 0:
            run.epoch_began()

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
        recording.main.step_ended(recording.main.size_of(batch))
        recording.host.step_ended()
        if batch_idx == 0:
            run.first_step_ended()
        if not (recording.optimizer_stepped or not pl_module.automatic_optimization):
            return
        recording.optimizer_stepped = False
        step = seams.steps_logged_by(trainer, recording.batches_stepped)
        recording.batches_stepped += 1
        run.step_ended(step)
        if run.verdict_is_due(recording.batches_stepped):
            verdict = run.judged()
            if verdict and self.summary and recording.batches_stepped == _FIRST_WORD_STEPS:
                word = f"fastdata after {_FIRST_WORD_STEPS} steps: {verdict_line(verdict)}"
                seams.print_line(trainer, word)

    @harmless("An epoch was not logged")
    def on_train_epoch_end(self, run: MeasuredRun, trainer: Trainer, *_: object) -> None:
        """Draw the epoch's phases and say what they mean, where that has changed."""
        train = run.recording.main
        train.timeline.drop_open_step()
        run.recording.host.read_memory()  # workers that are not kept end with the epoch
        summary = train.summary()
        ranks = run.ranks
        if ranks is not None:
            ranks.epoch_ended(summary)
        if summary is None or not trainer.is_global_zero:
            return
        # Lightning logs what ends an epoch at the step of the epoch's last batch.
        step = run.step = max(0, seams.steps_logged_by(trainer, run.recording.batches_stepped) - 1)
        if self.figures and run.logs and run.figures < _MOST_FIGURES:
            run.figures += 1
            draw = partial(boards.phase_figure, train.timeline.history.newest())
            with self.survived("A figure was not drawn"):
                boards.log_figure(trainer.loggers, "data/timeline", draw, step)
        wall = run.wall()
        if run.affordable and (run.logs or self.report_path):
            run.judged()
        heard = () if ranks is None else ranks.so_far
        run.log({**rank_metrics(heard), **boards.wall_scalars(wall)}, step)

    @harmless(_NOT_MEASURED)
    def on_train_end(self, run: MeasuredRun, *_: object) -> None:
        """Note that what follows belongs to no epoch."""
        run.recording.wall.ended()

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
        run.recording.evaluated.step_ended(run.recording.evaluated.size_of(batch))
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
        seams.count_documents(trainer, batch)

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
        step = seams.steps_logged_by(trainer, recording.batches_stepped)
        run.log(recording.evaluated.metrics(), step)

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
        survived = self.survived
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
                page = run.write(report, file)
        if file is not None and page is not None and run.logs:
            with survived("The report was not attached"):
                for each in (file, page):
                    boards.log_file(run.trainer.loggers, each)
        if report.verdict is not None:
            with survived("The verdict was not shown"):
                run.show(report)
        if self.summary:
            with survived("The summary was not printed"):
                seams.close_progress_bar(run.trainer)
                where = [] if page is None else [page_line(page)]
                print_lines([*report.lines(shutil.get_terminal_size().columns), *where])


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
        elif self.report_path is not True and trainer.is_global_zero:
            warnings.warn(
                f"--report {self.report_path} is not used: the script has a DataThroughputCallback "
                "of its own, which writes its report where its report= says.",
                FastDataWarning,
                stacklevel=2,
            )


class MeasuredRun:
    """One run of a trainer, as it is measured: what it logs, shows and reports.

    None of it outlives the run. ``ours`` is the callback that measures.
    """

    def __init__(self, trainer: Trainer, recording: Recording, ours: ThroughputHooks) -> None:
        self.trainer = trainer
        self.recording = recording
        self.undo: list[Callable[[], None]] = []
        """Functions that take away again what was put into the trainer."""
        self.log_dir: str = trainer.default_root_dir
        self.every_n_steps = self.figures = self.step = self.batches = 0
        self.ranks: RankRecords | None = None
        self._memory = MemorySeen()
        """Memory of this process and its workers, as it was judged last."""
        self._ours = ours
        self._shown: str | None = None
        self._shown_at_s = 0.0
        self._began_s = self._judged_s = clock.monotonic()
        self._spent_s = self._dearest_s = 0.0
        """Seconds that all verdicts within the run took, and seconds of the longest one."""
        self._logged = False
        self._log_due_s = 0.0

    @property
    def logs(self) -> bool:
        """Whether this process has loggers to log to."""
        return bool(self.trainer.is_global_zero and self.trainer.loggers)

    @property
    def file(self) -> Path | None:
        """Path of the JSON report; None: none was asked for, or it would be no file.

        Reports of other methods than ``fit`` have files of their own: ``report-test.json``.
        """
        place, method = self._place, self.recording.method
        if place is None or "://" in place:
            return None
        file = report_file(place, ".json")
        file = file.with_suffix(".json") if file.suffix.lower() == ".html" else file
        return file if method == "fit" else file.with_name(f"{file.stem}-{method}{file.suffix}")

    @property
    def _place(self) -> str | None:
        path = self._ours.report_path
        if isinstance(path, bool):
            return f"{self.log_dir}/report.json" if path else None
        return os.fspath(path)

    def began(self) -> None:
        """Forget what ran before; to be called on every rank when the loaders are there."""
        self.recording.restart()
        usual = seams.attributes_of(self.trainer).log_every_n_steps
        self.every_n_steps = self._ours.every_n_steps or usual or 0
        self.log_dir = seams.log_folder(self.trainer)
        self._judged_s = clock.monotonic()
        place = self._place
        if place is not None and "://" in place and self.trainer.is_global_zero:
            with self._ours.survived("The report is not written"):
                raise OptionsError(f"{place} is no file of this machine. Give report= a path")
        if self.logs and self.recording.fits:
            boards.log_layout(self.trainer.loggers, boards.custom_scalar_layout())

    def epoch_began(self) -> None:
        """Compare what is read with what it was in the epoch before."""
        self.recording.host.epoch = self.trainer.current_epoch
        self.recording.main.changes.epoch_began(self._first_loader)

    def first_step_ended(self) -> None:
        """Compare what is read with what it was before the first step of the epoch."""
        self.recording.main.changes.first_step_ended(self._first_loader)

    @property
    def _first_loader(self) -> object:
        return next(seams.flattened(self.recording.loaders()), None)

    # -- what is logged ----------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Give loggers those of the scalars that are to be logged."""
        self.step = step
        if self.logs:
            metrics = {**metrics, **fault_scalars(self._fault_logs())}
            for loader, _ in self._tuned():
                metrics["data_tune/workers"] = float(loader.num_workers)
            boards.log_to(self.trainer.loggers, boards.chosen(metrics), step)

    def step_ended(self, step: int) -> None:
        """Log the means since the last time, if this is a step to log at.

        Loggers are called for them beside Lightning's own call. Unless ``every_n_steps`` was given,
        that takes at most a hundredth of the time: slow loggers are called more rarely. The first
        call, in which loggers make their files and connections, is not counted.
        """
        self.step = step
        if not self.every_n_steps or (step + 1) % self.every_n_steps or not self.logs:
            return
        began_s = clock.monotonic()
        if self._ours.every_n_steps is None and began_s < self._log_due_s:
            return
        self.log(self.recording.main.metrics(), step)
        ended_s = clock.monotonic()
        if self._logged:
            self._log_due_s = ended_s + _LOG_REST * (ended_s - began_s)
        self._logged = True

    def _tuned(self) -> Iterator[tuple[FastDataLoader, Tuner]]:
        """Yield the loaders whose workers are tuned, and what tunes them."""
        for loader in seams.flattened(self.recording.loaders()):
            if isinstance(loader, FastDataLoader) and loader.training.tuner is not None:
                yield loader, loader.training.tuner

    def _fault_logs(self) -> list[FaultLog]:
        several = self.recording.loaders(), self.recording.val_loaders()
        all_of_them = (loader for loaders in several for loader in seams.flattened(loaders))
        return [loader.faults for loader in all_of_them if isinstance(loader, FastDataLoader)]

    # -- what limits the training ------------------------------------------------------------------

    @property
    def affordable(self) -> bool:
        """Whether one more verdict would keep the time spent on them below 1 % of the run."""
        lasted_s = clock.monotonic() - self._began_s
        return self._spent_s + self._dearest_s <= _MOST_OF_RUN * lasted_s or not self._spent_s

    def verdict_is_due(self, batches: int) -> bool:
        """Return whether to judge the run within an epoch, after so many steps."""
        early = batches == _FIRST_WORD_STEPS
        if not early and clock.monotonic() - self._judged_s < _JUDGED_EVERY_S:
            return False
        heard = self.logs or self._ours.report_path is not False
        if early:
            return self.trainer.is_global_zero and (heard or self._ours.summary)
        return self.trainer.is_global_zero and heard and self.affordable

    def judged(self) -> Verdict | None:
        """Judge the run so far, write its report, and show it now and then or with a new verdict.

        Return None if no step ended yet. The run may end without a chance to write another report.
        """
        began_s = clock.monotonic()
        try:
            report = self.report(ended=False)
            if report is not None and self.file is not None:
                with self._ours.survived("The report was not written"):
                    self.write(report, self.file)
        finally:
            self._judged_s = now_s = clock.monotonic()
            self._spent_s += now_s - began_s
            self._dearest_s = max(self._dearest_s, now_s - began_s)
        if report is None or report.verdict is None:
            return None
        aged = now_s - self._shown_at_s >= _TEXT_STAYS_S
        if aged or report.verdict.code != self._shown:
            self._shown, self._shown_at_s = report.verdict.code, now_s
            self.show(report)
        return report.verdict

    def _verdict(
        self,
        train: StageSummary,
        val: StageSummary | None,
        wall: WallTime,
        *,
        ended: bool = False,
    ) -> Verdict:
        """Return what limits the training; ``ended``: the run is over."""
        recording, trainer = self.recording, self.trainer
        host, ranks, facts = recording.host, self.ranks, self.facts()
        _, loader = _slowest_loader(recording.loaders(), recording.main)
        val_label, val_loader = _slowest_loader(recording.val_loaders(), recording.evaluated)
        host.read_memory(at_once=ended)
        dataset = getattr(loader, "dataset", None)
        context = getattr(loader, "multiprocessing_context", None) or multiprocessing
        forked = context.get_start_method() == "fork"
        self._memory = host.memory.seen(dataset, forked=forked)
        ours = seams.own_datamodule(trainer)
        before, moves, augments = (seams.written_hook(trainer, name) for name in seams.HOOKS)
        return judge(
            recording.main.evidence(
                train,
                facts,
                machine=host.seen(),
                before_hook=before,
                transfer_hook=moves,
                augment_hook=augments,
                settings_in=class_of_settings(loader) if ours is None else "LoaderOptions",
                wall=wall,
                loaders_anew=seams.attributes_of(trainer).reload_dataloaders_every_n_epochs > 0,
                val_workers=getattr(val_loader, "num_workers", None),
                val_loader=None if val is None else val_label,
                ranks=() if ranks is None else ranks.complete,
                memory=self._memory,
            )
        )

    def facts(self) -> LoaderFacts:
        """Return what the loader that is waited for most, or else the first, says about itself."""
        recording, ours = self.recording, seams.own_datamodule(self.trainer)
        label, loader = _slowest_loader(recording.loaders(), recording.main)
        _, val_loader = _slowest_loader(recording.val_loaders(), recording.evaluated)
        known = recording.main.changes.heeded(read_loader(loader))
        closed = {**known.closed, **closed_options(val_loader, prefix="val.")}
        choice = None if ours is None else ours.placing.choice(recording.main.stage)
        if ours is not None and ours.cache is not None:
            closed["cache"] = "cache= is set"
        if choice is not None and choice.place == "workers":
            closed["augment_on"] = "the workers were chosen before the training"
        augment_on: Literal["cpu", "device"] | None = known.augment_on and "cpu"
        return replace(
            known,
            usable_cpus=read_cpu_limit(local_ranks=self.trainer.num_devices).usable_cpus,
            augment_on="device" if recording.augments(recording.main.stage) else augment_on,
            augment_settled=choice is not None or known.augment_settled,
            loader=label,
            closed=closed,
        )

    # -- what is reported --------------------------------------------------------------------------

    def show(self, report: RunReport) -> None:
        """Show the summary, as it is printed, on loggers that take texts."""
        if self.logs:
            name = f"{self.recording.main.prefix}/verdict"
            boards.log_summary(self.trainer.loggers, name, report, self.step)

    def report(self, *, ended: bool = True) -> RunReport | None:
        """Return the report of this run, or None if no step ended; ``ended``: the run is over."""
        main = self.recording.main.summary()
        if main is None:
            return None
        val = self._validation()
        ranks, datamodule = self.ranks, seams.own_datamodule(self.trainer)
        if ranks is not None and ended:
            ranks.ended()
        verdict = self._verdict(main, val, self.wall(), ended=ended)
        return RunReport(
            ended=ended,
            moves=tuple(move for _, tuner in self._tuned() for move in tuner.moves),
            wall=(wall := self.wall()),  # judging took its time, too
            device_minutes_waited=self._minutes_waited(wall),
            stages=tuple(stage for stage in (main, val) if stage is not None),
            verdict=verdict,
            recent={m.stage: m.timeline.history.newest() for m in self.recording.meters},
            ranks=() if ranks is None else ranks.so_far,
            notes=(
                *(() if datamodule is None else datamodule.notes),
                *self.recording.notes(),
                *memory_notes(self._memory),
                *fault_notes(self._fault_logs()),
                *(() if ranks is None else ranks.notes()),
            ),
            versions=read_versions(),
            machine=describe_machine(self.trainer.strategy.root_device),
        )

    def write(self, report: RunReport, file: Path) -> Path:
        """Write a report as JSON, and beside it as a page; return the path of the page.

        Raises:
            OptionsError: Nobody named the file, and one of that name is no report.
        """
        page = file.with_suffix(".html")
        if self._ours.report_path is True:
            check_ours(file)
            check_ours(page)
        report.write_json(file)
        return report.write_html(page)

    def wall(self) -> WallTime:
        """Return where the wall time of this run went so far."""
        history = self.recording.main.timeline.history
        return self.recording.wall.clock.read(steps=history.steps, samples=history.samples)

    def _validation(self) -> StageSummary | None:
        return self.recording.evaluated.summary() if self.recording.fits else None

    def _minutes_waited(self, wall: WallTime) -> float | None:
        """Return the minutes that all devices together waited for data; None outside of fits."""
        recording = self.recording
        train = recording.main.timeline.history
        if not recording.fits or not train.steps:
            return None
        # The host's waits for first batches are among the starts of epochs.
        starts_s = wall.named_s.get(LATER_EPOCHS.part, {})
        waited_s = train.stalled_s(cold=False) + starts_s.get(LATER_EPOCHS.name, 0.0)
        waited_s += recording.evaluated.timeline.history.stalled_s()
        if self.ranks is not None:
            waited_s += _waits_for_others_s(self.ranks.so_far, self.trainer.global_rank)
        return self.trainer.world_size * waited_s / 60


def _waits_for_others_s(ranks: Sequence[RankTiming], rank: int) -> float:
    """Return how many seconds the slowest rank stalls longer than this one, which waits for it."""
    worst = slowest(ranks)
    here = next((each for each in ranks if each.rank == rank), None)
    if worst is None or here is None:
        return 0.0
    return ((worst.stall_ms or 0.0) - (here.stall_ms or 0.0)) * here.steps / 1e3


def _slowest_loader(loaders: object, meter: StageMeter) -> tuple[str | None, object]:
    """Return the loader that is waited for most, after its label; no label if it is the only one.

    If it is not known which of several is, the label names all, and the first is returned.
    """
    slowest = None if meter.stamps.missing() is not None else meter.stamps.slowest()
    several = seams.labelled(loaders)
    for label, loader in several:
        if slowest is not None and loader is slowest.loader():
            return label, loader
    labels = " or ".join(label for label, _ in several)
    return labels or None, next(seams.flattened(loaders), None)

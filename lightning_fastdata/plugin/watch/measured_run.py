"""One run of a trainer as DataThroughputCallback knows it: what it logs, shows, and reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from lightning_fastdata.augment import leaves_to_device
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.machine import describe_machine, read_versions
from lightning_fastdata.insight.model.evidence import Evidence, LoaderFacts, read_loader
from lightning_fastdata.insight.model.simulate import simulate
from lightning_fastdata.insight.report.run_report import RunReport
from lightning_fastdata.insight.verdicts.catalogue import judge
from lightning_fastdata.insight.waits.ranks import rank_evidence
from lightning_fastdata.insight.waits.several_loaders import costliest
from lightning_fastdata.plugin.loggers import boards
from lightning_fastdata.plugin.loggers.boards import chosen, custom_scalar_layout
from lightning_fastdata.plugin.loggers.report_files import ReportFiles
from lightning_fastdata.plugin.seams.internals import attributes_of
from lightning_fastdata.plugin.seams.loaders import flattened, keyed
from lightning_fastdata.plugin.seams.trainer import own_datamodule, written_hook

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from lightning.pytorch import Trainer

    from lightning_fastdata.insight.measure.metrics import StageSummary
    from lightning_fastdata.insight.measure.wall import WallTime
    from lightning_fastdata.insight.verdicts.catalogue import Verdict
    from lightning_fastdata.insight.waits.several_loaders import LoaderWait
    from lightning_fastdata.plugin.loggers.boards import Scalars
    from lightning_fastdata.plugin.loggers.pictures import BatchPictures
    from lightning_fastdata.plugin.loggers.report_files import Misfortunes
    from lightning_fastdata.plugin.watch.headroom import ReplayedSteps
    from lightning_fastdata.plugin.watch.ranks import RankRecords
    from lightning_fastdata.plugin.watch.recording import Recording

_MOST_OF_RUN: Final = 0.01
"""Of a run's time, what may be spent on judging it before it has ended."""


class RunJudge:
    """Judges the training of one trainer, as it goes on and when it has ended.

    Args:
        trainer: The trainer.
        recording: What was measured of it.
        clock: Seconds that pass.

    Attributes:
        ranks: What the ranks have told; None with one rank.
    """

    def __init__(
        self, trainer: Trainer, recording: Recording, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._trainer = trainer
        self._recording = recording
        self._clock = clock
        self._began_s = clock()
        self._spent_s = self._dearest_s = 0.0
        self.ranks: RankRecords | None = None

    @property
    def affordable(self) -> bool:
        """Whether one more verdict would keep the time spent on them below 1 % of the run."""
        lasted_s = self._clock() - self._began_s
        return self._spent_s + self._dearest_s <= _MOST_OF_RUN * lasted_s or not self._spent_s

    def verdict(self, train: StageSummary, evidence: Evidence) -> Verdict:
        """Return what limits the training, of which this is known."""
        return judge(train, self.facts(train), evidence)

    def facts(self, main: StageSummary | None = None) -> LoaderFacts:
        """Return what the trainer's loader says about itself.

        Args:
            main: Where the steps went: of several loaders, the costliest one is meant. None: the
                first one is.
        """
        stage = self._recording.main.stage
        label, loader = _costliest_loader(self._recording.loaders(), main)
        transform = getattr(loader, "transform", None)
        augment_on: Literal["cpu", "device"] | None = None
        recording = getattr(loader, "recording", None)
        switch = getattr(recording, "switch", None)
        # Of a pipeline that the dataset calls itself, or else of one of the data module.
        switch = getattr(transform, "switch", None) if switch is None else switch
        place = "device" if switch is None else switch.newest
        if self._recording.augments(stage) and place == "device":
            augment_on = "device"
        elif transform is not None or recording is not None:
            augment_on = "cpu"
        ours = own_datamodule(self._trainer)
        settled = ours is not None and ours.augmentation_settled(stage)
        settled |= transform is not None and not leaves_to_device(transform)
        return replace(
            read_loader(loader),
            usable_cpus=self._usable_cpus,
            augment_on=augment_on,
            augment_settled=settled,
            loader=label,
        )

    def evidence(
        self, train: StageSummary, val: StageSummary | None = None, wall: WallTime | None = None
    ) -> Evidence:
        """Return everything that is known of the training."""
        host = self._recording.host
        return self._recording.main.evidence(
            train,
            self.facts(train),
            cpus=float(self._usable_cpus),
            val_stall_share=None if val is None else val.stall_share,
            val_loader=None if val is None else _label(costliest(val.loaders)),
            wall=wall,
            transfer_hook=written_hook(self._trainer, "transfer_batch_to_device"),
            augment_hook=written_hook(self._trainer, "on_after_batch_transfer"),
            settings_in=self._settings_in,
            **({} if host is None else host.evidence()),
            **({} if self.ranks is None else rank_evidence(self.ranks.so_far)),
        )

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time that something takes as time spent on verdicts."""
        began_s = self._clock()
        try:
            yield
        finally:
            took_s = self._clock() - began_s
            self._spent_s += took_s
            self._dearest_s = max(self._dearest_s, took_s)

    @property
    def _settings_in(self) -> str:
        return "FastDataLoader" if own_datamodule(self._trainer) is None else "LoaderOptions"

    @cached_property
    def _usable_cpus(self) -> int:
        return read_cpu_limit(local_ranks=self._trainer.num_devices).usable_cpus


def predicted_step_ms(evidence: Evidence) -> float | None:
    """Return what the model says a step takes in the loader as it is; None if it cannot."""
    if evidence.setup is None or not evidence.costs:
        return None
    return simulate(evidence.costs, evidence.setup).step_ms


def _costliest_loader(loaders: Any, summary: StageSummary | None) -> tuple[str | None, Any]:
    """Return the label of the loader that is waited for most, and it; no label where one is all.

    If it is not known which of several that is, the label names them all, and the first is meant.
    """
    most = None if summary is None else costliest(summary.loaders)
    several = keyed(loaders)
    for key, loader in several:
        if most is not None and key.label == most.label:
            return key.label, loader
    labels = " or ".join(key.label for key, _ in several)
    return labels or None, next(flattened(loaders), None)


def _label(loader: LoaderWait | None) -> str | None:
    return None if loader is None else loader.label


FIRST_WORD_STEPS: Final = 50
"""After so many steps something is said for the first time."""
_JUDGED_EVERY_S = 120.0
"""So old a report may become within an epoch; older where judging is dear."""
_TEXT_STAYS_S: Final = 300.0
_LOG_REST: Final = 100
"""Scalars that took a second to log are logged again after so many."""


class Asked(Protocol):
    """What the callback was told to do, and where it notes its errors."""

    every_n_steps: int | None
    scalars: Scalars
    report_path: str | Path | bool
    summary: bool
    misfortunes: Misfortunes


class MeasuredRun:
    """What one run of a trainer needs and nothing outlives.

    Args:
        trainer: Whose run.
        recording: What is measured of it.
        undo: What takes away again what was put into the trainer.
        ours: The callback that measures, for what it was told to do.
        clock_s: Monotonic time in seconds.
    """

    def __init__(
        self,
        trainer: Trainer,
        recording: Recording,
        undo: list[Callable[[], None]],
        ours: Asked,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trainer = trainer
        self.recording = recording
        self.undo = undo
        self.log_dir: str = trainer.default_root_dir
        self.every_n_steps = 0
        self.figures = 0
        self.step = self.batches = 0
        self.judge = RunJudge(trainer, recording)
        self.replay: ReplayedSteps | None = None
        self.pictures: BatchPictures | None = None
        self._ours = ours
        self._clock_s = clock_s
        self._told: str | None = None
        self._told_at_s = 0.0
        self._judged_s = clock_s()
        self._logged = False
        self._log_due_s = 0.0

    @property
    def logs(self) -> bool:
        """Whether this process has loggers to log to."""
        return bool(self.trainer.is_global_zero and self.trainer.loggers)

    def began(self) -> None:
        """Forget what ran before; to be called on every rank when the loaders are there."""
        self.recording.restart()
        usual = attributes_of(self.trainer).log_every_n_steps
        self.every_n_steps = self._ours.every_n_steps or usual or 0
        self.log_dir = self.trainer.log_dir or self.trainer.default_root_dir
        self._judged_s = self._clock_s()
        if self.logs and self.recording.fits:
            boards.log_layout(self.trainer.loggers, custom_scalar_layout(self._ours.scalars))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Give scalars to the loggers, as far as they were asked for."""
        self.step = step
        if self.logs:
            boards.log_to(self.trainer.loggers, chosen(metrics, self._ours.scalars), step)

    def step_ended(self, step: int) -> None:
        """Log the means since the last time, if this is a step to log at.

        A logger is called for them beside Lightning's own call. Unless ``every_n_steps`` was given,
        that takes at most a hundredth of the time: what took long is done more rarely. The first
        call, in which loggers make their files and connections, is not counted.
        """
        self.step = step
        if not self.every_n_steps or (step + 1) % self.every_n_steps or not self.logs:
            return
        began_s = self._clock_s()
        if self._ours.every_n_steps is None and began_s < self._log_due_s:
            return
        self.log(self.recording.metrics(memory=self._ours.scalars == "all"), step)
        ended_s = self._clock_s()
        if self._logged:
            self._log_due_s = ended_s + _LOG_REST * (ended_s - began_s)
        self._logged = True

    def is_news(self, code: str) -> bool:
        """Return whether a verdict is to be shown: another one, or figures five minutes newer."""
        now_s = self._clock_s()
        if code == self._told and now_s - self._told_at_s < _TEXT_STAYS_S:
            return False
        self._told, self._told_at_s = code, now_s
        return True

    def wall(self) -> WallTime:
        """Return where the wall time of this run went so far."""
        history = self.recording.main.timeline.history
        return self.recording.wall.clock.read(steps=history.steps, samples=history.samples)

    def verdict_is_due(self, batches: int) -> bool:
        """Return whether to judge the run within an epoch.

        Args:
            batches: Steps so far.
        """
        heard = self.logs or self._ours.report_path is not False
        if batches == FIRST_WORD_STEPS:
            return self.trainer.is_global_zero and (heard or self._ours.summary)
        if self._clock_s() - self._judged_s < _JUDGED_EVERY_S:
            return False
        return self.trainer.is_global_zero and heard and self.judge.affordable

    def judged(self) -> tuple[Verdict, Evidence] | None:
        """Judge the run so far, write its report, and show the verdict if it is another one.

        The run may end without a chance to write another report. None if no step ended yet.
        """
        summary = self.recording.main.summary()
        if summary is None:
            return None
        with self.judge.spending():
            wall = self.wall()
            val = self.recording.evaluated.summary() if self.recording.fits else None
            evidence = self.judge.evidence(summary, val, wall)
            verdict = self.judge.verdict(summary, evidence)
            with self._ours.misfortunes.survived("The report was not written"):
                report = self.report(ended=False, verdict=verdict)
                if report is not None and self.files is not None:
                    self.files.write(report)
        self._judged_s = self._clock_s()
        self.show(verdict, summary, wall)
        return verdict, evidence

    def show(self, verdict: Verdict, summary: StageSummary, wall: WallTime | None) -> None:
        """Show a verdict to the loggers that show texts, if it is news."""
        if self.logs and self.is_news(verdict.code):
            name = f"{self.recording.main.stamps.prefix}/verdict"
            told = boards.verdict_markdown(verdict, summary, wall)
            boards.log_text(self.trainer.loggers, name, told, self.step)

    @property
    def files(self) -> ReportFiles | None:
        """Where the report is written; None: nowhere."""
        return ReportFiles.of(self._ours.report_path, self.log_dir, self.recording.method)

    def report(self, *, ended: bool = True, verdict: Verdict | None = None) -> RunReport | None:
        """Return the report of this run, or None if no step ended.

        Args:
            ended: No more steps come, so that what other ranks have not told yet is waited for.
            verdict: What limits the run, if that was judged just now.
        """
        main = self.recording.main.summary()
        if main is None:
            return None
        val = self.recording.evaluated.summary() if self.recording.fits else None
        replayed: tuple[str, ...] = ()
        if self.replay is not None:
            headroom = self.replay.headroom(main) or main.headroom
            main, replayed = replace(main, headroom=headroom), self.replay.notes()
        ranks, datamodule = self.judge.ranks, own_datamodule(self.trainer)
        if ranks is not None and ended:
            ranks.read()
        if verdict is None:
            verdict = self.judge.verdict(main, self.judge.evidence(main, val, self.wall()))
        return RunReport(
            ended=ended,
            wall=self.wall(),  # judging took its time, too
            stages=tuple(stage for stage in (main, val) if stage is not None),
            verdict=verdict,
            recent={m.stage: m.timeline.history.newest() for m in self.recording.meters},
            ranks=() if ranks is None else ranks.so_far,
            notes=(
                *(() if datamodule is None else datamodule.notes),
                *self.recording.notes(),
                *replayed,
                *(() if ranks is None else ranks.notes()),
            ),
            versions=read_versions(),
            machine=describe_machine(self.trainer.strategy.root_device),
        )

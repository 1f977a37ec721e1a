"""One run of a trainer as DataThroughputCallback knows it: what it logs, shows, and reports."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from lightning_fastdata.fingerprint import Fingerprint, fingerprint
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.machine import describe_machine, read_versions
from lightning_fastdata.insight.finding import LoaderFacts, closed_options, read_loader
from lightning_fastdata.insight.machine import (
    NO_MACHINE,
    MemorySeen,
    fault_notes,
    fault_scalars,
    memory_notes,
)
from lightning_fastdata.insight.ranks import RankRecords, RankStalls, RankTiming, slowest
from lightning_fastdata.insight.report import RunReport
from lightning_fastdata.insight.step_costs import StepCosts
from lightning_fastdata.insight.verdict import Evidence, Verdict, judge
from lightning_fastdata.insight.wall import Pauses, WallTime
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.order.mixture import Mixture
from lightning_fastdata.plugin.loggers import boards
from lightning_fastdata.plugin.loggers.boards import chosen, custom_scalar_layout
from lightning_fastdata.plugin.loggers.report_files import report_file, write_report
from lightning_fastdata.plugin.seams.internals import attributes_of
from lightning_fastdata.plugin.seams.loaders import flattened, labelled, tuned_loaders
from lightning_fastdata.plugin.seams.trainer import own_datamodule, written_hook
from lightning_fastdata.plugin.watch.recording import LATER_EPOCHS, Recording

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.batches.bad_samples import FaultLog
    from lightning_fastdata.insight.stage import StageMeter
    from lightning_fastdata.insight.steps import StageSummary
    from lightning_fastdata.plugin.watch.throughput import ThroughputHooks

_COMPARED_WITHIN_S: Final = 0.01
_MOST_OF_RUN: Final = 0.01
"""Of a run's time, what may be spent on judging it before it has ended."""


class RunJudge:
    """Judges the training of one trainer, as it goes on and when it has ended."""

    def __init__(
        self, trainer: Trainer, recording: Recording, clock_s: Callable[[], float] = clock.monotonic
    ) -> None:
        self._trainer = trainer
        self._recording = recording
        self._clock = clock_s
        self._began_s = clock_s()
        self._spent_s = self._dearest_s = 0.0
        self.ranks: RankRecords | None = None
        self.memory = MemorySeen()
        """Of this process and its workers, as it was judged last."""
        self._read: Fingerprint | None = None
        self._epochs = 0
        self._changes = False

    def epoch_began(self) -> None:
        """Compare what is read with what it was in the epoch before."""
        if self._recording.host is not None:
            self._recording.host.epoch = self._epochs
        loader = next(flattened(self._recording.loaders()), None)
        read = [getattr(loader, name, None) for name in ("dataset", "collate_fn")]
        now = fingerprint(*read, within_s=_COMPARED_WITHIN_S)
        self._changes |= self._epochs > 0 and (now is None or now != self._read)
        self._read, self._epochs = now, self._epochs + 1

    @property
    def affordable(self) -> bool:
        """Whether one more verdict would keep the time spent on them below 1 % of the run."""
        lasted_s = self._clock() - self._began_s
        return self._spent_s + self._dearest_s <= _MOST_OF_RUN * lasted_s or not self._spent_s

    def facts(self) -> LoaderFacts:
        """Return what the loader says about itself: the one waited for most, else the first."""
        stage, ours = self._recording.main.stage, own_datamodule(self._trainer)
        label, loader = _slowest_loader(self._recording.loaders(), self._recording.main)
        settled = ours is not None and ours.placing.choice(stage) is not None
        known = read_loader(loader)
        augment_on: Literal["cpu", "device"] | None = known.augment_on and "cpu"
        if self._changes and not known.persistent_workers:
            # Workers that are kept would read what was there in the first epoch: no advice.
            known = replace(known, persistent_workers=None)
        return replace(
            known,
            usable_cpus=self._usable_cpus,
            augment_on="device" if self._recording.augments(stage) else augment_on,
            augment_settled=settled or known.augment_settled,
            loader=label,
        )

    def judged(
        self,
        train: StageSummary,
        val: StageSummary | None,
        wall: WallTime,
        *,
        ended: bool = False,
    ) -> Verdict:
        """Return what limits the training; ``ended``: it goes no further."""
        host, ranks, trainer = self._recording.host, self.ranks, self._trainer
        facts, recording = self.facts(), self._recording
        _, loader = _slowest_loader(recording.loaders(), recording.main)
        val_label, of_val = _slowest_loader(recording.val_loaders(), recording.evaluated)
        if host is not None:
            host.read_memory(at_once=ended)
            dataset = getattr(loader, "dataset", None)
            self.memory = host.memory.seen(dataset, forked=_forks(loader))
        machine = NO_MACHINE if host is None else host.seen()
        facts = replace(facts, closed=self._closed(facts, of_val))
        cpus = float(self._usable_cpus)
        late = recording.main.late_batches(train, facts, cpus=cpus, machine=machine)
        step = StepCosts(
            summary=train,
            loader=facts,
            transfer_hook=written_hook(trainer, "transfer_batch_to_device"),
            augment_hook=written_hook(trainer, "on_after_batch_transfer"),
            settings_in="FastDataLoader" if own_datamodule(trainer) is None else "LoaderOptions",
            padding=recording.main.padding.padding(),
        )
        pauses = Pauses(
            wall=wall,
            epochs=train.cold_steps,
            loader=facts,
            machine=machine,
            loaders_anew=attributes_of(trainer).reload_dataloaders_every_n_epochs > 0,
            val_workers=getattr(of_val, "num_workers", None),
            val_loader=None if val is None else val_label,
        )
        return judge(
            Evidence(
                late=late,
                step=step,
                pauses=pauses,
                ranks=RankStalls(times=step.times, ranks=() if ranks is None else ranks.complete),
                memory=self.memory,
            )
        )

    def _closed(self, facts: LoaderFacts, of_val: object) -> dict[str, str]:
        """Return the options that nobody is told to change, and why."""
        found = {**facts.closed, **closed_options(of_val, prefix="val.")}
        ours = own_datamodule(self._trainer)
        if ours is not None and ours.cache is not None:
            found["cache"] = "cache= is set"
        choice = None if ours is None else ours.placing.choice(self._recording.main.stage)
        if choice is not None and choice.place == "workers":
            found["augment_on"] = "the workers were found to be faster before the training"
        return found

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

    @cached_property
    def _usable_cpus(self) -> int:
        return read_cpu_limit(local_ranks=self._trainer.num_devices).usable_cpus


def _forks(loader: object) -> bool:
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    return bool(context.get_start_method() == "fork")


def _slowest_loader(loaders: object, meter: StageMeter) -> tuple[str | None, object]:
    """Return the label of the loader that is waited for most, and it; no label where one is all.

    If it is not known which of several that is, the label names them all, and the first is meant.
    """
    slowest = None if meter.stamps.missing() is not None else meter.stamps.slowest()
    several = labelled(loaders)
    for label, loader in several:
        if slowest is not None and loader is slowest.loader():
            return label, loader
    labels = " or ".join(label for label, _ in several)
    return labels or None, next(flattened(loaders), None)


FIRST_WORD_STEPS: Final = 50
"""After so many steps something is said for the first time."""
_JUDGED_EVERY_S = 120.0
"""So old a report may become within an epoch; older where judging is dear."""
_TEXT_STAYS_S: Final = 300.0
_LOG_REST: Final = 100
"""Scalars that took a second to log are logged again after so many."""


def _waits_for_others_s(ranks: Sequence[RankTiming], rank: int) -> float:
    """Return how much longer than here the slowest rank stalls: the others wait for it."""
    worst = slowest(ranks)
    here = next((each for each in ranks if each.rank == rank), None)
    if worst is None or here is None:
        return 0.0
    return ((worst.stall_ms or 0.0) - (here.stall_ms or 0.0)) * here.steps / 1e3


class MixtureScalars:
    """What a training had of each part of its mixtures, which is known without a sample."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, int]] = {}

    def since(self, loaders: object) -> dict[str, float]:
        """Return the percentage of each part since the last call, and its epochs until now."""
        found: dict[str, float] = {}
        for label, loader in labelled(loaders) or [("", each) for each in flattened(loaders)]:
            mixture = getattr(loader, "dataset", None)
            if not isinstance(mixture, Mixture) or not isinstance(loader, FastDataLoader):
                continue
            place, name = loader.progress(), f"{label}/" if label else ""
            counts, before = mixture.counts(*place), self._before.get(label, {})
            new = {part: count - before.get(part, 0) for part, count in counts.items()}
            total = sum(new.values())
            for part, epochs in mixture.epochs(*place).items():
                if total > 0:
                    found[f"data_mix/{name}{part}_percent"] = 100 * new[part] / total
                if epochs is not None:
                    found[f"data_mix/{name}{part}_epochs"] = epochs
            self._before[label] = counts
        return found


class MeasuredRun:
    """What one run of a trainer needs and nothing outlives.

    ``undo`` takes away again what was put into the trainer; ``ours`` is the callback that measures.
    """

    def __init__(
        self,
        trainer: Trainer,
        recording: Recording,
        undo: list[Callable[[], None]],
        ours: ThroughputHooks,
    ) -> None:
        self.trainer = trainer
        self.recording = recording
        self.undo = undo
        self.log_dir: str = trainer.default_root_dir
        self.every_n_steps = self.figures = self.step = self.batches = 0
        self.judge = RunJudge(trainer, recording)
        self._ours = ours
        self._shown: str | None = None
        self._shown_at_s = 0.0
        self._judged_s = clock.monotonic()
        self._mixtures = MixtureScalars()
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
        self._judged_s = clock.monotonic()
        if self.logs and self.recording.fits:
            boards.log_layout(self.trainer.loggers, custom_scalar_layout())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Give those scalars to the loggers that were asked for."""
        self.step = step
        if self.logs:
            metrics = {**metrics, **fault_scalars(self._fault_logs())}
            loaders = self.recording.loaders()
            for loader, _ in tuned_loaders(loaders):
                metrics["data_tune/workers"] = float(loader.num_workers)
            shown = {**chosen(metrics), **self._mixtures.since(loaders)}
            boards.log_to(self.trainer.loggers, shown, step)

    def step_ended(self, step: int) -> None:
        """Log the means since the last time, if this is a step to log at.

        A logger is called for them beside Lightning's own call. Unless ``every_n_steps`` was given,
        that takes at most a hundredth of the time: what took long is done more rarely. The first
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

    def wall(self) -> WallTime:
        """Return where the wall time of this run went so far."""
        history = self.recording.main.timeline.history
        return self.recording.wall.clock.read(steps=history.steps, samples=history.samples)

    def verdict_is_due(self, batches: int) -> bool:
        """Return whether to judge the run within an epoch, after so many steps."""
        early = batches == FIRST_WORD_STEPS
        if not early and clock.monotonic() - self._judged_s < _JUDGED_EVERY_S:
            return False
        heard = self.logs or self._ours.report_path is not False
        if early:
            return self.trainer.is_global_zero and (heard or self._ours.summary)
        return self.trainer.is_global_zero and heard and self.judge.affordable

    def judged(self) -> Verdict | None:
        """Judge the run so far, write its report, and show it if its verdict is another one.

        The run may end without a chance to write another report. None if no step ended yet.
        """
        summary = self.recording.main.summary()
        if summary is None:
            return None
        report = None
        with self.judge.spending():
            verdict = self.judge.judged(summary, self._validation(), self.wall())
            with self._ours.misfortunes.survived("The report was not written"):
                report = self.report(ended=False, verdict=verdict)
                if report is not None and self.file is not None:
                    write_report(report, self.file)
        self._judged_s = now_s = clock.monotonic()
        aged = now_s - self._shown_at_s >= _TEXT_STAYS_S
        if report is not None and (aged or verdict.code != self._shown):
            self._shown, self._shown_at_s = verdict.code, now_s
            self.show(report)
        return verdict

    def show(self, report: RunReport) -> None:
        """Show the summary, as it is printed, to the loggers of texts."""
        if self.logs:
            name = f"{self.recording.main.prefix}/verdict"
            boards.log_summary(self.trainer.loggers, name, report, self.step)

    def _minutes_waited(self, wall: WallTime, ranks: RankRecords | None) -> float | None:
        """Return how long all devices waited for data so far; None outside of fits."""
        recording = self.recording
        train = recording.main.timeline.history
        if not recording.fits or not train.steps:
            return None
        # The host's waits for first batches are among the starts of epochs.
        waited_s = train.stalled_s(cold=False) + wall.named_s.get(LATER_EPOCHS, 0.0)
        waited_s += recording.evaluated.timeline.history.stalled_s()
        if ranks is not None:
            waited_s += _waits_for_others_s(ranks.so_far, self.trainer.global_rank)
        return self.trainer.world_size * waited_s / 60

    def _fault_logs(self) -> list[FaultLog]:
        several = self.recording.loaders(), self.recording.val_loaders()
        found = (loader for loaders in several for loader in flattened(loaders))
        return [loader.faults for loader in found if isinstance(loader, FastDataLoader)]

    def _validation(self) -> StageSummary | None:
        return self.recording.evaluated.summary() if self.recording.fits else None

    @property
    def file(self) -> Path | None:
        """Where the report is written; None: nowhere."""
        return report_file(self._ours.report_path, self.log_dir, self.recording.method)

    def report(self, *, ended: bool = True, verdict: Verdict | None = None) -> RunReport | None:
        """Return the report of this run, or None if no step ended.

        ``verdict``: What limits the run, if that was judged just now.
        """
        main = self.recording.main.summary()
        if main is None:
            return None
        val = self._validation()
        ranks, datamodule = self.judge.ranks, own_datamodule(self.trainer)
        if ranks is not None and ended:
            ranks.ended()
        if verdict is None:
            verdict = self.judge.judged(main, val, self.wall(), ended=True)
        return RunReport(
            ended=ended,
            moves=tuple(m for _, t in tuned_loaders(self.recording.loaders()) for m in t.moves),
            wall=(wall := self.wall()),  # judging took its time, too
            device_minutes_waited=self._minutes_waited(wall, ranks),
            stages=tuple(stage for stage in (main, val) if stage is not None),
            verdict=verdict,
            recent={m.stage: m.timeline.history.newest() for m in self.recording.meters},
            ranks=() if ranks is None else ranks.so_far,
            notes=(
                *(() if datamodule is None else datamodule.notes),
                *self.recording.notes(),
                *memory_notes(self.judge.memory),
                *fault_notes(self._fault_logs()),
                *(() if ranks is None else ranks.notes()),
            ),
            versions=read_versions(),
            machine=describe_machine(self.trainer.strategy.root_device),
        )

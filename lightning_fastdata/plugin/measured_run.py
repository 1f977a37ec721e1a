"""One run of a trainer as DataThroughputCallback knows it, and the report that comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_fastdata.host.machine import describe_machine, read_versions
from lightning_fastdata.insight.report import RunReport
from lightning_fastdata.plugin.judging import RunJudge

if TYPE_CHECKING:
    from lightning_fastdata.insight.wall import WallTime
    from lightning_fastdata.plugin.headroom import Replay
    from lightning_fastdata.plugin.pictures import BatchPictures
    from lightning_fastdata.plugin.recording import Recording


class MeasuredRun:
    """What one fit needs and nothing outlives."""

    def __init__(self, trainer: Any, recording: Recording, undo: list[Callable[[], None]]) -> None:
        self.trainer = trainer
        self.recording = recording
        self.undo = undo
        self.log_dir: str = trainer.default_root_dir
        self.every_n_steps = 0
        self.figures = 0
        self.verdict_code: str | None = None
        self.judge = RunJudge(trainer, recording)
        self.replay: Replay | None = None
        self.pictures: BatchPictures | None = None

    @property
    def logs(self) -> bool:
        """Whether this process has loggers to log to."""
        return bool(self.trainer.is_global_zero and self.trainer.loggers)

    def wall(self) -> WallTime:
        """Return where the wall time of this run went so far."""
        history = self.recording.train.timeline.history
        return self.recording.wall.clock.read(steps=history.steps, samples=history.samples)

    def report(self) -> RunReport | None:
        """Return the report of this run, or None if no step ended."""
        train, val = self.recording.train.summary(), self.recording.val.summary()
        if train is None:
            return None
        replayed: tuple[str, ...] = ()
        if self.replay is not None:
            headroom = self.replay.headroom(train) or train.headroom
            train, replayed = replace(train, headroom=headroom), self.replay.notes()
        meters = self.recording.train, self.recording.val
        ranks = self.judge.ranks
        if ranks is not None:
            ranks.read()
        wall = self.wall()
        return RunReport(
            wall=wall,
            stages=tuple(stage for stage in (train, val) if stage is not None),
            verdict=self.judge.verdict(train, self.judge.evidence(train, val, wall)),
            recent={m.stage: m.timeline.history.newest() for m in meters},
            ranks=() if ranks is None else ranks.so_far,
            notes=(
                *getattr(self.trainer.datamodule, "notes", ()),
                *self.recording.notes(),
                *replayed,
                *(() if ranks is None else ranks.notes()),
            ),
            versions=read_versions(),
            machine=describe_machine(self.trainer.strategy.root_device),
        )

"""One run of a trainer as DataThroughputCallback knows it, and the report that comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.host.machine import describe_machine, read_versions
from lightning_fastdata.insight.report import RunReport
from lightning_fastdata.plugin.judging import RunJudge

if TYPE_CHECKING:
    from lightning_fastdata.insight.verdict import Verdict
    from lightning_fastdata.insight.wall import WallTime
    from lightning_fastdata.plugin.headroom import Replay
    from lightning_fastdata.plugin.pictures import BatchPictures
    from lightning_fastdata.plugin.recording import Recording


_FIGURES_STAY_S: Final = 300.0


class MeasuredRun:
    """What one fit needs and nothing outlives."""

    def __init__(self, trainer: Any, recording: Recording, undo: list[Callable[[], None]]) -> None:
        self.trainer = trainer
        self.recording = recording
        self.undo = undo
        self.log_dir: str = trainer.default_root_dir
        self.every_n_steps = 0
        self.figures = 0
        self._told: str | None = None
        self._told_at_s = 0.0
        self.judge = RunJudge(trainer, recording)
        self.replay: Replay | None = None
        self.pictures: BatchPictures | None = None

    @property
    def logs(self) -> bool:
        """Whether this process has loggers to log to."""
        return bool(self.trainer.is_global_zero and self.trainer.loggers)

    def is_news(self, code: str, now_s: float | None = None) -> bool:
        """Return whether a verdict is to be shown: another one, or figures five minutes newer."""
        now_s = time.monotonic() if now_s is None else now_s
        if code == self._told and now_s - self._told_at_s < _FIGURES_STAY_S:
            return False
        self._told, self._told_at_s = code, now_s
        return True

    def wall(self) -> WallTime:
        """Return where the wall time of this run went so far."""
        history = self.recording.train.timeline.history
        return self.recording.wall.clock.read(steps=history.steps, samples=history.samples)

    def report(self, *, ended: bool = True, verdict: Verdict | None = None) -> RunReport | None:
        """Return the report of this run, or None if no step ended.

        Args:
            ended: No more steps come, so that what other ranks have not told yet is waited for.
            verdict: What limits the training, if that was judged just now.
        """
        train, val = self.recording.train.summary(), self.recording.val.summary()
        if train is None:
            return None
        replayed: tuple[str, ...] = ()
        if self.replay is not None:
            headroom = self.replay.headroom(train) or train.headroom
            train, replayed = replace(train, headroom=headroom), self.replay.notes()
        meters = self.recording.train, self.recording.val
        ranks = self.judge.ranks
        if ranks is not None and ended:
            ranks.read()
        if verdict is None:
            verdict = self.judge.verdict(train, self.judge.evidence(train, val, self.wall()))
        return RunReport(
            wall=self.wall(),  # judging took its time, too
            stages=tuple(stage for stage in (train, val) if stage is not None),
            verdict=verdict,
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

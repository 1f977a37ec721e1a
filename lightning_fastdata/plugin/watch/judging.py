"""The verdict on a run: what its loaders say of themselves, and what their stamps tell."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from lightning_fastdata.augment.stage_transform import leaves_to_device
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.loader_facts import LoaderFacts, read_loader
from lightning_fastdata.insight.model.simulate import simulate
from lightning_fastdata.insight.verdicts.verdict import judge
from lightning_fastdata.insight.waits.ranks import rank_evidence
from lightning_fastdata.insight.waits.several_loaders import costliest
from lightning_fastdata.plugin.seams.sources import flattened, keyed
from lightning_fastdata.plugin.seams.trainer_facts import own_datamodule, written_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Trainer

    from lightning_fastdata.insight.measure.metrics import StageSummary
    from lightning_fastdata.insight.measure.wall import WallTime
    from lightning_fastdata.insight.verdicts.verdict import Verdict
    from lightning_fastdata.insight.waits.several_loaders import LoaderWait
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

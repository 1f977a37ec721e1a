"""One run of a trainer, measured: which marks belong to which stage, and what is logged when."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.host.spent import SpentMeter
from lightning_fastdata.insight.clock import CudaClock
from lightning_fastdata.insight.timeline import StepTimeline
from lightning_fastdata.insight.window import MetricWindow
from lightning_fastdata.plugin.causes import StageCauses, causes_note
from lightning_fastdata.plugin.host_metrics import HostMeter
from lightning_fastdata.plugin.profiler_tee import Listener

if TYPE_CHECKING:
    from lightning_fastdata.insight.metrics import StageSummary
    from lightning_fastdata.types import Batch, Stage


class StageMeter:
    """The timeline of one stage, its log window and the wall time it has covered."""

    def __init__(self, device: torch.device, causes: StageCauses) -> None:
        stage, prefix = causes.stage, causes.prefix
        self.stage: Stage = stage
        self.device = device
        self.causes = causes
        self.updates = 0
        self.timeline = StepTimeline(device=CudaClock() if device.type == "cuda" else None)
        self._window = MetricWindow(self.timeline.history, prefix)
        self._duration_s = 0.0
        self._last: float | None = None
        self.cpu = SpentMeter()

    def step_ended(self, batch: Batch) -> None:
        """Close the step whose batch this was."""
        self.timeline.compute_ended(batch_rows(batch))
        now = time.monotonic()
        if self._last is not None:
            self._duration_s += now - self._last
        self._last = now
        self.causes.step_ended()

    def began(self) -> None:
        """Note that the stage is under way, if it was not before."""
        if self._last is None:
            self._last = time.monotonic()
            self.cpu.began()

    def paused(self) -> None:
        """Do not count the time until the stage goes on: training and validation take turns."""
        self._last = None
        self.cpu.paused()

    def metrics(self) -> dict[str, float]:
        """Return the means over the steps since the last call, by their names for loggers."""
        self.timeline.poll()
        return {**self._window.take(), **self.causes.metrics()}

    def summary(self) -> StageSummary | None:
        """Return where the steps went, or None before the first step ended."""
        history = self.timeline.history
        if history.steps == 0:
            return None
        summary = history.summarize(
            self.stage,
            duration_s=self._duration_s,
            device=self.device.type,
            dropped_steps=self.timeline.dropped_steps,
        )
        updates = self.updates if self.stage == "train" else None
        return dataclasses.replace(summary, causes=self.causes.summary(), updates=updates)


class Recording:
    """Turns the announcements of Lightning's profiler into marks on the right timeline.

    Args:
        trainer: The trainer that is measured.

    Attributes:
        augments: Whether something runs in ``on_after_batch_transfer`` in a stage; if not, no
            augmentation is measured, so that none is reported as 0.
        in_transfer: Whether the trainer is moving a batch of one of its loaders.
        optimizer_stepped: Whether the open batch has ended in an optimizer step.
        batches_stepped: Batches that ended in one; with manual optimization, all batches.
        host: What the training takes of its machine; None before it begins.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.augments: Callable[[Stage], bool] = lambda _stage: False
        self.in_transfer = False
        self._fetching: StageMeter | None = None
        self._moving: StageMeter | None = None
        self.optimizer_stepped = False
        self.batches_stepped = 0
        device = trainer.strategy.root_device
        self.train = StageMeter(device, StageCauses("train", "data"))
        self.val = StageMeter(device, StageCauses("val", "data_val"))
        self.host: HostMeter | None = None

    def watch(self, stage: Stage, loaders: Any) -> None:
        """Take stamps of what the trainer's loaders of a stage deliver."""
        (self.train if stage == "train" else self.val).causes.watch(loaders)

    def restart(self) -> None:
        """Forget everything measured so far: what tuners ran before the training began."""
        device = self._trainer.strategy.root_device
        for meter in (self.train, self.val):
            meter.causes.restart()
        self.train = StageMeter(device, self.train.causes)
        self.val = StageMeter(device, self.val.causes)
        # Loaders that were made anew behind our back, and those that no source could be asked for.
        self.watch("train", self._trainer.train_dataloader)
        self.watch("val", self._trainer.val_dataloaders)
        self.batches_stepped = 0
        self.host = HostMeter(device, busy_share=self.train.causes.busy_share)

    def stop(self) -> None:
        """Take no more stamps."""
        for meter in (self.train, self.val):
            meter.causes.stop()

    def metrics(self) -> dict[str, float]:
        """Return what is to be logged of the training since the last call."""
        host = {} if self.host is None else self.host.metrics()
        return {**self.train.metrics(), **host}

    def notes(self) -> tuple[str, ...]:
        """Return what has to be said about stamps that could not be taken."""
        meters = [meter for meter in (self.train, self.val) if meter.timeline.history.steps]
        return causes_note(meter.causes for meter in meters)

    def listeners(self) -> Mapping[str, Listener]:
        """Return what to call when Lightning announces an action, by the action's last word."""
        return {
            "train_dataloader_next": (self._train_wait_began, self._train_wait_ended),
            "run_training_batch": (_nothing, self._work_ended),
            "val_next": (self._val_wait_began, self._val_wait_ended),
            "batch_to_device": (self._transfer_began, self._transfer_ended),
            "on_after_batch_transfer": (self._augment_began, self._augment_ended),
        }

    def _train_wait_began(self) -> None:
        self._fetching = self.train
        self.train.began()
        self.train.timeline.wait_began()

    def _train_wait_ended(self) -> None:
        self.train.timeline.wait_ended()

    def _work_ended(self) -> None:
        # Callbacks that are called before ours at the end of a batch are no part of the step.
        self.train.timeline.work_ended()

    def _val_wait_began(self) -> None:
        # The sanity check fetches under the same name; it is not measured.
        self._fetching = self.val if self._trainer.validating else None
        if self._fetching is not None:
            self.val.began()
            self.val.timeline.wait_began()

    def _val_wait_ended(self) -> None:
        if self._fetching is not None:
            self.val.timeline.wait_ended()

    def _transfer_began(self) -> None:
        self.in_transfer = True
        # What is moved was fetched last: asking the trainer for its stage costs microseconds.
        self._moving = self._fetching
        if self._moving is not None:
            self._moving.timeline.transfer_began()

    def _transfer_ended(self) -> None:
        self.in_transfer = False
        if self._moving is not None:
            self._moving.timeline.transfer_ended()
            self._moving = None

    def _augment_began(self) -> None:
        if self._moving is not None and self.augments(self._moving.stage):
            self._moving.timeline.augment_began()

    def _augment_ended(self) -> None:
        if self._moving is not None and self.augments(self._moving.stage):
            self._moving.timeline.augment_ended()


def _nothing() -> None:
    pass


def batch_rows(batch: Batch) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor.

    Without any tensor it is the length of the batch, or 1 where it has none.
    """
    rows = _rows(batch)
    if rows is not None:
        return rows
    return len(batch) if isinstance(batch, list | tuple | Mapping) else 1


def _rows(batch: Batch) -> int | None:
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif hasattr(batch, "__dataclass_fields__"):
        batch = [getattr(batch, name) for name in batch.__dataclass_fields__]
    elif not isinstance(batch, list | tuple):
        return None
    for item in batch:
        rows = _rows(item)
        if rows is not None:
            return rows
    return None

"""What a fit loses by waiting for data: what it costs, and what a step takes that does not wait."""

from __future__ import annotations

import copy
import inspect
import random
import statistics
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from lightning_fastdata.batches.staged import batch_samples
from lightning_fastdata.host import clock
from lightning_fastdata.host.usage import read_gpu_watts
from lightning_fastdata.insight.measure.metrics import Headroom
from lightning_fastdata.insight.measure.waiting_cost import waiting_cost
from lightning_fastdata.insight.waits.ranks import slowest
from lightning_fastdata.plugin.seams.internals import is_compiled
from lightning_fastdata.plugin.watch.recording import FIRST_EPOCH, LATER_EPOCHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.insight.measure.metrics import StageSummary
    from lightning_fastdata.insight.measure.waiting_cost import GpuRates, WaitingCost
    from lightning_fastdata.insight.measure.wall import WallTime
    from lightning_fastdata.insight.waits.ranks import RankRecords, RankTiming
    from lightning_fastdata.plugin.watch.recording import Recording
    from lightning_fastdata.types import Batch

_KEPT: Final = 4
"""Batches that are replayed. On a GPU they take memory during the whole training."""
_ROUNDS: Final = 3
"""Rounds over them that are timed, at least; one more comes before."""
_MOST_ROUNDS: Final = 50
_LEAST_S: Final = 1.0
"""Short rounds are repeated for so long."""


class CostMeter:
    """Tells what the waits of one run cost.

    Args:
        trainer: The trainer.
        recording: What was measured of it.
        rates: What a device costs and draws. A power that is not known is read from the device.
    """

    def __init__(self, trainer: Trainer, recording: Recording, rates: GpuRates) -> None:
        self._trainer = trainer
        self._recording = recording
        self._rates = rates
        self._asks = rates.gpu_watts is None
        self._watts: list[float] = []

    def read_power(self) -> None:
        """Ask the device what it draws, unless it was said; to be called while it trains."""
        if not self._asks:
            return
        watts = read_gpu_watts(self._trainer.strategy.root_device)
        self._asks = watts is not None
        if watts is not None:
            self._watts.append(watts)

    def read(self, wall: WallTime, ranks: RankRecords | None) -> WaitingCost | None:
        """Return what waiting costs so far; None outside of fits, and where it means nothing.

        Args:
            wall: Of the run so far.
            ranks: What the steps of each rank took; None: there is one.
        """
        recording, trainer = self._recording, self._trainer
        train = recording.main.timeline.history
        if not recording.fits or not train.steps:
            return None
        # The host's waits for first batches are among the starts of epochs.
        idle_s = train.stalled_s(cold=False) + wall.named_s.get(LATER_EPOCHS, 0.0)
        idle_s += recording.evaluated.timeline.history.stalled_s()
        if ranks is not None:
            idle_s += _waits_for_others_s(ranks.so_far, trainer.global_rank)
        per_epoch = trainer.num_training_batches
        return waiting_cost(
            replace(self._rates, gpu_watts=fmean(self._watts)) if self._watts else self._rates,
            device=trainer.strategy.root_device.type,
            devices=trainer.world_size,
            idle_s=idle_s,
            elapsed_s=wall.training_s - wall.named_s.get(FIRST_EPOCH, 0.0),
            idle_per_epoch_s=(
                idle_s / train.steps * per_epoch if isinstance(per_epoch, int) else None
            ),
        )

    def scalars(self, wall: WallTime, ranks: RankRecords | None) -> dict[str, float]:
        """Return what loggers get of it, which may be nothing."""
        cost = self.read(wall, ranks)
        return {} if cost is None else cost.scalars()


def _waits_for_others_s(ranks: Sequence[RankTiming], rank: int) -> float:
    """Return how much longer than here the slowest rank stalls: the others wait for it."""
    worst = slowest(ranks)
    here = next((each for each in ranks if each.rank == rank), None)
    if worst is None or here is None:
        return 0.0
    return ((worst.stall_ms or 0.0) - (here.stall_ms or 0.0)) * here.steps / 1e3


class ReplayedSteps:
    """Keeps the first batches of a training and replays them when it has ended."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._rounds_ms: list[float] = []
        self._samples = self._steps = 0
        self._failed: str | None = None

    def keep(self, batch: Batch) -> None:
        """Keep a batch as the training step got it, if there are not enough yet."""
        if len(self._batches) < _KEPT:
            self._batches.append(batch)

    def run(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replay the training step, backward and the optimizer's step, and forget the batches.

        They run on copies of the module and its optimizers, without a trainer: no logger, callback
        or scheduler is called, and weights, buffers, gradients and random generators stay.
        """
        batches, self._batches = self._batches, []
        self._failed = _obstacle(trainer, pl_module)
        if not batches or self._failed is not None:
            return
        device = trainer.strategy.root_device
        try:
            with _untouched(pl_module, device), warnings.catch_warnings():
                # A module without a trainer warns that it cannot log.
                warnings.simplefilter("ignore")
                step = _Step(trainer, pl_module)
                self._rounds_ms = self._timed(step, batches, device)
        except Exception as error:  # whatever a step does that needs its trainer
            first_line = str(error).partition("\n")[0].rstrip(".")
            self._failed = f"{type(error).__name__}: {first_line}"
            return
        self._samples = sum(batch_samples(batch) for batch in batches)
        self._steps = len(batches)

    def headroom(self, stage: StageSummary) -> Headroom | None:
        """Return what was measured, for the summary of the training; None if nothing was."""
        if not self._rounds_ms:
            return None
        # A replay neither transfers nor augments.
        other_ms = sum(each.mean_ms for each in (stage.transfer, stage.augment) if each is not None)
        step_ms = statistics.median(self._rounds_ms) / self._steps + other_ms
        if step_ms <= 0:
            return None
        rate = self._samples / self._steps * 1e3 / step_ms
        return Headroom(step_ms=step_ms, samples_per_s=rate, basis="measured")

    def notes(self) -> tuple[str, ...]:
        """Return why nothing could be measured, if that is so."""
        if self._failed is None:
            return ()
        return (f"The headroom is modelled, as it could not be measured: {self._failed}.",)

    def _timed(self, step: _Step, batches: list[Batch], device: torch.device) -> list[float]:
        rounds_ms: list[float] = []
        first_s = 0.0
        for number in range(_MOST_ROUNDS + 1):
            began_s = clock.monotonic()
            for index, batch in enumerate(batches):
                step(batch, index)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the training is over: this holds up no step
            ended_s = clock.monotonic()
            if number == 0:
                first_s = ended_s  # compiles, and fills the caches
            else:
                rounds_ms.append((ended_s - began_s) * 1e3)
            if number >= _ROUNDS and ended_s - first_s > _LEAST_S:
                break
        return rounds_ms


class _Step:
    """The training step of a copy of a module, with its backward and its optimizers."""

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Together, so that the copied optimizers hold the copied weights.
        self._twin, self._optimizers = copy.deepcopy((pl_module, list(trainer.optimizers)))
        parameters = inspect.signature(pl_module.training_step).parameters
        self._takes_index = len(parameters) > 1
        self._every = trainer.accumulate_grad_batches
        self._clip = trainer.gradient_clip_val
        self._context = trainer.precision_plugin.train_step_context
        self._done = 0

    def __call__(self, batch: Batch, index: int) -> None:
        with self._context():
            loss = self._twin.training_step(*((batch, index) if self._takes_index else (batch,)))
        loss = loss["loss"] if isinstance(loss, Mapping) else loss
        if loss is not None:
            (loss / self._every).backward()
        self._done += 1
        if self._done % self._every == 0:
            if self._clip:
                torch.nn.utils.clip_grad_norm_(self._twin.parameters(), self._clip)
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()


def _obstacle(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Return why the step of a module cannot be replayed; None if it may."""
    if trainer.world_size > 1:
        return "with several devices a step needs them all"
    if not pl_module.automatic_optimization:
        return "with manual optimization the step asks the trainer for its optimizers"
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        return "training_step(dataloader_iter) fetches its batches itself"
    if "training_step" in vars(pl_module) or is_compiled(pl_module):
        return "a compiled or replaced training_step belongs to the module that was trained"
    return None


@contextmanager
def _untouched(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Leave random generators, gradients and buffers as they were, whatever the block does.

    A copy of a module may still reach the original one, through a closure for example.
    """
    gradients = [(weight, weight.grad) for weight in module.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    python, numpy_state = random.getstate(), np.random.get_state()
    for weight, _ in gradients:
        weight.grad = None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        for weight, gradient in gradients:
            weight.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

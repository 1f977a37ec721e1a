"""What waiting for data costs a trainer's fit, over the devices of all ranks."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from lightning_fastdata.host.usage import read_gpu_watts
from lightning_fastdata.insight.measure.waiting_cost import waiting_cost
from lightning_fastdata.insight.waits.ranks import slowest
from lightning_fastdata.plugin.watch.recording import FIRST_EPOCH, LATER_EPOCHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning.pytorch import Trainer

    from lightning_fastdata.insight.measure.waiting_cost import GpuRates, WaitingCost
    from lightning_fastdata.insight.measure.wall import WallTime
    from lightning_fastdata.insight.waits.ranks import RankRecords, RankTiming
    from lightning_fastdata.plugin.watch.recording import Recording


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

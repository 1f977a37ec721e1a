"""The transfer of batches: with their step, or one batch ahead on a stream beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from lightning_fastdata.batches.staged import StagedBatch, move
from lightning_fastdata.loading.prefetch import BATCHES_AHEAD, Crossing, OneAhead, SideLane
from lightning_fastdata.planning.options import check_among
from lightning_fastdata.plugin.placing.stage_transforms import StageTransforms, carry_out_draws
from lightning_fastdata.plugin.seams.hooks import HOOKS, overridden_hook

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins import Precision

    from lightning_fastdata.plugin.module import DataModule
    from lightning_fastdata.types import Batch, Stage

PrefetchName: TypeAlias = Literal["auto", "off"]


class Prefetching:
    """Sends the batches of one data module ahead, if the user asked for it and it can be done.

    Raises:
        OptionsError: There is no such way to prefetch.
    """

    def __init__(self, asked: PrefetchName) -> None:
        check_among("prefetch", asked, get_args(PrefetchName))
        self.asked: PrefetchName = asked
        self.why_not: str | None = (
            "not asked for" if asked == "off" else "decided when the training starts"
        )
        """Why batches are not sent ahead; None: they are."""
        self._lanes: dict[torch.device, SideLane | None] = {}

    def __getstate__(self) -> dict[str, object]:
        # Streams belong to one process.
        return {**vars(self), "_lanes": {}}

    def decide(self, module: DataModule) -> None:
        """Decide for the trainer of a data module, which is asked for its hooks and its streams."""
        trainer = module.trainer
        if trainer is None or self.asked == "off":
            return
        device = trainer.strategy.root_device
        if device not in self._lanes:
            streams = module.device_streams(device)
            self._lanes[device] = None if streams is None else SideLane(streams)
        theirs = {n for n in HOOKS if overridden_hook(trainer.lightning_module, n) is not None}
        early = (theirs | module.written_hooks()) - {"on_after_batch_transfer"}
        if self._lanes[device] is None:
            self.why_not = "this type of device does not copy beside its computing"
        elif early:
            self.why_not = f"{', '.join(sorted(early))} of yours runs in the batch's own step"
        else:
            self.why_not = None

    @property
    def batches_ahead(self) -> int:
        """Batches that are on the device beside the one that is trained on, at most."""
        return BATCHES_AHEAD if self.why_not is None else 0

    def drop_ahead(self) -> bool:
        """Let go of batches that were sent ahead, and send no more; return whether there was one.

        Each is made anew when it is its turn.
        """
        return sum(lane.drop() for lane in self._lanes.values() if lane is not None) > 0

    def look_ahead(
        self, trainer: Trainer | None, stage: Stage, transforms: StageTransforms
    ) -> Callable[[Iterator[Batch]], Iterator[Batch]] | None:
        """Return what sends the batches of a loader one ahead; None if they are not."""
        if trainer is None or self.why_not is not None:
            return None
        return partial(self._one_ahead, trainer, stage, transforms)

    def _one_ahead(
        self, trainer: Trainer, stage: Stage, transforms: StageTransforms, batches: Iterator[Batch]
    ) -> Iterator[Batch]:
        """Return the batches of an epoch as :class:`StagedBatch` that cross to the device."""
        device = trainer.strategy.root_device
        lane = self._lanes.get(device)
        if lane is None:  # a copy of the loader in another process
            return batches

        def work(batch: Batch) -> Batch:
            return carry_out_draws(move(batch, device, non_blocking=True), transforms)

        def receive(crossing: Crossing) -> StagedBatch:
            lane.note_landing()  # it lands when Lightning's hooks are called, behind the next send
            return StagedBatch(None, None, stage, _Converted(crossing, trainer.precision_plugin))

        return OneAhead(batches, lambda b: lane.send(b, work), receive, lambda: lane.has_room)

    def explain(self) -> str:
        """Return whether batches are sent ahead, and why not."""
        if self.why_not is None:
            return "prefetch  one batch ahead, on a stream beside the computing"
        return f"prefetch  off  {self.why_not}"


class _Converted:
    """A crossing whose batch Lightning would have converted to the precision's dtype before."""

    def __init__(self, crossing: Crossing, precision: Precision) -> None:
        self._crossing = crossing
        self._precision = precision

    @property
    def source(self) -> Batch:
        """The batch as Lightning would have brought it to the device."""
        return self._in_precision(self._crossing.source)

    def land(self) -> Batch:
        return self._in_precision(self._crossing.land())

    def _in_precision(self, batch: Batch) -> Batch:
        return batch if isinstance(batch, StagedBatch) else self._precision.convert_input(batch)

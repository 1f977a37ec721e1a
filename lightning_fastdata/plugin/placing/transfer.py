"""The transfer of batches: on which stream, and how far ahead."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from lightning_fastdata.batches.staged import StagedBatch, move
from lightning_fastdata.device.prefetch import BATCHES_AHEAD, Crossing, OneAhead, SideLane
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.planning.options import check_among
from lightning_fastdata.plugin.placing.stage_transforms import carry_out_draws, transfer
from lightning_fastdata.plugin.seams.hooks import HOOKS, overridden_hook

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins import Precision

    from lightning_fastdata.plugin.module import DataModule
    from lightning_fastdata.plugin.placing.stage_transforms import StageTransforms
    from lightning_fastdata.types import Batch, Stage

PrefetchName: TypeAlias = Literal["auto", "off", "stream", "lookahead"]


@dataclass(frozen=True, slots=True)
class PrefetchChoice:
    """How batches are moved.

    ``"off"``: on the stream of the computing. ``"stream"``: on one beside it, when it is the
    batch's turn. ``"lookahead"``: there, one batch ahead.
    """

    how: Literal["off", "stream", "lookahead"]
    why: str
    refused: bool = False
    """Whether the user asked for something else."""


def choose_prefetch(
    asked: PrefetchName,
    *,
    has_streams: bool,
    ranks: int,
    precision: str,
    hooks: frozenset[str] = frozenset(),
    hooks_of_module: frozenset[str] = frozenset(),
) -> PrefetchChoice:
    """Decide how batches are moved.

    Args:
        asked: What the user set.
        has_streams: Whether the device has streams that run side by side.
        ranks: Training processes. With several, Lightning has the host wait for the device before
            each step, so that only a batch that was sent earlier crosses beside the computing.
        precision: Lightning's name of it. The scaler of ``"16-mixed"`` waits for the device, too.
        hooks: Transfer hooks that a subclass of the data module has written.
        hooks_of_module: Those that the LightningModule has.
    """
    if asked == "off":
        return PrefetchChoice("off", "not asked for")
    if not has_streams:
        return PrefetchChoice("off", "this type of device does not copy beside its computing")
    if "transfer_batch_to_device" in hooks_of_module:
        why = "the LightningModule moves batches itself, in transfer_batch_to_device"
        return PrefetchChoice("off", why, refused=asked != "auto")
    if asked != "auto":
        choice = PrefetchChoice(asked, "set by you")
    elif ranks > 1 or precision.startswith("16-mixed"):
        reason = f"{ranks} ranks" if ranks > 1 else precision
        why = f"the host waits for the device in each step ({reason})"
        choice = PrefetchChoice("lookahead", why)
    else:
        choice = PrefetchChoice("stream", "the host runs ahead of the device")
    early = (hooks | hooks_of_module) - {"on_after_batch_transfer"}
    if choice.how == "lookahead" and early:
        why = f"{', '.join(sorted(early))} of yours runs in the batch's own step, not one ahead"
        return PrefetchChoice("stream", why, refused=asked != "auto")
    return choice


class Prefetching:
    """Moves the batches of one data module, as the user asked.

    Raises:
        OptionsError: There is no such way to prefetch.
    """

    def __init__(self, asked: PrefetchName) -> None:
        check_among("prefetch", asked, get_args(PrefetchName))
        self.asked: PrefetchName = asked
        self.choice = PrefetchChoice("off", "decided when the training starts")
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
        theirs, before = trainer.lightning_module, self.choice
        self.choice = choose_prefetch(
            self.asked,
            has_streams=self._lanes[device] is not None,
            ranks=trainer.world_size,
            precision=str(trainer.precision),
            hooks=module.written_hooks(),
            hooks_of_module=frozenset(n for n in HOOKS if overridden_hook(theirs, n) is not None),
        )
        if self.choice.refused and self.choice != before:
            message = f"prefetch={self.asked!r} became {self.choice.how!r}: {self.choice.why}."
            warnings.warn(message, FastDataWarning, stacklevel=3)

    @property
    def batches_ahead(self) -> int:
        """Batches that are on the device beside the one that is trained on, at most."""
        return 0 if self.choice.how == "off" else BATCHES_AHEAD

    def drop_ahead(self) -> bool:
        """Let go of batches that were sent ahead, and send no more; return whether there was one.

        Each is made anew when it is its turn.
        """
        return sum(lane.drop() for lane in self._lanes.values() if lane is not None) > 0

    def transfer(
        self,
        batch: Batch,
        move_batch: Callable[[Batch], Batch],
        device: torch.device,
        transforms: StageTransforms,
    ) -> Batch:
        """Return a batch, or several combined, on the device, for use on the current stream."""
        lane = self._lanes.get(device) if self.choice.how == "stream" else None
        if lane is None:
            return transfer(batch, move_batch, device)

        def work(batch: Batch) -> Batch:
            return carry_out_draws(transfer(batch, move_batch, device), transforms)

        return lane.send(batch, work).land()

    def look_ahead(
        self, trainer: Trainer | None, stage: Stage, transforms: StageTransforms
    ) -> Callable[[Iterator[Batch]], Iterator[Batch]] | None:
        """Return what sends the batches of a loader one ahead; None if they are not."""
        if trainer is None or self.choice.how != "lookahead":
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
        """Return how batches are moved, and why."""
        return f"prefetch  {self.choice.how}  {self.choice.why}"


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

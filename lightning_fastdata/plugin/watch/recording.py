"""One run of a trainer, measured: which marks belong to which stage, and what is logged when."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.insight.measure.clock import CudaClock
from lightning_fastdata.insight.measure.stage_meter import StageMeter
from lightning_fastdata.insight.measure.stage_stamps import StageStamps
from lightning_fastdata.plugin.seams.sources import flattened, keyed
from lightning_fastdata.plugin.watch.host_metrics import HostMeter
from lightning_fastdata.plugin.watch.wall_watch import HOOKS_OF, WallWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from lightning.pytorch import Trainer

    from lightning_fastdata.plugin.seams.profiler_tee import Listener
    from lightning_fastdata.types import Stage

_STAGES_OF: Final[Mapping[str, tuple[Stage, ...]]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}
"""What a trainer's method does -> the stages of it, the one that it is for first."""
_PREFIXES: Final[Mapping[Stage, str]] = {
    "train": "data",
    "val": "data_val",
    "test": "data_test",
    "predict": "data_predict",
}
"""Stage -> how the names of its scalars begin."""
_LOADERS: Final[Mapping[Stage, str]] = {
    "train": "train_dataloader",
    "val": "val_dataloaders",
    "test": "test_dataloaders",
    "predict": "predict_dataloaders",
}
"""Stage -> the trainer's attribute with its loaders."""


class Recording:
    """Turns the announcements of Lightning's profiler into marks on the right timeline.

    Args:
        trainer: The trainer that is measured.
        ours: The callback that measures it, whose own time is told apart.
        method: Of the trainer: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

    Attributes:
        method: As given.
        main: Measures what the method is for: the training of a fit, else the only stage.
        evaluated: Measures what is evaluated: the validation of a fit, else the only stage.
        augments: Whether something runs in ``on_after_batch_transfer`` in a stage; if not, no
            augmentation is measured, so that none is reported as 0.
        in_transfer: Whether the trainer is moving a batch of one of its loaders.
        optimizer_stepped: Whether the open batch has ended in an optimizer step.
        batches_stepped: Batches that ended in one; with manual optimization, all batches.
        host: What the run takes of its machine; None before it begins.
        wall: Where the wall time of the run goes.
    """

    def __init__(self, trainer: Trainer, ours: object = None, method: str = "fit") -> None:
        self._trainer = trainer
        self.method = method
        self.wall = WallWatch(trainer, ours, method)
        self.augments: Callable[[Stage], bool] = lambda _stage: False
        self.in_transfer = False
        self._fetching: StageMeter | None = None
        self._moving: StageMeter | None = None
        self.optimizer_stepped = False
        self.batches_stepped = 0
        device = trainer.strategy.root_device
        meters = [
            _stage_meter(stage, device, StageStamps(_PREFIXES[stage]))
            for stage in _STAGES_OF[method]
        ]
        self.main, self.evaluated = meters[0], meters[-1]
        self._shown: Any = None
        self.host: HostMeter | None = None

    @property
    def meters(self) -> tuple[StageMeter, ...]:
        """Those of all stages of the method, the one that it is for first."""
        return (self.main, self.evaluated) if self.fits else (self.main,)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What the trainer's method does, what it is for first."""
        return _STAGES_OF[self.method]

    @property
    def fits(self) -> bool:
        """Whether this is a fit, so that validation is not what the run is for."""
        return self.method == "fit"

    def loaders(self) -> Any:
        """Return the loaders of the main stage, in whatever form they come; None: there are none.

        A trainer that has been fitted calls the validation loaders of the fit its own also in
        ``validate``, so that the loaders that were shown are preferred there.
        """
        if self._shown is not None and not self.fits:
            return self._shown
        return getattr(self._trainer, _LOADERS[self.main.stage])

    def watch(self, stage: Stage, loaders: Any) -> None:
        """Take stamps of what the trainer's loaders of a stage deliver."""
        stamps = (self.main if stage == self.main.stage else self.evaluated).stamps
        several = keyed(loaders)
        if several:
            stamps.watch([loader for _, loader in several], [key for key, _ in several])
        else:
            stamps.watch(flattened(loaders))
        if stage == self.main.stage:
            self._shown = loaders
            self.wall.loaders_came()

    def restart(self) -> None:
        """Forget everything measured so far: what tuners ran before the training began."""
        device = self._trainer.strategy.root_device
        for meter in self.meters:
            meter.stamps.restart()
        meters = [_stage_meter(meter.stage, device, meter.stamps) for meter in self.meters]
        self.main, self.evaluated = meters[0], meters[-1]
        # Loaders that were made anew behind our back, and those that no source could be asked for.
        self.watch(self.main.stage, self.loaders())
        if self.fits:
            self.wall.restart()
            self.watch("val", self._trainer.val_dataloaders)
        self.batches_stepped = 0
        self.host = HostMeter(device, busy_share=self.main.stamps.busy_share)

    def stop(self) -> None:
        """Take no more stamps."""
        for meter in self.meters:
            meter.stamps.stop()

    def metrics(self, *, memory: bool = True) -> dict[str, float]:
        """Return what is to be logged of the main stage since the last call.

        Args:
            memory: Add up the memory of this process and its workers, now and then.
        """
        host = {} if self.host is None else self.host.metrics(memory=memory)
        return {**self.main.metrics(), **host}

    def notes(self) -> tuple[str, ...]:
        """Return what has to be said about stamps that could not be taken."""
        meters = [meter for meter in self.meters if meter.timeline.history.steps]
        some = tuple(
            f"Why batches of {label} were late is not known for {m.stage}: {why}."
            for m in meters
            for label, why in m.stamps.missing_loaders().items()
        )
        missing = {m.stage: why for m in meters if (why := m.stamps.missing()) is not None}
        if not missing:
            return some
        names, reasons = " and ".join(missing), "; ".join(dict.fromkeys(missing.values()))
        return (f"Why batches were late is not known for {names}: {reasons}.", *some)

    def listener(self, action: str) -> Listener | None:
        """Return what to call when Lightning announces an action; None: nothing."""
        # The last word is the part that does not depend on the names of classes.
        inner = self._of_steps.get(action.rpartition(".")[2])
        outer = self.wall.listener(action)
        if inner is None or outer is None:
            return inner or outer
        return _both(outer[0], inner[0]), _both(inner[1], outer[1])

    @cached_property
    def _of_steps(self) -> Mapping[str, Listener]:
        step = "run_training_batch" if self.fits else f"{HOOKS_OF[self.method]}_step"
        return {
            "train_dataloader_next": (self._train_wait_began, self._train_wait_ended),
            step: (self._work_began, self._work_ended),
            f"{self.evaluated.stage}_next": (self._next_began, self._next_ended),
            "batch_to_device": (self._transfer_began, self._transfer_ended),
            "on_after_batch_transfer": (self._augment_began, self._augment_ended),
        }

    def _train_wait_began(self) -> None:
        self._fetching = self.main
        self.main.began()
        self.main.timeline.wait_began()

    def _train_wait_ended(self) -> None:
        self.main.timeline.wait_ended()

    def _work_began(self) -> None:
        # Callbacks that are called at the start of a batch are no part of the step either.
        self.main.timeline.work_began()

    def _work_ended(self) -> None:
        # Callbacks that are called before ours at the end of a batch are no part of the step.
        self.main.timeline.work_ended()

    def _next_began(self) -> None:
        # The sanity check fetches under the same name; it is not measured.
        self._fetching = None if self._trainer.sanity_checking else self.evaluated
        if self._fetching is not None:
            self._fetching.began()
            self._fetching.timeline.wait_began()

    def _next_ended(self) -> None:
        if self._fetching is not None:
            self._fetching.timeline.wait_ended()

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


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call


def _stage_meter(stage: Stage, device: torch.device, stamps: StageStamps) -> StageMeter:
    clock = CudaClock() if device.type == "cuda" else None
    updates = 0 if stage == "train" else None
    return StageMeter(stage, device.type, stamps, device=clock, updates=updates)

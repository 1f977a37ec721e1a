"""Where a data module has the pixels of its pipelines computed: asked for, or measured and kept.

``augment_on="auto"`` decides for each stage when its first loader is made, before the training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.plugin.placing.costs import PlaceTask, device_type, read_place_costs
from lightning_fastdata.plugin.placing.decision import PlaceChoice, PlaceCosts, choose_place

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.augment import StageTransform
    from lightning_fastdata.planning.loader_plan import LoaderPlan
    from lightning_fastdata.plugin.placing.stage_transforms import StagePlan, StageTransforms
    from lightning_fastdata.types import PixelPlace, Stage

AugmentOn: TypeAlias = Literal["auto", "gpu", "cpu"]
"""What a user sets."""

_LOG = logging.getLogger(__name__)
_ON_CPU: Final = (
    "the trainer has no accelerator, so that torch computes these pixels on the CPU in the "
    "training process, which takes many times as long as Albumentations in the workers"
)


class Placing:
    """Decides where pixels are computed, for one data module, as the user ``asked``.

    ``accelerator`` returns the device type of a trainer, ``costs`` measures what a pipeline costs.
    """

    def __init__(
        self,
        asked: AugmentOn,
        *,
        accelerator: Callable[[Trainer | None], str] = device_type,
        costs: Callable[..., PlaceCosts] = read_place_costs,
    ) -> None:
        self.asked: AugmentOn = asked
        self._accelerator = accelerator
        self._read_costs = costs
        self._held: dict[Stage, tuple[int, PlaceChoice]] = {}
        """What was decided for each stage of a run, and for which batch size."""
        self._said = False

    def __getstate__(self) -> dict[str, Any]:
        # Decisions belong to one run in one process.
        return {**vars(self), "_held": {}}

    def attached(self) -> None:
        """Forget the decisions of the run before: a trainer begins another one."""
        self._held = {}
        self._said = False

    def choice(self, stage: Stage) -> PlaceChoice | None:
        """Return what was decided for a stage in this run, and why; None: nothing yet."""
        held = self._held.get(stage)
        return None if held is None else held[1]

    def may_use_device(self, stage: Stage, trainer: Trainer | None) -> bool:
        """Return whether the device may have to finish batches of a stage."""
        if trainer is None or self.asked == "cpu":
            return False
        if self.asked == "gpu":
            return True
        choice = self.choice(stage)
        if choice is None:
            return self._accelerator(trainer) != "cpu"
        return choice.place == "device"

    def settings(
        self,
        of: StagePlan,
        transform: StageTransform | None,
        transforms: StageTransforms,
        plan: LoaderPlan,
    ) -> dict[str, Any]:
        """Decide for a loader that is to be made, and return what it takes for it.

        ``transform`` is what starts in its workers, as it suits the dataset.
        """
        stage, trainer = of.spec.stage, of.trainer
        if transform is None or trainer is None or self.asked != "auto":
            on_device = transform is not None and self.may_use_device(stage, trainer)
            if on_device and trainer is not None and self._accelerator(trainer) == "cpu":
                if not self._said:
                    _LOG.info('augment_on="gpu", %s: %s.', stage, _ON_CPU)
                self._said = True
        else:
            on_device = self._decided(of, transform, trainer, plan).place == "device"
        # Without a trainer there is no hook to finish the batches, so they come finished.
        later = transforms.run_on_device(stage, pipeline=self.may_use_device(stage, trainer))
        staged = stage if trainer is not None and later else None
        return {"transform": transform, "on_device": on_device, "staged": staged}

    def _decided(
        self, of: StagePlan, transform: StageTransform, trainer: Trainer, plan: LoaderPlan
    ) -> PlaceChoice:
        """Return what was decided for a stage, or decide now, as for batches of another size."""
        task = PlaceTask(
            of=of,
            transform=transform,
            device=trainer.strategy.root_device,
            workers=plan.num_workers,
            cpus=read_cpu_limit(local_ranks=trainer.num_devices).usable_cpus,
            start_method=plan.multiprocessing_context,
        )
        stage = of.spec.stage
        held = self._held.get(stage)
        if held is not None and held[0] == task.batch_size:
            return held[1]
        costs = self._read_costs(task, accelerator=self._accelerator(trainer) != "cpu")
        choice = choose_place(costs)
        self._held[stage] = task.batch_size, choice
        rank = f"rank {trainer.global_rank}, " if trainer.world_size > 1 else ""
        where = "on the device" if choice.place == "device" else "all in the workers"
        _LOG.info('augment_on="auto", %s%s: %s: %s.', rank, stage, where, choice.reason)
        return choice

    def where(self, stage: Stage, trainer: Trainer | None) -> tuple[PixelPlace, str]:
        """Return where the pixels of a stage are, or will be, computed, and why."""
        if self.asked == "cpu":
            return "workers", 'augment_on="cpu"'
        if self.asked == "gpu":
            on_cpu = trainer is not None and self._accelerator(trainer) == "cpu"
            return "device", 'augment_on="gpu"' + (f"; {_ON_CPU}" if on_cpu else "")
        choice = self.choice(stage)
        if choice is not None:
            return choice.place, choice.reason
        if self._accelerator(trainer) == "cpu":
            return "workers", "there is no accelerator to run on"
        return "device", "unless a trial before the training finds the workers to be faster"

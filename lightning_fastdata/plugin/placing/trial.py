"""Where a data module has the pixels of its pipelines computed: asked for, or measured and kept.

``augment_on="auto"`` decides for each stage when its loader is made. For training it decides again
at the border of each epoch, from the steps that were measured. The border is where a loader asks
for the number of its epoch. No sample of that epoch has begun by then, unless the loader's workers
stay and fetch the first batches of an epoch while the one before ends: with those a change takes
effect one epoch later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from lightning_fastdata.augment import PlaceSwitch
from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.plugin.placing.costs import PlaceTask, device_type, read_place_costs
from lightning_fastdata.plugin.placing.decision import (
    MOST_CHANGES,
    PlaceChoice,
    PlaceCosts,
    StepSeen,
    choose_place,
)
from lightning_fastdata.plugin.placing.stage_transforms import carry_out_draws, finish
from lightning_fastdata.plugin.placing.step_watch import StepWatch

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer

    from lightning_fastdata.augment import StageTransform
    from lightning_fastdata.planning.loader_plan import LoaderPlan
    from lightning_fastdata.plugin.placing.stage_transforms import (
        Drawing,
        StagePlan,
        StageTransforms,
    )
    from lightning_fastdata.types import Batch, PixelPlace, Stage

AugmentOn: TypeAlias = Literal["auto", "gpu", "cpu"]
"""What a user sets."""
Ahead: TypeAlias = Callable[[Iterator["Batch"]], Iterator["Batch"]]

_LOG = logging.getLogger(__name__)
_ON_CPU: Final = (
    "the trainer has no accelerator, so that torch computes these pixels on the CPU in the "
    "training process, which takes many times as long as Albumentations in the workers"
)


@dataclass(slots=True, eq=False)
class _Held:
    """What was decided for one stage of a run."""

    costs: PlaceCosts
    choice: PlaceChoice
    place: PixelPlace  # of the epochs that are to come
    name: str  # of the loader that was measured
    switch: PlaceSwitch | None = None  # of its newest loader, if that can be changed
    watch: StepWatch | None = None  # of its steps, while a change is possible
    watched: PixelPlace | None = None  # where the pixels of the watched steps are
    seen: dict[PixelPlace, StepSeen] = field(default_factory=dict)  # the newest steps by place
    changes: int = 0
    others: set[str] = field(default_factory=set)  # other loaders of the stage


class Placing:
    """Decides where pixels are computed, for one data module, as the user ``asked``.

    ``accelerator`` returns the device type of a trainer, ``costs`` measures what a pipeline costs,
    ``watch`` makes what measures the steps on a device.
    """

    def __init__(
        self,
        asked: AugmentOn,
        *,
        accelerator: Callable[[Trainer | None], str] = device_type,
        costs: Callable[..., PlaceCosts] = read_place_costs,
        watch: Callable[[torch.device], StepWatch] = StepWatch,
    ) -> None:
        self.asked: AugmentOn = asked
        self._accelerator = accelerator
        self._read_costs = costs
        self._new_watch = watch
        self._held: dict[Stage, _Held] = {}
        self._known_step_ms: float | None = None
        self._said = False

    def __getstate__(self) -> dict[str, Any]:
        # Decisions and their measurements belong to one run in one process.
        return {**vars(self), "_held": {}}

    def attached(self) -> None:
        """Forget the decisions of the run before: a trainer begins another one."""
        self._held = {}
        self._said = False

    def choice(self, stage: Stage) -> PlaceChoice | None:
        """Return what was decided for a stage in this run, and why; None: nothing yet."""
        held = self._held.get(stage)
        return None if held is None else held.choice

    def may_use_device(self, stage: Stage, trainer: Trainer | None) -> bool:
        """Return whether the device may have to finish batches of a stage."""
        if trainer is None or self.asked == "cpu":
            return False
        if self.asked == "gpu":
            return True
        held = self._held.get(stage)
        if held is None:
            return self._accelerator(trainer) != "cpu"
        return held.place == "device" or held.switch is not None

    def settings(
        self,
        of: StagePlan,
        transform: StageTransform | None,
        transforms: StageTransforms,
        *,
        settings: Mapping[str, Any],
        plan: LoaderPlan,
    ) -> dict[str, Any]:
        """Decide for a loader that is to be made, and return what it takes for it.

        ``transform`` is what starts in its workers, as it suits the dataset. Of the loader's other
        ``settings``, ``epoch`` and ``ahead`` are replaced.
        """
        stage, trainer = of.spec.stage, of.trainer
        if transform is None or trainer is None or self.asked != "auto":
            on_device = transform is not None and self.may_use_device(stage, trainer)
            if on_device and trainer is not None and self._accelerator(trainer) == "cpu":
                if not self._said:
                    _LOG.info('augment_on="gpu", %s: %s.', stage, _ON_CPU)
                self._said = True
            made: dict[str, Any] = {"transform": transform, "on_device": on_device}
        else:
            made = self._measured_settings(of, transform, trainer, settings, plan)
        # Without a trainer there is no hook to finish the batches, so they come finished.
        later = transforms.run_on_device(stage, pipeline=self.may_use_device(stage, trainer))
        return {**made, "staged": stage if trainer is not None and later else None}

    def _measured_settings(
        self,
        of: StagePlan,
        transform: StageTransform,
        trainer: Trainer,
        settings: Mapping[str, Any],
        plan: LoaderPlan,
    ) -> dict[str, Any]:
        stage, device = of.spec.stage, trainer.strategy.root_device
        task = PlaceTask(
            of=of,
            transform=transform,
            device=device,
            workers=plan.num_workers,
            cpus=read_cpu_limit(local_ranks=trainer.num_devices).usable_cpus,
            start_method=plan.multiprocessing_context,
        )
        held = self._decide(task, of.spec.name, trainer)
        weighed = held.costs.sample is not None and held.costs.device_ms is not None
        # A switch is in memory that workers elsewhere do not share.
        if stage != "train" or not weighed or KINDS[plan.executor].elsewhere:
            return {"transform": transform, "on_device": held.place == "device"}
        if held.watch is None:
            held.watch = self._new_watch(device)
        held.switch = PlaceSwitch(held.place)
        return {
            "transform": held.switch.on(transform),
            "on_device": True,
            "epoch": partial(self._border, stage, settings["epoch"], trainer),
            "ahead": partial(_watched, held.watch, settings["ahead"]),
        }

    def _decide(self, task: PlaceTask, name: str, trainer: Trainer) -> _Held:
        stage = task.of.spec.stage
        held = self._held.get(stage)
        resized = held is not None and held.costs.batch_size != task.batch_size
        if held is None or (resized and not held.changes):
            costs = self._read_costs(task, accelerator=self._accelerator(trainer) != "cpu")
            choice = choose_place(costs, known_step_ms=self._known_step_ms)
            held = _Held(costs=costs, choice=choice, place=choice.place, name=name)
            self._held[stage] = held
            self._tell(stage, choice, trainer)
        elif name != held.name:
            held.others.add(name)
        return held

    def finish(
        self, batch: Batch, transforms: StageTransforms, drawing: Drawing
    ) -> tuple[Batch, bool]:
        """Run what a batch waits for, and return it plain, with whether anything ran."""
        held = self._held.get("train")
        watch = None if held is None else held.watch
        ours = isinstance(batch, StagedBatch) and batch.stage == "train"
        if watch is None or not (ours and batch.draws is not None and watch.left > 0):
            return finish(batch, transforms, drawing)
        # Other transforms of the stage run on the device wherever the pipeline's pixels are.
        watch.timeline.augment_began()
        batch = carry_out_draws(batch, transforms)
        watch.timeline.augment_ended()
        return finish(batch, transforms, drawing)

    def where(self, stage: Stage, trainer: Trainer | None) -> tuple[PixelPlace, str]:
        """Return where the pixels of a stage are, or will be, computed, and why."""
        if self.asked == "cpu":
            return "workers", 'augment_on="cpu"'
        if self.asked == "gpu":
            on_cpu = trainer is not None and self._accelerator(trainer) == "cpu"
            return "device", 'augment_on="gpu"' + (f"; {_ON_CPU}" if on_cpu else "")
        held = self._held.get(stage)
        if held is not None:
            since = ""
            if held.switch is not None and held.switch.since_epoch:
                since = f"since epoch {held.switch.since_epoch}: "
            return held.place, since + held.choice.reason
        if self._accelerator(trainer) == "cpu":
            return "workers", "there is no accelerator to run on"
        return "device", "unless a trial before the training finds the workers to be faster"

    def _border(self, stage: Stage, epoch: Callable[[], int], trainer: Trainer) -> int:
        number = epoch()
        held = self._held.get(stage)
        if held is None or held.switch is None or held.watch is None:
            return number
        self._decide_again(stage, held, number, trainer)
        place = held.switch.place(number)
        if held.watched != place:
            held.watched = place
            held.watch.restart()
        if held.changes >= MOST_CHANGES or held.others:
            held.watch.stop()
        return number

    def _decide_again(self, stage: Stage, held: _Held, epoch: int, trainer: Trainer) -> None:
        switch, watch = held.switch, held.watch
        if switch is None or watch is None or held.watched != switch.newest or held.others:
            return
        step: StepSeen | None = watch.seen(switch.newest)
        if step is None or not step.enough:
            return
        self._known_step_ms = step.step_ms
        held.seen[step.place] = step
        elsewhere = held.seen.get("workers" if step.place == "device" else "device")
        held.choice = choose_place(held.costs, step, elsewhere=elsewhere, changes=held.changes)
        watch.restart()
        if held.choice.place == held.place:
            return
        held.place = held.choice.place
        held.changes += 1
        switch.change(held.place, from_epoch=epoch)
        self._tell(stage, held.choice, trainer, f" from epoch {epoch}")

    def _tell(self, stage: Stage, choice: PlaceChoice, trainer: Trainer, since: str = "") -> None:
        rank = f"rank {trainer.global_rank}, " if trainer.world_size > 1 else ""
        where = "on the device" if choice.place == "device" else "all in the workers"
        _LOG.info('augment_on="auto", %s%s: %s%s: %s.', rank, stage, where, since, choice.reason)


def _watched(watch: StepWatch, ahead: Ahead | None, batches: Iterator[Batch]) -> Iterator[Batch]:
    return watch.batches(batches if ahead is None else ahead(batches))

"""The Albumentations pipelines of a data module: its own, and those that its datasets call."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.augment import (
    BatchTransform,
    PipelinePlace,
    SuitsSamples,
    Variant,
    device_ops,
    explain_pipelines,
    has_kernels,
    mask_dtypes,
    place_pipelines,
    registered_forms,
    variants,
)
from lightning_fastdata.planning.facts.inspection import DatasetFacts, Questions
from lightning_fastdata.planning.facts.pipeline_trial import IN_WORKERS, Trial, TriedDataset
from lightning_fastdata.plugin.placing.stage_transforms import DatasetPipeline, StagePlan
from lightning_fastdata.plugin.placing.trial import AugmentOn, Placing
from lightning_fastdata.randomness.seeds import find_composes
from lightning_fastdata.types import STAGES

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.utils.data import Dataset

    from lightning_fastdata.plugin.placing.stage_transforms import StageTransforms
    from lightning_fastdata.types import Stage

_LOG = logging.getLogger(__name__)
_FURTHER_SAMPLES: Final = 7
"""Read beside the first one to see whether all images have one size."""
_NOT_FOUND: Final = (
    "no Albumentations pipeline was found in the dataset. One that a collate_fn calls, or that is "
    "built while a sample is read, runs in the workers as it does without this package"
)


class Pipelines:
    """What runs where, of the pipelines of one data module.

    Args:
        transforms: What was registered for each stage.
        augment_on: Where the user wants pixels to be computed.
    """

    def __init__(self, transforms: StageTransforms, augment_on: AugmentOn) -> None:
        self.placing = Placing(augment_on)
        self._transforms = transforms
        self._tried: dict[tuple[Stage, str], TriedDataset] = {}
        self._warm: set[tuple[Any, ...]] = set()

    def questions(self, of: StagePlan) -> Questions:
        """Return what has to be found out about a dataset before its pipeline is known."""
        if not self.placing.may_use_device(of.stage, of.trainer):
            return Questions()
        part = self._transforms.worker_part(of.stage)
        if part is not None:
            return Questions(further=_FURTHER_SAMPLES if isinstance(part, SuitsSamples) else 0)
        if not of.composes or self._known(of) is not None:
            return Questions()
        return Questions(trial=(of.seed, of.collate_fn))

    def find(self, of: StagePlan, facts: DatasetFacts) -> DatasetPipeline:
        """Return the pipeline that runs on a dataset: the data module's, else the dataset's own.

        Args:
            of: The loader.
            facts: What was found out, as :meth:`questions` asked.
        """
        if not self.placing.may_use_device(of.stage, of.trainer):
            return DatasetPipeline(self._transforms.worker_part(of.stage), None)
        samples = () if facts.sample is None else (facts.sample, *facts.further)
        part = self._transforms.worker_part_for(of.stage, samples)
        if part is not None:
            return DatasetPipeline(part, None)
        return DatasetPipeline(None, self._trial(of, facts))

    def warm_up(self, found: DatasetPipeline, sample: Any, trainer: Trainer | None) -> None:
        """Have the kernels that a pipeline may need compiled now, on a CUDA device.

        Once for each pipeline. Triton keeps them on disk, so that the next run finds them there.

        Args:
            found: The pipeline.
            sample: Of the dataset; None if none could be read.
            trainer: The trainer.
        """
        if trainer is None or not has_kernels(trainer.strategy.root_device):
            return
        try:
            for variant in _variants(found, sample):
                form = variant.run, variant.batch.dtype, variant.out_dtype, variant.channels_last
                if form not in self._warm:
                    self._warm.add(form)
                    variant.launch(trainer.strategy.root_device)
        except Exception as error:  # they are compiled when a batch needs them
            _LOG.info("Kernels were not compiled beforehand: %s: %s", type(error).__name__, error)

    def _known(self, of: StagePlan) -> TriedDataset | None:
        """Return the trial of a loader that was made before, if it still holds."""
        known = self._tried.get((of.stage, of.name))
        if known is None or not known.holds_for(of.dataset, of.rests_on):
            return None
        return known

    def _trial(self, of: StagePlan, facts: DatasetFacts) -> Trial | None:
        """Return the trial of a dataset; None if no pipeline of it leaves something over.

        Loaders are made again for each epoch or each run; what was found out still holds then.
        """
        known = self._known(of)
        if known is None:
            registered = registered_forms(*of.composes)
            places = place_pipelines(of.composes, registered)
            if not places:
                self._tried.pop((of.stage, of.name), None)
                if self._misses_pipelines():
                    _LOG.info('augment_on="gpu", %s: %s.', of.name, _NOT_FOUND)
                return None
            if facts.trial is None:
                trial = Trial(places, registered, (), facts.trial_failed or "it was not tried")
            else:
                trial = facts.trial._replace(places=places, registered=registered)
            if trial.defers and of.against is not None:
                trial = trial.refused(of.against)
            before = self._tried.get((of.stage, of.name))
            if before is None or before.trial.why != trial.why:
                _LOG.info("%s: its own pipeline: %s", of.name, trial.explain().splitlines()[0])
            known = TriedDataset(trial, of.dataset, of.rests_on)
            self._tried[of.stage, of.name] = known
        return known.trial if known.trial.defers else None

    def run_on_device(self, stage: Stage, trainer: Trainer | None) -> bool:
        """Return whether anything of a stage runs on the device, as far as it is known."""
        may = self.placing.may_use_device(stage, trainer)
        if may and any(trial.defers for trial in self._trials_of(stage)):
            return True
        return self._transforms.run_on_device(stage, pipeline=may)

    def settled(self, stage: Stage) -> bool:
        """Return whether it was found out where the pixels of a stage are best computed.

        They were weighed, or those of a dataset's own pipelines cannot be left to the device.
        """
        if self.placing.choice(stage) is not None:
            return True
        return any(not trial.defers for trial in self._trials_of(stage))

    def _trials_of(self, stage: Stage) -> list[Trial]:
        return [tried.trial for (of, _), tried in self._tried.items() if of == stage]

    def explain(
        self, trainer: Trainer | None, datasets: Mapping[tuple[Stage, str], Dataset[Any]]
    ) -> list[str]:
        """Return where each operation of each pipeline runs, and why, as text.

        Args:
            trainer: The trainer, or None.
            datasets: Of each loader, by its stage and the name under which the user knows it.
        """
        parts = self._transforms.explain(lambda stage: self.placing.where(stage, trainer))
        for stage, name in dict.fromkeys([*self._tried, *datasets]):
            if self._transforms.worker_part(stage) is None:
                told = self._explain_own(stage, name, datasets.get((stage, name)), trainer)
                parts += [] if told is None else [f"pipeline of {name}\n{told}"]
        return parts

    def _explain_own(
        self, stage: Stage, name: str, dataset: Dataset[Any] | None, trainer: Trainer | None
    ) -> str | None:
        """Return where the pipelines that a dataset calls itself run; None if it has none."""
        place, why = self.placing.where(stage, trainer)
        tried = self._tried.get((stage, name))
        trial = None if tried is None else tried.trial
        if trial is not None and not trial.defers:
            return trial.explain()
        places = _placed(dataset) if trial is None else trial.places
        if not places:
            return _NOT_FOUND if self._misses_pipelines() else None
        if place == "workers":
            return f"{IN_WORKERS}: {why}"
        if trial is not None:
            return f"{why}\n{trial.explain()}"
        return (
            f"{why}; the dataset is tried out when its loader is made\n{explain_pipelines(places)}"
        )

    def _misses_pipelines(self) -> bool:
        """Whether the user asks for a device, and has pipelines that cannot be seen, if any."""
        anywhere = any(self._transforms.worker_part(stage) is not None for stage in STAGES)
        return self.placing.asked == "gpu" and not anywhere


def _variants(found: DatasetPipeline, sample: Any) -> Iterator[Variant]:
    """Yield runs that need every kernel which batches of a pipeline may need."""
    masks = mask_dtypes(sample)
    transform = found.transform
    if isinstance(transform, BatchTransform):
        form = transform.form
        yield from variants(
            transform.compose,
            transform.plan,
            transform.ops,
            masks=masks,
            out_dtype=form.dtype,
            channels_last=form.channels_last,
        )
    if found.own is not None:
        ops = device_ops(None, found.own.registered)
        for place in found.own.places:
            if place.why_not is None:
                yield from variants(place.compose, place.plan, ops, masks=masks)


def _placed(dataset: Dataset[Any] | None) -> tuple[PipelinePlace, ...]:
    composes = find_composes(dataset)
    return place_pipelines(composes, registered_forms(*composes))

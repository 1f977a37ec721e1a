"""The Albumentations pipelines of a data module: its own, and those that its datasets call."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.augment import DatasetPipelines
from lightning_fastdata.planning.facts.inspection import DatasetFacts, Questions
from lightning_fastdata.planning.facts.pipeline_trial import IN_WORKERS, Trial
from lightning_fastdata.plugin.placing.stage_transforms import DatasetPipeline, StagePlan
from lightning_fastdata.plugin.placing.trial import AugmentOn, Placing
from lightning_fastdata.randomness.search import find_composes
from lightning_fastdata.tree import held_by
from lightning_fastdata.types import STAGES

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.utils.data import Dataset

    from lightning_fastdata.plugin.placing.stage_transforms import StageTransforms
    from lightning_fastdata.types import Stage

_LOG = logging.getLogger(__name__)
_FURTHER_SAMPLES: Final = 7  # read beside the first one to see whether all images have one size
_NOT_FOUND: Final = (
    "no Albumentations pipeline was found in the dataset. One that a collate_fn calls, or that is "
    "built while a sample is read, runs in the workers as it does without this package"
)
_DRAWN: Final = frozenset({"params", "replay_params", "applied_in_replay", "seed"})
_NESTED: Final = 3  # levels of lists and dicts in the settings of transforms


class _KnownTrial:
    """The outcome of a trial, for as long as it is known to hold; holds no dataset alive."""

    def __init__(self, trial: Trial, of: StagePlan) -> None:
        self.trial = trial
        self._dataset: weakref.ref[Dataset[Any]] | None = None
        with contextlib.suppress(TypeError):  # it has slots
            self._dataset = weakref.ref(of.spec.dataset)
        self._rests_on: tuple[object, ...] = _rests_on(of)

    def __getstate__(self) -> dict[str, object]:
        # In another process the dataset is another one; the outcome is shown there, but not used.
        return {"trial": self.trial, "_dataset": None, "_rests_on": ()}

    def holds_for(self, of: StagePlan) -> bool:
        """Return whether a trial would find the same: nothing has changed that it rests on."""
        same = self._dataset is not None and self._dataset() is of.spec.dataset
        return same and self._rests_on == _rests_on(of)


def _rests_on(of: StagePlan) -> tuple[object, ...]:
    """Return what the outcome of a trial rests on, to be compared with ``==``.

    The settings of pipelines, other pipelines, and what a dataset has of numbers, texts and
    switches. A dataset that counts something is tried again.
    """
    own, dataset = DatasetPipelines(of.spec.pipelines), _settings(of.spec.dataset)
    nodes = [(node, _settings(node, _NESTED)) for node in own.nodes]
    return of.against, of.seed, of.spec.collate_fn, dataset, nodes, own.registered


def _settings(owner: object, depth: int = 0) -> list[str]:
    """Return the plain attributes of a transform or dataset; what is drawn is no setting."""
    return [
        f"{name}={value!r}"
        for name, value in held_by(owner).items()
        if _is_plain(value, depth) and name not in _DRAWN and not name.startswith("_")
    ]


def _is_plain(value: object, depth: int) -> bool:
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return depth > 0 and all(_is_plain(item, depth - 1) for item in items)
    return isinstance(value, bool | int | float | str | Enum | None)


class Pipelines:
    """What runs where, of the pipelines of one data module."""

    def __init__(self, transforms: StageTransforms, augment_on: AugmentOn) -> None:
        self.placing = Placing(augment_on)
        self._transforms = transforms
        self._tried: dict[tuple[Stage, str], _KnownTrial] = {}
        self._warm: set[tuple[object, ...]] = set()

    def questions(self, of: StagePlan) -> Questions:
        """Return what has to be found out about a dataset before its pipeline is known."""
        stage = of.spec.stage
        if not self.placing.may_use_device(stage, of.trainer):
            return Questions()
        part = self._transforms.worker_part(stage)
        if part is not None:
            return Questions(further=_FURTHER_SAMPLES)
        if not of.spec.pipelines or self._known(of) is not None:
            return Questions()
        return Questions(trial=(of.seed, of.spec.collate_fn))

    def find(self, of: StagePlan, facts: DatasetFacts) -> DatasetPipeline:
        """Return the pipeline that runs on a dataset: the data module's, else the dataset's own.

        ``facts`` answer :meth:`questions`.
        """
        stage = of.spec.stage
        if not self.placing.may_use_device(stage, of.trainer):
            return DatasetPipeline(self._transforms.worker_part(stage), None)
        samples = () if facts.sample is None else (facts.sample, *facts.further)
        part = self._transforms.worker_part_for(stage, samples)
        return DatasetPipeline(part, self._trial(of, facts) if part is None else None)

    def warm_up(self, found: DatasetPipeline, sample: object, trainer: Trainer | None) -> None:
        """Have the kernels that a pipeline may need compiled now, on a CUDA device.

        Once for each pipeline. Triton keeps them on disk, so that the next run finds them there.
        ``sample`` is one of the dataset; None if none could be read.
        """
        # A dataset's own pipelines run only where the data module has none.
        pipeline = found.transform if found.own is None else found.own.pipelines
        if trainer is None or pipeline is None:
            return
        try:
            device = trainer.strategy.root_device
            for variant in pipeline.kernels(device, sample):
                if variant.form not in self._warm:
                    self._warm.add(variant.form)
                    variant.launch(device)
        except Exception as error:  # they are compiled when a batch needs them
            _LOG.info("Kernels were not compiled beforehand: %s: %s", type(error).__name__, error)

    def _known(self, of: StagePlan) -> Trial | None:
        """Return the trial of a loader that was made before, if it still holds.

        Loaders are made again for each epoch or each run.
        """
        known = self._tried.get((of.spec.stage, of.spec.name))
        return known.trial if known is not None and known.holds_for(of) else None

    def _trial(self, of: StagePlan, facts: DatasetFacts) -> Trial | None:
        """Return the trial of a dataset; None if it defers nothing to the device."""
        trial = self._known(of)
        if trial is None:
            stage_and_name, composes = (of.spec.stage, of.spec.name), of.spec.pipelines
            own = DatasetPipelines(composes)
            before = self._tried.pop(stage_and_name, None)
            if not own.places:  # found out now, for whoever is told of it later
                if self._misses_pipelines():
                    _LOG.info('augment_on="gpu", %s: %s.', of.spec.name, _NOT_FOUND)
                return None
            untried = Trial(own, (), facts.trial_failed or "it was not tried")
            trial = (facts.trial or untried)._replace(pipelines=own)
            if trial.defers and of.against is not None:
                trial = trial.refused(of.against)
            if before is None or before.trial.why != trial.why:
                first = trial.explain().splitlines()[0]
                _LOG.info("%s: its own pipeline: %s", of.spec.name, first)
            self._tried[stage_and_name] = _KnownTrial(trial, of)
        return trial if trial.defers else None

    def run_on_device(self, stage: Stage, trainer: Trainer | None) -> bool:
        """Return whether anything of a stage is known to run on the device."""
        may = self.placing.may_use_device(stage, trainer)
        if may and any(trial.defers for trial in self._trials_of(stage)):
            return True
        return self._transforms.run_on_device(stage, pipeline=may)

    def settled(self, stage: Stage) -> bool:
        """Return whether it was found out where the pixels of a stage are best computed.

        They were weighed, or those of a dataset's own pipelines cannot be deferred to the device.
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

        ``datasets`` are those of each loader, by its stage and the name that the user knows.
        """
        parts = self._transforms.explain(lambda stage: self.placing.where(stage, trainer))
        for stage, name in dict.fromkeys([*self._tried, *datasets]):
            if self._transforms.worker_part(stage) is None:
                text = self._explain_own(stage, name, datasets.get((stage, name)), trainer)
                parts += [] if text is None else [f"pipeline of {name}\n{text}"]
        return parts

    def _explain_own(
        self, stage: Stage, name: str, dataset: Dataset[Any] | None, trainer: Trainer | None
    ) -> str | None:
        """Return where the pipelines that a dataset calls itself run; None if it has none."""
        place, why = self.placing.where(stage, trainer)
        known = self._tried.get((stage, name))
        if known is not None and not known.trial.defers:
            return known.trial.explain()
        own = DatasetPipelines(find_composes(dataset)) if known is None else known.trial.pipelines
        if not own.places:
            return _NOT_FOUND if self._misses_pipelines() else None
        if place == "workers":
            return f"{IN_WORKERS}: {why}"
        if known is not None:
            return f"{why}\n{known.trial.explain()}"
        untried = "the dataset is tried out when its loader is made"
        return f"{why}; {untried}\n{own.explain()}"

    def _misses_pipelines(self) -> bool:
        """Whether the user asks for a device, and has pipelines that cannot be seen, if any."""
        anywhere = any(self._transforms.worker_part(stage) is not None for stage in STAGES)
        return self.placing.asked == "gpu" and not anywhere

"""The loaders of a data module: what each rests on, how it was planned, and its construction."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_fastdata.errors import BatchError, DatasetError, FastDataWarning
from lightning_fastdata.planning.facts.inspection import (
    DatasetFacts,
    Questions,
    inspect_dataset,
    refuse_empty,
)
from lightning_fastdata.planning.loader_plan import LoaderSpec
from lightning_fastdata.planning.options import check_dataset
from lightning_fastdata.planning.plan_for import plan_for
from lightning_fastdata.plugin.data.arguments import (
    options_from,
    options_of,
    shuffles,
    take_over_hyperparameters,
    warn_of_lost_batch_size,
)
from lightning_fastdata.plugin.data.datasets import (
    DATASET_METHOD,
    in_form_of,
    is_missing,
    named,
    refuse_loaders,
    taken_apart,
)
from lightning_fastdata.plugin.data.loaders import build_loader, settle_sharing, sharing_ranks
from lightning_fastdata.plugin.placing.costs import ReadingProcesses
from lightning_fastdata.plugin.placing.stage_transforms import StagePlan
from lightning_fastdata.plugin.seams.hooks import hook_against_device
from lightning_fastdata.plugin.seams.trainer import (
    device_type,
    first_epoch,
    running_stage,
    training_epoch,
)
from lightning_fastdata.randomness.seeds import find_composes
from lightning_fastdata.types import STAGES

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.planning.loader_plan import LoaderPlan
    from lightning_fastdata.planning.options import LoaderOptions
    from lightning_fastdata.plugin.contracts import DataModule
    from lightning_fastdata.plugin.placing.pipelines import Pipelines
    from lightning_fastdata.plugin.placing.stage_transforms import StageTransforms
    from lightning_fastdata.plugin.placing.transfer import Prefetching
    from lightning_fastdata.types import Stage


class ModuleLoaders:
    """Builds the loaders of one data module, which is given to each method.

    Args:
        transforms: What was registered for each stage.
        pipelines: Where pipelines run.
        prefetching: How batches are moved.
    """

    def __init__(
        self, transforms: StageTransforms, pipelines: Pipelines, prefetching: Prefetching
    ) -> None:
        self.pipelines = pipelines
        self._transforms = transforms
        self._prefetching = prefetching
        self._plans: dict[str, LoaderPlan] = {}

    def of_stage(self, module: DataModule, stage: Stage) -> Any:
        """Return the loaders of a stage, in the form of its datasets.

        Raises:
            DatasetError: The stage has no dataset, and Lightning runs it.
        """
        datasets, by_name = _named_datasets(module, stage)
        if is_missing(datasets):
            if stage == "val" and running_stage(module.trainer) in (None, "train"):
                return []
            raise DatasetError(
                f"{type(module).__name__} has no {stage} dataset: "
                f"{DATASET_METHOD[stage]}() returned {datasets!r}. Override it to return a "
                "dataset."
            )
        loaders = []
        for name, item in by_name:
            options = options_of(module.options, stage)
            dataset, known = taken_apart(item, module.batch_size, options)
            loaders.append(module.make_loader(dataset, stage=stage, name=name, **known))
        formed = in_form_of(datasets, loaders)
        combine = getattr(getattr(module, DATASET_METHOD[stage]), "combine", None)
        return formed if combine is None else combine(formed)

    def make(
        self,
        module: DataModule,
        dataset: Dataset[Any],
        stage: Stage,
        name: str | None,
        overrides: Mapping[str, Any],
    ) -> FastDataLoader:
        """Return the loader for a dataset; see ``FastDataModule.make_loader``."""
        take_over_hyperparameters(module)
        warn_of_lost_batch_size(module, overrides)
        trainer, seed = module.trainer, _seed(module)
        name = name if name is not None else _name_of(module, stage)
        options, overrides = options_from(options_of(module.options, stage), overrides)
        asked = _batches_of(module, overrides)
        ordered = asked["sampler"] is not None or asked["batch_sampler"] is not None
        check_dataset(dataset, name, ordered=ordered)
        refuse_empty(dataset, name)
        spec = self._spec(dataset, name, stage, options, asked)
        of = StagePlan(
            dataset=dataset,
            composes=spec.pipelines,
            stage=stage,
            name=name,
            seed=seed,
            collate_fn=asked["collate_fn"],
            batch_size=asked["batch_size"] or 1,
            against=hook_against_device(module),
            trainer=trainer,
        )
        questions = replace(
            self.pipelines.questions(of),
            sample=trainer is not None,
            collated=asked["collate_fn"] is None and not self._transforms[stage],
            cost=spec.needs_cost,
        )
        facts = inspect_dataset(spec, questions)
        if facts.uncollatable is not None:
            raise BatchError(f"Sample 0 of {name} cannot be part of a batch. {facts.uncollatable}")
        if facts.sampled:
            for transform in self._transforms[stage]:
                transform.check_sample(facts.sample)
        found = self.pipelines.find(of, facts)
        if asked["batch_size"] is None:
            found = found._replace(own=None)  # Only batches wait for a device.
        plan = _plan(module, spec, facts, recorded=found.own is not None)
        for limit in (*facts.warnings, *plan.limits):
            warnings.warn(f"{name}: {limit}", FastDataWarning, stacklevel=3)
        self._plans[name] = plan
        self._prefetching.decide(module)
        settings: dict[str, Any] = {
            "batch_size": of.batch_size,
            "collate_fn": of.collate_fn,
            "drop_last": module.drop_last and stage == "train",
            "seed": seed,
            "epoch": partial(_training_epoch, module) if stage == "train" else first_epoch,
            "ahead": self._prefetching.look_ahead(trainer, stage, self._transforms),
        }
        settings |= self.pipelines.placing.settings(
            of,
            found,
            self._transforms,
            settings=settings,
            workers=plan.num_workers,
            processes=ReadingProcesses(plan.multiprocessing_context, options.probe),
        )
        if settings["on_device"] or settings["recording"] is not None:
            self.pipelines.warm_up(found, facts.sample, trainer)
        loader = build_loader(
            dataset,
            stage=stage,
            plan=plan,
            settings=settings,
            overrides=overrides,
            shuffle=shuffles(module.shuffle, stage),
            ranks=sharing_ranks(trainer),
        )
        self.pipelines.placing.opened(stage, loader)
        settle_sharing(loader, name, stage, trainer)
        return loader

    def explain(self, module: DataModule) -> str:
        """Return every choice that was made, its value and its reason, as text."""
        take_over_hyperparameters(module)
        datasets = {}
        for stage in STAGES:
            for name, item in _named_datasets(module, stage)[1]:
                options = options_of(module.options, stage)
                dataset, known = taken_apart(item, module.batch_size, options)
                datasets[stage, name] = dataset
                if name not in self._plans:
                    options, known = options_from(options, known)
                    asked = _batches_of(module, known)
                    spec = self._spec(dataset, name, stage, options, asked)
                    facts = inspect_dataset(spec, Questions(cost=spec.needs_cost))
                    self._plans[name] = _plan(module, spec, facts)
        parts = [f"{name}\n{plan.explain()}" for name, plan in self._plans.items()]
        parts += self.pipelines.explain(module.trainer, datasets)
        return "\n\n".join([*parts, self._prefetching.explain()])

    def _spec(
        self,
        dataset: Dataset[Any],
        name: str,
        stage: Stage,
        options: LoaderOptions,
        asked: Mapping[str, Any],
    ) -> LoaderSpec:
        return LoaderSpec(
            dataset=dataset,
            name=name,
            stage=stage,
            options=options,
            pipelines=find_composes(dataset),
            transformed=self._transforms.worker_part(stage) is not None,
            **asked,
        )


def _plan(
    module: Any, spec: LoaderSpec, facts: DatasetFacts, *, recorded: bool = False
) -> LoaderPlan:
    trainer = module.trainer
    return plan_for(
        spec,
        facts,
        accelerator=device_type(trainer),
        local_ranks=1 if trainer is None else trainer.num_devices,
        recorded=recorded,
    )


def _named_datasets(module: DataModule, stage: Stage) -> tuple[Any, list[tuple[str, Any]]]:
    try:
        datasets = getattr(module, DATASET_METHOD[stage])()
    except Exception as error:
        if module.trainer is not None:
            raise  # setup() has run; it is the user's own error
        raise DatasetError(
            f"{_name_of(module, stage)} raised {type(error).__name__}: {error}. No trainer has "
            "called prepare_data() and setup() yet: call setup('fit') yourself if the datasets are "
            "made there, or ask after fit()."
        ) from error
    refuse_loaders(datasets, _name_of(module, stage), stage)
    return datasets, named(datasets, _name_of(module, stage))


def _name_of(module: DataModule, stage: Stage) -> str:
    return f"{type(module).__name__}.{DATASET_METHOD[stage]}()"


def _batches_of(module: DataModule, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is to be known of a loader's batches and workers before it is made."""
    batch_size = overrides.get("batch_size", module.batch_size)
    if overrides.get("batch_sampler") is not None:
        batch_size = getattr(overrides["batch_sampler"], "batch_size", None) or module.batch_size
    context = overrides.get("multiprocessing_context")  # a name is among the options
    return {
        "batch_size": batch_size,
        "start_method": None if context is None else context.get_start_method(),
        "collate_fn": overrides.get("collate_fn", module.collate_fn),
        "worker_init_fn": overrides.get("worker_init_fn"),
        "sampler": overrides.get("sampler"),
        "batch_sampler": overrides.get("batch_sampler"),
    }


def _seed(module: DataModule) -> int:
    return module.seed if module.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _training_epoch(module: DataModule) -> int:
    # The trainer may be another one when the loader is opened.
    return training_epoch(module.trainer)

"""The loaders of a data module: what each rests on, how it was planned, and its construction."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_fastdata.errors import DatasetError, FastDataWarning
from lightning_fastdata.plugin.datasets import in_form_of, is_missing, named
from lightning_fastdata.plugin.hooks import hook_against_device
from lightning_fastdata.plugin.loaders import build_loader, checked_sample, plan_for
from lightning_fastdata.plugin.sharing import settle_sharing, sharing_ranks, silence_padding_warning
from lightning_fastdata.plugin.trainer_facts import (
    device_type,
    first_epoch,
    running_stage,
    training_epoch,
)
from lightning_fastdata.types import STAGES

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.loading.loader_plan import LoaderPlan
    from lightning_fastdata.plugin.pipelines import Pipelines
    from lightning_fastdata.plugin.prefetching import Prefetching
    from lightning_fastdata.plugin.stage_transforms import StageTransforms
    from lightning_fastdata.types import Stage

DATASET_METHOD = {stage: f"{stage}_dataset" for stage in STAGES}
"""What a subclass writes for each stage."""


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

    def of_stage(self, module: Any, stage: Stage) -> Any:
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
        loaders = [module.make_loader(d, stage=stage, name=name) for name, d in by_name]
        silence_padding_warning(loaders, stage, module.trainer)
        return in_form_of(datasets, loaders)

    def make(
        self,
        module: Any,
        dataset: Dataset[Any],
        stage: Stage,
        name: str | None,
        overrides: Mapping[str, Any],
    ) -> FastDataLoader:
        """Return the loader for a dataset; see ``FastDataModule.make_loader``."""
        trainer, seed = module.trainer, _seed(module)
        name = name if name is not None else _name_of(module, stage)
        sample = checked_sample(dataset, name, self._transforms[stage], read=trainer is not None)
        found = self.pipelines.find(
            dataset,
            sample,
            stage=stage,
            name=name,
            seed=seed,
            collate_fn=module.collate_fn,
            against=hook_against_device(module, getattr(trainer, "lightning_module", None)),
            trainer=trainer,
        )
        if overrides.get("batch_size", module.batch_size) is None:
            found = found._replace(own=None)  # Only batches wait for a device.
        plan = self._plan(module, dataset, stage, sample, recorded=found.own is not None)
        for limit in plan.limits:
            warnings.warn(f"{name}: {limit}", FastDataWarning, stacklevel=3)
        self._plans[name] = plan
        self._prefetching.decide(module, trainer, module.written_hooks())
        settings: dict[str, Any] = {
            "batch_size": module.batch_size,
            "collate_fn": module.collate_fn,
            "drop_last": module.drop_last and stage == "train",
            "seed": seed,
            "epoch": partial(_training_epoch, module) if stage == "train" else first_epoch,
            "ahead": self._prefetching.look_ahead(trainer, stage, self._transforms),
        }
        settings |= self.pipelines.placing.settings(
            self._transforms,
            found.transform,
            found.own,
            stage=stage,
            dataset=dataset,
            settings=settings,
            workers=plan.num_workers,
            name=name,
            trainer=trainer,
        )
        if settings["on_device"] or settings["recording"] is not None:
            self.pipelines.warm_up(found, sample, trainer)
        loader = build_loader(
            dataset,
            stage=stage,
            plan=plan,
            settings=settings,
            overrides=overrides,
            ranks=sharing_ranks(trainer),
        )
        self.pipelines.placing.opened(stage, loader)
        settle_sharing(loader, name, stage, trainer)
        return loader

    def explain(self, module: Any) -> str:
        """Return every choice that was made, its value and its reason, as text."""
        datasets = {
            (stage, name): dataset
            for stage in STAGES
            for name, dataset in _named_datasets(module, stage)[1]
        }
        for (stage, name), dataset in datasets.items():
            if name not in self._plans:
                self._plans[name] = self._plan(module, dataset, stage, None)
        parts = [f"{name}\n{plan.explain()}" for name, plan in self._plans.items()]
        parts += self.pipelines.explain(module.trainer, datasets)
        return "\n\n".join([*parts, self._prefetching.explain()])

    def _plan(
        self,
        module: Any,
        dataset: Dataset[Any],
        stage: Stage,
        sample: Any,
        *,
        recorded: bool = False,
    ) -> LoaderPlan:
        trainer = module.trainer
        return plan_for(
            dataset,
            options=module.options,
            stage=stage,
            sample=sample,
            batch_size=module.batch_size,
            accelerator=device_type(trainer),
            local_ranks=1 if trainer is None else trainer.num_devices,
            collate_fn=module.collate_fn,
            transformed=recorded or self._transforms.worker_part(stage) is not None,
        )


def _named_datasets(module: Any, stage: Stage) -> tuple[Any, list[tuple[str, Any]]]:
    datasets = getattr(module, DATASET_METHOD[stage])()
    return datasets, named(datasets, _name_of(module, stage))


def _name_of(module: Any, stage: Stage) -> str:
    return f"{type(module).__name__}.{DATASET_METHOD[stage]}()"


def _seed(module: Any) -> int:
    return module.seed if module.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _training_epoch(module: Any) -> int:
    # The trainer may be another one when the loader is opened.
    return training_epoch(module.trainer)

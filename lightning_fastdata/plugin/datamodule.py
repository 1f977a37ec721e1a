"""What FastDataModule does, for either of Lightning's two package names.

``lightning.pytorch`` and ``pytorch_lightning`` are separate class trees; this module imports
neither, and :mod:`lightning_fastdata.plugin.bindings` joins it to one of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.batch_size import GuardPolicy
from lightning_fastdata.errors import (
    DatasetError,
    FastDataWarning,
    OptionsError,
    TransformError,
)
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.loading.keyed import fetches_in_batches
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.options import LoaderOptions, LoaderPlan, plan_loader
from lightning_fastdata.loading.order import ShuffleSampler, dataset_length
from lightning_fastdata.loading.probe import probe_sample, sample_bytes
from lightning_fastdata.plugin.datasets import Constant, is_missing, is_several, named
from lightning_fastdata.plugin.guard_callback import first_rows
from lightning_fastdata.plugin.hooks import overridden_hook
from lightning_fastdata.plugin.staging import finish, inside, transfer
from lightning_fastdata.types import STAGES, Stage

if TYPE_CHECKING:
    from lightning_fastdata.augment.transform import BatchTransform
    from lightning_fastdata.types import Batch

AugmentOn = Literal["auto", "gpu", "cpu"]
_DATASET_METHOD = {stage: f"{stage}_dataset" for stage in STAGES}
_STAGE_OF_FN: dict[str, Stage] = {
    "fit": "train",
    "validate": "val",
    "test": "test",
    "predict": "predict",
}


class DataModuleHooks:
    """Builds tuned loaders for every stage from the datasets that a subclass returns.

    A subclass writes ``train_dataset()``, ``val_dataset()`` and, if wanted, ``test_dataset()`` and
    ``predict_dataset()``. Each returns a dataset; a dict or list of datasets becomes one loader per
    dataset, combined by Lightning.

    Args:
        batch_size: Samples per batch and rank, for all stages.
        options: How to load; every ``"auto"`` is chosen for this machine. See
            :class:`LoaderOptions`.
        augment: What runs on the batches: an ``albumentations.Compose``, or any callable or
            ``nn.Module`` that takes a batch and returns it. For training only, or a dict with
            stages (``train``, ``val``, ``test``, ``predict``) as keys.
        augment_on: Where the pixels of an Albumentations pipeline are computed. ``"gpu"``: on the
            trainer's device, in ``on_after_batch_transfer``; ``"cpu"``: in the workers, by
            Albumentations itself; ``"auto"``: on the device if that is a CUDA GPU. The random draws
            are the same.
        image: Where the image is in a sample: a key of a dict or a position of a tuple. Default:
            ``"image"`` in a dict, else the first element that is an image.
        mask: Where the mask is, if there is one. Default: ``"mask"`` in a dict, else none.
        guard: What to do if the batch is predicted not to fit the GPU's free memory: ``"warn"``;
            ``"accumulate"`` smaller batches to the same effective size; ``"reduce"`` the batch;
            ``"raise"`` an error; ``"off"``: predict nothing.
        collate_fn: Samples to batch. Default: torch's collation, extended to dataclasses.
        drop_last: Leave out the last training batch if it is not full.
        seed: Seed of order and augmentation. Default: the one of ``seed_everything``, else 0.

    Raises:
        OptionsError: An argument has an impossible value.
        TransformError: ``augment`` is not a transform, or names a stage that does not exist.
    """

    def __init__(
        self,
        batch_size: int = 32,
        *,
        options: LoaderOptions | None = None,
        augment: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
        augment_on: AugmentOn = "auto",
        image: str | int | None = None,
        mask: str | int | None = None,
        guard: GuardPolicy = "warn",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        seed: int | None = None,
    ) -> None:
        self._trainer: Any = None
        super().__init__()
        _check_choice("guard", guard, get_args(GuardPolicy))
        _check_choice("augment_on", augment_on, get_args(AugmentOn))
        if options is not None and not isinstance(options, LoaderOptions):
            raise OptionsError(
                f"options={options!r} is a {type(options).__name__}; pass LoaderOptions(...)."
            )
        self.batch_size = _checked_batch_size(batch_size)
        self.options = options if options is not None else LoaderOptions()
        self.augment_on: AugmentOn = augment_on
        self.guard: GuardPolicy = guard
        self.collate_fn = collate_fn
        self.drop_last = drop_last
        self.seed = seed
        self._image, self._mask = image, mask
        self._transforms: dict[Stage, list[BatchTransform]] = {stage: [] for stage in STAGES}
        self._plans: dict[str, LoaderPlan] = {}
        self.notes: list[str] = []
        for stage, transform in _augment_by_stage(augment).items():
            self.register_transform(transform, stage=stage)

    _guard_callback: type | None = None

    @property
    def trainer(self) -> Any:
        """The trainer that uses this data module; None before the first fit."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer
        # Attaching is the one moment that no subclass overrides. Lightning calls callbacks in
        # order, so that the guard decides before anything else looks at the batch size.
        guard = self._guard_callback
        if trainer is None or guard is None or self.guard == "off":
            return
        if not any(isinstance(callback, guard) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, guard())

    # -- what a subclass writes ------------------------------------------------------------------

    def train_dataset(self) -> Any:
        """Return the dataset to train on."""
        return None

    def val_dataset(self) -> Any:
        """Return the dataset to validate on; None to train without validation."""
        return None

    def test_dataset(self) -> Any:
        """Return the dataset to test on."""
        return None

    def predict_dataset(self) -> Any:
        """Return the dataset to predict."""
        return None

    # -- construction ----------------------------------------------------------------------------

    @classmethod
    def from_datasets(  # type: ignore[no-untyped-def]
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 32,
        **arguments: Any,
    ):
        """Return a data module of datasets that exist already.

        Args:
            train_dataset: Dataset to train on.
            val_dataset: Dataset to validate on.
            test_dataset: Dataset to test on.
            predict_dataset: Dataset to predict.
            batch_size: Samples per batch and rank.
            **arguments: The other arguments of the constructor.
        """
        module = cls(batch_size=batch_size, **arguments)
        given = (train_dataset, val_dataset, test_dataset, predict_dataset)
        for stage, dataset in zip(STAGES, given, strict=True):
            if dataset is not None:
                setattr(module, _DATASET_METHOD[stage], Constant(dataset))
        return module

    def register_transform(self, transform: Any, *, stage: Stage = "train") -> Callable[[], None]:
        """Add a transform that runs on every batch of a stage, on the device.

        Transforms run in the order of their registration. An Albumentations pipeline starts in the
        workers, so there can be one per stage, and it comes first.

        Args:
            transform: An ``albumentations.Compose``, or a callable or ``nn.Module`` on batches.
            stage: The stage to run in; Lightning's sanity check counts as ``val``.

        Returns:
            A function that removes the transform again.

        Raises:
            TransformError: The stage does not exist, the transform is of no known kind, or it
                would be a second Albumentations pipeline or one that comes too late.
        """
        if stage not in STAGES:
            raise TransformError(
                f"There is no stage {stage!r} to register a transform for; stages are "
                f"{', '.join(STAGES)}."
            )
        made = as_batch_transform(transform, image=self._image, mask=self._mask)
        registered = self._transforms[stage]
        if made.starts_in_worker and registered:
            raise TransformError(
                f"The Albumentations pipeline {made.name} was registered for stage {stage!r} after "
                f"{registered[0].name}. It starts in the workers and has to be the first and only "
                "one: register it first, or join two pipelines in one Compose."
            )
        registered.append(made)

        def remove() -> None:
            if made in registered:
                registered.remove(made)

        return remove

    # -- loaders -----------------------------------------------------------------------------------

    def train_dataloader(self) -> Any:
        """Return the loader of ``train_dataset()``; Lightning calls it."""
        return self._loaders("train")

    def val_dataloader(self) -> Any:
        """Return the loader of ``val_dataset()``; Lightning calls it."""
        return self._loaders("val")

    def test_dataloader(self) -> Any:
        """Return the loader of ``test_dataset()``; Lightning calls it."""
        return self._loaders("test")

    def predict_dataloader(self) -> Any:
        """Return the loader of ``predict_dataset()``; Lightning calls it."""
        return self._loaders("predict")

    def make_loader(
        self, dataset: Dataset[Any], *, stage: Stage, name: str | None = None, **overrides: Any
    ) -> FastDataLoader:
        """Return the loader for a dataset, as the ``*_dataloader`` methods build it.

        Args:
            dataset: Any map-style or iterable dataset.
            stage: Decides shuffling, transforms and the number of workers.
            name: How messages and :meth:`explain` call it. Default: the stage's dataset method.
            **overrides: Arguments of :class:`FastDataLoader` that win over the chosen ones, such as
                ``sampler`` or ``batch_size``.

        Raises:
            DatasetError: The dataset is empty, or its first sample cannot be read.
            BatchError: A transform for images was registered and the samples hold none.
        """
        name = name if name is not None else f"{type(self).__name__}.{_DATASET_METHOD[stage]}()"
        transforms = self._transforms[stage]
        sample = None
        if self._trainer is not None:
            sample = probe_sample(dataset, name)
            if sample is not None:
                for transform in transforms:
                    transform.check_sample(sample)
        elif dataset_length(dataset) == 0:
            raise DatasetError(f"{name} returned an empty {type(dataset).__name__} (length 0).")
        plan = self._plan(dataset, stage=stage, sample=sample)
        for limit in plan.limits:
            warnings.warn(f"{name}: {limit}", FastDataWarning, stacklevel=2)
        self._plans[name] = plan

        worker_part = transforms[0] if transforms and transforms[0].starts_in_worker else None
        on_device = worker_part is not None and self._augments_on_device()
        # Without a trainer there is no hook to finish the batches, so they come finished.
        staged = self._trainer is not None and (
            on_device or any(t is not worker_part for t in transforms)
        )
        arguments: dict[str, Any] = {
            "batch_size": self.batch_size,
            "collate_fn": self.collate_fn,
            "drop_last": self.drop_last and stage == "train",
            "seed": self._seed(),
            "epoch": self._train_epoch if stage == "train" else _first_epoch,
            "transform": worker_part,
            "on_device": on_device,
            "staged": stage if staged else None,
            **plan.dataloader_kwargs(),
        }
        if stage == "train" and not isinstance(dataset, IterableDataset):
            arguments["sampler"] = ShuffleSampler(cast("Any", dataset), self._seed())
        if "batch_sampler" in overrides:
            for excluded in ("batch_size", "sampler", "drop_last"):
                arguments.pop(excluded, None)
        if overrides.get("num_workers") == 0:
            for excluded in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
                arguments.pop(excluded, None)
        return FastDataLoader(dataset, **{**arguments, **overrides})

    def batch_for_guard(self, rows: int) -> Batch:
        """Return a training batch with that many rows, for the batch-size guard."""
        return first_rows(self, self._one_train_dataset(), rows)

    def rows_for_guard(self) -> int | None:
        """Return the number of training samples, or None if that is not known."""
        return dataset_length(self._one_train_dataset())

    def _one_train_dataset(self) -> Any:
        datasets = self.train_dataset()
        if isinstance(datasets, Mapping):
            return next(iter(datasets.values()))
        return datasets[0] if is_several(datasets) else datasets

    def explain(self) -> str:
        """Return every choice that was made, its value and its reason, as text.

        Loaders that were not built yet are planned for, which calls the dataset methods.
        """
        for stage in STAGES:
            datasets = getattr(self, _DATASET_METHOD[stage])()
            for name, dataset in named(
                datasets, f"{type(self).__name__}.{_DATASET_METHOD[stage]}()"
            ):
                if name not in self._plans:
                    self._plans[name] = self._plan(dataset, stage=stage, sample=None)
        parts = [f"{name}\n{plan.explain()}" for name, plan in self._plans.items()]
        for stage in STAGES:
            parts.extend(
                f"augment, {stage}\n{self._explain_transform(transform)}"
                for transform in self._transforms[stage]
            )
        return "\n\n".join(parts)

    def _explain_transform(self, transform: BatchTransform) -> str:
        if transform.starts_in_worker and not self._augments_on_device():
            why = (
                'augment_on="cpu"' if self.augment_on == "cpu" else "there is no CUDA GPU to run on"
            )
            return f"all of it in the workers, by Albumentations itself: {why}"
        return transform.explain()

    def _loaders(self, stage: Stage) -> Any:
        datasets = getattr(self, _DATASET_METHOD[stage])()
        if is_missing(datasets):
            if stage == "val" and self._running_stage() in (None, "train"):
                return []
            raise DatasetError(
                f"{type(self).__name__} has no {stage} dataset: "
                f"{_DATASET_METHOD[stage]}() returned {datasets!r}. Override it to return a "
                "dataset."
            )
        loaders = {
            name: self.make_loader(dataset, stage=stage, name=name)
            for name, dataset in named(
                datasets, f"{type(self).__name__}.{_DATASET_METHOD[stage]}()"
            )
        }
        if isinstance(datasets, Mapping):
            return dict(zip(datasets, loaders.values(), strict=True))
        if is_several(datasets):
            return list(loaders.values())
        return next(iter(loaders.values()))

    def _plan(self, dataset: Dataset[Any], *, stage: Stage, sample: Any) -> LoaderPlan:
        trainer = self._trainer
        cuda = torch.cuda.is_initialized()
        return plan_loader(
            self.options,
            stage=stage,
            cpu=read_cpu_limit(local_ranks=1 if trainer is None else trainer.num_devices),
            memory=read_host_memory(),
            accelerator=self._device_type(),
            sample_bytes=None if sample is None else sample_bytes(sample),
            batch_size=self.batch_size,
            dataset_length=dataset_length(dataset),
            iterable=isinstance(dataset, IterableDataset),
            batched_fetch=fetches_in_batches(dataset),
            cuda_initialised=cuda,
        )

    def augments_on_device(self, stage: Stage) -> bool:
        """Return whether :meth:`on_after_batch_transfer` transforms the batches of a stage."""
        transforms = self._transforms[stage]
        return any(not t.starts_in_worker or self._augments_on_device() for t in transforms)

    def _augments_on_device(self) -> bool:
        if self._trainer is None or self.augment_on == "cpu":
            return False
        return self.augment_on == "gpu" or self._device_type() == "cuda"

    def _device_type(self) -> str:
        if self._trainer is not None:
            return str(self._trainer.strategy.root_device.type)
        return "cuda" if torch.cuda.is_available() else "cpu"

    def _running_stage(self) -> Stage | None:
        state = getattr(self._trainer, "state", None)
        return None if state is None or state.fn is None else _STAGE_OF_FN[state.fn.value]

    def _seed(self) -> int:
        if self.seed is not None:
            return self.seed
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))

    def _train_epoch(self) -> int:
        return 0 if self._trainer is None else int(self._trainer.current_epoch)

    # -- Lightning's transfer hooks: the one place where batches are transformed -------------------

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Run the LightningModule's hook of this name, if it has one."""
        hook = overridden_hook(self._module(), "on_before_batch_transfer")
        return batch if hook is None else inside(batch, lambda b: hook(b, dataloader_idx))

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Move the batch and what was drawn for its transform to the device."""
        hook = overridden_hook(self._module(), "transfer_batch_to_device")
        move = super().transfer_batch_to_device if hook is None else hook  # type: ignore[misc]
        return transfer(batch, lambda b: move(b, device, dataloader_idx), device)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Run the stage's transforms, then the LightningModule's hook of this name."""
        batch, transformed = finish(batch, self._transforms)
        hook = overridden_hook(self._module(), "on_after_batch_transfer")
        if hook is not None:
            batch = hook(batch, dataloader_idx)
        if transformed:
            # Lightning converts to the precision's dtype before the transfer; uint8 images became
            # floating point only now.
            batch = self._trainer.precision_plugin.convert_input(batch)
        return batch

    def _module(self) -> Any:
        return None if self._trainer is None else self._trainer.lightning_module


def _first_epoch() -> int:
    """Evaluation draws the same augmentation each time, so that its metrics can be compared."""
    return 0


def _augment_by_stage(augment: Any) -> dict[Stage, Any]:
    if augment is None:
        return {}
    if isinstance(augment, Mapping):
        return {cast("Stage", stage): t for stage, t in augment.items() if t is not None}
    return {"train": augment}


def _check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise OptionsError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}.")


def _checked_batch_size(batch_size: object) -> int:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise OptionsError(f"batch_size={batch_size!r} has to be a whole number of at least 1.")
    return batch_size

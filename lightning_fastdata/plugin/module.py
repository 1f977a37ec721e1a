"""FastDataModule, for either of Lightning's two package names.

``lightning.pytorch`` and ``pytorch_lightning`` are separate class trees; this module imports
neither, and :mod:`lightning_fastdata.plugin.bindings` joins it to one of them.
"""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, Unpack, cast, get_args

from lightning_fastdata.caches.cached import CachedDataset, cache_of
from lightning_fastdata.caches.folders import CacheFolder, check_folder
from lightning_fastdata.device.backend import DeviceStreams, device_streams
from lightning_fastdata.device.prefetch import drawn_under
from lightning_fastdata.errors import (
    BatchError,
    DatasetError,
    FastDataWarning,
    OptionsError,
    check,
    check_among,
    check_callable,
    checked_seed,
    is_whole,
)
from lightning_fastdata.executors.columns import rows_of
from lightning_fastdata.loading.facts import (
    DatasetFacts,
    Questions,
    inspect_dataset,
    refuse_empty,
)
from lightning_fastdata.loading.loader import FastDataLoader, Training
from lightning_fastdata.loading.options import Auto, LoaderOptions, check_dataset, given_options
from lightning_fastdata.loading.plan_for import LoaderPlan, LoaderSpec, plan_for
from lightning_fastdata.loading.position import VERSION, Place, Position, of_other_rank
from lightning_fastdata.loading.source import tuner_for
from lightning_fastdata.order.epoch_order import dataset_length, first_epoch
from lightning_fastdata.order.samplers import ShuffleSampler, rows_in
from lightning_fastdata.plugin import seams
from lightning_fastdata.plugin.datasets import (
    DATASET_METHOD,
    GivenLoader,
    bad_samples_of,
    compare_ranks,
    datasets_of,
    given_loaders,
    has_order,
    in_form_of,
    is_missing,
    kept,
    named,
    ordered,
    refuse_loaders,
    settle_sharing,
    shared_out,
    taken_apart,
    told_of_pipelines,
)
from lightning_fastdata.plugin.guard.callback import GuardPolicy, attach_guard
from lightning_fastdata.plugin.placing import AugmentOn, Placing, device_type
from lightning_fastdata.plugin.transforms import (
    Prefetching,
    PrefetchName,
    StageTransforms,
    convert_staged,
    finish,
    inside,
    is_staged,
    transfer,
)
from lightning_fastdata.randomness.seeds import derived_seed, global_seed
from lightning_fastdata.tree import find_composes, find_instances
from lightning_fastdata.types import STAGES, Batch, Shuffle, Stage, has_own_order

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import Dataset

    from lightning_fastdata.augment import StageTransform
    from lightning_fastdata.loading.tuner import Tuner
    from lightning_fastdata.plugin.replay import ReplayedBatch

KEY: Final = "lightning_fastdata"
"""Key of this package's state within the state of the data module."""
LOADER_ARGUMENTS: Final = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
"""Arguments of torch's DataLoader that are options of the same name."""
_CAME_WITHOUT: Final = (
    "read in the training process, as the loader came with num_workers=0; "
    'from_loaders(..., num_workers="auto") has the number chosen'
)
_OPTIONS: Final = frozenset(field.name for field in fields(LoaderOptions))
_SET: Final = (
    "batch_size",
    "drop_last",
    "seed",
    "options",
    "shuffle",
    "cache",
    "collate_fn",
    "guard",
)
"""Names of attributes that the constructor sets, each by the argument of the same name."""
_FURTHER_SAMPLES: Final = 7  # read beside the first one to see whether all images have one size


class ModuleArguments(TypedDict, total=False):
    """What the constructor takes besides ``batch_size``, ``num_workers`` and ``shuffle``."""

    options: LoaderOptions | None
    pin_memory: bool | Auto | None
    persistent_workers: bool | Auto | None
    prefetch_factor: int | Auto | None
    augment: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None
    augment_on: AugmentOn
    image: str | int | None
    mask: str | int | None
    guard: GuardPolicy
    prefetch: PrefetchName
    cache: CacheFolder | None
    collate_fn: Callable[[list[Any]], Any] | None
    drop_last: bool
    seed: int | None


_OF_THE_CLASS: Any = object()  # an argument that was not given: the constructor's default holds


class DataModule:
    """Builds tuned loaders for every stage from the datasets that a subclass returns.

    A subclass writes ``train_dataset()``, ``val_dataset()`` and, if wanted, ``test_dataset()`` and
    ``predict_dataset()``. Each returns a dataset; a dict or list of datasets becomes one loader per
    dataset, combined by Lightning. A dataset in the place of its method, as ``setup()`` puts it by
    ``self.train_dataset = ...``, does as well.

    A subclass with a constructor of its own passes on what it takes of these arguments.

    Args:
        batch_size: Samples per batch and rank, for all stages. ``"auto"``: on a CUDA GPU the
            smallest that trains 95 % of the most samples a second of those that fit, by training
            steps that are tried and undone before the fit; elsewhere 32.
        options: How to load, in all stages; every ``"auto"`` is chosen for this machine. See
            :class:`LoaderOptions`.
        num_workers: Processes that read samples, for all stages; short for the option of this name.
        pin_memory: Copy batches to page-locked memory; short for the option of this name.
        persistent_workers: Keep the workers between epochs; short for the option of this name.
        prefetch_factor: Batches each worker is ahead; short for the option of this name.
        shuffle: Whether training is shuffled, by ``seed`` and epoch; or a dict with stages as keys,
            of which the others have one order, by ``seed``, in all epochs. ``"blocks"``: as
            :class:`BlockShuffleSampler` does. Default: training is, nothing else.
        augment: What runs on the batches: an ``albumentations.Compose`` or a torchvision
            ``v2.Compose``, which draw for each sample, or any callable or ``nn.Module`` that takes
            a batch and returns it. For training only, or a dict with stages (``train``, ``val``,
            ``test``, ``predict``) as keys.
        augment_on: Where the pixels of a pipeline in ``augment`` are computed. ``"gpu"``: on the
            trainer's device, in ``on_after_batch_transfer``; ``"cpu"``: in the workers, by the
            pipeline's own library; ``"auto"``: where it is measured to be faster before the
            training. The random draws are the same. A pipeline that the dataset calls itself
            runs in the workers.
        image: Where the image is in a sample: a key of a dict or a position of a tuple. Default:
            ``"image"`` in a dict, else the first element that is an image.
        mask: Where the mask is, if there is one. Default: ``"mask"`` in a dict, else none. Anything
            else of the image's size is an error beside operations that move pixels;
            :func:`as_batch_transform` says how to name it, or to leave it.
        guard: What to do about a training batch that does not fit the GPU. ``"warn"``: train on it
            in parts, and tell; ``"accumulate"``: before the fit try which of the asked size, half
            of it and so on fits, and accumulate such batches to the same effective size;
            ``"raise"`` an error; ``"off"``: nothing.
        prefetch: ``"auto"``: on a device with streams, as CUDA has, move each batch one ahead,
            beside the computing; ``"off"``: with its step. What a pipeline drew runs there, too.
            The batches are the same either way.
        cache: Keep the samples of training and validation, so that later epochs and runs need not
            make them again: ``"disk"``, ``"ram"`` or a folder; ``"auto"``: on disk, where some
            samples show that it pays and a cache can be used. See :class:`CachedDataset`.
        collate_fn: Samples to batch. Default: torch's collation, extended to dataclasses.
        drop_last: Leave out the last training batch if it is not full.
        seed: Seed of order and augmentation. Default: the one of ``seed_everything``, else 0.

    Raises:
        OptionsError: An argument has an impossible value, or a subclass has set one before it
            called this.
        TransformError: ``augment`` is not a transform, or names a stage that does not exist.
    """

    batch_size: int
    chooses_batch_size: bool
    """Whether no batch size was asked for: ``batch_size`` is then one to begin with."""
    part_begin = 0
    """Sample with which the next part begins, of a training batch that is transferred in parts."""

    def __init__(
        self,
        batch_size: int | Auto = 32,
        *,
        options: LoaderOptions | None = None,
        num_workers: int | Auto | None = None,
        pin_memory: bool | Auto | None = None,
        persistent_workers: bool | Auto | None = None,
        prefetch_factor: int | Auto | None = None,
        shuffle: Shuffle | Mapping[str, Shuffle] | None = None,
        augment: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
        augment_on: AugmentOn = "auto",
        image: str | int | None = None,
        mask: str | int | None = None,
        guard: GuardPolicy = "warn",
        prefetch: PrefetchName = "off",
        cache: CacheFolder | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        seed: int | None = None,
    ) -> None:
        self._received = {n: value for n, value in locals().items() if n in _PARAMETERS}
        early = [name for name in _SET if name in vars(self)]
        if early:
            raise OptionsError(
                f"{type(self).__name__} has set {early[0]} before super().__init__(), which sets "
                f"it, too. Call super().__init__({early[0]}={early[0]})."
            )
        hidden = next(filter(self._would_hide, _SET), None)
        if hidden is not None:
            raise OptionsError(
                f"{type(self).__name__} has {hidden} in its class, in whose place "
                f"super().__init__() sets its own. Call super().__init__({hidden}=self.{hidden})."
            )
        self._trainer: Trainer | None = None
        self._logs_to: str | None = None
        """Folder in which the present run of the trainer logs; None: nobody has asked for it."""
        self._runs = 0
        """Number of runs of trainers that were given this data module."""
        self._fit_trainer: Trainer | None = None
        """The trainer whose fit runs or ran last: others may evaluate the same data."""
        self._fit_loaders: dict[str, FastDataLoader] = {}
        """Path of a training loader of that fit -> the loader."""
        super().__init__()
        check_among("guard", guard, get_args(GuardPolicy))
        check_among("augment_on", augment_on, get_args(AugmentOn))
        check_callable("collate_fn", collate_fn, "the samples of a batch and returns the batch")
        check("drop_last", drop_last, isinstance(drop_last, bool), "True and False")
        for name, place in (("image", image), ("mask", mask)):
            fine = isinstance(place, str | int | None)
            check(name, place, fine, "None, a key of the samples and a position in them")
        self.guard: GuardPolicy = guard
        self.chooses_batch_size = isinstance(batch_size, str) and batch_size == "auto"
        if self.chooses_batch_size and guard == "off":
            raise OptionsError(
                'batch_size="auto" and guard="off" contradict each other, as the guard '
                'chooses the size by trying training steps. Set guard="warn", or a batch size.'
            )
        self.batch_size = 32 if self.chooses_batch_size else checked_batch_size(batch_size)
        given = (num_workers, pin_memory, persistent_workers, prefetch_factor)
        self.options = joined_options(options, dict(zip(LOADER_ARGUMENTS, given, strict=True)))
        self.shuffle = checked_shuffle(shuffle)
        if cache is not None:
            check_folder(cache, ("auto", "disk", "ram"))
        self.cache = cache
        self.collate_fn = collate_fn
        self.drop_last = drop_last
        self.seed = None if seed is None else checked_seed(seed)
        self._transforms = StageTransforms(augment, image=image, mask=mask)
        self._prefetching = Prefetching(prefetch)
        self.placing = Placing(augment_on)
        self.notes: list[str] = []
        self._plans: dict[str, LoaderPlan] = {}
        self._tuners: dict[tuple[str, int | None], Tuner] = {}
        """Name of a dataset and size of its batches -> the tuner, from which a loader that is made
        anew takes what the last one came to."""
        self._caches: dict[str, tuple[Dataset[Any], Dataset[Any], str | None]] = {}
        """Name of a dataset -> the dataset, the same with a cache, and what was decided on it."""
        self._saved: dict[str, Position] = {}
        """Path of a training loader -> where it was when the run that goes on now was saved."""
        self._saved_place: Place | None = None

    def _would_hide(self, name: str) -> bool:
        """Return whether a subclass defines a setting in its class, and has not given it."""
        own = inspect.getattr_static(type(self), name, None)
        default = _PARAMETERS[name].default
        left = self._received[name] is default and not hasattr(own, "__set__")
        return left and own is not None and own is not default

    def __getstate__(self) -> dict[str, object]:
        # Tuners, caches and loaders belong to a trainer of this process.
        return {**vars(self), "_tuners": {}, "_caches": {}, "_fit_loaders": {}}

    _guard_callback: type | None = None
    _no_loaders: type = list

    @property
    def augment(self) -> Any:
        """What was given as ``augment``. Setting it holds for loaders that are made afterwards.

        Raises:
            OptionsError: A trainer has made the training loaders already. A pipeline may be changed
                in place; its next epoch is as the pipeline is then.
        """
        return self._transforms.given

    @augment.setter
    def augment(
        self, augment: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None
    ) -> None:
        trainer = self._trainer
        if trainer is not None and trainer.training and trainer.train_dataloader is not None:
            raise OptionsError(
                "augment= was set while the training runs, whose loaders were made with what it "
                "was before. Change the pipeline itself in place (its transforms, or their p), "
                "which the next epoch sees, or set augment before trainer.fit() or in setup()."
            )
        self._transforms.assign(augment)

    @property
    def augment_on(self) -> AugmentOn:
        """Where the pixels of a pipeline are computed, as it was asked for."""
        return self.placing.asked

    @augment_on.setter
    def augment_on(self, asked: AugmentOn) -> None:
        self.placing.asked = asked

    @property
    def trainer(self) -> Trainer | None:
        """The trainer that uses this data module; None before the first fit."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        if trainer is not None:
            self._warn_of_lost_arguments()  # first, as it says what a module is that was not made
        self._attach(trainer)
        if trainer is None:
            return
        self._runs += 1
        seams.refuse_other_tree(self, trainer)
        self.placing.attached()
        # Attaching is the one moment that no subclass overrides.
        if self.guard != "off" and self._guard_callback is not None:
            attach_guard(trainer, self._guard_callback, always=self.chooses_batch_size)
        # A subclass's own hook may leave out super(), and then Lightning's warning is right.
        seams.choose_own_hooks(self, trainer, set(seams.HOOKS) - self.written_hooks())
        if seams.running_stage(trainer) == "train" and not self._validates(trainer):
            # If this is not its own method, Lightning says that validation data were passed in.
            lightnings = super().val_dataloader  # type: ignore[misc]
            seams.replace_for_one_run(trainer, self, "val_dataloader", lightnings)
        stage = seams.running_stage(trainer)
        if stage == "train" and trainer.world_size > 1:
            # What Lightning asks for, all ranks ask for. A hook may ask on one of them alone.
            seams.watch_sources(trainer, [stage], self._compare_ranks)

    def _compare_ranks(self, _: Stage, loaders: object) -> None:
        names = {id(plan): name for name, plan in self._plans.items()}
        for loader in seams.flattened(loaders):
            if isinstance(loader, FastDataLoader) and self._trainer is not None:
                name = names.get(id(loader.plan), self._name_of("train"))
                compare_ranks(loader, name, self._trainer)

    def _attach(self, trainer: Trainer | None) -> None:
        """Belong to a trainer; after a run within that of another trainer, to the other again."""
        outer, now = self._trainer, dict[str, object](_trainer=trainer, _logs_to=None)
        if trainer is not None and seams.running_stage(trainer) == "train":
            seams.forget_unfinished_epoch(trainer)
            # A fit goes on from a checkpoint of its own, which is read after this, or from none.
            now |= {"_fit_trainer": trainer, "_fit_loaders": {}, "_saved": {}, "_saved_place": None}
        if trainer is None or outer in (None, trainer) or not seams.is_running(outer):
            vars(self).update(now)
            return
        for name, value in {**now, "placing": copy.copy(self.placing)}.items():
            seams.replace_for_one_run(trainer, self, name, value)

    def _validates(self, trainer: Trainer) -> bool:
        """Return whether the LightningModule, or this data module, has anything for validation."""
        names = ("val_dataset", "val_dataloader")
        own = any(name in vars(self) or not _is_ours(type(self), name) for name in names)
        return own or seams.overridden_hook(trainer.lightning_module, "validation_step") is not None

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

    @classmethod
    def from_datasets(
        cls,
        train_dataset: object = None,
        val_dataset: object = None,
        test_dataset: object = None,
        predict_dataset: object = None,
        batch_size: int | Auto = _OF_THE_CLASS,
        num_workers: int | Auto | None = None,
        *,
        shuffle: Shuffle | Mapping[str, Shuffle] | None = None,
        **arguments: Unpack[ModuleArguments],
    ) -> Self:
        """Return a data module of datasets that exist already.

        Args:
            train_dataset: Dataset to train on.
            val_dataset: Dataset to validate on.
            test_dataset: Dataset to test on.
            predict_dataset: Dataset to predict.
            batch_size: Samples per batch and rank. Default: the constructor's.
            num_workers: Processes that read samples. Default: chosen for this machine.
            shuffle: As the constructor has it.
            **arguments: The other arguments of the constructor.
        """
        datasets = (train_dataset, val_dataset, test_dataset, predict_dataset)
        given = {"num_workers": num_workers, "shuffle": shuffle}
        given = {name: value for name, value in given.items() if value is not None}
        if batch_size is not _OF_THE_CLASS:
            given["batch_size"] = batch_size
        module = cls(**given, **arguments)  # type: ignore[arg-type]
        for stage, dataset in zip(STAGES, datasets, strict=True):
            if dataset is not None:
                setattr(module, DATASET_METHOD[stage], partial(seams.itself, dataset))
        return module

    @classmethod
    def from_loaders(
        cls,
        train: object = None,
        val: object = None,
        test: object = None,
        predict: object = None,
        *,
        num_workers: int | Auto | None = None,
        **arguments: Unpack[ModuleArguments],
    ) -> Self:
        """Return a data module of the datasets of DataLoaders, in the same batches.

        Each is a ``torch.utils.data.DataLoader``, a list or dict of them, or none. Kept of a loader
        are: dataset, sampler or batch sampler, batch size, ``drop_last``, ``collate_fn``,
        ``worker_init_fn``, ``generator``, ``timeout``, ``multiprocessing_context`` and
        ``in_order``. A plain ``shuffle=True`` becomes this package's shuffle by seed and epoch; in
        evaluation by seed alone, so that each epoch has one order, and a limit the same samples.
        ``batch_size`` of the data module is that of the first training loader; setting it, as
        ``Tuner.scale_batch_size`` and the guard do, scales those of all loaders in proportion.

        Workers, how far they are ahead, whether they stay, and pinning are chosen for this machine,
        unless they are given here. Exceptions are a loader without workers, which is read in the
        training process, and the workers of a stream, whose number decides its batches;
        ``num_workers="auto"`` has these chosen, too.

        Args:
            train: To train on.
            val: To validate on.
            test: To test on.
            predict: To predict.
            num_workers: Processes that read samples.
            **arguments: The other arguments of the constructor, except ``batch_size`` and
                ``shuffle``.

        Raises:
            OptionsError: Something is no DataLoader, or one that makes its batches in its own way.
        """
        for name in ("batch_size", "shuffle"):
            if name in arguments:
                raise OptionsError(
                    f"from_loaders() takes {name} from the loaders. Leave out {name}=, or use "
                    "from_datasets()."
                )
        loaders = dict(zip(STAGES, (train, val, test, predict), strict=True))
        chosen = num_workers == "auto"
        given = {
            stage: given_loaders(own, stage, chosen=chosen)
            for stage, own in loaders.items()
            if not is_missing(own)
        }
        sizes = [one.batch_size for form in given.values() for _, one in named(form, "")]
        base = next((size for size in sizes if size is not None), None)
        known = {"num_workers": num_workers, "batch_size": base}
        known = {name: value for name, value in known.items() if value is not None}
        module = cls(**known, **arguments)  # type: ignore[arg-type]
        if base is not None and module.batch_size != base:
            raise OptionsError(
                f"The loaders have batches of {base}, and {cls.__name__} has not passed batch_size "
                "on. Have its constructor call super().__init__(batch_size=batch_size)."
            )
        for stage, form in given.items():
            based = [replace(one, base=base) for _, one in named(form, stage)]
            setattr(module, DATASET_METHOD[stage], partial(seams.itself, in_form_of(form, based)))
        return module

    def register_transform(
        self, transform: object, *, stage: Stage = "train"
    ) -> Callable[[], None]:
        """Add a transform that runs on every batch of a stage, on the device.

        Transforms run in the order of their registration. A pipeline starts in the workers, so
        there can be one per stage, and it comes first. Those that ``setup()`` registers take the
        place of those that it registered for the stage in an earlier run: Lightning calls it in
        each.

        Args:
            transform: An ``albumentations.Compose``, or a callable or ``nn.Module`` on batches.
            stage: The stage to run in; Lightning's sanity check counts as ``val``.

        Returns:
            A function that removes the transform again.

        Raises:
            TransformError: The stage does not exist, the transform is of no known kind, or it
                would be a second pipeline or one that comes too late.
        """
        run = self._runs if seams.is_running(self._trainer) else None
        return self._transforms.register(transform, stage, run=run)

    def train_dataloader(self) -> Any:
        """Return the loader of ``train_dataset()``; Lightning calls it."""
        return self._loaders_of("train")

    def val_dataloader(self) -> Any:
        """Return the loader of ``val_dataset()``; Lightning calls it."""
        return self._loaders_of("val")

    def test_dataloader(self) -> Any:
        """Return the loader of ``test_dataset()``; Lightning calls it."""
        return self._loaders_of("test")

    def predict_dataloader(self) -> Any:
        """Return the loader of ``predict_dataset()``; Lightning calls it."""
        return self._loaders_of("predict")

    def make_loader(
        self, dataset: Dataset[Any], *, stage: Stage, name: str | None = None, **overrides: Any
    ) -> FastDataLoader:
        """Return the loader for a dataset, as the ``*_dataloader`` methods build it.

        Args:
            dataset: Any map-style or iterable dataset.
            stage: Decides shuffling, transforms and the number of workers.
            name: How messages and :meth:`explain` call it. Default: the stage's dataset method.
            **overrides: Arguments of :class:`FastDataLoader` that win over the chosen ones, such as
                ``sampler`` or ``batch_size``. Give each of several training loaders its ``seed``:
                one seed shuffles datasets of one length alike.

        Raises:
            OptionsError: There is no such stage, or an argument is impossible.
            DatasetError: The dataset is empty, or its first sample cannot be read.
            BatchError: A transform for images was registered and the samples hold none.
        """
        self._warn_of_lost_arguments()
        check_among("stage", stage, STAGES)
        name = self._name_of(stage) if name is None else name
        spec, arguments = self._spec(dataset, stage, name, overrides)
        refuse_empty(spec)
        spec = self._cached(spec)
        seed = arguments.pop("seed", None)
        seed = self.run_seed() if seed is None else seed
        arguments = ordered(spec, arguments, self._shuffle_of(stage), seed)
        if not isinstance(arguments.get("sampler"), ShuffleSampler):
            spec = replace(spec, sampler=arguments.get("sampler"))
        facts, transform = self._looked_at(spec)
        plan = self._plans[name] = self._plan(spec, facts)
        for limit in (*facts.warnings, *plan.limits):
            warnings.warn(f"{name}: {limit}", FastDataWarning, stacklevel=2)
        if self.placing.asked == "gpu" and transform is None:
            for line in told_of_pipelines(dataset, name, stage):
                warnings.warn(f'augment_on="gpu": {line}', FastDataWarning, stacklevel=2)
        self._prefetching.decide(self)
        run = TrainingRun(self) if stage == "train" else None
        settings: dict[str, Any] = {
            "batch_size": spec.batch_size or 1,
            "collate_fn": spec.collate_fn,
            "drop_last": self.drop_last and stage == "train" and spec.batch_size is not None,
            "seed": seed,
            "epoch": first_epoch if run is None else run.epoch,
            **self.placing.settings(
                spec, plan, transform, self._transforms, seed=seed, trainer=self._trainer
            ),
            **plan.loader_arguments(),
            "on_bad_sample": bad_samples_of(
                plan.options.on_bad_sample, self._trainer, self._log_folder
            ),
        }
        ahead = self._prefetching.look_ahead(self._trainer, stage, self._transforms)
        goes_on = None
        if self._trainer is not None and (settings["staged"] or ahead is not None):
            goes_on = seams.run_of(self._trainer)
        settings["training"] = Training(
            run=run,
            goes_on=goes_on,
            ahead=ahead,
            tuner=self._tuner(spec, plan),
            chosen=spec.options.num_workers == "auto" and not plan.only_here,
            standby=plan.standby,
        )
        settings = shared_out(spec, settings, arguments, self._trainer)
        loader = FastDataLoader(spec.dataset, **settings)
        loader.plan = plan
        settle_sharing(loader, name, stage, self._trainer)
        return loader

    def _loaders_of(self, stage: Stage) -> object:
        """Return the loaders of a stage, in the form of its datasets.

        Raises:
            DatasetError: The stage has no dataset, and Lightning runs it.
        """
        self._warn_of_lost_arguments()
        datasets, by_name = self._named_datasets(stage)
        if is_missing(datasets):
            running = seams.running_stage(self._trainer)
            if stage == "val" and running in (None, "train"):
                return [] if running is None else self._no_loaders([])
            raise DatasetError(
                f"{type(self).__name__} has no {stage} dataset: {DATASET_METHOD[stage]}() "
                f"returned {datasets!r}. Override it to return a dataset, or give one: "
                f"from_datasets({DATASET_METHOD[stage]}=...), from_loaders({stage}=...)."
            )
        loaders: list[FastDataLoader] = []
        for place, (name, item) in enumerate(by_name):
            dataset, known = taken_apart(item, self.batch_size, self.options)
            if self.seed is not None:
                known.pop("seed", None)  # of a FastDataLoader
            if place and stage == "train":
                # Two of one seed and length would be shuffled alike, and pair up the same samples.
                seed = known.get("seed", self.run_seed())
                if any(loader.seed == seed for loader in loaders):
                    known["seed"] = derived_seed(seed, place)
            if stage == "train" and isinstance(item, GivenLoader) and known.get("num_workers") == 0:
                self._tell(name, _CAME_WITHOUT)
            loader = self.make_loader(dataset, stage=stage, name=name, **known)
            if isinstance(item, GivenLoader) and item.original is not None:
                loader.training = replace(
                    loader.training,
                    original=item.original.seen_by_another(),
                    scaled=partial(item.scaled, batch_size=self.batch_size),
                )
            loaders.append(loader)
        return in_form_of(datasets, loaders)

    def _named_datasets(self, stage: Stage) -> tuple[object, list[tuple[str, Any]]]:
        """Return what the dataset method of a stage returns, and each dataset with its name."""
        name = self._name_of(stage)
        try:
            datasets = datasets_of(self, stage)
        except Exception as error:
            if self._trainer is not None:
                raise  # setup() has run; it is the user's own error
            raise DatasetError(
                f"{name} raised {type(error).__name__}: {error}. No trainer has called "
                "prepare_data() and setup() yet: call setup('fit') yourself if the datasets are "
                "made there, or ask after fit()."
            ) from error
        by_name = named(datasets, name)
        refuse_loaders((each for _, each in by_name), name, stage)
        return datasets, by_name

    def _name_of(self, stage: Stage) -> str:
        return f"{type(self).__name__}.{DATASET_METHOD[stage]}()"

    def _tell(self, name: str, move: str) -> None:
        if self._trainer is not None and self._trainer.is_global_zero:
            seams.print_line(self._trainer, f"fastdata: {name}: {move}")

    def _warn_of_lost_arguments(self) -> None:
        """Warn, once, of arguments that a subclass was given and has saved, but not passed on.

        Lightning's usual data module calls ``super().__init__()``, and ``save_hyperparameters()``
        or sets ``self.num_workers``.
        """
        if "_received" not in vars(self):
            raise OptionsError(
                f"{type(self).__name__}.__init__() does not call super().__init__(), which makes a "
                "data module of it. Call it first, with what it takes of the arguments."
            )
        saved: Mapping[str, Any] = self.hparams_initial  # type: ignore[attr-defined]
        # Attributes that nothing of ours reads; a method of its own that makes a loader may.
        kept = all(_is_ours(type(self), f"{stage}_dataloader") for stage in STAGES)
        held = {n: v for n, v in vars(self).items() if n in LOADER_ARGUMENTS and kept}
        received, self._received = self._received, {}
        lost = []
        for name, got in received.items():
            value, default = saved.get(name, held.get(name, got)), _PARAMETERS[name].default
            now = getattr(self.options if name in LOADER_ARGUMENTS else self, name, got)
            if got == default and value not in (got, now) and now in (got, "auto", LoaderOptions()):
                lost.append(name)
        if lost:
            passed = ", ".join(f"{name}={name}" for name in lost)
            warnings.warn(
                f"{type(self).__name__} has {' and '.join(lost)} and does not pass it on, so "
                f"that the default of FastDataModule is used. Call super().__init__({passed}).",
                FastDataWarning,
                stacklevel=3,
            )

    def _cached(self, spec: LoaderSpec) -> LoaderSpec:
        """Return the spec with a dataset that keeps samples, if that is asked for and useful."""
        dataset = cached = spec.dataset
        again = spec.stage in ("train", "val") and not spec.is_stream
        # A dataset with an order of its own has another sample at each index in every epoch.
        if self.cache and again and not has_own_order(dataset) and rows_of(dataset) is None:
            known, cached, _ = self._caches.get(spec.name, (None, dataset, None))
            if known is not dataset:
                cached, decided = kept(dataset, self.cache, self._trainer)
                self._caches[spec.name] = dataset, cached, decided
                if decided is not None:
                    self._tell(spec.name, decided)
        if self._trainer is not None:  # Lightning's own launcher sets no variable for its ranks
            for cache in find_instances(cached, (CachedDataset,)):
                cache.ranks = self._trainer.num_devices
        return replace(spec, dataset=cached)

    def _spec(
        self, dataset: Dataset[Any], stage: Stage, name: str, overrides: Mapping[str, Any]
    ) -> tuple[LoaderSpec, dict[str, Any]]:
        """Return what the plan of a loader rests on, and the arguments that are no options.

        The arguments of one loader win over the options of the data module, except for ``None``. A
        context for ``multiprocessing_context`` counts as its start method.
        """
        options = given_options({n: v for n, v in overrides.items() if n in _OPTIONS})
        others = {n: v for n, v in overrides.items() if n not in _OPTIONS}
        check_dataset(dataset, name, ordered=has_order(others))
        batch_sampler = others.get("batch_sampler")
        own_size = checked_batch_size(self.batch_size)  # a subclass may have set anything
        batch_size = others.get("batch_size", own_size)
        if batch_sampler is not None:
            batch_size = rows_in(batch_sampler) or own_size
        spec = LoaderSpec(
            dataset=dataset,
            name=name,
            stage=stage,
            options=replace(joined_options(self.options, {}), **options),
            pipelines=find_composes(dataset),
            transformed=self._transforms.worker_part(stage) is not None,
            batch_size=batch_size,
            collate_fn=others.get("collate_fn", self.collate_fn),
            worker_init_fn=others.get("worker_init_fn"),
            sampler=others.get("sampler"),
            batch_sampler=batch_sampler,
        )
        return spec, others

    def _shuffle_of(self, stage: Stage) -> Shuffle | None:
        """Return how a stage is to be shuffled; None: the user did not say."""
        if isinstance(self.shuffle, Mapping):
            return self.shuffle.get(stage)
        return self.shuffle if stage == "train" else None

    def _log_folder(self) -> str:
        """Return the folder in which the present run of the trainer logs.

        All ranks are asked for it together, as Lightning asks all of them for the first loader of a
        run. A hook may make another one on one rank alone.
        """
        if self._logs_to is None and self._trainer is not None:
            self._logs_to = self._trainer.log_dir or self._trainer.default_root_dir
        return self._logs_to or ""

    def _looked_at(self, spec: LoaderSpec) -> tuple[DatasetFacts, StageTransform | None]:
        """Return the facts on which a loader rests, and the transform that starts in its workers.

        The first sample of the dataset is checked. The transform is made to suit the dataset.
        """
        stage = spec.stage
        transforms, part = self._transforms[stage], self._transforms.worker_part(stage)
        on_device = self.placing.may_use_device(stage, self._trainer)
        questions = Questions(
            sample=self._trainer is not None,
            collated=spec.collate_fn is None and not transforms,
            further=_FURTHER_SAMPLES if on_device and part is not None else 0,
            cost=spec.needs_trial,
        )
        facts = inspect_dataset(spec, questions)
        if facts.uncollatable is not None:
            raise BatchError(
                f"Sample 0 of {spec.name} cannot be part of a batch. {facts.uncollatable}"
            )
        if facts.sample is not None:
            for transform in transforms:
                transform.check_sample(facts.sample)
            self._transforms.warn_if_unlike_training(stage, spec.name, facts.sample)
        if not on_device:
            return facts, part
        samples = () if facts.sample is None else (facts.sample, *facts.further)
        return facts, self._transforms.worker_part_for(stage, samples)

    def _plan(self, spec: LoaderSpec, facts: DatasetFacts) -> LoaderPlan:
        ranks = 1 if self._trainer is None else self._trainer.num_devices
        return plan_for(spec, facts, accelerator=device_type(self._trainer), local_ranks=ranks)

    def _tuner(self, spec: LoaderSpec, plan: LoaderPlan) -> Tuner | None:
        """Return the tuner of a loader: that of the dataset's last loader, if there is one."""
        key = spec.name, spec.batch_size
        tell = partial(self._tell, spec.name)
        ranks = 1 if self._trainer is None else self._trainer.num_devices
        tuner = tuner_for(plan, self._tuners.get(key), local_ranks=ranks, tell=tell)
        if tuner is not None:
            tuner.tell = tell
            self._tuners[key] = tuner
        return tuner

    def run_seed(self) -> int:
        """Return the seed of order and draws; a resumed run keeps its own if none is set."""
        saved = next((state.seed for state in self._saved.values()), None)
        seed = saved if self.seed is None else self.seed
        return global_seed() if seed is None else seed

    def explain(self) -> str:
        """Return every choice that was made, its value and its reason, as text.

        Loaders that were not built yet are planned for, which calls the dataset methods.
        """
        self._warn_of_lost_arguments()
        moved: list[str] = []
        for stage in STAGES:
            for name, item in self._named_datasets(stage)[1]:
                dataset, known = taken_apart(item, self.batch_size, self.options)
                moved += told_of_pipelines(dataset, name, stage)
                if name not in self._plans:
                    spec, _ = self._spec(dataset, stage, name, known)
                    facts = inspect_dataset(spec, Questions(cost=spec.needs_trial))
                    self._plans[name] = self._plan(spec, facts)
        parts = [f"{name}\n{plan.explain()}" for name, plan in self._plans.items()]
        parts += [
            "\n".join([f"{name}, tuned as it was read", *map(str, tuner.moves)])
            for (name, _), tuner in self._tuners.items()
            if tuner.moves
        ]
        for name, (_, cached, decided) in self._caches.items():
            cache = cache_of(cached)
            said = [decided, None if cache is None else cache.explain()]
            parts += ["\n".join([name, *filter(None, said)])] if any(said) else []
        parts += self._transforms.explain(lambda stage: self.placing.where(stage, self._trainer))
        parts += moved if self.placing.asked != "cpu" else []
        return "\n\n".join([*parts, self._prefetching.explain()])

    def batch_at(
        self, step: int, *, rank: int = 0, ranks: int = 1, batches_per_epoch: int | None = None
    ) -> ReplayedBatch:
        """Return the training batch that a step got, made again without training.

        The datasets have to be there, as after ``setup("fit")``. It is computed on the CPU, and
        hooks of the LightningModule are left out. ``fastdata replay`` does the same.

        Args:
            step: Number of the batch over all epochs, from 0, as ``fit_loop.total_batch_idx``.
            rank: Rank that got the batch.
            ranks: Number of ranks that trained together.
            batches_per_epoch: Batches of a rank in each epoch, where ``limit_train_batches`` or its
                like left out the rest. Default: those of the last fit with this data module, if it
                had as many ranks, else all.

        Raises:
            OptionsError: There is no such batch, or the order of the training does not follow from
                seed and epoch alone.
        """
        from lightning_fastdata.plugin.replay import replayed  # which needs this class

        fit = self._fit_trainer
        if batches_per_epoch is None and fit is not None and fit.world_size == ranks:
            batches_per_epoch = seams.batches_per_epoch(fit)
        return replayed(self, None, step, rank=rank, ranks=ranks, per_epoch=batches_per_epoch)

    # -- how far the training has come -------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return how far the training has come; Lightning puts it into its checkpoints.

        Lightning's tuners save and restore a run around their trials: until a batch follows a state
        that was loaded, that state is returned.
        """
        loaders = self._training_loaders()
        place = seams.training_place(self._fit_trainer)
        if place.last:
            place = Place(place.epoch + 1, 0, last=False)
        if self._saved and not any(loader.begun for loader in loaders.values()):
            states = {path: state.as_dict() for path, state in self._saved.items()}
            place = self._saved_place or place
        else:
            states = {path: loader.state_dict() for path, loader in loaders.items()}
        state = {"version": VERSION, "epoch": place.epoch, "batches": place.taken}
        per_epoch = seams.batches_per_epoch(self._fit_trainer)
        return {KEY: {**state, "batches_per_epoch": per_epoch, "loaders": states}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the batch after which a checkpoint was written; Lightning calls it.

        It calls it, too, where a checkpoint is evaluated, and then the training stays where it is.

        Raises:
            OptionsError: The state is none of this class, or of a later version.
        """
        fits = seams.running_stage(self._trainer) == "train"
        if KEY not in state_dict or (seams.is_running(self._trainer) and not fits):
            return
        state = state_dict[KEY]
        saved = state.get("loaders") if isinstance(state, Mapping) else None
        if not isinstance(saved, Mapping):
            raise OptionsError(
                f"The checkpoint holds {state!r:.200} for the data module, where the positions of "
                "its training loaders were expected. It was not written by FastDataModule."
            )
        self._saved = {str(path): Position.from_dict(one) for path, one in saved.items()}
        self._saved_place = None
        if "epoch" in state:
            self._saved_place = Place(int(state["epoch"]), int(state["batches"]), last=False)
            if self._fit_trainer is not None:
                seams.mend_counts(self._fit_trainer, self._saved_place.epoch)
        for path, loader in self._training_loaders().items():
            if path in self._saved:
                loader.load_state_dict(self._saved[path].as_dict())

    def _training_loaders(self) -> dict[str, FastDataLoader]:
        """Return the training loaders of this package that the fit has, or had, by path."""
        # A trainer that evaluates after its fit lets go of them.
        loaders = None if self._fit_trainer is None else self._fit_trainer.train_dataloader
        found = {
            "/".join(map(str, path)): loader
            for path, loader in seams.with_paths(loaders)
            if isinstance(loader, FastDataLoader)
        }
        self._fit_loaders = found or self._fit_loaders
        return self._fit_loaders

    # -- what others of this package ask -----------------------------------------------------------

    def augments_on_device(self, stage: Stage) -> bool:
        """Return whether :meth:`on_after_batch_transfer` transforms the batches of a stage."""
        pipeline = self.placing.may_use_device(stage, self._trainer)
        return self._transforms.run_on_device(stage, pipeline=pipeline)

    # -- the transfer of a batch; each hook calls that of the LightningModule ----------------------

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Run the LightningModule's hook of this name, if it has one."""
        hook = self._hook_of_module("on_before_batch_transfer")
        if is_staged(batch) and self.hooks_before_device():
            batch = convert_staged(batch, self._in_precision)
        return batch if hook is None else inside(batch, lambda b: hook(b, dataloader_idx))

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Move the batch and what was drawn for its transform to the device."""
        hook = self._hook_of_module("transfer_batch_to_device")
        move = super().transfer_batch_to_device if hook is None else hook  # type: ignore[misc]
        return transfer(batch, lambda b: move(b, device, dataloader_idx), device)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Run the stage's transforms, then the LightningModule's hook of this name."""
        batch, transformed = finish(batch, self._transforms, self._drawing)
        hook = self._hook_of_module("on_after_batch_transfer")
        # Lightning converts to the precision's dtype before the transfer; uint8 images became
        # floating point only now.
        convert = self._in_precision if transformed else seams.itself
        if hook is not None:
            batch = hook(convert(batch), dataloader_idx)
        return convert(batch)

    def _in_precision(self, batch: Batch) -> Batch:
        trainer = self._trainer
        return batch if trainer is None else trainer.precision_plugin.convert_input(batch)

    def _drawing(self, stage: Stage, part: int = 0) -> AbstractContextManager[None]:
        """Return a block whose draws are keyed by the batch of the training, if it is one.

        ``part``: place of its loader among several that a batch is combined of.
        """
        trainer = self._trainer
        if stage != "train" or trainer is None:
            return nullcontext()
        seed = derived_seed(self.run_seed(), part) if part else self.run_seed()
        # The draws of a batch rest on no other batch, so that a run may go on from any of them.
        place = seams.training_place(trainer)
        device = trainer.strategy.root_device
        number: tuple[int, ...] = seams.part_of_rank(trainer), place.taken
        if self.part_begin:
            number += (self.part_begin,)
        return drawn_under(seed, place.epoch, number, device)

    def device_streams(self, device: torch.device) -> DeviceStreams | None:
        """Return the streams of a device on which ``prefetch`` moves batches; None: it has none."""
        return device_streams(device)

    def written_hooks(self) -> frozenset[str]:
        """Return the transfer hooks that the class itself overrides."""
        cls = type(self)
        return frozenset(n for n in seams.HOOKS if getattr(cls, n) is not getattr(DataModule, n))

    def hooks_before_device(self) -> frozenset[str]:
        """Return the transfer hooks of the user that get a batch before it is on the device."""
        names = [name for name in seams.HOOKS if self._hook_of_module(name) is not None]
        return self.written_hooks().union(names) - {"on_after_batch_transfer"}

    def _hook_of_module(self, name: str) -> Callable[..., Batch] | None:
        trainer = self._trainer
        return None if trainer is None else seams.overridden_hook(trainer.lightning_module, name)


_PARAMETERS: Final = dict(list(inspect.signature(DataModule.__init__).parameters.items())[1:])


def _is_ours(cls: type, name: str) -> bool:
    """Return whether a subclass leaves a method as it is here."""
    return getattr(cls, name) is getattr(DataModule, name)


# For a wrong keyword Python names the class that has the code, which users do not know.
DataModule.__init__.__qualname__ = "FastDataModule.__init__"


class TrainingRun:
    """The training that takes the batches of a data module's loaders."""

    def __init__(self, module: DataModule) -> None:
        self._module = module

    @property
    def began(self) -> bool:
        """Whether a trainer has begun to fit with the data module."""
        return self._module._fit_trainer is not None

    @property
    def over(self) -> bool:
        """Whether the trainer has come to its end, or was interrupted."""
        trainer = self._module._fit_trainer
        return trainer is not None and (trainer.state.finished or trainer.interrupted)

    def takes(self, loader: object) -> bool:
        """Return whether a loader is one of the trainer's own.

        Others of the data module are looked into beside the run. Where the trainer has something
        else than our loaders, that may hold any of them.
        """
        trainer, ours = self._module._fit_trainer, self._module._training_loaders()
        own = list(seams.flattened(trainer.train_dataloader)) if trainer is not None else []
        if not self.over and not (own and all(isinstance(one, FastDataLoader) for one in own)):
            return True
        return any(one is loader for one in ours.values())

    def place(self) -> Place:
        """Return where the run is.

        A run that goes on from a checkpoint is where the checkpoint was saved, also before
        Lightning has restored its own counts: if the LightningModule asks for
        ``estimated_stepping_batches``, the first batch of a stream is taken that early.
        """
        trainer, saved = self._module._fit_trainer, self._module._saved_place
        if saved is not None and trainer is not None and seams.is_to_be_restored(trainer):
            return saved
        return seams.training_place(trainer)

    def epoch(self) -> int:
        """Return the epoch, counted from 0, of the batches that come next."""
        return self.place().epoch

    def resumed(self, loader: object) -> Position | None:
        """Return where a loader was when the run that now goes on was saved; None: not known."""
        trainer, saved = self._module._fit_trainer, self._module._saved
        loaders = self._module._training_loaders()
        path = next((path for path, one in loaders.items() if one is loader), None)
        if trainer is None or path is None or path not in saved:
            return None
        if trainer.global_rank:
            saved[path] = of_other_rank(saved[path], loaders[path].dataset)
        anew = {at: loaders[at].cut_anew(state) for at, state in saved.items() if at in loaders}
        place = self._module._saved_place
        if place is not None and any(anew[at].batches != saved[at].batches for at in anew):
            # A loader that began anew within the epoch does not decide when that ends.
            first = [(one, dataset_length(loaders[at])) for at, one in anew.items()]
            given = [(n, n - one.batches) for one, n in first if n is not None and not one.passes]
            self._module._saved_place = seams.move_place(trainer, place, given)
            if self._module._saved_place != place:
                saved.update(anew)
        return anew[path]


def checked_batch_size(batch_size: object) -> int:
    """Return the batch size; raises OptionsError unless it is a whole number of at least 1."""
    if batch_size is None:
        raise OptionsError(
            "batch_size=None has to be a whole number of at least 1, as a data module makes "
            "batches. For a dataset that gives batches already, override train_dataloader() to "
            'return self.make_loader(dataset, stage="train", batch_size=None).'
        )
    if not is_whole(batch_size, 1):
        raise OptionsError(f"batch_size={batch_size!r} has to be a whole number of at least 1.")
    return operator.index(cast("int", batch_size))


def checked_shuffle(shuffle: object) -> Shuffle | Mapping[str, Shuffle] | None:
    """Return how to shuffle: one way for training, or a dict by stage; None: training is shuffled.

    Raises:
        OptionsError: The value is something else, or names a stage that does not exist.
    """
    by_stage = shuffle if isinstance(shuffle, Mapping) else {"train": shuffle}
    known = all(isinstance(value, bool | None) or value == "blocks" for value in by_stage.values())
    if not known or not set(by_stage) <= set(STAGES):
        raise OptionsError(
            f'shuffle={shuffle!r} has to be True, False or "blocks", for training, or a dict '
            f"of them by stage ({', '.join(STAGES)})."
        )
    return shuffle  # type: ignore[return-value]  # each value was looked at


def joined_options(options: object, given: Mapping[str, Any]) -> LoaderOptions:
    """Return the options of a data module, with the arguments that are short for some.

    Raises:
        OptionsError: They are no options, or contradict an argument.
    """
    options = LoaderOptions() if options is None else options
    if not isinstance(options, LoaderOptions):
        raise OptionsError(
            f"options={options!r} is a {type(options).__name__}; pass LoaderOptions(...). For one "
            "stage, override its val_dataloader() to return self.make_loader(..., num_workers=1)."
        )
    given = {key: value for key, value in given.items() if value is not None}
    LoaderOptions(**given)  # what is impossible is named
    asked = {key: value for key, value in given.items() if value != "auto"}
    for key, value in asked.items():
        other = getattr(options, key)
        if other not in ("auto", value):
            raise OptionsError(
                f"{key}={value!r} and options=LoaderOptions({key}={other!r}) contradict each "
                "other. Set it in one place."
            )
    return replace(options, **asked)

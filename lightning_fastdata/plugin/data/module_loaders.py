"""The loaders of a data module: what each rests on, how it was planned, and its construction."""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import warnings
import zlib
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, SequentialSampler

from lightning_fastdata.batches.bad_samples import BadSamples
from lightning_fastdata.caches.cached import cache_of, with_cache
from lightning_fastdata.caches.folders import CacheFolder, made_by_one, room_bytes
from lightning_fastdata.caches.gain import measure_gain
from lightning_fastdata.errors import BatchError, DatasetError, FastDataWarning, OptionsError
from lightning_fastdata.executors.gather.rows import gatherable
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.insight.report.run_report import Explanation
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.source import order_of, tuner_for
from lightning_fastdata.order.block_shuffle import BlockShuffleSampler, is_in_blocks
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.order.ranks import SharedSampler, as_given, deciding, split_of
from lightning_fastdata.order.samplers import (
    RankBatchSampler,
    ShuffleSampler,
    epoch_order,
    rows_in,
)
from lightning_fastdata.planning.facts.inspection import (
    DatasetFacts,
    Questions,
    inspect_dataset,
    refuse_empty,
)
from lightning_fastdata.planning.facts.probe_process import Tell, try_apart
from lightning_fastdata.planning.options import check_dataset, refuse_shuffle
from lightning_fastdata.planning.plan_for import LoaderSpec, plan_for
from lightning_fastdata.plugin.data.arguments import (
    options_from,
    options_of,
    shuffles,
    take_over_hyperparameters,
    warn_of_lost_batch_size,
)
from lightning_fastdata.plugin.data.datasets import (
    DATASET_METHOD,
    Constant,
    GivenLoader,
    datasets_of,
    held_pipelines,
    in_form_of,
    is_missing,
    move_line,
    named,
    refuse_loaders,
    taken_apart,
)
from lightning_fastdata.plugin.data.training_run import TrainingProgress, TrainingRun
from lightning_fastdata.plugin.placing.stage_transforms import StagePlan
from lightning_fastdata.plugin.placing.trial import device_type
from lightning_fastdata.plugin.seams.internals import attributes_of, spreads_samples
from lightning_fastdata.plugin.seams.loaders import average_exactly
from lightning_fastdata.plugin.seams.trainer import (
    first_epoch,
    of_ranks,
    print_line,
    running_stage,
)
from lightning_fastdata.randomness.search import find_composes
from lightning_fastdata.randomness.seeds import global_seed
from lightning_fastdata.tree import is_a
from lightning_fastdata.types import STAGES, has_own_order

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.augment import StageTransform
    from lightning_fastdata.caches.cached import CachedDataset
    from lightning_fastdata.caches.gain import CacheGain
    from lightning_fastdata.planning.plan_for import LoaderPlan
    from lightning_fastdata.plugin.data.datamodule import DataModuleHooks as DataModule
    from lightning_fastdata.plugin.placing.stage_transforms import StageTransforms
    from lightning_fastdata.plugin.placing.transfer import Prefetching
    from lightning_fastdata.tuning.tuner import Tuner
    from lightning_fastdata.types import Shuffle, Stage

_CAME_WITHOUT: Final = (
    "read in the training process, as the loader came with num_workers=0; "
    'from_loaders(..., num_workers="auto") has the number chosen'
)
_FURTHER_SAMPLES: Final = 7  # read beside the first one to see whether all images have one size
_NEEDS_WORKERS: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
_REPLACED_BY_BATCH_SAMPLER: Final = ("batch_size", "sampler", "drop_last")
_ORDERS: Final = ("shuffle", "sampler", "batch_sampler")
_DEADLINE_S: Final = 30.0


class ModuleLoaders:
    """Builds the loaders of one data module, which is given to each method."""

    def __init__(self, transforms: StageTransforms, prefetching: Prefetching) -> None:
        self._transforms = transforms
        self._prefetching = prefetching
        self.progress = TrainingProgress()
        """Where the training was that goes on."""
        self._plans: dict[str, LoaderPlan] = {}
        self._tuners: dict[tuple[str, int | None], Tuner] = {}
        """By name of the dataset and size of its batches: a loader that is made anew is as its
        tuner has left the last."""

        self._caches: dict[str, tuple[Dataset[Any], Dataset[Any], str | None]] = {}
        """By name: a dataset, the same with a cache, and what was decided about it."""

    def __getstate__(self) -> dict[str, object]:
        # What was learned is of loaders and a trainer of this process.
        return {**self.__dict__, "_tuners": {}, "_caches": {}}

    def of_stage(self, module: DataModule, stage: Stage) -> object:
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
            dataset, known = taken_apart(item, module.batch_size, options_of(module, stage))
            if stage == "train" and isinstance(item, GivenLoader) and known.get("num_workers") == 0:
                _tell(module.trainer, name, _CAME_WITHOUT)
            loaders.append(module.make_loader(dataset, stage=stage, name=name, **known))
        formed = in_form_of(datasets, loaders)
        method = getattr(module, DATASET_METHOD[stage])
        combine = method.combine if isinstance(method, Constant) else None
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
        trainer = module.trainer
        seed = self.seed(module)
        name = _name_of(module, stage) if name is None else name
        orders = (overrides.get("sampler"), overrides.get("batch_sampler"))
        check_dataset(dataset, name, ordered=any(order is not None for order in orders))
        refuse_empty(dataset, name)
        dataset = self._cached(module, dataset, stage, name)
        shuffle = shuffles(module.shuffle, stage)
        overrides = shuffled_in_blocks(dataset, overrides, shuffle, seed)
        spec, overrides = self._spec(module, dataset, name, stage, overrides)
        of = StagePlan(spec=spec, seed=seed, trainer=trainer)
        facts = self._inspect(module, of)
        transform = self._worker_part(module, stage, facts)
        plan = _plan(module, spec, facts)
        for limit in (*facts.warnings, *plan.limits):
            warnings.warn(f"{name}: {limit}", FastDataWarning, stacklevel=3)
        if module.placing.asked == "gpu" and transform is None:
            for line in self._told_of_pipelines(dataset, stage, name):
                warnings.warn(f'augment_on="gpu": {line}', FastDataWarning, stacklevel=3)
        self._plans[name] = plan
        self._prefetching.decide(module)
        run = TrainingRun(module, self.progress) if stage == "train" else None
        settings: dict[str, Any] = {
            "batch_size": spec.batch_size or 1,
            "collate_fn": spec.collate_fn,
            "drop_last": module.drop_last and stage == "train",
            "seed": seed,
            "epoch": first_epoch if run is None else run.epoch,
            "run": run,
            "tuner": self._tuner(spec, plan, trainer),
            "chosen": spec.options.num_workers == "auto" and not plan.only_here,
            "standby": plan.standby,
            "ahead": self._prefetching.look_ahead(trainer, stage, self._transforms),
        }
        settings |= module.placing.settings(of, transform, self._transforms, plan)
        loader = build_loader(
            dataset,
            stage=stage,
            plan=plan,
            settings=settings,
            overrides=overrides,
            shuffle=shuffle,
            trainer=trainer,
        )
        settle_sharing(loader, name, stage, trainer)
        return loader

    def _cached(
        self, module: DataModule, dataset: Dataset[Any], stage: Stage, name: str
    ) -> Dataset[Any]:
        """Return a dataset that keeps its samples, if that is asked for and of any use."""
        again = stage in ("train", "val") and not isinstance(dataset, IterableDataset)
        if again and has_own_order(dataset):
            return dataset  # which has another sample at each index in each epoch
        if module.cache is None or not again or gatherable(dataset):
            return dataset
        known, cached, _ = self._caches.get(name, (None, dataset, None))
        if known is not dataset:
            cached, decided = kept(dataset, module.cache, module.trainer)
            self._caches[name] = dataset, cached, decided
            if decided is not None:
                _tell(module.trainer, name, decided)
        return cached

    def _tuner(self, spec: LoaderSpec, plan: LoaderPlan, trainer: Trainer | None) -> Tuner | None:
        """Return what tunes a loader: that of the last loader of the dataset, if there is one."""
        key = spec.name, spec.batch_size
        tell = partial(_tell, trainer, spec.name)
        ranks = 1 if trainer is None else trainer.num_devices
        tuner = tuner_for(plan, self._tuners.get(key), local_ranks=ranks, tell=tell)
        if tuner is not None:
            tuner.tell = tell  # to the trainer of now
            self._tuners[key] = tuner
        return tuner

    def seed(self, module: DataModule) -> int:
        """Return the seed of order and draws; a run that goes on keeps its own if none is set."""
        seed = self.progress.seed if module.seed is None else module.seed
        return global_seed() if seed is None else seed

    def _worker_part(
        self, module: DataModule, stage: Stage, facts: DatasetFacts
    ) -> StageTransform | None:
        """Return the transform that starts in the workers, as it suits a dataset; None: none."""
        if not module.placing.may_use_device(stage, module.trainer):
            return self._transforms.worker_part(stage)
        samples = () if facts.sample is None else (facts.sample, *facts.further)
        return self._transforms.worker_part_for(stage, samples)

    def _told_of_pipelines(self, dataset: object, stage: Stage, name: str) -> list[str]:
        """Return a line for each pipeline that a dataset holds itself."""
        has_one = self._transforms.worker_part(stage) is not None
        return [
            move_line(place, pipeline, name, stage, has_one=has_one)
            for place, pipeline in held_pipelines(dataset)
        ]

    def _inspect(self, module: DataModule, of: StagePlan) -> DatasetFacts:
        """Find out what a loader rests on, and check the first sample of its dataset."""
        spec, stage = of.spec, of.spec.stage
        transforms = self._transforms[stage]
        suits = self._transforms.worker_part(stage) is not None
        suits = suits and module.placing.may_use_device(stage, of.trainer)
        questions = Questions(
            sample=of.trainer is not None,
            collated=spec.collate_fn is None and not transforms,
            further=_FURTHER_SAMPLES if suits else 0,
            cost=spec.needs_cost,
        )
        facts = inspect_dataset(spec, questions)
        if facts.uncollatable is not None:
            raise BatchError(
                f"Sample 0 of {spec.name} cannot be part of a batch. {facts.uncollatable}"
            )
        if facts.sampled:
            for transform in transforms:
                transform.check_sample(facts.sample)
            self._transforms.warn_if_unlike_training(stage, spec.name, facts.sample)
        return facts

    def explain(self, module: DataModule) -> str:
        """Return every choice that was made, its value and its reason, as text.

        A notebook shows it as it is laid out, without ``print``.
        """
        take_over_hyperparameters(module)
        datasets = {}
        for stage in STAGES:
            for name, item in _named_datasets(module, stage)[1]:
                dataset, known = taken_apart(item, module.batch_size, options_of(module, stage))
                datasets[stage, name] = dataset
                if name not in self._plans:
                    spec, _ = self._spec(module, dataset, name, stage, known)
                    facts = inspect_dataset(spec, Questions(cost=spec.needs_cost))
                    self._plans[name] = _plan(module, spec, facts)
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
        parts += self._transforms.explain(lambda stage: module.placing.where(stage, module.trainer))
        if module.placing.asked != "cpu":
            for (stage, name), dataset in datasets.items():
                parts += self._told_of_pipelines(dataset, stage, name)
        return Explanation("\n\n".join([*parts, self._prefetching.explain()]))

    def _spec(
        self,
        module: DataModule,
        dataset: Dataset[Any],
        name: str,
        stage: Stage,
        overrides: Mapping[str, Any],
    ) -> tuple[LoaderSpec, dict[str, Any]]:
        """Return what the plan of a loader rests on, and those overrides that are no options."""
        options, others = options_from(options_of(module, stage), overrides)
        batch_size = others.get("batch_size", module.batch_size)
        batch_sampler = others.get("batch_sampler")
        if batch_sampler is not None:
            batch_size = rows_in(batch_sampler) or module.batch_size
        context = others.get("multiprocessing_context")  # a name is among the options
        spec = LoaderSpec(
            dataset=dataset,
            name=name,
            stage=stage,
            options=options,
            pipelines=find_composes(dataset),
            transformed=self._transforms.worker_part(stage) is not None,
            batch_size=batch_size,
            start_method=None if context is None else context.get_start_method(),
            collate_fn=others.get("collate_fn", module.collate_fn),
            worker_init_fn=others.get("worker_init_fn"),
            sampler=others.get("sampler"),
            batch_sampler=batch_sampler,
        )
        return spec, others


def _tell(trainer: Trainer | None, name: str, move: str) -> None:
    if trainer is not None and trainer.is_global_zero:
        print_line(trainer, f"fastdata: {name}: {move}")


def _plan(module: DataModule, spec: LoaderSpec, facts: DatasetFacts) -> LoaderPlan:
    trainer = module.trainer
    ranks = 1 if trainer is None else trainer.num_devices
    return plan_for(spec, facts, accelerator=device_type(trainer), local_ranks=ranks)


def _named_datasets(module: DataModule, stage: Stage) -> tuple[object, list[tuple[str, Any]]]:
    name = _name_of(module, stage)
    try:
        datasets = datasets_of(module, stage)
    except Exception as error:
        if module.trainer is not None:
            raise  # setup() has run; it is the user's own error
        raise DatasetError(
            f"{name} raised {type(error).__name__}: {error}. No trainer has called prepare_data() "
            "and setup() yet: call setup('fit') yourself if the datasets are made there, or ask "
            "after fit()."
        ) from error
    refuse_loaders(datasets, name, stage)
    return datasets, named(datasets, name)


def _name_of(module: DataModule, stage: Stage) -> str:
    return f"{type(module).__name__}.{DATASET_METHOD[stage]}()"


def build_loader(
    dataset: Dataset[Any],
    *,
    stage: Stage,
    plan: LoaderPlan,
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any],
    shuffle: Shuffle | None = None,
    trainer: Trainer | None = None,
) -> FastDataLoader:
    """Return the loader; a sharing strategy that was planned is set for the whole process.

    Of its arguments the planned ones win over ``settings``, and ``overrides`` over all; what they
    exclude is left out. Training is shuffled by the seed in ``settings``, unless ``shuffle`` says
    otherwise. Several ranks share out the order, whoever gives it.
    """
    arguments = {**settings, **plan.dataloader_kwargs(), "executor": plan.executor}
    arguments["on_bad_sample"] = bad_samples_of(plan, trainer)
    if plan.timeout is None:
        arguments["timeout"] = "auto"
    overrides = dict(overrides)
    if not any(overrides.get(name) is not None for name in ("sampler", "batch_sampler")):
        shuffle = overrides.pop("shuffle", shuffle)
    sized = cast("Any", dataset)
    stream = isinstance(dataset, IterableDataset)
    if stream and shuffle:
        raise OptionsError(
            f"shuffle={shuffle!r}, but {type(dataset).__name__} is a stream, which has no index to "
            "shuffle. Shuffle in the stream, and leave out shuffle."
        )
    refuse_shuffle(dataset, shuffle)
    by_default = stage == "train" and not has_own_order(dataset)
    shuffled = not stream and (by_default if shuffle is None else shuffle)
    arguments |= _without(overrides, () if plan.num_workers else _NEEDS_WORKERS)
    ordered = any(arguments.get(name) is not None for name in _ORDERS)
    if shuffled and not ordered:
        arguments["sampler"] = ShuffleSampler(sized, settings["seed"])
    share = None if stream else _share_of_rank(sized, arguments, stage, trainer)
    if isinstance(share, SharedSampler):
        arguments["sampler"] = share
    elif share is not None:
        arguments = {**_without(arguments, _REPLACED_BY_BATCH_SAMPLER), "batch_sampler": share}
    elif "batch_sampler" in overrides:
        replaced = [name for name in _REPLACED_BY_BATCH_SAMPLER if name not in overrides]
        arguments = _without(arguments, replaced)
    loader = FastDataLoader(dataset, **arguments)
    loader.plan = plan
    return loader


def _share_of_rank(
    dataset: Any, arguments: Mapping[str, Any], stage: Stage, trainer: Trainer | None
) -> RankBatchSampler | SharedSampler | None:
    """Return this rank's share of an order; None where nothing is shared out, or splits itself."""
    if trainer is None or trainer.world_size == 1 or not spreads_samples(trainer):
        return None
    if stage != "train" and attributes_of(trainer).overfit_batches:
        return None  # Lightning puts samplers of its own there
    kwargs = trainer.distributed_sampler_kwargs
    batches, order = arguments.get("batch_sampler"), arguments.get("sampler")
    given = order if batches is None else batches
    if kwargs is None or split_of(given) is not None:
        return None
    if given is None and dataset_length(dataset) is None:
        return None
    given = SequentialSampler(dataset) if given is None else given
    size = arguments["batch_size"] if batches is None else None
    drop_last = arguments["drop_last"] if batches is None else None
    share = SharedSampler(
        given,
        batch_size=size,
        num_replicas=int(kwargs["num_replicas"]),
        rank=int(kwargs["rank"]),
        drop_last=False if stage == "predict" else drop_last,  # as Lightning has it
        seed=arguments["seed"],
    )
    if size is None and batches is None:
        return share
    return RankBatchSampler(share, rows_in(given) or size or 1, share.drop_last)


def shuffled_in_blocks(
    dataset: Dataset[Any], overrides: Mapping[str, Any], shuffle: Shuffle | None, seed: int
) -> dict[str, Any]:
    """Return the overrides of a loader, with a sampler where it is shuffled in blocks.

    Raises:
        OptionsError: ``shuffle`` is something impossible.
    """
    own = dict(overrides)
    shuffle = own.get("shuffle", shuffle)
    ordered = any(own.get(name) is not None for name in ("sampler", "batch_sampler"))
    stream = isinstance(dataset, IterableDataset)
    if is_in_blocks(shuffle) and not (ordered or stream):
        own.pop("shuffle", None)
        own["sampler"] = BlockShuffleSampler(cast("Sized", dataset), seed=seed)
    return own


def bad_samples_of(plan: LoaderPlan, trainer: Trainer | None) -> BadSamples:
    """Return what is done about bad samples; where they do not end the training it lists them.

    Raises:
        OptionsError: Several ranks are to skip samples.
    """
    rule = BadSamples.of(plan.on_bad_sample)
    if rule.policy == "skip" and trainer is not None and trainer.world_size > 1:
        raise OptionsError(
            f"on_bad_sample='skip' with {trainer.world_size} ranks: one that leaves out a whole "
            "batch comes to fewer of them, and the others would wait for it for ever. Use "
            "'replace', or evaluate on one device."
        )
    if rule.quarantine_file is None and rule.policy != "raise" and trainer is not None:
        # All ranks are asked for a trainer's log folder together, as they are in its methods.
        runs = running_stage(trainer) is not None
        folder = (trainer.log_dir if runs else None) or trainer.default_root_dir
        rank = f"-rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        file = os.path.join(folder, f"bad_samples{rank}.jsonl")  # noqa: PTH118 - may be a URL
        return replace(rule, quarantine_file=file)
    return rule


def _without(arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}


def _tell_of_uneven_parts(parts: object, trainer: Trainer) -> None:
    even = any(is_a(parts, package) for package in ("litdata", "lhotse"))
    if not (even or isinstance(trainer.limit_train_batches, int)):
        warnings.warn(
            f"{trainer.world_size} ranks train on {type(parts).__name__}, each on its part. If one "
            "gives fewer batches, the others wait for it for ever, as Lightning does not compare "
            "them. Give Trainer(limit_train_batches=N) a number of batches that each rank has.",
            FastDataWarning,
            stacklevel=2,
        )


def _compare_ranks(loader: FastDataLoader, name: str, trainer: Trainer) -> None:
    """Compare what the ranks, which all call this, have of a sampler of the user's."""
    share, sampler = loader.sampler, deciding(as_given(order_of(loader)))
    if not (isinstance(share, DistributedSampler) and torch.distributed.is_initialized()):
        return
    limit, length = trainer.limit_train_batches, dataset_length(loader)
    if length is None and not isinstance(share, SharedSampler):
        _tell_of_uneven_parts(sampler, trainer)
    batches = min(length or 0, limit) if isinstance(limit, int) else length or 0
    fewest, most = -of_ranks(trainer, -batches), of_ranks(trainer, batches)
    about = f"{name}: {type(sampler).__name__}"
    if fewest < most:
        raise OptionsError(
            f"{about} gives ranks {fewest} to {most} batches, and those with more would wait for "
            f"ever. Have it give all as many, or set Trainer(limit_train_batches={fewest})."
        )
    drawn = getattr(sampler, "generator", None)
    held = drawn.get_state().numpy().tobytes() if isinstance(drawn, torch.Generator) else b""
    state = zlib.crc32(held)
    if -of_ranks(trainer, -state) < of_ranks(trainer, state):
        warnings.warn(
            f"{about} has a generator that is not seeded alike on all ranks. They share out other "
            "orders, or have that of rank 0 behind a checkpoint. Seed it by one number.",
            FastDataWarning,
            stacklevel=2,
        )


def settle_sharing(
    loader: FastDataLoader, name: str, stage: Stage, trainer: Trainer | None
) -> None:
    """Say what becomes of samples that do not divide, and average evaluation as on one device.

    Of a stream that several ranks train on it is said what happens if their parts are not as long.
    """
    if trainer is not None and stage == "train" and trainer.world_size > 1:
        if isinstance(loader.dataset, IterableDataset):
            _tell_of_uneven_parts(loader.dataset, trainer)
        else:
            _compare_ranks(loader, name, trainer)
    share = loader.sampler
    if trainer is None or not isinstance(share, SharedSampler):
        return
    # Of an order of this package each sample comes once, which is not worth a line.
    left = None if epoch_order(loader.batch_sampler) is not None else share.left_over()
    if left is not None:
        _tell(trainer, name, left)
    if stage != "train":
        average_exactly(trainer)


def kept(
    dataset: Dataset[Any], folder: CacheFolder, trainer: Trainer | None
) -> tuple[Dataset[Any], str | None]:
    """Return the dataset with a cache, and what was decided, if there was anything to decide.

    ``"auto"`` is ``"disk"`` where an earlier run has begun the cache, or where some samples, read
    in a process that is thrown away, show that it pays in the epochs of the training: see
    :meth:`CacheGain.why_not`. Ranks decide for themselves; their samples are the same in any case.
    What keeps a cache from being used is said, and ends no training.
    """
    if folder != "auto":
        return with_cache(dataset, folder), None
    try:
        cached, reason = _decision(dataset, _epochs_left(trainer))
    except (DatasetError, OptionsError, OSError) as error:  # of the place, or what is there
        cached, reason = None, str(error)
        warnings.warn(f"No samples are kept (cache='auto'): {error}", FastDataWarning, stacklevel=2)
    said = f"samples are {'not ' if cached is None else ''}kept (cache='auto'): {reason}"
    return dataset if cached is None else cached, said


def _decision(dataset: Dataset[Any], epochs: float) -> tuple[Dataset[Any] | None, str]:
    """Return the dataset with a cache, or None if samples are not to be kept; and why."""
    try:
        cached = with_cache(dataset, "disk")
    except DatasetError as error:
        return None, str(error)
    cache = cache_of(cached)
    assert cache is not None  # which with_cache() has made
    cache.optional = cached is not dataset
    reason = f"an earlier run has kept {cache.stored} of {len(cache)}"
    if not cache.stored:
        pays, reason = _gain(dataset, cache, epochs)
        if not pays:
            return None, reason
    with made_by_one(cache.folder):  # which fails where nothing can be written
        return cached, reason


def _gain(dataset: Dataset[Any], cache: CachedDataset, epochs: float) -> tuple[bool, str]:
    """Return whether keeping samples pays, and why."""
    if len(cache) < 2:
        return False, "there are too few"
    with tempfile.TemporaryDirectory() as folder:
        method = multiprocessing.get_start_method()
        found = try_apart(_measure, dataset, folder, start_method=method, deadline_s=_DEADLINE_S)
    gain: CacheGain | None = found.values.get("gain")
    if gain is None:
        failure = found.failure
        if failure is not None and isinstance(failure.error, DatasetError):
            return False, str(failure.error)
        return False, f"a process that tried it {'failed' if failure is None else failure.what}"
    reason = gain.why_not(
        disk_bytes=room_bytes(cache.folder),
        memory_bytes=read_host_memory().available_bytes / 2,
        epochs=epochs,
    )
    return reason is None, reason or str(gain)


def _measure(dataset: Dataset[Any], folder: str, tell: Tell) -> None:
    tell("gain", measure_gain(dataset, folder))


def _epochs_left(trainer: Trainer | None) -> float:
    most = None if trainer is None else trainer.max_epochs
    if trainer is None or most is None or most < 0:
        return math.inf
    return most - trainer.current_epoch

"""What a data module is made of: datasets, loaders taken apart, orders of samples, and caches."""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeGuard, cast

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from lightning_fastdata.batches.bad_samples import BadSamplePolicy, BadSamples
from lightning_fastdata.caches.cached import (
    CachedDataset,
    CacheGain,
    cache_of,
    measure_gain,
    with_cache,
)
from lightning_fastdata.caches.folders import CacheFolder, made_by_one, room_bytes
from lightning_fastdata.errors import (
    DatasetError,
    FastDataWarning,
    OptionsError,
    check,
    is_whole,
)
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.loading.facts import Tell, try_apart
from lightning_fastdata.loading.loader import TAKEN_OVER, FastDataLoader, Original
from lightning_fastdata.loading.source import order_of
from lightning_fastdata.order.epoch_order import Rank, dataset_length, rank_now
from lightning_fastdata.order.lengths import BucketBatchSampler
from lightning_fastdata.order.samplers import (
    BlockShuffleSampler,
    RankBatchSampler,
    SharedSampler,
    ShuffleSampler,
    as_given,
    deciding,
    epoch_order,
    is_drawn_at_start,
    is_in_blocks,
    rows_in,
    split_of,
)
from lightning_fastdata.plugin import seams
from lightning_fastdata.prove.session import is_shuffled, own_method
from lightning_fastdata.tree import find_instances, held_by, is_a, loaded_classes
from lightning_fastdata.types import STAGES, Shuffle, Stage, has_own_order

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.loading.options import LoaderOptions
    from lightning_fastdata.loading.plan_for import LoaderSpec
    from lightning_fastdata.plugin.module import DataModule

DATASET_METHOD: Final = {stage: f"{stage}_dataset" for stage in STAGES}
"""Stage -> name of the method that a subclass writes to return its dataset."""
_MEASURED_WITHIN_S: Final = 30.0
_WORKERS: Final = ("num_workers", "prefetch_factor", "persistent_workers")
_BY_BATCH_SAMPLER: Final = ("batch_size", "sampler", "drop_last")


# -- what a dataset method returns -----------------------------------------------------------------


def datasets_of(module: DataModule, stage: Stage) -> Any:
    """Return what the dataset method of a stage returns, or the dataset that took its place.

    ``self.train_dataset = ...`` in ``setup()``, as many data modules have it, hides the method.
    """
    found = getattr(module, DATASET_METHOD[stage])
    # A dataset of any class may have a __call__ of its own.
    is_dataset = isinstance(found, Dataset) or hasattr(type(found), "__getitem__")
    return found() if callable(found) and not is_dataset else found


def named(datasets: object, name: str) -> list[tuple[str, Any]]:
    """Return each dataset, or loader, with the name that messages call it by.

    Raises:
        DatasetError: The datasets are all splits of one Hugging Face dataset.
    """
    if is_missing(datasets):
        return []
    kind = type(datasets).__name__
    if isinstance(datasets, Mapping) and kind.endswith("DatasetDict"):
        raise DatasetError(
            f"{name} is the {kind} of all splits ({', '.join(datasets)}). "
            f"Return one of them: [{next(iter(datasets))!r}]."
        )
    if _is_by_name(datasets):
        return [(f"{name}[{key!r}]", dataset) for key, dataset in datasets.items()]
    if _is_several(datasets):
        return [(f"{name}[{i}]", dataset) for i, dataset in enumerate(datasets)]
    return [(name, datasets)]


def in_form_of(datasets: object, values: Sequence[Any]) -> Any:
    """Return one value for each dataset, in the order of :func:`named`, in the datasets' form.

    ``datasets`` is one dataset, or several by name or position, but not none at all.
    """
    if _is_by_name(datasets):
        return dict(zip(datasets, values, strict=True))
    return list(values) if _is_several(datasets) else values[0]


def is_missing(datasets: object) -> bool:
    """Whether there is no dataset at all."""
    return datasets is None or (isinstance(datasets, list | tuple | dict) and len(datasets) == 0)


def _is_by_name(datasets: object) -> TypeGuard[Mapping[Any, Any]]:
    """Whether these are datasets by name, rather than one whose columns have names."""
    one = isinstance(datasets, Dataset) or hasattr(type(datasets), "__getitems__")
    return isinstance(datasets, Mapping) and not one


def _is_several(datasets: object) -> TypeGuard[Sequence[Any]]:
    """Whether these are datasets, or loaders, rather than one dataset that is a sequence."""
    if isinstance(datasets, Dataset) or not isinstance(datasets, list | tuple):
        return False
    # One is enough: an item among them that is no dataset is refused by its position. Datasets of
    # Hugging Face have __getitems__ in common with torch's.
    return any(
        isinstance(each, Dataset | DataLoader | GivenLoader) or hasattr(each, "__getitems__")
        for each in datasets
    )


def refuse_loaders(datasets: Iterable[object], name: str, stage: Stage) -> None:
    """Raise DatasetError if one of the datasets of a dataset method is a DataLoader."""
    first = next((each for each in datasets if isinstance(each, DataLoader)), None)
    if first is not None:
        raise DatasetError(
            f"{name} returned a {type(first).__name__}. Return its dataset, or make the data "
            f"module by FastDataModule.from_loaders({stage}=...). To use the loader as it is, "
            f"return it from {stage}_dataloader()."
        )


def told_of_pipelines(dataset: object, name: str, stage: Stage) -> list[str]:
    """Return, for each pipeline that a dataset holds itself, how to have a device compute it.

    They are Albumentations' or torchvision v2's. ``name`` is how the user knows the dataset.
    """
    kinds = (
        *loaded_classes("albumentations", "BaseCompose", "BasicTransform"),
        *loaded_classes("torchvision.transforms.v2", "Transform"),
    )
    told = []
    for pipeline in find_instances(dataset, kinds):
        library = type(pipeline).__module__.partition(".")[0]
        attribute = next((key for key, one in held_by(dataset).items() if one is pipeline), None)
        where, how = f"A part of {name}", f"give it to the data module as the {stage} of augment="
        if attribute is not None:
            where, given = f"{name}.{attribute}", f"dataset.{attribute}"
            given = given if stage == "train" else f"{{{stage!r}: {given}}}"
            how = f"write augment={given}, and give the dataset {attribute}=None"
        told.append(
            f"{where} is a {type(pipeline).__name__} of {library} that runs in the workers. To "
            f"have it computed on the device, {how}."
        )
    return told


# -- loaders that a user has -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class GivenLoader:
    """What a DataLoader says of its batches."""

    dataset: Dataset[Any]
    arguments: Mapping[str, Any]
    """Arguments of ``make_loader`` that the loader settles, except for the batch size."""
    batch_size: int | None
    """Samples in a batch; None where a batch sampler decides it, or samples come as they are."""
    base: int | None = None
    """Data module's ``batch_size`` for which this loader's holds; with another one it is scaled."""
    original: Original | None = None
    """The loader itself, which a program may change."""

    def scaled(self, rows: int, batch_size: int) -> int:
        """Return a size of batches where the data module's ``batch_size`` is this.

        Raises:
            OptionsError: There are no such batches.
        """
        name = "batch_size of the DataLoader that was given to from_loaders()"
        check(name, rows, is_whole(rows, 1), "whole numbers from 1")
        return rows if self.base is None else max(1, round(rows * batch_size / self.base))

    def now(self, batch_size: int) -> dict[str, Any]:
        """Return the arguments as they are now, where the data module's ``batch_size`` is this."""
        known = dict(self.arguments)
        if self.original is not None:
            unseen = self.original.unseen()
            known |= {name: unseen[name] for name in TAKEN_OVER if name in unseen}
        if "batch_sampler" in known:
            return known
        rows = known.get("batch_size", self.batch_size)
        return {**known, "batch_size": None if rows is None else self.scaled(rows, batch_size)}


def taken_apart(
    item: Any, batch_size: int, options: LoaderOptions | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of an item that a dataset method returned, and arguments of its loader.

    What the user set in the options wins over a :class:`GivenLoader`.
    """
    if not isinstance(item, GivenLoader):
        return item, {}
    known = item.now(batch_size)
    chosen = () if options is None else options.set_by_user()
    return item.dataset, {name: value for name, value in known.items() if name not in chosen}


def given_loaders(loaders: Any, name: str, *, chosen: bool) -> Any:
    """Take a DataLoader, or a list or dict of them, apart: a :class:`GivenLoader` for each.

    ``chosen``: the number of workers is to be chosen.

    Raises:
        OptionsError: One is no DataLoader, or makes its batches in its own way.
    """
    given = [_given(one, place, chosen=chosen) for place, one in named(loaders, name)]
    return in_form_of(loaders, given)


def _given(loader: object, name: str, *, chosen: bool) -> GivenLoader:
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise OptionsError(
            f"{name} is of type {kind}; from_loaders() takes torch DataLoaders, a list or a dict "
            "of them. Give datasets to from_datasets(). A loader of another kind stays as it is if "
            "a subclass returns it from train_dataloader(), val_dataloader(), ..."
        )
    own = own_method(loader)
    if own is not None and not isinstance(loader, FastDataLoader):
        raise OptionsError(
            f"{name} is a {kind}, which makes its batches in its own way ({own}). Give its "
            "dataset to from_datasets(), or have a subclass return it from train_dataloader(), "
            "val_dataloader(), ..., which leaves it as it is."
        )
    if isinstance(loader, FastDataLoader) and loader.transform:
        raise OptionsError(
            f"{name} is a FastDataLoader with a transform. Give the transform to the data module "
            "as augment=."
        )
    original = Original(loader)
    now = original.settings()
    arguments = _order(loader, now) | _workers(loader, chosen=chosen)
    batches = loader.batch_size is not None or loader.batch_sampler is not None
    if loader.collate_fn is not (default_collate if batches else default_convert):
        arguments["collate_fn"] = loader.collate_fn
    if now["worker_init_fn"] is not None:
        arguments["worker_init_fn"] = now["worker_init_fn"]
    if loader.generator is not None:
        # Torch draws a seed from it in each epoch, unless the workers stay, and often the order.
        arguments["generator"] = loader.generator
        arguments["persistent_workers"] = _keeps(loader)
    if now.get("drop_last", loader.drop_last):
        arguments["drop_last"] = True
    if isinstance(loader, FastDataLoader):
        arguments["seed"] = loader.seed
    return GivenLoader(loader.dataset, arguments, now.get("batch_size"), original=original)


def _order(loader: DataLoader[Any], now: Mapping[str, Any]) -> dict[str, object]:
    """Return the arguments for the order of samples; a plain shuffle is left to the data module.

    ``now``: settings of the loader that a program may have changed since it was made.
    """
    if isinstance(loader.dataset, IterableDataset):
        return {}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    sampler: object = now.get("sampler", loader.sampler)
    data: object = loader.dataset
    if type(sampler) is SequentialSampler and sampler.data_source is data:
        return {"shuffle": False}
    plain = sampler is loader.sampler and is_shuffled(loader)
    if plain and getattr(sampler, "generator", None) is None:
        return {"shuffle": True}
    return {"sampler": sampler}


def _workers(loader: DataLoader[Any], *, chosen: bool) -> dict[str, object]:
    """Return the arguments on workers that are kept; ``chosen``: their number is left open."""
    taken: dict[str, object] = {}
    if loader.multiprocessing_context is not None:
        taken["multiprocessing_context"] = loader.multiprocessing_context.get_start_method()
    if loader.timeout:
        taken["timeout"] = loader.timeout
    if not loader.in_order:
        taken["in_order"] = False
    left_open = chosen or (isinstance(loader, FastDataLoader) and loader.training.chosen)
    # Reading in the training process sees what steps change. Which batches a stream gives depends
    # on how many workers share it out. A sampler of the user's may look at what steps write, and is
    # asked ahead for each worker.
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    stream = isinstance(loader.dataset, IterableDataset)
    stays = not loader.num_workers or stream or not is_drawn_at_start(source)
    if stays and not left_open:
        names = _WORKERS if loader.num_workers else _WORKERS[:1]
        taken |= {name: getattr(loader, name) for name in names}
    if (stream and loader.num_workers) or "persistent_workers" in taken:
        taken["persistent_workers"] = _keeps(loader)  # a stream may go on where it was
    return taken


def _keeps(loader: DataLoader[Any]) -> object:
    """Return whether workers stay between epochs; a FastDataLoader may say: while unchanged."""
    return getattr(loader, "keeps", loader.persistent_workers)


# -- what becomes of a loader's order and of its bad samples ---------------------------------------


def has_order(arguments: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a loader say which samples come in which order."""
    return any(arguments.get(name) is not None for name in ("sampler", "batch_sampler"))


def ordered(
    spec: LoaderSpec, arguments: Mapping[str, Any], shuffle: Shuffle | None, seed: int
) -> dict[str, Any]:
    """Return the arguments of a loader with the sampler that shuffles it, if it is shuffled.

    Training is shuffled, by the seed, unless ``shuffle`` or an argument of this name says
    otherwise.

    Raises:
        OptionsError: A stream is to be shuffled.
    """
    own = dict(arguments)
    if has_order(own):
        return own
    shuffle = own.pop("shuffle", shuffle)
    if spec.is_stream:
        if shuffle:
            raise OptionsError(
                f"shuffle={shuffle!r}, but {type(spec.dataset).__name__} is a stream, which has no "
                "index to shuffle. Shuffle in the stream, and leave out shuffle."
            )
        return own
    if has_own_order(spec.dataset):
        return {**own, "shuffle": shuffle}  # the loader refuses it
    sized = cast("Any", spec.dataset)
    if is_in_blocks(shuffle):
        own["sampler"] = BlockShuffleSampler(sized, seed=seed)
    elif spec.stage == "train" if shuffle is None else shuffle:
        own["sampler"] = ShuffleSampler(sized, seed)
    return own


def shared_out(
    spec: LoaderSpec,
    settings: Mapping[str, Any],
    given: Mapping[str, Any],
    trainer: Trainer | None,
) -> dict[str, Any]:
    """Return the arguments of a loader: the ``settings``, over which those ``given`` win.

    Several ranks share out the order, whoever gives it. Arguments that a batch sampler excludes are
    left out, unless they were given, too: then torch refuses them.
    """
    arguments = {**settings, **given}
    share = None if spec.is_stream else _share_of_rank(spec, arguments, trainer)
    if isinstance(share, SharedSampler):
        arguments["sampler"] = share
    elif share is not None:
        arguments = {**_without(arguments, _BY_BATCH_SAMPLER), "batch_sampler": share}
    elif given.get("batch_sampler") is not None:
        arguments = _without(arguments, [name for name in _BY_BATCH_SAMPLER if name not in given])
    return arguments


def _share_of_rank(
    spec: LoaderSpec, arguments: Mapping[str, Any], trainer: Trainer | None
) -> RankBatchSampler | SharedSampler | None:
    """Return this rank's share of an order; None: it is not shared out, or shares itself out."""
    if trainer is None or trainer.world_size == 1 or not seams.spreads_samples(trainer):
        return None
    if spec.stage != "train" and seams.attributes_of(trainer).overfit_batches:
        return None  # Lightning puts samplers of its own there
    kwargs = trainer.distributed_sampler_kwargs
    batches, order = arguments.get("batch_sampler"), arguments.get("sampler")
    given = order if batches is None else batches
    if kwargs is not None and isinstance(given, BucketBatchSampler):
        part = Rank(int(kwargs["rank"]), int(kwargs["num_replicas"]))
        # Ranks that compute one model together take the same part.
        given.sampler.part = None if part == rank_now() else part
    if kwargs is None or split_of(given) is not None:
        return None
    if given is None and spec.length is None:
        return None
    given = SequentialSampler(cast("Any", spec.dataset)) if given is None else given
    size = arguments["batch_size"] if batches is None else None
    drop_last = arguments["drop_last"] if batches is None else None
    share = SharedSampler(
        given,
        batch_size=size,
        num_replicas=int(kwargs["num_replicas"]),
        rank=int(kwargs["rank"]),
        drop_last=False if spec.stage == "predict" else drop_last,  # as Lightning has it
        seed=arguments["seed"],
    )
    if size is None and batches is None:
        return share
    return RankBatchSampler(share, rows_in(given) or size or 1, share.drop_last)


def bad_samples_of(
    asked: BadSamplePolicy | BadSamples, trainer: Trainer | None, log_folder: Callable[[], str]
) -> BadSamples:
    """Return the rule for bad samples; unless they end the training, they are listed in a file.

    ``log_folder`` returns the folder in which a run of the trainer logs.

    Raises:
        OptionsError: Several ranks are to skip samples.
    """
    rule = BadSamples.of(asked)
    if rule.policy == "skip" and trainer is not None and trainer.world_size > 1:
        raise OptionsError(
            f"on_bad_sample='skip' with {trainer.world_size} ranks: one that leaves out a whole "
            "batch comes to fewer of them, and the others would wait for it for ever. Use "
            "'replace', or evaluate on one device."
        )
    if rule.quarantine_file is None and rule.policy != "raise" and trainer is not None:
        runs = seams.running_stage(trainer) is not None
        folder = log_folder() if runs else trainer.default_root_dir
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


def compare_ranks(loader: FastDataLoader, name: str, trainer: Trainer) -> None:
    """Compare a sampler of the user's among the ranks, all of which have to call this.

    Raises:
        OptionsError: It gives them different numbers of batches.
    """
    share, sampler = loader.sampler, deciding(as_given(order_of(loader)))
    stream = isinstance(loader.dataset, IterableDataset)
    shares = isinstance(share, DistributedSampler) and not stream
    if not (shares and torch.distributed.is_initialized()):
        return
    limit, length = trainer.limit_train_batches, dataset_length(loader)
    if length is None and not isinstance(share, SharedSampler):
        _tell_of_uneven_parts(sampler, trainer)
    batches = min(length or 0, limit) if isinstance(limit, int) else length or 0
    fewest, most = -seams.of_ranks(trainer, -batches), seams.of_ranks(trainer, batches)
    about = f"{name}: {type(sampler).__name__}"
    if fewest < most:
        raise OptionsError(
            f"{about} gives ranks {fewest} to {most} batches, and those with more would wait for "
            f"ever. Have it give all as many, or set Trainer(limit_train_batches={fewest})."
        )
    own = getattr(sampler, "generator", None)
    held = own.get_state().numpy().tobytes() if isinstance(own, torch.Generator) else b""
    drawn = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    seed: Any = getattr(sampler, "seed", loader.seed if drawn else None)
    state = zlib.crc32(held + (str(int(seed)).encode() if is_whole(seed) else b""))
    if -seams.of_ranks(trainer, -state) < seams.of_ranks(trainer, state):
        warnings.warn(
            f"{about} is not seeded alike on all ranks: by its generator, or as seed_everything() "
            "had another number on each. They share out other orders, so that samples come twice "
            "or not at all, or have the order of rank 0 behind a checkpoint. Seed it by one "
            "number, as FastDataModule(seed=...) does.",
            FastDataWarning,
            stacklevel=2,
        )


def settle_sharing(
    loader: FastDataLoader, name: str, stage: Stage, trainer: Trainer | None
) -> None:
    """Say what becomes of samples that do not divide, and average evaluation as on one device.

    Where several ranks train on a stream, warn of parts that are not equally long.
    """
    parts = stage == "train" and isinstance(loader.dataset, IterableDataset)
    if parts and trainer is not None and trainer.world_size > 1:
        _tell_of_uneven_parts(loader.dataset, trainer)
    share = loader.sampler
    if trainer is None or not isinstance(share, SharedSampler):
        return
    # An order of this package gives each sample once, which is not worth a line.
    left = None if epoch_order(loader.batch_sampler) is not None else share.left_over()
    if left is not None and trainer.is_global_zero:
        seams.print_line(trainer, f"fastdata: {name}: {left}")
    if stage != "train":
        seams.average_exactly(trainer)


# -- samples that are kept -------------------------------------------------------------------------


def kept(
    dataset: Dataset[Any], folder: CacheFolder, trainer: Trainer | None
) -> tuple[Dataset[Any], str | None]:
    """Return the dataset with a cache, and what was decided, if there was anything to decide.

    ``"auto"`` is ``"disk"`` where an earlier run has begun the cache, or where some samples, read
    in a process that is thrown away, show that it pays in the epochs of the training: see
    :meth:`CacheGain.why_not`. Ranks decide for themselves; their samples are the same in any case.
    If a cache cannot be used, that is said, and ends no training.
    """
    if folder != "auto":
        return with_cache(dataset, folder), None
    epochs = math.inf
    if trainer is not None and trainer.max_epochs is not None and trainer.max_epochs >= 0:
        epochs = trainer.max_epochs - trainer.current_epoch
    try:
        cached, reason = _decision(dataset, epochs)
    except (DatasetError, OptionsError, OSError) as error:  # of the folder, or of what it holds
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
    with made_by_one(cache.folder):  # fails where nothing can be written
        return cached, reason


def _gain(dataset: Dataset[Any], cache: CachedDataset, epochs: float) -> tuple[bool, str]:
    if len(cache) < 2:
        return False, "there are too few"
    with tempfile.TemporaryDirectory() as folder:
        method = multiprocessing.get_start_method()
        found = try_apart(
            _measure, dataset, folder, start_method=method, deadline_s=_MEASURED_WITHIN_S
        )
    gain: CacheGain | None = found.values.get("gain")
    if gain is None:
        failure = found.failure
        if failure is not None and isinstance(failure.error, DatasetError):
            return False, str(failure.error)
        return False, f"a process that tried it {'failed' if failure is None else failure.what}"
    reason = gain.why_not(
        disk_bytes=room_bytes(cache.folder, cache.ranks),
        memory_bytes=read_host_memory().available_bytes / 2,
        epochs=epochs,
    )
    return reason is None, reason or str(gain)


def _measure(dataset: Dataset[Any], folder: str, tell: Tell) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastDataWarning)  # of a cache that nobody will use
        tell("gain", measure_gain(dataset, folder))

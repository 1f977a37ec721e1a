"""One loader of a data module: whether samples are kept, their order, how ranks share them."""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, cast

from torch.utils.data import Dataset, IterableDataset, SequentialSampler

from lightning_fastdata.batches.bad_samples import BadSamples
from lightning_fastdata.caches.cached import CachedSource
from lightning_fastdata.caches.folders import CacheFolder, cache_root, hold, room_bytes
from lightning_fastdata.caches.gain import measure_gain
from lightning_fastdata.caches.image_cache import cache_of, with_cache
from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.order.block_shuffle import BlockShuffleSampler, is_in_blocks
from lightning_fastdata.order.epoch_order import can_share_evenly, dataset_length
from lightning_fastdata.order.samplers import (
    EvaluationBatchSampler,
    RankBatchSampler,
    RankSampler,
    ShuffleSampler,
)
from lightning_fastdata.planning.facts.probe_process import Tell, try_apart
from lightning_fastdata.plugin.seams.internals import spreads_samples
from lightning_fastdata.plugin.seams.loaders import average_exactly, silence_padding_warning
from lightning_fastdata.plugin.seams.trainer import running_stage
from lightning_fastdata.tree import is_a

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.caches.cached import CachedDataset
    from lightning_fastdata.caches.gain import CacheGain
    from lightning_fastdata.planning.loader_plan import LoaderPlan
    from lightning_fastdata.types import Shuffle, Stage

_NEEDS_WORKERS: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
_REPLACED_BY_BATCH_SAMPLER: Final = ("batch_size", "sampler", "drop_last")
_ORDERS: Final = ("shuffle", "sampler", "batch_sampler")
_DEADLINE_S: Final = 30.0


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
    otherwise. With several ranks, evaluation is put into batches that can be shared among them,
    unless an override says which samples come in which order.
    """
    arguments = {**settings, **plan.dataloader_kwargs(), "executor": plan.executor}
    arguments["on_bad_sample"] = bad_samples_of(plan, trainer)
    arguments["actor_options"] = plan.actor_options
    if plan.stall_timeout_s is not None:
        arguments["stall_timeout"] = plan.stall_timeout_s
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
    shuffled = not stream and (stage == "train" if shuffle is None else shuffle)
    arguments |= _without(overrides, () if plan.num_workers else _NEEDS_WORKERS)
    given = arguments.get("sampler")
    by_blocks = type(given) is BlockShuffleSampler and given.data_source is sized
    ordered = any(arguments.get(name) is not None for name in _ORDERS)
    spread = trainer is not None and trainer.world_size > 1 and spreads_samples(trainer)
    batches = not stream and arguments["batch_size"] is not None
    evaluates = spread and stage != "train" and batches and not (ordered or shuffled)
    share = None
    if stage == "train" and spread and batches and (by_blocks or (shuffled and not ordered)):
        share = _share_of_rank(sized, arguments, cast("Trainer", trainer))
    if share is not None:
        arguments = {**_without(arguments, _REPLACED_BY_BATCH_SAMPLER), "batch_sampler": share}
    elif shuffled and not ordered:
        arguments["sampler"] = ShuffleSampler(sized, settings["seed"])
    elif evaluates and dataset_length(dataset) is not None:
        order = SequentialSampler(sized)
        sampler = EvaluationBatchSampler(order, arguments["batch_size"], arguments["drop_last"])
        arguments = {**_without(arguments, _REPLACED_BY_BATCH_SAMPLER), "batch_sampler": sampler}
    elif "batch_sampler" in overrides:
        replaced = [name for name in _REPLACED_BY_BATCH_SAMPLER if name not in overrides]
        arguments = _without(arguments, replaced)
    loader = FastDataLoader(dataset, **arguments)
    loader.plan = plan
    return loader


def _share_of_rank(
    dataset: Any, arguments: Mapping[str, Any], trainer: Trainer
) -> RankBatchSampler | None:
    """Return this rank's share of a shuffled training; None where it cannot come out even."""
    kwargs = trainer.distributed_sampler_kwargs
    if kwargs is None:
        return None
    ranks, size = int(kwargs["num_replicas"]), arguments["batch_size"]
    drop_last = arguments["drop_last"]
    if not (drop_last or can_share_evenly(len(dataset), size, ranks)):
        return None
    given = arguments.get("sampler")
    by_blocks = given if isinstance(given, BlockShuffleSampler) else None
    sampler = RankSampler(
        dataset,
        batch_size=size,
        num_replicas=ranks,
        rank=int(kwargs["rank"]),
        seed=arguments["seed"] if by_blocks is None else by_blocks.seed,
        drop_last=drop_last,
        blocks=None if by_blocks is None else by_blocks.blocks,
    )
    return RankBatchSampler(sampler, size, drop_last)


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
    if plan.on_bad_sample == "skip" and trainer is not None and trainer.world_size > 1:
        raise OptionsError(
            f"on_bad_sample='skip' with {trainer.world_size} ranks: one that leaves out a whole "
            "batch comes to fewer of them, and the others would wait for it for ever. Use "
            "'replace', or evaluate on one device."
        )
    file = plan.quarantine_file
    if file is None and plan.on_bad_sample != "raise" and trainer is not None:
        # All ranks are asked for a trainer's log folder together, as they are in its methods.
        runs = running_stage(trainer) is not None
        folder = (trainer.log_dir if runs else None) or trainer.default_root_dir
        rank = f"-rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        file = os.path.join(folder, f"bad_samples{rank}.jsonl")  # noqa: PTH118 - may be a URL
    return BadSamples(plan.on_bad_sample, plan.bad_sample_budget, file)


def _without(arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}


def _tell_of_uneven_parts(stream: IterableDataset[Any], trainer: Trainer) -> None:
    even = isinstance(trainer.limit_train_batches, int) or is_a(stream, "litdata")
    if trainer.world_size > 1 and not even:
        warnings.warn(
            f"{trainer.world_size} ranks train on {type(stream).__name__}, a stream, each on its "
            "part. If a part gives fewer batches than another, its rank ends the epoch first, and "
            "the others wait for it for ever, as Lightning does not compare them. Give "
            "Trainer(limit_train_batches=N) a number of batches that each rank has.",
            FastDataWarning,
            stacklevel=2,
        )


def settle_sharing(
    loader: FastDataLoader, name: str, stage: Stage, trainer: Trainer | None
) -> None:
    """Make sure that what the ranks share in evaluation can be, and is averaged as on one device.

    Of a stream that several ranks train on it is said what happens if their parts are not as long.
    A loader that Lightning shares in its own way is left alone.

    Raises:
        DatasetError: There is less to predict than there are ranks, whereupon Lightning ends those
            that have nothing and leaves the others waiting.
    """
    if trainer is not None and stage == "train" and isinstance(loader.dataset, IterableDataset):
        _tell_of_uneven_parts(loader.dataset, trainer)
    if trainer is None or not isinstance(loader.batch_sampler, EvaluationBatchSampler):
        return
    average_exactly(trainer)
    silence_padding_warning(trainer)
    length = dataset_length(loader.dataset) or 0
    # Few strategies cannot say before they are set up how many share, and then it is not asked.
    if stage != "predict" or length >= trainer.world_size or running_stage(trainer) != stage:
        return
    replicas = int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
    if length < replicas:
        raise DatasetError(
            f"{name} returned {length} samples to predict on {replicas} devices, and each needs "
            "one. Predict on fewer devices."
        )


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
    hold(cache.folder)  # which fails where nothing can be written
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
    # Records from afar come quicker from a disk, too; what is made of them is not kept.
    from_afar = isinstance(cache, CachedSource)
    reason = gain.why_not(
        disk_bytes=room_bytes(cache_root("disk"), in_memory=False),
        memory_bytes=math.inf if from_afar else read_host_memory().available_bytes / 2,
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

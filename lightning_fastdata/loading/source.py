"""What gives the batches of a FastDataLoader, and what the model and the tuner know of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    default_collate,
)

from lightning_fastdata.augment import WorkerTransform
from lightning_fastdata.batches.bad_samples import SampleGuard
from lightning_fastdata.batches.collate import collate_samples
from lightning_fastdata.batches.keyed import keyed, reads_together
from lightning_fastdata.batches.libraries import tell_rank
from lightning_fastdata.batches.staged import FirstOfPairs, StagingCollate
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.fork_hazards import forks
from lightning_fastdata.executors.gather.rows import rows_of
from lightning_fastdata.executors.kinds import executor_for, kind_of, room_elsewhere
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.system_calls import OpenFile, files_being_read, open_anew
from lightning_fastdata.loading.kept_executor import KeptExecutor, SourceSettings
from lightning_fastdata.order.epoch_order import Rank, rank_now
from lightning_fastdata.order.indices import EpochIndices
from lightning_fastdata.order.ranks import deciding
from lightning_fastdata.order.samplers import is_drawn_at_start
from lightning_fastdata.planning.worker_count import look_ahead_batches, most_workers
from lightning_fastdata.randomness.generators import OwnGenerators
from lightning_fastdata.randomness.seeds import EpochCell
from lightning_fastdata.stamps.batch_stamps import WaitWatch
from lightning_fastdata.stamps.stamped import ShowDataset, WatchedSampler, stamped
from lightning_fastdata.tuning.simulate import LoaderSetup, Scheduling
from lightning_fastdata.tuning.tuner import Tuner, log
from lightning_fastdata.types import Batch

if TYPE_CHECKING:
    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.planning.plan_for import LoaderPlan

Source: TypeAlias = "DataLoader[Any] | KeptExecutor"
Loader: TypeAlias = "FastDataLoader[Any] | SourceSettings"
"""A loader, or its settings, which have the same names."""
_TORCH_PREFETCH: Final = 2
"""Torch's own default."""
_PASSED_ON: Final = (
    "num_workers", "pin_memory", "multiprocessing_context", "generator",
    "prefetch_factor", "pin_memory_device", "in_order",
)  # fmt: skip
"""Settings that torch's own loader takes as they are."""


def makes_batches(loader: Loader) -> bool:
    """Return whether samples are put together into batches."""
    return loader.batch_size is not None or loader.batch_sampler is not None


def order_of(loader: Loader) -> Any:
    """Return what gives the indices of samples, or of batches."""
    return loader.batch_sampler if makes_batches(loader) else loader.sampler


def reads_with_torch(loader: Loader) -> bool:
    """Return whether torch's own iterator reads the dataset."""
    pipe = isinstance(loader.dataset, IterDataPipe | MapDataPipe)
    return kind_of(loader.executor).is_torch or pipe


def indices_of(settings: SourceSettings) -> EpochIndices | None:
    """Return what gives the indices of a loader's epochs; None of a stream."""
    if isinstance(settings.dataset, IterableDataset):
        return None
    seed = None if settings.run is None else settings.seed
    return EpochIndices(order_of(settings), arrays=kind_of(settings.executor).gathers, seed=seed)


def open_source(
    settings: SourceSettings,
    indices: EpochIndices | None,
    epochs: EpochCell,
    *,
    reported: dict[str, int],
    stamps: WaitWatch | None,
) -> Source:
    """Return what gives the batches of a loader.

    It holds no reference to the loader, so that one that is dropped stops its workers at once.

    Args:
        settings: The loader, as it is set up now.
        indices: Gives the indices of its epochs; None of a stream.
        epochs: Where it says which epoch it is in.
        reported: Holds under ``"batches"`` the length that a stream has reported.
        stamps: Where to note calls of the sampler of torch's own iterator; None: nowhere.
    """
    worker_part = None
    if settings.transform is not None:
        worker_part = settings.transform.in_worker(on_device=settings.on_device)
    collate_fn = _collation(settings, worker_part)
    dataset = keyed(settings.dataset, seed=settings.seed, epoch=epochs, transform=worker_part)
    if not reads_with_torch(settings):
        return _open_executor(settings, indices, dataset, collate_fn, epochs, reported)
    if stamps is not None:
        dataset, collate_fn = stamped(dataset, collate_fn)
    order: dict[str, Any] = {"batch_size": settings.batch_size, "drop_last": settings.drop_last}
    if indices is not None:
        name = "batch_sampler" if makes_batches(settings) else "sampler"
        order = {"batch_size": 1 if makes_batches(settings) else None}
        order[name] = indices if stamps is None else WatchedSampler(indices, stamps)
    start = settings.worker_init_fn
    if settings.num_workers:
        start = WorkerStart(start if stamps is None else ShowDataset(start))
    return DataLoader(
        dataset,
        collate_fn=collate_fn,
        worker_init_fn=start,
        persistent_workers=settings.keeps is True,
        timeout=0 if settings.timeout == "auto" else settings.timeout,
        **order,
        **{name: getattr(settings, name) for name in _PASSED_ON},
    )


def epoch_of(source: Source, *, reported: bool) -> Iterator[Batch]:
    """Begin an epoch; ``reported``: the length of the loader was asked for."""
    if isinstance(source, DataLoader):
        if isinstance(source.worker_init_fn, WorkerStart):
            source.worker_init_fn.about_to_start(source.multiprocessing_context)
        if reported:
            with contextlib.suppress(TypeError):
                len(source)  # a stream that gives more than was reported is warned of
    return iter(source)


def _collation(
    settings: SourceSettings, worker_part: WorkerTransform | None
) -> Callable[[Any], Batch]:
    collate_fn = settings.collate_fn
    collate_fn = collate_samples if collate_fn is default_collate else collate_fn
    # A kept executor stages what has no draws itself, and may so collate in place.
    if settings.staged is not None and (worker_part is not None or reads_with_torch(settings)):
        return StagingCollate(collate_fn, worker_part, settings.staged)
    if worker_part is not None:
        return FirstOfPairs(collate_fn, worker_part, single=not makes_batches(settings))
    return collate_fn


def _open_executor(
    settings: SourceSettings,
    indices: EpochIndices | None,
    dataset: Dataset[Any],
    collate_fn: Callable[[Any], Batch],
    epochs: EpochCell,
    reported: dict[str, int],
) -> KeptExecutor:
    streamed = isinstance(settings.dataset, IterableDataset)
    executor = executor_for(settings.executor, stream=streamed, workers=settings.num_workers)
    default = collate_fn is collate_samples
    default = default and makes_batches(settings)
    in_rows = kind_of(executor).side_processes and default and not streamed
    gathered = in_rows and rows_of(dataset) is not None
    default = default and not gathered
    splits = default and not kind_of(executor).elsewhere
    ahead = settings.num_workers * (settings.prefetch_factor or 2)
    if not streamed:
        split = splits and not reads_together(settings.dataset)
        ahead = ahead_by_index(settings, settings.num_workers, split=split)
    plan = FetchPlan(
        dataset=dataset,
        collate_fn=collate_fn,
        default_collation=default,
        gathered=gathered,
        compared=() if streamed else (settings.dataset, settings.collate_fn),
        at_start=settings.chosen and is_drawn_at_start(order_of(settings)),
        standby=_stands_by(settings),
        batched=makes_batches(settings),
        drop_last=streamed and settings.drop_last,
        # The state of a stream runs on from sample to sample, and so do its random numbers.
        seed=None if streamed else settings.seed,
        own=None if streamed else OwnGenerators(settings.dataset),
        worker_init_fn=settings.worker_init_fn,
        timeout_s=None if settings.timeout == "auto" else settings.timeout,
        in_order=settings.in_order,
        context=settings.multiprocessing_context,
        look_ahead=ahead,
        memory_limit_bytes=read_host_memory().available_bytes // 4,
        guard=SampleGuard.of(
            settings.faults.rule,
            settings.dataset,
            deciding(settings.sampler),
            settings.seed,
        ),
        faults=settings.faults,
        rank=rank_now() if streamed else Rank(0, 1),
    )
    if settings.asked_prefetch_factor:  # large batches, too, as far as memory allows
        plan = replace(plan, ahead_bytes=plan.memory_limit_bytes)
    staged = isinstance(collate_fn, StagingCollate)
    return KeptExecutor(
        name=executor,
        plan=plan,
        settings=settings,
        indices=indices,
        epoch=epochs.get,
        staged=None if staged else settings.staged,
        reported_batches=partial(reported.get, "batches") if streamed else None,
    )


def _stands_by(settings: SourceSettings) -> bool:
    """Return whether the training process may read as well as workers, and as they would.

    What only workers do, or are watched for, needs them.
    """
    works = settings.worker_init_fn or settings.timeout != "auto"
    sure = is_drawn_at_start(order_of(settings)) and settings.in_order
    return settings.standby and sure and not works and settings.transform is None


def ahead_by_index(loader: Loader, workers: int, *, split: bool) -> int:
    """Return how many batches are under way at once, where side processes read by index.

    ``split``: the samples of one batch are given to several workers.
    """
    if not is_drawn_at_start(order_of(loader)):
        # It may look at what steps write, and is asked when torch asks it: for so many batches at
        # first, and for one before each is handed out.
        return workers * (loader.asked_prefetch_factor or _TORCH_PREFETCH) + 1
    return look_ahead_batches(
        workers,
        prefetch=loader.asked_prefetch_factor,
        batch_size=loader.batch_size or 1,
        split=split,
    )


def setup_of(loader: Loader, *, cpus: float, step_cpus: float) -> LoaderSetup | None:
    """Return the setup of a loader; None for what the model does not know.

    It knows loaders whose workers read by themselves: torch's own, ``"workers"`` and ``"ray"``, and
    those that read in the training process when a batch is asked for. It does not know
    ``"gather"``, whose caller helps its threads. It takes samples to be of one shape, and memory to
    suffice for the whole look-ahead.

    Args:
        loader: As it is set up now; it is not iterated.
        cpus: CPUs this process and its workers may use.
        step_cpus: CPUs the training process uses between two requests, see
            :class:`TrainingTimes`.
    """
    streamed = isinstance(loader.dataset, IterableDataset)
    torchs = reads_with_torch(loader)
    kind = kind_of(loader.executor)
    if kind.gathers and not streamed and not torchs:
        return None
    workers = loader.num_workers if torchs or not kind.caller_reads else 0
    scheduling: Scheduling = "sample" if splits_batches(loader) else "queue"
    if kind.elsewhere:
        scheduling = "actors"
    if torchs or streamed:
        scheduling = "batch"
    ahead = 1
    if workers and scheduling == "batch":
        ahead = workers * (loader.asked_prefetch_factor or _TORCH_PREFETCH)
    elif workers:
        ahead = ahead_by_index(loader, workers, split=splits_batches(loader))
    return LoaderSetup(
        workers=workers,
        look_ahead=ahead,
        scheduling=scheduling,
        in_order=loader.in_order,
        cpus=cpus,
        step_cpus=step_cpus,
        inline=kind.caller_reads,
    )


def splits_batches(loader: Loader) -> bool:
    """Return whether this package's executors share out the samples of one batch among workers.

    They do where samples of one form, read one at a time, are collated by default.
    """
    transform = loader.transform
    drawn = transform is not None and transform.in_worker(on_device=loader.on_device) is not None
    default = loader.collate_fn in (default_collate, collate_samples) and not drawn
    whole = kind_of(loader.executor).elsewhere or reads_together(loader.dataset)
    return default and makes_batches(loader) and not whole


def tuner_for(
    plan: LoaderPlan,
    own: Tuner | None = None,
    *,
    local_ranks: int = 1,
    tell: Callable[[str], None] = log.info,
) -> Tuner | None:
    """Return what tunes a loader of a plan, its ``own`` if it has one; None: nothing to tune."""
    if not plan.tuned or own is not None:
        return own if plan.tuned else None
    forked = plan.multiprocessing_context in (None, "fork")
    most, _ = most_workers(read_host_memory(), ranks=local_ranks, forked=forked, tasks=None)
    most = room_elsewhere(plan.executor, local_ranks) or most
    cpus = float(read_cpu_limit(local_ranks=local_ranks).usable_cpus)
    return Tuner(most_workers=most, cpus=cpus, tell=tell)


class WorkerStart:
    """Prepares a worker process of torch, then runs the user's own ``worker_init_fn``.

    It computes on one thread (torch sees to its own threads, not to OpenCV's), and takes the
    sharing strategy of its parent, which only a forked one has.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.strategy: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        self.then = then
        self.files: tuple[OpenFile, ...] = ()
        self.rank = rank_now()

    def about_to_start(self, context: BaseContext | str | None) -> None:
        """Note what a forked process will share with this one: call it before each start."""
        self.files = files_being_read() if forks(context) else ()

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker process of this number."""
        open_anew(self.files)
        tell_rank(self.rank)
        torch.multiprocessing.set_sharing_strategy(self.strategy)  # type: ignore[no-untyped-call]
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(0)
        if self.then is not None:
            self.then(worker_id)

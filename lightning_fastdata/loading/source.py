"""What gives the batches of a FastDataLoader: torch's own loader, an engine, or resident data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    default_collate,
)

from lightning_fastdata.batches.collate import (
    FirstOfPairs,
    RecordedCollate,
    StagingCollate,
    collate_samples,
)
from lightning_fastdata.batches.keyed import fetches_in_batches, keyed
from lightning_fastdata.device.resident import ResidentBatches, device_of
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import KINDS, executor_for
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.loading.engine import Engine
from lightning_fastdata.loading.worker_start import WorkerStart
from lightning_fastdata.order.epoch_order import epoch_order
from lightning_fastdata.order.repeats import spreading
from lightning_fastdata.order.sampled import index_batches
from lightning_fastdata.planning.worker_count import look_ahead_batches
from lightning_fastdata.randomness.own_generators import own_generators
from lightning_fastdata.stamps.stamped import ShowDataset, WatchedSampler, stampable, stamped

if TYPE_CHECKING:
    from lightning_fastdata.augment.contract import WorkerTransform
    from lightning_fastdata.augment.dataset_pipelines import DatasetRecording
    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.randomness.shared_epoch import EpochCell
    from lightning_fastdata.stamps.own_stamps import WaitWatch

Source: TypeAlias = "DataLoader[Any] | Engine | ResidentBatches"


def makes_batches(loader: DataLoader[Any]) -> bool:
    """Return whether samples are put together into batches."""
    return loader.batch_size is not None or loader.batch_sampler is not None


def reads_with_torch(loader: FastDataLoader) -> bool:
    """Return whether torch's own iterator reads the dataset."""
    pipe = isinstance(loader.dataset, IterDataPipe | MapDataPipe)
    return loader.device_resident is False and (KINDS[loader.executor].is_torch or pipe)


def takes_stamps(loader: FastDataLoader) -> bool:
    """Return whether stamps are to be taken of torch's own iterator."""
    recorded = loader.records is not None
    return recorded and reads_with_torch(loader) and stampable(loader.dataset)


def open_source(
    loader: FastDataLoader,
    epochs: EpochCell,
    *,
    prefetch_factor: int | None,
    told: dict[str, int],
    wait: WaitWatch,
) -> Source:
    """Return what gives the batches of a loader, as the loader is set up now.

    It holds no reference to the loader, so that one that is dropped stops its workers at once.

    Args:
        loader: The loader.
        epochs: Where it says which epoch it is in.
        prefetch_factor: As the user gave it, before torch put in its default.
        told: Holds under ``"batches"`` the length that was told of a stream.
        wait: Where calls of the sampler are noted, if torch's own loader makes them.
    """
    worker_part, recording = _parts_in_workers(loader)
    collate_fn = _collation(loader, worker_part, recording)
    streamed = isinstance(loader.dataset, IterableDataset)
    dataset = keyed(
        loader.dataset,
        seed=loader.seed,
        epoch=epochs,
        transform=worker_part,
        recording=recording,
    )
    if loader.device_resident is not False:
        return ResidentBatches(
            dataset,
            device_of(loader.device_resident),
            default_collation=collate_fn is collate_samples and makes_batches(loader),
            batches=partial(index_batches, cast("Any", loader.batch_sampler)),
            staged=loader.staged,
            generator=loader.generator,
        )
    if not reads_with_torch(loader):
        return _open_engine(
            loader, dataset, collate_fn, epochs, prefetch_factor=prefetch_factor, told=told
        )
    measured = takes_stamps(loader)
    if measured:
        dataset, collate_fn = stamped(dataset, collate_fn)
    order: dict[str, Any]
    if streamed:
        order = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif makes_batches(loader):
        order = {"batch_sampler": loader.batch_sampler}
    else:
        order = {"batch_size": None, "sampler": loader.sampler}
    if measured and not streamed:
        name = "batch_sampler" if makes_batches(loader) else "sampler"
        order[name] = WatchedSampler(order[name], wait)
    return DataLoader(
        dataset,
        **order,
        num_workers=loader.num_workers,
        collate_fn=collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=_worker_start(loader),
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )


def _parts_in_workers(
    loader: FastDataLoader,
) -> tuple[WorkerTransform | None, DatasetRecording | None]:
    """Return what runs on each sample, or what surrounds its reading: one of them at most."""
    worker_part = None
    if loader.transform is not None:
        worker_part = loader.transform.in_worker(on_device=loader.on_device)
    records = worker_part is None and loader.staged is not None
    return worker_part, loader.recording if records else None


def _collation(
    loader: FastDataLoader,
    worker_part: WorkerTransform | None,
    recording: DatasetRecording | None,
) -> Any:
    collate_fn = loader.collate_fn
    if collate_fn is default_collate:
        collate_fn = collate_samples
    collate_fn = spreading(collate_fn, worker_part)
    if recording is not None and loader.staged is not None:
        return RecordedCollate(collate_fn, recording, loader.staged)
    # An engine stages what has no draws itself, and may so collate in place.
    if loader.staged is not None and (worker_part is not None or reads_with_torch(loader)):
        return StagingCollate(collate_fn, worker_part, loader.staged)
    if worker_part is not None:
        return FirstOfPairs(collate_fn, worker_part, single=not makes_batches(loader))
    return collate_fn


def _open_engine(
    loader: FastDataLoader,
    dataset: Any,
    collate_fn: Any,
    epochs: EpochCell,
    *,
    prefetch_factor: int | None,
    told: dict[str, int],
) -> Engine:
    streamed = isinstance(loader.dataset, IterableDataset)
    executor = executor_for(loader.executor, stream=streamed, workers=loader.num_workers)
    default = collate_fn is collate_samples
    ahead = loader.num_workers * (loader.prefetch_factor or 2)
    if not streamed:
        ahead = look_ahead_batches(
            loader.num_workers,
            prefetch=prefetch_factor,
            batch_size=loader.batch_size or 1,
            split=default and makes_batches(loader) and not fetches_in_batches(loader.dataset),
        )
    several = KINDS[executor].threads_per_process > 1 and loader.num_workers > 1
    plan = FetchPlan(
        dataset=dataset,
        collate_fn=collate_fn,
        default_collation=default and makes_batches(loader),
        batched=makes_batches(loader),
        drop_last=streamed and loader.drop_last,
        # The state of a stream runs on from sample to sample, and so do its random numbers.
        seed=None if streamed else loader.seed,
        own=None if streamed else own_generators(loader.dataset, shared=several),
        worker_init_fn=loader.worker_init_fn,
        timeout_s=loader.timeout,
        stall_timeout_s=None if loader.stall_timeout == "auto" else loader.stall_timeout,
        in_order=loader.in_order,
        context=loader.multiprocessing_context,
        look_ahead=ahead,
        memory_limit_bytes=read_host_memory().available_bytes // 4,
        sharing_strategy=torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
        niceness=loader.worker_nice,
    )
    engine = Engine(
        executor,
        plan,
        batches=_index_batches(loader),
        epoch=epochs.get,
        order=partial(epoch_order, loader.batch_sampler) if makes_batches(loader) else None,
        workers=loader.num_workers,
        persistent=loader.persistent_workers,
        staged=None if isinstance(collate_fn, StagingCollate | RecordedCollate) else loader.staged,
        pin_memory=loader.pin_memory,
        page_lock=loader.page_lock,
        generator=loader.generator,
        told_batches=partial(told.get, "batches") if streamed else None,
    )
    engine.record(loader.records)
    return engine


def _worker_start(loader: FastDataLoader) -> Callable[[int], None] | None:
    if loader.num_workers == 0:
        return loader.worker_init_fn
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    then = ShowDataset(loader.worker_init_fn) if takes_stamps(loader) else loader.worker_init_fn
    return WorkerStart(strategy, loader.worker_nice, then)


def _index_batches(loader: FastDataLoader) -> Callable[[], Iterable[Any]]:
    if isinstance(loader.dataset, IterableDataset):
        return partial(repeat, loader.batch_size)
    source: Any = loader.batch_sampler if makes_batches(loader) else loader.sampler
    if KINDS[loader.executor].gathers:
        return partial(index_batches, source)
    return partial(iter, source)

"""Which executor suits a dataset: a look at it, and a decision in words."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import IterableDataset

from lightning_fastdata.augment.seeds import find_composes
from lightning_fastdata.host.cpu import read_affinity
from lightning_fastdata.loading.draws import DrawWatch
from lightning_fastdata.loading.executors.fetch import decodes_in_place
from lightning_fastdata.loading.executors.rows import gatherable
from lightning_fastdata.loading.keyed import fetches_in_batches
from lightning_fastdata.loading.order import dataset_length
from lightning_fastdata.loading.probe import (
    SampleCost,
    measure_samples,
    queued_s,
    shallow_copy,
    spread_indices,
    thread_speedup,
)
from lightning_fastdata.loading.slots import shared_slots_supported
from lightning_fastdata.loading.worker_count import waits

if TYPE_CHECKING:
    from torch.utils.data import Dataset

_FRESH_BYTES_PER_MS: Final = 2_000_000
"""How fast a batch is copied into memory that the system has yet to give, page by page."""
_THREAD_TRIAL_MS: Final = 100
_THREADS_PAY: Final = 1.95
"""Of two threads. Below it they wait for each other too often, and processes do better."""
_CHEAP_BATCH_MS: Final = 0.5
"""What it costs the training process to take a batch from another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetLook:
    """What the choice of an executor rests on."""

    stream: bool
    """It has no index."""
    rows: bool
    """Its batches are rows of columns of numbers, collated by default, without a transform."""
    images: bool
    """It is a ``FastImageFolder`` whose samples are delivered as they are."""
    pipelines: bool
    """Albumentations pipelines run on its samples; threads must not share one."""
    draws: bool
    """Reading a sample drew from the generators of random, numpy or torch."""
    cost: SampleCost | None
    """Of reading a sample; None if none was read."""
    thread_speedup: float | None
    """What a second thread brings, 1 to 2; None where threads are not to be tried: on datasets that
    may not be safe for them, on samples too slow to try, on one CPU or busy ones."""
    split: bool
    """The samples of one batch may be given to several workers."""
    shared_memory: bool
    """The system has the memory that side processes need (Linux)."""


def look_at(
    dataset: Dataset[Any],
    *,
    default_collation: bool,
    transformed: bool,
    read: bool = True,
    clock_s: Callable[[], float] = time.perf_counter,
    cpu_s: Callable[[], float] = time.thread_time,
    queue_s: Callable[[], float] = queued_s,
) -> DatasetLook:
    """Look at a dataset and read some of its samples, leaving the random state as it was.

    That takes up to 0.2 s or one sample, whichever is longer; and 0.1 s more for images, which are
    tried on two threads.

    Args:
        dataset: Any dataset; a stream is not read.
        default_collation: Its batches are collated by default.
        transformed: An Albumentations pipeline of the loader runs on each sample.
        read: Whether samples may be read.
        clock_s: Seconds from any start.
        cpu_s: Seconds of CPU time of the calling thread.
        queue_s: Seconds in which the calling thread waited for a CPU.
    """
    stream = isinstance(dataset, IterableDataset)
    pipelines = transformed or bool(find_composes(dataset))
    rows = default_collation and not pipelines and gatherable(dataset)
    images = default_collation and not pipelines and decodes_in_place(dataset)
    cost, speedup, draws = None, None, False
    if read and not (stream or rows):
        twin = shallow_copy(dataset)
        watch = DrawWatch()
        try:
            queued = queue_s()
            cost = measure_samples(twin, clock_s=clock_s, cpu_s=cpu_s, queue_s=queue_s)
            draws = watch.drew()
            queued_ms = (queue_s() - queued) * 1000
            if images and cost is not None:
                count = int(_THREAD_TRIAL_MS / (6 * max(cost.wall_ms, 1e-3)))
                busy = queued_ms > 0.1 * cost.wall_ms * cost.samples or read_affinity() < 2
                if count >= 2 and not busy:
                    indices = spread_indices(dataset_length(dataset) or 0, min(count, 32))
                    speedup = thread_speedup(twin.__getitem__, indices, clock_s=clock_s)
        finally:
            watch.restore()
    return DatasetLook(
        stream=stream,
        rows=rows,
        images=images,
        pipelines=pipelines,
        draws=draws,
        cost=cost,
        thread_speedup=speedup,
        split=default_collation and not transformed and not fetches_in_batches(dataset),
        shared_memory=shared_slots_supported(),
    )


def suited_executor(
    look: DatasetLook, *, workers: int | str, batch_size: int | None
) -> tuple[str, str]:
    """Return the name of the executor that suits a dataset, and why.

    Threads are chosen for datasets of this package alone: whether others may be read by several
    threads at once cannot be seen from outside.

    Args:
        look: At the dataset.
        workers: As set by the user; 0 is a wish to fetch in the training process, a higher number
            one for workers, also where the samples that were read are cheap: others may not be.
        batch_size: Samples that are copied into a batch; None: they are delivered as they are.
    """
    if look.stream and workers != 0:
        return ("workers" if look.shared_memory else "torch"), "each process reads its own stream"
    if look.rows:
        return "gather", "its batches are rows of numbers, copied with one call per column"
    if workers == 0:
        # Keys for draws that are not made would cost each step of the training some 50 us.
        name = "inline" if look.draws or look.pipelines else "torch"
        return name, "num_workers=0 asks for the training process"
    if not look.shared_memory:
        return "torch", "this system has no memory files that side processes could share"
    speedup = look.thread_speedup
    if look.images and speedup is not None and speedup < _THREADS_PAY and not waits(look.cost):
        return "workers", f"two threads decode only x{speedup:.2f} as fast as one, so processes do"
    if look.images:
        return "sidecar", "images are decoded by threads, straight into the batch"
    if look.pipelines:
        return "workers", "Albumentations pipelines hold random state, which threads cannot share"
    if look.draws:
        return "workers", "samples draw from global generators, which threads cannot share"
    if look.cost is None:
        return "workers", "Python code that may not be safe for threads"
    return _by_cost(look.cost, workers, batch_size)


def _by_cost(cost: SampleCost, workers: int | str, batch_size: int | None) -> tuple[str, str]:
    batch_ms = cost.wall_ms
    if batch_size is not None:
        batch_ms = batch_size * (cost.wall_ms + cost.size_bytes / _FRESH_BYTES_PER_MS)
    if batch_ms < _CHEAP_BATCH_MS:
        if isinstance(workers, int):
            return "workers", f"num_workers={workers} asks for them"
        return "inline", f"a batch takes {batch_ms:.2g} ms, less than handing it over"
    each = f"{cost.wall_ms:.2g} ms a sample"
    if waits(cost):
        return "workers", f"{each}, {cost.wait_ms:.2g} of them waiting; it may not suit threads"
    return "workers", f"Python code of {each} that may not be safe for threads"

"""Which executor suits a dataset: a look at it, and a decision in words."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset

from lightning_fastdata.batches.collate import collate_samples
from lightning_fastdata.batches.keyed import fetches_in_batches
from lightning_fastdata.batches.slots import shared_slots_supported
from lightning_fastdata.executors.gather.rows import gatherable
from lightning_fastdata.planning.facts.probe import (
    SampleCost,
    measure_samples,
    queued_s,
)
from lightning_fastdata.planning.loader_plan import Suited
from lightning_fastdata.planning.worker_count import (
    WORTH_IT,
    alone_ms,
    by_workers_ms,
    over_epochs,
    waits,
)
from lightning_fastdata.randomness.global_generators import DrawWatch
from lightning_fastdata.randomness.seeds import find_composes

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lightning_fastdata.executors.kinds import ExecutorName


class Batches(NamedTuple):
    """What a loader makes of the samples, as far as the choice of an executor rests on it."""

    default_collation: bool
    """They are collated by default."""
    transformed: bool
    """An Albumentations pipeline of the loader runs on each sample."""
    batch_size: int | None = None
    """Samples that are put together; None: they are delivered as they are."""
    collate_fn: Callable[[Any], object] | None = None
    """The user's own collation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetLook:
    """What the choice of an executor rests on."""

    stream: bool
    """It has no index."""
    rows: bool
    """Its batches are rows of columns of numbers, collated by default, without a transform."""
    transformed: bool
    """An Albumentations pipeline of the loader runs on each sample besides what was measured."""
    pipelines: bool
    """The dataset calls Albumentations pipelines of its own, which are keyed for each sample."""
    draws: bool
    """Reading a sample drew from the generators of random, numpy or torch."""
    cost: SampleCost | None
    """Of reading a sample; None if none was read."""
    split: bool
    """The samples of one batch may be given to several workers."""
    shared_memory: bool
    """The system has the memory that side processes need (Linux)."""


def look_at(
    dataset: Dataset[Any],
    *,
    default_collation: bool,
    transformed: bool,
    batch_size: int | None = None,
    collate_fn: Callable[[Any], object] | None = None,
    read: bool = True,
    clock_s: Callable[[], float] = time.perf_counter,
    cpu_s: Callable[[], float] = time.thread_time,
    queue_s: Callable[[], float] = queued_s,
) -> DatasetLook:
    """Look at a dataset and read some of its batches, leaving the random state as it was.

    That takes up to 0.3 s or one sample, whichever is longer.

    Args:
        dataset: Any dataset; a stream is not read.
        default_collation: Its batches are collated by default.
        transformed: An Albumentations pipeline of the loader runs on each sample.
        batch_size: Samples that are put together; None: they are delivered as they are.
        collate_fn: The user's own collation.
        read: Whether samples may be read.
        clock_s: Seconds from any start.
        cpu_s: Seconds of CPU time of the calling thread.
        queue_s: Seconds in which the calling thread waited for a CPU.
    """
    stream = isinstance(dataset, IterableDataset)
    pipelines = bool(find_composes(dataset))
    rows = default_collation and not (transformed or pipelines) and gatherable(dataset)
    cost, draws = None, False
    if read and not (stream or rows):
        watch = DrawWatch()
        try:
            cost = measure_samples(
                dataset,
                batch_size=batch_size or 1,
                collate=collate_samples if default_collation else collate_fn,
                clock_s=clock_s,
                cpu_s=cpu_s,
                queue_s=queue_s,
            )
            draws = watch.drew()
        finally:
            watch.restore()
    return DatasetLook(
        stream=stream,
        rows=rows,
        transformed=transformed,
        pipelines=pipelines,
        draws=draws,
        cost=cost,
        split=default_collation and not transformed and not fetches_in_batches(dataset),
        shared_memory=shared_slots_supported(),
    )


def suited_executor(
    look: DatasetLook, *, workers: int | str, batch_size: int | None, cpus: int = 2
) -> Suited:
    """Return the executor that suits a dataset, and why.

    Threads are never chosen: whether a dataset may be read by several at once cannot be seen from
    outside, and processes decode this package's own images at least as fast.

    Args:
        look: At the dataset.
        workers: As set by the user; 0 is a wish to fetch in the training process, a higher number
            one for workers, also where the samples that were read are cheap: others may not be.
        batch_size: Samples that are put together; None: they are delivered as they are.
        cpus: That this rank may use.
    """
    aside: ExecutorName = "workers" if look.shared_memory else "torch"
    if look.stream and workers != 0:
        return Suited(aside, "each process reads its own stream")
    if look.rows:
        return Suited("gather", "its batches are rows of numbers, copied with one call per column")
    # Keys for draws that are not made would cost each step of the training some 50 us.
    here: ExecutorName = "inline" if look.draws or look.pipelines or look.transformed else "torch"
    if workers == 0:
        return Suited(here, "num_workers=0 asks for the training process", alone=True)
    lacks = "" if look.shared_memory else "; this system has no memory files for side processes"
    if isinstance(workers, int):
        return Suited(aside, f"num_workers={workers} asks for them" + lacks)
    if look.cost is None:
        return Suited(aside, "what a sample costs is not known" + lacks)
    if look.transformed:  # which is not part of what was measured
        return Suited(aside, "an Albumentations pipeline runs on each sample" + lacks)
    keyed = look.draws or look.pipelines
    alone = alone_ms(over_epochs(look.cost, 1), batch_size or 1, keyed=keyed)
    shared = by_workers_ms(over_epochs(look.cost, cpus), batch_size or 1, keyed=keyed, cpus=cpus)
    said = f"a batch takes {alone:.2g} ms here and some {shared:.2g} ms by side processes"
    if look.cost.again_ms is not None:
        said += (
            f", on the mean of ten epochs: a sample takes {look.cost.cpu_ms:.2g} ms at first and "
            f"{look.cost.again_ms:.2g} when it is read again, as the dataset keeps it"
        )
    if waits(look.cost):
        said += f"; a sample waits {look.cost.wait_ms:.2g} of its {look.cost.wall_ms:.2g} ms"
    if shared < WORTH_IT * alone:
        return Suited(aside, said + lacks)
    return Suited(here, said, alone=True)

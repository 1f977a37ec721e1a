"""Which executor suits a dataset: a look at it, and a decision in words."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lightning_fastdata.augment.seeds import find_composes
from lightning_fastdata.loading.executors.fetch import decodes_in_place
from lightning_fastdata.loading.executors.gather import gatherable
from lightning_fastdata.loading.order import dataset_length
from lightning_fastdata.loading.probe import kept_random_state, shallow_copy
from lightning_fastdata.loading.slots import shared_slots_supported

if TYPE_CHECKING:
    from torch.utils.data import Dataset

_PROBES: Final = 4
_CHEAP_BATCH_MS: Final = 0.5
"""What it costs the training process to take a batch from another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetLook:
    """What the choice of an executor rests on."""

    stream: bool
    """It has no index."""
    rows: bool
    """Its batches are rows of tensors or arrays, collated by default, without a transform."""
    images: bool
    """It is a ``FastImageFolder`` whose samples are delivered as they are."""
    pipelines: bool
    """Albumentations pipelines run on its samples; threads must not share one."""
    draws: bool
    """Reading a sample drew from the generators of random, numpy or torch."""
    sample_ms: float | None
    """Milliseconds to read a sample, the median of a few; None if it was not read."""
    shared_memory: bool
    """The system has the memory that side processes need (Linux)."""


def look_at(
    dataset: Dataset[Any],
    *,
    default_collation: bool,
    transformed: bool,
    clock_s: Callable[[], float] = time.perf_counter,
) -> DatasetLook:
    """Look at a dataset and read up to 4 of its samples, leaving the random state as it was.

    Args:
        dataset: Any dataset; a stream is not read.
        default_collation: Its batches are collated by default.
        transformed: An Albumentations pipeline of the loader runs on each sample.
        clock_s: Seconds from any start.
    """
    stream = isinstance(dataset, IterableDataset)
    pipelines = transformed or bool(find_composes(dataset))
    rows = default_collation and not pipelines and gatherable(dataset)
    images = default_collation and not pipelines and decodes_in_place(dataset)
    spent: list[float] = []
    draws = False
    if not (stream or rows or images):
        length = dataset_length(dataset) or 0
        twin = shallow_copy(dataset)
        with kept_random_state():
            before = _generators()
            for index in range(min(_PROBES, length)):
                began = clock_s()
                try:
                    twin[index]
                except Exception:  # told with its cause when the training reads it
                    spent = []
                    break
                spent.append((clock_s() - began) * 1000)
            draws = before != _generators()
    return DatasetLook(
        stream=stream,
        rows=rows,
        images=images,
        pipelines=pipelines,
        draws=draws,
        sample_ms=sorted(spent)[len(spent) // 2] if spent else None,
        shared_memory=shared_slots_supported(),
    )


def suited_executor(look: DatasetLook, *, workers: int | str, batch_size: int) -> tuple[str, str]:
    """Return the name of the executor that suits a dataset, and why.

    Threads are chosen for datasets of this package alone: whether others may be read by several
    threads at once cannot be seen from outside.

    Args:
        look: At the dataset.
        workers: As set by the user; 0 is a wish to fetch in the training process.
        batch_size: Samples in a batch.
    """
    if look.stream and workers != 0:
        return ("workers" if look.shared_memory else "torch"), "each process reads its own stream"
    if look.rows:
        return "gather", "its batches are rows of tensors, copied in one call"
    if workers == 0:
        return "inline", "num_workers=0 asks for the training process"
    if not look.shared_memory:
        return "torch", "this system has no memory files that side processes could share"
    if look.images:
        return "sidecar", "images are decoded by threads, straight into the batch"
    if look.pipelines:
        return "workers", "Albumentations pipelines hold random state, which threads cannot share"
    if look.draws:
        return "workers", "samples draw from global generators, which threads cannot share"
    if look.sample_ms is not None and look.sample_ms * batch_size < _CHEAP_BATCH_MS:
        batch_ms = look.sample_ms * batch_size
        return "inline", f"a batch takes {batch_ms:.2g} ms, less than handing it over"
    each = "" if look.sample_ms is None else f" of {look.sample_ms:.2g} ms a sample"
    return "workers", f"Python code{each} that may not be safe for threads"


def _generators() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)
    state = numpy["state"]
    return (
        random.getstate(),
        state["key"].tobytes(),
        state["pos"],
        torch.get_rng_state().numpy().tobytes(),
    )

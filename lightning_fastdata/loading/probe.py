"""Samples read before the workers start: whether they can be read, and what one costs."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.loading.draws import kept_random_state
from lightning_fastdata.loading.order import ShuffleSampler, dataset_length

_BUDGET_S: Final = 0.2
_MOST_SAMPLES: Final = 32
_THREAD_ROUNDS: Final = 3
_OF_POSITIONS: Final = (SequentialSampler, RandomSampler, ShuffleSampler, DistributedSampler)
"""Samplers that give each position of the dataset, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """What it takes to read one sample in one thread; medians over those that were read."""

    wall_ms: float
    """Milliseconds from the call to its return, less those for which a CPU had to be waited for:
    what it would take on an idle machine."""
    cpu_ms: float
    """Milliseconds of CPU time that the thread spent; at most ``wall_ms``."""
    size_bytes: int
    """Bytes of the tensors, arrays and images of one sample."""
    samples: int
    """How many were measured."""

    @property
    def wait_ms(self) -> float:
        """Milliseconds without any CPU: for a disk, a network, a lock, or a sleep."""
        return self.wall_ms - self.cpu_ms


def probe_sample(dataset: Dataset[Any], name: str, key: Any = 0) -> Any:
    """Return a sample of a map-style dataset, leaving dataset and random state as they were.

    The sample is read from a shallow copy, because a dataset that opens its files on first use
    must open them in each worker and not here.

    Args:
        dataset: The dataset to read.
        name: How the user knows it, for the messages, e.g. ``"Photos.train_dataset()"``.
        key: Of the sample.

    Returns:
        The sample, or None for an iterable dataset, which cannot be read without consuming it.

    Raises:
        DatasetError: The dataset is empty, or reading the sample raised.
    """
    if isinstance(dataset, IterableDataset):
        return None
    if dataset_length(dataset) == 0:
        raise DatasetError(
            f"{name} returned an empty {type(dataset).__name__} (length 0). "
            "Check the path or the filter that made it."
        )
    with kept_random_state():
        try:
            return shallow_copy(dataset)[key]
        except Exception as error:
            keys = ""
            if isinstance(error, KeyError | TypeError) and key == 0:
                keys = (
                    " If its keys are others than the numbers from 0, build the loader with "
                    "make_loader(dataset, sampler=...), whose sampler gives them."
                )
            raise DatasetError(
                f"Reading sample {key!r} of {name} ({type(dataset).__name__}) raised "
                f"{type(error).__name__}: {error}. The training would have failed at its first "
                f"batch; the cause is in the traceback above.{keys}"
            ) from error


def shallow_copy(dataset: Any) -> Any:
    """Copy a dataset and the datasets it wraps, sharing their data but no attribute."""
    try:
        twin = copy.copy(dataset)
    except Exception:  # whatever a dataset's own __copy__ or __reduce__ raises
        return dataset
    wrapped = getattr(twin, "dataset", None)
    if isinstance(wrapped, Dataset):
        twin.dataset = shallow_copy(wrapped)
    several = getattr(twin, "datasets", None)
    if isinstance(several, list) and all(isinstance(d, Dataset) for d in several):
        twin.datasets = [shallow_copy(d) for d in several]
    return twin


def sample_bytes(sample: Any) -> int:
    """Return the bytes of all tensors, arrays and images in a sample."""
    if isinstance(sample, torch.Tensor):
        return sample.element_size() * sample.nelement()
    if isinstance(sample, np.ndarray | np.generic):
        return int(sample.nbytes)
    if isinstance(sample, bytes | str):
        return len(sample)
    if isinstance(sample, Mapping):
        return sum(sample_bytes(value) for value in sample.values())
    if isinstance(sample, list | tuple):
        return sum(sample_bytes(value) for value in sample)
    if is_dataclass(sample):
        return sum(sample_bytes(getattr(sample, f.name)) for f in fields(sample))
    if hasattr(sample, "getbands") and hasattr(sample, "size"):  # a PIL image
        return int(sample.size[0] * sample.size[1] * len(sample.getbands()))
    return 8


def queued_s(file: Path = Path("/proc/thread-self/schedstat")) -> float:
    """Return the seconds this thread was ready to run and had no CPU; 0 where it is not counted.

    The second number of https://docs.kernel.org/scheduler/sched-stats.html, in nanoseconds.
    """
    try:
        return int(file.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def spread_indices(length: int, count: int) -> list[int]:
    """Return up to ``count`` different indices at even distances, none of them the first."""
    count = min(count, length)
    return [(2 * number + 1) * length // (2 * count) for number in range(count)]


def probe_indices(
    dataset: Dataset[Any],
    count: int,
    *,
    sampler: Any = None,
    batch_sampler: Any = None,
    peek: bool = False,
) -> list[Any] | None:
    """Return keys of samples that may be read before the training, or None if none are known.

    Without a sampler these are positions from 0. A sampler of the user's may give any keys; those
    of torch and lists tell theirs without being iterated, which is all that is done with them here.

    Args:
        dataset: The dataset of a loader.
        count: Keys at most.
        sampler: Of the loader; None: the loader makes its own.
        batch_sampler: Of the loader, likewise.
        peek: Whether any sampler may be iterated, which may change it: in a process that is thrown
            away.
    """
    if isinstance(dataset, IterableDataset):
        return None
    if batch_sampler is not None:
        inner = getattr(batch_sampler, "sampler", None)
        known = isinstance(batch_sampler, list | tuple)
        if type(batch_sampler) is BatchSampler:
            return probe_indices(dataset, count, sampler=inner, peek=peek)
        keys: Any = [key for batch in batch_sampler for key in batch[:1]] if known else None
        if keys is None and peek:
            keys = [key for batch in islice(batch_sampler, count) for key in list(batch)[:1]]
    elif sampler is None or type(sampler) in _OF_POSITIONS:
        keys = range(dataset_length(dataset) or 0)
    elif isinstance(sampler, list | tuple | range):
        keys = sampler
    elif type(sampler) is SubsetRandomSampler:
        keys = sampler.indices
    elif type(sampler) is WeightedRandomSampler:
        keys = sampler.weights.nonzero().flatten().tolist()
    else:
        keys = list(islice(sampler, count)) if peek else None
    if keys is None:
        return None
    return [keys[position] for position in spread_indices(len(keys), count)]


def further_samples(
    dataset: Dataset[Any],
    count: int,
    *,
    budget_s: float = _BUDGET_S,
    clock_s: Callable[[], float] = time.perf_counter,
) -> Iterator[Any]:
    """Read samples from all over a map-style dataset, each when it is asked for.

    Dataset and random state stay as they were. It ends early at a sample that cannot be read, which
    is told when training reads it.

    Args:
        dataset: A map-style dataset.
        count: Samples at most.
        budget_s: Seconds after which no further sample is begun.
        clock_s: Seconds from any start.
    """
    twin, began = shallow_copy(dataset), clock_s()
    for index in spread_indices(dataset_length(dataset) or 0, count):
        if clock_s() - began >= budget_s:
            return
        with kept_random_state():
            try:
                sample = twin[index]
            except Exception:
                return
        yield sample


def measure_samples(
    dataset: Dataset[Any],
    *,
    budget_s: float = _BUDGET_S,
    clock_s: Callable[[], float] = time.perf_counter,
    cpu_s: Callable[[], float] = time.thread_time,
    queue_s: Callable[[], float] = queued_s,
) -> SampleCost | None:
    """Read a few samples and return what one costs; the caller keeps the random state.

    Samples from all over the dataset are read in this thread, until 32 are read or the budget is
    spent. The first one is left out if there are others, because it opens files and imports.

    Args:
        dataset: A map-style dataset.
        budget_s: Seconds after which no further sample is begun.
        clock_s: Seconds from any start.
        cpu_s: Seconds of CPU time of the calling thread.
        queue_s: Seconds in which the calling thread waited for a CPU.

    Returns:
        None if it is empty or a sample could not be read, which is told when training reads it.
    """
    walls, cpus, began = [], [], clock_s()
    sample = None
    for index in spread_indices(dataset_length(dataset) or 0, _MOST_SAMPLES):
        queued, cpu, wall = queue_s(), cpu_s(), clock_s()
        try:
            sample = dataset[index]
        except Exception:
            return None
        wall, cpu = clock_s() - wall, cpu_s() - cpu
        walls.append(max(cpu, wall - (queue_s() - queued)))
        cpus.append(cpu)
        if clock_s() - began >= budget_s:
            break
    if not walls:
        return None
    skip = 1 if len(walls) > 1 else 0
    wall, cpu = median(walls[skip:]), median(cpus[skip:])
    return SampleCost(
        wall_ms=wall * 1000,
        cpu_ms=cpu * 1000,
        size_bytes=sample_bytes(sample),
        samples=len(walls) - skip,
    )


def thread_speedup(
    read: Callable[[int], object],
    indices: Sequence[int],
    *,
    clock_s: Callable[[], float] = time.perf_counter,
) -> float:
    """Return how much faster two threads call ``read`` than one: 2 without the GIL, 1 under it.

    The best of three turns of each counts, as other programs can only make a turn longer.

    Args:
        read: What is to be run; it must be safe for threads.
        indices: Its arguments, all of which are read in each of the six turns.
        clock_s: Seconds from any start.
    """

    def turn(threads: int) -> float:
        work = [
            threading.Thread(
                target=lambda part: [read(i) for i in part], args=(indices[n::threads],)
            )
            for n in range(threads)
        ]
        began = clock_s()
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        return clock_s() - began

    turns = [(turn(1), turn(2)) for _ in range(_THREAD_ROUNDS)]
    return min(one for one, _ in turns) / max(min(two for _, two in turns), 1e-9)

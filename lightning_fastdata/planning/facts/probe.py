"""Samples read where nothing else uses the dataset: what one costs."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata.batches.keyed import fetches_in_batches
from lightning_fastdata.host.usage import queued_s
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.order.samplers import ShuffleSampler
from lightning_fastdata.randomness.generators import kept_random_state

if TYPE_CHECKING:
    from torch.utils.data import Dataset

_BUDGET_S: Final = 0.3
_MOST_SAMPLES: Final = 1024
_WEIGHED_SAMPLES: Final = 16
"""Of which the bytes are counted."""
_KNOWN_WORK: Final = (tuple(range(1000, 1128)), "rows", 3, {"slot": 7})
_KNOWN_TIMES: Final = 8
_KNOWN_MS: Final = 0.045
"""CPU time of :func:`known_work` where ``benchmarks/handing_over.py`` measured the rest."""
_WORTH_KEEPING_MS: Final = 0.05
"""CPU time from which on it is worth looking whether a dataset keeps what it has read."""
_AGAIN_SHARE: Final = 0.1
"""Of the budget, spent on reading samples once more."""
_MOST_READ_AGAIN: Final = 32
_MUCH_CHEAPER: Final = 4
_OF_POSITIONS: Final = (SequentialSampler, RandomSampler, ShuffleSampler, DistributedSampler)
"""Samplers that give each position of the dataset, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """What it takes to read one sample in one thread: means over those that were read.

    Means, because an epoch takes as long as all of its samples together: of a hundred samples the
    one that takes a second counts as much as all the others.
    """

    wall_ms: float
    """Milliseconds from the call to its return, less those for which a CPU had to be waited for:
    what it would take on an idle machine."""
    cpu_ms: float
    """Milliseconds of CPU time that the thread spent; at most ``wall_ms``."""
    size_bytes: int
    """Bytes of the tensors, arrays and images of one sample."""
    samples: int
    """How many were measured."""
    collate_ms: float = 0.0
    """Milliseconds of CPU time for its share in collating a batch, besides reading it."""
    pace: float = 1.0
    """How many times as long as elsewhere everything took here and then: what side processes cost
    was measured elsewhere, and CPUs are slower where others are at work on them."""
    again_ms: float | None = None
    """Milliseconds to read a sample once more, where that is a quarter or less: the dataset keeps
    what it has read, each process for itself. None: it does not."""

    @property
    def wait_ms(self) -> float:
        """Milliseconds without any CPU: for a disk, a network, a lock, or a sleep."""
        return self.wall_ms - self.cpu_ms


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

    The random state stays as it was. It ends early at a sample that cannot be read, which
    raises when training reads it.

    Args:
        dataset: A map-style dataset.
        count: Samples at most.
        budget_s: Seconds after which no further sample is begun.
        clock_s: Seconds from any start.
    """
    began = clock_s()
    for index in spread_indices(dataset_length(dataset) or 0, count):
        if clock_s() - began >= budget_s:
            return
        with kept_random_state():
            try:
                sample = dataset[index]
            except Exception:
                return
        yield sample


def drawn_indices(length: int, count: int) -> list[int]:
    """Return up to ``count`` different indices from all over a dataset, in a mixed order.

    One is taken from each of ``count`` parts, at a place that differs from part to part: datasets
    repeat themselves at regular distances. They are the same ones each time.
    """
    count = min(count, length)
    generator = np.random.default_rng(0)
    places = generator.random(count).tolist()
    bounds = [number * length // count for number in range(count + 1)] if count else [0]
    indices = [
        low + int(place * (high - low))
        for low, high, place in zip(bounds[:-1], bounds[1:], places, strict=True)
    ]
    return [indices[number] for number in generator.permutation(count).tolist()]


def measure_samples(
    dataset: Dataset[Any],
    *,
    batch_size: int = 1,
    collate: Callable[[Any], object] | None = None,
    budget_s: float = _BUDGET_S,
    clock_s: Callable[[], float] = time.perf_counter,
    cpu_s: Callable[[], float] = time.thread_time,
    queue_s: Callable[[], float] = queued_s,
) -> SampleCost | None:
    """Read samples as one process alone would and return what one costs.

    Samples from all over the dataset are read in this thread and collated, first one, then twice as
    many each time up to whole batches, until there were 1,024 or two whole batches, or the budget
    is spent. The first one is left out if there are others, because it opens files and imports. The
    caller keeps the random state.

    Args:
        dataset: A map-style dataset.
        batch_size: Samples in a batch.
        collate: Makes a batch of a list of samples; None: samples are not put together.
        budget_s: Seconds after which no further sample is begun.
        clock_s: Seconds from any start.
        cpu_s: Seconds of CPU time of the calling thread.
        queue_s: Seconds in which the calling thread waited for a CPU.

    Returns:
        None if it is empty or a sample could not be read, which raises when training reads it.
    """
    most = max(_MOST_SAMPLES, 4 * batch_size)
    left = drawn_indices(dataset_length(dataset) or 0, most)
    kept_back = min(_MOST_READ_AGAIN, len(left) // 8)
    left, fresh = left[kept_back:], left[:kept_back]
    at_once = fetches_in_batches(dataset)
    ends_s, size, samples = clock_s() + budget_s, 1, None
    groups: list[_Group] = []
    paces: list[float] = []
    while left:
        indices = left[:size]
        paces.append(known_work(cpu_s))
        queued, cpu, wall = queue_s(), cpu_s(), clock_s()
        try:
            samples = _read(dataset, indices, at_once, lambda: clock_s() >= ends_s)
        except Exception:
            return None
        count = len(indices) if at_once else len(samples)
        cpu_read, now = cpu_s() - cpu, clock_s()
        wall_read = max(cpu_read, now - wall - (queue_s() - queued))
        cpu_collate = _collating_s(samples, collate, cpu_s)
        groups.append(_Group(count, wall_read, cpu_read, cpu_collate))
        left = left[count:]
        # What comes next is expected to take as long for each as it did so far.
        left_s, each_s = ends_s - clock_s(), (wall_read + cpu_collate) / count
        if left_s <= 0 or sum(group.count for group in groups) >= most:
            break
        fitting = int(left_s / each_s) if each_s > 0 else batch_size
        size = max(1, min(2 * size, batch_size, fitting))
    if not groups:
        return None
    groups = groups[1:] or groups
    again_ms = None
    if fresh and not at_once:
        again_ms = _again_ms(dataset, fresh, groups[-1], _AGAIN_SHARE * budget_s, cpu_s)
    # Calls for many samples at once take less for each.
    largest = [group for group in groups if group.count == max(g.count for g in groups)]
    reads = largest if at_once else groups
    count, collated = (sum(group.count for group in some) for some in (reads, largest))
    return SampleCost(
        wall_ms=1000 * sum(group.wall_s for group in reads) / count,
        cpu_ms=1000 * sum(group.cpu_s for group in reads) / count,
        size_bytes=_each_bytes(samples, groups[-1].count),
        samples=count,
        collate_ms=1000 * sum(group.collate_s for group in largest) / collated,
        pace=1000 * median(paces) / _KNOWN_MS or 1.0,
        again_ms=again_ms,
    )


def known_work(cpu_s: Callable[[], float] = time.thread_time) -> float:
    """Return the seconds of CPU time of some work like that of handing a task over."""
    began = cpu_s()
    for _ in range(_KNOWN_TIMES):
        pickle.loads(pickle.dumps(_KNOWN_WORK))
    return cpu_s() - began


@dataclass(frozen=True, slots=True)
class _Group:
    """Samples that were read and collated together."""

    count: int
    wall_s: float
    cpu_s: float
    collate_s: float


def _read(dataset: Any, indices: Sequence[int], at_once: bool, over: Callable[[], bool]) -> Any:
    if at_once:
        return dataset.__getitems__(indices)
    samples = []
    for index in indices:
        samples.append(dataset[index])
        if over():
            break
    return samples


def _again_ms(
    dataset: Any, indices: Sequence[Any], known: _Group, budget_s: float, cpu_s: Callable[[], float]
) -> float | None:
    """Return what the same samples cost a second time, if that is much less than the first time.

    Of CPU time, because files that were read are in memory anyway for as long as there is room.
    """
    each_s = known.cpu_s / known.count
    if 1000 * each_s < _WORTH_KEEPING_MS or 2 * known.cpu_s < known.wall_s:
        return None
    indices = indices[: min(_MOST_READ_AGAIN, max(1, int(budget_s / each_s)))]
    times = [cpu_s()]
    try:
        for _ in range(2):
            _read(dataset, indices, at_once=False, over=lambda: False)
            times.append(cpu_s())
    except Exception:
        return None
    first_s, again_s = (later - earlier for earlier, later in pairwise(times))
    return 1000 * again_s / len(indices) if again_s <= first_s / _MUCH_CHEAPER else None


def _collating_s(
    samples: Any, collate: Callable[[Any], object] | None, cpu_s: Callable[[], float]
) -> float:
    began = cpu_s()
    try:
        if collate is not None:
            collate(samples)
    except Exception:
        return 0.0  # it raises when training collates them
    return cpu_s() - began


def _each_bytes(samples: Any, count: int) -> int:
    if isinstance(samples, list):
        samples = samples[:_WEIGHED_SAMPLES]
        count = len(samples)
    return sample_bytes(samples) // max(1, count)

"""Samples read where nothing else uses the dataset: what one costs."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata.batches.keyed import fetches_in_batches
from lightning_fastdata.host import clock
from lightning_fastdata.host.usage import Clocks
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.order.samplers import BlockShuffleSampler, ShuffleSampler
from lightning_fastdata.randomness.global_generators import kept_random_state
from lightning_fastdata.sources.source import read_ahead, reads_ahead
from lightning_fastdata.tree import bytes_in

if TYPE_CHECKING:
    from torch.utils.data import Dataset

_BUDGET_S: Final = 0.3
_MOST_SAMPLES: Final = 1024
_FEWEST_SAMPLES: Final = 14
_DEAR_BATCH_MS: Final = 30  # a hundred times what it takes to hand a batch over
_ALIKE: Final = 2
_AHEAD_BUDGETS: Final = 4
"""So much more time is given to datasets that read ahead, which mostly wait."""
_WEIGHED_SAMPLES: Final = 16  # of which the bytes are counted
_KNOWN_WORK: Final = (tuple(range(1000, 1128)), "rows", 3, {"slot": 7})
_KNOWN_TIMES: Final = 8
# CPU time of known_work() where benchmarks/handing_over.py measured the rest.
_KNOWN_MS: Final = 0.045
_MOST_CROWDED: Final = 20.0
_PLACES: Final = (
    "daemonic processes are not allowed to have children",
    "Cannot re-initialize CUDA in forked subprocess",
)
"""What Python and torch say to those that want it in a worker."""
# Samplers that give each position of the dataset, from 0.
_OF_POSITIONS: Final = (SequentialSampler, RandomSampler, ShuffleSampler, DistributedSampler)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """What it takes to read one sample in one thread: means over those that were read.

    Means, because an epoch takes as long as all of its samples together: of a hundred samples the
    one that takes a second counts as much as all the others.
    """

    wall_ms: float
    """From the call to its return, less the time for which a CPU had to be waited for: what it
    would take on an idle machine."""
    cpu_ms: float
    """CPU time that the thread spent; at most ``wall_ms``."""
    size_bytes: int
    """Bytes of the tensors, arrays and images of one sample."""
    samples: int
    """How many were measured."""
    collate_ms: float = 0.0
    """CPU time for its share in collating a batch, besides reading it."""
    pace: float = 1.0
    """How many times as long as elsewhere everything took here and then: what side processes cost
    was measured elsewhere, and CPUs are slower where others are at work on them."""
    crowded: float = 1.0
    """How many times as long as its CPU time the process took that read, as others had the CPUs."""

    @property
    def wait_ms(self) -> float:
        """Milliseconds without any CPU: for a disk, a network, a lock, or a sleep."""
        return self.wall_ms - self.cpu_ms


def spread_indices(length: int, count: int) -> list[int]:
    """Return up to ``count`` different indices at even distances, none of them the first."""
    count = min(count, length)
    return [(2 * number + 1) * length // (2 * count) for number in range(count)]


def probe_indices(
    dataset: Dataset[Any], count: int, sampler: Any, batch_sampler: Iterable[Any] | None = None
) -> list[Any]:
    """Return keys of samples from all over the order of a sampler, or of a batch sampler.

    It may give any keys. Those of torch and lists show theirs without being iterated; any other is
    iterated, which may change it: in a process that is thrown away.
    """
    if type(batch_sampler) is BatchSampler:
        sampler, batch_sampler = batch_sampler.sampler, None
    keys: Sequence[Any]
    if batch_sampler is not None:
        listed = isinstance(batch_sampler, list | tuple)
        batches = batch_sampler if listed else islice(batch_sampler, count)
        keys = [key for batch in batches for key in list(batch)[:1]]
    elif type(sampler) is BlockShuffleSampler:
        # As the epoch reads them: the rest of a block comes from where its first sample came from.
        return list(islice(sampler, count))
    elif type(sampler) in _OF_POSITIONS:
        keys = range(dataset_length(dataset) or 0)
    elif isinstance(sampler, list | tuple | range):
        keys = sampler
    elif type(sampler) is SubsetRandomSampler:
        keys = sampler.indices
    elif type(sampler) is WeightedRandomSampler:
        keys = sampler.weights.nonzero().flatten().tolist()
    else:
        keys = list(islice(sampler, count))
    return [keys[position] for position in spread_indices(len(keys), count)]


def further_samples(dataset: Dataset[Any], count: int) -> Iterator[Any]:
    """Read up to ``count`` samples from all over a map-style dataset, each when it is asked for.

    The random state stays as it was. It ends early when the budget is spent, and at a sample that
    cannot be read, which raises when training reads it.
    """
    began_s = clock.monotonic()
    for index in spread_indices(dataset_length(dataset) or 0, count):
        if clock.monotonic() - began_s >= _BUDGET_S:
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
    bounds = [number * length // max(1, count) for number in range(count + 1)]
    indices = [
        low + int(place * (high - low))
        for (low, high), place in zip(pairwise(bounds), places, strict=True)
    ]
    return [indices[number] for number in generator.permutation(count).tolist()]


def _is_dear(groups: Sequence[_Group], batch_size: int) -> bool:
    """Return whether samples take so long, and alike, that more of them would change nothing.

    The training waits while they are read.
    """
    if sum(group.size for group in groups) < _FEWEST_SAMPLES:
        return False
    least_ms, most_ms = (f(group.wall_ms / group.size for group in groups) for f in (min, max))
    return batch_size * least_ms >= _DEAR_BATCH_MS and most_ms <= _ALIKE * least_ms


class _Group(NamedTuple):
    """Samples that were read and collated together, and the milliseconds that took."""

    size: int
    wall_ms: float
    cpu_ms: float
    collate_ms: float


def measure_samples(
    dataset: Dataset[Any],
    *,
    batch_size: int = 1,
    collate: Callable[[list[Any]], object] | None = None,
    budget_s: float = _BUDGET_S,
    clocks: Clocks | None = None,
    read: int | None = None,
) -> SampleCost | None:
    """Read samples of a map-style dataset as one process alone would, and return what one costs.

    Samples from all over the dataset are read in this thread and collated, first one, then twice as
    many each time up to whole batches, until there were 1,024 or two whole batches, or the budget
    is spent; of a dataset that reads ahead, three whole batches, the quickest of which counts. It
    ends after fifteen samples that take long, and alike. The first one is left out if there are
    others, because it opens files and imports. ``read``: So many were read before, and these are
    read once more.

    Returns:
        None if it is empty or a sample could not be read, which raises when training reads it.

    Raises:
        Exception: Whatever reading raised, if that is for the process in which it was tried.
    """
    clocks = clocks or Clocks()
    at_once, ahead = fetches_in_batches(dataset), reads_ahead(dataset)
    most = 3 * batch_size if ahead else max(_MOST_SAMPLES, 4 * batch_size)
    remaining = drawn_indices(dataset_length(dataset) or 0, most)[:read]
    if ahead:
        budget_s *= _AHEAD_BUDGETS
    ends_s, size = clocks.clock_s() + budget_s, 1
    queued_s, spent_s = clocks.queue_s(), clocks.cpu_s()
    samples: Any = None
    groups: list[_Group] = []
    paces_s: list[float] = []
    while remaining:
        paces_s.append(known_work(clocks.cpu_s))
        take = partial(_read, dataset, remaining[:size], at_once, ends_s, clocks)
        try:
            samples, wall_ms, cpu_ms = clocks.of(take)
        except Exception as error:
            if fails_for_its_place(error):
                raise
            return None
        count = len(remaining[:size]) if at_once else len(samples)
        groups.append(_Group(count, wall_ms, cpu_ms, _collate_ms(samples, collate, clocks)))
        remaining = remaining[count:]
        # What comes next is expected to take as long for each; of waiting, as long together.
        left_ms = 1000 * (ends_s - clocks.clock_s())
        each_ms = ((cpu_ms if ahead else wall_ms) + groups[-1].collate_ms) / count
        if left_ms <= 0 or sum(group.size for group in groups) >= most:
            break
        if not ahead and _is_dear(groups[1:], batch_size):
            break
        fitting = int(left_ms / each_ms) if each_ms > 0 else batch_size
        size = max(1, min(batch_size if ahead else 2 * size, batch_size, fitting))
    if not groups:
        return None
    queued_s, spent_s = clocks.queue_s() - queued_s, clocks.cpu_s() - spent_s
    groups = groups[1:] or groups
    weighed = samples[:_WEIGHED_SAMPLES] if isinstance(samples, list) else samples
    in_weighed = len(weighed) if isinstance(samples, list) else groups[-1].size
    # Calls for many samples at once take less for each.
    largest = [group for group in groups if group.size == max(groups).size]
    if ahead:
        # The first whole batch opens connections, and waits for that as well.
        largest = [min(largest, key=lambda group: group.wall_ms)]
    reads = np.array(largest if at_once or ahead else groups).sum(axis=0)
    collated = np.array(largest).sum(axis=0)
    return SampleCost(
        # Where samples are read ahead, it waits for a batch while it decodes the one before.
        wall_ms=float((max(reads[2], reads[1] - reads[2]) if ahead else reads[1]) / reads[0]),
        cpu_ms=float(reads[2] / reads[0]),
        size_bytes=bytes_in(weighed) // max(1, in_weighed),
        samples=int(reads[0]),
        collate_ms=float(collated[3] / collated[0]),
        pace=1000 * median(paces_s) / _KNOWN_MS or 1.0,
        crowded=1.0 + min(_MOST_CROWDED, queued_s / max(spent_s, 1e-4)),
    )


def fails_for_its_place(error: BaseException) -> bool:
    """Return whether reading failed for what a side process may not do, and others may."""
    told = "".join(traceback.format_exception(error))  # with causes, and notes of other processes
    return any(text in told for text in _PLACES)


def known_work(cpu_s: Callable[[], float] = clock.thread_time) -> float:
    """Return the seconds of CPU time of some work like that of handing a task over."""
    began = cpu_s()
    for _ in range(_KNOWN_TIMES):
        pickle.loads(pickle.dumps(_KNOWN_WORK))
    return cpu_s() - began


def _read(
    dataset: Any, indices: Sequence[int], at_once: bool, ends_s: float, clocks: Clocks
) -> Any:
    """Return samples, in one call or one by one: then none is begun after a moment."""
    if at_once:
        return dataset.__getitems__(indices)
    read_ahead(dataset, indices)
    samples = []
    for index in indices:
        samples.append(dataset[index])
        if clocks.clock_s() >= ends_s:
            break
    return samples


def _collate_ms(
    samples: list[Any], collate: Callable[[list[Any]], object] | None, clocks: Clocks
) -> float:
    if collate is None:
        return 0.0
    try:
        return clocks.of(lambda: collate(samples))[2]
    except Exception:
        return 0.0  # it raises when training collates them

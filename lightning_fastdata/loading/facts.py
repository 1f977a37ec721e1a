"""What is found out about a dataset before its workers start, without touching it here.

What a dataset opens when it is read must be opened in the workers: forked processes share the
position of an open file, and threads of a client that was used before a fork are missing after it.
So nothing is read in the training process, but in one that is started as the workers will be, and
thrown away. It sends what it finds out piece by piece, so that a piece that takes too long costs
only itself.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    Dataset,
    DistributedSampler,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata.batches.bad_samples import BadSamples
from lightning_fastdata.batches.collate import collate_samples, uncollatable
from lightning_fastdata.batches.keyed import fetches_in_batches, reads_together
from lightning_fastdata.batches.memory import pack
from lightning_fastdata.errors import DatasetError, add_note, text_of
from lightning_fastdata.executors.columns import rows_of
from lightning_fastdata.executors.kinds import OPEN_CONNECTION, forks, open_handles
from lightning_fastdata.executors.pool.watches import death
from lightning_fastdata.fingerprint import Fingerprint, fingerprint
from lightning_fastdata.host import clock, system_calls
from lightning_fastdata.host.clock import Clocks, SpentMeter
from lightning_fastdata.host.memory import read_host_memory, read_own_bytes, read_pages
from lightning_fastdata.order.epoch_order import dataset_length, rank_now
from lightning_fastdata.order.samplers import BlockShuffleSampler, ShuffleSampler
from lightning_fastdata.randomness.global_generators import DrawWatch, kept_random_state
from lightning_fastdata.randomness.seeds import lasting, own_states
from lightning_fastdata.sources.shared import held_objects
from lightning_fastdata.sources.source import read_ahead, reads_ahead
from lightning_fastdata.torch_internals import set_worker_info, watch_worker_info
from lightning_fastdata.tree import (
    bytes_in,
    find_composes,
    find_instances,
    held,
    held_by,
    is_a,
    loaded_classes,
)

if TYPE_CHECKING:
    from lightning_fastdata.loading.plan_for import LoaderSpec

Tell: TypeAlias = Callable[[str, object], None]
"""Function that sends a finding to the training process: its name, and a value to be pickled."""

# Errors of the system for an open file that is not what the program thinks it is.
_HANDLE_ERRORS: Final = (None, errno.EBADF, errno.EINVAL, errno.ESPIPE, errno.EPIPE)
_PLACES: Final = (
    "daemonic processes are not allowed to have children",
    "Cannot re-initialize CUDA in forked subprocess",
)
"""Messages of Python and torch for what workers may not do, but the training process may."""
_IN_FORK_S: Final = 1.0  # most of the time that a sample takes which a fork of a reader reads
_COMPARED_S: Final = 0.02  # most of a CPU, before samples are read and after that
_KEPT: Final = 0.3  # most of a sample's time to read it again, where the dataset keeps it
_WORTH_KEEPING_MS: Final = 0.1  # least CPU time saved for a sample: less may be by chance
_KEYS: Final = 64  # number of keys of a user's sampler to read samples by
# Samplers that give each position of the dataset, from 0.
_OF_POSITIONS: Final = (SequentialSampler, RandomSampler, ShuffleSampler, DistributedSampler)

_DECIDED_WITHOUT: Final = (
    "a process that tried the dataset {}, so settings are chosen without having measured it."
)
_LOOK_FOR: Final = (
    " If the training hangs or fails at its first batch, look for what the dataset opens or starts "
    "in __init__, and open it on first use in __getitem__."
)

# Bounds for measuring samples
_BUDGET_S: Final = 0.3
_MOST_SAMPLES: Final = 1024
_MANY_SAMPLES, _MANY_S = 256, 0.025
"""So many samples are enough once reading them has taken so many seconds: samples that take less
are hardly measured before the caches of the CPU hold what they use."""
_FEWEST_SAMPLES: Final = 14
_DRAWING_SAMPLES: Final = 64
"""Number of samples after which it counts as known whether reading draws, where all else is."""
_DEAR_BATCH_MS: Final = 30  # a hundred times what it takes to hand a batch over
_ALIKE: Final = 2
_AHEAD_BUDGETS: Final = 4
"""Factor on the time for datasets that read ahead, as these mostly wait."""
MOST_WAITING: Final = 64
"""Most workers that read samples which wait; of others there are no more than CPUs."""
OF_MEMORY: Final = 0.8
"""Share of the memory that is left which workers may take."""
_WEIGHED_SAMPLES: Final = 16  # number of samples whose bytes are counted
_KNOWN_WORK: Final = (tuple(range(1000, 1128)), "rows", 3, {"slot": 7})
_KNOWN_TIMES: Final = 8
# CPU time of known_work() where benchmarks/handing_over.py measured side processes.
_KNOWN_MS: Final = 0.045
_MOST_CROWDED: Final = 20.0

# Bounds for the trial of a stream
_OF_LITDATA: Final = ("StreamingDataset", "CombinedStreamingDataset", "ParallelStreamingDataset")
"""Classes of LitData's streams, which share out their chunks."""
_STREAM_SAMPLES: Final = 32
_STREAM_BUDGET_S: Final = 1.0
_STREAM_DEADLINE_S: Final = 10.0
_STREAM_COMPARED_S: Final = 0.1
# Both of a pair have to be asked for: one of them alone seeds a generator, refuses workers, or has
# a file for each of a given number of workers. A worker_init_fn gets its number as an argument.
_NAMES: Final = ("num_workers", "id", "dataset")
_SHARES: Final = ({"num_workers", "id"}, {"num_workers", "dataset"})

# Bounds for the process that is thrown away
_DEADLINE_S: Final = 30.0
_DEADLINE_HERE_S: Final = 3.0  # where the training process reads in any case, little rests on it
_START_S: Final = 60.0  # a spawned process imports torch and unpickles a dataset of unknown size
_LOOK_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is to be found out; each costs the reading of a few samples."""

    sample: bool = False  # whether sample 0 is read, to be checked
    collated: bool = False  # whether it is checked that torch can collate it
    further: int = 0  # number of samples to read from all over the dataset
    cost: bool = False  # whether to find what a sample costs, and if it draws


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """What it takes to read one sample in one thread: means over those that were read.

    Means, because an epoch takes as long as all of its samples together: of a hundred samples the
    one that takes a second counts as much as all the others.
    """

    wall_ms: float
    """Time from the call to its return, less any wait for a CPU: what it would take on an
    idle machine."""
    cpu_ms: float
    """CPU time that the thread spent; at most ``wall_ms``."""
    size_bytes: int
    """Bytes of the tensors, arrays and images of one sample."""
    samples: int
    """Number of samples that were measured."""
    collate_ms: float = 0.0
    """CPU time of the sample's share in collating a batch, besides reading it."""
    pace: float = 1.0
    """Ratio of the time that known work took here to that where the cost of side processes was
    measured. CPUs are slower where others are at work on them."""
    crowded: float = 1.0
    """Ratio of the time that reading took to its CPU time, as others had the CPUs; 1: none did."""

    @property
    def wait_ms(self) -> float:
        """Milliseconds without any CPU: for a disk, a network, a lock, or a sleep."""
        return self.wall_ms - self.cpu_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSplit:
    """Whether several workers together give each sample of a stream once."""

    splits: bool
    """Whether the workers share the stream out; False also where it is not known."""
    why: str
    """What tells so, as a text that follows "because"."""
    most_workers: int | None = None
    """Most workers that find a shard to read; None: there is no such bound."""
    here: bool = False
    """Whether the stream's library reads in processes of its own, which workers could not reach."""
    keeps: bool = False
    """Whether each sample that was read in a trial has changed the stream."""
    computes: bool = field(default=False, compare=False)
    """Whether the samples that were read in a trial computed for longer than they waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """What was found out; None or empty where it was not asked for or could not be had."""

    sample: object = None  # the first sample
    uncollatable: str | None = None  # what in the sample torch cannot collate, and what to do
    further: tuple[object, ...] = ()  # samples from all over the dataset
    rows: bool = False
    """Whether batches are rows of columns of numbers, collated by default, without a transform.
    Then no sample is measured."""
    own_bytes: int = 0
    """Bytes of columns of ``rows`` that are memory of this process, which a program may change."""
    split: bool = False  # whether several workers may read the samples of one batch
    cost: SampleCost | None = None  # cost of reading a sample
    draws: bool = False
    """Whether reading drew from generators: the global ones, the dataset's or ``collate_fn``'s."""
    changes: bool = False
    """Whether reading samples has changed the dataset or ``collate_fn``, or nobody can say that it
    has not: a counter, samples that are kept, a file that is opened; or a process that is forked
    from one which has read cannot read, as it lacks the threads that reading has started."""
    cost_again: SampleCost | None = None
    """Cost of reading a sample again, where that is far less as the dataset keeps samples."""
    worker_bytes: int | None = None
    """Bytes of memory that a worker comes to have of its own: what a process had that tried the
    dataset, and what it would copy of the dataset's objects by reading all of them. None also where
    memory has room for far more."""
    here: str | None = None  # why the training process alone can read it; None: nothing says so
    stream: StreamSplit | None = None  # whether a stream shares itself out among workers
    warnings: tuple[str, ...] = ()  # what the user should know, each a sentence or more


def inspect_dataset(spec: LoaderSpec, questions: Questions) -> DatasetFacts:
    """Find out what is asked about a dataset, in a process that is started as its workers will be.

    Datasets of rows (see :func:`.rows_of`), which hold no code of the user and nothing that is
    opened, are read here. For a stream only whether it shares itself out is found out, which may
    take its first samples. Nothing is read with ``probe=False``. Where no side process may read,
    and the options leave it open, the training process does. Where it reads in any case, failures
    of another process with open files and clients mean nothing.

    Raises:
        DatasetError: Sample 0 was asked for and reading it raised.
    """
    method: str = spec.options.multiprocessing_context
    if method == "auto":
        method = multiprocessing.get_start_method()
    # A plan without a trial, as with a number of workers, rests on all that needs no reading.
    plans = questions.cost or (spec.needs_cost and not spec.needs_trial)
    # Another process takes seconds to start if it is not forked, and the first batch tells as much.
    pays = method == "fork" or not (spec.reads_here or questions == Questions(sample=True))
    reads = spec.options.probe and pays and questions != Questions()
    rows = rows_of(spec.dataset) if reads or plans else None
    splits = plans and spec.default_collation and not spec.transformed
    gathered = rows if splits and not spec.pipelines else None
    facts = DatasetFacts(
        rows=gathered is not None,
        own_bytes=0 if gathered is None else gathered.own_bytes,
        split=splits and not reads_together(spec.dataset),
    )
    if spec.is_stream:
        return replace(facts, stream=split_of(spec, method))
    if not reads:
        return facts
    if rows is not None:
        values: dict[str, Any] = {}
        questions = replace(questions, cost=questions.cost and gathered is None)
        as_it_is = replace(spec, worker_init_fn=None, sampler=None, batch_sampler=None)
        with kept_random_state():
            _answer(as_it_is, questions, values.__setitem__, apart=False)
        return replace(facts, **values)
    once = given_once(spec.dataset)
    handles = open_handles(spec.dataset)
    once += [each for each in handles if spec.reads_here or each == OPEN_CONNECTION]
    if once:
        here = f"it holds {once[0]}, which a side process would share; it is read as by torch"
        return replace(facts, here=here if spec.may_be_here else None)
    deadline_s = _DEADLINE_HERE_S if spec.reads_here else _DEADLINE_S
    tried = partial(try_apart, start_method=method, deadline_s=deadline_s)
    in_workers = not spec.reads_here and spec.options.num_workers != "auto"
    findings = tried(partial(_answer, as_worker=in_workers), spec, questions)
    if not in_workers and _may_need_workers(spec, findings.failure):
        # Without a cost the training process is not chosen to read.
        questions = replace(questions, cost=False)
        again = tried(partial(_answer, as_worker=True), spec, questions)
        findings = findings if again.failure else again
    values, failure = findings.values, findings.failure
    key, within = values.pop("key", 0), values.pop("within", None)
    facts = replace(facts, **values)
    if failure is None:
        return facts
    failure = replace(failure, what=failure.what + (f", in its {within}" if within else ""))
    place = _of_place(failure)
    if spec.reads_here and (place or _suspects_fork(failure)):
        return facts
    decided_without = _DECIDED_WITHOUT.format(failure.what) + ("" if within else _LOOK_FOR)
    if within == "sampler":  # which no worker asks
        return replace(facts, warnings=(decided_without,))
    late = failure.kind == "late" and method == "fork"
    if (spec.is_open and place) or (spec.may_be_here and (late or _works_here(spec, key, failure))):
        here = f"a side process that tried the dataset {failure.what}; here it is read as by torch"
        here += "" if spec.may_be_here else ", without its worker_init_fn"
        return replace(facts, here=here, warnings=(here,) if late or not spec.may_be_here else ())
    if failure.error is not None and BadSamples.of(spec.options.on_bad_sample).policy != "raise":
        return facts
    if failure.error is not None and questions.sample:
        raise _unreadable(spec, key, failure)
    return replace(facts, warnings=(decided_without,))


def given_once(dataset: object) -> list[str]:
    """Return in words what a dataset holds that gives each sample to whoever asks first.

    These are queues, connections and pipes, which processes share.
    """
    queues = loaded_classes("multiprocessing.queues", "Queue", "SimpleQueue")
    # A process has a connection of its own to what a manager keeps.
    proxies = loaded_classes("multiprocessing.managers", "BaseProxy")
    found = find_instances(dataset, (io.IOBase, Connection, *queues, *proxies))
    pipes = [each for each in found if isinstance(each, io.IOBase) and not each.closed]
    return [
        *["a queue" for each in found if isinstance(each, queues)],
        *["a connection" for each in found if isinstance(each, Connection)],
        *["a pipe" for each in pipes if not each.seekable()],
    ]


def refuse_empty(spec: LoaderSpec) -> None:
    """Raise DatasetError if the dataset of a loader has no samples."""
    if spec.length == 0:
        raise DatasetError(
            f"{spec.name} returned an empty {type(spec.dataset).__name__} (length 0). "
            "Check the path or the filter that made it."
        )


def _answer(
    spec: LoaderSpec,
    questions: Questions,
    tell: Tell,
    *,
    as_worker: bool = False,
    apart: bool = True,
) -> None:
    """Read what the questions need, and tell it by the names of :class:`DatasetFacts`.

    Runs where nothing else uses the dataset or its sampler, ``apart`` in a process that is thrown
    away. ``as_worker``: ``get_worker_info()`` tells of the first worker, as it does in one.
    ``"key"`` is the key of the first sample, where a sampler gives it; ``"within"`` is what of the
    user's is called before samples are read, as long as it is.
    """
    dataset = spec.dataset
    if as_worker or spec.worker_init_fn is not None:
        asked = spec.options.num_workers
        workers = 1 if asked == "auto" else max(1, asked)
        set_worker_info(number=0, workers=workers, seed=0, dataset=dataset)
    if spec.worker_init_fn is not None:
        tell("within", "worker_init_fn")
        spec.worker_init_fn(0)
        tell("within", None)
    if spec.has_order:
        tell("within", "sampler")
        keys = probe_indices(dataset, _KEYS, spec.sampler, spec.batch_sampler)
        tell("within", None)
        if not keys:
            return
        tell("key", keys[0])
        dataset = Subset(dataset, keys)
    context = spec.options.multiprocessing_context
    forked = apart and forks(None if context == "auto" else context)
    threads = system_calls.threads_running() if forked else None
    compares = questions.cost and not spec.reads_here
    before = _state_of(spec) if compares else None  # the first sample may change it for good
    if questions.sample:
        sample = reads_one(spec, dataset)(0)
        tell("sample", sample)
        tell("uncollatable", uncollatable(sample) if questions.collated else None)
    if questions.further:
        tell("further", _further_samples(spec, dataset, questions.further))
    if questions.cost:
        unread = before, threads
        _answer_cost(spec, dataset, tell, begun=questions.sample, unread=unread)


def _state_of(spec: LoaderSpec) -> Fingerprint | None:
    return fingerprint(spec.dataset, spec.collate_fn, within_s=_COMPARED_S)


def _answer_cost(
    spec: LoaderSpec,
    dataset: Dataset[Any],
    tell: Tell,
    *,
    begun: bool,
    unread: tuple[Fingerprint | None, int | None],
) -> None:
    """Tell what a sample costs, and what else shows while some are read.

    ``begun``: a sample was read before. ``unread``: state of what is read, and number of threads,
    before any was, where workers are forked.
    """
    watch, own = DrawWatch(), partial(own_states, (spec.dataset, spec.collate_fn))
    collate = collate_samples if spec.default_collation else spec.collate_fn
    size = spec.batch_size or 1
    measure = partial(measure_samples, dataset, batch_size=size, collate=collate)
    if spec.reads_here:  # what a sample costs decides nothing
        drawn, cost = own(), measure(at_most=_DRAWING_SAMPLES)
        tell("draws", watch.drew() or own() != drawn)
        tell("cost", cost)
        return
    drawn, (before, threads) = own(), unread
    if not begun:
        measure(at_most=1)  # it may import, and open files, for longer than there is time
    cost, after = measure(), _state_of(spec)
    changes = before is None or before != after
    if not changes and threads is not None and system_calls.threads_running() > threads:
        one = partial(measure_samples, dataset, at_most=1)
        changes = not system_calls.done_in_fork(one, within_s=_IN_FORK_S)
    tell("draws", watch.drew() or own() != drawn)
    tell("changes", changes)
    tell("cost", cost)
    if spec.may_be_here and not spec.default_collation:
        indices = _drawn_indices(dataset_length(dataset) or 0, 2)
        at_once = spec.batch_size is not None and fetches_in_batches(dataset)
        read = partial(_read, dataset, indices, at_once, math.inf)
        tell("here", _why_not_sent(spec, read))
    if cost is not None and changes:
        again = measure(at_most=cost.samples)
        if again is not None and _keeps(cost, again):
            tell("cost_again", again)
    computes = cost is not None and cost.wait_ms < cost.cpu_ms
    most = os.cpu_count() if computes else MOST_WAITING
    tell("worker_bytes", _worker_bytes(spec.dataset, most or MOST_WAITING))


def _worker_bytes(dataset: object, most: int) -> int | None:
    """Return the bytes that a worker comes to have of its own, as this process has.

    None: they are not known, or there is room for ``most`` processes of this one's whole size.
    """
    whole = read_own_bytes(os.getpid())  # which takes 15 us, and what follows 10 ms
    if whole is not None and most * whole <= OF_MEMORY * read_host_memory().available_bytes:
        return None
    pages, objects = read_pages(os.getpid()), held_objects(dataset)
    if pages is None:
        return None
    in_common = pages.anonymous_bytes - pages.own_bytes
    return pages.own_bytes + min(in_common, sum(each.counted_bytes for each in objects))


def _why_not_sent(spec: LoaderSpec, read: Callable[[], list[Any]]) -> str | None:
    """Return why workers could not hand over a batch; None: they can, or it cannot be made."""
    try:
        samples = read()
        batch = samples if spec.batch_size is not None else samples[0]
        batch = batch if spec.collate_fn is None else spec.collate_fn(batch)
    except Exception:
        return None  # it raises when training reads it
    try:
        pack(batch)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return f"no side process can send its batches ({why}); it is read as by torch"
    return None


def _keeps(first: SampleCost, again: SampleCost) -> bool:
    """Return whether a dataset seems to keep what it reads: to read it again saves CPU time, too.

    What only the system's page cache keeps saves none: it is decoded again. The first sample alone
    tells nothing: it may have taken so long to open a file, or to load a model.
    """
    saved_ms = first.cpu_ms - again.cpu_ms
    saves_cpu = again.cpu_ms <= _KEPT * first.cpu_ms and saved_ms >= _WORTH_KEEPING_MS
    return first.samples > 1 and saves_cpu and again.wall_ms <= _KEPT * first.wall_ms


def _suspects_fork(failure: Failure) -> bool:
    """Return whether a failure may come from what a forked process does not inherit."""
    error = failure.error
    if error is None:
        return True
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        return error.errno in _HANDLE_ERRORS
    # A mistake of the dataset raises an ordinary error; a library reports a fork by one of its own.
    return isinstance(error, RuntimeError) or type(error).__module__ != "builtins"


def _may_need_workers(spec: LoaderSpec, failure: Failure | None) -> bool:
    """Return whether a dataset may have failed only because it asked for its worker's number."""
    told = spec.reads_here or spec.worker_init_fn is not None
    return not (told or failure is None or _of_place(failure) or _suspects_fork(failure))


def _of_place(failure: Failure) -> bool:
    """Return whether a failure comes from the process of the trial, and not from the dataset."""
    if failure.error is None:
        return failure.kind == "not started"
    return _fails_for_its_place(failure.error)


def _fails_for_its_place(error: BaseException) -> bool:
    """Return whether reading failed because a side process may not do what it takes."""
    told = "".join(traceback.format_exception(error))  # with causes, and notes of other processes
    return any(text in told for text in _PLACES)


def _works_here(spec: LoaderSpec, key: Any, failure: Failure) -> bool:
    """Return whether the training process can read a sample that raised in a side process.

    A sample that waits for ever or ends its process is not tried, as it would do so here, too.
    """
    if failure.error is None or not _suspects_fork(failure):
        return False
    try:
        with kept_random_state():
            reads_one(spec, spec.dataset)(key)
    except Exception:
        return False
    return True


def may_start_processes() -> bool:
    """Return whether side processes can be started though the user has not asked for any."""
    if multiprocessing.get_start_method() == "fork":
        return True
    # Else another process imports the program's script once more.
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return False
    script = held(sys.modules.get("__main__"), "__file__")
    try:
        return script is None or "__main__" in Path(script).read_text(errors="replace")
    except OSError:
        return False


def _unreadable(spec: LoaderSpec, key: object, failure: Failure) -> DatasetError:
    keys = inherited = ""
    if isinstance(failure.error, KeyError | TypeError) and not spec.has_order:
        keys = (
            " If its keys are others than the numbers from 0, build the loader with "
            "make_loader(dataset, sampler=...), whose sampler gives them."
        )
    if _suspects_fork(failure):
        inherited = (
            " It was read in a side process, as workers read it. If the dataset works in the "
            "training process alone, it holds something there (a client with threads, a handle, "
            "CUDA) that a forked process cannot use: open that on first use in __getitem__, or set "
            'multiprocessing_context="forkserver", or num_workers=0.'
        )
    error = DatasetError(
        f"Reading sample {key!r} of {spec.name} ({type(spec.dataset).__name__}) {failure.what}. "
        "The training would have failed at its first batch; the cause is in the traceback above."
        f"{keys}{inherited}"
    )
    error.__cause__ = failure.error
    return error


# Which samples are read


def spread_indices(length: int, count: int) -> list[int]:
    """Return up to ``count`` different indices at even distances, none of them the first."""
    count = min(count, length)
    return [(2 * number + 1) * length // (2 * count) for number in range(count)]


def _drawn_indices(length: int, count: int) -> list[int]:
    """Return up to ``count`` different indices from all over a dataset, in a mixed order.

    One is taken from each of ``count`` parts, at a place that differs from part to part: datasets
    repeat themselves at regular distances. The indices are the same ones each time.
    """
    count = min(count, length)
    generator = np.random.default_rng(0)
    bounds = np.arange(count + 1) * length // max(1, count)
    indices = bounds[:-1] + (generator.random(count) * np.diff(bounds)).astype(np.int64)
    return [int(index) for index in generator.permutation(indices)]


def probe_indices(
    dataset: Dataset[Any], count: int, sampler: Any, batch_sampler: Iterable[Any] | None = None
) -> list[Any]:
    """Return keys of samples from all over the order of a sampler, or of a batch sampler.

    Keys may be of any kind. Samplers of torch and lists show them without being iterated; any other
    is iterated, which may change it: call this in a process that is thrown away.
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


def reads_one(spec: LoaderSpec, dataset: Dataset[Any]) -> Callable[[Any], Any]:
    """Return a function that reads a sample as the loader does: alone, or as a batch of one.

    What ``__getitems__`` returns is for ``collate_fn`` alone to know: a batch that is no sequence
    (a dict of columns, a data frame) is taken for the sample.
    """
    batched = spec.batch_size is not None or spec.batch_sampler is not None
    if not (batched and fetches_in_batches(dataset)):
        return lambda key: dataset[key]

    def read(key: Any) -> Any:
        batch = dataset.__getitems__([key])
        return batch[0] if isinstance(batch, Sequence | torch.Tensor | np.ndarray) else batch

    return read


def _further_samples(spec: LoaderSpec, dataset: Dataset[Any], count: int) -> tuple[Any, ...]:
    """Read up to ``count`` samples from all over a map-style dataset.

    The random state stays as it was. It ends early when the budget is spent, and at a sample that
    cannot be read, which raises when training reads it.
    """
    began_s, samples, read = clock.monotonic(), [], reads_one(spec, dataset)
    for index in spread_indices(dataset_length(dataset) or 0, count):
        if clock.monotonic() - began_s >= _BUDGET_S:
            break
        with kept_random_state():
            try:
                samples.append(read(index))
            except Exception:
                break
    return tuple(samples)


# What a sample costs


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
    at_most: int | None = None,
) -> SampleCost | None:
    """Read samples of a map-style dataset as one process alone would, and return what one costs.

    Samples from all over the dataset are read in this thread and collated, first one, then twice as
    many each time up to whole batches, until there are 1,024, or as many as in four batches, or the
    budget is spent; of a dataset that reads ahead, three whole batches, the quickest of which
    counts. It ends after fifteen samples that take long, and alike, and after 256 that take 25 ms.
    The first one is left out if there are others, because it opens files and imports. ``at_most``:
    greatest number of samples that are read; they are the same ones each time.

    Returns:
        None: there is no sample, or one could not be read, which raises when training reads it.

    Raises:
        Exception: Whatever reading raised, if it comes from the process in which it was tried.
    """
    timed = Clocks().of
    at_once, ahead = fetches_in_batches(dataset), reads_ahead(dataset)
    many_samples = max(_MANY_SAMPLES, 4 * batch_size)
    most = 3 * batch_size if ahead else max(_MOST_SAMPLES, many_samples)
    remaining = _drawn_indices(dataset_length(dataset) or 0, most)[:at_most]
    if ahead:
        budget_s *= _AHEAD_BUDGETS
    ends_s, size = clock.monotonic() + budget_s, 1
    queued_s, spent_s = clock.queued_s(), clock.thread_time()
    samples: Any = None
    groups: list[_Group] = []
    paces_s: list[float] = []
    while remaining:
        paces_s.append(known_work())
        try:
            take = partial(_read, dataset, remaining[:size], at_once, ends_s)
            samples, wall_ms, cpu_ms = timed(take)
        except Exception as error:
            if _fails_for_its_place(error):
                raise
            return None
        collate_ms = 0.0
        if collate is not None:
            with contextlib.suppress(Exception):  # it raises when training collates them
                collate_ms = timed(partial(collate, samples))[2]
        count = len(remaining[:size]) if at_once else len(samples)
        groups.append(_Group(count, wall_ms, cpu_ms, collate_ms))
        remaining = remaining[count:]
        # The next samples are expected to take as long each, but to wait as long together.
        left_ms = 1000 * (ends_s - clock.monotonic())
        each_ms = ((cpu_ms if ahead else wall_ms) + collate_ms) / count
        done = sum(group.size for group in groups)
        many = done >= many_samples and left_ms <= 1000 * (budget_s - _MANY_S)
        if left_ms <= 0 or done >= most or many:
            break
        if not ahead and _is_dear(groups[1:], batch_size, at_once=at_once):
            break
        fitting = int(left_ms / each_ms) if each_ms > 0 else batch_size
        size = max(1, min(batch_size if ahead else 2 * size, batch_size, fitting))
    if not groups:
        return None
    queued_s, spent_s = clock.queued_s() - queued_s, clock.thread_time() - spent_s
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
        # Where samples are read ahead, one batch is waited for while another is decoded.
        wall_ms=float((max(reads[2], reads[1] - reads[2]) if ahead else reads[1]) / reads[0]),
        cpu_ms=float(reads[2] / reads[0]),
        size_bytes=bytes_in(weighed) // max(1, in_weighed),
        samples=int(reads[0]),
        collate_ms=float(collated[3] / collated[0]),
        pace=1000 * median(paces_s) / _KNOWN_MS or 1.0,
        crowded=1.0 + min(_MOST_CROWDED, queued_s / max(spent_s, 1e-4)),
    )


def _is_dear(groups: Sequence[_Group], batch_size: int, *, at_once: bool) -> bool:
    """Return whether samples take so long, and alike, that more of them would change nothing.

    The training waits while they are read. The last two groups are compared, as single samples
    differ: pictures have many sizes, and an operation may run on some of them only. Of calls for
    many samples at once, which may take less for each, all are.
    """
    if sum(group.size for group in groups) < _FEWEST_SAMPLES:
        return False
    times_ms = [group.wall_ms / group.size for group in (groups if at_once else groups[-2:])]
    least_ms, most_ms = min(times_ms), max(times_ms)
    return batch_size * least_ms >= _DEAR_BATCH_MS and most_ms <= _ALIKE * least_ms


def known_work() -> float:
    """Return the seconds of CPU time of some work like that of handing a task over."""
    began_s = clock.thread_time()
    for _ in range(_KNOWN_TIMES):
        pickle.loads(pickle.dumps(_KNOWN_WORK))
    return clock.thread_time() - began_s


def _read(dataset: Any, indices: Sequence[int], at_once: bool, ends_s: float) -> Any:
    """Return samples, read in one call, or one by one until the time ``ends_s``."""
    if at_once:
        return dataset.__getitems__(indices)
    read_ahead(dataset, indices)
    samples = []
    for index in indices:
        samples.append(dataset[index])
        if clock.monotonic() >= ends_s:
            break
    return samples


# Whether a stream shares itself out among workers


def split_of(spec: LoaderSpec, start_method: str) -> StreamSplit:
    """Return whether the stream of a loader shares itself out, or what the user says of it.

    Each worker iterates a copy of the whole stream. Some streams ask which worker they are in and
    give a part of their own; from the others, several workers would give each sample several times.

    Known are Hugging Face's streams, WebDataset and LitData. Another one does if it asks
    ``get_worker_info()`` for the number of the worker and of all workers while its first samples
    are read; and, where that reaches its end, if two workers together give as many samples as one
    alone. It is tried, where the number of workers depends on it, in a process that is started as
    workers would be, and thrown away. A ``worker_init_fn`` may give each worker's copy its part.
    """
    options, found = spec.options, known_split(spec.dataset)
    configured = spec.worker_init_fn is not None
    if found is None or (configured and not (found.splits or found.here)):
        found = _tried(spec, start_method)
    if options.split == "auto" or found.here:
        return found
    return replace(found, splits=options.split, why=f"split={options.split} says so")


def _no(why: str) -> StreamSplit:
    return StreamSplit(splits=False, why=why)


def known_split(stream: object) -> StreamSplit | None:
    """Return what is known of a stream by its library; None: nothing."""
    chained = held(stream, "datasets") if type(stream) is ChainDataset else None
    if isinstance(chained, list | tuple):
        return next((known for known in map(known_split, chained) if known and known.here), None)
    if is_a(stream, "datasets", "IterableDataset"):
        return _hugging_face(stream)
    if any(is_a(part, "ray") for part in held_by(stream).values()):
        why = "Ray Data reads in processes of its own, which workers cannot reach"
        return StreamSplit(splits=False, why=why, here=True)
    for kind in _OF_LITDATA:
        if is_a(stream, "litdata", kind):
            return StreamSplit(splits=True, why=f"litdata's {kind} shares out its chunks")
    if is_a(stream, "webdataset", "DataPipeline"):
        return _web_dataset(stream)
    return None


def _hugging_face(stream: Any) -> StreamSplit:
    try:
        shards = int(getattr(stream, "num_shards", None) or stream.n_shards)
    except Exception:  # whatever a version raises that has neither
        return _no("its number of shards is not known")
    shared = "its 1 shard is" if shards == 1 else f"its {shards} shards are"
    return StreamSplit(splits=True, why=f"{shared} shared out", most_workers=shards)


def _web_dataset(stream: object) -> StreamSplit:
    stages = list(held(stream, "pipeline") or ())
    if vars(stream).get("nsamples", -1) > 0:
        return _no("with_epoch(n) gives n samples in each worker")
    if any(is_a(stage, "webdataset", "ResampledShards") for stage in stages):
        return StreamSplit(splits=True, why="each worker draws shards of its own")
    names = [stage.__name__ if isinstance(stage, FunctionType) else "" for stage in stages]
    if names.count("split_by_worker") != 1:
        return _no("split_by_worker is not once in its pipeline")
    urls = (held(stage, "urls") for stage in stages)
    shards = next((len(each) for each in urls if isinstance(each, list)), None)
    if shards is None:
        return _no("its number of shards is not known")  # a worker without any would raise
    ranks = rank_now().ranks if "split_by_node" in names else 1
    why = f"its {shards} shards are split by worker"
    return StreamSplit(splits=True, why=why, most_workers=max(1, shards // ranks))


def _tried(spec: LoaderSpec, start_method: str) -> StreamSplit:
    stream, options, name = spec.dataset, spec.options, type(spec.dataset).__name__
    if type(stream) is ChainDataset and spec.worker_init_fn is None:
        return _no("the first samples of a ChainDataset tell nothing of its later parts")
    if not (options.split == options.num_workers == "auto" and options.probe):
        return _no(f"{name} is of no known library, and was not tried")
    handles = open_handles(stream) + given_once(stream)
    if handles:
        return _no(f"{name} holds {handles[0]}, from which a trial would take samples")

    def read(number: int, workers: int) -> tuple[dict[str, Any], str]:
        """Return what was told of a worker's reading, and what ended it; empty: nothing."""
        tried = try_apart(
            read_as_worker,
            *(spec, number, workers),
            start_method=start_method,
            deadline_s=_STREAM_DEADLINE_S,
        )
        failure = tried.failure
        if failure is not None and failure.kind == "not started" and spec.may_be_here:
            return {"unsent": f"a side process that tried it {failure.what}"}, ""
        # A stream that gives nothing for long may have asked before.
        late = failure is not None and failure.kind == "late"
        return tried.values, "" if failure is None or late else failure.what

    first, failed = read(0, 2)
    if "unsent" in first:
        return StreamSplit(splits=False, why=first["unsent"], here=True)
    splits, why = False, f"{name} asks get_worker_info() for its part"
    if failed:
        why = f"{name}, tried as one of two workers, {failed}"
    elif not any(first.keys() >= each for each in _SHARES):
        why = f"{name}, tried, did not ask get_worker_info() for its part"
    elif "samples" not in first:
        splits = True
    else:
        (second, failed), (alone, _) = read(1, 2), read(0, 1)
        together = first["samples"] + second.get("samples", 0)
        splits = not failed and "samples" in second and together == alone.get("samples")
        if not splits:
            why = (
                f"two workers of {name}, tried, give {together} samples, and one alone "
                f"{alone.get('samples')}{failed and f': the second {failed}'}"
            )
    told = {name: name in first for name in ("keeps", "computes")}
    return StreamSplit(splits=splits, why=why, **told)


def read_as_worker(spec: LoaderSpec, number: int, workers: int, tell: Tell) -> None:
    """Read the first samples of a stream, and tell what it asked, and how many it gave to its end.

    Also whether that has changed the stream: what it opens for its first sample is no change;
    whether it computed for longer than it waited; and whether its first batch could be sent. Runs
    where nothing else uses the stream.
    """
    stream: Any = spec.dataset
    told = set[str]()

    def note(name: str) -> None:
        if name in _NAMES and name not in told:
            told.add(name)
            tell(name, True)

    watch_worker_info(note, number=number, workers=workers, dataset=stream)
    if spec.worker_init_fn is not None:
        spec.worker_init_fn(number)
    began_s, samples, batch = clock.monotonic(), 0, list[Any]()
    # The others are read only where the first of two has ended, and then to their ends: whoever
    # reads alone has the samples, and so the time, of both.
    most = _STREAM_SAMPLES if (number, workers) == (0, 2) else None
    late, opened, spent = False, None, SpentMeter()

    def state() -> Fingerprint | None:
        # Pipelines draw by keys, and DataPipes count what they give in a pass.
        apart: dict[int, object] = dict(lasting(find_composes(stream)))
        apart |= {id(pipe): None for pipe in find_instances(stream, (IterDataPipe,))}
        within_s = _STREAM_COMPARED_S
        return fingerprint(stream, within_s=within_s, with_globals=False, instead=apart)

    spent.began()
    for sample in islice(stream, most):
        samples += 1
        if samples <= 2:
            batch.append(sample)
        if samples == 1 and most is not None:
            spent.paused()
            opened = state()
            spent.began()
        late = clock.monotonic() - began_s > _STREAM_BUDGET_S * 2 / workers
        if late:
            break
    wall_s, cpu_s, queued_s = spent.used()
    if wall_s - queued_s < 2 * cpu_s:
        tell("computes", True)
    if opened is not None and state() not in (None, opened):
        tell("keeps", True)
    if not late and samples != most:
        tell("samples", samples)
    if batch and most is not None and spec.may_be_here and not spec.default_collation:
        why = _why_not_sent(spec, lambda: batch)
        if why is not None:
            tell("unsent", why)


# A process that is thrown away


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a trial came to no end.

    The work raised an error, it took longer than the deadline ("late"), a signal or an exit ended
    it ("died"), or the process could not be started.
    """

    kind: Literal["raised", "late", "died", "not started"]
    what: str
    """What happened, as the end of a sentence that begins with the process."""
    error: Exception | None = None
    """Error that was raised, with the traceback of the process as a note; None: none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What came of a trial."""

    values: dict[str, Any] = field(default_factory=dict)  # what was sent, by name
    failure: Failure | None = None  # why the trial did not end; None: it did


def try_apart(
    work: Callable[..., None],
    *arguments: object,
    start_method: str,
    deadline_s: float = _DEADLINE_S,
) -> Findings:
    """Run some work in a process of its own, and return what it sends.

    ``work`` is called with ``arguments``, pickled unless processes are forked, and with what sends
    a finding (:data:`Tell`). The process is ended when the work has ended, or at the deadline.
    """
    context = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe(duplex=False)
    forked = start_method == "fork"
    parent, files = os.getpid() if forked else 0, system_calls.files_being_read() if forked else ()
    process = context.Process(  # type: ignore[attr-defined]  # a context has it
        target=_main,
        args=(theirs, parent, files, work, arguments),
        daemon=True,
        name="fastdata-probe",
    )
    with ours, theirs, contextlib.ExitStack() as running:
        try:
            running.enter_context(system_calls.started(process))
        except Exception as error:  # what cannot be pickled, and processes that may have no others
            what = f"could not be started: {type(error).__name__}: {error}"
            return Findings(failure=Failure(kind="not started", what=what))
        theirs.close()
        values: dict[str, object] = {}
        failure = _listen(process, ours, deadline_s, values)
        return Findings(values=values, failure=failure)


def _listen(
    process: BaseProcess, ours: Connection, deadline_s: float, values: dict[str, object]
) -> Failure | None:
    """Receive findings into ``values`` until the work ends; return why it did not."""
    begun, until = False, clock.monotonic() + _START_S
    while True:
        ready = multiprocessing.connection.wait([ours, process.sentinel], _LOOK_S)
        if ours in ready:
            try:
                kind, name, payload = pickle.loads(ours.recv_bytes())  # from our own process
            except EOFError:
                ready = [process.sentinel]
            except Exception:
                continue  # a value that can be pickled, but not read again, is no finding
            else:
                if kind == "begun":
                    begun, until = True, clock.monotonic() + deadline_s
                elif kind == "found":
                    values[name] = payload
                elif kind == "raised":
                    error = _as_error(name, *payload)
                    return Failure(
                        kind="raised", what=f"raised {name}: {text_of(error)}", error=error
                    )
                else:
                    return None
                continue
        if process.sentinel in ready:
            process.join()
            how = death(process.exitcode)
            if begun or (process.exitcode or 0) < 0:
                return Failure(kind="died", what=how)
            # What it was sent cannot be unpickled there, as a class of a notebook, or the script
            # starts processes as it is imported.
            return Failure(kind="not started", what=f"could not be started: it {how}")
        if clock.monotonic() > until:
            slow, never = f"took more than {deadline_s:g} s", f"did not start within {_START_S:g} s"
            return Failure(kind="late", what=slow if begun else never)


def _main(
    end: Connection,
    parent: int,
    files: tuple[system_calls.OpenFile, ...],
    work: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    system_calls.pass_over_interrupts()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    system_calls.die_with(parent)
    system_calls.open_anew(files)
    torch.set_num_threads(1)
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)

    def send(name: str, value: object) -> None:
        # Settings are decided without a value that cannot be pickled.
        with contextlib.suppress(Exception):
            end.send_bytes(pickle.dumps(("found", name, value), pickle.HIGHEST_PROTOCOL))

    end.send(("begun", "", None))
    try:
        work(*arguments, send)
    except BaseException as error:  # sys.exit(), too, is the fault of a sample
        text, pickled = "".join(traceback.format_exception(error)), b""
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(error)
        end.send(("raised", type(error).__name__, (pickled, text_of(error), text)))
    else:
        end.send(("ended", "", None))
    # Threads that the dataset has started are not waited for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _as_error(kind: str, pickled: bytes, message: str, text: str) -> Exception:
    sent: object = None
    with contextlib.suppress(Exception):
        sent = pickle.loads(pickled)
    error = sent if isinstance(sent, Exception) else RuntimeError(f"{kind}: {message}")
    add_note(error, f"In the process that tried the dataset:\n{text}")
    return error

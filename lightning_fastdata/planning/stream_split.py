"""Whether a stream shares itself out among workers: by its library, or by what it asks in a trial.

Each worker iterates a copy of the whole stream. Some streams ask which worker they are in and give
a part of their own; from the others, several workers would give each sample several times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeAlias

from torch.utils.data import ChainDataset

from lightning_fastdata.executors.kinds import open_handles
from lightning_fastdata.host import clock
from lightning_fastdata.order.epoch_order import rank_now
from lightning_fastdata.planning.facts.probe_process import Tell, try_apart
from lightning_fastdata.randomness.search import find_instances, loaded_classes
from lightning_fastdata.torch_internals import watch_worker_info
from lightning_fastdata.tree import held, held_by, is_a

_OF_LITDATA: Final = ("StreamingDataset", "CombinedStreamingDataset", "ParallelStreamingDataset")
"""Streams that share out their chunks."""
_MOST_SAMPLES: Final = 32
_BUDGET_S: Final = 1.0
_DEADLINE_S: Final = 10.0
# A WorkerInfo has to be asked for both: one of them alone seeds a generator, refuses workers, or
# has a file for each of a given number of workers. A worker_init_fn gets its number as an argument.
_NAMES: Final = ("num_workers", "id", "dataset")
_SHARES: Final = ({"num_workers", "id"}, {"num_workers", "dataset"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSplit:
    """Whether several workers together give each sample of a stream once."""

    splits: bool
    """False also where it is not known."""
    why: str
    """What tells so, to go on with after "because"."""
    most_workers: int | None = None
    """Its shards: more workers would find nothing to read. None: it has no such bound."""
    here: bool = False
    """Its library reads in processes of its own, and workers could not reach those."""


class Reading(NamedTuple):
    """What came of reading the first samples of a stream as one worker of several."""

    looked: frozenset[str]
    """At these attributes of what ``get_worker_info()`` returns."""
    samples: int | None = None
    """So many to its end; None: it was not reached."""
    failed: str = ""
    """What ended it, as the end of a sentence that begins with the reading; empty: nothing."""


Read: TypeAlias = Callable[[object, int, int], Reading]
"""Reads a stream as the worker of a number, of so many."""


def splits_itself(stream: object, read: Read | None, *, configured: bool = False) -> StreamSplit:
    """Return whether a stream shares itself out among workers.

    Known are Hugging Face's streams, WebDataset and LitData. Another one does if it asks
    ``get_worker_info()`` for the number of the worker and of all workers while its first samples
    are read; and, where that reaches its end, if two workers together give as many samples as one
    alone.

    Args:
        stream: An ``IterableDataset``.
        read: None: it must not be read.
        configured: A ``worker_init_fn`` may give each worker's copy its part.
    """
    known = _known(stream)
    if known is not None and (known.splits or known.here or not configured):
        return known
    if type(stream) is ChainDataset and not configured:
        return _no("the first samples of a ChainDataset tell nothing of its later parts")
    return _tried(stream, read)


def _no(why: str) -> StreamSplit:
    return StreamSplit(splits=False, why=why)


def _known(stream: object) -> StreamSplit | None:
    """Return what is known of a stream by its library; None: nothing."""
    chained = held(stream, "datasets") if type(stream) is ChainDataset else None
    if isinstance(chained, list | tuple):
        return next((known for known in map(_known, chained) if known and known.here), None)
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


def _tried(stream: object, read: Read | None) -> StreamSplit:
    name = type(stream).__name__
    if read is None:
        return _no(f"{name} is of no known library, and was not tried")
    queues = loaded_classes("multiprocessing.queues", "Queue", "SimpleQueue")
    handles = open_handles(stream) + ["a queue"] * bool(
        find_instances(stream, (Connection, *queues))
    )
    if handles:
        return _no(f"{name} holds {handles[0]}, from which a trial would take samples")
    first = read(stream, 0, 2)
    if first.failed:
        return _no(f"{name}, tried as one of two workers, {first.failed}")
    if not any(each <= first.looked for each in _SHARES):
        return _no(f"{name}, tried, did not ask get_worker_info() for its part")
    if first.samples is not None:
        second, alone = read(stream, 1, 2), read(stream, 0, 1)
        together = first.samples + (second.samples or 0)
        if second.failed or second.samples is None or together != alone.samples:
            return _no(
                f"two workers of {name}, tried, give {together} samples, and one alone "
                f"{alone.samples}{second.failed and f': the second {second.failed}'}"
            )
    why = f"{name} asks get_worker_info() for its part"
    return StreamSplit(splits=True, why=why)


def read_apart(
    stream: object,
    number: int,
    workers: int,
    *,
    worker_init_fn: Callable[[int], None] | None,
    start_method: str,
) -> Reading:
    """Read the first samples of a stream in a process that is thrown away, as one of several."""
    arguments = stream, number, workers, worker_init_fn
    tried = try_apart(read_as_worker, *arguments, start_method=start_method, deadline_s=_DEADLINE_S)
    failure = tried.failure
    # A stream that gives nothing for long may have asked before.
    failed = "" if failure is None or failure.kind == "late" else failure.what
    looked = frozenset(name for name in _NAMES if name in tried.values)
    return Reading(looked, tried.values.get("samples"), failed)


def read_as_worker(
    stream: Any,
    number: int,
    workers: int,
    worker_init_fn: Callable[[int], None] | None,
    tell: Tell,
) -> None:
    """Read the first samples of a stream, and tell what it asked, and how many it gave to its end.

    Runs where nothing else uses the stream.
    """
    told = set[str]()

    def note(name: str) -> None:
        if name in _NAMES and name not in told:
            told.add(name)
            tell(name, True)

    watch_worker_info(note, number=number, workers=workers, dataset=stream)
    if worker_init_fn is not None:
        worker_init_fn(number)
    began_s, samples = clock.monotonic(), 0
    # The others are read only where the first of two has ended, and then to their ends: whoever
    # reads alone has the samples, and so the time, of both.
    most = _MOST_SAMPLES if (number, workers) == (0, 2) else None
    for _ in islice(stream, most):
        samples += 1
        if clock.monotonic() - began_s > _BUDGET_S * 2 / workers:
            return
    if samples != most:
        tell("samples", samples)

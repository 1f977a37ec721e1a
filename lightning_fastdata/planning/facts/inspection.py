"""What is found out about a dataset before its workers start, without touching it here."""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import Subset

from lightning_fastdata.batches.bad_samples import BadSamples
from lightning_fastdata.batches.collate import collate_samples, uncollatable
from lightning_fastdata.batches.keyed import reads_together
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.executors.columns import Rows, rows_of
from lightning_fastdata.fingerprint import fingerprint
from lightning_fastdata.host.usage import read_pages
from lightning_fastdata.planning.facts import probe
from lightning_fastdata.planning.facts.probe_process import Failure, Findings, Tell, try_apart
from lightning_fastdata.planning.stream_split import StreamSplit, read_apart, splits_itself
from lightning_fastdata.randomness.global_generators import DrawWatch, kept_random_state
from lightning_fastdata.sources.attributes import held_objects
from lightning_fastdata.torch_internals import set_worker_info
from lightning_fastdata.tree import held

if TYPE_CHECKING:
    from lightning_fastdata.planning.facts.probe import SampleCost
    from lightning_fastdata.planning.plan_for import LoaderSpec

# What a system says of an open file that is not what the program thinks it is.
_HANDLE_ERRORS: Final = (None, errno.EBADF, errno.EINVAL, errno.ESPIPE, errno.EPIPE)
_COMPARED_S: Final = 0.02  # of a CPU at most, before samples are read and behind it
_KEPT: Final = 0.3  # of a sample's time, at most, once more, where the dataset keeps it
_WORTH_KEEPING_MS: Final = 0.1  # of a CPU for a sample: less may be by chance, and saves nothing
_KEYS: Final = 64  # of a sampler of the user's, to read samples by


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is to be found out; each costs the reading of a few samples."""

    sample: bool = False  # sample 0, to be checked
    collated: bool = False  # whether torch can collate that sample
    further: int = 0  # so many samples from all over the dataset
    cost: bool = False  # what a sample costs, and whether reading one draws


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """What was found out; None or empty where it was not asked for or could not be had."""

    sampled: bool = False  # there is a sample
    sample: object = None  # the first one
    uncollatable: str | None = None  # what in the sample torch cannot collate, and what to do
    further: tuple[object, ...] = ()  # samples from all over the dataset
    rows: bool = False
    """Batches are rows of columns of numbers, collated by default, without a transform. Then no
    sample is measured."""
    own_bytes: int = 0
    """Of such columns, as far as they are memory of this process that a program may change."""
    split: bool = False  # the samples of one batch may be given to several workers
    cost: SampleCost | None = None  # of reading a sample
    draws: bool = False  # reading a sample drew from the generators of random, numpy or torch
    changes: bool = False
    """Reading samples has changed the dataset or ``collate_fn``, or nobody can say that it has not:
    a counter, samples that are kept, a file that is opened."""
    cost_again: SampleCost | None = None
    """Of reading a sample once more, where that is far less, as the dataset keeps what it reads."""
    worker_bytes: int | None = None
    """Memory that a worker comes to have of its own: what a process had that tried the dataset, and
    what it would copy of the dataset's objects by reading all of them."""
    here: str | None = None  # why the training process alone can read it; None: nothing says so
    stream: StreamSplit | None = None  # whether a stream shares itself out among workers
    warnings: tuple[str, ...] = ()  # what the user should know, each a sentence or more


def inspect_dataset(spec: LoaderSpec, questions: Questions) -> DatasetFacts:
    """Find out what is asked about a dataset, in a process that is started as its workers will be.

    Datasets of rows (see :func:`.rows_of`), which hold no code of the user and nothing that is
    opened, are read here. Of a stream the questions are not answered; whether it shares itself out
    is, which may take its first samples. Nothing is read with ``probe=False``. What no side process
    may do, the training process does, where that is left open. Where it reads in any case, what
    another one makes of open files and clients means nothing.

    Raises:
        DatasetError: Sample 0 was asked for and reading it raised.
    """
    method: str = spec.options.multiprocessing_context
    if method == "auto":
        method = multiprocessing.get_start_method()
    # Another process takes seconds to start if it is not forked, and the first batch tells as much.
    pays = method == "fork" or not (spec.reads_here or questions == Questions(sample=True))
    reads = spec.options.probe and pays and questions != Questions()
    rows = rows_of(spec.dataset) if reads or questions.cost else None
    plain = spec.default_collation and not (spec.transformed or spec.pipelines)
    gathered = rows if questions.cost and plain else None
    facts_of = partial(_facts, spec, questions, gathered)
    if spec.is_stream:
        return replace(facts_of(Findings()), stream=split_of(spec, method))
    if not reads:
        return facts_of(Findings())
    if rows is not None:
        values: dict[str, object] = {}
        questions = replace(questions, cost=questions.cost and gathered is None)
        as_it_is = replace(spec, worker_init_fn=None, sampler=None, batch_sampler=None)
        with kept_random_state():
            _answer(as_it_is, questions, values.__setitem__)
        return facts_of(Findings(values=values))
    findings = try_apart(_answer, spec, questions, start_method=method)
    facts, failure = facts_of(findings), findings.failure
    if failure is None:
        return facts
    place = _of_place(failure)
    if spec.reads_here and (place or _suspects_fork(failure)):
        return facts
    key = findings.values.get("key", 0)
    late = failure.kind == "late" and method == "fork"
    if spec.leaves_workers_open and (place or late or _works_here(spec, key, failure)):
        here = f"a side process that tried the dataset {failure.what}; here it is read as by torch"
        return replace(facts, here=here, warnings=(here,) if late else ())
    if failure.error is not None and BadSamples.of(spec.options.on_bad_sample).policy != "raise":
        return facts
    if failure.error is not None and questions.sample:
        raise _unreadable(spec, key, failure)
    decided_without = (
        f"a process that tried the dataset {failure.what}, so settings are chosen without having "
        "measured it. If the training hangs or fails at its first batch, look for what the "
        "dataset opens or starts in __init__, and open it on first use in __getitem__."
    )
    return replace(facts, warnings=(decided_without,))


def refuse_empty(spec: LoaderSpec) -> None:
    """Raise DatasetError if the dataset of a loader has no samples."""
    if spec.length == 0:
        raise DatasetError(
            f"{spec.name} returned an empty {type(spec.dataset).__name__} (length 0). "
            "Check the path or the filter that made it."
        )


def _answer(spec: LoaderSpec, questions: Questions, tell: Tell) -> None:
    """Read what the questions need; runs where nothing else uses the dataset or its sampler."""
    dataset = spec.dataset
    if spec.worker_init_fn is not None:
        set_worker_info(number=0, workers=1, seed=0, dataset=dataset)
        spec.worker_init_fn(0)
    if spec.has_order:
        keys = probe.probe_indices(dataset, _KEYS, spec.sampler, spec.batch_sampler)
        if not keys:
            return
        tell("key", keys[0])
        dataset = Subset(dataset, keys)
    if questions.sample:
        sample = dataset[0]
        tell("sample", sample)
        tell("uncollatable", uncollatable(sample) if questions.collated else None)
    if questions.further:
        tell("further", tuple(probe.further_samples(dataset, questions.further)))
    if questions.cost:
        watch = DrawWatch()
        state = partial(fingerprint, spec.dataset, spec.collate_fn, within_s=_COMPARED_S)
        collate = collate_samples if spec.default_collation else spec.collate_fn
        size = spec.batch_size or 1
        measure = partial(probe.measure_samples, dataset, batch_size=size, collate=collate)
        before, cost, after = state(), measure(), state()
        changes = before is None or before != after
        tell("cost", (cost, watch.drew(), changes))
        if cost is not None and changes:
            again = measure(read=cost.samples)
            if again is not None and _keeps(cost, again):
                tell("cost_again", again)
        pages, held = read_pages(os.getpid()), held_objects(spec.dataset)
        if pages is not None:
            in_common = pages.anonymous_bytes - pages.own_bytes
            copies = min(in_common, sum(each.counted_bytes for each in held))
            tell("worker_bytes", pages.own_bytes + copies)


def _keeps(first: SampleCost, again: SampleCost) -> bool:
    """Return whether a dataset seems to keep what it reads: to read it again saves CPU time, too.

    That of what the system's page cache keeps does not: it is decoded again.
    """
    saved_ms = first.cpu_ms - again.cpu_ms
    saves_cpu = again.cpu_ms <= _KEPT * first.cpu_ms and saved_ms >= _WORTH_KEEPING_MS
    return saves_cpu and again.wall_ms <= _KEPT * first.wall_ms


def _facts(
    spec: LoaderSpec, questions: Questions, gathered: Rows | None, findings: Findings
) -> DatasetFacts:
    values = findings.values
    cost, draws, changes = values.get("cost", (None, False, False))
    splits = questions.cost and spec.default_collation and not spec.transformed
    return DatasetFacts(
        sampled="sample" in values,
        sample=values.get("sample"),
        uncollatable=values.get("uncollatable"),
        further=values.get("further", ()),
        rows=gathered is not None,
        own_bytes=0 if gathered is None else gathered.own_bytes,
        split=splits and not reads_together(spec.dataset),
        cost=cost,
        draws=draws,
        changes=changes,
        cost_again=values.get("cost_again"),
        worker_bytes=values.get("worker_bytes"),
    )


def _suspects_fork(failure: Failure) -> bool:
    """Whether it may have failed for what a process does not inherit that is forked."""
    error = failure.error
    if error is None:
        return True
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        return error.errno in _HANDLE_ERRORS
    # A mistake of the dataset raises an ordinary error; what a library says of a fork is its own.
    return isinstance(error, RuntimeError) or type(error).__module__ != "builtins"


def _of_place(failure: Failure) -> bool:
    """Whether it fails for the process in which it was tried, and says nothing of this one."""
    if failure.error is None:
        return failure.kind == "not started"
    return probe.fails_for_its_place(failure.error)


def _works_here(spec: LoaderSpec, key: Any, failure: Failure) -> bool:
    """Whether the training process can read a sample that has raised in a side process.

    What waits for ever or ends its process is not tried, as it would do so here.
    """
    if failure.error is None or not _suspects_fork(failure):
        return False
    try:
        with kept_random_state():
            spec.dataset[key]
    except Exception:
        return False
    return True


def may_start_processes() -> bool:
    """Return whether side processes can be started without a word of the user's."""
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


def split_of(spec: LoaderSpec, start_method: str) -> StreamSplit:
    """Return whether the stream of a loader shares itself out, or what the user says of it.

    A stream of no known library is tried, where the number of workers rests on it, in a process
    that is started as workers would be, and thrown away.
    """
    options, read = spec.options, None
    if options.split == options.num_workers == "auto" and options.probe:
        read = partial(read_apart, worker_init_fn=spec.worker_init_fn, start_method=start_method)
    found = splits_itself(spec.dataset, read, configured=spec.worker_init_fn is not None)
    if options.split == "auto" or found.here:
        return found
    return replace(found, splits=options.split, why=f"split={options.split} says so")

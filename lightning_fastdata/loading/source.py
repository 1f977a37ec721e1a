"""What gives the batches of a FastDataLoader: torch's own loader, or an executor that is kept."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    default_collate,
)

from lightning_fastdata.augment import WorkerTransform
from lightning_fastdata.batches.bad_samples import SampleGuard
from lightning_fastdata.batches.collate import collate_samples
from lightning_fastdata.batches.keyed import keyed, reads_together
from lightning_fastdata.batches.libraries import tell_rank
from lightning_fastdata.batches.staged import (
    FirstOfPairs,
    PinThread,
    StagedBatch,
    StagingCollate,
    pinned_if_room,
)
from lightning_fastdata.device.backend import default_type, reads_page_locked
from lightning_fastdata.errors import FastDataWarning, OptionsError, WorkerError
from lightning_fastdata.executors.columns import rows_of
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import (
    AnyExecutor,
    Executor,
    Resources,
    StreamReader,
    executor_for,
    forks,
    kind_of,
    open_executor,
    refuse_late_fork,
    room_elsewhere,
)
from lightning_fastdata.executors.pool.watches import CrewTrial
from lightning_fastdata.executors.standby import Ways
from lightning_fastdata.executors.stream_state import LanePosition
from lightning_fastdata.fingerprint import Fingerprint, Watched
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.system_calls import OpenFile, files_being_read, open_anew
from lightning_fastdata.order.epoch_order import Rank, dataset_length, rank_now
from lightning_fastdata.order.indices import EpochIndices
from lightning_fastdata.order.samplers import deciding, is_drawn_at_start
from lightning_fastdata.planning.plan_for import LoaderPlan, look_ahead_batches, most_workers
from lightning_fastdata.randomness.seeds import EpochCell, OwnGenerators, lasting
from lightning_fastdata.stamps.batch_stamps import BatchStamps, WaitWatch
from lightning_fastdata.stamps.stamped import WatchedSampler, show_dataset, stamped
from lightning_fastdata.tree import find_composes
from lightning_fastdata.tuning.simulate import LoaderSetup, Scheduling
from lightning_fastdata.tuning.tuner import Tuner, log
from lightning_fastdata.types import Batch, Stage

if TYPE_CHECKING:
    from lightning_fastdata.loading.loader import FastDataLoader

Source: TypeAlias = "DataLoader[Any] | KeptExecutor"
Loader: TypeAlias = "FastDataLoader[Any]"
"""A loader; its ``settings`` are a copy of it, as it was set up, without workers."""
_TORCH_PREFETCH: Final = 2
"""Torch's own default."""
_PASSED_ON: Final = (
    "num_workers", "pin_memory", "multiprocessing_context", "generator",
    "prefetch_factor", "pin_memory_device", "in_order",
)  # fmt: skip
"""Settings that torch's own loader takes as they are."""
_TOO_MANY: Final = (
    "Length of IterableDataset was reported to be {reported} batches by len(loader), but {given} "
    "have come. If it is read by several workers, have __iter__ split it by "
    "torch.utils.data.get_worker_info(), or every worker reads all of it."
)
_WRAPPED_PIPE: Final = (
    "{name} is a DataPipe, which torch shares out among workers only where nothing is wrapped "
    "around it. Here something is, for a transform or an Albumentations pipeline, so that each "
    "worker would read all of it. Set num_workers=1."
)
Keeps: TypeAlias = bool | Literal["unchanged"]
"""Whether workers are kept between epochs; ``"unchanged"``: while what they read is as it was."""
_LEAST_BUDGET_S: Final = 0.02
"""What a new worker takes to start, about."""
_SHARE_OF_EPOCH: Final = 0.01
_PER_SAMPLE_S: Final = 1e-6
"""A hundredth of what a quick sample takes, while no epoch was timed."""
_CHANGED: Final = (
    "what the dataset holds has changed since this epoch began, or cannot be compared with what it "
    "was"
)


class _State(NamedTuple):
    """What is read at one moment."""

    read: Fingerprint
    """Dataset and ``collate_fn``, which workers call."""
    pipeline: Fingerprint
    """Of ``augment=``, which is made anew for each epoch in which it has changed."""

    @property
    def own(self) -> tuple[bytes, bytes]:
        """All but what other processes see change."""
        return self.read.own, self.pipeline.own


@dataclass(kw_only=True, eq=False, repr=False)
class KeptExecutor:
    """Iterable over epochs; starts its executor at the first one.

    Side processes are seeded from the ``generator`` of the settings, which torch would draw its
    base seed from at this place, so that the draws after it are the same: those of a stream as
    torch does, others from that, the plan's seed and the epoch they start in.
    """

    name: AnyExecutor
    """Not torch's own."""
    plan: FetchPlan
    settings: Loader
    indices: EpochIndices | None
    """Gives the batches of indices of each epoch; None of a stream."""
    epoch: Callable[[], int]
    """Returns the number of the epoch that begins."""
    staged: Stage | None
    """Deliver :class:`StagedBatch` of this stage, without draws."""
    reported_batches: Callable[[], int | None] | None
    """Returns the length that the loader of a stream has reported, or None."""

    def __post_init__(self) -> None:
        self.trial, self.ways = CrewTrial(self.settings.num_workers), Ways()
        self.aside = kind_of(self.name).side_processes
        self.persistent = self.settings.keeps is True
        self._state: _State | None = None
        """What the workers read, as it was when they started; None: it cannot be compared."""
        self._seen: _State | None = None
        self._pipeline = Watched()
        self.told = False
        """The dataset was told the epoch that begins, which has changed it."""
        self._began_s: float | None = None
        self._respawned = 0
        self.pin_on = _pinning_device() if self.settings.pin_memory else None
        ahead = self.aside or kind_of(self.name).gathers
        self._pin_thread = PinThread(self.pin_on) if self.pin_on and ahead else None
        self.records: deque[BatchStamps] | None = None
        self._iterators: weakref.WeakSet[EpochIterator] = weakref.WeakSet()
        """All that somebody holds, finished ones too."""
        self.base_seed: int | None = None
        """What the side processes are seeded from; None: nothing was drawn for it yet."""
        self._earlier_seed: int | None = None
        self._within = False
        """The next epoch goes on within one of a run that was saved."""
        self._in_stream: list[LanePosition] | None = None
        self.last: Executor | None = None
        """Of the epoch that began last, also when it is over."""
        # Under this name Lightning looks for workers to stop when it is done.
        self._iterator: Executor | None = None

    def __iter__(self) -> EpochIterator:
        if not self.persistent or self.base_seed is None:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self.settings.generator)
            self.base_seed = int(drawn)
        if self._earlier_seed is not None:
            self.base_seed, self._earlier_seed = self._earlier_seed, None
        unfinished = self._unfinished()
        if self.persistent:
            for other in unfinished:
                other.end("another epoch of its loader has begun, which keeps its workers")
            unfinished = []
        if self._within and self.indices is None and self.aside and self._iterator is not None:
            self._iterator.close()  # those that go on in a stream are seeded as its first ones were
            self._iterator = None
        self._within = False
        keep = self._keeps_now(in_use=bool(unfinished)) and not unfinished
        executor = self._iterator if keep else None
        if executor is None:
            plan = replace(self.plan, base_seed=self._seed_of_processes(self.base_seed))
            given = Resources(
                executor=self.name,
                workers=self.settings.num_workers,
                pin_thread=self._pin_thread,
                trial=self.trial,
                ways=self.ways,
            )
            executor = open_executor(plan, given)
            if self.records is not None:
                executor.record(self.records)
        try:
            self._start_epoch(executor)
        except BaseException:
            self._iterator = None
            executor.close()  # which would otherwise live as long as the traceback
            raise
        self.last = executor
        if keep:
            self._iterator = executor
        self._respawned = getattr(executor, "respawned", 0)
        reported = None if self.reported_batches is None else self.reported_batches()
        over = self._ask_workers if keep else None
        running = EpochIterator(executor, self.finish, reported, over=over)
        self._iterators.add(running)
        return running

    def _unfinished(self) -> list[EpochIterator]:
        """Return the iterators whose epochs are not over: a loop may hold one within another."""
        return [each for each in self._iterators if each.executor is not None]

    def look(self) -> None:
        """Note whether what is read is as the workers have it; before the dataset is told an epoch.

        What the dataset makes of that, each worker is told, too.
        """
        if self.aside and self._state is not None:
            self._seen = self._read_state()

    def _keeps_now(self, *, in_use: bool) -> bool:
        """Return whether the executor of the epoch that begins may outlive it.

        One that stays from the epoch before is let go where what it reads has changed since; while
        it is ``in_use`` by an iterator of before, it ends with that.
        """
        if not self.aside:
            return True  # Threads and reused memory cost nothing between epochs.
        seen, then, self._seen = self._seen, self._state, None
        same = seen is not None and seen == then
        if self.persistent:  # shared memory and files are theirs to see, too
            same = seen is not None and then is not None and seen.own == then.own
        elif same and seen is not None and not in_use:
            same = self._workers_read(seen)
        if not same and self._iterator is not None and not self.persistent:
            if not in_use:
                self._iterator.close()
            self._iterator = None
        if same or self._iterator is None:
            self._state = seen if same and not self.told else self._read_state()
        else:
            self._state = None  # the workers that are kept have what it was
        self._began_s = clock.monotonic()
        if self.settings.keeps == "unchanged":
            # A stream goes on with the random numbers of the worker, and ``worker_init_fn`` may
            # change what is read in each epoch: one that is kept would not read as a new one.
            reads_as_new = self.indices is not None and self.settings.worker_init_fn is None
            return self._state is not None and reads_as_new
        return self.persistent

    def _read_state(self) -> _State | None:
        """Return what workers that start now read; None: it cannot be compared in time."""
        if self.indices is None:
            return None  # New processes read each epoch of a stream, or those that the user keeps.
        given = () if self.settings.transform is None else self.settings.transform.made_of()
        read = self.plan.state(self._budget_s())
        pipeline = self._pipeline.now(
            given, self._budget_s(), lambda: lasting(find_composes(given))
        )
        return None if read is None or pipeline is None else _State(read, pipeline)

    def _budget_s(self) -> float:
        """Return how long to compare what is read, at most."""
        epoch_s = (dataset_length(self.settings.dataset) or 0) * _PER_SAMPLE_S / _SHARE_OF_EPOCH
        if self._began_s is not None:
            epoch_s = clock.monotonic() - self._began_s
        return max(_LEAST_BUDGET_S, _SHARE_OF_EPOCH * epoch_s)

    def _ask_workers(self) -> None:
        """Ask workers that may be kept what they read, now that an epoch is over."""
        ask = getattr(self._iterator, "ask_states", None)
        if ask is not None and self._state is not None and not self.persistent:
            ask(self._budget_s())

    def _workers_read(self, seen: _State) -> bool:
        """Return whether the workers would read the next epoch as new ones would.

        What they have read may have changed their own copies: a counter, a cache, an open file.
        Executors whose workers have no copies tell nothing.
        """
        the_same = getattr(self._iterator, "read_the_same", None)
        return the_same is None or bool(the_same(seen.read.own, self._budget_s()))

    def _seed_of_processes(self, base_seed: int) -> int:
        if self.plan.seed is None:
            return base_seed
        # A worker_init_fn may draw from what the process was seeded with: another epoch, seed or
        # global seed has to give other numbers.
        return _digest(self.plan.seed, self.epoch(), base_seed)

    def _start_epoch(self, executor: Executor) -> None:
        if self.indices is not None:
            executor.start_epoch(iter(self.indices), self.epoch())
        elif isinstance(executor, StreamReader):
            resume, self._in_stream = self._in_stream, None
            executor.start_epoch(repeat(self.settings.batch_size), self.epoch(), resume=resume)

    def lanes(
        self, executor: Executor | None, batches: int, *, over: bool
    ) -> list[dict[str, Any]] | None:
        """Return where each part of a stream is after so many batches of an epoch, as plain data.

        Empty: its batches are counted. None: its state is not known. ``executor``: what read it.
        ``over``: the batches were all, and it is where the next epoch begins.

        Raises:
            OptionsError: So many were not handed out, or too long ago.
        """
        if not isinstance(executor, StreamReader) or executor.history is None:
            return None
        if over and not self.keep:
            return []
        found = executor.history.position(batches, over=over)
        return None if found is None else [lane.as_dict() for lane in found]

    @property
    def keep(self) -> bool:
        """Whether what reads a stream outlives its epoch."""
        return self.persistent or not self.aside

    @property
    def reads_later(self) -> bool:
        """Whether what comes next of this epoch is read as things are by then."""
        return bool(getattr(self.last, "reads_later", True))

    @property
    def draws(self) -> bool:
        """Whether a stream, or its ``collate_fn``, was seen to draw from global generators."""
        history = self.last.history if isinstance(self.last, StreamReader) else None
        return history is not None and history.drew

    def go_on_from(self, base_seed: int | None, *, epoch: int, within: bool) -> None:
        """Begin the next epoch as a run that goes on did.

        ``base_seed``: what the side processes of the run were seeded from; None: not known.
        ``within``: it goes on within that epoch; else the next one begins.
        """
        self._within = within
        if base_seed is None:
            return
        if self.indices is None and not within:
            if self.persistent and self._iterator is not None:
                return  # the workers of the epoch before are there, and go on
            # From the very seed, the draws of a stream's last epoch would come once more.
            base_seed = _digest(base_seed, epoch)
        if self.persistent:
            self.base_seed = base_seed  # nothing is drawn for it, as in the run that goes on
        self._earlier_seed = base_seed

    def go_on_in_stream(self, lanes: list[dict[str, Any]]) -> None:
        """Have each part of a stream go on in the next epoch where :meth:`lanes` says."""
        self._in_stream = list(map(LanePosition.from_dict, lanes))

    def resize(self, workers: int, look_ahead: int | None) -> None:
        """Read with so many side processes from now on, and be so many batches ahead.

        Raises:
            WorkerError: They cannot be had, or would not read what those read that are there.
        """
        if workers > self.settings.num_workers:
            refuse_late_fork(self.plan)
            if self.aside and self._at_work() and self.settings.keeps and self._has_changed():
                raise WorkerError(f"they would not read what the others do: {_CHANGED}")
        self.settings = self.settings.as_set_up(num_workers=workers)
        self.plan = self.plan if look_ahead is None else replace(self.plan, look_ahead=look_ahead)
        for executor in self._at_work():
            executor.resize(workers, look_ahead)

    def _has_changed(self) -> bool:
        """Return whether what the workers of this epoch read may have changed since they began."""
        now, then = self._read_state(), self._state
        return now is None or then is None or now.own != then.own

    def _tell_other_state(self) -> None:
        """Warn where a worker that took a dead one's place may read something else."""
        respawned: int = getattr(self.last, "respawned", 0)
        if respawned > self._respawned and self._has_changed():
            warnings.warn(
                f"A worker that died was replaced, and the new one may read other samples: "
                f"{_CHANGED}.",
                FastDataWarning,
                stacklevel=2,
            )
        self._respawned = respawned

    def _at_work(self) -> list[Executor]:
        executors = (self._iterator, *(each.executor for each in self._unfinished()))
        return list({id(each): each for each in executors if each is not None}.values())

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each batch from now on; None: no more."""
        self.records = records
        for executor in self._at_work():
            executor.record(records)

    def finish(self, batch: Batch) -> Batch:
        """Return the batch as it is delivered."""
        if self.aside and self.indices is not None:
            self._tell_other_state()
        if self.staged is not None:
            batch = StagedBatch(batch, None, self.staged)
        if self.pin_on is None or self._pin_thread is not None:
            return batch
        return pinned_if_room(batch, self.pin_on)

    def close(self) -> None:
        """Stop the executor; the next epoch starts a new one."""
        for each in self._unfinished():
            if each.executor is not None:
                each.executor.close()
            each.end("its loader was closed")
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


def _digest(*numbers: int) -> int:
    """Return a seed that follows from some numbers, from 0 to 2**63 - 1."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class EpochIterator:
    """The batches of one epoch; without an executor none, or the error that keeps them away."""

    def __init__(
        self,
        executor: Executor | None = None,
        finish: Callable[[Batch], Batch] | None = None,
        reported_batches: int | None = None,
        *,
        over: Callable[[], object] | None = None,
        error: Exception | None = None,
    ) -> None:
        self.executor = executor
        self.error = error
        self._finish = finish
        self._reported = reported_batches
        self._given = 0
        if executor is not None and over is None:  # it ends with this iterator
            over = weakref.finalize(self, executor.close)
        self._over = over

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Batch:
        if self.error is not None:
            raise self.error
        if self.executor is None:
            raise StopIteration
        try:
            batch = next(self.executor)
        except StopIteration:
            self.executor = None
            if self._over is not None:
                self._over()
            raise
        self._given += 1
        if self._reported is not None and self._given > self._reported:
            text = _TOO_MANY.format(reported=self._reported, given=self._given)
            warnings.warn(text, stacklevel=2)
        return batch if self._finish is None else self._finish(batch)

    def ready(self) -> bool | None:
        """Return whether the next batch, or the end, comes without waiting.

        None: this process makes it when it is asked for.
        """
        if self.executor is None:
            return True
        ready: Callable[[], bool | None] | None = getattr(self.executor, "ready", None)
        return None if ready is None else ready()

    def under_way(self) -> tuple[int, tuple[int, ...]] | None:
        """Return how many batches were begun, and which were not handed over; None: not known."""
        known: Callable[[], tuple[int, tuple[int, ...]]] | None
        known = getattr(self.executor, "under_way", None)
        return None if known is None else known()

    def end(self, why: str) -> None:
        """Give no more batches."""
        self.executor = None
        self.error = WorkerError(f"This iterator has ended: {why}. Iterate the loader anew.")

    def __reduce__(self) -> tuple[Callable[[], EpochIterator], tuple[()]]:
        # Lightning copies its trainer with the iterators in it; processes cannot be copied.
        return partial(EpochIterator, error=self.error), ()


def _pinning_device() -> str | None:
    kind = default_type()
    if reads_page_locked(kind):
        return kind
    warnings.warn(
        "pin_memory=True, but there is no accelerator that copies from page-locked memory; "
        "batches come in ordinary memory. Set pin_memory=False.",
        FastDataWarning,
        stacklevel=2,
    )
    return None


def makes_batches(loader: Loader) -> bool:
    """Return whether samples are put together into batches."""
    return loader.batch_size is not None or loader.batch_sampler is not None


def order_of(loader: Loader) -> Any:
    """Return what gives the indices of samples, or of batches."""
    return loader.batch_sampler if makes_batches(loader) else loader.sampler


def reads_with_torch(loader: Loader) -> bool:
    """Return whether torch's own iterator reads the dataset."""
    pipe = isinstance(loader.dataset, IterDataPipe | MapDataPipe)
    return kind_of(loader.executor).is_torch or pipe


def workers_of(loader: Loader) -> int:
    """Return how many processes or actors read a loader; 0: the training process does."""
    streamed = isinstance(loader.dataset, IterableDataset)
    executor = executor_for(loader.executor, stream=streamed, workers=loader.num_workers)
    aside = reads_with_torch(loader) or kind_of(executor).side_processes
    return loader.num_workers if aside else 0


def indices_of(settings: Loader) -> EpochIndices | None:
    """Return what gives the indices of a loader's epochs; None of a stream."""
    if isinstance(settings.dataset, IterableDataset):
        return None
    seed = None if settings.run is None else settings.seed
    return EpochIndices(order_of(settings), arrays=kind_of(settings.executor).gathers, seed=seed)


def open_source(
    settings: Loader,
    indices: EpochIndices | None,
    epochs: EpochCell,
    *,
    reported: dict[str, int],
    stamps: WaitWatch | None,
) -> Source:
    """Return what gives the batches of a loader.

    It holds no reference to the loader, so that one that is dropped stops its workers at once.

    Args:
        settings: The loader, as it is set up now.
        indices: Gives the indices of its epochs; None of a stream.
        epochs: Where it says which epoch it is in.
        reported: Holds under ``"batches"`` the length that a stream has reported.
        stamps: Where to note calls of the sampler of torch's own iterator; None: nowhere.

    Raises:
        OptionsError: Each of several workers would read the whole of a DataPipe.
    """
    worker_part = None
    if settings.transform is not None:
        worker_part = settings.transform.in_worker(on_device=settings.on_device)
    collate_fn = _collation(settings, worker_part)
    dataset = keyed(settings.dataset, seed=settings.seed, epoch=epochs, transform=worker_part)
    if not reads_with_torch(settings):
        return _open_executor(settings, indices, dataset, collate_fn, epochs, reported)
    wrapped = isinstance(settings.dataset, IterDataPipe) and dataset is not settings.dataset
    if wrapped and settings.num_workers > 1:
        raise OptionsError(_WRAPPED_PIPE.format(name=type(settings.dataset).__name__))
    if stamps is not None:
        dataset, collate_fn = stamped(dataset, collate_fn)
    order: dict[str, Any] = {"batch_size": settings.batch_size, "drop_last": settings.drop_last}
    if indices is not None:
        name = "batch_sampler" if makes_batches(settings) else "sampler"
        order = {"batch_size": 1 if makes_batches(settings) else None}
        order[name] = indices if stamps is None else WatchedSampler(indices, stamps)
    start = settings.worker_init_fn
    return DataLoader(
        dataset,
        collate_fn=collate_fn,
        worker_init_fn=WorkerStart(start) if settings.num_workers else start,
        persistent_workers=settings.keeps is True,
        timeout=0 if settings.timeout == "auto" else settings.timeout,
        **order,
        **{name: getattr(settings, name) for name in _PASSED_ON},
    )


def epoch_of(source: Source, *, reported: bool) -> Iterator[Batch]:
    """Begin an epoch; ``reported``: the length of the loader was asked for."""
    if isinstance(source, DataLoader):
        if isinstance(source.worker_init_fn, WorkerStart):
            source.worker_init_fn.about_to_start(source.multiprocessing_context)
        if reported:
            with contextlib.suppress(TypeError):
                len(source)  # a stream that gives more than was reported is warned of
    return iter(source)


def _collation(settings: Loader, worker_part: WorkerTransform | None) -> Callable[[Any], Batch]:
    collate_fn = settings.collate_fn
    collate_fn = collate_samples if collate_fn is default_collate else collate_fn
    # A kept executor stages what has no draws itself, and may so collate in place.
    if settings.staged is not None and (worker_part is not None or reads_with_torch(settings)):
        return StagingCollate(collate_fn, worker_part, settings.staged)
    if worker_part is not None:
        return FirstOfPairs(collate_fn, worker_part, single=not makes_batches(settings))
    return collate_fn


def _open_executor(
    settings: Loader,
    indices: EpochIndices | None,
    dataset: Dataset[Any],
    collate_fn: Callable[[Any], Batch],
    epochs: EpochCell,
    reported: dict[str, int],
) -> KeptExecutor:
    streamed = isinstance(settings.dataset, IterableDataset)
    executor = executor_for(settings.executor, stream=streamed, workers=settings.num_workers)
    default = collate_fn is collate_samples and makes_batches(settings)
    in_rows = kind_of(executor).side_processes and default and not streamed
    gathered = in_rows and rows_of(dataset) is not None
    default = default and not gathered
    splits = default and not kind_of(executor).elsewhere
    ahead = settings.num_workers * (settings.prefetch_factor or 2)
    if not streamed:
        split = splits and not reads_together(settings.dataset)
        ahead = ahead_by_index(settings, settings.num_workers, split=split)
    plan = FetchPlan(
        dataset=dataset,
        collate_fn=collate_fn,
        default_collation=default,
        gathered=gathered,
        compared=() if streamed else (settings.dataset, settings.collate_fn),
        at_start=settings.chosen and is_drawn_at_start(order_of(settings)),
        standby=_stands_by(settings),
        batched=makes_batches(settings),
        drop_last=streamed and settings.drop_last,
        # The state of a stream runs on from sample to sample, and so do its random numbers.
        seed=None if streamed else settings.seed,
        own=None if streamed else OwnGenerators(settings.dataset),
        worker_init_fn=settings.worker_init_fn,
        timeout_s=None if settings.timeout == "auto" else settings.timeout,
        in_order=settings.in_order,
        context=settings.multiprocessing_context,
        look_ahead=ahead,
        memory_limit_bytes=read_host_memory().available_bytes // 4,
        guard=SampleGuard.of(
            settings.faults.rule,
            settings.dataset,
            deciding(settings.sampler),
            settings.seed,
        ),
        faults=settings.faults,
        rank=rank_now() if streamed else Rank(0, 1),
    )
    if settings.asked_prefetch_factor:  # large batches, too, as far as memory allows
        plan = replace(plan, ahead_bytes=plan.memory_limit_bytes)
    staged = isinstance(collate_fn, StagingCollate)
    return KeptExecutor(
        name=executor,
        plan=plan,
        settings=settings,
        indices=indices,
        epoch=epochs.get,
        staged=None if staged else settings.staged,
        reported_batches=partial(reported.get, "batches") if streamed else None,
    )


def _stands_by(settings: Loader) -> bool:
    """Return whether the training process may read as well as workers, and as they would.

    What only workers do, or are watched for, needs them.
    """
    works = settings.worker_init_fn or settings.timeout != "auto"
    sure = is_drawn_at_start(order_of(settings)) and settings.in_order
    return settings.standby and sure and not works and settings.transform is None


def ahead_by_index(loader: Loader, workers: int, *, split: bool) -> int:
    """Return how many batches are under way at once, where side processes read by index.

    ``split``: the samples of one batch are given to several workers.
    """
    if not is_drawn_at_start(order_of(loader)):
        # It may look at what steps write, and is asked when torch asks it: for so many batches at
        # first, and for one before each is handed out.
        return workers * (loader.asked_prefetch_factor or _TORCH_PREFETCH) + 1
    return look_ahead_batches(
        workers,
        prefetch=loader.asked_prefetch_factor,
        batch_size=loader.batch_size or 1,
        split=split,
    )


def setup_of(loader: Loader, *, cpus: float, step_cpus: float) -> LoaderSetup | None:
    """Return the setup of a loader; None for what the model does not know.

    It knows loaders whose workers read by themselves: torch's own, ``"workers"`` and ``"ray"``, and
    those that read in the training process when a batch is asked for. It does not know
    ``"gather"``, whose caller helps its threads. It takes samples to be of one shape, and memory to
    suffice for the whole look-ahead.

    Args:
        loader: As it is set up now; it is not iterated.
        cpus: CPUs this process and its workers may use.
        step_cpus: CPUs the training process uses between two requests, see
            :class:`TrainingTimes`.
    """
    streamed = isinstance(loader.dataset, IterableDataset)
    torchs = reads_with_torch(loader)
    kind = kind_of(loader.executor)
    if kind.gathers and not streamed and not torchs:
        return None
    workers = loader.num_workers if torchs or not kind.caller_reads else 0
    scheduling: Scheduling = "sample" if splits_batches(loader) else "queue"
    if kind.elsewhere:
        scheduling = "actors"
    if torchs or streamed:
        scheduling = "batch"
    ahead = 1
    if workers and scheduling == "batch":
        ahead = workers * (loader.asked_prefetch_factor or _TORCH_PREFETCH)
    elif workers:
        ahead = ahead_by_index(loader, workers, split=splits_batches(loader))
    return LoaderSetup(
        workers=workers,
        look_ahead=ahead,
        scheduling=scheduling,
        cpus=cpus,
        step_cpus=step_cpus,
        inline=kind.caller_reads,
    )


def splits_batches(loader: Loader) -> bool:
    """Return whether this package's executors share out the samples of one batch among workers.

    They do where samples of one form, read one at a time, are collated by default.
    """
    transform = loader.transform
    drawn = transform is not None and transform.in_worker(on_device=loader.on_device) is not None
    default = loader.collate_fn in (default_collate, collate_samples) and not drawn
    whole = kind_of(loader.executor).elsewhere or reads_together(loader.dataset)
    return default and makes_batches(loader) and not whole


def tuner_for(
    plan: LoaderPlan,
    own: Tuner | None = None,
    *,
    local_ranks: int = 1,
    tell: Callable[[str], None] = log.info,
) -> Tuner | None:
    """Return what tunes a loader of a plan, its ``own`` if it has one; None: nothing to tune."""
    if not plan.tuned or own is not None:
        return own if plan.tuned else None
    forked = plan.start_method in (None, "fork")
    most, _ = most_workers(read_host_memory(), ranks=local_ranks, forked=forked, tasks=None)
    most = room_elsewhere(plan.executor, local_ranks) or most
    cpus = float(read_cpu_limit(local_ranks=local_ranks).usable_cpus)
    return Tuner(most_workers=most, cpus=cpus, tell=tell)


class WorkerStart:
    """Prepares a worker process of torch, then runs the user's own ``worker_init_fn``.

    It computes on one thread (torch sees to its own threads, not to OpenCV's), and takes the
    sharing strategy of its parent, which only a forked one has.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.strategy: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        self.then = then
        self.files: tuple[OpenFile, ...] = ()
        self.rank = rank_now()

    def about_to_start(self, context: BaseContext | str | None) -> None:
        """Note what a forked process will share with this one: call it before each start."""
        self.files = files_being_read() if forks(context) else ()

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker process of this number."""
        open_anew(self.files)
        tell_rank(self.rank)
        torch.multiprocessing.set_sharing_strategy(self.strategy)  # type: ignore[no-untyped-call]
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(0)
        show_dataset()
        if self.then is not None:
            self.then(worker_id)

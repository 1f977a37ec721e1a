"""The source of a FastDataLoader's batches: torch's own loader, or an executor that is kept."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from multiprocessing.context import BaseContext
from operator import length_hint
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    default_collate,
    get_worker_info,
)

from lightning_fastdata.augment import WorkerTransform
from lightning_fastdata.batches.bad_samples import SampleGuard
from lightning_fastdata.batches.collate import collate_samples, only_stacks
from lightning_fastdata.batches.keyed import draws_by_itself, keyed, reads_together
from lightning_fastdata.batches.libraries import tell_rank
from lightning_fastdata.batches.staged import (
    FirstOfPairs,
    PinThread,
    StagedBatch,
    StagingCollate,
    pinned_if_room,
)
from lightning_fastdata.caches.cached import rest_on_parent
from lightning_fastdata.device.backend import default_type, reads_page_locked
from lightning_fastdata.errors import FastDataWarning, OptionsError, WorkerError
from lightning_fastdata.executors.columns import rows_of
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import (
    AnyExecutor,
    Executor,
    ExecutorKind,
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
from lightning_fastdata.loading.options import LeftOpen
from lightning_fastdata.loading.plan_for import LoaderPlan, look_ahead_batches, most_workers
from lightning_fastdata.loading.simulate import LoaderSetup, Scheduling
from lightning_fastdata.loading.stamped import Around, WatchedSampler, show_dataset, stamped
from lightning_fastdata.loading.tuner import Tuner, log
from lightning_fastdata.order.epoch_order import Rank, dataset_length, rank_now
from lightning_fastdata.order.indices import EpochIndices
from lightning_fastdata.order.samplers import deciding, is_drawn_at_start
from lightning_fastdata.randomness.seeds import EpochCell, OwnGenerators, derived_seed, lasting
from lightning_fastdata.stamps.batch_stamps import BatchStamps, WaitWatch
from lightning_fastdata.tree import find_composes
from lightning_fastdata.types import Batch, Stage

if TYPE_CHECKING:
    from lightning_fastdata.loading.loader import FastDataLoader

Source: TypeAlias = "DataLoader[Any] | KeptExecutor"
Loader: TypeAlias = "FastDataLoader[Any]"
"""The type of a FastDataLoader; ``settings`` is a copy without workers of one, as it is set up."""
_TORCH_PREFETCH: Final = 2
"""Batches that each worker of torch's DataLoader fetches ahead by default."""
_PASSED_ON: Final = (
    "num_workers", "pin_memory", "multiprocessing_context", "generator",
    "prefetch_factor", "pin_memory_device", "in_order",
)  # fmt: skip
"""Settings that torch's own loader takes as they are."""
_OF_WORKERS: Final = ("multiprocessing_context", "prefetch_factor")
"""Settings that torch's own loader refuses without workers; a program may have set it to none."""
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
"""Whether workers are kept between epochs; ``"unchanged"``: while their data does not change."""
_LEAST_BUDGET_S: Final = 0.02
"""Least seconds allowed for a comparison of the data: about the start of a new worker."""
_SHARE_OF_EPOCH: Final = 0.01
_PER_SAMPLE_S: Final = 1e-6
"""Seconds per sample allowed for a comparison of the data, until an epoch was timed."""
_FORKED: Final = "it was begun in another process, of which this one is a fork"
_CHANGED: Final = (
    "what the dataset holds has changed since this epoch began, or cannot be compared with what it "
    "was"
)


class _State(NamedTuple):
    """Fingerprints of the data that is read, at one moment."""

    read: Fingerprint
    """Fingerprint of the dataset and ``collate_fn``, which workers call."""
    pipeline: Fingerprint
    """Fingerprint of the pipeline of ``augment=``, which is made anew if it changes."""

    @property
    def own(self) -> tuple[bytes, bytes]:
        """The fingerprints without shared memory and files, whose changes all processes see."""
        return self.read.own, self.pipeline.own


class Turn:
    """Has one thread at a time begin or end an epoch of a loader; a copy is one of its own."""

    def __init__(self) -> None:
        self._lock, self._process = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():  # a thread that this fork lacks may have held it
            self._lock, self._process = threading.RLock(), os.getpid()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()


@dataclass(kw_only=True, eq=False, repr=False)
class KeptExecutor:
    """Iterable over epochs; starts its executor at the first one.

    As torch does, it draws a base seed from the ``generator`` of the settings when an epoch begins,
    so that later draws from that generator are the same. Side processes that read a stream are
    seeded with it, as in torch; others from it, the plan's seed and the epoch in which they start.
    """

    name: AnyExecutor
    """Executor to open; never torch's own."""
    plan: FetchPlan
    settings: Loader
    indices: EpochIndices | None
    """Gives the batches of indices of each epoch; None for a stream."""
    epoch: Callable[[], int]
    """Returns the number of the epoch that begins."""
    staged: Stage | None
    """Stage of the :class:`StagedBatch` to deliver, without draws; None: deliver plain batches."""

    def __post_init__(self) -> None:
        self.trial = CrewTrial(self.settings.num_workers)
        self.ways = Ways() if _stands_by(self.settings) else None
        self.aside = kind_of(self.name).side_processes
        self._in_one_process = self.aside or kind_of(self.name).gathers
        """Whether workers or threads read, which a fork of the process that started them lacks."""
        self.persistent = self.settings.keeps is True
        self._turn = Turn()
        self._state: _State | None = None
        """State of the data when the workers started; None: it cannot be compared."""
        self._seen: _State | None = None
        self._pipeline = Watched()
        self.told = False
        """Whether the dataset was told the epoch that begins, which has changed it."""
        self._began_s: float | None = None
        self._deaths = 0
        """Number of side processes that had died when the last batch was handed over."""
        self.pin_on = _pinning_device() if self.settings.pin_memory else None
        self._pin_thread = PinThread(self.pin_on) if self.pin_on and self._in_one_process else None
        self.records: deque[BatchStamps] | None = None
        self._iterators: weakref.WeakSet[EpochIterator] = weakref.WeakSet()
        """Iterators that are still referenced, finished ones too."""
        self.draw_from: torch.Generator | None = None
        """Generator of the next base seed; None: torch's global one."""
        self.reported: int | None = None
        """Number of batches that the loader has reported; None: it was not asked."""
        self.base_seed: int | None = None
        """Seed from which those of the side processes are derived; None: it is not drawn yet."""
        self._earlier_seed: int | None = None
        self._within = False
        """Whether the next epoch continues one within which a run was saved."""
        self._in_stream: list[LanePosition] | None = None
        self.last: Executor | None = None
        """Executor of the epoch that began last, also when it is over; None: none has begun."""
        # Lightning stops the workers that it finds under this name when it is done.
        self._iterator: Executor | None = None
        self._process = os.getpid()

    def __iter__(self) -> EpochIterator:
        with self._turn:
            return self._begin()

    def _begin(self) -> EpochIterator:
        self._leave_to_parent()
        if not self.persistent or self.base_seed is None:
            self.base_seed = draw_base_seed(self.draw_from)
        if self._earlier_seed is not None:
            self.base_seed, self._earlier_seed = self._earlier_seed, None
        unfinished = self._unfinished()
        if self.persistent:
            for other in unfinished:
                other.end("another epoch of its loader has begun, which keeps its workers")
            unfinished = []
        if self._within and self.indices is None and self.aside and self._iterator is not None:
            self._iterator.close()  # new workers are seeded as the first ones of the epoch were
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
            executor.close()  # otherwise it would live as long as the traceback
            raise
        self.last = executor
        if keep:
            self._iterator = executor
        self._deaths = self.plan.faults.deaths
        reported = self.reported if self.indices is None else None
        over = self._ask_workers if keep else None
        process = os.getpid() if self._in_one_process else None
        running = EpochIterator(executor, self.finish, reported, over, process, self._turn)
        self._iterators.add(running)
        return running

    def _leave_to_parent(self) -> None:
        """In a forked process, let go of the workers and threads, which are those of its parent."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        if self._in_one_process:
            for each in self._unfinished():
                each.end(_FORKED)
            self._iterator = self._state = None

    def _unfinished(self) -> list[EpochIterator]:
        """Return the iterators whose epochs are not over: loops may be nested."""
        return [each for each in self._iterators if each.executor is not None]

    def look(self) -> None:
        """Note the state of the data before the dataset is told the next epoch.

        Each worker is told that epoch, too, so that its effect on the dataset is no difference.
        """
        if self.aside and self._state is not None:
            self._seen = self._read_state()

    def _keeps_now(self, *, in_use: bool) -> bool:
        """Return whether the executor of the epoch that begins may outlive it.

        The executor kept from the previous epoch is given up if its data has changed since. If an
        earlier iterator still uses it (``in_use``), it ends together with that iterator.
        """
        if not self.aside:
            return True  # Threads and reused memory cost nothing between epochs.
        seen, then, self._seen = self._seen, self._state, None
        same = seen is not None and seen == then
        if self.persistent:  # the workers see changes of shared memory and files themselves
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
            self._state = None  # the workers that are kept have the dataset as it was before
        self._began_s = clock.monotonic()
        if self.settings.keeps == "unchanged":
            # A stream goes on with the worker's random numbers, and ``worker_init_fn`` may change
            # the data in each epoch: in both cases a kept worker would not read as a new one does.
            reads_as_new = self.indices is not None and self.settings.worker_init_fn is None
            return self._state is not None and reads_as_new
        return self.persistent

    def _read_state(self) -> _State | None:
        """Return the state that workers started now would read; None: no comparison in time."""
        if self.indices is None:
            return None  # A stream has new processes in each epoch, or the user keeps them.
        given = () if self.settings.transform is None else self.settings.transform.made_of()
        read = self.plan.state(self._budget_s())
        pipeline = self._pipeline.now(
            given, self._budget_s(), lambda: lasting(find_composes(given))
        )
        return None if read is None or pipeline is None else _State(read, pipeline)

    def _budget_s(self) -> float:
        """Return how many seconds a comparison of the data may take."""
        epoch_s = (dataset_length(self.settings.dataset) or 0) * _PER_SAMPLE_S / _SHARE_OF_EPOCH
        if self._began_s is not None:
            epoch_s = clock.monotonic() - self._began_s
        return max(_LEAST_BUDGET_S, _SHARE_OF_EPOCH * epoch_s)

    def _ask_workers(self) -> None:
        """Ask workers that may be kept for their state of the data, now that an epoch is over."""
        ask = getattr(self._iterator, "ask_states", None)
        if ask is not None and self._state is not None and not self.persistent:
            ask(self._budget_s())

    def _workers_read(self, seen: _State) -> bool:
        """Return whether the workers would read the next epoch as new ones would.

        Reading may have changed their own copies of the dataset: a counter, a cache, an open file.
        Executors whose workers have no copies of their own are not asked.
        """
        the_same = getattr(self._iterator, "read_the_same", None)
        return the_same is None or bool(the_same(seen.read.own, self._budget_s()))

    def _seed_of_processes(self, base_seed: int) -> int:
        if self.plan.seed is None:
            return base_seed
        # A worker_init_fn may draw from the generators of its process: they have to give other
        # numbers for another epoch, seed or global seed.
        return derived_seed(self.plan.seed, self.epoch(), base_seed) >> 1  # 63 bits, as torch's

    def _start_epoch(self, executor: Executor) -> None:
        if self.indices is not None:
            shared = math.isfinite(self.plan.cpus)
            indices = _Numbered(self.indices) if shared else iter(self.indices)
            executor.start_epoch(indices, self.epoch())
        elif isinstance(executor, StreamReader):
            resume, self._in_stream = self._in_stream, None
            executor.start_epoch(repeat(self.settings.batch_size), self.epoch(), resume=resume)

    def lanes(
        self, executor: Executor | None, batches: int | None, *, over: bool
    ) -> list[dict[str, Any]] | None:
        """Return the position of each part of a stream after ``batches`` of an epoch: plain data.

        Empty: the stream has no state, and its batches are counted. None: its state is not known.
        ``executor``: the one that read the epoch. ``over``: the epoch has ended, and the position
        is where the next one begins. ``batches`` are None if it was left before its end.

        Raises:
            OptionsError: That batch was not handed out, or too long ago.
        """
        if not isinstance(executor, StreamReader) or executor.history is None:
            return None
        if over and not self.keep:
            return []
        if batches is None:
            return None if executor.history.has_state else []
        found = executor.history.position(batches, over=over)
        return None if found is None else [lane.as_dict() for lane in found]

    @property
    def keep(self) -> bool:
        """Whether the readers of a stream outlive the epoch."""
        return self.persistent or not self.aside

    @property
    def draws(self) -> bool:
        """Whether a stream, or its ``collate_fn``, was seen to draw from global generators."""
        history = self.last.history if isinstance(self.last, StreamReader) else None
        return history is not None and history.drew

    def go_on_from(self, base_seed: int | None, *, epoch: int, within: bool) -> None:
        """Seed the next epoch as the run did that is resumed.

        ``base_seed``: that of the run's side processes; None: not known. ``within``: the run was
        saved within ``epoch``, and goes on there; otherwise it begins that epoch.
        """
        self._within = within
        if base_seed is None:
            return
        if self.indices is None and not within:
            if self.persistent and self._iterator is not None:
                return  # the workers of the epoch before are there, and go on
            # With the same seed, a stream would repeat the draws of its last epoch.
            base_seed = derived_seed(base_seed, epoch) >> 1
        if self.persistent:
            self.base_seed = base_seed  # nothing is drawn for it, as in the run that goes on
        self._earlier_seed = base_seed

    def go_on_in_stream(self, lanes: list[dict[str, Any]]) -> None:
        """Have each part of a stream begin the next epoch at a position that :meth:`lanes` gave."""
        self._in_stream = list(map(LanePosition.from_dict, lanes))

    def resize(self, workers: int, look_ahead: int) -> None:
        """Read with ``workers`` side processes from now on, ``look_ahead`` batches ahead.

        Raises:
            WorkerError: They cannot be started, or would read other data than the present ones.
        """
        if workers > self.settings.num_workers:
            refuse_late_fork(self.plan)
            if self.aside and self._at_work() and self.settings.keeps and self._has_changed():
                raise WorkerError(f"they would not read what the others do: {_CHANGED}")
        self.settings = self.settings.as_set_up(num_workers=workers)
        self.plan = replace(self.plan, look_ahead=look_ahead)
        at_work: list[Any] = self._at_work()  # of a kind with side processes
        for executor in at_work:
            executor.resize(workers, look_ahead)

    def _has_changed(self) -> bool:
        """Return whether the data may have changed since the workers of this epoch started."""
        now, then = self._read_state(), self._state
        return now is None or then is None or now.own != then.own

    def _tell_other_state(self) -> None:
        """Warn if a worker that replaced a dead one may read other data."""
        deaths = self.plan.faults.deaths
        if deaths > self._deaths and self._has_changed():
            warnings.warn(
                f"A worker that died was replaced, and the new one may read other samples: "
                f"{_CHANGED}.",
                FastDataWarning,
                stacklevel=2,
            )
        self._deaths = deaths

    def _at_work(self) -> list[Executor]:
        self._leave_to_parent()
        executors = (self._iterator, *(each.executor for each in self._unfinished()))
        return list({id(each): each for each in executors if each is not None}.values())

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each batch to ``records`` from now on; None: stop doing so."""
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
        for executor in self._at_work():
            executor.close()
        for each in self._unfinished():
            each.end("its loader was closed")
        self._iterator = None


class EpochIterator:
    """The batches of one epoch, after which there are none; ``over`` is called when it is over.

    ``over`` may be None: the executor ends with this iterator. ``process``: id of the one process
    in which the executor reads; None: in each fork of it, too.
    """

    def __init__(
        self,
        executor: Executor,
        finish: Callable[[Batch], Batch],
        reported_batches: int | None,
        over: Callable[[], object] | None,
        process: int | None,
        turn: Turn,
    ) -> None:
        self.executor: Executor | None = executor
        """Executor that reads the epoch; None: the epoch is over, or was ended."""
        self._error: Exception | None = None
        self._finish = finish
        self._reported = reported_batches
        self._process = process
        self._turn = turn
        self._given = 0
        # The executor may hold errors of batches to come, whose tracebacks hold this iterator: if a
        # finalizer held the executor, none of them would ever end.
        self._over = over or weakref.finalize(self, _close, weakref.ref(executor))

    @property
    def _is_forked(self) -> bool:
        """Whether this is a fork of the one process in which the executor reads."""
        return self._process not in (None, os.getpid())

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Batch:
        if self._is_forked and self.executor is not None:
            self.end(_FORKED)  # else it would take what workers have made for the parent
        if self._error is not None:
            raise self._error
        if self.executor is None:
            raise StopIteration
        try:
            batch = next(self.executor)
        except StopIteration:
            with self._turn:  # else another thread may begin an epoch in between
                self.executor = None
                self._over()
            multiprocessing.active_children()  # of which some may have ended, as after a trial
            raise
        self._given += 1
        if self._reported is not None and self._given > self._reported:
            text = _TOO_MANY.format(reported=self._reported, given=self._given)
            warnings.warn(text, stacklevel=2)
        return self._finish(batch)

    def ready(self) -> bool | None:
        """Return whether the next batch, or the end of the epoch, comes without waiting.

        None: this process makes the batch itself when it is asked for.
        """
        if self.executor is None or self._is_forked:
            return True
        ready: Callable[[], bool | None] | None = getattr(self.executor, "ready", None)
        return None if ready is None else ready()

    def under_way(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the number of batches begun, and those not handed over yet; None: not known."""
        known: Callable[[], tuple[int, tuple[int, ...]]] | None
        known = getattr(self.executor, "under_way", None)
        return None if known is None else known()

    def end(self, why: str) -> None:
        """Give no more batches."""
        self.executor = None
        self._error = WorkerError(f"This iterator has ended: {why}. Iterate the loader anew.")


def _close(of: Callable[[], Executor | None]) -> None:
    executor = of()
    if executor is not None:
        executor.close()


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
    """Return the batch sampler of a loader, or its sampler if it makes no batches."""
    return loader.batch_sampler if makes_batches(loader) else loader.sampler


def reads_with_torch(loader: Loader) -> bool:
    """Return whether torch's own iterator reads the dataset."""
    pipe = isinstance(loader.dataset, IterDataPipe | MapDataPipe)
    return kind_of(loader.executor).is_torch or pipe


def workers_of(loader: Loader) -> int:
    """Return how many processes or actors read for a loader; 0: the training process reads."""
    streamed = isinstance(loader.dataset, IterableDataset)
    executor = executor_for(loader.executor, stream=streamed, workers=loader.num_workers)
    aside = reads_with_torch(loader) or kind_of(executor).side_processes
    return loader.num_workers if aside else 0


def indices_of(settings: Loader) -> EpochIndices | None:
    """Return the indices of a loader's epochs; None for a stream."""
    if isinstance(settings.dataset, IterableDataset):
        return None
    seed = None if settings.training.run is None else settings.seed
    arrays = kind_of(settings.executor).gathers
    drawn = settings.dataset if _draws_by_index(settings) else None
    return EpochIndices(order_of(settings), arrays=arrays, seed=seed, drawn_by_index=drawn)


def _draws_by_index(loader: Loader) -> bool:
    """Return whether samples may be drawn under a key with their index."""
    dataset, transform = loader.dataset, loader.transform
    if transform is not None and transform.in_worker(on_device=loader.on_device) is not None:
        return True
    if reads_with_torch(loader):
        return draws_by_itself(dataset) or bool(find_composes(dataset))
    return not collates_as_torch(loader) or rows_of(dataset, tried=False) is None


def open_source(
    settings: Loader,
    indices: EpochIndices | None,
    epochs: EpochCell,
    *,
    stamps: WaitWatch | None,
) -> Source:
    """Return the source of a loader's batches.

    It holds no reference to the loader, so that a loader that is dropped stops its workers at once.

    Args:
        settings: The loader, as it is set up now.
        indices: Gives the indices of its epochs; None for a stream.
        epochs: Holds the epoch that the loader is in.
        stamps: Notes the calls of the sampler by torch's own iterator; None: they are not noted.

    Raises:
        OptionsError: Each of several workers would read the whole of a DataPipe.
    """
    worker_part = None
    if settings.transform is not None:
        # What code of the user's does with images nobody can know: it gets finished ones.
        on_device = settings.on_device and only_stacks(settings.collate_fn)
        worker_part = settings.transform.in_worker(on_device=on_device)
    collate_fn = _collation(settings, worker_part)
    torchs = reads_with_torch(settings)
    dataset = keyed(
        settings.dataset,
        seed=settings.seed,
        epoch=epochs,
        transform=worker_part,
        always=torchs and indices is not None and draws_by_itself(settings.dataset),
    )
    if not torchs:
        return _open_executor(settings, indices, dataset, collate_fn, epochs, worker_part)
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
    names = (each for each in _PASSED_ON if settings.num_workers or each not in _OF_WORKERS)
    return DataLoader(
        dataset,
        collate_fn=collate_fn,
        worker_init_fn=WorkerStart(start) if settings.num_workers else start,
        persistent_workers=settings.keeps is True and settings.num_workers > 0,
        timeout=settings.timeout,
        **order,
        **{name: getattr(settings, name) for name in names},
    )


def draw_base_seed(generator: torch.Generator | None) -> int:
    """Return the seed that torch's iterators draw when they are made."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def epoch_of(
    source: Source, *, reported: int | None, draw_from: torch.Generator | None
) -> Iterator[Batch]:
    """Begin an epoch of a source.

    ``reported``: length that the loader has told; None: nobody has asked for it. ``draw_from``: the
    generator from which the base seed of the epoch is drawn; None: torch's global one.
    """
    if isinstance(source, KeptExecutor):
        source.draw_from, source.reported = draw_from, reported
    else:
        source.generator = draw_from
        if isinstance(source.worker_init_fn, WorkerStart):
            source.worker_init_fn.about_to_start(source.multiprocessing_context)
        if reported is not None:
            with contextlib.suppress(TypeError):
                len(source)  # so that torch warns if a stream gives more than it reported
    return iter(source)


def _collation(settings: Loader, worker_part: WorkerTransform | None) -> Callable[[Any], Batch]:
    collate_fn = settings.collate_fn
    collate_fn = collate_samples if collate_fn is default_collate else collate_fn
    # A kept executor stages batches without draws itself, so that it can collate in place.
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
    worker_part: WorkerTransform | None,
) -> KeptExecutor:
    streamed = isinstance(settings.dataset, IterableDataset)
    executor = executor_for(settings.executor, stream=streamed, workers=settings.num_workers)
    default = collate_fn is collate_samples and makes_batches(settings)
    in_rows = kind_of(executor).side_processes and default and not streamed
    gathered = in_rows and rows_of(dataset) is not None
    plan = FetchPlan(
        dataset=dataset,
        collate_fn=collate_fn,
        default_collation=default and not gathered,
        gathered=gathered,
        compared=() if streamed else (settings.dataset, settings.collate_fn),
        transform=worker_part,
        at_start=settings.training.chosen and is_drawn_at_start(order_of(settings)),
        batched=makes_batches(settings),
        drop_last=streamed and settings.drop_last,
        # A stream's random numbers go on from sample to sample, as its state does: no keys.
        seed=None if streamed else settings.seed,
        own=None if streamed else OwnGenerators(settings.dataset, settings.collate_fn, worker_part),
        worker_init_fn=settings.worker_init_fn,
        timeout_s=None if isinstance(settings.timeout, LeftOpen) else settings.timeout,
        in_order=settings.in_order,
        context=settings.multiprocessing_context,
        look_ahead=batches_ahead(settings, settings.num_workers),
        prefetch=settings.asked_prefetch_factor or _TORCH_PREFETCH,
        cpus=_shared_cpus(settings, kind_of(executor)),
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
    if settings.asked_prefetch_factor:  # it holds for large batches, too, as far as memory allows
        plan = replace(plan, ahead_bytes=plan.memory_limit_bytes)
    staged = isinstance(collate_fn, StagingCollate)
    return KeptExecutor(
        name=executor,
        plan=plan,
        settings=settings,
        indices=indices,
        epoch=epochs.get,
        staged=None if staged else settings.staged,
    )


class _Numbered(Around):
    """The batches of indices of an epoch, and how many of them are left."""

    def __init__(self, indices: EpochIndices) -> None:
        super().__init__(iter(indices))
        self._left = length_hint(indices) - indices.start.batches

    def __next__(self) -> Any:
        self._left -= 1
        return next(self._batches)

    def __len__(self) -> int:
        """Return how many are left; 0: that is not known."""
        return max(0, self._left)


def _shared_cpus(settings: Loader, kind: ExecutorKind) -> float:
    """Return how many CPUs the training process and workers share; infinite: it is of no account.

    A sampler that is asked while the epoch runs is always asked when torch would ask it, so that
    there are always as many batches ahead.
    """
    if kind.elsewhere or not is_drawn_at_start(order_of(settings)):
        return math.inf
    return read_cpu_limit().usable_cpus


def _stands_by(settings: Loader) -> bool:
    """Return whether the training process may read in place of workers, with the same result.

    ``worker_init_fn`` and ``timeout`` need workers.
    """
    works = settings.worker_init_fn or not isinstance(settings.timeout, LeftOpen)
    sure = is_drawn_at_start(order_of(settings)) and settings.in_order
    return settings.training.standby and sure and not works and settings.transform is None


def batches_ahead(loader: Loader, workers: int) -> int:
    """Return how many batches are under way at once when side processes read."""
    as_torch = workers * (loader.prefetch_factor or _TORCH_PREFETCH)
    if isinstance(loader.dataset, IterableDataset) or reads_with_torch(loader):
        return as_torch
    if not is_drawn_at_start(order_of(loader)):
        # The sampler may depend on what steps write, so it is asked when torch would ask it: for
        # all of these batches at first, then for one more before each batch is handed out.
        return as_torch + 1
    return look_ahead_batches(
        workers,
        prefetch=loader.asked_prefetch_factor,
        batch_size=loader.batch_size or 1,
        split=splits_batches(loader),
    )


def setup_of(loader: Loader, *, cpus: float, step_cpus: float) -> LoaderSetup | None:
    """Return the setup of a loader for the simulation; None if that has no model of it.

    It models loaders whose workers read by themselves (torch's own, ``"workers"`` and ``"ray"``),
    and loaders that read in the training process when a batch is asked for. It does not model
    ``"gather"``, whose caller helps its threads. It assumes that samples are of one shape, and that
    memory suffices for the whole look-ahead.

    Args:
        loader: The loader, as it is set up now; it is not iterated.
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
    return LoaderSetup(
        workers=workers,
        look_ahead=batches_ahead(loader, workers) if workers else 1,
        scheduling=scheduling,
        cpus=cpus,
        step_cpus=step_cpus,
        inline=kind.caller_reads,
    )


def collates_as_torch(loader: Loader) -> bool:
    """Return whether batches are made as torch makes them by default."""
    return loader.collate_fn is default_collate or loader.collate_fn is collate_samples


def splits_batches(loader: Loader) -> bool:
    """Return whether this package's executors share out the samples of one batch among workers.

    They do if samples are read one at a time and put together by the default collation.
    """
    transform = loader.transform
    drawn = transform is not None and transform.in_worker(on_device=loader.on_device) is not None
    default = collates_as_torch(loader) and not drawn
    whole = kind_of(loader.executor).elsewhere or reads_together(loader.dataset)
    return default and makes_batches(loader) and not whole


def tuner_for(
    plan: LoaderPlan,
    own: Tuner | None = None,
    *,
    local_ranks: int = 1,
    tell: Callable[[str], None] = log.info,
) -> Tuner | None:
    """Return the tuner of a loader with a plan, its ``own`` if it has one; None: none is needed."""
    if not plan.tuned or own is not None:
        return own if plan.tuned else None
    forked = plan.start_method in (None, "fork")
    most, _ = most_workers(read_host_memory(), ranks=local_ranks, forked=forked, tasks=None)
    most = room_elsewhere(plan.executor, local_ranks) or most
    cpus = float(read_cpu_limit(local_ranks=local_ranks).usable_cpus)
    return Tuner(most_workers=most, cpus=cpus, tell=tell)


class WorkerStart:
    """Prepares a worker process of torch, then runs the user's own ``worker_init_fn``.

    OpenCV is set to one thread there (torch does so for its own threads only), and the sharing
    strategy to that of the parent, which only a forked process would have by itself.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.strategy: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        self.then = then
        self.files: tuple[OpenFile, ...] = ()
        self.rank = rank_now()

    def about_to_start(self, context: BaseContext | str | None) -> None:
        """Note the open files that a forked process will share: call it before each start."""
        self.files = files_being_read() if forks(context) else ()

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker process of this number."""
        open_anew(self.files)
        tell_rank(self.rank)
        torch.multiprocessing.set_sharing_strategy(self.strategy)  # type: ignore[no-untyped-call]
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(0)
        show_dataset()
        rest_on_parent(getattr(get_worker_info(), "dataset", None))
        if self.then is not None:
            self.then(worker_id)

"""What the tuner asks of a loader, and what it changes."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from torch.utils.data import Dataset, IterableDataset, default_collate

from lightning_fastdata.augment import StageTransform
from lightning_fastdata.batches.collate import collate_samples
from lightning_fastdata.batches.keyed import reads_together
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors.kinds import KINDS, ExecutorName, room_elsewhere
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.loading.kept_executor import Keeps, KeptExecutor
from lightning_fastdata.loading.source import (
    LoaderFacts,
    ahead_by_index,
    makes_batches,
    reads_with_torch,
)
from lightning_fastdata.planning.worker_count import most_workers
from lightning_fastdata.stamps.batch_stamps import BatchStamps
from lightning_fastdata.stamps.stamped import Ledger
from lightning_fastdata.tuning.simulate import LoaderSetup, Scheduling
from lightning_fastdata.tuning.tuner import Tuner, log

if TYPE_CHECKING:
    from lightning_fastdata.executors.pool.stalls import ExecutorNow
    from lightning_fastdata.loading.kept_executor import SourceSettings
    from lightning_fastdata.loading.source import Source
    from lightning_fastdata.planning.loader_plan import LoaderPlan

_TORCH_PREFETCH: Final = 2
"""Torch's own default."""


class _Loader(LoaderFacts, Protocol):
    """A FastDataLoader, or its settings."""

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def in_order(self) -> bool: ...
    @property
    def transform(self) -> StageTransform | None: ...
    @property
    def on_device(self) -> bool: ...


def setup_of(loader: _Loader, *, cpus: float, step_cpus: float) -> LoaderSetup | None:
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
    kind = KINDS[loader.executor]
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
        in_order=loader.in_order,
        cpus=cpus,
        step_cpus=step_cpus,
        inline=kind.caller_reads,
    )


def splits_batches(loader: _Loader) -> bool:
    """Return whether this package's executors share out the samples of one batch among workers.

    They do where samples of one form, read one at a time, are collated by default.
    """
    transform = loader.transform
    drawn = transform is not None and transform.in_worker(on_device=loader.on_device) is not None
    default = loader.collate_fn in (default_collate, collate_samples) and not drawn
    whole = not KINDS[loader.executor].splits_batches or reads_together(loader.dataset)
    return default and makes_batches(loader) and not whole


def tuner_for(
    plan: LoaderPlan,
    own: Tuner | None = None,
    *,
    local_ranks: int = 1,
    tell: Callable[[str], None] = log.info,
) -> Tuner | None:
    """Return what tunes a loader of a plan, its ``own`` if it has one; None: nothing to tune."""
    if plan.tune == "off" or own is not None:
        return None if plan.tune == "off" else own
    forked = plan.multiprocessing_context in (None, "fork")
    most, _ = most_workers(read_host_memory(), ranks=local_ranks, forked=forked, tasks=None)
    if KINDS[plan.executor].elsewhere:
        most = room_elsewhere(plan.executor, plan.actor_options, local_ranks) or most
    cpus = float(read_cpu_limit(local_ranks=local_ranks).usable_cpus)
    return Tuner(most_workers=most, cpus=cpus, tell=tell)


class _Both(deque["BatchStamps"]):
    """Appends to two others what is appended to it, and keeps nothing."""

    def __init__(self, one: deque[BatchStamps], other: deque[BatchStamps]) -> None:
        super().__init__()
        self._others = one, other

    def append(self, stamps: BatchStamps) -> None:
        """Append the stamps to both."""
        for each in self._others:
            each.append(stamps)


class LoaderWorkers:
    """The part of a FastDataLoader that has its workers: takes stamps, changes and stops them."""

    dataset: Dataset[Any]
    executor: ExecutorName
    num_workers: int
    persistent_workers: bool
    keeps: Keeps
    tune: str | Tuner
    _inner: Source | None
    _inner_settings: tuple[SourceSettings, bool] | None

    if TYPE_CHECKING:

        def _settings(self) -> SourceSettings: ...

    def _records_nothing(self) -> None:
        self.records: deque[BatchStamps] | None = None
        """Where the stamps of delivered batches go; None: no stamps are taken."""
        self.tuning_records: deque[BatchStamps] | None = None
        self._ledger = Ledger()

    @property
    def all_records(self) -> deque[BatchStamps] | None:
        """Where all that take stamps get them."""
        one, other = self.records, self.tuning_records
        if one is None or other is None:
            return one if other is None else other
        return _Both(one, other)

    def record_stamps(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each batch that is delivered from now on; None: no more.

        Torch's own executor begins and ends it with the next iteration. It takes no stamps of
        iterable DataPipes.
        """
        # Lightning carries over what is set in a data hook if it makes the loader anew.
        self.records = self._ledger.records = records
        self._record()

    def tuning_stamps(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each batch from now on; None: no more."""
        self.tuning_records = records
        self._record()

    def _record(self) -> None:
        if isinstance(self._inner, KeptExecutor):
            self._inner.record(self.all_records)

    def now(self) -> list[ExecutorNow]:
        """Return what is under way in side processes of this package; any thread may ask."""
        inner = self._inner
        return inner.now() if isinstance(inner, KeptExecutor) else []

    def setup_with(self, workers: int, *, cpus: float, step_cpus: float) -> LoaderSetup | None:
        """Return the loader with so many workers, as the model knows it; None: it does not."""
        settings = self._settings()._replace(num_workers=workers)
        return setup_of(settings, cpus=cpus, step_cpus=step_cpus)

    def set_workers(self, workers: int) -> None:
        """Read with so many workers from now on, in the middle of an epoch, too.

        Order and content of the batches stay. Only ``"workers"`` of map-style data come and go so.

        Raises:
            OptionsError: ``workers`` is below 1, or other workers read this loader, or none.
            WorkerError: They cannot be had, or the dataset holds by now what forked processes must
                not share.
        """
        streamed = isinstance(self.dataset, IterableDataset)
        if workers < 1 or not self.num_workers or streamed or not KINDS[self.executor].resizes:
            raise OptionsError(
                f"set_workers({workers!r}) of a loader with executor={self.executor!r} and "
                f"num_workers={self.num_workers}: only 'workers' and 'ray' of a map-style dataset "
                "come and go, and 1 or more stay. Make a new loader."
            )
        inner, self.num_workers = self._inner, workers
        if isinstance(inner, KeptExecutor) and self._inner_settings is not None:
            settings = self._settings()
            split = splits_batches(settings)
            inner.resize(workers, ahead_by_index(settings, workers, split=split))
            vars(self)["_inner_settings"] = self._settings(), self._inner_settings[1]

    def with_workers(self, workers: int) -> Self:
        """Return a copy of this loader, not read yet, with another number of workers; 0: none."""
        twin = copy.copy(self)
        twin._keep(None)
        twin._records_nothing()
        if bool(workers) != bool(self.num_workers):
            twin.executor = "workers" if workers else "inline"
        twin.num_workers = workers
        twin.keeps = self.keeps if workers else False
        # torch refuses to change this one, as its own workers are kept by it.
        vars(twin)["persistent_workers"] = bool(twin.keeps)
        return twin

    def _keep(
        self, inner: Source | None, settings: tuple[SourceSettings, bool] | None = None
    ) -> None:
        # Lightning records the attributes that are set on loaders in a data hook, and goes on to do
        # so in the whole process if the hook raises. A record would keep the workers alive.
        vars(self).update(_inner=inner, _inner_settings=settings)
        if inner is not None:
            # Torch's own loader knows no position, and what it takes stamps with is to go.
            vars(self)["_read_by"] = inner if isinstance(inner, KeptExecutor) else None

    def close(self) -> None:
        """Stop the workers; the next iteration starts new ones."""
        if isinstance(self._inner, KeptExecutor):
            self._inner.close()
        self._keep(None)

    # torch keeps persistent workers under this name and Lightning stops them through it.
    @property
    def _iterator(self) -> Any:
        return None if self._inner is None else self._inner._iterator

    @_iterator.setter
    def _iterator(self, value: object) -> None:
        if value is None:
            self.close()

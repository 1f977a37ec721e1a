"""FastDataLoader: a torch DataLoader whose batches may still have a transform to run."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from numbers import Number
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    Sampler,
)

from lightning_fastdata.augment import StageTransform
from lightning_fastdata.batches.bad_samples import BadSamplePolicy, BadSamples, FaultLog
from lightning_fastdata.batches.libraries import epoch_set_on, settle_ranks, tell_epoch
from lightning_fastdata.batches.memory import shared_slots_supported
from lightning_fastdata.caches.cached import caches_in, notice_changes
from lightning_fastdata.errors import FastDataWarning, OptionsError, checked_seed
from lightning_fastdata.executors.kinds import AnyExecutor, able_to_read_on, find_kind, kind_of
from lightning_fastdata.loading import options, position
from lightning_fastdata.loading.facts import may_start_processes
from lightning_fastdata.loading.plan_for import LoaderPlan, LoaderSpec, plan_for
from lightning_fastdata.loading.position import Pass, Passes, Position, Run, StateWatch
from lightning_fastdata.loading.simulate import LoaderSetup
from lightning_fastdata.loading.source import (
    Keeps,
    KeptExecutor,
    Source,
    Turn,
    batches_ahead,
    collates_as_torch,
    draw_base_seed,
    epoch_of,
    indices_of,
    open_source,
    order_of,
    reads_with_torch,
    setup_of,
    tuner_for,
    workers_of,
)
from lightning_fastdata.loading.stamped import Ledger, OpenedEnvelopes, stampable
from lightning_fastdata.loading.tuner import Tuner
from lightning_fastdata.order import samplers
from lightning_fastdata.order.epoch_order import Counted, dataset_length, first_epoch, rank_now
from lightning_fastdata.order.indices import EpochIndices, may_tell_state, tells_state
from lightning_fastdata.order.samplers import (
    BlockShuffleSampler,
    is_drawn_at_start,
    is_in_blocks,
    ranks_aside,
    rows_in,
)
from lightning_fastdata.randomness.seeds import EpochCell, global_seed, is_lightnings_start
from lightning_fastdata.stamps.batch_stamps import BatchStamps
from lightning_fastdata.tree import find_composes
from lightning_fastdata.types import Batch, Batch_co, Shuffle, Stage

if TYPE_CHECKING:
    from torch import Generator


_CHANGED_WHILE_READ: Final = (
    "Step {{}} of the training changed {name}, or its sampler, while it is read. It is read in the "
    "training process, so that the batches that come next may have the change; workers, which may "
    "be chosen elsewhere, would have it in the next epoch. Set num_workers=0 for the former, or a "
    'number of them and executor="workers" for the latter.'
)
PIPELINE_CHANGED: Final = (
    "Step {} of the training changed the pipeline of augment=, and the next epoch is the first "
    "that is drawn so. Change it between epochs, or have the dataset call it."
)
_NOTHING_STARTS: Final = (
    "The training process reads, so that worker_init_fn is not called: a worker would run this "
    "script once more as it starts. Put what the script does under if __name__ == '__main__'."
)
_NOT_CALLED: Final = (
    "The training process reads (executor={!r}), so that worker_init_fn is not called. Give it as "
    'the loader is made, and executor="workers", or have the dataset do what it does.'
)
TAKEN_OVER: Final = ("batch_size", "drop_last", "collate_fn")
"""Settings that a loader takes over from the one in whose place it reads, epoch by epoch."""
_NOT_TAKEN_OVER: Final = (
    "The {name} of the DataLoader that was given to from_loaders() was replaced, and the one that "
    "it had then is still used. Give the loader to from_loaders() once more."
)


class _Both(deque[BatchStamps]):
    """A deque that appends each item to two others, and keeps nothing itself."""

    def __init__(self, one: deque[BatchStamps], other: deque[BatchStamps]) -> None:
        super().__init__()
        self._others = one, other

    def append(self, stamps: BatchStamps) -> None:
        """Append the stamps to both."""
        for each in self._others:
            each.append(stamps)


class Original:
    """A DataLoader in whose place another one reads. A program may go on to change it.

    It is not kept alive, and a copy of this knows none, but what was set before: the program has no
    copy to change.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader: Callable[[], DataLoader[Any] | None] = weakref.ref(loader)
        self._left: dict[str, Any] = {}
        """Settings that were unseen when this copy was made of another one."""
        self._seen = self.settings()

    def __getstate__(self) -> dict[str, object]:
        left = {name: value for name, value in self.unseen().items() if name in TAKEN_OVER}
        return {"_loader": _no_loader, "_left": left, "_seen": {}}

    def seen_by_another(self) -> Original:
        """Return the same loader, as one that reads in its place has seen it: as this has."""
        loader = self._loader()
        if loader is None:
            return copy.copy(self)
        other = Original(loader)
        other._seen = self._seen
        return other

    @property
    def batches(self) -> BatchSampler | None:
        """Batch sampler that torch made of its ``batch_size``; None: it made none."""
        loader = self._loader()
        if loader is None or loader.batch_size is None:
            return None
        return cast("BatchSampler", loader.batch_sampler)

    def unseen(self) -> dict[str, Any]:
        """Return what was set since its settings were seen last."""
        return {
            name: value
            for name, value in self.settings().items()
            if name not in self._seen or _known_by(value) != _known_by(self._seen[name])
        }

    def see(self) -> None:
        """See the settings as they are."""
        self._seen = self.settings()

    def settings(self) -> dict[str, Any]:
        """Return the settings with which torch would read it now, of those that can be set."""
        loader, batches = self._loader(), self.batches
        found = dict(self._left)
        if loader is not None:
            found["collate_fn"] = loader.collate_fn
            found["worker_init_fn"] = getattr(loader, "worker_init_fn", None)
        if loader is not None and batches is not None:
            found.update(batch_size=batches.batch_size, sampler=batches.sampler)
            if not isinstance(loader.dataset, IterableDataset):  # torch reads a stream's elsewhere
                found["drop_last"] = batches.drop_last
        return found


def _no_loader() -> None:
    return None


def _known_by(value: object) -> object:
    """Return what is equal for the same value alone: functions and arrays may have any ``==``."""
    return value if isinstance(value, Number | MethodType) else (id(value), value)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a FastDataModule says to its loader of the training that takes the batches."""

    run: Run | None = None
    """The run that takes them, which tells in place of ``epoch`` which epoch it is in and how many
    batches of it were taken; None: a plain loop does."""
    goes_on: Callable[[], bool] | None = None
    """Says whether the run goes on that finishes batches on the device. Behind it, batches come as
    without ``staged``, ``on_device`` and ``ahead``. None: it always does."""
    ahead: Callable[[Iterator[Batch]], Iterator[Batch]] | None = None
    """Takes the iterator of each epoch and returns the one that is handed out, which may send
    batches to the device before they are asked for."""
    tuner: Tuner | None = None
    """Changes the number of workers while the loader is read, if that pays; None: nobody does."""
    chosen: bool = False
    """Whether ``num_workers`` was chosen for ``"auto"``."""
    standby: bool = False
    """Whether the training process reads, too, if that gives the same samples and is quicker."""
    original: Original | None = None
    """Loader in whose place this one reads, which a program may change; None: there is none."""
    scaled: Callable[[int], int] = int
    """Returns the size of this loader's batches for a size of the original's."""

    @property
    def is_over(self) -> bool:
        """Whether the run is over that would have finished the batches on the device."""
        return self.goes_on is not None and not self.goes_on()

    def of_source(self) -> Training:
        """Return the part that decides which batches the source of a loader gives."""
        return Training(run=self.run, chosen=self.chosen, standby=self.standby)


class FastDataLoader(DataLoader[Any], Generic[Batch_co]):
    """A ``torch.utils.data.DataLoader`` with randomness keyed by sample and staged transforms.

    For a type checker its batches have the type that ``collate_fn`` returns; for torch's collation
    give their type as ``FastDataLoader[Batch]``.

    All of torch's arguments keep their meaning (``timeout`` is about progress, where workers of
    this package read) and are found under the same attributes, so that Lightning, Fabric and every
    sampler tool treat it as a DataLoader, which it is. Albumentations pipelines inside the dataset
    are seeded per sample from ``(seed, epoch, index)``.

    Args:
        dataset: Map-style or iterable dataset.
        batch_size: Samples per batch; None to take samples (or ready batches) as they come.
        shuffle: Permute the samples each epoch; ``"blocks"``: as :class:`BlockShuffleSampler` does.
        sampler: Yields indices; excludes ``shuffle``.
        batch_sampler: Yields lists of indices; excludes batch_size, shuffle, sampler, drop_last.
        num_workers: Number of side processes that fetch, or threads with ``"gather"``; 0 fetches in
            the calling process. ``"auto"`` chooses a number that suits the dataset: some samples
            are read now, in a process that is then ended; ``plan.explain()`` says why. None: 0, as
            in torch; with ``executor="ray"``, as many as the cluster has CPUs for, up to 8.
        collate_fn: Makes a batch of samples; default: ``default_collate``, also for dataclasses.
        pin_memory: Copy batches into page-locked memory before they are returned.
        drop_last: Leave out the last batch if it is not full.
        timeout: Seconds after which a worker that is stuck on a sample is replaced, and the sample
            read once more; an error if that is stuck, too. 0 waits for ever. "auto": 60, or 20
            times the 99th percentile of tasks if that is more. ``executor="torch"`` waits that long
            for a batch, as torch does; with "auto", for ever.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: Start method of the workers.
        generator: Source of torch's own base seed.
        prefetch_factor: Batches each worker fetches ahead.
        persistent_workers: Keep the workers between epochs, as torch does: they go on with the
            dataset of the first epoch. ``"unchanged"``: keep them while the data is as it was when
            they started, down to each element; else they start anew, as torch's do by default.
            None: ``"unchanged"`` if ``num_workers="auto"``, else False.
        pin_memory_device: As in torch.
        in_order: Return batches in the order of their indices.
        seed: Seed of the per-sample randomness. None: that of ``seed_everything``, else 0.
        epoch: Returns the epoch, counted from 0; called when the first batch of each iteration is
            asked for. Default: the number of iterations that gave a batch so far.
        transform: A transform of this package. The workers run their part of it on each sample:
            with ``on_device``, the part that prepares its run on the device; otherwise the whole
            Albumentations pipeline.
        on_device: Whether to compute the pixels of ``transform`` on the device.
        staged: Deliver :class:`StagedBatch` of this stage, for the hook that runs the stage's
            transforms on the device.
        executor: How to fetch: ``"torch"`` (torch's own iterator), ``"inline"``, ``"gather"``,
            ``"workers"`` or ``"ray"`` (actors of a Ray cluster; or ``Ray(...)``). ``"auto"`` and
            None choose one that suits the dataset, but ``"torch"`` if processes would have to start
            in a script that cannot be imported again. An iterable dataset, which has no index, is
            read by ``"workers"`` in place of ``"gather"`` and ``"ray"``; DataPipes are always read
            by torch.
        on_bad_sample: What to do about a sample that cannot be read: ``"raise"``, ``"replace"`` it
            by another one, or ``"skip"`` it; or a :class:`BadSamples`, with budget and file.
        split: With ``num_workers="auto"``, whether a stream divides itself among workers; see
            :class:`LoaderOptions`.
        training: What :class:`FastDataModule` says of the training that takes the batches.

    Raises:
        DatasetError: ``dataset`` is no dataset, or has neither length nor sampler.
        OptionsError: An argument has an impossible value.
        TransformError: A transform on the device was asked for without batches
            (``batch_size=None``), or without ``staged``.
    """

    _inner: Source | None
    _inner_settings: tuple[Any, ...] | None
    """Settings for which the source was made, and whether it takes stamps; None: no source."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: Shuffle | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] | None = None,
        collate_fn: Callable[[list[Any]], Batch_co] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float | Literal["auto"] = "auto",
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: Keeps | None = None,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        epoch: Callable[[], int] | None = None,
        transform: StageTransform | None = None,
        on_device: bool = False,
        staged: Stage | None = None,
        executor: AnyExecutor | Literal["auto"] | None = None,
        on_bad_sample: BadSamplePolicy | BadSamples = "raise",
        split: bool | Literal["auto"] = "auto",
        training: Training = Training(),
    ) -> None:
        timeout = "auto" if isinstance(timeout, options.LeftOpen) else timeout
        left = {"num_workers": num_workers is None, "pin_memory": not pin_memory}
        executor, num_workers, alone = _asked(executor, num_workers, worker_init_fn)
        chosen, tuner = training.chosen or num_workers == "auto", training.tuner
        standby = training.standby
        options.check_dataset(
            dataset,
            "FastDataLoader's dataset",
            ordered=sampler is not None or batch_sampler is not None,
            shuffle=shuffle,
        )
        given = {
            "num_workers": num_workers,
            "pin_memory": bool(pin_memory),
            "persistent_workers": persistent_workers,
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
            "in_order": in_order,
            "executor": executor,
            "on_bad_sample": on_bad_sample,
            "split": split,
        }
        asked = options.LoaderOptions(**options.given_options(given))
        options.check_loader(
            asked,
            batch_size,
            alone=alone,
            transform=transform,
            on_device=on_device,
            staged=staged,
            orders={"sampler": sampler, "batch_sampler": batch_sampler},
            functions={
                "collate_fn": (collate_fn, "the samples of a batch and returns the batch"),
                "worker_init_fn": (worker_init_fn, "the number of a worker"),
                "epoch": (epoch, "nothing and returns the epoch"),
            },
            generator=generator,
        )
        sampler = samplers.as_given(sampler)
        length = dataset_length(dataset)
        samplers.check_fit(sampler, batch_sampler, length, batch_size, drop_last=drop_last)
        seed = global_seed() if seed is None else checked_seed(seed)
        if is_in_blocks(shuffle) and sampler is None and batch_sampler is None:
            sampler, shuffle = BlockShuffleSampler(cast("Sized", dataset), seed=seed), None
        self._read_by: KeptExecutor | None = None
        """Executor of the last epoch, also when it is closed; None: torch's own loader."""
        self.plan: LoaderPlan | None = None
        if executor == "auto" or num_workers == "auto":
            spec = LoaderSpec(
                dataset=dataset,
                name=type(dataset).__name__,
                options=asked,
                batch_size=rows_in(batch_sampler) or batch_size,
                pipelines=find_composes(dataset),
                transformed=transform is not None,
                collate_fn=collate_fn,
                sampler=sampler,
                batch_sampler=batch_sampler,
                worker_init_fn=worker_init_fn,
                keeps=chosen,
            )
            untouched = (name for name, is_left in left.items() if is_left)
            # Without a number, remote executors have as many workers as the cluster has room for.
            as_torch = frozenset(name for name in untouched if getattr(asked, name) != "auto")
            self.plan = plan = replace(plan_for(spec), as_torch=as_torch)
            tuner = tuner_for(plan, tuner)
            executor, num_workers, standby = plan.executor, plan.num_workers, plan.standby
            persistent_workers = plan.loader_arguments().get("persistent_workers", False)
            chosen &= num_workers > 0 or not plan.only_here
            if multiprocessing_context is None:
                multiprocessing_context = plan.start_method
        if not num_workers:
            persistent_workers, prefetch_factor, multiprocessing_context = False, None, None
        self.faults = FaultLog.of(on_bad_sample, type(dataset), length)
        self.on_bad_sample = self.faults.rule
        self.asked_prefetch_factor = prefetch_factor
        """``prefetch_factor`` as it was given; None: the executor chooses how far it is ahead."""
        self.executor = able_to_read_on(
            executor,
            workers=num_workers or 0,
            asked=self.faults.is_asked and not isinstance(dataset, IterableDataset),
        )
        self.keeps: Keeps = persistent_workers or False
        """Whether workers are kept between epochs, as it was asked for or chosen."""
        self._keep(None)
        super().__init__(
            dataset,
            None if batch_size is None else int(batch_size),  # torch takes none of NumPy
            cast("bool | None", shuffle),  # with a sampler, torch raises an error
            sampler,
            batch_sampler,
            int(num_workers or 0),
            collate_fn,
            pin_memory,
            drop_last,
            options.LeftOpen() if timeout == "auto" else timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=bool(self.keeps),
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self._show_share()
        self.seed = seed
        self.epoch = epoch
        self.transform = transform
        self.on_device = on_device
        self.staged = staged
        self.training = replace(training, chosen=chosen, standby=standby, tuner=tuner)
        self._nothing_is_read_yet()
        if tuner is not None:
            self.set_workers(tuner.workers or self.num_workers)

    def _show_share(self) -> None:
        """Show Lightning the sampler that shares out an order among ranks, as ``sampler``.

        With a batch sampler, torch puts a sequential sampler there, which Lightning would share out
        again; so it would do with a sampler that splits itself and is not of torch's class.
        """
        if isinstance(self.dataset, IterableDataset):
            return
        share: DistributedSampler[Any] | None = samplers.share_in(self.batch_sampler)
        share = samplers.split_of(order_of(self)) if share is None else share
        if share is not None and not isinstance(self.sampler, DistributedSampler):
            vars(self)["sampler"] = share

    def _nothing_is_read_yet(self) -> None:
        self._reported: int | None = None
        """Number of batches that ``len()`` has told last; None: nobody has asked for it."""
        self._turn = Turn()
        self._epoch_cell = EpochCell()
        self._passes = Passes()
        self._asked_for: weakref.ref[position.CountedBatches] | None = None
        """The iterator that was asked for last; None: there was none yet."""
        self._told_loose = False
        self._opened = False
        """Whether ``iter()`` drew a base seed, and the epoch is still to begin."""
        self._indices: EpochIndices | None = None
        self._ledger = Ledger()
        self.records: deque[BatchStamps] | None = None
        """Deque to which the stamps of delivered batches are appended; None: none are taken."""
        self.tuning_records: deque[BatchStamps] | None = None

    def check_worker_number_rationality(self) -> None:
        """Warn of more workers than CPUs, for torch's only; this package's often just wait."""
        if kind_of(self.executor).is_torch:
            super().check_worker_number_rationality()

    def __len__(self) -> int:
        """Return the number of batches that dataset and sampler report."""
        settle_ranks(self.dataset)
        reading = None if self._asked_for is None else self._asked_for()
        if reading is None or not reading.is_read:
            self._take_over()
        length = super().__len__()
        vars(self)["_reported"] = length
        return length

    def __iter__(self) -> Iterator[Batch_co]:  # type: ignore[override]
        """Return the batches of an epoch, which begins when the first of them is asked for.

        Order and randomness are those of ``epoch()``.
        """
        run, original = self.training.run, self.training.original
        # Lightning counts batches from here on; its count of taken ones may need correction.
        resumed = None if run is None else run.resumed(self)
        order = order_of(self)
        ahead = self.num_workers or self.training.chosen or type(order) is BatchSampler
        ahead_of = order if ahead else None
        if original is not None and original.batches is not None:
            ahead_of = original.batches
        watch = self._state_watch()
        by_index = not isinstance(self.dataset, IterableDataset)
        goes_on = not self.begun and (resumed is not None or self._passes.is_loaded)
        if run is not None and resumed is not None:  # a loader may be made anew in a later epoch
            goes_on &= resumed.epoch >= run.place().epoch
        begin = partial(self._begin, None if goes_on else self._draw())
        batches = position.CountedBatches(
            begin, self._tell_again, self, watch, ahead_of, self._passes, by_index=by_index
        )
        vars(self)["_asked_for"] = weakref.ref(batches)
        return batches

    def _draw(self) -> torch.Generator | None:
        """Draw a base seed, as torch does at ``iter()``; return the generator as it was before.

        None: torch draws none, as workers are kept, or DataPipes draw more, when the pass begins.
        """
        kept = self.keeps is True and self._inner is not None
        if kept or isinstance(self.dataset, IterDataPipe | MapDataPipe):
            return None
        before = (self.generator or torch.default_generator).clone_state()
        draw_base_seed(self.generator)
        vars(self)["_opened"] = True
        return before

    def _state_watch(self) -> StateWatch | None:
        """Return a watch for steps that change the data; None: changes are never missed."""
        here = not workers_of(self)
        given = () if self.transform is None else self.transform.made_of()
        caches = caches_in(self.dataset) if here else []
        if here and (self.training.chosen or self.num_workers):
            text = _CHANGED_WHILE_READ.format(name=type(self.dataset).__name__)
            source = order_of(self)
            order = () if is_drawn_at_start(source) else (source,)
            what = (self.dataset, self.collate_fn, given, *order)
            return StateWatch(what, text, caches, self._reads_later)
        return StateWatch(given, PIPELINE_CHANGED, caches) if here and (given or caches) else None

    def _reads_later(self) -> bool:
        """Return whether later batches of this epoch are read in the state of that time."""
        executor = self._inner.last if isinstance(self._inner, KeptExecutor) else None
        return bool(getattr(executor, "reads_later", True))

    def _begin(self, draw_from: torch.Generator | None) -> tuple[Pass, Iterator[Batch]]:
        with self._turn:
            return self._begin_pass(draw_from)

    def _begin_pass(self, draw_from: torch.Generator | None) -> tuple[Pass, Iterator[Batch]]:
        begun, training = self._next_pass(), self.training
        vars(self)["_opened"] = False
        self._passes.another_begins(self._indices)
        epoch = begun.epoch
        self._take_over()
        # Lightning sets the epoch only after it has made the iterator of a resumed run.
        number = Counted(epoch) if self.epoch is None and training.run is None else epoch
        number = first_epoch() if self.epoch is first_epoch else number
        samplers.tell_samplers(number, self.sampler, self.batch_sampler)
        notice_changes(self.dataset)
        if self.keeps and begun.state is not None and begun.state.dataset_state is not None:
            self._keep(None)  # workers that were kept have the dataset without this state
        inner = self._inner
        if isinstance(inner, KeptExecutor):
            inner.look()
        told = self._tell(begun)
        if isinstance(inner, KeptExecutor):
            inner.told = told
        settle_ranks(self.dataset)
        batches = self._batches(begun, draw_from)
        if training.tuner is not None and not begun.aside:
            batches = training.tuner.batches(batches, self)
        if training.ahead is not None and not training.is_over:
            batches = training.ahead(batches)
        self._passes.settle(begun)
        return begun, batches

    def _tell(self, begun: Pass) -> bool:
        """Tell the dataset the epoch of a pass; return whether it draws by that."""
        Passes.told = id(begun)
        self._epoch_cell.set(begun.epoch)
        return tell_epoch(self.dataset, begun.epoch)

    def _tell_again(self, begun: Pass) -> None:
        if not workers_of(self):  # they are told with each task
            self._tell(begun)

    def _take_over(self) -> None:
        """Read as the original loader would since a program has set something of it."""
        original = self.training.original
        if original is None:
            return
        for name, value in original.unseen().items():
            if name not in TAKEN_OVER:
                warnings.warn(_NOT_TAKEN_OVER.format(name=name), FastDataWarning, stacklevel=2)
                continue
            own, share = self.batch_sampler, samplers.share_in(self.batch_sampler)
            for one in (self,) if name == "collate_fn" else (self, own, share):
                if one is not None:  # torch refuses to set some of its own
                    vars(one)[name] = self.training.scaled(value) if name == "batch_size" else value
        original.see()

    @property
    def draws(self) -> bool | None:
        """Whether its samples are drawn at random; None: nobody has seen.

        The plan says so if samples were tried, else the workers that were timed as they read.
        """
        if self.plan is None or self.plan.draws is not None or self._read_by is None:
            return None if self.plan is None else self.plan.draws
        drew: bool | None = getattr(self._read_by.last, "drew", None)
        return drew

    def as_set_up(self, **changes: Any) -> Self:
        """Return a copy of the loader as it is now, with ``changes``, to make a source from.

        It has no workers, no reference to the run that takes the batches, and nothing to stage if
        that is over.
        """
        taken = copy.copy(self)
        if self.training.is_over:
            vars(taken).update(staged=None, on_device=False)
        by_key = not (isinstance(self.dataset, IterableDataset) or reads_with_torch(self))
        if is_lightnings_start(self.worker_init_fn) and (by_key or not workers_of(self)):
            vars(taken)["worker_init_fn"] = None  # each sample seeds the generators anew
        vars(taken).update(
            dict.fromkeys(_OF_WHO_TAKES),
            training=self.training.of_source(),
            sampler=samplers.as_given(self.sampler),
            **changes,
        )
        return taken

    def _rests_on(self) -> tuple[Any, ...]:
        # A tuple is compared by identity first: a dataset may have any ``==``.
        functions = (_known_by(getattr(self, name)) for name in _FUNCTIONS)
        order = order_of(self)  # a program may set the sampler in it
        drawn = is_drawn_at_start(order), samplers.may_repeat(order)
        return *functions, *drawn, *(getattr(self, name) for name in _RESTS_ON)

    def _batches(self, begun: Pass, draw_from: torch.Generator | None) -> Iterator[Batch]:
        """Begin the epoch, with the workers of the previous epoch if they persist."""
        stamped = self.records is not None and reads_with_torch(self) and stampable(self.dataset)
        if self.transform is not None:
            vars(self)["transform"] = self.transform.renewed()
        chosen = self.plan is not None and self.plan.asked.executor == "auto"
        if chosen and kind_of(self.executor).gathers and not collates_as_torch(self):
            vars(self)["executor"] = "inline"  # a program has set its collate_fn since
        settings = self.as_set_up()
        inner, rests_on = self._inner, (*settings._rests_on(), stamped)
        if inner is None or self._inner_settings != rests_on:
            wants_workers = self.num_workers > 0 or self.training.chosen
            if settings.worker_init_fn is not None and wants_workers and not workers_of(self):
                text = _NOT_CALLED.format(self.executor)
                warnings.warn(text, FastDataWarning, stacklevel=2)
            stamps = self._ledger.wait if stamped else None
            vars(self)["_indices"] = indices = indices_of(settings)
            inner = open_source(settings, indices, self._epoch_cell, stamps=stamps)
            if isinstance(inner, KeptExecutor):
                inner.record(self.all_records)
            self._keep(inner, rests_on)
        again = self._go_on(begun)
        batches = source = epoch_of(
            inner, reported=self._reported, draw_from=draw_from or self.generator
        )
        if isinstance(inner, KeptExecutor):
            begun.executor, begun.base_seed = inner.last, inner.base_seed
        if reads_with_torch(self) and not self.num_workers:
            batches = position.NamedBatches(batches)
        if stamped:
            self._ledger.records = self.records
            batches = OpenedEnvelopes(batches, self._ledger)
        if self._indices is None:
            read = position.ReadBatches(batches, begun, first=begun.handed - again)
            if again and begun.state is not None:
                by_torch = not isinstance(inner, KeptExecutor)
                position.read_again(read, begun.state, self.dataset, by_torch=by_torch)
                if self.records is not None:
                    self.records.clear()
            return read
        skips = self.on_bad_sample.policy == "skip"  # batches may then become empty
        if skips or not self.in_order:
            return position.ReadBatches(batches, begun, source, first=begun.handed)
        return batches

    @property
    def quarantine(self) -> list[int]:
        """Indices that are not read again, as they killed the process that did; may be set."""
        return sorted(self.faults.quarantine)

    @quarantine.setter
    def quarantine(self, indices: Iterable[int]) -> None:
        self.faults.quarantine.clear()
        self.faults.quarantine.update(indices)

    @property
    def all_records(self) -> deque[BatchStamps] | None:
        """Deque that passes stamps on to all that take them; None: nobody does."""
        one, other = self.records, self.tuning_records
        if one is None or other is None:
            return one if other is None else other
        return _Both(one, other)

    def record_stamps(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each batch that is delivered from now on; None: stop doing so.

        Torch's own executor begins and stops with the next iteration. It takes no stamps of
        iterable DataPipes.
        """
        # Lightning carries over what is set in a data hook if it makes the loader anew.
        self.records = self._ledger.records = records
        self._record()

    def tuning_stamps(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each batch from now on for a tuner; None: stop doing so."""
        self.tuning_records = records
        self._record()

    def _record(self) -> None:
        if isinstance(self._inner, KeptExecutor):
            self._inner.record(self.all_records)

    def setup_with(self, workers: int, *, cpus: float, step_cpus: float) -> LoaderSetup | None:
        """Return the setup with ``workers`` workers for the simulation; None: it has no model.

        Where the training process reads, it is that of the loader which is made for so many.
        """
        settings = self.as_set_up(num_workers=workers)
        auto = self.plan is not None and self.plan.asked.executor == "auto"
        if not workers_of(self) and (auto or kind_of(self.executor).caller_reads):
            vars(settings)["executor"] = "workers" if shared_slots_supported() else "torch"
        return setup_of(settings, cpus=cpus, step_cpus=step_cpus)

    def set_workers(self, workers: int) -> None:
        """Read with ``workers`` workers from now on, also in the middle of an epoch.

        Order and content of the batches stay. It needs ``"workers"`` or ``"ray"``, and an index.

        Raises:
            OptionsError: ``workers`` is below 1, or this loader is read by others, or by none.
            WorkerError: They cannot be started, or the dataset now holds objects that forked
                processes must not share.
        """
        go = kind_of(self.executor).side_processes and not isinstance(self.dataset, IterableDataset)
        if workers < 1 or not self.num_workers or not go:
            raise OptionsError(
                f"set_workers({workers!r}) of a loader with executor={self.executor!r} and "
                f"num_workers={self.num_workers}: only 'workers' and 'ray' of a map-style dataset "
                "come and go, and 1 or more stay. Make a new loader."
            )
        inner, self.num_workers = self._inner, workers
        if isinstance(inner, KeptExecutor) and self._inner_settings is not None:
            settings = self.as_set_up()
            inner.resize(workers, batches_ahead(settings, workers))
            rests_on = (*settings._rests_on(), self._inner_settings[-1])
            vars(self)["_inner_settings"] = rests_on

    def _keep(self, inner: Source | None, settings: tuple[Any, ...] | None = None) -> None:
        # Lightning records the attributes that are set on loaders in a data hook, and goes on to do
        # so in the whole process if the hook raises. A record would keep the workers alive.
        vars(self).update(_inner=inner, _inner_settings=settings)
        if inner is not None:
            # Torch's own loader knows no position, and its wrappers for stamps must not be kept.
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

    def state_dict(self) -> dict[str, Any]:
        """Return how far the training has come in the batches: plain data, below 2 kB.

        :meth:`load_state_dict` goes on from it, in any process, with any executor and number of
        workers. After the last batch of an epoch it is the start of the next one. A dataset or a
        sampler that has a ``state_dict()`` of its own adds that.
        """
        return self.state_behind(0)

    def state_behind(self, ahead: int) -> dict[str, Any]:
        """Return the state as of ``ahead`` batches before the last one that was handed out.

        It is for a plain loop that takes batches ahead of their use.
        """
        epoch, batches, found = self._passes.now(self._run_now(), self._length(), ahead)
        if isinstance(found, Pass) and not batches and found.state is not None:
            # Larger batches than before leave a whole epoch of them: no number tells the place.
            found = found.state if found.state.samples and not found.state.batches else found
        if isinstance(found, Position):
            return found.as_dict()
        reached, late, digest = (None, [], None) if found is None else found.behind(batches)
        indices = self._indices_now(found)
        state = replace(
            position.as_it_is(self, indices),
            epoch=epoch,
            batches=batches,
            passes=0 if found is None else found.passes,
            reached=reached,
            late=late,
            digest=digest,
            quarantine=self.quarantine,
            bad=self.faults.bad,
        )
        inner = self._read_by
        if isinstance(inner, KeptExecutor):
            begun = self._passes.current
            seed = inner.base_seed if begun is None else begun.base_seed
            state = replace(state, base_seed=seed, draws=inner.draws)
            if indices is None and begun is not None:
                if found is begun:
                    state = replace(state, lanes=inner.lanes(begun.executor, batches, over=False))
                elif begun.epoch == epoch - 1:
                    taken = 0 if begun.exhausted else None
                    state = replace(state, lanes=inner.lanes(begun.executor, taken, over=True))
        if indices is not None:
            state = position.with_indices(state, indices, opened=self._opened)
        if not (state.is_known or self._told_loose):
            vars(self)["_told_loose"] = True
            position.tell_loose(self)
        return replace(state, dataset_state=position.dataset_state(self.dataset)).as_dict()

    def progress(self) -> tuple[int, int]:
        """Return the epoch, counted from 0, and the number of its samples that all ranks took."""
        epoch, batches, found = self._passes.now(self._run_now(), self._length())
        if isinstance(found, Position):
            return epoch, self._of_all_ranks(found)
        indices = self._indices_now(found)
        samples = None if indices is None else indices.samples(epoch, batches)
        return epoch, (samples or 0) * ranks_aside(order_of(self))

    def _of_all_ranks(self, state: Position) -> int:
        """Return how many samples all ranks there were had taken when a state was saved."""
        ranks = state.world_size if ranks_aside(order_of(self)) > 1 else 1
        return max(0, state.samples) * ranks

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on after the last batch before a state was saved.

        Raises:
            OptionsError: It is no state of a loader, or one of another version.
        """
        self._passes.load(Position.from_dict(state))

    @property
    def begun(self) -> bool:
        """Whether a batch was asked for, since the loading of a state if there was one."""
        return self._passes.current is not None

    def cut_anew(self, state: Position) -> Position:
        """Return a state of this loader with its position in batches of the present size."""
        indices = self._indices_now()
        if indices is None:
            return state
        return position.cut_anew(state, position.as_it_is(self, indices), indices)

    def _indices_now(self, begun: Pass | None = None) -> EpochIndices | None:
        if begun is not None and begun.indices is not None:
            return begun.indices
        return indices_of(self.as_set_up()) if self._indices is None else self._indices

    def _next_pass(self) -> Pass:
        run = self.training.run
        goes_on = run is None or (run.began and not run.over)
        run = self._run_now()
        if run is not None and goes_on:
            return self._passes.next_pass_of(run, self, self.epoch)
        # Before and after its training a run has no epochs: passes are counted, as in a plain loop.
        epoch = self.epoch if goes_on else None
        told = position.sampler_epoch(self), epoch_set_on(self.dataset)
        return self._passes.next_pass(epoch, *told)

    def _run_now(self) -> Run | None:
        """Return the run that takes the batches of this loader; None: a plain loop takes them."""
        run = self.training.run
        return run if run is not None and run.began and run.takes(self) else None

    def _go_on(self, begun: Pass) -> int:
        """Have the pass begin at its position; return how many batches of a stream to reread."""
        state, indices, inner = begun.state, self._indices, self._inner
        # Lightning's checkpoints have the state of rank 0, and all ranks go on from it.
        if state is not None and state.rank not in ([], list(rank_now())):
            state = begun.state = position.of_other_rank(state, self.dataset)
        if state is not None:
            position.restore_dataset(self.dataset, state, self._of_all_ranks(state))
            self.quarantine = sorted({*self.quarantine, *state.quarantine})
            self.faults.count_in(state.bad)
            position.check_order(state)
            if isinstance(inner, KeptExecutor):
                inner.go_on_from(state.base_seed, epoch=state.epoch, within=state.batches > 0)
        if indices is not None:
            indices.epoch, indices.earlier = begun.epoch, begun.passes
            if state is not None and self._run_now() is None:  # of a run, this was done before
                begun.state = self.cut_anew(state)
                begun.handed = begun.state.batches
            indices.start = position.start_of(begun, position.as_it_is(self, indices), indices)
            return 0
        return 0 if state is None else self._go_on_in_stream(state)

    def _go_on_in_stream(self, state: Position) -> int:
        """Have a stream go on at a state; return how many batches have to be read again first."""
        inner, now, lanes = self._inner, position.as_it_is(self, None), state.lanes or []
        if state.draws:
            position.tell_draws(self.dataset)
        if state.samples < 0:
            position.tell_unknown(state, f"with batch {state.batches} of the stream")
        elif state.batches:
            position.check_stream(state, now)
        kept = inner if isinstance(inner, KeptExecutor) else None
        lives_on = self.keeps is True or not self.num_workers if kept is None else kept.keep
        keeps_state = tells_state if kept is None else may_tell_state
        if kept is not None and len(lanes) == now.parts and (state.batches or lives_on):
            kept.go_on_in_stream(lanes)
        elif state.batches:
            return state.batches
        elif state.epoch and lives_on and keeps_state(self.dataset):
            why = position.why_new(state, now, by_torch=kept is None)
            position.tell_new_stream(self.dataset, state, why)
        return 0

    def _length(self) -> int | None:
        if isinstance(self.dataset, IterableDataset):
            return None  # a stream may give more or fewer batches than it says
        begun = self._passes.current
        indices = None if begun is None else self._indices_now(begun)
        if indices is not None and indices.whole is not None:
            return indices.whole
        try:
            return len(self)
        except Exception:  # whatever a sampler's own method raises
            return None

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes belong to one loader; a copy starts its own.
        gone = (
            "_inner",
            "_read_by",
            "_inner_settings",
            "_indices",
            "_asked_for",
            "records",
            "tuning_records",
        )
        training = replace(self.training, tuner=None)
        return {**self.__dict__, **dict.fromkeys(gone), "training": training, "_ledger": Ledger()}


_OF_WHO_TAKES: Final = ("epoch", "plan", "_passes")
_FUNCTIONS: Final = ("collate_fn", "worker_init_fn")
_NOT_OF_SOURCE: Final = {"self", "shuffle", "split", *_OF_WHO_TAKES, *_FUNCTIONS}
_RESTS_ON: Final = (
    *(name for name in signature(FastDataLoader).parameters if name not in _NOT_OF_SOURCE),
    *("asked_prefetch_factor", "keeps", "faults"),
)
"""Names of the settings, besides functions, that decide which batches the source gives."""


def _asked(
    executor: AnyExecutor | Literal["auto"] | None,
    num_workers: int | Literal["auto"] | None,
    worker_init_fn: object,
) -> tuple[AnyExecutor | Literal["auto"], int | Literal["auto"], bool]:
    """Return the executor, the number of workers, and whether the caller asked for no workers."""
    if num_workers is None:
        kind = find_kind(executor)
        num_workers = "auto" if kind is not None and kind.elsewhere else 0
    if executor is None and num_workers == "auto" and not may_start_processes():
        if worker_init_fn is not None:
            warnings.warn(_NOTHING_STARTS, FastDataWarning, stacklevel=3)
        return "torch", 0, False
    return executor or "auto", num_workers, num_workers == 0

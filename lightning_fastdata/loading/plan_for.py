"""A loader that is to be made, and its plan: every setting, with the reason for each."""

from __future__ import annotations

import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from torch.utils.data import IterableDataset, TensorDataset

from lightning_fastdata.batches.bad_samples import BadSamples
from lightning_fastdata.batches.memory import shared_slots_supported
from lightning_fastdata.device.backend import default_type, reads_page_locked
from lightning_fastdata.errors import FastDataWarning, OptionsError, rounded
from lightning_fastdata.executors.fetch import AT_START_BYTES, copy_limit_bytes
from lightning_fastdata.executors.kinds import (
    KINDS,
    AnyExecutor,
    ExecutorName,
    kind_of,
    room_elsewhere,
    unsuited,
)
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.memory import read_host_memory, size_text
from lightning_fastdata.loading.facts import (
    MOST_WAITING,
    OF_MEMORY,
    DatasetFacts,
    Questions,
    inspect_dataset,
)
from lightning_fastdata.loading.options import LoaderOptions
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.order.indices import may_tell_state
from lightning_fastdata.order.samplers import is_drawn_at_start

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lightning_fastdata.executors.kinds import ExecutorKind
    from lightning_fastdata.host.cpu import CpuLimit
    from lightning_fastdata.host.memory import HostMemory
    from lightning_fastdata.loading.facts import SampleCost
    from lightning_fastdata.types import Stage

# Side processes are started to save a fifth of the time of a batch: less is not certain enough, as
# they also wait for each other and for CPUs.
_WORTH_IT: Final = 0.8
_PIN: Final = "page-locked memory speeds up copies to GPUs with memory of their own"
_KEEP: Final = "kept while what they read stays as it is; else they start anew, as torch has it"
_NOT_KEPT: Final = "they start anew in each epoch, as torch has it"
_NO_SHARED: Final = "this system has no memory files for side processes"
_UNSURE_MS: Final = 3  # most time to read a batch here, where that may be quicker
_SURE: Final = 0.35
_BOTH: Final = "; the training process reads, too, as long as nothing changes what it reads"
_AT_START_S: Final = 0.25  # most time of an epoch that is read at once when it begins
_ROWS: Final = "its batches are rows of numbers, copied with one call per column"
SET: Final = "set by you"
_NO_WORKERS: Final = "not used: no workers"
_FIRST_ACTORS: Final = 8  # each takes seconds to start, and a CPU that others may want
_SHORTEST_WAIT_MS: Final = 0.2  # to hand a sample out and take it back waits for about as long
_HANDOVER_MS: Final = 0.1  # CPU time for the messages of a sample, its key, its copy into the batch
_LOOK_AHEAD_BATCHES: Final = 8  # under way together; enough to cover one slow batch
# CPU time measured by benchmarks/handing_over.py where ``SampleCost.pace`` is 1: the training
# process gives out a batch and takes it in, a side process handles it besides reading and
# collating, a generator is seeded for a sample that draws from one.
_GIVE_MS, _GIVE_ROW_MS = 0.17, 0.0006
_TAKE_MS, _TAKE_ROW_MS = 0.16, 0.0016
_KEY_MS: Final = 0.006
_EPOCHS: Final = 10  # taken as those of a training, where workers are kept
_FORK_MS: Final = 60  # to start a process and to end it; measured as those above
_FRESH_MS: Final = 2500  # to start and to end a process that imports torch anew
_SURELY_LESS: Final = 0.9  # share of an epoch's time below which fewer workers surely pay
_FEWEST_OF_STREAM: Final = 4
_FORKED_BYTES: Final = 48 * 2**20  # a forked process shares its parent's pages
_FRESH_BYTES: Final = 400 * 2**20  # a process that imports torch anew
_ONE_STREAM: Final = (
    "num_workers is 1 of {count} possible, because several workers may each read the whole stream, "
    "so that samples would come several times: {why}. If the dataset divides itself among them "
    "(torch.utils.data.get_worker_info), set num_workers={count}, or split=True; otherwise set "
    "split=False, and this message goes away."
)
_BEGINS_ANEW: Final = (
    "each sample that is read changes {kind} (where it is in its data, a generator, a count), but "
    "workers begin each epoch with a copy of what it is here, as torch's do: an epoch that is left "
    "early may read the same samples again. Set persistent_workers=True to have it go on in them, "
    "num_workers=0 to have it go on here, or persistent_workers=False if it is right as it is."
)
_OF_WORKERS: Final = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")
"""Options that torch refuses where there are no workers."""


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """A loader that is to be made: what its plan rests on, besides this machine."""

    dataset: Dataset[Any]
    name: str
    """How the user knows the dataset, e.g. ``"Photos.train_dataset()"``."""
    options: LoaderOptions
    stage: Stage = "train"
    batch_size: int | None
    """Samples in a batch of this rank; None: single samples, or batches of unknown size."""
    pipelines: tuple[Any, ...] = ()  # Albumentations pipelines that the dataset calls itself
    transformed: bool = False  # whether a pipeline of the loader runs on each sample
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Collation of the user; None: the default one, if samples are put together."""
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    """Batch sampler, which like ``sampler`` gives the keys of samples; None: numbers from 0."""
    worker_init_fn: Callable[[int], None] | None = None
    """Function called in each worker with its number; it may give a stream's copy its part."""
    keeps: bool = True
    """Whether workers are kept between epochs, if the options leave it open."""

    @property
    def is_stream(self) -> bool:
        """Whether the dataset has no index."""
        return isinstance(self.dataset, IterableDataset)

    @cached_property
    def length(self) -> int | None:
        """Number of samples in the dataset; None: not known."""
        return dataset_length(self.dataset)

    @property
    def samples(self) -> int | None:
        """Number of samples that an epoch reads, as the sampler says; None: not known."""
        if not self.has_order:
            return self.length
        items = dataset_length(self.sampler if self.batch_sampler is None else self.batch_sampler)
        rows = 1 if self.batch_sampler is None else self.batch_size or 1
        return None if items is None else items * rows

    @property
    def batches(self) -> int | None:
        """Number of batches in an epoch; None: not known."""
        return None if self.samples is None else math.ceil(self.samples / (self.batch_size or 1))

    @property
    def default_collation(self) -> bool:
        """Whether samples are put together as torch does by default."""
        return self.collate_fn is None and self.batch_size is not None

    @property
    def has_order(self) -> bool:
        """Whether the user says which samples come in which order."""
        return self.sampler is not None or self.batch_sampler is not None

    @property
    def drawn_at_start(self) -> bool:
        """Whether the order of an epoch is sure when it begins: no step has a part in it."""
        source = self.sampler if self.batch_sampler is None else self.batch_sampler
        return source is None or is_drawn_at_start(source)

    @property
    def needs_cost(self) -> bool:
        """Whether the options leave something open that rests on what samples cost."""
        executor = self.options.executor
        if executor == "auto":
            return True
        return self.options.num_workers == "auto" and not kind_of(executor).is_torch

    @property
    def needs_trial(self) -> bool:
        """Whether samples are read beforehand; a given number of workers needs no cost."""
        return self.needs_cost and self.options.num_workers in ("auto", 0)

    @property
    def is_open(self) -> bool:
        """Whether the options leave it open who reads."""
        return bool(self.options.num_workers == self.options.executor == "auto")

    @property
    def may_be_here(self) -> bool:
        """Whether the training process may read if workers cannot.

        A ``worker_init_fn`` needs workers, and may open anew what they cannot share.
        """
        return self.is_open and self.worker_init_fn is None

    @property
    def reads_here(self) -> bool:
        """Whether the options have the training process read samples itself."""
        executor = self.options.executor
        if self.options.num_workers == 0:
            return True
        return executor != "auto" and kind_of(executor).caller_reads


class ExecutorChoice(NamedTuple):
    """The executor that suits a dataset."""

    executor: ExecutorName
    why: str
    few: bool = False
    """Whether one worker is enough, where it is open how many, as reading is next to free."""
    standby: bool = False
    """Whether the training process may read, too, while the workers stand by."""
    kept: bool = False
    """Whether the training process reads because the dataset keeps what it has read."""


TORCH: Final = ExecutorChoice("torch", KINDS["torch"].what)
"""Choice where nothing asks for another executor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the plan of a loader rests on besides the loader and its dataset."""

    cpu: CpuLimit  # CPUs of this rank
    memory: HostMemory  # memory of this host, shared by its ranks
    accelerator: str  # "cpu", "cuda", "mps" or another device type
    start_method: str = "fork"  # Python's default for processes
    shared_memory: bool = True  # whether there are memory files for side processes (Linux)
    actors: int | None = None  # number that a cluster has room for; None: none are to read


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """The options one loader runs with, each with its reason."""

    asked: LoaderOptions
    options: LoaderOptions
    """Options as decided; ``"auto"`` is left to whoever reads: ``timeout`` follows the tasks."""
    reasons: Mapping[str, str]
    """Reasons for what was open, by option."""
    tuned: bool
    """Whether the number of workers is changed while they read."""
    limits: tuple[str, ...]
    """What this machine cannot give, and how to lift that; each is worth a ``FastDataWarning``."""
    draws: bool | None = None
    """Whether reading a sample draws at random; None: not known."""
    standby: bool = False
    """Whether the training process reads, too, as long as what is read is as it was when the epoch
    began. Which way is quicker is measured."""
    only_here: bool = False
    """Whether the training process reads as with torch: no side process can, or data is kept."""
    as_torch: frozenset[str] = frozenset()
    """Options that are as torch's DataLoader has them where nothing is given."""

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return cast("int", self.options.num_workers)

    @property
    def executor(self) -> AnyExecutor:
        """Who fetches."""
        return self.options.executor

    @property
    def start_method(self) -> str | None:
        """How workers are started; None: as Python has it."""
        method = self.options.multiprocessing_context
        return None if method == "auto" else method

    def explain(self) -> str:
        """Return a table of option, value, who chose it and why, followed by the limits."""
        rows = [("option", "value", "by", "why")]
        theirs = self.asked.set_by_user()
        for name in (field.name for field in fields(LoaderOptions)):
            by = ("auto", self.reasons.get(name, "the default"))
            if name in self.as_torch:
                by = ("torch", "the default of its DataLoader")
            elif name in theirs:
                unused = name in _OF_WORKERS and not self.num_workers
                by = ("you", _NO_WORKERS if unused else SET)
            rows.append((name, str(getattr(self.options, name)), *by))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows]
        return "\n".join([*lines, *(f"limit: {limit}" for limit in self.limits)])

    def loader_arguments(self) -> dict[str, Any]:
        """Return what was decided as keyword arguments of a FastDataLoader."""
        unused = {"probe", *(() if self.num_workers else _OF_WORKERS)}
        values = {f.name: getattr(self.options, f.name) for f in fields(LoaderOptions)}
        return {n: value for n, value in values.items() if value != "auto" and n not in unused}


def plan_for(
    spec: LoaderSpec,
    facts: DatasetFacts | None = None,
    *,
    accelerator: str | None = None,
    local_ranks: int = 1,
) -> LoaderPlan:
    """Read the limits of this machine, and make the plan of a loader.

    The facts that it rests on are found out now, with their warnings, unless ``facts`` are given.
    ``accelerator`` is ``"cpu"``, ``"cuda"`` or another device type (None: that of this machine),
    ``local_ranks`` the training processes on this host.
    """
    if facts is None:
        facts = inspect_dataset(spec, Questions(cost=spec.needs_trial))
        for warning in facts.warnings:
            warnings.warn(f"{spec.name}: {warning}", FastDataWarning, stacklevel=3)
    asked, actors = spec.options.executor, None
    if asked != "auto" and spec.options.num_workers == "auto" and not spec.is_stream:
        actors = room_elsewhere(asked, local_ranks)
    machine = Machine(
        cpu=read_cpu_limit(local_ranks=local_ranks),
        memory=read_host_memory(),
        accelerator=default_type() if accelerator is None else accelerator,
        start_method=multiprocessing.get_start_method(),
        shared_memory=shared_slots_supported(),
        actors=actors,
    )
    return Planner(spec, facts, machine).decide()


@dataclass(frozen=True, slots=True)
class Planner:
    """Decides every option of a loader. Reads nothing: the same arguments give the same plan."""

    spec: LoaderSpec
    facts: DatasetFacts
    machine: Machine

    @property
    def _forked(self) -> bool:
        """Whether side processes are forked."""
        asked = self.spec.options.multiprocessing_context
        return (self.machine.start_method if asked == "auto" else asked) == "fork"

    @property
    def _may_stand_by(self) -> bool:
        """Whether the training process may read what forked workers stand by for."""
        forks = self._forked and self.machine.shared_memory
        auto = self.spec.options.executor == "auto"
        return forks and auto and not self.facts.changes and self.spec.drawn_at_start

    @property
    def _starting_ms(self) -> float:
        """Milliseconds of each epoch that go into starting one worker.

        A worker that is kept is started once in a training. To start computes, so that it takes
        longer by the factor by which others have the CPUs.
        """
        cost, spec = self.facts.cost, self.spec
        slower = cost.pace * cost.crowded if cost else 1.0
        once_ms = (_FORK_MS if self._forked else _FRESH_MS) * slower
        kept = spec.keeps and spec.stage in ("train", "val")
        if spec.options.persistent_workers != "auto":
            kept = bool(spec.options.persistent_workers)
        return once_ms / _EPOCHS if kept else once_ms

    def decide(self, chosen: ExecutorChoice | None = None) -> LoaderPlan:
        """Decide every option of the loader.

        What the user set always wins, and gets a limit message where it cannot work. ``chosen`` is
        the executor that suits the dataset; None: that of :meth:`choose_executor`.

        Raises:
            OptionsError: Workers were set for a stream that they could not read.
        """
        spec, facts = self.spec, self.facts
        options, stream = spec.options, facts.stream
        if stream is not None and stream.here and options.num_workers not in ("auto", 0):
            raise OptionsError(
                f"{spec.name} has num_workers={options.num_workers}, but {stream.why}: they would "
                "wait for ever. Leave num_workers out; Ray's own settings say how many tasks read."
            )
        if chosen is None:
            chosen = self.choose_executor()
        executor = chosen.executor if options.executor == "auto" else options.executor
        kind = kind_of(executor)
        ours = not (kind.is_torch or spec.is_stream)
        count, why, limits = self._count_workers(chosen, kind)
        untuned = self._why_untuned(chosen, executor, count)
        tuning = f"not tuned: {untuned}" if untuned else "tuned as the steps show what pays"
        kept = count > 0 and spec.keeps and spec.stage in ("train", "val") and ours
        goes_on = stream is not None and stream.keeps and spec.stage == "train"
        if goes_on and count and options.persistent_workers == "auto":
            limits = [*limits, _BEGINS_ANEW.format(kind=type(spec.dataset).__name__)]
        found: dict[str, tuple[object, str]] = {
            "num_workers": (count, f"{why}; {tuning}"),
            "pin_memory": (reads_page_locked(self.machine.accelerator), _PIN),
            "persistent_workers": ("unchanged", _KEEP) if kept else (False, _NOT_KEPT),
            "prefetch_factor": self._prefetch(kind, count) if count else ("auto", _NO_WORKERS),
            "multiprocessing_context": ("auto", "left as Python has it"),
            "timeout": ("auto", "60 s without progress, or 20 times as long as tasks take"),
            "executor": (chosen.executor, chosen.why),
        }
        if stream is not None:
            found["split"] = stream.splits, stream.why
        open_ = {name: found[name] for name in found.keys() - options.set_by_user()}
        return LoaderPlan(
            asked=options,
            options=replace(options, **{name: value for name, (value, _) in open_.items()}),  # type: ignore[arg-type]
            reasons={name: why for name, (_, why) in open_.items()},
            tuned=not untuned,
            limits=(*limits, *unsuited(options.executor, iterable=spec.is_stream, workers=count)),
            draws=bool(spec.pipelines) or facts.draws or (None if facts.cost is None else False),
            standby=chosen.standby and options.num_workers == "auto" and count > 0,
            only_here=facts.here is not None or chosen.kept,
        )

    # Who fetches

    def choose_executor(self) -> ExecutorChoice:
        """Return the executor that suits a dataset, and why.

        ``num_workers=0`` is a wish to fetch in the training process, a higher number one for
        workers, also where the samples that were read are cheap: others may not be.

        Where the number of workers is left open, an epoch is to be read as things are when it
        begins, as workers read it. The training process itself can do that with what it can read,
        or copy, at once when the epoch begins.
        """
        spec, facts, workers = self.spec, self.facts, self.spec.options.num_workers
        if facts.stream is not None and facts.stream.here:
            return ExecutorChoice("inline", facts.stream.why)
        if not spec.needs_cost:
            return TORCH
        if spec.is_stream and workers != 0:
            aside: ExecutorName = "workers" if self.machine.shared_memory else "torch"
            return ExecutorChoice(aside, "each process reads its own stream")
        keyed = facts.draws or bool(spec.pipelines)
        if workers == 0:
            # Keys for draws that are not made would cost each step of the training some 20 us.
            keyed |= spec.transformed or BadSamples.of(spec.options.on_bad_sample) != BadSamples()
            # torch's iterator gives nobody the state of a stream, nor that of its iterator.
            keyed |= spec.is_stream and may_tell_state(spec.dataset)
            here: ExecutorName = "inline" if keyed else "torch"
            return ExecutorChoice(here, "num_workers=0 asks for the training process")
        if isinstance(workers, int):
            return self._aside(f"num_workers={workers} asks for them")
        if facts.here is not None:
            return ExecutorChoice("inline", facts.here)
        if spec.worker_init_fn is not None:
            return self._aside("its worker_init_fn is called in them alone")
        if spec.options.persistent_workers is True:  # they have the dataset of the first epoch
            return self._aside("persistent_workers=True asks for them")
        if facts.rows:
            much = f"a forked process has {facts.own_bytes / 2**20:,.0f} MiB as they are"
            large = facts.own_bytes > copy_limit_bytes()
            return self._cheap("gather", _ROWS, much if large else None)
        if facts.cost is None:
            return self._aside("what a sample costs is not known")
        if spec.transformed:  # which is not part of what was measured
            return self._aside("a pipeline of augment= runs on each sample")
        return self._by_cost(facts.cost, keyed=keyed)

    def _aside(self, why: str) -> ExecutorChoice:
        """Return side processes as the choice: torch's where the system lacks what ours need."""
        if self.machine.shared_memory:
            return ExecutorChoice("workers", why)
        return ExecutorChoice("torch", f"{why}; {_NO_SHARED}")

    def _by_cost(self, cost: SampleCost, *, keyed: bool) -> ExecutorChoice:
        """Return the executor with which an epoch of samples of this cost ends sooner, and why."""
        spec, again = self.spec, self.facts.cost_again
        batch_size, cpus = spec.batch_size or 1, self.machine.cpu.usable_cpus
        alone, start_ms = alone_ms(cost, batch_size, keyed=keyed), self._starting_ms
        _, shared = soonest_workers(
            cost,
            batch_size,
            cpus=cpus,
            most=MOST_WAITING if waits(cost) else cpus,
            batches=spec.batches,
            start_ms=start_ms,
            keyed=keyed,
        )
        if again is not None:  # workers would begin each epoch anew, with nothing kept
            again_ms = alone_ms(again, batch_size, keyed=keyed)
            if (alone + (_EPOCHS - 1) * again_ms) / _EPOCHS < shared:
                return ExecutorChoice(
                    "inline",
                    "the dataset keeps what it has read: a batch takes "
                    f"{rounded(alone, 2)} ms here at first, and {rounded(again_ms, 2)} ms again; "
                    "by workers, which begin each epoch with nothing kept, "
                    f"{rounded(shared, 2)} ms",
                    kept=True,
                )
        said = (
            f"a batch takes {rounded(alone, 2)} ms here and some {rounded(shared, 2)} ms by side "
        )
        said += "processes" + (", with their start" if start_ms else "")
        wait_ms, wall_ms = rounded(cost.wait_ms, 2), rounded(cost.wall_ms, 2)
        said += f"; a sample waits {wait_ms} of its {wall_ms} ms" if waits(cost) else ""
        if shared < _WORTH_IT * alone:
            unsure = alone < _UNSURE_MS and shared > _SURE * alone and not waits(cost)
            if unsure and self._may_stand_by:
                return ExecutorChoice("workers", said + _BOTH, standby=True)
            return self._aside(said)
        samples = math.inf if spec.samples is None else spec.samples
        read_bytes = samples * (cost.size_bytes or 0)
        read_s = samples / batch_size * alone / 1000
        much = None
        if read_bytes > AT_START_BYTES:
            much = f"a forked process reads {read_bytes / 2**20:,.0f} MiB as they are"
        elif read_s > _AT_START_S:
            much = f"a forked process reads {rounded(read_s, 2)} s of samples as they are"
        return self._cheap("inline", said, much, quicker=alone <= shared)

    def _cheap(
        self, here: ExecutorName, why: str, much: str | None, *, quicker: bool = True
    ) -> ExecutorChoice:
        """Return who reads what the training process itself could read by the executor ``here``.

        The training process does so if it can read, or copy, an epoch at once when that begins:
        later steps may have changed what is read, which a forked process has as it was. Others take
        seconds to start. ``much``: who reads instead, if an epoch is too much for that; None: it is
        not. ``quicker``: whether no number of workers is expected to be quicker.
        """
        aside = much
        if not self.spec.drawn_at_start:
            aside = "its sampler is asked while the training runs"
        elif much is None and self.facts.changes:
            aside = "to read it changes it, or that cannot be seen: a forked process has a copy"
        elif much is None and not self.spec.default_collation:  # the default one copies
            aside = "a batch may be memory of the dataset, which a forked process has as it was"
        if aside is None or not (self._forked and self.machine.shared_memory):
            return ExecutorChoice(here, why)
        standby = self._may_stand_by
        said = f"{why}; {aside}{_BOTH if standby else ''}"
        # Which way is quicker is measured, with as many workers as may win.
        return ExecutorChoice("workers", said, few=quicker or not standby, standby=standby)

    # How many workers

    def _count_workers(
        self, chosen: ExecutorChoice, kind: ExecutorKind
    ) -> tuple[int, str, list[str]]:
        """Return how many workers there are, why, and what bounds them."""
        spec, facts, machine = self.spec, self.facts, self.machine
        options, batches = spec.options, spec.batches
        ours = not (kind.is_torch or spec.is_stream)
        if options.num_workers != "auto":
            return options.num_workers, SET, []
        if facts.stream is not None and facts.stream.here:
            return 0, facts.stream.why, []
        if kind.workers is not None and not spec.is_stream:
            return *kind.workers, []
        if machine.actors is not None:
            return *self._actors(machine.actors), []
        in_memory = isinstance(spec.dataset, TensorDataset) and not ours
        in_memory &= spec.worker_init_fn is None  # which needs workers
        if (in_memory or chosen.few) and (options.executor == "auto" or kind.is_torch):
            cheap = "fetching a batch costs less than handing it over"
            # A side process reads things as they were when the epoch began.
            return (1, f"{cheap}: more have no use", []) if chosen.few else (0, cheap, [])
        count, why = self._computing_workers()
        if spec.is_stream and count > 1 and options.split is False:
            return 1, "several would each read the whole stream (split=False)", []
        if spec.is_stream and count > 1:
            return self.workers_of_stream(count, why)
        cost, size = facts.cost if ours else None, spec.batch_size or 1
        if cost is not None and count and waits(cost):
            count, why = self.workers_that_wait(count, cost)
        elif cost is not None and (enough := alone_ms(cost, size) / _gives_ms(cost, size)) < count:
            count, why = (
                max(1, math.ceil(enough)),
                "the training process could not take the batches of more",
            )
        if cost is not None and count > 1:
            soonest, _ = soonest_workers(
                cost,
                size,
                cpus=machine.cpu.usable_cpus,
                most=count,
                batches=batches,
                start_ms=self._starting_ms,
            )
            if soonest < count:
                why += f"; to start more takes longer than they save in {batches} batches"
                count = soonest
        return self._within_memory(count, why)

    def _computing_workers(self) -> tuple[int, str]:
        """Return how many workers keep the CPUs of this rank busy with samples that compute.

        Workers of training that stay alive during validation sleep when they are ahead, so that
        validation has as many.
        """
        cpu, batches = self.machine.cpu, self.spec.batches
        count, why = cpu.usable_cpus, "the training process mostly waits for the device"
        if self.machine.accelerator == "cpu":
            # A worker that is ahead sleeps, and a late one has the CPU that the model waits on.
            why = "one for each CPU, which the model takes back as long as batches are ready"
        elif count > 2:
            count, why = count - 1, "one CPU is left for the training process"
        if batches is not None and batches < count:
            return batches, f"no more than there are batches ({batches})"
        return count, f"{why} ({cpu.reason})"

    def _actors(self, room: int) -> tuple[int, str]:
        """Return with how many actors a loader begins, and why; those of training are tuned then.

        ``room``: number of actors for which the cluster has CPUs, beside the training process.
        """
        count, batches = min(room, _FIRST_ACTORS), self.spec.batches
        count = max(1, count // 2) if self.spec.stage == "val" else count
        if batches is not None and batches < count:
            return max(1, batches), f"no more than there are batches ({batches})"
        return count, f"the cluster has CPUs for {room}"

    def workers_of_stream(self, computing: int, why: str) -> tuple[int, str, list[str]]:
        """Return how many workers read a stream, why, and what to report where it is not known.

        ``computing``, more than one, is their number if there were an index. They are four at least
        unless the stream was seen to compute: streams often wait.
        """
        stream = self.facts.stream
        if stream is None or not stream.splits:
            unseen = "it was not looked at" if stream is None else stream.why
            limit = _ONE_STREAM.format(count=computing, why=unseen)
            return 1, f"several might each read the whole stream: {unseen}", [limit]
        fewest = 1 if stream.computes else _FEWEST_OF_STREAM
        count, most = max(computing, fewest), stream.most_workers
        if most is not None and most < count:
            return max(1, most), f"no more than it has shards: {stream.why}", []
        why = why if count == computing else f"{count} at least, as streams often wait"
        return count, f"{why}; {stream.why}", []

    def workers_that_wait(self, computing: int, cost: SampleCost) -> tuple[int, str]:
        """Return how many workers keep the CPUs busy although each of them waits, and why.

        A worker that computes for c and waits for w keeps a CPU busy for c / (c + w) of the time,
        so that 1 + w / c of them fill it; c is the sample's ``cpu_ms`` and 0.1 ms for handing it
        over.
        """
        wanted = math.ceil(computing * (1 + cost.wait_ms / (cost.cpu_ms + _HANDOVER_MS)))
        why = f"a sample waits {rounded(cost.wait_ms, 3)} of its {rounded(cost.wall_ms, 3)} ms"
        bound, bound_why = most_workers(
            self.machine.memory,
            ranks=self.machine.cpu.ranks_on_host,
            forked=self._forked,
            tasks=self.spec.samples if self.facts.split else self.spec.batches,
        )
        if wanted > bound:
            return bound, f"{why}; {bound_why}"
        return wanted, f"{why}, so that {computing} CPUs feed {wanted}"

    def _within_memory(self, count: int, why: str) -> tuple[int, str, list[str]]:
        """Return how many of ``count`` workers memory has room for, why, and what bounds them.

        Each worker takes as many bytes as the process that tried the dataset. Where no memory is
        left the kernel kills.
        """
        each, left = self.facts.worker_bytes, self.machine.memory.available_bytes
        room = int(OF_MEMORY * left) // self.machine.cpu.ranks_on_host
        if not each or count * each <= room:
            return count, why, []
        fewer = max(1, room // each)
        why = f"a worker comes to take {size_text(each)}, and {size_text(left)} are left"
        if fewer == count:
            return count, why, []
        limit = (
            f"num_workers is {fewer} instead of {count}, as {why}: the kernel kills workers where "
            "memory runs out. If they copy a list of the dataset, share(dataset) has it held once."
        )
        return fewer, why, [limit]

    def _why_untuned(
        self, chosen: ExecutorChoice, executor: AnyExecutor, workers: int
    ) -> str | None:
        """Return why the number of workers stays as it is while they read; None: it is changed."""
        if self.spec.options.num_workers != "auto":
            return "num_workers is set by you"
        if self.spec.stage not in ("train", "val"):
            return "it is read once, and tuned loaders learn from epoch to epoch"
        if self.spec.is_stream:
            return "which worker reads what of a stream rests on how many there are"
        if chosen.standby:
            return "whether workers pay at all is measured as the training begins"
        if not workers:
            return "what the training process has opened by then, workers may not share"
        if not kind_of(executor).side_processes:
            return f"executor={executor!r} has no workers that come and go"
        if not self.machine.shared_memory:
            return _NO_SHARED
        return None

    def _prefetch(self, kind: ExecutorKind, workers: int) -> tuple[int | str, str]:
        """Return how many batches each worker is ahead, ``"auto"`` where all are ahead together."""
        if kind.is_torch or self.spec.is_stream:
            each = max(2, min(4, math.ceil(_LOOK_AHEAD_BATCHES / workers)))
            return each, f"{workers * each} batches ahead in all, to cover a slow one"
        split = self.facts.split and not kind.elsewhere
        size = self.spec.batch_size or 1
        ahead = look_ahead_batches(workers, prefetch=None, batch_size=size, split=split)
        return "auto", f"{ahead} batches ahead in all, as memory allows"


def waits(cost: SampleCost | None) -> bool:
    """Return whether a sample waits for most of its time, so that CPUs would stand idle."""
    return cost is not None and cost.wait_ms >= _SHORTEST_WAIT_MS and cost.wait_ms >= cost.cpu_ms


def alone_ms(cost: SampleCost, batch_size: int, *, keyed: bool = False) -> float:
    """Return the milliseconds in which the training process makes one batch itself.

    ``keyed``: the samples draw, so that generators are seeded for each.
    """
    return batch_size * (cost.wall_ms + cost.collate_ms + cost.pace * keyed * _KEY_MS)


def soonest_workers(
    cost: SampleCost,
    batch_size: int,
    *,
    cpus: int,
    most: int,
    batches: int | None,
    start_ms: float,
    keyed: bool = False,
) -> tuple[int, float]:
    """Return with how many workers, at most ``most``, an epoch ends soonest, and ms for a batch.

    Starting the workers is included: it takes ``start_ms`` for each worker in each epoch, which has
    ``batches``; None: their number is not known, and starting is not counted.
    """
    gives = _gives_ms(cost, batch_size)
    each = cost.cpu_ms + cost.collate_ms + cost.pace * (keyed * _KEY_MS + _TAKE_ROW_MS)
    makes = cost.pace * _TAKE_MS + batch_size * each
    waits_ms = batch_size * cost.wait_ms

    def batch_ms(workers: int) -> float:
        # The slowest decides: the training process, which gives and takes batches one by one, the
        # CPUs, which all processes share, or the workers.
        made = max(gives, (gives + makes) / cpus, (makes + waits_ms) / workers)
        return made + workers * start_ms / (batches or math.inf)

    fewest = min(range(1, most + 1), key=batch_ms)
    # Figures of few samples are rough, and more workers help what waits now and then.
    count = fewest if batch_ms(fewest) < _SURELY_LESS * batch_ms(most) else most
    return count, batch_ms(count)


def _gives_ms(cost: SampleCost, batch_size: int) -> float:
    return cost.pace * (_GIVE_MS + batch_size * _GIVE_ROW_MS)


def most_workers(
    memory: HostMemory, *, ranks: int, forked: bool, tasks: int | None
) -> tuple[int, str]:
    """Return how many workers there may be at most, at least 1, and why no more.

    ``tasks`` are the samples or batches of an epoch, whichever is handed to a worker; None: not
    known. ``ranks`` share the host.
    """
    each = _FORKED_BYTES if forked else _FRESH_BYTES
    bounds = [
        (MOST_WAITING, f"no more than {MOST_WAITING}"),
        (memory.available_bytes // (4 * ranks * each), "bounded by RAM"),
    ]
    if memory.open_files_soft is not None:
        bounds.append((memory.open_files_soft // (8 * ranks), "bounded by the open-file limit"))
    if tasks is not None:
        bounds.append((tasks, f"no more than there are to fetch ({tasks})"))
    bound, why = min(bounds)
    return max(1, bound), why


def look_ahead_batches(workers: int, *, prefetch: int | None, batch_size: int, split: bool) -> int:
    """Return how many batches are under way at once.

    ``prefetch``: number of batches for each worker, if the user set it. ``split``: whether the
    samples of one batch are given to several workers.
    """
    if prefetch is not None:
        return max(_LOOK_AHEAD_BATCHES, workers * prefetch)
    shared = math.ceil(workers / batch_size) if split else 0
    return max(_LOOK_AHEAD_BATCHES + shared, workers * 2)

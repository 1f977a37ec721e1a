"""A loader that is to be made, and its plan: every setting, with the reason for each."""

from __future__ import annotations

import math
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from torch.utils.data import IterableDataset, TensorDataset

from lightning_fastdata.batches.bad_samples import BadSamples
from lightning_fastdata.batches.keyed import fetches_in_batches
from lightning_fastdata.batches.slots import shared_slots_supported
from lightning_fastdata.device.backend import default_type, reads_page_locked
from lightning_fastdata.errors import FastDataWarning, OptionsError
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
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.order.samplers import is_drawn_at_start
from lightning_fastdata.planning.facts.inspection import DatasetFacts, Questions, inspect_dataset
from lightning_fastdata.planning.options import LoaderOptions, check_among
from lightning_fastdata.planning.worker_count import (
    EPOCHS,
    MOST_WAITING,
    SET,
    alone_ms,
    count_workers,
    look_ahead_batches,
    soonest_workers,
    starting_ms,
    torch_prefetch,
    waits,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import Dataset

    from lightning_fastdata.batches.bad_samples import BadSamplePolicy
    from lightning_fastdata.host.cpu import CpuLimit
    from lightning_fastdata.host.memory import HostMemory
    from lightning_fastdata.planning.facts.probe import SampleCost
    from lightning_fastdata.planning.stream_split import StreamSplit
    from lightning_fastdata.types import Stage

# Side processes are started to save a fifth of the time of a batch: less is not certain enough, as
# they also wait for each other and for CPUs.
_WORTH_IT: Final = 0.8
# Shorter waits may come from other programs, which is no reason to warn of what the user set.
_SURELY_MS: Final = 2
_PIN: Final = "page-locked memory speeds up copies to GPUs with memory of their own"
_KEEP: Final = "kept while what they read stays as it is; else they start anew, as torch has it"
_NOT_KEPT: Final = "they start anew in each epoch, as torch has it"
_ANEW: Final = "as torch has it: workers that start anew see what was changed in the dataset"
_AS_IT_IS: Final = (None, "left as Python has it")
_UNSURE_MS: Final = 3  # that reading a batch here takes at most, where that may be quicker
_SURE: Final = 0.35
_BOTH: Final = "; the training process reads, too, as long as nothing changes what it reads"
_AT_START_S: Final = 0.25  # that an epoch may take which is read at once when it begins
_ROWS: Final = "its batches are rows of numbers, copied with one call per column"
_NO_FORK: Final = "a forked process could not read the dataset, and one that was started so could"
Value: TypeAlias = int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec:
    """A loader that is to be made: what its plan rests on, besides this machine."""

    dataset: Dataset[Any]
    name: str
    """How the user knows the dataset, e.g. ``"Photos.train_dataset()"``."""
    options: LoaderOptions
    stage: Stage = "train"
    batch_size: int | None
    """Samples in one batch of this rank; None: samples are delivered, or batches of unknown
    size."""
    pipelines: tuple[Any, ...] = ()  # of Albumentations, which the dataset calls itself
    transformed: bool = False  # an Albumentations pipeline of the loader runs on each sample
    collate_fn: Callable[[list[Any]], Any] | None = None
    """The user's; None: the default collation, if samples are put together."""
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    """The user's, which give the keys of samples; None: these are numbers from 0."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each worker with its number; it may give a stream's copy there its part."""
    start_method: str | None = None
    """Of workers, if the options leave it open; None: Python's default, or one that works."""
    keeps: bool = True
    """Workers are kept between epochs, if the options leave it open."""

    @property
    def is_stream(self) -> bool:
        """Whether the dataset has no index."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def default_collation(self) -> bool:
        """Whether samples are put together as torch does by default."""
        return self.collate_fn is None and self.batch_size is not None

    @property
    def has_order(self) -> bool:
        """Whether the user says which samples come in which order."""
        return self.sampler is not None or self.batch_sampler is not None

    @property
    def needs_cost(self) -> bool:
        """Whether the options leave something open that rests on what samples cost."""
        executor = self.options.executor
        if executor == "auto":
            return True
        return self.options.num_workers == "auto" and not kind_of(executor).is_torch

    @property
    def leaves_workers_open(self) -> bool:
        """Whether the options leave it open whether there are workers."""
        return self.options.num_workers == self.options.executor == "auto"

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
    alone: bool = False
    """The training process had better read for itself, where the number of workers is open."""
    few: bool = False
    """One worker does, where their number is open: reading costs next to nothing."""
    standby: bool = False
    """The training process may read, too, while the workers stand by."""
    kept: bool = False
    """The dataset keeps what the training process reads, as with torch's ``num_workers=0``."""


TORCH: Final = ExecutorChoice("torch", KINDS["torch"].what)
"""Where nothing asks for another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the plan of a loader rests on besides its options. None: not known."""

    stage: Stage
    cpu: CpuLimit  # of this rank
    memory: HostMemory  # of this host, shared by its ranks
    accelerator: str  # "cpu", "cuda", "mps" or another device type
    batch_size: int  # samples in a batch of this rank
    dataset_length: int | None  # samples that this rank reads in an epoch
    iterable: bool  # the dataset is a stream (``IterableDataset``)
    stream: StreamSplit | None = None  # whether a stream shares itself out among workers
    batched_fetch: bool  # the dataset gives a whole batch in one call (``__getitems__``)
    in_memory: bool = False  # samples are tensors in RAM, and nothing is computed for each
    cost: SampleCost | None = None  # of a sample
    split: bool = False  # the samples of one batch may be read by several workers
    choice: ExecutorChoice = TORCH
    start_method: str | None = None  # if the options leave it open; None: Python's default
    actors: int | None = None  # that a cluster has room for, where they are to read
    instead_of_fork: str | None = None  # to start processes by, as forked ones were seen to fail
    start_ms: float = 0.0  # of an epoch, to start one worker
    worker_bytes: int | None = None  # that a worker comes to have of its own
    platform: str = sys.platform

    @property
    def batches(self) -> int | None:
        """Batches in an epoch."""
        length = self.dataset_length
        return None if length is None else math.ceil(length / self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a loader and where it comes from."""

    option: str  # name of the field of ``LoaderOptions``
    value: Value  # what the loader uses; None leaves it to torch
    why: str  # the reason, with the numbers it rests on
    by: Literal["you", "auto"]
    """``"you"``: set by the user to other than the default, and never changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """The settings one loader runs with: those of ``LoaderOptions``, decided.

    None: ``split`` has no meaning for a dataset with an index; ``prefetch_factor`` and
    ``timeout`` follow the tasks; the start method stays as Python has it.
    """

    num_workers: int
    pin_memory: bool
    persistent_workers: bool | Literal["unchanged"]
    prefetch_factor: int | None
    multiprocessing_context: str | None
    timeout: float | None
    in_order: bool
    executor: AnyExecutor
    on_bad_sample: BadSamplePolicy | BadSamples
    probe: bool
    split: bool | None
    choices: tuple[Setting, ...]
    """One for each setting, in the order of ``LoaderOptions``."""
    tuned: bool
    """The number of workers is changed while they read."""
    limits: tuple[str, ...]
    """What this machine cannot give, and how to lift it; worth a ``FastDataWarning`` each."""
    warnings: tuple[str, ...] = ()
    """What the user should know of the samples themselves; worth one each, too."""
    draws: bool | None = None
    """Whether reading a sample draws at random; None: not known."""
    standby: bool = False
    """The training process reads, too, as long as what is read is as it was when the epoch began.
    Which is quicker is measured."""
    only_here: bool = False
    """The training process reads, as with torch: no side process can, or what is read is kept."""

    def explain(self) -> str:
        """A table of option, value, who chose it and why, followed by the limits."""
        rows = [("option", "value", "by", "why")]
        for choice in self.choices:
            value = "default" if choice.value is None else str(choice.value)
            rows.append((choice.option, value, choice.by, choice.why))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows]
        return "\n".join([*lines, *(f"limit: {limit}" for limit in self.limits)])

    def dataloader_kwargs(self) -> dict[str, object]:
        """Keyword arguments for ``torch.utils.data.DataLoader``.

        Torch refuses settings of workers when there are none; those are left out.
        """
        names = ["num_workers", "pin_memory", "in_order"]
        if self.num_workers > 0:
            names += ["persistent_workers", "prefetch_factor", "multiprocessing_context"]
        kwargs: dict[str, object] = {name: getattr(self, name) for name in names}
        return kwargs | ({"timeout": self.timeout or 0} if self.num_workers > 0 else {})


def plan_for(
    spec: LoaderSpec,
    facts: DatasetFacts | None = None,
    *,
    accelerator: str | None = None,
    local_ranks: int = 1,
) -> LoaderPlan:
    """Read the limits of this machine, and make the plan of a loader.

    What the plan rests on is found out now, unless there are ``facts``. ``accelerator`` is
    ``"cpu"``, ``"cuda"`` or another device type (None: that of this machine), ``local_ranks`` the
    training processes on this host.
    """
    if facts is None:
        facts = inspect_dataset(spec, Questions(cost=spec.needs_cost))
    if accelerator is None:
        accelerator = default_type()
    options, dataset, cost = spec.options, spec.dataset, facts.cost
    stream = facts.stream
    if stream is not None and stream.here and options.num_workers not in ("auto", 0):
        raise OptionsError(
            f"{spec.name} has num_workers={options.num_workers}, but {stream.why}: they would "
            "wait for ever. Leave num_workers out; Ray's own settings say how many tasks read."
        )
    cpu = read_cpu_limit(local_ranks=local_ranks)
    choice = TORCH
    method = spec.start_method or facts.start_method or multiprocessing.get_start_method()
    if options.multiprocessing_context != "auto":
        method = options.multiprocessing_context
    kept = spec.keeps and spec.stage in ("train", "val")
    if options.persistent_workers != "auto":
        kept = options.persistent_workers
    start_ms = starting_ms(cost, forked=method == "fork", kept=kept)
    if spec.needs_cost:
        choice = choose_executor(
            spec,
            facts,
            cpus=cpu.usable_cpus,
            shared_memory=shared_slots_supported(),
            method=method,
            start_ms=start_ms,
        )
    if stream is not None and stream.here:
        choice = ExecutorChoice("inline", stream.why, alone=True)
    asked, actors = options.executor, None
    if asked != "auto" and options.num_workers == "auto" and not spec.is_stream:
        actors = room_elsewhere(asked, local_ranks)
    situation = Situation(
        stage=spec.stage,
        cpu=cpu,
        memory=read_host_memory(),
        accelerator=accelerator,
        batch_size=spec.batch_size or 1,
        dataset_length=dataset_length(dataset),
        iterable=spec.is_stream,
        stream=stream,
        batched_fetch=fetches_in_batches(dataset) or isinstance(dataset, TensorDataset),
        in_memory=isinstance(dataset, TensorDataset),
        cost=cost,
        split=facts.split,
        choice=choice,
        actors=actors,
        start_method=facts.start_method or multiprocessing.get_start_method(),
        instead_of_fork=facts.start_method,
        start_ms=start_ms,
        worker_bytes=facts.worker_bytes,
    )
    draws = bool(spec.pipelines) or facts.draws or (None if cost is None else False)
    plan = plan_loader(options, situation)
    only_here = facts.here is not None or choice.kept
    standby = choice.standby and options.num_workers == "auto" and plan.num_workers > 0
    return replace(plan, warnings=facts.warnings, draws=draws, only_here=only_here, standby=standby)


def choose_executor(
    spec: LoaderSpec,
    facts: DatasetFacts,
    *,
    cpus: int = 2,
    shared_memory: bool = True,
    method: str = "fork",
    start_ms: float = 0.0,
) -> ExecutorChoice:
    """Return the executor that suits a dataset, and why. Pure.

    ``num_workers=0`` is a wish to fetch in the training process, a higher number one for workers,
    also where the samples that were read are cheap: others may not be. ``shared_memory``: the
    system has the memory that side processes need (Linux), which are started by a ``method``.
    ``start_ms``: what starting one of them takes of each epoch.

    Where the number of workers is left open, an epoch is to be read as things are when it begins,
    as workers read it. The training process itself can do that with what it can read, or copy, at
    once when the epoch begins.
    """
    workers, batch_size = spec.options.num_workers, spec.batch_size or 1
    keyed = facts.draws or bool(spec.pipelines)
    forked = method == "fork" and shared_memory
    aside: ExecutorName = "workers" if shared_memory else "torch"
    if spec.is_stream and workers != 0:
        return ExecutorChoice(aside, "each process reads its own stream")
    if workers == 0:
        # Keys for draws that are not made would cost each step of the training some 20 us.
        keyed |= spec.transformed or BadSamples.of(spec.options.on_bad_sample) != BadSamples()
        here: ExecutorName = "inline" if keyed else "torch"
        return ExecutorChoice(here, "num_workers=0 asks for the training process", alone=True)
    if facts.rows and workers == "auto" and spec.options.persistent_workers is not True:
        return _cheap(spec, facts, "gather", _ROWS, forked=forked, copied_bytes=facts.own_bytes)
    if facts.here is not None and workers == "auto":
        return ExecutorChoice("inline", facts.here, alone=True)
    lacks = "" if shared_memory else "; this system has no memory files for side processes"
    if isinstance(workers, int):
        return ExecutorChoice(aside, f"num_workers={workers} asks for them{lacks}")
    if facts.cost is None:
        return ExecutorChoice(aside, f"what a sample costs is not known{lacks}")
    if spec.transformed:  # which is not part of what was measured
        return ExecutorChoice(aside, f"an Albumentations pipeline runs on each sample{lacks}")
    alone = alone_ms(facts.cost, batch_size, keyed=keyed)
    length = dataset_length(spec.dataset)
    _, shared = soonest_workers(
        facts.cost,
        batch_size,
        cpus=cpus,
        most=MOST_WAITING if waits(facts.cost) else cpus,
        batches=None if length is None else math.ceil(length / batch_size),
        start_ms=start_ms,
        keyed=keyed,
    )
    again = facts.cost_again
    # Workers would begin each epoch anew, with nothing kept.
    if again is not None and spec.options.persistent_workers is not True:
        again_ms = alone_ms(again, batch_size, keyed=keyed)
        if (alone + (EPOCHS - 1) * again_ms) / EPOCHS < shared:
            return ExecutorChoice(
                "inline",
                f"the dataset keeps what it has read: a batch takes {alone:.2g} ms here at first, "
                f"and {again_ms:.2g} ms again; by workers, which begin each epoch with nothing "
                f"kept, {shared:.2g} ms",
                alone=True,
                kept=True,
            )
    said = f"a batch takes {alone:.2g} ms here and some {shared:.2g} ms by side processes"
    said += ", with their start" if start_ms else ""
    if waits(facts.cost):
        said += f"; a sample waits {facts.cost.wait_ms:.2g} of its {facts.cost.wall_ms:.2g} ms"
    if shared < _WORTH_IT * alone:
        unsure = alone < _UNSURE_MS and shared > _SURE * alone and not waits(facts.cost)
        standby = unsure and forked and _may_stand_by(spec, facts)
        return ExecutorChoice(aside, said + (_BOTH if standby else lacks), standby=standby)
    samples = math.inf if length is None else length
    return _cheap(
        spec,
        facts,
        "inline",
        said,
        forked=forked,
        read_bytes=samples * (facts.cost.size_bytes or 0),
        read_s=samples / batch_size * alone / 1000,
    )


def _in_copies(spec: LoaderSpec, facts: DatasetFacts) -> str | None:
    """Return why the training process may not read an epoch of samples at once; None: it may."""
    if facts.changes:
        return "to read it changes it, or that cannot be seen: a forked process has a copy"
    if not spec.default_collation:  # which copies what the dataset holds
        return "a batch may be memory of the dataset, which a forked process has as it was"
    return None


def _cheap(
    spec: LoaderSpec,
    facts: DatasetFacts,
    here: ExecutorName,
    why: str,
    *,
    forked: bool,
    copied_bytes: float = 0.0,
    read_bytes: float = 0.0,
    read_s: float = 0.0,
) -> ExecutorChoice:
    """Return who reads what the training process could read itself, through ``here``.

    It does so if it can read, or copy, an epoch at once when that begins: later steps may have
    changed what is read, which a forked process has as it was. Others take seconds to start.
    """
    aside = _in_copies(spec, facts)
    if not _drawn_at_start(spec):
        aside = "its sampler is asked while the training runs"
    elif copied_bytes > copy_limit_bytes():
        aside = f"a forked process has {copied_bytes / 2**20:,.0f} MiB as they are"
    elif read_bytes > AT_START_BYTES:
        aside = f"a forked process reads {read_bytes / 2**20:,.0f} MiB as they are"
    elif read_s > _AT_START_S:
        aside = f"a forked process reads {read_s:.2g} s of samples as they are"
    if aside is None or not forked:
        return ExecutorChoice(here, why, alone=KINDS[here].caller_reads)
    standby = _may_stand_by(spec, facts)
    said = f"{why}; {aside}{_BOTH if standby else ''}"
    return ExecutorChoice("workers", said, few=True, standby=standby)


def _may_stand_by(spec: LoaderSpec, facts: DatasetFacts) -> bool:
    """Return whether the training process may read what workers stand by for."""
    auto = spec.options.executor == "auto"
    return auto and not facts.changes and _drawn_at_start(spec)


def _drawn_at_start(spec: LoaderSpec) -> bool:
    source = spec.sampler if spec.batch_sampler is None else spec.batch_sampler
    return source is None or is_drawn_at_start(source)


def plan_loader(options: LoaderOptions, situation: Situation) -> LoaderPlan:
    """Decide every setting of a loader. Reads nothing: the same arguments give the same plan.

    What the user set always wins, and gets a limit message where it cannot work.

    Raises:
        OptionsError: ``batch_size`` is below 1, or the system has no such start method.
    """
    batch_size, platform, chosen = situation.batch_size, situation.platform, situation.choice
    if batch_size < 1:
        raise OptionsError(f"batch_size is {batch_size!r}; a batch has 1 sample or more.")
    if platform == "win32":
        check_among("multiprocessing_context", options.multiprocessing_context, ("auto", "spawn"))
    executor = chosen.executor if options.executor == "auto" else options.executor
    kind = kind_of(executor)
    ours = not (kind.is_torch or situation.iterable)
    count, why, limits = count_workers(options, kind, situation, ours=ours)
    if not kind.elsewhere:
        limits = [*_overstepped(options, situation), *limits]
    prefetch: int | None
    if ours:
        prefetch = None if options.prefetch_factor == "auto" else options.prefetch_factor
        ahead = look_ahead_batches(
            count,
            prefetch=prefetch,
            batch_size=batch_size,
            split=situation.split and kind.splits_batches,
        )
        prefetch_why = f"{ahead} batches ahead in all, as memory allows"
    else:
        prefetch, prefetch_why = torch_prefetch(count, options)
    kept = count > 0 and situation.stage in ("train", "val") and ours
    forks = situation.instead_of_fork is None
    untuned = _why_untuned(options, situation, executor, count)
    tuning = f"not tuned: {untuned}" if untuned else "tuned as the steps show what pays"
    auto: dict[str, tuple[Value, str]] = {
        "num_workers": (count, f"{why}; {tuning}"),
        "pin_memory": (reads_page_locked(situation.accelerator), _PIN),
        "persistent_workers": ("unchanged", _KEEP) if kept else (False, _NOT_KEPT),
        "prefetch_factor": (prefetch, prefetch_why) if count else (None, "not used: no workers"),
        "multiprocessing_context": _AS_IT_IS if forks else (situation.instead_of_fork, _NO_FORK),
        "timeout": (None, "60 s without progress, or 20 times as long as tasks take"),
        "in_order": (True, "as the sampler gives them"),
        "executor": (chosen.executor, chosen.why),
        "on_bad_sample": ("raise", "an error names the sample, and the training ends"),
        "probe": (True, "a few samples tell what suits them"),
        "split": _split(situation),
    }
    limits += unsuited(options.executor, iterable=situation.iterable, workers=count)
    choices = tuple(_setting(options, name, *auto[name]) for name in auto)
    decided: dict[str, Any] = {setting.option: setting.value for setting in choices}
    return LoaderPlan(**decided, choices=choices, tuned=not untuned, limits=tuple(limits))


def _split(situation: Situation) -> tuple[Value, str]:
    """Return whether a stream shares itself out among workers, and why."""
    if situation.stream is None:
        return None, "only a stream has to divide itself among workers"
    return situation.stream.splits, situation.stream.why


def _why_untuned(
    options: LoaderOptions, situation: Situation, executor: AnyExecutor, workers: int
) -> str | None:
    """Return why the number of workers stays as it is while they read; None: it is changed."""
    if options.num_workers != "auto":
        return "num_workers is set by you"
    if situation.stage not in ("train", "val"):
        return "it is read once, and tuned loaders learn from epoch to epoch"
    if situation.iterable:
        return "which worker reads what of a stream rests on how many there are"
    if situation.choice.standby:
        return "whether workers pay at all is measured as the training begins"
    if not workers:
        return "what the training process has opened by then, workers may not share"
    if not kind_of(executor).resizes:
        return f"executor={executor!r} has no workers that come and go"
    if not shared_slots_supported():
        return "this system has no memory files for side processes"
    return None


def _overstepped(options: LoaderOptions, situation: Situation) -> Iterator[str]:
    workers, cpu, cost = options.num_workers, situation.cpu, situation.cost
    if workers != "auto" and workers > cpu.usable_cpus and not waits(cost):
        yield (
            f"num_workers={workers} is more than the CPUs there are ({cpu.reason}). It "
            "helps only while workers wait for a disk or a network. Set num_workers="
            f'{cpu.usable_cpus} or "auto", or ask for more CPUs (docker --cpus, Slurm -c).'
        )
    few = workers != "auto" and 0 < workers <= cpu.usable_cpus
    if few and cost is not None and waits(cost) and cost.wait_ms >= _SURELY_MS:
        yield (
            f"num_workers={workers}, but a sample waits {cost.wait_ms:.3g} of its "
            f'{cost.wall_ms:.3g} ms and leaves the CPUs idle. Set num_workers="auto", or more '
            "workers than CPUs."
        )
    if options.pin_memory is True and not reads_page_locked(situation.accelerator):
        yield f'pin_memory=True has no use on {situation.accelerator!r}. Set it to "auto".'


def _setting(options: LoaderOptions, option: str, auto: Value, why: str) -> Setting:
    asked = getattr(options, option)
    if asked in ("auto", getattr(LoaderOptions(), option)):
        return Setting(option=option, value=auto, why=why, by="auto")
    return Setting(option=option, value=asked, why=SET, by="you")


def plan_asked(
    spec: LoaderSpec, *, keeps: bool, multiprocessing_context: Any, **asked: Any
) -> LoaderPlan:
    """Return the plan of a loader of which only some settings were ``asked`` for; None: not given.

    What it warns of is warned of here. ``keeps``: workers may be kept between epochs.
    """
    method = multiprocessing_context
    if method is not None and not isinstance(method, str):
        method = method.get_start_method()
    if asked.get("persistent_workers") == "unchanged":
        keeps, asked["persistent_workers"] = True, None
    given = {**asked, "multiprocessing_context": method}
    options = LoaderOptions(**{name: value for name, value in given.items() if value is not None})
    plan = plan_for(replace(spec, options=options, keeps=keeps))
    if not keeps and options.persistent_workers == "auto":
        name = "persistent_workers"
        anew = Setting(option=name, value=False, why=_ANEW, by="auto")
        choices = tuple(anew if each.option == name else each for each in plan.choices)
        plan = replace(plan, persistent_workers=False, choices=choices)
    for warning in plan.warnings:
        warnings.warn(f"{spec.name}: {warning}", FastDataWarning, stacklevel=4)
    return plan

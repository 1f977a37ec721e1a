"""Every setting of a loader, chosen for this machine, with the reason for each."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.host.memory import batch_memories
from lightning_fastdata.planning.checks import check_among, unsuited
from lightning_fastdata.planning.options import LoaderOptions
from lightning_fastdata.planning.torch_memory import (
    auto_prefetch,
    fit,
    held_batches,
    memory_message,
    open_files_message,
)
from lightning_fastdata.planning.worker_count import (
    enough_workers,
    look_ahead_batches,
    waits,
    workers_for,
    workers_of_stream,
    workers_that_wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_fastdata.executors.kinds import ExecutorName
    from lightning_fastdata.host.cpu import CpuLimit
    from lightning_fastdata.host.memory import HostMemory
    from lightning_fastdata.planning.facts.probe import SampleCost
    from lightning_fastdata.planning.stream_split import StreamSplit
    from lightning_fastdata.types import Stage

Value: TypeAlias = int | float | str | None

_POLITE = 5

_SET = "set by you"
_PIN = "page-locked memory speeds up copies to CUDA devices only"
_KEEP = "kept between the epochs of training and validation; a single pass does not need it"
_AS_IT_IS = (None, "left as Python and torch have it")
_SURELY_MS = 2
"""Shorter waits may come from other programs, which is no reason to warn of what the user set."""
_NO_FORK = "a forked process could not read the dataset, and one that was started so could"
_FEW_FILES = "shared by name, as the open-file limit is too low to share by descriptor"
_NO_DESCRIPTORS = ("darwin", "win32")
_HERE: Final = (0, "fetching a batch costs less than handing it over")


class Suited(NamedTuple):
    """The executor that suits a dataset."""

    executor: ExecutorName
    """Its name."""
    why: str
    """The reason."""
    alone: bool = False
    """The training process had better read for itself, where the number of workers is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One setting of a loader and where it comes from."""

    option: str
    """Name of the field of ``LoaderOptions``."""
    value: Value
    """What the loader uses; None leaves it to torch."""
    why: str
    """The reason, with the numbers it rests on."""
    by: Literal["you", "auto"]
    """``"you"``: set by the user to other than the default, and never changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """The settings one loader runs with. Fields are those of ``LoaderOptions``, decided."""

    num_workers: int
    """Processes that read samples; 0 reads in the training process."""
    pin_memory: bool
    """Whether batches are copied to page-locked memory."""
    persistent_workers: bool
    """Whether workers stay between epochs; without effect when there are none."""
    prefetch_factor: int | None
    """Batches each worker is ahead; None or without effect when there are no workers."""
    multiprocessing_context: str | None
    """How workers are started; None: the default of Python on this system."""
    sharing_strategy: str | None
    """For ``torch.multiprocessing.set_sharing_strategy``; None: leave it as it is."""
    timeout_s: float
    """Seconds to wait for a batch; 0 waits for ever. Without effect when there are no workers."""
    stall_timeout_s: float | None
    """Seconds without progress of the workers after which waiting is an error; 0 waits for ever,
    None: as the tasks show. Without effect on torch's own iterator."""
    in_order: bool
    """Whether batches come in the order of the sampler."""
    worker_nice: int
    """Added to the niceness of the workers; without effect when there are none."""
    executor: ExecutorName
    """Who fetches."""
    page_lock: Literal["copy", "register"]
    """How batches of the engine come into page-locked memory, if they do."""
    probe: bool
    """Whether samples may be read before the workers start."""
    choices: tuple[Choice, ...]
    """One for each setting, in the order of ``LoaderOptions``."""
    limits: tuple[str, ...]
    """What this machine cannot give, and how to lift it; worth a ``FastDataWarning`` each."""

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

        Torch refuses settings of workers when there are none; those are left out. The sharing
        strategy is a setting of the process, not of a loader, and is not among them.
        """
        kwargs: dict[str, object] = {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "in_order": self.in_order,
        }
        if self.num_workers > 0:
            kwargs |= {
                "persistent_workers": self.persistent_workers,
                "prefetch_factor": self.prefetch_factor,
                "multiprocessing_context": self.multiprocessing_context,
                "timeout": self.timeout_s,
            }
        return kwargs


def plan_loader(
    options: LoaderOptions,
    *,
    stage: Stage,
    cpu: CpuLimit,
    memory: HostMemory,
    accelerator: str,
    sample_bytes: int | None,
    batch_size: int,
    dataset_length: int | None,
    iterable: bool,
    batched_fetch: bool,
    in_memory: bool = False,
    stream: StreamSplit | None = None,
    suited: Suited | tuple[ExecutorName, str] = ("torch", KINDS["torch"].what),
    cost: SampleCost | None = None,
    split: bool = False,
    tensors_per_batch: int = 2,
    start_method: str | None = None,
    instead_of_fork: str | None = None,
    platform: str = sys.platform,
) -> LoaderPlan:
    """Decide every setting of a loader. Reads nothing: the same arguments give the same plan.

    Args:
        options: What the user set; it always wins, and gets a limit message where it cannot work.
        stage: What the loader is for.
        cpu: CPUs of this rank.
        memory: Free memory of this host, shared by its ranks.
        accelerator: ``"cpu"``, ``"cuda"``, ``"mps"`` or another device type.
        sample_bytes: Size of one collated sample; None if unknown, and memory then sets no bound.
        batch_size: Samples in one batch of this rank.
        dataset_length: Samples this rank reads in an epoch; None if unknown.
        iterable: The dataset is a stream (``IterableDataset``).
        batched_fetch: The dataset gives a whole batch in one call (``__getitems__``).
        in_memory: The samples are tensors in RAM and nothing is computed for each.
        stream: Whether a stream shares itself out among workers; None: unknown.
        suited: The executor that suits the dataset; taken if ``"auto"`` is asked for.
        cost: Of a sample; samples that wait get more workers than there are CPUs. None: unknown.
        split: Samples of one batch may be read by several workers, as default collation allows.
        tensors_per_batch: Tensors in a batch; each takes open files on its way to torch's loader.
        start_method: Of processes, if the options leave it open; None: the default of Python.
        instead_of_fork: How processes are to be started, as forked ones were seen to fail; None:
            they were not. What the options say wins.
        platform: ``sys.platform``.

    Raises:
        OptionsError: ``batch_size`` is below 1, or the system has no such start method or sharing
            strategy.
    """
    if batch_size < 1:
        raise OptionsError(f"batch_size is {batch_size!r}; a batch has 1 sample or more.")
    _check_platform(options, platform)
    chosen = Suited(*suited)
    executor = chosen.executor if options.executor == "auto" else options.executor
    ours = not (KINDS[executor].is_torch or iterable)
    method = start_method or ("fork" if platform == "linux" else "spawn")
    method = (
        method if options.multiprocessing_context == "auto" else options.multiprocessing_context
    )
    limits = list(_overstepped(options, cpu, accelerator, cost))
    batches = None if dataset_length is None else math.ceil(dataset_length / batch_size)
    count, why, limit = _workers(
        options,
        executor,
        alone=chosen.alone or (batched_fetch and in_memory and not ours),
        computing=workers_for(stage, cpu, on_cpu=accelerator == "cpu", batches=batches),
        iterable=iterable,
        stream=stream,
        cost=cost if ours else None,
        batch_size=batch_size,
        tasks=dataset_length if split else batches,
        memory=memory,
        ranks=cpu.ranks_on_host,
        forked=method == "fork",
    )
    limits.extend(limit)
    prefetch: int | None
    batch_bytes = (sample_bytes or 0) * batch_size
    if ours:
        # The engine's slots keep to a share of the RAM by themselves, and take nothing of /dev/shm.
        prefetch = None if options.prefetch_factor == "auto" else options.prefetch_factor
        ahead = look_ahead_batches(count, prefetch=prefetch, batch_size=batch_size, split=split)
        prefetch_why = f"{ahead} batches ahead in all, as memory allows"
        many_files = False
    else:
        prefetch, prefetch_why = auto_prefetch(options, count)
        for place in batch_memories(memory, ranks=cpu.ranks_on_host):
            if not place.holds(held_batches(count, prefetch) * batch_bytes):
                fitting = fit(count, prefetch, batch_bytes, place, options)
                limits.append(memory_message((count, prefetch), fitting, batch_bytes, place))
                why += f"; bounded by {place.place}" if fitting[0] < count else ""
                prefetch_why = (
                    f"bounded by {place.place}" if fitting[1] < prefetch else prefetch_why
                )
                count, prefetch = fitting
        open_files = count * prefetch * tensors_per_batch * 2
        soft = memory.open_files_soft
        many_files = soft is not None and open_files * 2 >= soft
        many_files = many_files and platform not in _NO_DESCRIPTORS
        if many_files and options.sharing_strategy != "file_system":
            limits.append(open_files_message(open_files, memory, options))

    auto = {
        "num_workers": (count, why),
        "pin_memory": (accelerator == "cuda", _PIN),
        "persistent_workers": (count > 0 and stage in ("train", "val"), _KEEP),
        "prefetch_factor": (prefetch, prefetch_why) if count else (None, "not used: no workers"),
        "multiprocessing_context": (
            _AS_IT_IS if instead_of_fork is None else (instead_of_fork, _NO_FORK)
        ),
        "sharing_strategy": ("file_system", _FEW_FILES) if many_files else _AS_IT_IS,
        "timeout_s": (0, "wait for ever, as long as there is progress"),
        "stall_timeout_s": (None, "120 s without progress, or 20 times the longest task"),
        "in_order": (True, "as the sampler gives them"),
        "worker_nice": (_POLITE, "the training process goes first where both want a CPU"),
        "executor": chosen[:2],
        "page_lock": ("copy", "each batch is copied, where pin_memory asks for it"),
        "probe": (True, "a few samples tell what suits them"),
    }
    limits.extend(unsuited(options.executor, iterable=iterable, workers=count))
    choices = tuple(_choice(options, name, *auto[name]) for name in auto)
    decided: dict[str, Any] = {choice.option: choice.value for choice in choices}
    return LoaderPlan(**decided, choices=choices, limits=tuple(limits))


def _workers(
    options: LoaderOptions,
    executor: ExecutorName,
    *,
    alone: bool,
    computing: tuple[int, str],
    iterable: bool,
    stream: StreamSplit | None,
    cost: SampleCost | None,
    batch_size: int,
    **about: Any,
) -> tuple[int, str, list[str]]:
    """Return how many workers there are, why, and what bounds them.

    Args:
        options: What the user set.
        executor: Who fetches.
        alone: The training process had better read for itself.
        computing: How many would do if samples did not wait, and why.
        iterable: The dataset is a stream.
        stream: Whether it shares itself out among workers; None: unknown.
        cost: Of a sample that the engine reads; None: unknown, or torch reads.
        batch_size: Samples in a batch.
        **about: For :func:`workers_that_wait`.
    """
    count, why = computing
    kind = KINDS[executor]
    limits: list[str] = []
    if options.num_workers != "auto":
        count, why = options.num_workers, _SET
    elif kind.workers is not None and not iterable:
        count, why = kind.workers
    elif alone and (options.executor == "auto" or kind.is_torch):
        count, why = _HERE
    elif iterable and count > 1:
        count, why, limits = workers_of_stream(count, why, stream)
    elif cost is not None and count and waits(cost):
        count, why = workers_that_wait(count, cost, **about)
    elif cost is not None and enough_workers(cost, batch_size) < count:
        count = enough_workers(cost, batch_size)
        why = "the training process could not take the batches of more"
    return count, why, limits


def _overstepped(
    options: LoaderOptions, cpu: CpuLimit, accelerator: str, cost: SampleCost | None
) -> Iterator[str]:
    many = options.num_workers != "auto" and options.num_workers > cpu.usable_cpus
    if many and not waits(cost):
        yield (
            f"num_workers={options.num_workers} is more than the CPUs there are ({cpu.reason}). It "
            "helps only while workers wait for a disk or a network. Set num_workers="
            f'{cpu.usable_cpus} or "auto", or ask for more CPUs (docker --cpus, Slurm -c).'
        )
    few = options.num_workers != "auto" and 0 < options.num_workers <= cpu.usable_cpus
    if few and cost is not None and waits(cost) and cost.wait_ms >= _SURELY_MS:
        yield (
            f"num_workers={options.num_workers}, but a sample waits {cost.wait_ms:.3g} of its "
            f'{cost.wall_ms:.3g} ms and leaves the CPUs idle. Set num_workers="auto", or more '
            "workers than CPUs."
        )
    if options.pin_memory is True and accelerator != "cuda":
        yield f'pin_memory=True has no use on {accelerator!r}. Set it to "auto".'


def _choice(options: LoaderOptions, option: str, auto: Value, why: str) -> Choice:
    asked = getattr(options, option)
    if asked in ("auto", getattr(LoaderOptions(), option)):
        return Choice(option=option, value=auto, why=why, by="auto")
    return Choice(option=option, value=asked, why=_SET, by="you")


def _check_platform(options: LoaderOptions, platform: str) -> None:
    if platform == "win32":
        check_among("multiprocessing_context", options.multiprocessing_context, ("auto", "spawn"))
    if platform in _NO_DESCRIPTORS:
        check_among("sharing_strategy", options.sharing_strategy, ("auto", "file_system"))

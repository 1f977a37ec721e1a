"""A loader that is to be made, and the plan of its settings with the reason for each."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from torch.utils.data import IterableDataset

from lightning_fastdata.executors.kinds import KINDS

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lightning_fastdata.batches.bad_samples import BadSamplePolicy
    from lightning_fastdata.executors.kinds import ExecutorName
    from lightning_fastdata.host.cpu import CpuLimit
    from lightning_fastdata.host.memory import HostMemory
    from lightning_fastdata.planning.facts.probe import SampleCost
    from lightning_fastdata.planning.options import LoaderOptions
    from lightning_fastdata.planning.stream_split import StreamSplit
    from lightning_fastdata.types import Stage

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
        return self.options.num_workers == "auto" and not KINDS[executor].is_torch

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
        return executor != "auto" and KINDS[executor].caller_reads


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
    ``stall_timeout_s`` follow the tasks; the start method stays as Python has it.
    """

    num_workers: int
    pin_memory: bool
    persistent_workers: bool | Literal["unchanged"]
    prefetch_factor: int | None
    multiprocessing_context: str | None
    timeout_s: float
    stall_timeout_s: float | None
    in_order: bool
    executor: ExecutorName
    on_bad_sample: BadSamplePolicy
    bad_sample_budget: float
    quarantine_file: str | None
    tune: Literal["auto", "off"]
    probe: bool
    split: bool | None
    actor_options: dict[str, Any] | None
    choices: tuple[Setting, ...]
    """One for each setting, in the order of ``LoaderOptions``."""
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
    """No side process can read the dataset: the training process does, as with torch."""

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
        return kwargs | ({"timeout": self.timeout_s} if self.num_workers > 0 else {})

"""A loader that is to be made, and the plan of its settings with the reason for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch.utils.data import IterableDataset

from lightning_fastdata.executors.kinds import KINDS

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lightning_fastdata.executors.kinds import ExecutorName
    from lightning_fastdata.planning.options import LoaderOptions
    from lightning_fastdata.types import Stage

Value: TypeAlias = int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec:
    """A loader that is to be made: what its plan rests on, besides this machine."""

    dataset: Dataset[Any]
    """What it reads."""
    name: str
    """How the user knows the dataset, e.g. ``"Photos.train_dataset()"``."""
    options: LoaderOptions
    """What the user set."""
    stage: Stage = "train"
    """What it is for."""
    batch_size: int | None
    """Samples in one batch of this rank; None: samples are delivered, or batches of unknown
    size."""
    pipelines: tuple[Any, ...] = ()
    """The Albumentations pipelines that the dataset calls itself."""
    transformed: bool = False
    """An Albumentations pipeline of the loader runs on each sample."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """The user's; None: the default collation, if samples are put together."""
    sampler: Any = None
    """The user's, which gives the keys of samples; None: these are numbers from 0."""
    batch_sampler: Any = None
    """The user's, likewise."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each worker with its number; it may give a stream's copy there its part."""
    start_method: str | None = None
    """Of workers, if the options leave it open; None: Python's default, or one that works."""

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
        options = self.options
        if options.executor == "auto":
            return True
        return options.num_workers == "auto" and not KINDS[options.executor].is_torch

    @property
    def reads_here(self) -> bool:
        """Whether the options have the training process read samples itself."""
        options = self.options
        if options.num_workers == 0:
            return True
        return options.executor != "auto" and KINDS[options.executor].caller_reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
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
    choices: tuple[Setting, ...]
    """One for each setting, in the order of ``LoaderOptions``."""
    limits: tuple[str, ...]
    """What this machine cannot give, and how to lift it; worth a ``FastDataWarning`` each."""
    warnings: tuple[str, ...] = ()
    """What the user should know of the samples themselves; worth one each, too."""

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

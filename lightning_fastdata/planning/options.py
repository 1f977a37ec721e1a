"""What you may set about a loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from lightning_fastdata.planning.checks import (
    EXECUTORS,
    PAGE_LOCKS,
    check,
    check_among,
    is_seconds,
)
from lightning_fastdata.planning.option_names import refuses_unknown_names

if TYPE_CHECKING:
    from lightning_fastdata.executors.kinds import ExecutorName

Auto: TypeAlias = Literal["auto"]

_START_METHODS = ("auto", "fork", "spawn", "forkserver")
_SHARING = ("auto", "file_descriptor", "file_system")


@refuses_unknown_names
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """What you may set about a loader; ``"auto"`` chooses for this machine and says why.

    Args:
        num_workers: Processes that read samples; 0 reads in the training process.
        pin_memory: Copy batches to page-locked memory, from where a GPU copies without waiting.
        persistent_workers: Keep the workers between epochs instead of starting new ones.
        prefetch_factor: Batches each worker is ahead, at least 1.
        multiprocessing_context: How workers are started.
        sharing_strategy: How tensors travel between processes: by open file or by file name. It
            is set for the whole process.
        timeout_s: Seconds to wait for a batch of the workers before it is an error; 0 waits for
            ever.
        stall_timeout_s: Seconds without any progress of the workers (no sample read, no batch made)
            after which waiting for them is an error that shows what they do; half of it is a
            warning. 0 waits for ever. "auto": 120, or 20 times the longest task so far if that is
            more. Not of torch's own iterator.
        in_order: Batches come as the sampler gives them; False hands over whichever is ready
            first.
        worker_nice: How much the training process goes before the workers where both want a CPU:
            0 (not at all) to 19, added to the niceness of the workers.
        executor: Who fetches: torch's own iterator, or this package's engine: ``"inline"`` the
            training process, ``"gather"`` rows of tensors in one call, ``"workers"`` processes,
            ``"sidecar"`` num_workers threads outside the training process.
        page_lock: How batches of the engine come into page-locked memory: ``"copy"`` copies each,
            ``"register"`` has CUDA lock the engine's own memory once.
        probe: Read some samples before the workers start, and choose what suits them. False reads
            none: for datasets that must not be read then, or whose keys are not 0, 1, 2, ...

    Raises:
        OptionsError: A value is impossible.
    """

    # Described above and not below each field, because that is where LightningCLI takes its help.
    num_workers: int | Auto = "auto"
    pin_memory: bool | Auto = "auto"
    persistent_workers: bool | Auto = "auto"
    prefetch_factor: int | Auto = "auto"
    multiprocessing_context: Literal["auto", "fork", "spawn", "forkserver"] = "auto"
    sharing_strategy: Literal["auto", "file_descriptor", "file_system"] = "auto"
    timeout_s: float = 0
    stall_timeout_s: float | Auto = "auto"
    in_order: bool = True
    worker_nice: int | Auto = "auto"
    executor: Literal["auto", ExecutorName] = "auto"
    page_lock: Literal["copy", "register"] = "copy"
    probe: bool = True

    def __post_init__(self) -> None:
        for name, lowest in (("num_workers", 0), ("prefetch_factor", 1), ("worker_nice", 0)):
            value = getattr(self, name)
            fine = value == "auto" or (type(value) is int and value >= lowest)
            check(name, value, fine, f'whole numbers from {lowest}, or "auto"')
        for name in ("pin_memory", "persistent_workers"):
            value = getattr(self, name)
            check(name, value, value == "auto" or type(value) is bool, 'True, False or "auto"')
        for name in ("in_order", "probe"):
            value = getattr(self, name)
            check(name, value, type(value) is bool, "True and False")
        check_among("multiprocessing_context", self.multiprocessing_context, _START_METHODS)
        check_among("sharing_strategy", self.sharing_strategy, _SHARING)
        check_among("executor", self.executor, EXECUTORS)
        check_among("page_lock", self.page_lock, PAGE_LOCKS)
        check(
            "timeout_s", self.timeout_s, is_seconds(self.timeout_s), "seconds from 0 (no timeout)"
        )
        stall = self.stall_timeout_s
        fine = stall == "auto" or is_seconds(stall)
        check("stall_timeout_s", stall, fine, 'seconds from 0 (no timeout), or "auto"')

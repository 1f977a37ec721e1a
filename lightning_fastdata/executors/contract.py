"""Who runs the fetch: one contract, several executors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from torch.utils.data import IterableDataset

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host.cpu import read_cpu_limit

if TYPE_CHECKING:
    from lightning_fastdata.batches.page_lock import PageLocks
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.executors.pool.crew_trial import CrewTrial
    from lightning_fastdata.order.epoch_order import EpochOrder
    from lightning_fastdata.stamps.batch_stamps import BatchStamps

ExecutorName: TypeAlias = Literal["inline", "gather", "workers", "sidecar"]


class Executor(Protocol):
    """Turns batches of indices into batches of data."""

    def start_epoch(self, batches: Iterable[Any], epoch: int) -> None:
        """Begin an epoch; what is left of the one before is dropped.

        ``batches`` are those of indices. Of a stream only the first item counts: how many samples
        each batch is to have, or None for single samples.
        """

    def __iter__(self) -> Executor: ...

    def __next__(self) -> Any:
        """Return the next batch; the user may keep it, and nothing will overwrite it."""

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each delivered batch from now on; None: no more."""

    def resize(self, workers: int) -> None:
        """Fetch with so many side processes from now on, without losing what is under way."""

    def close(self) -> None:
        """Stop threads and processes; batches handed out stay valid."""


@runtime_checkable
class ArmingExecutor(Executor, Protocol):
    """An executor that begins the next epoch before the present one has ended."""

    def start_epoch(
        self, batches: Iterable[Any], epoch: int, order: EpochOrder | None = None
    ) -> None:
        """Begin an epoch, with the batches under way if it is the one that was armed."""

    def arm(self, order: EpochOrder) -> None:
        """Fetch the first batches of the next epoch as soon as there is nothing else to fetch."""


def open_executor(
    name: ExecutorName,
    plan: FetchPlan,
    *,
    workers: int = 1,
    threads: int = 8,
    page_locks: PageLocks | None = None,
    trial: CrewTrial | None = None,
) -> Executor:
    """Start an executor.

    Args:
        name: ``"inline"``: the caller fetches. ``"gather"``: tensors and arrays, one call a batch.
            ``"workers"``: side processes of one thread, for Python code. ``"sidecar"``: threads in
            side processes, for code that waits or releases the GIL; it cannot key global
            generators by sample, as its threads share them. A stream (``IterableDataset``) has
            ``"inline"`` and ``"workers"`` only.
        plan: What to fetch.
        workers: Side processes; of ``"gather"`` threads that gather ahead, 0 for none.
        threads: Threads in each side process of a sidecar.
        page_locks: Locks the memory of batches for a device that reads it.
        trial: Of side processes that read by index, what earlier ones have shown; None: nothing.

    Raises:
        OptionsError: There is no such executor, or it cannot run this plan.
    """
    from lightning_fastdata.batches.slots import shared_slots_supported

    if name not in get_args(ExecutorName):
        raise OptionsError(
            f"executor is {name!r}; there are {', '.join(map(repr, get_args(ExecutorName)))}."
        )
    stream = isinstance(plan.dataset, IterableDataset)
    if stream and name in ("gather", "sidecar"):
        raise OptionsError(
            f"executor is {name!r}, which reads by index, and {type(plan.dataset).__name__} is a "
            "stream. Use 'workers' or 'inline'."
        )
    if name == "inline":
        from lightning_fastdata.executors.inline import InlineExecutor

        return InlineExecutor(plan)
    if name == "gather":
        from lightning_fastdata.executors.gather.executor import GatherExecutor

        # The caller helps while it waits, and more threads than CPUs hinder each other.
        spare = max(1, read_cpu_limit().usable_cpus - 1)
        return GatherExecutor(plan, threads=min(workers, spare), page_locks=page_locks)
    if not shared_slots_supported():
        raise OptionsError(f"executor {name!r} needs Linux; use 'torch' or 'inline' here.")
    if stream:
        from lightning_fastdata.executors.stream import StreamExecutor

        return StreamExecutor(plan, processes=workers)
    from lightning_fastdata.executors.pool.scheduler import PoolExecutor

    threads = threads if name == "sidecar" else 1
    return PoolExecutor(
        plan, processes=workers, threads=threads, page_locks=page_locks, trial=trial
    )

"""Who fetches the batches of a loader: one row of traits for each executor.

Other code asks for a trait, and compares no names. Executors of ``ext`` and of other packages are
found by name in ``registry``. Before processes are forked, the dataset is searched for handles that
they must not share.
"""

from __future__ import annotations

import multiprocessing
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch.utils.data import IterableDataset

from lightning_fastdata import registry
from lightning_fastdata.batches.keyed import own_dataset
from lightning_fastdata.errors import FastDataWarning, OptionsError, WorkerError
from lightning_fastdata.executors.ray import Ray
from lightning_fastdata.host.memory import allow_open_files
from lightning_fastdata.tree import find_instances, loaded_classes

if TYPE_CHECKING:
    from lightning_fastdata.batches.staged import PinThread
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.executors.pool.watches import CrewTrial
    from lightning_fastdata.executors.standby import Ways
    from lightning_fastdata.executors.stream_state import LanePosition, StreamHistory
    from lightning_fastdata.stamps.batch_stamps import BatchStamps
    from lightning_fastdata.types import Batch

OPEN_CONNECTION: Final = "an open connection"
_FILES_OF_WORKER: Final = 8
"""Number of open files that a side process needs, including those that exist while it starts."""
_FILES_OF_BATCH: Final = 4
ExecutorName: TypeAlias = Literal["torch", "inline", "gather", "workers", "ray"]
AnyExecutor: TypeAlias = ExecutorName | str | Ray
"""Name of an executor of this or another package, or an executor with arguments of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The executor that is to fetch, and what it is given for that."""

    executor: AnyExecutor
    """Executor as the user asked for it."""
    workers: int = 1
    """Number of side processes, or for ``"gather"`` of threads that gather ahead (0: none)."""
    pin_thread: PinThread | None = None
    """Thread that copies batches into page-locked memory, which ``"inline"`` does not use; None: no
    copies are made."""
    trial: CrewTrial | None = None
    """Trial with half of the side processes that read by index; None: a new one is made."""
    ways: Ways | None = None
    """What is known of reading in the training process as well; None: side processes alone read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorKind:
    """The traits of an executor."""

    what: str
    """Who fetches, in words."""
    start: Callable[[FetchPlan, Resources], Executor] | None
    """Function that starts the executor; None: torch's own iterator, which has its own settings."""
    reads_streams: bool = True
    """Whether it reads a dataset that has no index (``IterableDataset``)."""
    caller_reads: bool = False
    """Whether the training process reads, sample by sample, whatever number of workers is set."""
    gathers: bool = False
    """Whether it copies rows of columns, with a batch's indices as one array; the caller helps."""
    side_processes: bool = False
    """Whether ``num_workers`` processes of this package fetch into memory files, which only Linux
    has. Between epochs the processes are kept if that is asked for; threads and memory, which cost
    nothing, always are. For data with an index, ``resize(workers, look_ahead)`` of the executor
    changes their number, and that of batches under way, within an epoch, and loses nothing."""
    room_elsewhere: Callable[[AnyExecutor, int], int] | None = None
    """Function that returns how many workers elsewhere each of a number of ranks has room for. CPUs
    of this machine do not limit them, and one worker makes a whole batch. None: the workers are on
    this machine, and share out the samples of one batch."""
    workers: tuple[int, str] | None = None
    """``num_workers`` and its reason, where CPUs and samples do not decide it; None: they do."""

    @property
    def elsewhere(self) -> bool:
        """Whether workers may be on other machines."""
        return self.room_elsewhere is not None

    @property
    def is_torch(self) -> bool:
        """Whether it is torch's own iterator."""
        return self.start is None


def _start_inline(plan: FetchPlan, _: Resources) -> Executor:
    from lightning_fastdata.executors.inline import InlineExecutor

    return InlineExecutor(plan)


def _start_gather(plan: FetchPlan, given: Resources) -> Executor:
    from lightning_fastdata.executors.gather import GatherExecutor
    from lightning_fastdata.host.cpu import read_cpu_limit

    # The caller helps while it waits, and more threads than CPUs hinder each other.
    spare = max(1, read_cpu_limit().usable_cpus - 1)
    return GatherExecutor(plan, threads=min(given.workers, spare), pin_thread=given.pin_thread)


def _start_processes(plan: FetchPlan, given: Resources) -> Executor:
    from lightning_fastdata.executors.pool.scheduler import PoolExecutor, StreamExecutor

    warn_before_fork(plan)
    allow_open_files(_FILES_OF_WORKER * given.workers + _FILES_OF_BATCH * plan.look_ahead)
    if isinstance(plan.dataset, IterableDataset):
        return StreamExecutor(plan, given)
    pool = PoolExecutor(plan, given)
    if given.ways is None:
        return pool
    from lightning_fastdata.executors.standby import StandbyExecutor

    return StandbyExecutor(plan, pool, given.ways, given.pin_thread)


KINDS: Final[Mapping[str, ExecutorKind]] = {
    "torch": ExecutorKind(what="torch's own iterator", start=None),
    "inline": ExecutorKind(
        what="the training process",
        start=_start_inline,
        caller_reads=True,
        workers=(0, "not used: the training process fetches"),
    ),
    "gather": ExecutorKind(
        what="threads that copy rows of tensors and arrays, one call for each column",
        start=_start_gather,
        reads_streams=False,
        gathers=True,
        workers=(1, "a thread, which gathers ahead"),
    ),
    "workers": ExecutorKind(
        what="side processes",
        start=_start_processes,
        side_processes=True,
    ),
}


def find_kind(executor: object) -> ExecutorKind | None:
    """Return the traits of an executor; None: there is no such executor.

    Raises:
        OptionsError: Its package cannot be loaded, or registers no ExecutorKind.
    """
    if not isinstance(executor, str | Ray):
        return None
    name = "ray" if isinstance(executor, Ray) else executor
    found = KINDS.get(name) or registry.executor(name)
    if not isinstance(found, ExecutorKind | None):
        raise OptionsError(
            f"executor={name!r} is registered as {found!r}, which is no ExecutorKind."
        )
    return found


def kind_of(executor: AnyExecutor) -> ExecutorKind:
    """Return the traits of an executor.

    Raises:
        OptionsError: There is no such executor.
    """
    found = find_kind(executor)
    if found is None:
        known = ", ".join(map(repr, ("auto", *KINDS, *registry.executor_names())))
        raise OptionsError(f"executor is {executor!r}; allowed are {known}.")
    return found


def executor_for(asked: AnyExecutor, *, stream: bool, workers: int) -> AnyExecutor:
    """Return the executor itself if it can fetch, or else the one that fetches in its place.

    An executor that reads by index cannot read a ``stream``. Without workers the training process
    fetches, as in torch.
    """
    able = "workers" if stream and not kind_of(asked).reads_streams else asked
    return "inline" if kind_of(able).side_processes and not workers else able


def able_to_read_on(executor: AnyExecutor, *, workers: int, asked: bool) -> AnyExecutor:
    """Return the executor itself if it can pass over samples that fail, or else a substitute.

    Torch's own iterator cannot. ``asked``: whether passing over samples was asked for.
    """
    from lightning_fastdata.batches.memory import shared_slots_supported

    if not (asked and kind_of(executor).is_torch):
        return executor
    able: ExecutorName = "workers" if workers and shared_slots_supported() else "inline"
    if workers:
        warnings.warn(
            "Torch's own iterator does not read on where a sample fails (on_bad_sample), so that "
            f"{KINDS[able].what} read{'s' * KINDS[able].caller_reads} in its place.",
            FastDataWarning,
            stacklevel=3,
        )
    return able


def unsuited(
    executor: Literal["auto"] | AnyExecutor, *, iterable: bool, workers: int
) -> Iterator[str]:
    """Yield why an executor that the user chose will not be the one that fetches."""
    if executor == "auto":
        return
    if iterable and not kind_of(executor).reads_streams:
        yield (
            f"executor={executor!r} reads by index, which a stream does not have; 'workers' reads "
            "it."
        )
    elif not workers and kind_of(executor).side_processes:
        yield f"executor={executor!r} has num_workers=0, so the training process reads itself."


def room_elsewhere(executor: AnyExecutor, ranks: int) -> int | None:
    """Return how many workers elsewhere each of the ranks has room for; None: workers are here.

    Raises:
        OptionsError: A package that the executor needs is not installed.
        WorkerError: No cluster can be reached or started.
    """
    room = kind_of(executor).room_elsewhere
    return None if room is None else room(executor, ranks)


def open_executor(plan: FetchPlan, given: Resources) -> Executor:
    """Start an executor that can read the plan's dataset, see :func:`executor_for`; not torch's.

    Raises:
        OptionsError: This system lacks what the executor needs.
    """
    from lightning_fastdata.batches.memory import shared_slots_supported

    kind = kind_of(given.executor)
    if kind.side_processes and not shared_slots_supported():
        raise OptionsError(
            f"executor {given.executor!r} needs memory files of Linux; use 'torch' or 'inline' "
            "here."
        )
    assert kind.start is not None
    return kind.start(plan, given)


def open_handles(dataset: object) -> list[str]:
    """Return in words what a dataset holds open that two processes cannot both use.

    Found are open connections to other programs and of sqlite3, files of h5py, environments of
    LMDB, and CUDA tensors. Files and archives are no hazard, as each worker opens them anew
    (:func:`~lightning_fastdata.host.system_calls.open_anew`). The search looks where
    :func:`~lightning_fastdata.tree.find_instances` looks, imports nothing, and runs no code of the
    user.
    """
    databases = (
        *loaded_classes("sqlite3", "Connection"),
        *loaded_classes("h5py", "File", "Dataset"),
        *loaded_classes("lmdb", "Environment"),
    )
    kinds = (socket.socket, torch.Tensor, *databases)
    found = [_told(each) for each in find_instances(dataset, kinds)]
    return list(dict.fromkeys(text for text in found if text))


def warn_before_fork(plan: FetchPlan) -> None:
    """Warn of open handles of the dataset that workers would share, if they are forked."""
    handles = open_handles(plan.dataset) if forks(plan.context) else []
    if handles:
        warnings.warn(
            f"The dataset {type(own_dataset(plan.dataset)).__name__} holds {', '.join(handles)}, "
            "opened in the training process. Workers that are forked share it, and may read wrong "
            "samples, or hang. Open it on first use in __getitem__ and not in __init__, or set "
            'multiprocessing_context="forkserver", which opens it in each worker.',
            FastDataWarning,
            stacklevel=2,
        )


def refuse_late_fork(plan: FetchPlan) -> None:
    """Raise an error if workers that are forked now would share open handles with this process.

    Raises:
        WorkerError: The dataset holds such a handle, maybe only since the training process has read
            a sample itself.
    """
    handles = open_handles(plan.dataset) if forks(plan.context) else []
    if handles:
        raise WorkerError(
            f"the dataset holds {', '.join(handles)}, opened in the training process, which "
            "workers that are forked now would share. Read the dataset in workers alone, or set "
            'multiprocessing_context="forkserver".'
        )


def forks(context: BaseContext | str | None) -> bool:
    """Return whether a context, given as such or by name, forks; None: Python's default context."""
    if not isinstance(context, BaseContext):
        context = multiprocessing.get_context(context)
    return bool(context.get_start_method() == "fork")


def _told(handle: Any) -> str:
    """Return what a handle is, in words; empty: it may be shared."""
    package = type(handle).__module__.partition(".")[0].replace("builtins", "lmdb")
    kind = f"{package}.{type(handle).__qualname__}"
    if isinstance(handle, torch.Tensor):
        return f"tensors on {handle.device}" if handle.device.type == "cuda" else ""
    try:
        if isinstance(handle, socket.socket):
            return OPEN_CONNECTION if handle.fileno() >= 0 else ""
        if package == "sqlite3":
            _ = handle.total_changes  # raises if it is closed
        elif package == "h5py" and not handle:
            return ""
    except Exception:  # closed, or no file of the system's
        return ""
    return f"an open {kind}"


class Executor(Protocol):
    """Turns batches of indices into batches of data."""

    def start_epoch(self, batches: Iterable[Any], epoch: int) -> None:
        """Begin an epoch; what is left of the one before is dropped.

        ``batches`` are batches of indices. For a stream only the first item counts: the number of
        samples that each batch is to have, or None for single samples.
        """

    def __iter__(self) -> Executor: ...

    def __next__(self) -> Batch:
        """Return the next batch; the user may keep it, and nothing will overwrite it."""

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each delivered batch to ``records`` from now on; None: stop."""

    def close(self) -> None:
        """Stop threads and processes; batches handed out stay valid."""


@runtime_checkable
class StreamReader(Executor, Protocol):
    """An executor that reads streams, and can resume within one."""

    def start_epoch(
        self, batches: Iterable[Any], epoch: int, *, resume: Sequence[LanePosition] | None = None
    ) -> None:
        """Begin an epoch, at a position in the stream if one is given."""

    @property
    def history(self) -> StreamHistory | None:
        """Positions of the stream after each of its last batches; None: it is no stream."""

"""How a loader is set up, for the model, and how busy its workers were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch.utils.data import IterableDataset, default_collate

from lightning_fastdata.batches.collate import collate_samples
from lightning_fastdata.batches.keyed import fetches_in_batches
from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.insight.model.events import LoaderSetup
from lightning_fastdata.loading.source import makes_batches, reads_with_torch
from lightning_fastdata.planning.worker_count import look_ahead_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_fastdata.host.usage import SpentTime
    from lightning_fastdata.insight.measure.metrics import StageSummary
    from lightning_fastdata.insight.model.events import Scheduling
    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.stamps.batch_stamps import BatchStamps

_TORCH_PREFETCH: Final = 2
"""Torch's own default."""
_ONE_THREAD: Final = 1.1
_NS_PER_S: Final = 1e9


def setup_of(loader: FastDataLoader, *, cpus: float, step_cpus: float) -> LoaderSetup | None:
    """Return the setup of a loader; None for what the model does not know.

    It knows loaders whose workers read by themselves: torch's own, ``"workers"`` and ``"sidecar"``,
    and those that read in the training process when a batch is asked for. It knows neither
    ``"gather"``, whose caller helps its threads, nor datasets that stay on the device.

    Whether the samples of a batch can be shared out is decided by the first one that is read: the
    setup says ``"sample"`` where the loader would, also if the samples then turn out to differ in
    shape. How far a loader is ahead may be less than is said here where memory is short.

    Args:
        loader: As it is set up now; it is not iterated.
        cpus: CPUs this process and its workers may use.
        step_cpus: CPUs the training process uses between two requests, see
            :class:`TrainingTimes`.
    """
    streamed = isinstance(loader.dataset, IterableDataset)
    torchs = reads_with_torch(loader)
    kind = KINDS[loader.executor]
    gathers = kind.gathers and not streamed and not torchs
    if gathers or loader.device_resident is not False:
        return None
    workers = loader.num_workers if torchs or not kind.caller_reads else 0
    asked = loader.asked_prefetch_factor
    scheduling: Scheduling = "sample" if splits_batches(loader) else "queue"
    if torchs or streamed:
        scheduling = "batch"
    if workers == 0:
        ahead = 1
    elif scheduling == "batch":
        ahead = workers * (asked or _TORCH_PREFETCH)
    else:
        ahead = look_ahead_batches(
            workers,
            prefetch=asked,
            batch_size=loader.batch_size or 1,
            split=scheduling == "sample",
        )
    return LoaderSetup(
        workers=workers,
        look_ahead=ahead,
        scheduling=scheduling,
        in_order=loader.in_order,
        cpus=cpus,
        step_cpus=step_cpus,
        worker_nice=loader.worker_nice,
        inline=kind.caller_reads,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTimes:
    """What the training process did in an interval, e.g. an epoch without its start."""

    cpu_s: float
    """Its CPU seconds (``time.process_time``), without its workers."""
    wall_s: float
    """Seconds that passed."""
    waited_s: float
    """Of these, the seconds waited for batches."""
    runqueue_s: float = 0.0
    """Of these, the seconds in which the thread that trains was ready but had no CPU: the second
    number of ``/proc/thread-self/schedstat``, in ns. 0 where it is not known, which gives too few
    CPUs if there are fewer than would be used."""
    loading_cpu_s: float = 0.0
    """Of ``cpu_s``, what threads took that load, and not the training."""

    @property
    def step_cpus(self) -> float:
        """CPUs that the training process uses between two requests if it is alone, at least 0.

        1 if a single thread computes all the time, next to 0 if it waits for a device. What is up
        to 10 % above 1 counts as 1: taking batches uses a CPU, too.
        """
        working_s = self.wall_s - self.waited_s - self.runqueue_s
        own_s = self.cpu_s - self.loading_cpu_s
        found = max(0.0, own_s / working_s) if working_s > 0 else 0.0
        return min(1.0, found) if found <= _ONE_THREAD else found

    @property
    def step_queued(self) -> float:
        """Part of the steps in which the training was ready but had no CPU, 0 to 1.

        Of the time between delivery and the next request. Waits for batches are woken up from,
        which queues for a CPU as well. A step that uses few CPUs is hardly ever queued, so that as
        much of ``runqueue_s`` counts as it uses CPUs.
        """
        steps_s = self.wall_s - self.waited_s
        if steps_s <= 0:
            return 0.0
        return min(1.0, self.runqueue_s / steps_s) * min(1.0, self.step_cpus)


def stage_times(
    summary: StageSummary, stamps: Sequence[BatchStamps], used: SpentTime
) -> TrainingTimes:
    """Return what the training process did in a measured stage.

    Args:
        summary: Of the stage.
        stamps: The newest ones of its loader.
        used: What the training process used during that stage.
    """
    return TrainingTimes(
        cpu_s=used.cpu_s,
        wall_s=used.wall_s,
        waited_s=_waited_s(summary),
        runqueue_s=used.runqueue_s,
        loading_cpu_s=_own_loading_s(stamps) * summary.steps,
    )


def splits_batches(loader: FastDataLoader) -> bool:
    """Return whether this package's executors share out the samples of one batch among workers.

    They do where samples of one form, read one at a time, are collated by default.
    """
    transform = loader.transform
    drawn = transform is not None and transform.in_worker(on_device=loader.on_device) is not None
    default = loader.collate_fn in (default_collate, collate_samples) and not drawn
    return default and makes_batches(loader) and not fetches_in_batches(loader.dataset)


def _waited_s(summary: StageSummary) -> float:
    """Return the time that all steps waited for batches."""
    warm_ms = 0.0 if summary.wait is None else summary.wait.mean_ms
    cold_ms = summary.cold_wait_ms or 0.0
    warm_steps = summary.steps - summary.cold_steps
    return (warm_ms * warm_steps + cold_ms * summary.cold_steps) / 1e3


def _own_loading_s(stamps: Sequence[BatchStamps]) -> float:
    """Return the CPU time per batch that the training process itself took to load."""
    own = [
        task.ended_ns - task.began_ns if task.cpu_ns is None else task.cpu_ns
        for batch in stamps
        for task in batch.tasks
        if task.process < 0
    ]
    return sum(own) / max(1, len(stamps)) / _NS_PER_S


_SEVERAL_THREADS: Final = 1.3
"""CPUs: up to there, what sends batches away explains it."""


def by_epoch(stamps: Sequence[BatchStamps]) -> list[list[BatchStamps]]:
    """Return the stamps of each epoch."""
    epochs: list[list[BatchStamps]] = []
    for batch in stamps:
        if batch.first or not epochs:
            epochs.append([])
        epochs[-1].append(batch)
    return epochs


def busy_share(stamps: Sequence[BatchStamps], workers: int) -> float | None:
    """Return the busy part of the time that the steady batches of all epochs took, 0 to 1.

    Args:
        stamps: Of one loader, in the order in which batches were delivered.
        workers: That shared the work; None is returned for 0.
    """
    busy = span = 0.0
    for epoch in by_epoch(stamps):
        began, ended = epoch[0].delivered_ns, epoch[-1].delivered_ns
        span += ended - began
        for batch in epoch:
            for task in batch.tasks:
                busy += max(0, min(task.ended_ns, ended) - max(task.began_ns, began))
    return min(1.0, busy / span / workers) if workers and span > 0 else None


def worker_threads(stamps: Sequence[BatchStamps]) -> float:
    """Return how many CPUs a worker uses while its reading thread computes, at least 1."""
    known = [task for batch in stamps for task in batch.tasks if task.helpers_ns is not None]
    own = sum(task.cpu_ns or 0 for task in known)
    found = 1 + sum(task.helpers_ns or 0 for task in known) / own if own else 1.0
    return found if found >= _SEVERAL_THREADS else 1.0


def runqueue_share(stamps: Sequence[BatchStamps]) -> float | None:
    """Return the part of the workers' busy time in which they were ready, but without a CPU."""
    known = [task for batch in stamps for task in batch.tasks if task.runqueue_ns is not None]
    length = sum(task.ended_ns - task.began_ns for task in known)
    return sum(task.runqueue_ns or 0 for task in known) / length if length else None


def interpreter_share(epochs: Sequence[Sequence[BatchStamps]]) -> float | None:
    """Return how many CPUs the reading threads of the busiest process used."""
    ran: dict[int, float] = {}
    threads: dict[int, set[int]] = {}
    span = 0.0
    for epoch in epochs:
        began, ended = epoch[0].delivered_ns, epoch[-1].delivered_ns
        span += ended - began
        for task in (task for batch in epoch for task in batch.tasks):
            inside = min(task.ended_ns, ended) - max(task.began_ns, began)
            if task.cpu_ns is None or inside <= 0:
                continue
            used = task.cpu_ns * inside / max(1, task.ended_ns - task.began_ns)
            ran[task.process] = ran.get(task.process, 0.0) + used
            threads.setdefault(task.process, set()).add(task.thread)
    shares = [used / span for process, used in ran.items() if len(threads[process]) > 1 and span]
    return max(shares, default=None)

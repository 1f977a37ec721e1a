"""How a loader is set up, for the model, and how busy its workers were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch.utils.data import IterableDataset, default_collate

from lightning_fastdata.batches.collate import collate_samples
from lightning_fastdata.batches.keyed import fetches_in_batches
from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.host.usage import SpentTime
from lightning_fastdata.insight.measure.metrics import StageSummary
from lightning_fastdata.insight.model.events import LoaderSetup, Scheduling
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.source import makes_batches, reads_with_torch
from lightning_fastdata.planning.worker_count import look_ahead_batches
from lightning_fastdata.stamps.batch_stamps import BatchStamps

_TORCH_PREFETCH: Final = 2
"""Torch's own default."""
_ONE_THREAD: Final = 1.1
_SEVERAL_THREADS: Final = 1.3
"""CPUs: up to there, what sends batches away explains it."""


def setup_of(loader: FastDataLoader, *, cpus: float, step_cpus: float) -> LoaderSetup | None:
    """Return the setup of a loader; None for what the model does not know.

    It knows loaders whose workers read by themselves: torch's own, ``"workers"`` and ``"sidecar"``,
    and those that read in the training process when a batch is asked for. It knows neither
    ``"gather"``, whose caller helps its threads, nor datasets that stay on the device. It takes
    samples to be of one shape, and memory to suffice for the whole look-ahead.

    Args:
        loader: As it is set up now; it is not iterated.
        cpus: CPUs this process and its workers may use.
        step_cpus: CPUs the training process uses between two requests, see
            :class:`TrainingTimes`.
    """
    streamed = isinstance(loader.dataset, IterableDataset)
    torchs = reads_with_torch(loader)
    kind = KINDS[loader.executor]
    if (kind.gathers and not streamed and not torchs) or loader.device_resident is not False:
        return None
    workers = loader.num_workers if torchs or not kind.caller_reads else 0
    scheduling: Scheduling = "sample" if splits_batches(loader) else "queue"
    if torchs or streamed:
        scheduling = "batch"
    asked, ahead = loader.asked_prefetch_factor, 1
    if workers and scheduling == "batch":
        ahead = workers * (asked or _TORCH_PREFETCH)
    elif workers:
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
    """Of these, what was waited for batches."""
    runqueue_s: float = 0.0
    """Of these, what the thread that trains was ready but had no CPU: the second number of
    ``/proc/thread-self/schedstat``. 0 where it is not known, which gives too few CPUs."""
    loading_cpu_s: float = 0.0
    """Of ``cpu_s``, what threads took that load, and not the training."""

    @property
    def step_cpus(self) -> float:
        """CPUs that the training process uses between two requests if it is alone.

        1 if a single thread computes all the time, next to 0 if it waits for a device. What is up
        to 10 % above 1 counts as 1: taking batches uses a CPU, too.
        """
        working_s = self.wall_s - self.waited_s - self.runqueue_s
        own_s = self.cpu_s - self.loading_cpu_s
        found = max(0.0, own_s / working_s) if working_s > 0 else 0.0
        return min(1.0, found) if found <= _ONE_THREAD else found

    @property
    def step_queued(self) -> float:
        """Part of the steps, from delivery to request, in which the training had no CPU, 0 to 1.

        Waking up from a wait queues for a CPU, too. A step that uses few CPUs is hardly ever
        queued, so that as much of ``runqueue_s`` counts as it uses CPUs.
        """
        steps_s = self.wall_s - self.waited_s
        if steps_s <= 0:
            return 0.0
        return min(1.0, self.runqueue_s / steps_s) * min(1.0, self.step_cpus)


def stage_times(
    summary: StageSummary, stamps: Sequence[BatchStamps], used: SpentTime
) -> TrainingTimes:
    """Return what the training process did in a stage: with its newest stamps, and what it used."""
    warm_ms = 0.0 if summary.wait is None else summary.wait.mean_ms
    warm_steps = summary.steps - summary.cold_steps
    waited_ms = warm_ms * warm_steps + (summary.cold_wait_ms or 0.0) * summary.cold_steps
    own_ns = [
        task.ended_ns - task.began_ns if task.cpu_ns is None else task.cpu_ns
        for batch in stamps
        for task in batch.tasks
        if task.process < 0
    ]
    return TrainingTimes(
        cpu_s=used.cpu_s,
        wall_s=used.wall_s,
        waited_s=waited_ms / 1e3,
        runqueue_s=used.runqueue_s,
        loading_cpu_s=sum(own_ns) / 1e9 / max(1, len(stamps)) * summary.steps,
    )


def splits_batches(loader: FastDataLoader) -> bool:
    """Return whether this package's executors share out the samples of one batch among workers.

    They do where samples of one form, read one at a time, are collated by default.
    """
    transform = loader.transform
    drawn = transform is not None and transform.in_worker(on_device=loader.on_device) is not None
    default = loader.collate_fn in (default_collate, collate_samples) and not drawn
    return default and makes_batches(loader) and not fetches_in_batches(loader.dataset)


def by_epoch(stamps: Sequence[BatchStamps]) -> list[list[BatchStamps]]:
    """Return the stamps of each epoch."""
    epochs: list[list[BatchStamps]] = []
    for batch in stamps:
        if batch.first or not epochs:
            epochs.append([])
        epochs[-1].append(batch)
    return epochs


def busy_share(stamps: Sequence[BatchStamps], workers: int) -> float | None:
    """Return the busy part of the time that steady batches took, 0 to 1; None for 0 workers."""
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
    ran: defaultdict[int, float] = defaultdict(float)
    threads: defaultdict[int, set[int]] = defaultdict(set)
    span = 0.0
    for epoch in epochs:
        began, ended = epoch[0].delivered_ns, epoch[-1].delivered_ns
        span += ended - began
        for task in (task for batch in epoch for task in batch.tasks):
            inside = min(task.ended_ns, ended) - max(task.began_ns, began)
            if task.cpu_ns is not None and inside > 0:
                ran[task.process] += task.cpu_ns * inside / max(1, task.ended_ns - task.began_ns)
                threads[task.process].add(task.thread)
    shares = [used / span for process, used in ran.items() if len(threads[process]) > 1 and span]
    return max(shares, default=None)

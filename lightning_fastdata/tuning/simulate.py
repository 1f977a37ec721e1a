"""What a step would take with another loader: the recorded batches, replayed through a model.

Each batch costs what its stamps say: time on a CPU, time blocked, collation, hand-over, and the
training's own time until it asks for the next one. The model schedules these costs as torch's
DataLoader does (one batch a task, workers in turn) or as this package does (samples of one batch
over all workers; whole batches of actors), and lets everything that needs a CPU of a machine at the
same time share the CPUs there are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps
from lightning_fastdata.tuning.costs import BatchCost, LoaderSetup, transit_of_actors
from lightning_fastdata.tuning.events import EventModel

_NS_PER_MS: Final = 1e6
_SHORT: Final = 0.25
"""So many of a thread's pauses are no longer than it takes to get on with what is there."""
_NEXT_TASKS: Final = 16
_ONE_THREAD: Final = 1.1
"""CPUs: up to there, what sends batches away explains what is above one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model says of a steady run."""

    step_ms: float
    """From one request to the next, the mean."""
    wait_ms: float
    """Of that, the time waited for the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTimes:
    """What the training process did in an interval, e.g. an epoch without its start."""

    cpu_s: float
    """Its CPU seconds (``clock.process_time``), without its workers."""
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


def by_epoch(stamps: Sequence[BatchStamps]) -> list[list[BatchStamps]]:
    """Return the stamps of each epoch."""
    epochs: list[list[BatchStamps]] = []
    for batch in stamps:
        if batch.first or not epochs:
            epochs.append([])
        epochs[-1].append(batch)
    return epochs


def batch_costs(stamps: Sequence[BatchStamps], *, step_queued: float = 0.0) -> list[BatchCost]:
    """Return what each recorded batch cost but for the last, whose step is not known.

    Where the kernel does not separate time on a CPU from time blocked, all counts as blocked.

    Args:
        stamps: Of one loader, in the order in which batches were delivered.
        step_queued: Part of the recorded steps, waits for batches left out, in which the training
            was ready to run but had no CPU, 0 to 1.
    """
    handover, taking = transit_of_actors(stamps) or _transit(stamps)
    pause = min(handover, _quantile(list(_pauses(stamps)), _SHORT))
    task_ns = pause + _quantile(
        [
            task.ended_ns - task.began_ns - task.read_ns - task.collate_ns
            for batch in stamps
            for task in batch.tasks
        ],
        _SHORT,
    )
    costs = []
    for batch, following in pairwise(stamps):
        busy = collate = queued = slowest = 0.0
        tasks_ns = task_ns * len(batch.tasks)
        reading = pause * len(batch.tasks) - tasks_ns
        for task in batch.tasks:
            # Threads that collate compute: where less was on a CPU, the rest was blocked or queued.
            scale = 1.0
            if task.cpu_ns is not None:
                scale = min(1.0, task.cpu_ns / max(1, task.collate_ns))
                busy += task.cpu_ns - task.collate_ns * scale
            collate += task.collate_ns * scale
            queued += task.runqueue_ns or 0
            reading += task.ended_ns - task.began_ns - task.collate_ns * scale
            slowest = max(slowest, task.slowest_ns)
        cpu = max(0.0, busy - tasks_ns)
        blocked = max(0.0, reading - queued - cpu)
        costs.append(
            BatchCost(
                samples=max(1, batch.samples),
                cpu_ns=cpu,
                blocked_ns=blocked,
                collate_ns=collate,
                slowest_ns=min(slowest, cpu + blocked),
                handover_ns=handover,
                taking_ns=taking,
                step_ns=max(0, following.requested_ns - batch.delivered_ns) * (1 - step_queued),
                size_bytes=sum(task.way.size_bytes for task in batch.tasks if task.way),
                task_ns=task_ns,
            )
        )
    return costs


def _transit(stamps: Sequence[BatchStamps]) -> tuple[float, float]:
    """Return the hand-over of a batch that is waited for, and the taking of one that is there."""
    late: list[float] = []
    there: list[float] = []
    following: dict[int, list[TaskStamps]] = {}
    for batch in reversed(stamps):
        if not batch.tasks:
            continue
        last = max(batch.tasks, key=lambda task: task.ended_ns)
        made = max(last.ended_ns, batch.requested_ns)
        # A worker that computes in Python holds the interpreter that the hand-over waits for. It
        # would not if it were idle: that time is what its next batch costs.
        busy = sum(
            task.held_ns(made, batch.delivered_ns) for task in following.get(last.process, ())
        )
        queued = batch.own.runqueue_ns or 0
        way = max(0, batch.delivered_ns - made - busy - queued)
        (late if last.ended_ns > batch.requested_ns else there).append(way)
        for task in batch.tasks:
            kept = following.setdefault(task.process, [])
            kept.append(task)
            del kept[:-_NEXT_TASKS]
    taking = statistics.fmean(there or late or [0])
    return max(taking, statistics.median(late or there or [0])), taking


def _pauses(stamps: Sequence[BatchStamps]) -> Iterator[int]:
    """Yield the times between the tasks of each process."""
    ended: dict[int, int] = {}
    tasks = [task for batch in stamps for task in batch.tasks]
    for task in sorted(tasks, key=lambda task: task.began_ns):
        if task.process in ended:
            yield max(0, task.began_ns - ended[task.process])
        ended[task.process] = task.ended_ns


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[int(len(values) * part)] if values else 0.0


def scaled(
    costs: Sequence[BatchCost],
    *,
    cpu: float = 1.0,
    blocked: float = 1.0,
    collate: float = 1.0,
    handover: float = 1.0,
    slow_samples: bool = True,
) -> list[BatchCost]:
    """Return the costs with some of them scaled by factors; 0 removes one.

    ``cpu`` and ``blocked`` are of reading. Without ``slow_samples``, no sample takes longer than
    the others of its batch.
    """
    found = []
    for cost in costs:
        read = cost.cpu_ns + cost.blocked_ns
        keep = 1.0
        if not slow_samples and cost.samples > 1 and read > 0:
            keep = min(1.0, (read - cost.slowest_ns) / read * cost.samples / (cost.samples - 1))
        slowest = cost.slowest_ns if keep == 1.0 else read * keep / cost.samples
        factor = (cost.cpu_ns * cpu + cost.blocked_ns * blocked) / read if read > 0 else 1.0
        found.append(
            replace(
                cost,
                cpu_ns=cost.cpu_ns * cpu * keep,
                blocked_ns=cost.blocked_ns * blocked * keep,
                collate_ns=cost.collate_ns * collate,
                slowest_ns=slowest * factor,
                handover_ns=cost.handover_ns * handover,
                taking_ns=cost.taking_ns * handover,
            )
        )
    return found


def simulate(
    costs: Sequence[BatchCost], setup: LoaderSetup, *, least_steps: int = 200
) -> Prediction:
    """Return what a steady run of these batches, over and over, would take in this setup.

    It runs for ``least_steps`` or more, after a warm-up; fewer are faster, and less exact where
    costs differ much from batch to batch.

    Raises:
        ValueError: There are no costs.
    """
    if not costs:
        raise ValueError("There is nothing to simulate: no batch was recorded.")
    if setup.workers:
        # Whole rounds, in which every batch counts as often as every other.
        steps = -(-least_steps // len(costs)) * len(costs)
        # Until workers are where they would be after any number of rounds.
        rounds = 2 * setup.workers
        if setup.scheduling == "sample":
            rounds = -(-rounds // min(costs[0].samples, rounds))
        step, wait = EventModel(costs, setup).run(setup.look_ahead + rounds, steps)
    else:
        wait = statistics.fmean(each.cpu_ns + each.blocked_ns + each.collate_ns for each in costs)
        step = wait + statistics.fmean(each.step_ns for each in costs)
    return Prediction(step_ms=step / _NS_PER_MS, wait_ms=wait / _NS_PER_MS)

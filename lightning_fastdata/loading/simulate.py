"""What a step would take with another loader: the recorded batches, replayed through a model.

Each batch costs what its stamps say: time on a CPU, time blocked, collation, hand-over, and the
training's own time until it asks for the next one. The model schedules these costs as torch's
DataLoader does (one batch a task, workers in turn) or as this package does (samples of one batch
over all workers; whole batches of actors). Between two moments all speeds are constant. Everything
that wants a CPU of this machine at the same time shares the CPUs there are, by weight, as Linux
does it over times longer than a time slice:
https://docs.kernel.org/scheduler/sched-eevdf.html
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, TypeAlias

from lightning_fastdata.executors.pool.scheduler import rows_per_task
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps

Scheduling: TypeAlias = Literal["batch", "queue", "sample", "actors"]
_NS_PER_MS: Final = 1e6
_SHORT: Final = 0.25
"""Share of a thread's pauses that are no longer than it takes to go on with work that is there."""
_NEXT_TASKS: Final = 16
_ONE_THREAD: Final = 1.1
"""Most CPUs that count as a single thread: what sends batches away explains the part above 1."""
_DONE_NS: Final = 1e-3
_PARTS_PER_WORKER: Final = 2
"""Most parts of one batch for each worker: more keep workers no busier, and take long to model."""
_TAKING_FROM_TORCH: Final = 0.5
"""CPUs used to take a batch from torch: half of the time waits for the process that sends it."""
GOOD_ENOUGH: Final = 1.03
"""Ratio of step times up to which a smaller change is as good as the best one."""
WORKERS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of workers that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """What one batch costs, whoever makes it; times leave out any waiting for CPUs."""

    samples: int
    cpu_ns: float
    """CPU time to read the samples."""
    blocked_ns: float
    """Time to read and collate the samples that is neither on a CPU nor waiting for one."""
    collate_ns: float
    """CPU time to collate the batch."""
    slowest_ns: float
    """Part of ``cpu_ns + blocked_ns`` that the slowest sample takes."""
    handover_ns: float
    """Time from the end of the last task until the training, if it waits, has the batch."""
    taking_ns: float
    """Time to take the batch, if it was complete when it was asked for."""
    step_ns: float
    """Time from the delivery until the training asks for the next batch."""
    task_ns: float = 0.0
    """CPU time to begin and end one of the tasks that make the batch, not in ``cpu_ns``."""
    collate_blocked_ns: float = 0.0
    """Part of ``blocked_ns`` in which the batch is collated."""

    @property
    def read_ns(self) -> float:
        """Time to read the samples, on a CPU or blocked."""
        return self.cpu_ns + self.blocked_ns - self.collate_blocked_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSetup:
    """A loader as the model knows it."""

    workers: int
    """Number of side processes that read; 0: the training process does."""
    look_ahead: int
    """Number of batches under way at once; torch: ``workers * prefetch_factor``."""
    scheduling: Scheduling = "sample"
    """Who makes a batch. ``"batch"``: one worker makes all of it, in turn, as in torch.
    ``"queue"``: whichever is free does. ``"sample"``: whichever are free make some samples each.
    ``"actors"``: as ``"queue"``, with CPUs of a cluster in place of those of the training."""
    cpus: float = 1.0
    """CPUs this process and its workers may use."""
    step_cpus: float = 1.0
    """CPUs the training uses between two requests: 1 where it drives a device, or more."""
    inline: bool = False
    """Whether the executor reads in the training process, however many workers it has."""
    other_cpus: float = 0.0
    """Part of ``cpus`` that other programs use when they have to share."""
    worker_threads: float = 1.0
    """CPUs that a worker uses while it computes: above 1 where it starts threads of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model says of a steady run."""

    step_ms: float
    """Mean time from one request to the next."""
    wait_ms: float
    """Mean part of a step that is waited for the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTimes:
    """What the training process did in an interval, e.g. an epoch without its start."""

    cpu_s: float
    """CPU seconds of the process (``clock.process_time``), without its workers."""
    wall_s: float
    """Seconds that passed in the interval."""
    waited_s: float
    """Seconds of the interval that were waited for batches."""
    runqueue_s: float = 0.0
    """Seconds of the interval in which the thread that trains was ready but had no CPU: the second
    number of ``/proc/thread-self/schedstat``. 0 where it is not known, which gives too few CPUs."""
    loading_cpu_s: float = 0.0
    """Part of ``cpu_s`` that threads took for loading, and not for the training."""

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
        queued, so that ``runqueue_s`` counts by the share of a CPU that it uses.
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
        stamps: Stamps of one loader, in the order in which batches were delivered.
        step_queued: Part of the recorded steps, waits for batches left out, in which the training
            was ready to run but had no CPU, 0 to 1.
    """
    handover, taking = _transit(stamps)
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
        busy = collate = waits = queued = slowest = 0.0
        tasks_ns = task_ns * len(batch.tasks)
        reading = pause * len(batch.tasks) - tasks_ns
        for task in batch.tasks:
            # Threads that collate compute: where less was on a CPU, the rest was blocked or queued.
            scale = 1.0
            if task.cpu_ns is not None:
                scale = min(1.0, task.cpu_ns / max(1, task.collate_ns))
                busy += task.cpu_ns - task.collate_ns * scale
            collate += task.collate_ns * scale
            waits += task.collate_ns * (1 - scale)
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
                task_ns=task_ns,
                collate_blocked_ns=min(blocked, waits),
            )
        )
    return costs


def _transit(stamps: Sequence[BatchStamps]) -> tuple[float, float]:
    """Return the time to hand over a batch that is waited for, and to take one that is there."""
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
        later = () if last.way is not None else following.get(last.process, ())
        busy = sum(task.held_ns(made, batch.delivered_ns) for task in later)
        queued = batch.own.runqueue_ns or 0
        way = max(0, batch.delivered_ns - made - busy - queued)
        waited = last.ended_ns > batch.requested_ns
        if waited or last.way is None:
            (late if waited else there).append(way)
        if last.way is not None:  # it tells what the training had to do, waiting or not
            rest = batch.delivered_ns - max(last.way.landed_ns, batch.requested_ns)
            there.append(last.way.taken_ns + max(0, rest))
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
    slow_samples: bool = True,
) -> list[BatchCost]:
    """Return the costs with some of them scaled by factors; 0 removes one.

    ``cpu`` and ``blocked`` are factors on reading. Without ``slow_samples``, no sample takes longer
    than the others of its batch; one that is a batch by itself, no longer than half of all batches.
    """
    found = []
    usual = 0.0 if slow_samples or not costs else statistics.median(each.read_ns for each in costs)
    for cost in costs:
        waits, read = cost.blocked_ns - cost.collate_blocked_ns, cost.read_ns
        keep = 1.0
        if not slow_samples and read > 0:
            others = (read - cost.slowest_ns) * cost.samples
            keep = min(1.0, (usual if cost.samples == 1 else others / (cost.samples - 1)) / read)
        slowest = cost.slowest_ns if keep == 1.0 else read * keep / cost.samples
        factor = (cost.cpu_ns * cpu + waits * blocked) / read if read > 0 else 1.0
        found.append(
            replace(
                cost,
                cpu_ns=cost.cpu_ns * cpu * keep,
                blocked_ns=waits * blocked * keep + cost.collate_blocked_ns * collate,
                collate_ns=cost.collate_ns * collate,
                collate_blocked_ns=cost.collate_blocked_ns * collate,
                slowest_ns=slowest * factor,
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
        # Enough rounds for workers to be where they would be after any number of rounds.
        rounds = 2 * setup.workers
        if setup.scheduling == "sample":
            rounds = -(-rounds // min(costs[0].samples, rounds))
        step, wait = EventModel(costs, setup).run(setup.look_ahead + rounds, steps)
    else:
        wait = statistics.fmean(each.cpu_ns + each.blocked_ns + each.collate_ns for each in costs)
        step = wait + statistics.fmean(each.step_ns for each in costs)
    return Prediction(step_ms=step / _NS_PER_MS, wait_ms=wait / _NS_PER_MS)


def choose(
    costs: Sequence[BatchCost], candidates: Iterable[LoaderSetup]
) -> tuple[LoaderSetup, float]:
    """Return the first setup that is within 3 % of the best, and its predicted step in ms.

    Costs and candidates must not be empty; the smallest candidate comes first.
    """
    predicted = [(setup, simulate(costs, setup).step_ms) for setup in candidates]
    best = min(step_ms for _, step_ms in predicted)
    return next(each for each in predicted if each[1] <= GOOD_ENOUGH * best)


class EventModel:
    """One run of a training whose batches cost what is given, over and over.

    There is at least one batch, and the loader has at least one worker.
    """

    def __init__(self, costs: Sequence[BatchCost], setup: LoaderSetup) -> None:
        self._costs = costs
        self._setup = setup
        self._taking_cpus = _TAKING_FROM_TORCH if setup.scheduling == "batch" else 1.0
        self._now_ns = 0.0
        self._elsewhere = setup.scheduling == "actors"
        lanes = setup.workers if setup.scheduling == "batch" else 1
        self._lanes: list[deque[_Job]] = [deque() for _ in range(lanes)]
        self._idle = list(range(setup.workers))
        self._running: list[_Job] = []
        self._open: dict[int, int] = {}
        """Number of tasks still to do, by the batch under way."""
        self._complete: dict[int, float] = {}
        """Times in ns at which batches that wait for delivery were complete, by batch."""
        self._given = 0
        self._steps = 0
        self._sample_ns: float | None = None
        """Time of a sample, as the loader knows it: waiting for CPUs included; None: not known."""

    def run(self, warm_up: int, steps: int) -> tuple[float, float]:
        """Return the mean step, and the wait for a batch in it, in nanoseconds, after a warm-up."""
        began = waited = 0.0
        for number in range(warm_up + steps):
            if number == warm_up:
                began, waited = self._now_ns, 0.0
            waited += self.step()
        return (self._now_ns - began) / steps, waited / steps

    def step(self) -> float:
        """Ask for the next batch, and train on it; return how long it was waited for, in ns."""
        requested = self._now_ns
        self._give()
        batch, complete = self._wait()
        cost = self._cost(batch)
        # What was complete a moment ago may still be on its way, which takes no CPU.
        there = complete + max(0.0, cost.handover_ns - cost.taking_ns)
        self._pass(there - self._now_ns, cpus=0.0)
        self._pass(cost.taking_ns, cpus=self._taking_cpus)
        waited = self._now_ns - requested
        if self._setup.scheduling == "batch":
            self._give()
        self._pass(self._cost(self._steps).step_ns, cpus=self._setup.step_cpus)
        self._steps += 1
        return waited

    def arrival_ns(self, batch: int) -> float:  # noqa: ARG002
        """Return when a batch is there whose last task ends now."""
        return self._now_ns

    def _cost(self, number: int) -> BatchCost:
        return self._costs[number % len(self._costs)]

    def _give(self) -> None:
        while len(self._open) + len(self._complete) < self._setup.look_ahead:
            number, self._given = self._given, self._given + 1
            lane = number % len(self._lanes)
            jobs = self._jobs(number)
            self._open[number] = len(jobs)
            self._lanes[lane].extend(jobs)
        self._start()

    def _jobs(self, number: int) -> list[_Job]:
        cost, setup = self._cost(number), self._setup
        tasks = 1
        if setup.scheduling == "sample":
            rows = rows_per_task(
                cost.samples,
                self._sample_ns,
                workers=setup.workers,
                before=len(self._open) + len(self._complete),
                look_ahead=setup.look_ahead,
            )
            tasks = -(-cost.samples // rows)
        cpu = cost.cpu_ns + cost.collate_ns + tasks * cost.task_ns
        whole = max(1.0, cpu + cost.blocked_ns)
        parts = min(tasks, _PARTS_PER_WORKER * setup.workers)
        usual = max(0.0, whole - cost.slowest_ns) / max(1, cost.samples - 1)
        excess = max(0.0, cost.slowest_ns - usual) if parts > 1 else 0.0
        samples = cost.samples / parts
        jobs = [_Job(number, samples, (whole - excess) / parts, cpu / whole) for _ in range(parts)]
        jobs[number % parts].left_ns += excess
        return jobs

    def _start(self) -> None:
        shared = len(self._lanes) == 1
        for worker in self._idle.copy():
            lane = self._lanes[0 if shared else worker]
            if lane:
                job = lane.popleft()
                job.began_ns, job.worker = self._now_ns, worker
                self._running.append(job)
                self._idle.remove(worker)
            elif shared:
                break

    def _wait(self) -> tuple[int, float]:
        """Go on until the next batch is complete; return its number, and when that was."""
        awaited = min((*self._open, *self._complete))
        while awaited not in self._complete:
            self._advance(math.inf, cpus=0.0)
        return awaited, self._complete.pop(awaited)

    def _pass(self, work_ns: float, *, cpus: float) -> None:
        """Let the training process work for what takes ``work_ns`` at full speed."""
        left = work_ns
        while left > _DONE_NS:
            left -= self._advance(left, cpus=cpus)

    def _advance(self, own_ns: float, *, cpus: float) -> float:
        """Go on until a job or the training's own work ends; return the progress of the latter."""
        running = self._running
        count = 0 if self._elsewhere else len(running)
        share = sum([job.cpu_share for job in running]) / count if count else 0.0
        threads = count * self._setup.worker_threads
        there = left_over(threads * share + cpus, self._setup.cpus, self._setup.other_cpus)
        slow, own_slow = slowdowns(threads, share, cpus, there)
        own_stretch = 1 + min(1.0, cpus) * (own_slow - 1)
        extra = 0.0 if self._elsewhere else slow - 1
        span = own_ns * own_stretch
        for job in running:
            span = min(span, job.left_ns * (1 + job.cpu_share * extra))
        self._now_ns += span
        for job in running:
            job.left_ns -= span / (1 + job.cpu_share * extra)
        ended = [job for job in running if job.left_ns <= _DONE_NS]
        for job in ended:
            running.remove(job)
            self._idle.append(job.worker)
            each = (self._now_ns - job.began_ns) / job.samples
            known = self._sample_ns
            self._sample_ns = each if known is None else 0.9 * known + 0.1 * each
            self._open[job.batch] -= 1
            if not self._open[job.batch]:
                del self._open[job.batch]
                self._complete[job.batch] = self.arrival_ns(job.batch)
        if ended:
            self._start()
        return span / own_stretch


@dataclass(slots=True, eq=False)
class _Job:
    """A task: a batch, or a part of one."""

    batch: int
    samples: float
    left_ns: float
    """Time that the job still takes at full speed."""
    cpu_share: float
    """Share of the time at full speed that is on a CPU, 0 to 1."""
    began_ns: float = 0.0
    worker: int = 0


def left_over(wanted: float, cpus: float, others: float) -> float:
    """Return the CPUs that are left beside other programs, which share them thread by thread.

    ``wanted`` of the ``cpus`` would be used by own work, ``others`` are used by other programs.
    """
    if not others or wanted + others <= cpus:
        return cpus
    return min(cpus, max(cpus - others, cpus * wanted / (wanted + others)))


def slowdowns(jobs: float, share: float, own: float, cpus: float) -> tuple[float, float]:
    """Return by which factors, at least 1, sharing CPUs slows the CPU work of jobs and training.

    A job that is on a CPU for a share s of its time uses ``s / (1 - s + s x)`` CPUs if that part
    takes x times as long. The jobs are taken as one kind. While the training uses less than its
    fair share, its work is not slowed down; else it is slowed down as much as that of a job.

    Args:
        jobs: Number of jobs that run; one that uses several CPUs counts as that many.
        share: Mean share of the jobs' time at full speed that is on a CPU, 0 to 1.
        own: CPUs that the training would use; one thread if they are up to 1.
        cpus: Number of CPUs that there are.
    """
    wanted = jobs * share
    if wanted + own <= cpus:
        return 1.0, 1.0
    left = cpus - own
    if wanted and left > 0:
        alone = jobs / left - (1 - share) / share
        if alone <= 1 or not own:
            return max(1.0, alone), 1.0
    threads, own = max(1.0, own), min(1.0, own)
    # Where all CPU work takes y times as long, jobs and training fill the CPUs: wanted / (b + share
    # y) + threads own / (d + own y) = cpus
    b, d = 1 - share, 1 - own
    square = cpus * share * own
    linear = cpus * (share * d + b * own) - wanted * own - threads * own * share
    rest = cpus * b * d - wanted * d - threads * own * b
    root = math.sqrt(linear * linear - 4 * square * rest)
    y = -2 * rest / (linear + root) if linear > 0 else (root - linear) / (2 * square)
    return max(1.0, y), max(1.0, y)

"""What a step would take with another loader: the recorded batches, replayed through a model.

Each batch costs what its stamps say: time on a CPU, time blocked, collation, hand-over, and the
training's own time until it asks for the next one. The model schedules these costs as torch's
DataLoader does (one batch a task, workers in turn) or as this package does (samples of one batch
over all workers), and lets everything that needs a CPU at the same time share the CPUs there are.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from lightning_fastdata.loading.worker_count import rows_per_task

if TYPE_CHECKING:
    from lightning_fastdata.loading.stamps import BatchStamps

Scheduling: TypeAlias = Literal["batch", "queue", "sample"]

_NS_PER_MS: Final = 1e6
_MIN_BATCHES: Final = 200
_BISECTIONS: Final = 20
_LEAST_SHARE: Final = 0.05
"""Of the CPUs, what is left to workers that give way to a training that could use them all."""
_PRIORITY_NICE: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """What one batch costs, whoever makes it; times in nanoseconds without any waiting for CPUs."""

    samples: int
    """Samples in it."""
    cpu_ns: float
    """To read its samples: time on a CPU."""
    blocked_ns: float
    """To read its samples: time neither on a CPU nor waiting for one."""
    collate_ns: float
    """To collate it: time on a CPU."""
    slowest_ns: float
    """Of ``cpu_ns + blocked_ns``, what its slowest sample takes."""
    handover_ns: float
    """From the end of its last task until the training has it, if the training is waiting."""
    taking_ns: float
    """To take it, if it was complete when it was asked for."""
    step_ns: float
    """From then until the training asks for the next batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSetup:
    """A loader as the model knows it."""

    workers: int
    """Side processes or threads that read; 0: the training process does."""
    look_ahead: int
    """Batches under way at once; torch: ``workers * prefetch_factor``."""
    scheduling: Scheduling = "sample"
    """``"batch"``: a worker makes a whole batch, in turn, as torch has it. ``"queue"``: whoever is
    free does. ``"sample"``: whoever is free makes some samples of a batch."""
    in_order: bool = True
    """Batches are delivered in order."""
    cpus: float = 1.0
    """CPUs this process and its workers may use."""
    step_cpus: float = 1.0
    """CPUs the training process uses between two requests: 1 where it drives a device, more where
    it computes on the host."""
    worker_nice: int = 0
    """Niceness of the workers; from 5 on they are modelled as giving way to the training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model says of a steady run."""

    step_ms: float
    """From one request to the next, the mean."""
    wait_ms: float
    """Of that, the time waited for the batch."""


def batch_costs(stamps: Sequence[BatchStamps]) -> list[BatchCost]:
    """Return what each recorded batch cost but for the last, whose step is not known.

    Where the kernel does not tell time on a CPU from time blocked, all counts as blocked.
    """
    latencies = [
        batch.delivered_ns - max(task.ended_ns for task in batch.tasks)
        for batch in stamps
        if batch.tasks and max(task.ended_ns for task in batch.tasks) > batch.requested_ns
    ]
    taken = [
        batch.delivered_ns - batch.requested_ns
        for batch in stamps
        if batch.tasks and max(task.ended_ns for task in batch.tasks) <= batch.requested_ns
    ]
    handover = statistics.median(latencies or taken or [0])
    taking = statistics.median(taken or latencies or [0])
    costs = []
    for batch, following in pairwise(stamps):
        cpu = blocked = collate = slowest = 0.0
        for task in batch.tasks:
            length = task.ended_ns - task.began_ns
            busy = task.cpu_ns
            if busy is None or task.runqueue_ns is None:
                blocked += length - task.collate_ns
                collate += task.collate_ns
            else:
                idle = max(0, length - busy - task.runqueue_ns)
                scale = min(1.0, busy / max(1, task.collate_ns))
                collate += task.collate_ns * scale
                cpu += busy - task.collate_ns * scale
                blocked += idle
            slowest = max(slowest, task.slowest_ns)
        costs.append(
            BatchCost(
                samples=max(1, batch.samples),
                cpu_ns=cpu,
                blocked_ns=blocked,
                collate_ns=collate,
                slowest_ns=min(slowest, cpu + blocked),
                handover_ns=handover,
                taking_ns=min(taking, handover),
                step_ns=max(0, following.requested_ns - batch.delivered_ns),
            )
        )
    return costs


def scaled(
    costs: Sequence[BatchCost],
    *,
    cpu: float = 1.0,
    blocked: float = 1.0,
    collate: float = 1.0,
    handover: float = 1.0,
    slow_samples: bool = True,
) -> list[BatchCost]:
    """Return the costs with some of them scaled; 0 removes one.

    Args:
        costs: As recorded.
        cpu: Factor on the time that reading is on a CPU.
        blocked: Factor on the time that reading is blocked.
        collate: Factor on collation.
        handover: Factor on the hand-over.
        slow_samples: False: no sample takes longer than the others of its batch.
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


def simulate(costs: Sequence[BatchCost], setup: LoaderSetup) -> Prediction:
    """Return what a steady run of these batches, over and over, would take in this setup.

    Args:
        costs: Of the recorded batches, at least one.
        setup: The loader to model.

    Raises:
        ValueError: There are no costs.
    """
    if not costs:
        raise ValueError("There is nothing to simulate: no batch was recorded.")
    if setup.workers == 0:
        waits = [c.cpu_ns + c.blocked_ns + c.collate_ns for c in costs]
        step = statistics.fmean(w + c.step_ns for w, c in zip(waits, costs, strict=True))
        return Prediction(step_ms=step / _NS_PER_MS, wait_ms=statistics.fmean(waits) / _NS_PER_MS)
    warm_up = setup.look_ahead + 2 * setup.workers
    repeats = -(-(warm_up + setup.look_ahead + max(_MIN_BATCHES, len(costs))) // len(costs))
    return _Run(list(costs) * repeats, setup).run(warm_up)


@dataclass(slots=True)
class _Job:
    """A task in a worker's queue."""

    batch: int
    left_ns: float
    """At full speed."""
    cpu_share: float
    """Of its time at full speed, that on a CPU."""


class _Run:
    """One simulated run: a sequence of moments between which all speeds are constant."""

    def __init__(self, costs: list[BatchCost], setup: LoaderSetup) -> None:
        self.costs = costs
        self.setup = setup
        self.now = 0.0
        self.queues: list[deque[_Job]] = [deque() for _ in range(setup.workers)]
        self.shared: deque[_Job] = deque()
        self.open: dict[int, int] = {}
        self.complete: dict[int, float] = {}
        self.given = 0

    def run(self, warm_up: int) -> Prediction:
        # While the last batches are delivered none follow, which is not a steady run.
        count = len(self.costs) - self.setup.look_ahead
        began = waited = 0.0
        for number in range(count):
            if number == warm_up:
                began, waited = self.now, 0.0
            requested = self.now
            self._give()
            batch = self._wait_for(number)
            cost = self.costs[batch]
            late = self.now > requested
            self._pass(cost.handover_ns if late else cost.taking_ns, step_cpus=1.0)
            waited += self.now - requested
            if self.setup.scheduling == "batch":
                self._give()
            self._pass(self.costs[number].step_ns, step_cpus=self.setup.step_cpus)
        steps = count - warm_up
        return Prediction(
            step_ms=(self.now - began) / steps / _NS_PER_MS, wait_ms=waited / steps / _NS_PER_MS
        )

    def _give(self) -> None:
        while (
            self.given < len(self.costs)
            and len(self.open) + len(self.complete) < self.setup.look_ahead
        ):
            number, cost = self.given, self.costs[self.given]
            self.given += 1
            jobs = self._jobs(number, cost)
            self.open[number] = len(jobs)
            if self.setup.scheduling == "batch":
                self.queues[number % len(self.queues)].extend(jobs)
            else:
                self.shared.extend(jobs)

    def _jobs(self, number: int, cost: BatchCost) -> list[_Job]:
        cpu = cost.cpu_ns + cost.collate_ns
        whole = max(1.0, cpu + cost.blocked_ns)
        share = cpu / whole
        parts = 1
        if self.setup.scheduling == "sample":
            rows = rows_per_task(
                cost.samples,
                whole / cost.samples,
                hands=self.setup.workers,
                ready=len(self.complete),
                look_ahead=self.setup.look_ahead,
            )
            parts = -(-cost.samples // rows)
        usual = max(0.0, whole - cost.slowest_ns) / max(1, cost.samples - 1)
        excess = max(0.0, cost.slowest_ns - usual) if parts > 1 else 0.0
        jobs = [_Job(number, (whole - excess) / parts, share) for _ in range(parts)]
        jobs[number % parts].left_ns += excess
        return jobs

    def _wait_for(self, number: int) -> int:
        while True:
            if self.setup.in_order:
                if number in self.complete:
                    del self.complete[number]
                    return number
            elif self.complete:
                batch = min(self.complete, key=self.complete.__getitem__)
                del self.complete[batch]
                return batch
            self._advance(None, step_cpus=0.0)

    def _pass(self, work_ns: float, *, step_cpus: float) -> None:
        """Let the training process work for so long at full speed."""
        left = work_ns
        while left > 1e-6:
            left -= self._advance(left, step_cpus=step_cpus)

    def _advance(self, own_ns: float | None, *, step_cpus: float) -> float:
        """Go on to the next end of a job or of the training's own work; return its progress."""
        for queue in self.queues:
            if not queue and self.shared:
                queue.append(self.shared.popleft())
        running = [queue[0] for queue in self.queues if queue]
        own_speed, slowdown = self._speeds(running, step_cpus)
        ends = [job.left_ns * _stretch(job.cpu_share, slowdown) for job in running]
        if own_ns is not None:
            ends.append(own_ns / own_speed)
        if not ends:
            raise ValueError("The model waits for a batch that nobody makes.")
        span = max(0.0, min(ends))
        self.now += span
        for queue in self.queues:
            if not queue:
                continue
            job = queue[0]
            done = span / _stretch(job.cpu_share, slowdown)
            job.left_ns -= done
            if job.left_ns <= 1e-6:
                queue.popleft()
                self.open[job.batch] -= 1
                if not self.open[job.batch]:
                    del self.open[job.batch]
                    self.complete[job.batch] = self.now
        return span * own_speed

    def _speeds(self, running: list[_Job], step_cpus: float) -> tuple[float, float]:
        """Return the speed of the training's work, and how much longer CPU work of jobs takes."""
        cpus = self.setup.cpus
        shares = [job.cpu_share for job in running]
        if sum(shares) + step_cpus <= cpus:
            return 1.0, 1.0
        if step_cpus and self.setup.worker_nice >= _PRIORITY_NICE:
            left = max(_LEAST_SHARE * cpus, cpus - step_cpus)
            return min(1.0, cpus / step_cpus), _slowdown(shares, left)
        # Work of several threads has no part that is not on a CPU.
        threads, share = max(1.0, step_cpus), min(1.0, step_cpus)
        high = _slowdown(shares, cpus, share, threads)
        return 1 / _stretch(share, high), high


def _stretch(cpu_share: float, slowdown: float) -> float:
    """Return how much longer work takes whose part on a CPU is slowed down."""
    return 1 - cpu_share + cpu_share * slowdown


def _slowdown(shares: list[float], cpus: float, own: float = 0.0, threads: float = 1.0) -> float:
    """Return the least slowdown at which jobs, and own work of some threads, fit on the CPUs."""

    def used(slowdown: float) -> float:
        jobs = sum(share / _stretch(share, slowdown) for share in shares)
        return jobs + threads * own / _stretch(own, slowdown)

    low = high = 1.0
    while used(high) > cpus:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if used(middle) > cpus else (low, middle)
    return high

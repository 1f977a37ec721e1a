"""Recorded batches on their way through another loader: moments between which speeds are constant.

Everything that wants a CPU at the same time shares the CPUs there are, by weight, as Linux does it
over times longer than a time slice: https://docs.kernel.org/scheduler/sched-eevdf.html
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_fastdata.executors.pool.splitter import rows_per_task
from lightning_fastdata.tuning.costs import BatchCost, LoaderSetup

_DONE_NS: Final = 1e-3
_EACH: Final = 2
"""Batches that an actor is given at once."""
_PARTS_PER_WORKER: Final = 2
"""Of one batch: more parts keep workers no busier, and take longer to model."""
_TAKING_FROM_TORCH: Final = 0.5
"""CPUs that taking a batch uses: half of it waits for the process that sends it."""


class EventModel:
    """One run of a training whose batches cost what is given, over and over.

    Several of them, each a rank that waits for the others at the end of a step, are a training on
    several devices: :meth:`step` and :meth:`rest_until` take them through it step by step.

    Args:
        costs: Of the batches, at least one.
        setup: The loader, with at least one worker.
        carried: What brings a batch from its workers to the training, such as a network: given its
            number and when its last task ended (ns), it returns when it has arrived (ns, not
            before). It is called once for each batch, as they are made. None: they are there at
            once.
    """

    def __init__(
        self,
        costs: Sequence[BatchCost],
        setup: LoaderSetup,
        carried: Callable[[int, float], float] | None = None,
    ) -> None:
        self._costs = costs
        self._setup = setup
        self._carried = carried
        self._taking_cpus = _TAKING_FROM_TORCH if setup.scheduling == "batch" else 1.0
        self._now_ns = 0.0
        self._far, self._sent = (
            round(share * setup.workers) for share in (setup.far_share, setup.sent_share)
        )
        self._link_free_ns = 0.0
        self._came_by_link: dict[int, float] = {}
        """What each batch that came over the link took of it."""
        self._todo: deque[_Job] = deque()
        """Of actors: what none was given yet."""
        lanes = setup.workers if setup.scheduling in ("batch", "actors") else 1
        self._lanes: list[deque[_Job]] = [deque() for _ in range(lanes)]
        self._held = [0] * lanes
        """Batches of each lane that are not delivered."""
        self._turn = 0
        self._idle = list(range(setup.workers))
        self._running: list[_Job] = []
        self._open: dict[int, int] = {}
        """Tasks to do, of batches under way."""
        self._complete: dict[int, float] = {}
        """When the batches that wait for delivery were complete."""
        self._lane_of: dict[int, int] = {}
        self._given = 0
        self._steps = 0
        self._sample_ns: float | None = None
        """What a sample takes, as the loader knows it: waiting for CPUs included."""

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
        link_ns = self._came_by_link.pop(batch, 0.0)
        there = complete + max(0.0, cost.handover_ns - link_ns - cost.taking_ns)
        self._pass(there - self._now_ns, cpus=0.0)
        self._pass(cost.taking_ns, cpus=self._taking_cpus)
        waited = self._now_ns - requested
        self._held[self._lane_of.pop(batch)] -= 1
        if self._setup.scheduling == "batch":
            self._give()
        self._pass(self._cost(self._steps).step_ns, cpus=self._setup.step_cpus)
        self._steps += 1
        return waited

    def rest_until(self, moment_ns: float) -> None:
        """Let the training do nothing until then, as one that waits for other ranks."""
        self._pass(moment_ns - self._now_ns, cpus=0.0)

    @property
    def now_ns(self) -> float:
        """What the clock shows, which begins at 0."""
        return self._now_ns

    def _cost(self, number: int) -> BatchCost:
        return self._costs[number % len(self._costs)]

    def _give(self) -> None:
        while len(self._open) + len(self._complete) < self._setup.look_ahead:
            number, self._given = self._given, self._given + 1
            lane = self._next_lane()
            self._held[lane] += 1
            self._lane_of[number] = lane
            jobs = self._jobs(number, lane)
            self._open[number] = len(jobs)
            if self._setup.scheduling == "actors":
                self._todo.extend(jobs)
            else:
                self._lanes[lane].extend(jobs)
        self._hand_out()
        self._start()

    def _hand_out(self) -> None:
        """Give batches to actors that have fewer than two, the least busy first."""
        while self._todo:
            busy = [len(lane) for lane in self._lanes]
            for job in self._running:
                busy[job.worker] += 1
            least = min(range(len(busy)), key=busy.__getitem__)
            if busy[least] >= _EACH:
                break
            self._lanes[least].append(self._todo.popleft())

    def _arrival_ns(self, job: _Job) -> float:
        """Return when a batch that is made now has come over the link, if it has to."""
        if job.worker >= self._sent or self._setup.link_bytes_per_s == math.inf:
            return self._now_ns
        link_ns = self._cost(job.batch).size_bytes / self._setup.link_bytes_per_s * 1e9
        self._link_free_ns = max(self._link_free_ns, self._now_ns) + link_ns
        self._came_by_link[job.batch] = link_ns
        return self._link_free_ns

    def _next_lane(self) -> int:
        """Return whose batch the next one is: in turn, or out of order whose queue has room."""
        lanes = len(self._lanes)
        most = math.ceil(self._setup.look_ahead / lanes)
        for step in range(lanes):
            lane = (self._turn + step) % lanes
            if self._setup.in_order or self._held[lane] < most:
                break
        self._turn = lane + 1
        return lane

    def _jobs(self, number: int, lane: int) -> list[_Job]:
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
        jobs = [
            _Job(number, lane, samples, (whole - excess) / parts, cpu / whole) for _ in range(parts)
        ]
        jobs[number % parts].left_ns += excess
        return jobs

    def _start(self) -> None:
        """Have idle workers take what there is for them."""
        shared = len(self._lanes) == 1
        for worker in self._idle.copy():
            lane = self._lanes[0 if shared else worker]
            if lane:
                job = lane.popleft()
                job.began_ns, job.worker = self._now_ns, worker
                job.far = worker < self._far
                self._running.append(job)
                self._idle.remove(worker)
            elif shared:
                break

    def _wait(self) -> tuple[int, float]:
        """Go on until a batch is complete that may be delivered; return its number, and when."""
        awaited = min((*self._open, *self._complete))
        while not self._complete or (self._setup.in_order and awaited not in self._complete):
            self._advance(math.inf, cpus=0.0)
            if self._todo:  # actors are given more while the training looks, and not in its step
                self._hand_out()
                self._start()
        if not self._setup.in_order:
            awaited = min(self._complete, key=self._complete.__getitem__)
        return awaited, self._complete.pop(awaited)

    def _pass(self, work_ns: float, *, cpus: float) -> None:
        """Let the training process work for so long at full speed."""
        left = work_ns
        while left > _DONE_NS:
            left -= self._advance(left, cpus=cpus)

    def _advance(self, own_ns: float, *, cpus: float) -> float:
        """Go on to the next end of a job or of the training's own work; return its progress."""
        running = self._running
        here = [job for job in running if not job.far] if self._far else running
        count = len(here)
        share = sum([job.cpu_share for job in here]) / count if count else 0.0
        threads = count * self._setup.worker_threads
        there = left_over(threads * share + cpus, self._setup.cpus, self._setup.other_cpus)
        slow, own_slow = slowdowns(threads, share, cpus, there)
        own_stretch = 1 + min(1.0, cpus) * (own_slow - 1)
        extra = slow - 1
        span = own_ns * own_stretch
        for job in running:
            span = min(span, job.left_ns * (1 + job.cpu_share * extra * (not job.far)))
        self._now_ns += span
        for job in running:
            job.left_ns -= span / (1 + job.cpu_share * extra * (not job.far))
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
                arrived_ns = self._arrival_ns(job)
                if self._carried is not None:
                    arrived_ns = self._carried(job.batch, arrived_ns)
                self._complete[job.batch] = arrived_ns
        if ended:
            self._start()
        return span / own_stretch


@dataclass(slots=True, eq=False)
class _Job:
    """A task: a batch, or a part of one."""

    batch: int
    lane: int
    samples: float
    left_ns: float
    """At full speed."""
    cpu_share: float
    """Of its time at full speed, that on a CPU."""
    began_ns: float = 0.0
    worker: int = 0
    far: bool = False
    """It takes no CPU of the training's machine."""


def left_over(wanted: float, cpus: float, others: float) -> float:
    """Return the CPUs that are left beside other programs, which share them thread by thread.

    Of ``cpus``, ``wanted`` would be used by own work and ``others`` are by other programs.
    """
    if not others or wanted + others <= cpus:
        return cpus
    return min(cpus, max(cpus - others, cpus * wanted / (wanted + others)))


def slowdowns(jobs: float, share: float, own: float, cpus: float) -> tuple[float, float]:
    """Return by which factors, at least 1, sharing CPUs slows the CPU work of jobs and training.

    A job that is on a CPU for a share s of its time uses ``s / (1 - s + s x)`` CPUs if that part
    takes x times as long. The jobs are taken as one kind. While the training has less than its
    part, its work is not slowed down; else it is as much as that of a job.

    Args:
        jobs: That run; one that uses several CPUs counts as so many.
        share: Of their time at full speed, that on a CPU, 0 to 1: the mean.
        own: CPUs that the training would use; one thread if they are up to 1.
        cpus: That there are.
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
    # Where all of it takes y times as long, both parts fill the CPUs:
    # wanted / (b + share y) + threads own / (d + own y) = cpus
    b, d = 1 - share, 1 - own
    square = cpus * share * own
    linear = cpus * (share * d + b * own) - wanted * own - threads * own * share
    rest = cpus * b * d - wanted * d - threads * own * b
    root = math.sqrt(linear * linear - 4 * square * rest)
    y = -2 * rest / (linear + root) if linear > 0 else (root - linear) / (2 * square)
    return max(1.0, y), max(1.0, y)

"""What was measured of a stage, with what its stamps tell: what findings rest on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from torch.utils.data import IterableDataset

from lightning_fastdata.caches.cached import caches_in
from lightning_fastdata.host.clock import SpentTime
from lightning_fastdata.insight.measure.host_metrics import NO_MACHINE, MachineSeen
from lightning_fastdata.insight.measure.metrics import PhaseSummary, StageSummary
from lightning_fastdata.insight.measure.padding import Padding
from lightning_fastdata.insight.measure.wall import WallTime, loop_time
from lightning_fastdata.insight.memory import MemorySeen
from lightning_fastdata.insight.model.finding import STALL_LOW, costs_much
from lightning_fastdata.insight.waits.attribution import SlowSample, WaitParts
from lightning_fastdata.insight.waits.causes import LineShare, OperationShare
from lightning_fastdata.insight.waits.ranks import RankTiming, mean_stall_ms, slowest
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.order.buckets import BucketBatchSampler
from lightning_fastdata.stamps.batch_stamps import BatchStamps, ReadRates
from lightning_fastdata.tuning.simulate import (
    BatchCost,
    LoaderSetup,
    TrainingTimes,
    batch_costs,
    by_epoch,
)

_DECIDED: Final = frozenset(
    {"num_workers", "executor", "prefetch_factor", "pin_memory", "persistent_workers", "split"}
)
"""What follows from dataset and machine; other options have one default for all."""
_CHOSEN: Final = "which was chosen for this dataset and this machine"
_TUNED: Final = "which is tuned while it trains"
_DRAWN: Final = "its samples are drawn at random, or nobody has looked"
_SEVERAL_THREADS: Final = 1.3
"""CPUs: up to there, what sends batches away explains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """What is known about how batches are made. None: not known, e.g. of a foreign loader."""

    num_workers: int | None = None
    """0: the training process loads."""
    usable_cpus: int | None = None
    """CPUs this process may use, after affinity, cgroup quota and other ranks on the host."""
    augment_on: Literal["cpu", "device"] | None = None
    augment_settled: bool = False
    """No other place is to be advised: this one was measured to be the faster, or nothing of the
    transforms can be deferred to a device."""
    pinned: bool | None = None
    """Batches arrive in page-locked memory."""
    persistent_workers: bool | None = None
    """None: there are none, or they must not be kept, as what they read changes with the epochs."""
    streamed: bool | None = None
    """The dataset is an iterable one."""
    loader: str | None = None
    """Which of several loaders this is about, e.g. ``loader 'images'``, the one that is waited for
    most; None: there is one."""


def read_loader(loader: object) -> LoaderFacts:
    """Return what a loader of any kind says about itself, which may be nothing."""
    names = ("num_workers", "pin_memory", "persistent_workers", "dataset")
    workers, pinned, kept, dataset = (getattr(loader, name, None) for name in names)
    augment_on: Literal["cpu", "device"] | None = None
    settled = False
    if isinstance(loader, FastDataLoader) and loader.transform is not None:
        augment_on = "device" if loader.on_device else "cpu"
        settled = not loader.transform.defers
    return LoaderFacts(
        augment_on=augment_on,
        augment_settled=settled,
        num_workers=workers,
        pinned=pinned,
        persistent_workers=kept if workers else None,
        streamed=isinstance(dataset, IterableDataset),
    )


def closed_options(loader: object, *, prefix: str = "") -> dict[str, str]:
    """Return the options of a loader of any kind that are closed, each with the reason."""
    ours = loader if isinstance(loader, FastDataLoader) else None
    plan = None if ours is None else ours.plan
    found = {}
    if plan is not None:
        found = dict.fromkeys(sorted(_DECIDED - plan.asked.set_by_user()), _CHOSEN)
    if ours is not None and ours.tuner is not None:
        back = [move for move in ours.tuner.moves if move.outcome == "taken back"]
        found["num_workers"] = f"{_TUNED}: {back[-1]}" if back else _TUNED
    if ours is None or plan is None or plan.draws is not False:
        found["cache"] = _DRAWN
    elif isinstance(ours.dataset, IterableDataset):
        found["cache"] = "a stream has no index to keep samples by"
    elif caches_in(ours.dataset):
        found["cache"] = "samples are kept already"
    if isinstance(getattr(loader, "batch_sampler", None), BucketBatchSampler):
        found["batch_sampler"] = "its batches are of samples of like length"
    return {f"{prefix}{option}": why for option, why in found.items()}


_OF_CAUSES: Final = ("overtaken_share", "slow_samples", "operations", "lines")
_NO_STEPS: Final = StageSummary(stage="train", steps=0, samples=0, duration_s=0.0)
_NO_TIME: Final = WallTime(total_s=0.0, parts_s={})
_NEARLY: Final = 0.9
_MOST_COSTS: Final = 400
"""The model replays no more of the newest batches: more make it slower, hardly better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Measured facts of one stage, the means over its steps. None: was not measured.

    Findings that rest on a fact which is None are not made. Shares are from 0 to 1.
    """

    summary: StageSummary = _NO_STEPS
    """The measured stage."""
    loader: LoaderFacts = LoaderFacts()
    """What its loader says about itself."""
    step_ms: float | None = None
    """From the begin of one step to the begin of the next."""
    wait_ms: float | None = None
    """Of that, the time the training process waited for the batch."""
    stall_ms: float | None = None
    """Of the wait, what the device saw: the part that hid behind no work of it."""
    loader_share: float = 1.0
    """Of the waits, those for this loader's batches, 0 to 1: others are read in the same steps."""
    parts: WaitParts | None = None
    """Where the loader's wait for one batch went."""
    overtaken_share: float | None = None
    """Batches that came after later ones were complete."""
    slow_samples: tuple[SlowSample, ...] = ()
    """Those that held up a batch, slowest first."""
    operations: tuple[OperationShare, ...] = ()
    """What reading calls in libraries, the most expensive first."""
    lines: tuple[LineShare, ...] = ()
    """Which lines of the user's code reading is in, the longest first."""
    setup: LoaderSetup | None = None
    costs: tuple[BatchCost, ...] = ()
    """Of recorded batches, for predictions; none are made without."""
    stream_samples: tuple[int, ...] = ()
    """Samples of a stream that each of its workers made; empty: no stream, or not several."""
    busy_share: float | None = None
    """Of the time, that in which a worker had a task: the mean over workers."""
    runqueue_share: float | None = None
    """Of the workers' busy time, that in which they were ready to run but had no CPU."""
    machine: MachineSeen = NO_MACHINE
    """What the training had of its machine."""
    read_rates: ReadRates | None = None
    """What few of the workers read together, and what all do, while batches were waited for."""
    free_cpus: float | None = None
    """CPUs of the cluster whose actors make the batches that nobody held, as last seen."""
    epochs: int | None = None
    device_could_augment: bool | None = None
    """Workers transform samples beside a device that could, and that is not known to be slower."""
    device: str | None = None
    """Type of what computes, e.g. ``"cuda"``."""
    settings_in: str = "LoaderOptions"
    """Where the loader's settings are written: there, or in ``FastDataLoader`` itself."""
    closed: Mapping[str, str] = field(default_factory=dict)
    """Option -> why nobody is told to change it: the package chose it, this run has tried another
    value, or the package would not take one. Those of validation begin with ``"val."``."""
    loaders_anew: bool = False
    """The trainer makes its loaders anew in the course of the training."""
    transfer_ms: float | None = None
    transfer_hook: str = ""
    """The user's hook that moves it, e.g. ``"Net.transfer_batch_to_device"``; empty: none."""
    augment_ms: float | None = None
    augment_hook: str = ""
    """The user's hook that does, e.g. ``"Net.on_after_batch_transfer"``; empty: none."""
    padding: Padding | None = None
    """How much of the batches is padding."""
    memory: MemorySeen | None = None
    """Of the training process and its workers."""
    ranks: tuple[RankTiming, ...] = ()
    """What the steps of each rank took, by rank; empty where that of one is not known."""
    val_workers: int | None = None
    """Of the validation loader."""
    val_loader: str | None = None
    """Of several validation loaders, the one that is waited for most."""
    wall: WallTime = _NO_TIME
    """Where the wall time of the whole run went; of a loop, as its stages tell."""

    def of_step(self, ms: float | None) -> float | None:
        """Return a time as a share of the step; None if either was not measured."""
        return None if ms is None or not self.step_ms else ms / self.step_ms

    def of_loader(self) -> Evidence:
        """Return the evidence with no more waits than those for the loader that it is about."""
        share = self.loader_share
        wait_ms, stall_ms = (ms and share * ms for ms in (self.wait_ms, self.stall_ms))
        return replace(self, wait_ms=wait_ms, stall_ms=stall_ms, loader_share=1.0)

    @property
    def stall_share(self) -> float | None:
        """Part of the step in which the device waited for data."""
        return self.of_step(self.stall_ms)

    @property
    def stalls(self) -> bool:
        """The device waits for data for 3 % of the step or more, and not for a mere hand-over."""
        share = self.stall_share or 0.0
        return share >= STALL_LOW and costs_much(self.stall_ms or 0.0, share)

    @property
    def slow_rank(self) -> RankTiming | None:
        """The rank that stalls longest, if 3 % of the step longer than the mean of all."""
        worst, mean_ms = slowest(self.ranks), mean_stall_ms(self.ranks)
        late_ms = ((worst and worst.stall_ms) or 0.0) - (mean_ms or 0.0)
        return worst if (self.of_step(late_ms) or 0.0) >= STALL_LOW else None

    @property
    def held_up(self) -> bool:
        """Whether that rank stalls 3 % of the step longer than this one."""
        worst = self.slow_rank
        if worst is None or worst.stall_ms is None or self.stall_ms is None:
            return False
        return (self.of_step(worst.stall_ms - self.stall_ms) or 0.0) >= STALL_LOW

    @property
    def wanted_cpus(self) -> float | None:
        """CPUs that the busy workers and the training would use if they were alone, from costs."""
        if self.setup is None or not self.costs:
            return None
        cpu = sum(cost.cpu_ns + cost.collate_ns for cost in self.costs)
        whole = cpu + sum(cost.blocked_ns for cost in self.costs)
        cpu *= self.setup.worker_threads
        busy = 1.0 if self.busy_share is None else self.busy_share
        own = self.setup.step_cpus * (1 - min(1.0, self.stall_share or 0.0))
        here = 0 if self.setup.scheduling == "actors" else self.setup.workers
        return here * busy * cpu / max(1.0, whole) + own


def stage_evidence(
    summary: StageSummary,
    stamps: Sequence[BatchStamps] = (),
    setup: LoaderSetup | None = None,
    facts: LoaderFacts | None = None,
    *,
    machine: MachineSeen = NO_MACHINE,
    step_queued: float = 0.0,
    val: StageSummary | None = None,
) -> Evidence:
    """Return what is known of a stage that was measured, by its steps and by stamps.

    Args:
        summary: Where its steps went.
        stamps: The newest of the loader that it waited for most, in the order in which batches were
            delivered; none of a foreign loader.
        setup: That loader as it was; None: no predictions are made.
        facts: What it says about itself; None: nothing.
        machine: As of :class:`Evidence`.
        step_queued: Part of the steps in which the training was ready but had no CPU.
        val: Its validation, in a loop whose wall time is not measured.
    """
    if setup is not None:
        others, threads = machine.taken_of(setup.cpus), worker_threads(stamps)
        setup = replace(setup, other_cpus=others, worker_threads=threads)
    step_ms, gap_ms = _mean(summary.step), _mean(summary.gap)
    halves = ((each.stall_ms or 0.0, each.step_ms or 0.0) for each in summary.long_steps)
    long_ms = min((max(stall, step - stall) for stall, step in halves), default=math.inf)
    causes = summary.causes
    could_augment = None
    if facts is not None:
        # That workers transform samples a loader does not know of its dataset; stamps may show it.
        seen = causes is not None and any(each.augments for each in causes.operations)
        in_workers = facts.augment_on == "cpu" or (facts.augment_on is None and seen)
        could_augment = summary.device != "cpu" and in_workers and not facts.augment_settled
    of_waits = {} if causes is None else {name: getattr(causes, name) for name in _OF_CAUSES}
    return Evidence(
        parts=None if causes is None else causes.wait,
        **of_waits,
        loader=facts or LoaderFacts(),
        device=summary.device,
        machine=machine,
        step_ms=None if step_ms is None else step_ms + (gap_ms or 0.0),
        wait_ms=_mean(summary.wait),
        stall_ms=_mean(summary.stall),
        transfer_ms=_mean(summary.transfer),
        augment_ms=_mean(summary.augment),
        wall=loop_time(summary, val),
        epochs=summary.cold_steps,
        setup=setup,
        costs=recorded_costs(stamps, step_queued=step_queued, below_s=long_ms / 1e3),
        busy_share=None if setup is None else busy_share(stamps, setup.workers),
        runqueue_share=runqueue_share(stamps),
        free_cpus=free_cpus(stamps),
        device_could_augment=could_augment,
    )


def recorded_costs(
    stamps: Sequence[BatchStamps], *, step_queued: float = 0.0, below_s: float = math.inf
) -> tuple[BatchCost, ...]:
    """Return what the newest batches cost, without those that took ``below_s``, or their step did.

    ``step_queued``: as of :func:`stage_evidence`.
    """
    costs = [
        cost
        for epoch in by_epoch(stamps)
        for batch, cost in zip(epoch, batch_costs(epoch, step_queued=step_queued), strict=False)
        if max(batch.delivered_ns - batch.requested_ns, cost.step_ns) < _NEARLY * below_s * 1e9
    ]
    return tuple(costs[-_MOST_COSTS:])


def _mean(phase: PhaseSummary | None) -> float | None:
    return None if phase is None else phase.mean_ms


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
        **used._asdict(),
        waited_s=waited_ms / 1e3,
        loading_cpu_s=sum(own_ns) / 1e9 / max(1, len(stamps)) * summary.steps,
    )


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


def free_cpus(stamps: Sequence[BatchStamps]) -> float | None:
    """Return the CPUs of a cluster that nobody held, as seen last; None: there is no cluster."""
    ways = (task.way for batch in reversed(stamps) for task in reversed(batch.tasks))
    return next((way.free_cpus for way in ways if way and way.free_cpus is not None), None)

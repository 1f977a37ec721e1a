"""What is known of a stage: the facts that all findings rest on, and what follows from them.

A model replays the recorded batches to predict what another loader would gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from lightning_fastdata.insight.finding import Gain, LoaderFacts, StepTimes
from lightning_fastdata.insight.machine import NO_MACHINE, MachineSeen, MemorySeen
from lightning_fastdata.insight.steps import NO_STEPS, StageSummary, mean_ms, times_of
from lightning_fastdata.insight.waits import NO_CAUSES, WaitCauses
from lightning_fastdata.insight.wall import NO_TIME, WallTime
from lightning_fastdata.loading.simulate import (
    WORKERS,
    BatchCost,
    LoaderSetup,
    batch_costs,
    by_epoch,
    choose,
    simulate,
)
from lightning_fastdata.stamps.batch_stamps import BatchStamps, ReadRates

if TYPE_CHECKING:
    from lightning_fastdata.insight.ranks import RankTiming
    from lightning_fastdata.insight.step_costs import Padding

_MOST_WORKERS: Final = 32
RUNQUEUE_HIGH: Final = 0.20
"""Share of the workers' time or of the wait, spent without a CPU, from which on CPUs are short."""
OTHERS_LOW: Final = 0.2
"""Number of CPUs that other programs may use without holding anything up, at least."""
_OTHERS_LOW_PART: Final = 0.2
"""Share of the machine's CPUs that other programs may use without holding anything up."""
_MUCH: Final = 0.25
_SEVERAL_THREADS: Final = 1.3
"""CPUs that a worker uses from which on it counts as several threads; sending takes less."""
_NEARLY: Final = 0.9
_MOST_COSTS: Final = 400
"""Most batches that the model replays, the newest ones: more make it slower, hardly better."""
DOMINANT: Final = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was measured of a stage, for all families of causes; by default nothing was.

    No finding is made that rests on a fact which is None, or empty. Shares are from 0 to 1. "The
    loader" is the one that is waited for most.
    """

    summary: StageSummary = NO_STEPS
    """Where the steps went; its causes are those of the loader."""
    loader: LoaderFacts = field(default_factory=LoaderFacts)
    """What the loader says about itself."""
    machine: MachineSeen = NO_MACHINE
    """What was seen of the machine during the training."""

    # -- late batches
    loader_share: float = 1.0
    """Share of the waits that is for the loader's batches; others are read in the same steps."""
    setup: LoaderSetup | None = None
    """The loader as the model knows it; None: no predictions are made."""
    setup_with: Callable[[int], LoaderSetup | None] = field(default=lambda _: None, compare=False)
    """Gives the setup that the loader has with so many workers; None: it has no model of that."""
    costs: tuple[BatchCost, ...] = ()
    """Costs of recorded batches, on which predictions rest; empty: none are made."""
    stream_samples: tuple[int, ...] = ()
    """Samples of a stream that each worker made; empty: no stream, or not several workers."""
    busy_share: float | None = None
    """Share of the time in which a worker had a task, the mean over workers."""
    runqueue_share: float | None = None
    """Share of the workers' busy time in which they were ready to run but had no CPU."""
    read_rates: ReadRates | None = None
    """Samples a second that half of the workers read, and that all read; None: not tried."""
    free_cpus: float | None = None
    """CPUs that nobody held, as last seen, in the cluster whose actors make the batches."""

    # -- other costs of a step
    before_hook: str = ""
    """The user's hook before the transfer, which counts as part of it; empty: none."""
    transfer_hook: str = ""
    """The user's hook that moves a batch, e.g. ``"Net.transfer_batch_to_device"``; empty: none."""
    augment_hook: str = ""
    """The user's hook that augments, e.g. ``"Net.on_after_batch_transfer"``; empty: none."""
    settings_in: Literal["LoaderOptions", "FastDataLoader", "DataLoader"] = "LoaderOptions"
    """Class whose arguments hold the loader's settings, as advice writes them."""
    padding: Padding | None = None
    """How much of the batches is padding."""
    ranks: tuple[RankTiming, ...] = ()
    """Times of the steps of all ranks, by rank; empty where those of one are not known."""

    # -- what keeps the run from its steps, and memory
    wall: WallTime = NO_TIME
    """Where the wall time of the whole run went; for the user's own loop, as its stages tell."""
    loaders_anew: bool = False
    """Whether the trainer makes its loaders anew in the course of the training."""
    val_workers: int | None = None
    """Number of workers of the validation loader; None: not known."""
    val_loader: str | None = None
    """Name of the validation loader that is waited for most; None: there is only one."""
    memory: MemorySeen = field(default_factory=MemorySeen)
    """Memory of the training process and its workers."""

    @property
    def step_times(self) -> StepTimes:
        """Mean times of the steps, and of all their waits."""
        return times_of(self.summary)

    @property
    def times(self) -> StepTimes:
        """Mean times of the steps, and of their waits for the loader's batches."""
        return self.step_times.waiting_for(self.loader_share)

    @property
    def causes(self) -> WaitCauses:
        """Where the waits for the loader's batches went."""
        return self.summary.causes or NO_CAUSES

    @property
    def device_could_augment(self) -> bool:
        """Whether workers transform samples where a device could, and is not known as slower."""
        place, operations = self.loader.augment_on, self.causes.operations
        # A loader does not know whether its dataset transforms samples; stamps may show it.
        here = place == "cpu" or (place is None and any(each.augments for each in operations))
        return here and self.summary.device != "cpu" and not self.loader.augment_settled

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part of the wait, 0 to 1; reading of unknown kind counts as blocked.

        Empty while steps hardly wait for data.
        """
        shares = self.causes.wait.shares() if self.times.stalls else {}
        if shares:
            shares["read_blocked"] += shares.pop("read")
        return shares

    @property
    def stall_ms(self) -> float:
        """Mean stall of a step, in ms; 0: not known."""
        return self.times.stall_ms or 0.0

    def of_step(self, ms: float) -> float:
        """Return a time as the share of a step that verdicts tell, who leave out pauses between."""
        step_ms = mean_ms(self.summary.step)
        return ms / step_ms if step_ms else 0.0

    @property
    def wanted_cpus(self) -> float | None:
        """CPUs that busy workers and the training would use if alone; None: no recorded costs."""
        if self.setup is None or not self.costs:
            return None
        cpu = sum(cost.cpu_ns + cost.collate_ns for cost in self.costs)
        whole = cpu + sum(cost.blocked_ns for cost in self.costs)
        cpu *= self.setup.worker_threads
        busy = 1.0 if self.busy_share is None else self.busy_share
        stall = min(1.0, self.times.stall_share or 0.0)
        own = self.setup.step_cpus * (1 - stall)
        here = 0 if self.setup.scheduling == "actors" else self.setup.workers
        readers = here * busy if self.setup.workers else stall  # without workers the training reads
        return readers * cpu / max(1.0, whole) + own

    @property
    def waits_for_cpu(self) -> float:
        """Share of the wait in which workers or the training process had no CPU."""
        return self.shares.get("read_runqueue", 0.0) + self.shares.get("queued", 0.0)

    @property
    def without_cpu(self) -> float:
        """Largest known share, of the wait or of workers' time, spent ready but without a CPU."""
        known = (self.runqueue_share or 0.0, self.machine.queued_share or 0.0)
        return max(self.waits_for_cpu, *known)

    @property
    def without_cpu_text(self) -> str:
        """How long loading or the training had no CPU, and of what that is a share."""
        queued, most = self.machine.queued_share, self.machine.queued_most
        shares = (
            (queued if most is None else most, "the time"),
            (self.runqueue_share, "the time to read"),
            (self.waits_for_cpu, "the wait for data"),
        )
        share, of = max(((share or 0.0, of) for share, of in shares), key=itemgetter(0))
        return f"for {share:.0%} of {of}"

    @property
    def alone_ms(self) -> float:
        """Time of a step if no other program had a CPU, by the recorded batches; 0: not known."""
        if self.setup is None or not self.costs:
            return 0.0
        return simulate(self.costs, replace(self.setup, other_cpus=0.0)).step_ms

    @property
    def throttled(self) -> bool:
        """Whether a fifth of the wait or more could vanish if no quota held anything back.

        A thread lost no more than its part of the time in which CPUs were held back.
        """
        held, times = self.machine.throttled_cpus, self.times
        if not held or not times.step_ms or not times.wait_ms:
            return False
        threads = 1.0
        if self.setup is not None:
            busy = 1.0 if self.busy_share is None else self.busy_share
            threads = max(1.0, self.setup.workers * busy + self.setup.step_cpus)
        return min(1.0, held / threads) * times.step_ms >= RUNQUEUE_HIGH * times.wait_ms

    @property
    def own_fits(self) -> bool:
        """Whether own work would fit the CPUs if other programs left them, as far as it is known.

        If other programs hardly use CPUs, or a quota held it back, it does not, whatever the model
        says; without a model, others have to use a good part of the CPUs.
        """
        others, all_cpus = self.machine.other_cpus, self.machine.machine_cpus or 0.0
        few = max(OTHERS_LOW, _OTHERS_LOW_PART * all_cpus)
        if self.throttled or (others is not None and others < few):
            return False
        if self.setup is None or self.wanted_cpus is None:
            return others is not None and others >= _MUCH * all_cpus > 0
        return self.wanted_cpus <= self.setup.cpus

    @property
    def crowded(self) -> bool:
        """Whether other programs cause most of the wait: loading was ready but had no CPU."""
        return self.times.stalls and self.without_cpu > DOMINANT and self.own_fits

    def gain_without(self, share: float) -> Gain | None:
        """Return the gain if this share of the stall, 0 to 1, vanished: the most possible."""
        return self.times.without(share * self.stall_ms)

    def gain(
        self, setup: LoaderSetup | None = None, *, costs: Sequence[BatchCost] | None = None
    ) -> Gain | None:
        """Return the gain of another setup, or of other costs; None without recorded batches.

        The ratio of the model's two predictions is applied to the measured step, so that what the
        model misses in both cancels out. With other costs, the new time is a lower bound.
        """
        step_ms, now = self.times.step_ms, self.setup
        if step_ms is None or now is None or not self.costs:
            return None
        now_ms = simulate(self.costs, now).step_ms
        then_ms = simulate(self.costs if costs is None else costs, setup or now).step_ms
        after_ms = step_ms * (then_ms / now_ms if now_ms > 0 else 1.0)
        basis: Literal["simulated", "floor"] = "simulated" if costs is None else "floor"
        return Gain(before_ms=step_ms, after_ms=after_ms, basis=basis)

    def best_workers(self, *, computing: bool = False) -> LoaderSetup | None:
        """Return the setup with the fewest workers within 3 % of the best; None: not known.

        ``computing``: no more workers than there are CPUs.
        """
        now, most = self.setup, _MOST_WORKERS
        if now is None or not self.costs:
            return None
        if now.scheduling == "actors":
            most = now.workers + int(self.free_cpus or 0.0)
        elif computing:
            most = min(most, max(1, int(now.cpus)))
        numbers = {n for n in WORKERS if n <= most} | {now.workers}
        others, threads = now.other_cpus, now.worker_threads
        candidates = [
            replace(made, other_cpus=others, worker_threads=threads)
            for n in sorted(numbers)
            if (made := now if n == now.workers else self.setup_with(n)) is not None
        ]
        return choose(self.costs, candidates)[0]


def evidence_of(
    summary: StageSummary,
    loader: LoaderFacts,
    stamps: Sequence[BatchStamps] = (),
    setup: LoaderSetup | None = None,
    *,
    step_queued: float = 0.0,
    machine: MachineSeen = NO_MACHINE,
    **known: Any,
) -> Evidence:
    """Return what is known of a stage, by its steps and by stamps.

    Args:
        summary: Where the steps went; the causes are those of this loader.
        loader: What the loader says about itself.
        stamps: The newest stamps of the loader, in the order in which batches were delivered.
        setup: The loader as it was; None: no predictions are made.
        step_queued: Share of the steps, 0 to 1, in which the training was ready but had no CPU.
        machine: What was seen of the machine during the training.
        **known: Other fields of the result.
    """
    if setup is not None:
        others, threads = machine.taken_of(setup.cpus), _worker_threads(stamps)
        setup = replace(setup, other_cpus=others, worker_threads=threads)
    tasks = [task for batch in stamps for task in batch.tasks]
    queued = [task for task in tasks if task.runqueue_ns is not None]
    length_ns = sum(task.ended_ns - task.began_ns for task in queued)
    free = (task.way.free_cpus for task in reversed(tasks) if task.way is not None)
    return Evidence(
        summary=summary,
        setup=setup,
        costs=_recorded_costs(summary, stamps, step_queued),
        loader=loader,
        busy_share=None if setup is None else _busy_share(stamps, setup.workers),
        runqueue_share=sum(t.runqueue_ns or 0 for t in queued) / length_ns if length_ns else None,
        machine=machine,
        free_cpus=next((cpus for cpus in free if cpus is not None), None),
        **known,
    )


def _recorded_costs(
    summary: StageSummary, stamps: Sequence[BatchStamps], step_queued: float
) -> tuple[BatchCost, ...]:
    """Return the costs of the newest batches, without those that took too long.

    Too long is nearly as long as a step that the means leave out: for a batch, or its step. First
    ones of epochs are left out as well, if there are others.
    """
    halves = ((each.stall_ms or 0.0, each.step_ms or 0.0) for each in summary.long_steps)
    long_ms = min((max(stall, step - stall) for stall, step in halves), default=math.inf)
    known = [
        (batch.first, cost)
        for epoch in by_epoch(stamps)
        for batch, cost in zip(epoch, batch_costs(epoch, step_queued=step_queued), strict=False)
        if max(batch.delivered_ns - batch.requested_ns, cost.step_ns) < _NEARLY * long_ms * 1e6
    ]
    costs = [cost for first, cost in known if not first] or [cost for _, cost in known]
    return tuple(costs[-_MOST_COSTS:])


def _busy_share(stamps: Sequence[BatchStamps], workers: int) -> float | None:
    """Return the share of the time in which workers were busy, 0 to 1; None without workers."""
    busy = span = 0.0
    for _, *others in by_epoch(stamps):  # in a first step, which may compile, workers have done
        if not others:
            continue
        began, ended = others[0].requested_ns, others[-1].delivered_ns
        span += ended - began
        for batch in others:
            for task in batch.tasks:
                busy += max(0, min(task.ended_ns, ended) - max(task.began_ns, began))
    return min(1.0, busy / span / workers) if workers and span > 0 else None


def _worker_threads(stamps: Sequence[BatchStamps]) -> float:
    """Return how many CPUs a worker uses while its reading thread computes, at least 1."""
    known = [task for batch in stamps for task in batch.tasks if task.helpers_ns is not None]
    own = sum(task.cpu_ns or 0 for task in known)
    threads = 1 + sum(task.helpers_ns or 0 for task in known) / own if own else 1.0
    return threads if threads >= _SEVERAL_THREADS else 1.0

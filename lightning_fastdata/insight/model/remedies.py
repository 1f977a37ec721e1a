"""What a change of the loader would gain, which one to recommend, and who has the CPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import Advice, Gain
from lightning_fastdata.tuning.simulate import (
    WORKERS,
    BatchCost,
    LoaderSetup,
    choose,
    scaled,
    simulate,
)

_MOST_WORKERS: Final = 32
_BATCHES_AHEAD: Final = 2
_LEAST_AHEAD: Final = 8
"""The loader is so many batches ahead even if a worker would be fewer."""
RUNQUEUE_HIGH: Final = 0.20
"""Of the time of workers or of the wait: CPUs are short."""
OTHERS_LOW: Final = 0.2
"""CPUs: if other programs use less, they hold up nothing."""
_OTHERS_LOW_PART: Final = 0.2
"""Of the machine's CPUs: likewise."""
_HANDED_OVER_ALONE: Final = 0.1
_MUCH: Final = 0.25
_OTHERS_MOST: Final = 0.5
"""If more than this part of the wait would go on a free machine, others are the cause."""


def without(evidence: Evidence, ms: float | None) -> Gain | None:
    """Return the step without a measured cost: no less is possible."""
    if evidence.step_ms is None or ms is None:
        return None
    after = max(0.0, evidence.step_ms - ms)
    return Gain(before_ms=evidence.step_ms, after_ms=after, basis="floor")


def gain_of(
    evidence: Evidence,
    *,
    setup: LoaderSetup | None = None,
    costs: Sequence[BatchCost] | None = None,
) -> Gain | None:
    """Return what another setup gains, or batches of other costs; None without recorded batches.

    The model's ratio of the two is applied to the measured step, so that what the model misses of
    both counts for neither. No less is possible than what batches of other costs take.
    """
    now, recorded = evidence.setup, evidence.costs
    if evidence.step_ms is None or now is None or not recorded:
        return None
    now_ms = simulate(recorded, now).step_ms
    then_ms = simulate(recorded if costs is None else costs, setup or now).step_ms
    after_ms = evidence.step_ms * (then_ms / now_ms if now_ms > 0 else 1.0)
    basis: Literal["simulated", "floor"] = "simulated" if costs is None else "floor"
    return Gain(before_ms=evidence.step_ms, after_ms=after_ms, basis=basis)


def with_workers(setup: LoaderSetup, workers: int) -> LoaderSetup:
    """Return the setup with another number of workers.

    Where each makes whole batches, each is as many ahead as before; where all make one together,
    all of them are.
    """
    least = min(setup.look_ahead, _LEAST_AHEAD) if setup.workers else _LEAST_AHEAD
    if setup.scheduling == "sample":
        return replace(setup, workers=workers, look_ahead=max(least, setup.look_ahead))
    each = _BATCHES_AHEAD
    if setup.workers and setup.look_ahead > _LEAST_AHEAD:
        each = math.ceil(setup.look_ahead / setup.workers)
    return replace(setup, workers=workers, look_ahead=max(least, each * workers))


def best_workers(evidence: Evidence, *, computing: bool = False) -> LoaderSetup | None:
    """Return the setup with the fewest workers within 3 % of the best; None without costs.

    ``computing``: no more workers than there are CPUs.
    """
    now = evidence.setup
    if now is None or not evidence.costs:
        return None
    most = _MOST_WORKERS
    if now.scheduling == "actors":
        most = now.workers + int(evidence.free_cpus or 0.0)
    elif computing:
        most = min(most, max(1, int(now.cpus)))
    numbers = {n for n in WORKERS if n <= most} | {now.workers}
    candidates = [now if n == now.workers else with_workers(now, n) for n in sorted(numbers)]
    return choose(evidence.costs, candidates)[0]


def advised(now: LoaderSetup, wanted: LoaderSetup, gain: Gain | None) -> Advice:
    """Return the change as it is written in code, e.g. ``LoaderOptions(num_workers=6)``."""
    changes: dict[str, object] = {}
    if now.inline and wanted.workers:
        changes["executor"] = "workers"
    if wanted.workers != now.workers:
        changes["num_workers"] = wanted.workers
    written = ", ".join(f"{option}={value!r}" for option, value in changes.items())
    return Advice(text=f"LoaderOptions({written})", changes=tuple(changes), gain=gain)


def part_shares(e: Evidence) -> dict[str, float]:
    """Return the parts of the wait, 0 to 1; reading of unknown kind counts as blocked.

    Empty while data is no matter.
    """
    if e.parts is None or not e.stalls:
        return {}
    shares = e.parts.shares()
    if shares:
        shares["read_blocked"] += shares.pop("read")
    return shares


def runqueue_share(e: Evidence) -> float:
    """Return how much of the wait, or of the workers' time, is spent ready but without a CPU."""
    return max(queued_share(e), e.runqueue_share or 0.0, e.machine.queued_share or 0.0)


def alone_wait_ms(e: Evidence) -> float:
    """Return what would be waited for a batch if nobody had to wait for a CPU; a bound.

    Workers make one batch in a step, beside it; the training process makes it in the wait.
    """
    left, wait_ms = 1 - min(1.0, runqueue_share(e)), e.wait_ms or 0.0
    workers = e.loader.num_workers if e.setup is None else e.setup.workers
    if workers == 0:
        return left * wait_ms
    return max(0.0, (e.step_ms or 0.0) * (left - 1) + wait_ms)


def queued_share(e: Evidence) -> float:
    """Return how much of the wait went because workers or the training had no CPU, 0 to 1."""
    shares = part_shares(e)
    return shares.get("read_runqueue", 0.0) + shares.get("queued", 0.0)


def throttled(e: Evidence) -> bool:
    """Return whether a fifth of the wait or more could go if no quota held anything back.

    A thread lost no more than its part of the time in which CPUs were held back, and no more than
    the periods in which the quota was used up. No wait gets shorter by more than that.
    """
    if not e.machine.throttled_share or not e.step_ms or not e.wait_ms:
        return False
    lost = e.machine.throttled_share
    if e.machine.throttled_cpus is not None and e.setup is not None:
        busy = 1.0 if e.busy_share is None else e.busy_share
        threads = e.setup.workers * busy + e.setup.step_cpus
        lost = min(lost, e.machine.throttled_cpus / max(1.0, threads))
    return lost * e.step_ms >= RUNQUEUE_HIGH * e.wait_ms


def overcommitted(e: Evidence) -> bool:
    """Return whether own work wants more CPUs than there are, or a quota stopped it.

    If it waits for CPUs although no other program uses them, it does, whatever the model says.
    """
    if throttled(e):
        return True
    few = max(OTHERS_LOW, _OTHERS_LOW_PART * (e.machine.machine_cpus or 0.0))
    if e.machine.other_cpus is not None and e.machine.other_cpus < few:
        return runqueue_share(e) >= RUNQUEUE_HIGH
    wanted = e.wanted_cpus
    return e.setup is None or wanted is None or wanted > e.setup.cpus


def crowded(e: Evidence) -> bool:
    """Return whether own work would fit, and most of the wait would go if it were alone.

    Complete batches wait for a CPU on their way, too. Where there is no model, the counters of the
    machine tell: others use a good part of the CPUs, and loading had none for so long.
    """
    if not e.stalls or throttled(e) or runqueue_share(e) < RUNQUEUE_HIGH:
        return False
    if e.setup is None or not e.setup.workers:
        few = _MUCH * (e.machine.machine_cpus or math.inf)
        others = e.machine.other_cpus is not None and e.machine.other_cpus >= few
        return others and alone_wait_ms(e) <= _OTHERS_MOST * (e.wait_ms or 0.0)
    if overcommitted(e) or not e.costs or not e.wait_ms:
        return False
    alone = scaled(e.costs, handover=_HANDED_OVER_ALONE)
    alone_ms = simulate(alone, replace(e.setup, other_cpus=0.0)).wait_ms
    return e.wait_ms - alone_ms > _OTHERS_MOST * e.wait_ms

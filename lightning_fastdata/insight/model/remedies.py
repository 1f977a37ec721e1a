"""What a change would gain, and which change of the loader to recommend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import Advice, Gain
from lightning_fastdata.tuning.simulate import BatchCost, LoaderSetup
from lightning_fastdata.tuning.moves import WORKERS, choose
from lightning_fastdata.tuning.simulate import simulate

_MOST_WORKERS: Final = 32
_BATCHES_AHEAD: Final = 2
_LEAST_AHEAD: Final = 8
"""The loader is so many batches ahead even if a worker would be fewer."""


def without(evidence: Evidence, ms: float | None) -> Gain | None:
    """Return the step without a measured cost: no less is possible."""
    if evidence.step_ms is None or ms is None:
        return None
    after = max(0.0, evidence.step_ms - ms)
    return Gain(before_ms=evidence.step_ms, after_ms=after, basis="floor")


def gain_of_setup(evidence: Evidence, setup: LoaderSetup) -> Gain | None:
    """Return what another setup would gain; None without recorded batches.

    The model's ratio of the two setups is applied to the measured step, so that what the model
    misses of both counts for neither.
    """
    return _gain(evidence, evidence.costs, setup, "simulated")


def gain_of_costs(evidence: Evidence, costs: Sequence[BatchCost]) -> Gain | None:
    """Return what would be gained by batches that cost this."""
    return _gain(evidence, costs, evidence.setup, "floor")


def _gain(
    evidence: Evidence,
    costs: Sequence[BatchCost],
    setup: LoaderSetup | None,
    basis: Literal["simulated", "floor"],
) -> Gain | None:
    if evidence.step_ms is None or not evidence.setup or not setup or not evidence.costs:
        return None
    now = simulate(evidence.costs, evidence.setup).step_ms
    ratio = simulate(costs, setup).step_ms / now if now > 0 else 1.0
    return Gain(before_ms=evidence.step_ms, after_ms=ratio * evidence.step_ms, basis=basis)


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
    if evidence.remote is not None:
        most = now.workers + int(evidence.remote.free_cpus or 0.0)
    elif computing:
        most = min(most, max(1, int(now.cpus)))
    numbers = {n for n in WORKERS if n <= most} | {now.workers}
    candidates = [now if n == now.workers else with_workers(now, n) for n in sorted(numbers)]
    return choose(evidence.costs, candidates)[0]


def best_against_slow_samples(evidence: Evidence) -> LoaderSetup | None:
    """Return the smallest change that lets batches pass or outrun slow ones.

    In this order: nothing, further ahead, out of order, both, more workers; where the training
    process reads by itself, workers.
    """
    now = evidence.setup
    if now is None or not evidence.costs:
        return None
    if not now.workers:
        return best_workers(evidence)
    ahead = (now.look_ahead, 2 * now.look_ahead, 4 * now.look_ahead)
    orders = (True, False) if now.in_order else (False,)
    candidates = [replace(now, look_ahead=n, in_order=order) for order in orders for n in ahead]
    most = max(_MOST_WORKERS, now.workers)
    more = [with_workers(now, n) for n in (2 * now.workers, 4 * now.workers) if n <= most]
    return choose(evidence.costs, [*candidates, *more])[0]


def advised(now: LoaderSetup, wanted: LoaderSetup, gain: Gain | None) -> Advice:
    """Return the change as it is written in code, e.g. ``LoaderOptions(num_workers=6)``."""
    changes: dict[str, object] = {}
    if now.inline and wanted.workers:
        changes["executor"] = "workers"
    if wanted.workers != now.workers:
        changes["num_workers"] = wanted.workers
    unasked = now if wanted.workers == now.workers else with_workers(now, wanted.workers)
    if wanted.workers and wanted.look_ahead != unasked.look_ahead:
        changes["prefetch_factor"] = math.ceil(wanted.look_ahead / wanted.workers)
    if wanted.in_order != now.in_order:
        changes["in_order"] = wanted.in_order
    written = ", ".join(f"{option}={value!r}" for option, value in changes.items())
    return Advice(text=f"LoaderOptions({written})", changes=tuple(changes), gain=gain)

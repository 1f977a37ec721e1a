"""What the steps of each rank took, and which rank holds up the others. Pure.

Where ranks compute in step, all their steps are equally long: the rank whose data is late stalls,
and the others wait for it inside their backward pass, which counts as compute. So the rank that
holds up the others is the one that stalls most, and its compute is the shortest.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lightning_fastdata.insight.measure.metrics import measured, warm_steps
from lightning_fastdata.insight.model.finding import STALL_LOW

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_fastdata.insight.measure.metrics import Columns

_MEANS = ("step_ms", "stall_ms", "wait_ms", "compute_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """What the training steps of one rank took, the means over its steps. None: not measured."""

    rank: int
    """Global rank, counted from 0."""
    host: str
    """Name of the machine it runs on."""
    steps: int
    """Steps the means are over; first steps of epochs are left out if there are others."""
    step_ms: float | None = None
    """The whole step as the device saw it."""
    stall_ms: float | None = None
    """Of that, the time in which the device had nothing to do because of data."""
    wait_ms: float | None = None
    """Time the host waited for data; equals ``stall_ms`` where the host computes."""
    compute_ms: float | None = None
    """Forward, backward and optimizer, and in there the waiting for slower ranks."""
    reason: str = ""
    """What the stamps of its loader say of most of its waits; empty: nothing, or it hardly waits.
    """

    def as_json(self) -> str:
        """Return it as a short line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> RankTiming:
        """Return what :meth:`as_json` wrote."""
        return cls(**json.loads(line))


def rank_timing(steps: Columns, *, rank: int, host: str, reason: str = "") -> RankTiming:
    """Return the means of a rank's steps, as from :meth:`StepHistory.newest`; may be none at all.

    ``reason``: Why its batches are late.
    """
    counted = warm_steps(steps)
    known = {name: measured(counted[name]) for name in _MEANS}
    means = {name: float(values.mean()) for name, values in known.items() if values.size}
    return RankTiming(rank=rank, host=host, steps=len(counted["cold"]), reason=reason, **means)


def together(timings: Sequence[RankTiming]) -> RankTiming:
    """Return several timings of one rank, oldest first, as one: means over all of their steps."""
    newest, means = timings[-1], {}
    for name in _MEANS:
        known = [(v, t.steps) for t in timings if (v := getattr(t, name)) is not None and t.steps]
        total = sum(steps for _, steps in known)
        means[name] = sum(value * steps for value, steps in known) / total if total else None
    steps = sum(timing.steps for timing in timings)
    return RankTiming(
        rank=newest.rank, host=newest.host, steps=steps, reason=newest.reason, **means
    )


def slowest(ranks: Iterable[RankTiming]) -> RankTiming | None:
    """Return the rank whose data holds up the others most: the largest stall, then least compute.

    None if no stall was measured on two ranks or more.
    """
    timed = _with_stall(ranks)
    if len(timed) < 2:
        return None
    return max(timed, key=lambda each: (each.stall_ms or 0.0, -(each.compute_ms or 0.0)))


def mean_stall_ms(ranks: Iterable[RankTiming]) -> float | None:
    """Return the mean over the ranks whose stall was measured; None if it was on none."""
    timed = _with_stall(ranks)
    return sum(each.stall_ms or 0.0 for each in timed) / len(timed) if timed else None


def rank_metrics(ranks: Sequence[RankTiming]) -> dict[str, float]:
    """Return the scalars of several ranks, as ``metric_names.RANKS`` has them.

    What was not measured has no key; empty with fewer than two ranks.
    """
    if len(ranks) < 2:
        return {}
    found: dict[str, float | None] = {"stall_mean_ms": mean_stall_ms(ranks)}
    for name, figures in {"stall": (max, min), "compute": (max, min), "step": (max,)}.items():
        values = [v for each in ranks if (v := getattr(each, f"{name}_ms")) is not None]
        for figure in figures:
            found[f"{name}_{figure.__name__}_ms"] = figure(values, default=None)
    worst = slowest(ranks)
    found["slowest_rank"] = None if worst is None else float(worst.rank)
    return {f"data_ranks/{name}": v for name, v in sorted(found.items()) if v is not None}


def ranks_line(ranks: Sequence[RankTiming]) -> str | None:
    """Return one sentence on the ranks; None if there are no two to compare."""
    worst, mean = slowest(ranks), mean_stall_ms(ranks)
    if worst is None or mean is None:
        return None
    stall = worst.stall_ms or 0.0
    if worst.step_ms and (stall - mean) / worst.step_ms >= STALL_LOW:
        return (
            f"rank {worst.rank} on {worst.host} stalls {stall:.1f} ms a step, the mean is "
            f"{mean:.1f}"
        )
    timed = _with_stall(ranks)
    hosts = len({each.host for each in timed})
    where = f"{len(timed)} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    return f"{where} stall alike, {mean:.1f} ms a step, at most {stall:.1f}"


def rank_evidence(ranks: Sequence[RankTiming]) -> dict[str, tuple[object, ...]]:
    """Return the fields of :class:`Evidence` that are about ranks.

    Empty if a stall is missing: a rank that is not known may be the one that is looked for.
    """
    if len(_with_stall(ranks)) < max(2, len(ranks)) or [r.rank for r in ranks] != [
        *range(len(ranks))
    ]:
        return {}
    return {
        "rank_stalls_ms": tuple(each.stall_ms for each in ranks),
        "rank_hosts": tuple(each.host for each in ranks),
        "rank_reasons": tuple(each.reason for each in ranks),
    }


def _with_stall(ranks: Iterable[RankTiming]) -> list[RankTiming]:
    return [each for each in ranks if each.stall_ms is not None]

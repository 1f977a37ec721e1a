"""A stage whose steps take a batch of each of several loaders: which one costs what.

The loaders are asked one after the other, so that a step waits for the sum of their waits. What is
recommended is simulated with one loader alone, whose steps have the waits for the others in them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.insight.model import remedies
from lightning_fastdata.insight.model.simulate import simulate
from lightning_fastdata.insight.verdicts.finding import Finding, severity_of

if TYPE_CHECKING:
    from lightning_fastdata.insight.model.evidence import Evidence
    from lightning_fastdata.insight.model.simulate import BatchCost, LoaderSetup
    from lightning_fastdata.insight.waits.causes import WaitCauses
    from lightning_fastdata.stamps.batch_stamps import BatchStamps

_NS_PER_MS: Final = 1e6
_BEGINS_HIGH: Final = 0.05
_MOST_OF_IT: Final = 0.5
"""Of a gain: the loader that does not leave so much of it is to be changed, too."""
_OF_THE_MACHINE: Final = frozenset({"FD315"})
"""Findings whose remedies are no options of a loader."""


@dataclass(frozen=True, slots=True)
class LoaderKey:
    """Where a loader stands in the list or dict that the user wrote."""

    path: tuple[Any, ...]
    """Keys and positions, the outermost first."""

    @property
    def name(self) -> str:
        """For lists, e.g. ``images``, ``1`` or ``pairs[0]``."""
        first, *inner = self.path
        return f"{first}{''.join(f'[{key!r}]' for key in inner)}"

    @property
    def label(self) -> str:
        """For sentences, e.g. ``loader 'images'``, ``loader 1`` or ``loader 'pairs'[0]``."""
        first, *inner = self.path
        return f"loader {first!r}{''.join(f'[{key!r}]' for key in inner)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWait:
    """What one of several loaders costs the steps of its stage."""

    name: str
    """Its key or position as the user wrote it, e.g. ``images``, ``1`` or ``pairs[0]``."""
    label: str
    """The same for sentences, e.g. ``loader 'images'``."""
    wait_ms: float | None
    """Wait for it, the mean over the steps that are not first in an epoch; the waits of all loaders
    add up to that of the step. None: not known, which is so where several loaders take no
    stamps."""
    batches: int | None
    """Its batches in these steps; None where it takes no stamps."""
    causes: WaitCauses | None
    """Why its batches were late; None where it takes no stamps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOfSeveral:
    """Of which of several loaders the evidence is, and how it belongs to the steps."""

    label: str
    """The loader, e.g. ``loader 'images'``."""
    wait_ms: float
    """Of a step, the wait for it."""
    wait_share: float
    """Its part of the wait for all of them, 0 to 1."""
    batches_per_step: float = 1.0
    """Its batches over the steps."""
    begins_ms: float = 0.0
    """Of a step, what it waits for the first batches of passes that begin within an epoch."""
    limits: tuple[tuple[str, float], ...] = ()
    """The other loaders, and the ms a step takes at least because of them."""

    def changed_step_ms(self, step_ms: float, ratio: float) -> float:
        """Return a step of which the time between this loader's batches has changed.

        Args:
            step_ms: Before.
            ratio: Of the time between two of its batches, after to before.
        """
        # Steps that take no batch of it are as long as the others without the wait for it.
        rest_ms = max(0.0, step_ms - self.wait_ms) * min(1.0, self.batches_per_step)
        return max(0.0, step_ms - min(step_ms, rest_ms + self.wait_ms) * (1 - ratio))


def costliest(loaders: Iterable[LoaderWait]) -> LoaderWait | None:
    """Return the loader that is waited for most; None if no wait of any is known."""
    known = [each for each in loaders if each.wait_ms is not None]
    return max(known, key=lambda each: each.wait_ms or 0.0, default=None)


def waits_line(loaders: Sequence[LoaderWait]) -> str:
    """Return ``waits: images 12.3 ms, text 0.1 ms``; empty without several loaders."""
    told = [
        f"{each.name} {'not known' if each.wait_ms is None else f'{each.wait_ms:.1f} ms'}"
        for each in loaders
    ]
    return f"waits: {', '.join(told)}" if told else ""


def own_evidence(e: Evidence) -> Evidence:
    """Return the evidence with the waits of its one loader in the place of those of all."""
    if e.one_of is None:
        return e
    share = e.one_of.wait_share
    return replace(
        e,
        wait_ms=None if e.wait_ms is None else e.wait_ms * share,
        stall_ms=None if e.stall_ms is None else e.stall_ms * share,
    )


def told_of_loader(e: Evidence, found: Finding) -> Finding:
    """Return a finding that names its loader, and gains no more than the other loaders allow."""
    if e.one_of is None:
        return found
    found = replace(found, cause=f"{e.one_of.label}: {found.cause}")
    if found.code in _OF_THE_MACHINE:
        return found
    remedy, gain = f"{e.one_of.label}: {found.remedy}", found.gain
    other, least_ms = max(e.one_of.limits, key=lambda limit: limit[1], default=("", 0.0))
    if gain is not None and gain.after_ms < least_ms:
        allowed = replace(gain, after_ms=min(gain.before_ms, least_ms))
        if allowed.before_ms - allowed.after_ms < _MOST_OF_IT * (gain.before_ms - gain.after_ms):
            remedy += (
                f"; {other} as well, because of which no step takes less than {least_ms:.1f} ms"
            )
        gain = allowed
    return replace(found, remedy=remedy, gain=gain)


def begins_anew(e: Evidence) -> Finding | None:
    """FD310 of one of several loaders: it is shorter than an epoch, and begins again within it."""
    share = None if e.one_of is None else e.of_step(e.one_of.begins_ms)
    if e.one_of is None or share is None or share < _BEGINS_HIGH:
        return None
    if e.setup is not None and not e.setup.workers:
        return None  # nothing starts
    kept = e.persistent_workers is True
    return Finding(
        code="FD310",
        severity=severity_of(share),
        cause=f"it is shorter than an epoch, and to begin it anew costs {share:.0%} of each step",
        remedy="a longer one: its workers are kept already"
        if kept
        else "LoaderOptions(persistent_workers=True)",
        gain=remedies.without(e, e.one_of.begins_ms),
    )


def least_step_ms(costs: Sequence[BatchCost], setup: LoaderSetup, *, less_ms: float) -> float:
    """Return what a step takes at least because of a loader, if another one is waited for less.

    Args:
        costs: Of its recorded batches.
        setup: The loader as it is.
        less_ms: What is no longer waited for the other one in a step, the mean. Each recorded step
            loses the same part of its length, as a few of them may have waited for all others.
    """
    step_ns = statistics.fmean(cost.step_ns for cost in costs)
    left = max(0.0, 1 - less_ms * _NS_PER_MS / step_ns) if step_ns > 0 else 1.0
    free = [replace(cost, step_ns=cost.step_ns * left) for cost in costs]
    return simulate(free, setup).step_ms


def cpus_used(stamps: Sequence[BatchStamps]) -> float:
    """Return how many CPUs the workers of a loader use, the mean over its newest batches."""
    if len(stamps) < 2:
        return 0.0
    span = stamps[-1].delivered_ns - stamps[0].requested_ns
    used = sum(task.cpu_ns or 0 for batch in stamps for task in batch.tasks if task.process >= 0)
    return used / span if span > 0 else 0.0

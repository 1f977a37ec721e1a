"""A stage whose steps take a batch of each of several loaders: which one costs what.

The loaders are asked one after the other, so that a step waits for the sum of their waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.waits.causes import CauseTotals

if TYPE_CHECKING:
    from lightning_fastdata.insight.waits.causes import WaitCauses
    from lightning_fastdata.stamps.batch_stamps import BatchStamps, ReadRates

_NS_PER_MS: Final = 1e6


@dataclass(frozen=True, slots=True)
class LoaderKey:
    """Where a loader stands in the list or dict that the user wrote."""

    path: tuple[Hashable, ...]
    """Keys and positions, the outermost first."""

    @property
    def name(self) -> str:
        """For lists, e.g. ``images``, ``1`` or ``pairs[0]``."""
        return f"{self.path[0]}{''.join(f'[{key!r}]' for key in self.path[1:])}"

    @property
    def label(self) -> str:
        """For sentences, e.g. ``loader 'images'``, ``loader 1`` or ``loader 'pairs'[0]``."""
        return f"loader {self.path[0]!r}{''.join(f'[{key!r}]' for key in self.path[1:])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWait:
    """What one of several loaders costs the steps of its stage."""

    name: str
    """Its key or position as the user wrote it, e.g. ``images``, ``1`` or ``pairs[0]``."""
    label: str
    """The same for sentences, e.g. ``loader 'images'``."""
    wait_ms: float | None
    """Wait for it, the mean over the steps that are not first in an epoch; those of all loaders add
    up to that of the step. None: not known, as where several loaders take no stamps."""
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
        """Return a step if the time between two batches of this loader changes by a ratio."""
        # Steps that take no batch of it are as long as the others without the wait for it.
        rest_ms = max(0.0, step_ms - self.wait_ms) * min(1.0, self.batches_per_step)
        return max(0.0, step_ms - min(step_ms, rest_ms + self.wait_ms) * (1 - ratio))


class LoaderTotals(CauseTotals):
    """What the batches of a loader cost, whichever object delivers them in each epoch."""

    def __init__(self, key: LoaderKey | None, prefix: str) -> None:
        super().__init__(prefix)
        self.key = key
        self.rates: ReadRates | None = None
        """What half of its workers and all of them read, if that was tried."""
        self.made: Counter[int] = Counter()
        """Samples, by the number of the process that made them."""
        # Of the steps that are not first in an epoch:
        self.batches = 0
        self.waited_ns = 0
        self.begins = self.begins_ns = 0
        """Passes over the loader that began, and of the wait, that for their first batches."""
        self.window_batches = 0
        """Batches since the last metrics."""

    def add(self, batch: BatchStamps, loader: int = 0, *, opening: bool = False) -> None:
        """Count a batch of a loader, which may have come in the first step of an epoch."""
        for task in batch.tasks:
            self.made[task.process] += task.samples
        self.rates = batch.rates or self.rates
        waited_ns = batch.delivered_ns - batch.requested_ns
        if not opening:
            self.batches += 1
            self.window_batches += 1
            self.waited_ns += waited_ns
            if batch.first:
                self.begins += 1
                self.begins_ns += waited_ns
        if self.key is not None:
            # Of several loaders, one may begin anew within an epoch, and its step is as the others.
            batch = batch._replace(first=opening)
        super().add(batch, loader)

    def waited_ms(self, steps: int, *, within_passes: bool = False) -> float:
        """Return the mean wait over so many steps, maybe without first batches of passes."""
        waited_ns = self.waited_ns - (self.begins_ns if within_passes else 0)
        return waited_ns / steps / _NS_PER_MS


def costliest(loaders: Iterable[LoaderWait]) -> LoaderWait | None:
    """Return the loader that is waited for most; None if no wait of any is known."""
    known = [each for each in loaders if each.wait_ms is not None]
    return max(known, key=lambda each: each.wait_ms or 0.0, default=None)


def waits_line(loaders: Sequence[LoaderWait]) -> str:
    """Return ``waits: images 12.3 ms, text 0.1 ms``; empty without several loaders."""
    waits = [
        f"{each.name} {'not known' if each.wait_ms is None else f'{each.wait_ms:.1f} ms'}"
        for each in loaders
    ]
    return f"waits: {', '.join(waits)}" if waits else ""


def cpus_used(stamps: Sequence[BatchStamps]) -> float:
    """Return how many CPUs the workers of a loader use, the mean over its newest batches."""
    if len(stamps) < 2:
        return 0.0
    span = stamps[-1].delivered_ns - stamps[0].requested_ns
    used = sum(task.cpu_ns or 0 for batch in stamps for task in batch.tasks if task.process >= 0)
    return used / span if span > 0 else 0.0

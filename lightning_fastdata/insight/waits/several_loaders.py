"""A stage whose steps take a batch of each of several loaders: which one costs what.

The loaders are asked one after the other, so that a step waits for the sum of their waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fastdata.insight.waits.causes import WaitCauses


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
    """Of which of several loaders the evidence is."""

    label: str
    """The loader, e.g. ``loader 'images'``."""
    wait_share: float
    """Its part of the wait for all of them, 0 to 1."""


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

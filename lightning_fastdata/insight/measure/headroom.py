"""How fast a stage would be if no step waited for data: modelled from its steps, or measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """A step that waits for no data."""

    step_ms: float
    """The step with its transfer and augmentation, but without the stall."""
    samples_per_s: float
    """At that pace."""
    basis: Literal["modelled", "measured"]
    """``"modelled"``: the measured step with the stall taken away, which holds if nothing else
    changes. ``"measured"``: the compute was measured once more, with batches that were there
    already and no others being loaded, so that what loading takes from computing is gone, too."""


def modelled_headroom(
    step_ms: float | None, stall_ms: float | None, samples_per_s: float | None
) -> Headroom | None:
    """Return the step with the stall taken away; None if either was not measured.

    Args:
        step_ms: The mean warm step.
        stall_ms: The mean stall of these steps.
        samples_per_s: Without the stall.
    """
    if samples_per_s is None or step_ms is None or stall_ms is None:
        return None
    return Headroom(step_ms=step_ms - stall_ms, samples_per_s=samples_per_s, basis="modelled")


def measured_headroom(
    rounds_ms: Sequence[float], *, steps: int, samples: int, other_ms: float
) -> Headroom | None:
    """Return what replayed steps show; None if they took no time.

    Args:
        rounds_ms: How long each round of the same steps took; the median counts.
        steps: Steps in a round.
        samples: Samples in a round.
        other_ms: Transfer and augmentation of a step, which a replay has none of.
    """
    step_ms = statistics.median(rounds_ms) / steps + other_ms
    if step_ms <= 0:
        return None
    rate = samples / steps * 1e3 / step_ms
    return Headroom(step_ms=step_ms, samples_per_s=rate, basis="measured")

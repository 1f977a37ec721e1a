"""How fast a stage would be if no step waited for data: modelled from its steps, or measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_fastdata.insight.measure.metrics import StageSummary


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
    already and nobody loading others, so that what loading takes from computing is gone, too."""


def modelled_headroom(stage: StageSummary) -> Headroom | None:
    """Return the mean warm step with the stall taken away; None if it was not measured."""
    rate = stage.samples_per_s_if_data_were_free
    if rate is None or stage.step is None or stage.stall is None:
        return None
    step_ms = stage.step.mean_ms - stage.stall.mean_ms
    return Headroom(step_ms=step_ms, samples_per_s=rate, basis="modelled")


def measured_headroom(
    stage: StageSummary, rounds_ms: Sequence[float], *, steps: int, samples: int
) -> Headroom | None:
    """Return what replayed steps tell; None if they took no time.

    The transfer and the augmentation of the stage are added, as a replay has none.

    Args:
        stage: What was measured of the training.
        rounds_ms: How long each round of the same steps took; the median counts.
        steps: Steps in a round.
        samples: Samples in a round.
    """
    step_ms = statistics.median(rounds_ms) / steps
    for phase in (stage.transfer, stage.augment):
        step_ms += 0.0 if phase is None else phase.mean_ms
    if step_ms <= 0:
        return None
    rate = samples / steps * 1e3 / step_ms
    return Headroom(step_ms=step_ms, samples_per_s=rate, basis="measured")

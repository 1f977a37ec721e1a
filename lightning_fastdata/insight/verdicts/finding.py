"""One cause of a slow step, as findings tell it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from lightning_fastdata.insight.model.remedies import Gain

if TYPE_CHECKING:
    from lightning_fastdata.insight.model.evidence import Evidence

Severity: TypeAlias = Literal["fine", "moderate", "high"]

STALL_LOW, STALL_HIGH = 0.03, 0.10
_BASIS = {"independent": "if the workers share nothing"}
TRANSFER_HIGH, AUGMENT_HIGH = 0.05, 0.10
EPOCH_START_HIGH = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, in words for people and a code for programs."""

    code: str
    """Stable code, see the table of this module."""
    severity: Severity
    """``"fine"``: nothing to do; ``"moderate"`` up to 10 % of the step; ``"high"`` above."""
    cause: str
    """One sentence with the figures it rests on."""
    remedy: str
    """What to change, options as they are written in code; empty if there is nothing to do."""
    gain: Gain | None = None
    """What the remedy makes of a step; None: cannot be told."""
    leave_alone: str = ""
    """What does not help, or is fine as it is."""


def stalls(evidence: Evidence) -> bool:
    """Return whether the device waits for data for 3 % of the step or more."""
    share = evidence.stall_share
    return share is not None and share >= STALL_LOW


def severity_of(share: float | None) -> Severity:
    """Return how bad it is that something costs this share of a step."""
    return "high" if share is not None and share > STALL_HIGH else "moderate"


def gain_text(gain: Gain) -> str:
    """Return a gain in words, e.g. ``1.52x (78.0 -> 51.3 ms a step, simulated)``."""
    most = "at most " if gain.basis in ("floor", "independent") else ""
    basis = "" if gain.basis == "floor" else f", {_BASIS.get(gain.basis, gain.basis)}"
    steps = f"{gain.before_ms:.1f} -> {gain.after_ms:.1f} ms a step"
    return f"{most}{gain.factor:.2f}x ({steps}{basis})"

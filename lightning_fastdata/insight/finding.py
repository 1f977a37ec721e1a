"""One cause of a slow step, as findings tell it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from lightning_fastdata.insight.remedies import Gain
from lightning_fastdata.insight.verdict import STALL_HIGH, STALL_LOW

if TYPE_CHECKING:
    from lightning_fastdata.insight.evidence import Evidence

Severity: TypeAlias = Literal["fine", "moderate", "high"]


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

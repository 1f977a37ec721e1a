"""A finding: one cause of a slow step, its remedy, and what that would gain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["fine", "moderate", "high"]
Kind: TypeAlias = Literal[
    "data-bound",
    "compute-bound",
    "balanced",
    "unknown",
    "paused between epochs",
    "starved in validation",
    "held up by a callback",
    "held up by checkpoints",
    "held up by logging",
    "held up by other programs",
]


STALL_LOW, STALL_HIGH = 0.03, 0.10
_BASIS = {"independent": "if the workers share nothing"}
TRANSFER_HIGH, AUGMENT_HIGH = 0.05, 0.10
EPOCH_START_HIGH = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a step takes now, and would take."""

    before_ms: float
    """Measured."""
    after_ms: float
    """Expected."""
    basis: Literal["simulated", "independent", "measured", "floor"]
    """``"simulated"``: the recorded batches in the other setup. ``"independent"``: the same, if the
    workers share nothing that they wait for, as a lock or a full line would be. ``"measured"``: a
    measured cost, taken away. ``"floor"``: no less is possible, as the cost cannot vanish as a
    whole."""

    @property
    def factor(self) -> float:
        """How many times as fast."""
        return self.before_ms / self.after_ms if self.after_ms > 0 else math.inf

    @property
    def worthwhile(self) -> bool:
        """It is more than what is good enough."""
        from lightning_fastdata.tuning.moves import GOOD_ENOUGH  # loads torch

        return self.factor > GOOD_ENOUGH


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, in words for people and a code for programs."""

    code: str
    """Stable code; ``docs/verdicts`` has a page for each."""
    severity: Severity
    """``"fine"``: nothing to do; ``"moderate"`` up to 10 % of the step; ``"high"`` above."""
    cause: str
    """One sentence with the figures it rests on."""
    remedy: str
    """What to change, options as they are written in code; empty if there is nothing to do."""
    gain: Gain | None = None
    """What the remedy makes of a step; None: not known."""
    leave_alone: str = ""
    """What does not help, or is fine as it is."""


def severity_of(share: float | None) -> Severity:
    """Return how bad it is that something costs this share of a step."""
    return "high" if share is not None and share > STALL_HIGH else "moderate"


def gain_text(gain: Gain) -> str:
    """Return a gain in words, e.g. ``1.52x (78.0 -> 51.3 ms a step, simulated)``."""
    most = "at most " if gain.basis in ("floor", "independent") else ""
    basis = "" if gain.basis == "floor" else f", {_BASIS.get(gain.basis, gain.basis)}"
    steps = f"{gain.before_ms:.1f} -> {gain.after_ms:.1f} ms a step"
    return f"{most}{gain.factor:.2f}x ({steps}{basis})"


def duration_text(seconds: float) -> str:
    """Return ``0.8 s``, ``34 s``, ``1 min 34 s`` or ``2 h 05 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

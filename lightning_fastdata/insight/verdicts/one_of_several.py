"""Findings about one of several loaders of a stage, whose steps wait for the others, too.

What is recommended is simulated with one loader alone, whose steps have the waits for the others in
them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.model import remedies
from lightning_fastdata.insight.model.finding import Finding, severity_of
from lightning_fastdata.insight.verdicts.rule import Rule

if TYPE_CHECKING:
    from lightning_fastdata.insight.model.evidence import Evidence

_BEGINS_HIGH: Final = 0.05
_MOST_OF_IT: Final = 0.5
"""Of a gain: the loader that does not leave so much of it is to be changed, too."""


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


def naming_loader(e: Evidence, found: Finding, *, remedy_too: bool) -> Finding:
    """Return a finding that names its loader, and gains no more than the other loaders allow.

    Args:
        e: Of that loader.
        found: The finding.
        remedy_too: Whether its remedy is an option of the loader.
    """
    if e.one_of is None:
        return found
    found = replace(found, cause=f"{e.one_of.label}: {found.cause}")
    if not remedy_too:
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


RULES: Final = (Rule("FD310", "a loader begins anew within epochs", begins_anew, about="loader"),)

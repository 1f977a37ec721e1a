"""The one gate that all advice passes before anybody is told of it.

Pure: a finding with what its rule proposes in, the finding with what may be said out. What is left
out stays in the report, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from lightning_fastdata.insight.model.finding import Advice, Finding, Gain, LeftOut

_LEAST_PART: Final = 0.1
"""Of the wait: advice about less is noise."""


def passed(finding: Finding, closed: Mapping[str, str]) -> Finding:
    """Return a finding whose remedy is the first advice that may be given; with none, it is fine.

    What ``joins`` is told beside it, unless it has a gain of its own.

    Args:
        finding: As its rule has made it.
        closed: Option -> why it is not to be changed, see ``Evidence.closed``.
    """
    given: list[Advice] = []
    left_out: list[LeftOut] = []
    for advice in finding.advice:
        why = why_not(advice, advice.gain or finding.gain, closed)
        if why is not None:
            left_out.append(LeftOut(text=advice.text, why=why))
        elif not given or (given[0].gain is None and advice.joins):
            given.append(advice)
    finding = replace(finding, advice=(), left_out=tuple(left_out))
    if not given:
        return replace(finding, severity="fine", remedy="")
    remedy = ", or ".join(advice.text for advice in given)
    return replace(finding, remedy=remedy, gain=given[0].gain or finding.gain)


def why_not(advice: Advice, gain: Gain | None, closed: Mapping[str, str]) -> str | None:
    """Return why an advice with this gain is not to be given; None: it is."""
    for option in advice.changes:
        if option in closed:
            return f"{option}: {closed[option]}"
    if not advice.for_speed:
        return None
    if advice.part < _LEAST_PART:
        return f"it speaks of {advice.part:.0%} of the wait"
    if gain is None:
        return "what it gains is not known"
    return None if gain.worthwhile else f"it gains {gain.factor - 1:.1%}"

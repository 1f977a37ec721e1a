"""A rule looks for one cause in what was measured; all rules together are the catalogue.

All that rules advise passes one gate before anybody is told of it. What it leaves out stays in the
report, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import (
    Advice,
    Finding,
    Gain,
    Kind,
    LeftOut,
    severity_of,
)

_LEAST_PART: Final = 0.1
"""Of the wait: advice about less is noise."""
SMALL_COSTS: Final = frozenset({"FD001", "FD002"})
"""Findings without stamps where the stall is 10 % or less: any known cause replaces them."""
ALL_COSTS: Final = SMALL_COSTS | {"FD101", "FD102", "FD103", "FD104", "FD105"}
"""All findings without stamps: a cause of late batches replaces them."""


KEEP: Final = Advice(text="LoaderOptions(persistent_workers=True)", changes=("persistent_workers",))
PIN: Final = Advice(text="LoaderOptions(pin_memory=True)", changes=("pin_memory",))
OPTIMIZE: Final = Advice(text="optimize the model, which takes the time", for_speed=False)
"""Only where compute was seen to be the model's."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause: how it is looked for, and how what was found goes with other findings."""

    code: str
    """Stable code; it keeps its meaning for ever. ``docs/verdicts`` has a page for it."""
    title: str
    find: Callable[[Evidence], Finding | None]
    """None where the facts do not show the cause, or were not measured."""
    about: Literal["stage", "loader", "machine", "rank", "run"] = "stage"
    """What the cause belongs to. ``"loader"``: of several loaders, the one that is waited for most,
    which the finding names. ``"machine"``: the same, but the remedy is no option of a loader.
    ``"rank"``: one of several processes that train together. ``"run"``: a pause between steps."""
    replaces: frozenset[str] = SMALL_COSTS
    """Codes of findings that are left out beside this one: it says why, or they rest on what it
    shows to be wrong."""
    after: str = ""
    """The code after which it stands in the catalogue; empty: its own place by code."""
    kind: Kind | None = None
    """What a run is called that this cause holds up most; None: what its stall says."""


class Found(NamedTuple):
    """A finding, and the rule that made it."""

    rule: Rule
    finding: Finding


def found(
    code: str,
    share: float | None,
    cause: str,
    remedy: str | Advice | tuple[Advice, ...],
    gain: Gain | None = None,
    leave_alone: str = "",
) -> Finding:
    """Return the finding of something that costs this share of a step, 0 to 1.

    Of several remedies the best comes first, and the gate gives one of them.
    """
    remedy = Advice(text=remedy) if isinstance(remedy, str) else remedy
    return Finding(
        code=code,
        severity=severity_of(share),
        cause=cause,
        remedy="",
        gain=gain,
        leave_alone=leave_alone,
        advice=remedy if isinstance(remedy, tuple) else (remedy,),
    )


def of_wait(e: Evidence, share: float, what: str) -> str:
    """Return in words that something is a share of the wait, 0 to 1, and what that costs."""
    stall = e.stall_share or 0.0
    return f"{what} is {share:.0%} of the wait for data, which costs {stall:.0%} of each step"


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

"""All rules that look for causes, and the one order in which their findings are given.

Pure: measured facts in, findings out. ``docs/verdicts.md`` says what each code rests on. These
codes say why a step is slow; those of
:mod:`~lightning_fastdata.insight.verdicts.without_stamps` say how much data costs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_fastdata.insight.model.finding import STALL_HIGH
from lightning_fastdata.insight.verdicts import (
    late_batches,
    one_of_several,
    own_work,
    pauses,
    step_costs,
    uneven_workers,
)
from lightning_fastdata.insight.verdicts.rule import Found, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lightning_fastdata.insight.measure.wall import WallTime
    from lightning_fastdata.insight.model.evidence import Evidence
    from lightning_fastdata.insight.model.finding import Finding

RULES: Final[tuple[Rule[Evidence], ...]] = tuple(
    sorted(
        (
            *step_costs.RULES,
            *uneven_workers.RULES,
            *late_batches.RULES,
            *own_work.RULES,
            *pauses.RULES,
            *one_of_several.RULES,
        ),
        key=lambda rule: (rule.after or rule.code, rule.code),
    )
)
_SEVERITIES: Final = ("high", "moderate", "fine")
_CLEARLY: Final = 1.5
"""One gain is clearly larger than another if it is so many times as large."""


class Ranking(NamedTuple):
    """Findings in their order."""

    order: tuple[Found, ...]
    """The one to act upon first."""
    pause: Found | None
    """The pause that the run is called by, which is then the first; None: no pause costs it so
    much."""


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Return everything that the evidence shows, the finding to act upon first.

    Args:
        evidence: Measured facts; what was not measured gives no findings.
    """
    return tuple(each.finding for each in ranked(evidence).order)


def ranked(evidence: Evidence, cost: Found | None = None) -> Ranking:
    """Return the findings that no other one replaces, in their order.

    By severity, then those first that gain clearly more, else as their rules stand in the
    catalogue. Before all others come the pause that costs the run most, if that is 10 % and more
    than late batches do, and then a rank that holds up this one: no other remedy would help.

    Args:
        evidence: Measured facts.
        cost: What was found without stamps.
    """
    found = list(_found(evidence))
    replaced = frozenset[str]().union(*(each.rule.replaces for each in found))
    if cost is not None:
        found.insert(0, cost)
    found = [each for each in found if each.rule.code not in replaced]
    pause = _worst_pause(found, evidence.wall)
    why = sorted(
        (each for each in found if each is not cost),
        key=lambda each: (each is not pause, *_weight(each)),
    )
    # The cost alone does not come before the rank that everything waits for.
    leading = why if evidence.held_up else why[:1]
    rank = next((each for each in leading if each.rule.about == "rank"), None)
    found.sort(key=lambda each: (each is not pause, each is not rank, *_weight(each)))
    return Ranking(tuple(_naming_settings(each, evidence.settings_in) for each in found), pause)


def _found(evidence: Evidence) -> Iterator[Found]:
    """Yield what each rule finds; of several loaders, a loader's findings name it."""
    own = one_of_several.own_evidence(evidence)
    for rule in RULES:
        if rule.about not in ("loader", "machine"):
            finding = rule.find(evidence)
        elif (finding := rule.find(own)) is not None:
            finding = one_of_several.naming_loader(own, finding, remedy_too=rule.about == "loader")
        if finding is not None:
            yield Found(rule, finding)


def _worst_pause(found: Iterable[Found], wall: WallTime | None) -> Found | None:
    """Return the pause that costs the run most, if that is 10 % and more than late batches do."""
    gains = [
        (gain.before_ms - gain.after_ms, each)
        for each in found
        if each.rule.about == "run" and (gain := each.finding.gain) is not None
    ]
    if wall is None or not gains:
        return None
    cost_ms, worst = max(gains, key=lambda pair: pair[0])
    cost_s = cost_ms * wall.steps / 1000
    waited_s = wall.parts_s.get("wait", 0.0)
    return worst if cost_s > waited_s and wall.share(cost_s) > STALL_HIGH else None


def _weight(found: Found) -> tuple[int, int]:
    """Return what findings are sorted by: how severe they are, then what they gain."""
    gain = found.finding.gain
    # That others wait for a rank says nothing of why it is late: its own causes do.
    factor = 1.0 if gain is None or found.rule.about == "rank" else gain.factor
    steps = math.floor(math.log(factor, _CLEARLY)) if 1.0 < factor < math.inf else 0
    return _SEVERITIES.index(found.finding.severity), -steps


def _naming_settings(found: Found, settings_in: str) -> Found:
    """Return a finding whose remedy is written for what holds the loader's settings."""
    finding = found.finding
    remedy = finding.remedy.replace("LoaderOptions(", f"{settings_in}(")
    return Found(found.rule, replace(finding, remedy=remedy))

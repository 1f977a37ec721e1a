"""All rules that look for causes, and the one order in which their findings are given.

Pure: measured facts in, findings out. ``docs/verdicts`` says what each code rests on. These
codes say why a step is slow; those of
:mod:`~lightning_fastdata.insight.verdicts.without_stamps` say how much data costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final, NamedTuple

from lightning_fastdata.insight import memory
from lightning_fastdata.insight.measure.metrics import StageSummary
from lightning_fastdata.insight.measure.wall import WallTime
from lightning_fastdata.insight.model.evidence import Evidence, LoaderFacts
from lightning_fastdata.insight.model.finding import (
    STALL_HIGH,
    STALL_LOW,
    Finding,
    Found,
    Kind,
    Rule,
    costs_much,
    duration_text,
    passed,
    steps_text,
)
from lightning_fastdata.insight.verdicts import late_batches, step_costs, without_stamps

RULES: Final[tuple[Rule, ...]] = tuple(
    sorted(
        (*late_batches.RULES, *memory.RULES, *step_costs.RULES),
        key=lambda rule: (rule.after or rule.code, rule.code),
    )
)
_SEVERITIES: Final = ("high", "moderate", "fine")
_OF_STEPS: Final = ("FD312", "FD313", "FD337")
"""Besides data and the model, what makes a step longer."""
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
    """Return everything that the evidence shows, the finding to act upon first."""
    return tuple(each.finding for each in ranked(evidence).order)


def ranked(evidence: Evidence, cost: Found | None = None) -> Ranking:
    """Return the findings that no other one replaces, in their order.

    By severity, then those first that gain clearly more, else as their rules stand in the
    catalogue. Before all others come the pause that costs the run most, if that is 10 % and more
    than late batches do, and then a rank that holds up this one: no other remedy would help.
    ``cost`` is what was found without stamps.
    """
    found = list(_found(evidence))
    replaced = frozenset[str]().union(*(each.rule.replaces for each in found))
    if cost is not None:
        found.insert(0, cost)
    found = [_passed(each, evidence) for each in found if each.rule.code not in replaced]
    pause = _worst_pause(found, evidence.wall)
    why = sorted(
        (each for each in found if each.rule is not (cost and cost.rule)),
        key=lambda each: (each is not pause, *_weight(each)),
    )
    # The cost alone does not come before the rank that everything waits for.
    leading = why if evidence.held_up else why[:1]
    rank = next((each for each in leading if each.rule.about == "rank"), None)
    found.sort(key=lambda each: (each is not pause, each is not rank, *_weight(each)))
    return Ranking(tuple(found), pause)


def _passed(found: Found, e: Evidence) -> Found:
    """Return what the gate lets through of a finding, written for what holds the settings."""
    options, cache = f"{e.settings_in}(", "FastDataModule(cache='auto')"
    finding = passed(found.finding, e.closed)
    remedy = finding.remedy.replace("LoaderOptions(", options)
    if e.settings_in == "FastDataLoader":
        remedy = remedy.replace(cache, "CachedDataset(dataset)")
    return Found(found.rule, replace(finding, remedy=remedy))


def _found(evidence: Evidence) -> Iterator[Found]:
    """Yield what each rule finds; of several loaders, a loader's findings name it."""
    of_loader = evidence.of_loader()
    for rule in RULES:
        own = rule.about in ("loader", "machine")
        finding = rule.find(of_loader if own else evidence)
        if finding is not None and own:
            finding = _naming_loader(evidence, finding, rule)
        if finding is not None:
            yield Found(rule, finding)


def _naming_loader(e: Evidence, finding: Finding, rule: Rule) -> Finding:
    """Return a finding that names its loader, and so does its remedy where that is an option."""
    label = e.loader.loader
    if label is None:
        return finding
    finding = replace(finding, cause=f"{label}: {finding.cause}")
    if rule.about != "loader" or not finding.advice:
        return finding
    first, *others = finding.advice
    return replace(finding, advice=(replace(first, text=f"{label}: {first.text}"), *others))


def _worst_pause(found: Iterable[Found], wall: WallTime) -> Found | None:
    """Return the pause that costs the run most, if that is 10 % and more than late batches do."""
    gains = [
        (gain.saved_ms, each)
        for each in found
        if each.rule.about == "run" and (gain := each.finding.gain) and each.finding.remedy
    ]
    if not gains:
        return None
    cost_ms, worst = max(gains, key=itemgetter(0))
    cost_s, waited_s = cost_ms * wall.steps / 1000, wall.parts_s.get("wait", 0.0)
    return worst if cost_s > waited_s and wall.share(cost_s) > STALL_HIGH else None


def _weight(found: Found) -> tuple[int, int]:
    """Return what findings are sorted by: how severe they are, then what they gain."""
    gain = found.finding.gain
    # That others wait for a rank says nothing of why it is late: its own causes do.
    factor = 1.0 if gain is None or found.rule.about == "rank" else gain.factor
    steps = math.floor(math.log(factor, _CLEARLY)) if 1.0 < factor < math.inf else 0
    return _SEVERITIES.index(found.finding.severity), -steps


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict:
    """What limits a stage."""

    kind: Kind
    """``data-bound``: the device waits for data above 10 % of the step; ``balanced``: from 3 to
    10 %, or something other than data and the model costs much; ``unknown``: too few steps. The
    others: what pauses the run for more of its time than late batches do, and for 10 % or more."""
    sentence: str
    """How much it waits."""
    evidence: tuple[str, ...]
    """Measured facts that belong to it, and what is not known."""
    findings: tuple[Finding, ...]
    """Causes and remedies; never empty, the one to act upon first."""

    @property
    def code(self) -> str:
        """Stable code of the first finding."""
        return self.findings[0].code

    def __repr__(self) -> str:
        return f"<Verdict: {self.kind}, {self.sentence} [{self.code}]>"


def judge(
    summary: StageSummary, facts: LoaderFacts | None = None, evidence: Evidence | None = None
) -> Verdict:
    """Return what limits the stage; without ``facts``, ``evidence`` says what its loader is."""
    evidence = evidence or Evidence()
    facts = facts or evidence.loader
    evidence = replace(evidence, summary=summary, loader=facts)
    cost = without_stamps.largest_cost(evidence)
    stall = summary.stall
    if cost.rule.code == "FD000" or stall is None:
        return Verdict(
            kind="unknown",
            sentence=cost.finding.cause,
            evidence=_unmeasured(summary),
            findings=(_passed(cost, evidence).finding,),
        )
    late = stall.share > STALL_HIGH and costs_much(stall.mean_ms, stall.share)
    kind: Kind = "data-bound" if late else "balanced"
    sentence = without_stamps.waiting_text(summary)
    order, pause = ranked(evidence, cost)
    costly = any(each.rule.code in _OF_STEPS for each in order)
    if stall.share < STALL_LOW and not costly:
        kind = "compute-bound"
    rule, first = order[0]
    if pause is not None:
        kind, sentence = pause.rule.kind or kind, pause.finding.cause
    elif kind == "data-bound" and rule.about == "machine":
        kind = rule.kind or kind
    if evidence.held_up:
        # This rank hardly waits for its own data; the others' is waited for in the backward pass.
        kind, sentence = "data-bound" if first.severity == "high" else "balanced", first.cause
    return Verdict(
        kind=kind,
        sentence=sentence,
        evidence=_evidence(summary, facts),
        findings=tuple(each.finding for each in order),
    )


def _unmeasured(summary: StageSummary) -> tuple[str, ...]:
    evidence = [f"{steps_text(summary.steps)} {'was' if summary.steps == 1 else 'were'} timed"]
    if summary.stall is None and summary.steps:
        evidence.append("waits for batches were not seen")
    return tuple(evidence)


def _evidence(summary: StageSummary, facts: LoaderFacts) -> tuple[str, ...]:
    evidence = [
        f"step {each.step} took {duration_text((each.step_ms or 0.0) / 1e3)}, and is judged without"
        for each in summary.long_steps
    ]
    wait, stall = summary.wait, summary.stall
    if wait is not None and stall is not None:
        hidden = wait.mean_ms - stall.mean_ms
        if hidden > 0.05 * wait.mean_ms and hidden > 0.1:
            evidence.append(f"{hidden:.1f} of {wait.mean_ms:.1f} ms of waiting hide behind the GPU")
        if wait.p50_ms > 0 and wait.p95_ms > 3 * wait.p50_ms:
            evidence.append(f"waits come in bursts (p50 {wait.p50_ms:.1f}, p95 {wait.p95_ms:.1f})")
    if summary.cold_wait_ms is not None:
        evidence.append(f"first batch of an epoch after {summary.cold_wait_ms:.0f} ms")
    which = "" if facts.loader is None else f"{facts.loader}: "
    if facts.num_workers is None:
        evidence.append(f"{which}number of workers not known")
    else:
        workers = f"{facts.num_workers} worker{'' if facts.num_workers == 1 else 's'}"
        cpus = "" if facts.usable_cpus is None else f"{facts.usable_cpus} "
        unknown = "" if cpus else " not known"
        evidence.append(f"{which}{workers}, {cpus}usable CPUs{unknown}")
    if facts.augment_on is not None:
        evidence.append(f"transforms run on the {'CPU' if facts.augment_on == 'cpu' else 'device'}")
    return tuple(evidence)

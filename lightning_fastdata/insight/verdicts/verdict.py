"""What limits a stage, and why: the summary, the loader's facts and the stamps, judged together.

Pure: numbers in, words out. How much data costs is told from outside the loader
(:mod:`~lightning_fastdata.insight.verdicts.without_stamps`); why, by the stamps that batches carry
(:mod:`~lightning_fastdata.insight.verdicts.catalogue`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.model.finding import STALL_HIGH, STALL_LOW, Finding, Kind
from lightning_fastdata.insight.model.loader_facts import LoaderFacts
from lightning_fastdata.insight.verdicts import pauses
from lightning_fastdata.insight.verdicts.catalogue import by_weight, findings
from lightning_fastdata.insight.verdicts.without_stamps import (
    outside_finding,
    timed_steps,
    waiting_text,
)
from lightning_fastdata.insight.waits.causes import PART_WORDS

if TYPE_CHECKING:
    from lightning_fastdata.insight.measure.metrics import StageSummary
    from lightning_fastdata.insight.model.evidence import Evidence
    from lightning_fastdata.insight.waits.attribution import WaitParts

_SLOW_RANK: Final = "FD316"
_NEEDS_STAMPS: Final = ("FD104", "FD105")
_TOLD_PARTS: Final = 3
_NEIGHBOURS: Final = "FD315"
_NO_CAUSE_OF_STALLS: Final = frozenset(
    {"FD301", "FD312", "FD313", "FD314", _SLOW_RANK, "FD317", "FD319"} | pauses.KINDS.keys()
)
"""Causes of other costs than late batches within an epoch."""


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
    """Return what limits the stage.

    Args:
        summary: The measured stage.
        facts: What is known about the loader; None = nothing.
        evidence: What the stamps of its batches tell; None = there are no stamps.
    """
    facts = LoaderFacts() if facts is None else facts
    outside = outside_finding(summary, facts)
    if outside.code == "FD000" or summary.stall is None:
        return Verdict(
            kind="unknown",
            sentence=outside.cause,
            evidence=_unmeasured(summary),
            findings=(outside,),
        )
    share = summary.stall.share
    kind: Kind = "data-bound" if share > STALL_HIGH else "balanced"
    if share < STALL_LOW and outside.severity == "fine":
        kind = "compute-bound"
    inside = () if evidence is None else findings(evidence)
    if evidence is not None and evidence.parts is not None and outside.code in _NEEDS_STAMPS:
        outside = replace(outside, remedy=_many_small_costs(evidence.parts))
    causes = _causes(outside, inside, share)
    sentence = waiting_text(summary)
    worst = None if evidence is None else pauses.worst_pause(evidence)
    if worst is not None:
        pause = next(each for each in inside if each.code == worst.code)
        kind, sentence = pauses.KINDS[pause.code], pause.cause
        causes = (pause, *(each for each in causes if each != pause))
    if kind == "data-bound" and causes[0].code == _NEIGHBOURS:
        kind = "held up by other programs"
    if evidence is not None and evidence.held_up:
        # This rank hardly waits for its own data; the others' is waited for in the backward pass.
        kind = "data-bound" if causes[0].severity == "high" else "balanced"
        sentence = causes[0].cause
    return Verdict(
        kind=kind,
        sentence=sentence,
        evidence=_evidence(summary, facts),
        findings=causes,
    )


def _many_small_costs(parts: WaitParts) -> str:
    """Return what to look at where no part of the wait stands out."""
    largest = sorted(parts.shares().items(), key=lambda part: -part[1])[:_TOLD_PARTS]
    told = "; ".join(f"{PART_WORDS[name + '_ms']}: {share:.0%}" for name, share in largest)
    return f"no single cost stands out: {told} of the wait"


def _causes(
    outside: Finding, inside: tuple[Finding, ...], stall_share: float
) -> tuple[Finding, ...]:
    """Return the causes seen from inside; what outsiders see only where these leave it open."""
    explained = stall_share <= STALL_HIGH or any(
        found.code not in _NO_CAUSE_OF_STALLS for found in inside
    )
    if inside and explained:
        return inside
    if inside and inside[0].code == _SLOW_RANK:
        return (inside[0], *by_weight((outside, *inside[1:])))
    return by_weight((outside, *inside))


def _unmeasured(summary: StageSummary) -> tuple[str, ...]:
    evidence = [f"{timed_steps(summary)} of {summary.steps} steps were timed"]
    if summary.stall is None and summary.steps:
        evidence.append("waits for batches were not seen")
    if summary.dropped_steps:
        evidence.append(f"{summary.dropped_steps} steps given up: the device lagged behind")
    return tuple(evidence)


def _evidence(summary: StageSummary, facts: LoaderFacts) -> tuple[str, ...]:
    evidence = []
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
    elif facts.usable_cpus is None:
        evidence.append(f"{which}{_counted(facts.num_workers)}, usable CPUs not known")
    else:
        evidence.append(f"{which}{_counted(facts.num_workers)}, {facts.usable_cpus} usable CPUs")
    if facts.augment_on is not None:
        evidence.append(f"transforms run on the {'CPU' if facts.augment_on == 'cpu' else 'device'}")
    return tuple(evidence)


def _counted(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"

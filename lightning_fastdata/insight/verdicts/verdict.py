"""What limits a stage, and why: the summary, the loader's facts and the stamps, judged together.

Pure: numbers in, words out. The summary and the loader's facts say how much data costs
(:mod:`~lightning_fastdata.insight.verdicts.without_stamps`); the stamps that batches carry say why
(:mod:`~lightning_fastdata.insight.verdicts.catalogue`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import STALL_HIGH, STALL_LOW, Finding, Kind
from lightning_fastdata.insight.model.loader_facts import LoaderFacts
from lightning_fastdata.insight.verdicts.catalogue import ranked
from lightning_fastdata.insight.verdicts.rule import Unstamped
from lightning_fastdata.insight.verdicts.without_stamps import (
    largest_cost,
    timed_steps,
    waiting_text,
)

if TYPE_CHECKING:
    from lightning_fastdata.insight.measure.metrics import StageSummary


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
        evidence: What the stamps of its batches say; None = there are no stamps.
    """
    facts = LoaderFacts() if facts is None else facts
    evidence = Evidence() if evidence is None else evidence
    cost = largest_cost(Unstamped(summary, facts, evidence.parts))
    if cost.rule.code == "FD000" or summary.stall is None:
        return Verdict(
            kind="unknown",
            sentence=cost.finding.cause,
            evidence=_unmeasured(summary),
            findings=(cost.finding,),
        )
    share = summary.stall.share
    kind: Kind = "data-bound" if share > STALL_HIGH else "balanced"
    if share < STALL_LOW and cost.finding.severity == "fine":
        kind = "compute-bound"
    sentence = waiting_text(summary)
    order, pause = ranked(evidence, cost)
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

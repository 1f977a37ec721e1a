"""Evidence of which some facts are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from lightning_fastdata.insight import verdict
from lightning_fastdata.insight.evidence import Evidence, evidence_of
from lightning_fastdata.insight.finding import LoaderFacts
from lightning_fastdata.insight.machine import NO_MACHINE
from lightning_fastdata.insight.steps import PhaseSummary, StageSummary
from lightning_fastdata.insight.verdict import Verdict
from lightning_fastdata.insight.waits import NO_CAUSES
from lightning_fastdata.insight.wall import NO_TIME, loop_time

NOTHING: Final = Evidence()
NO_LOADER: Final = LoaderFacts()
_PHASES: Final = ("step_ms", "wait_ms", "stall_ms", "transfer_ms", "augment_ms")
_CAUSES: Final = ("parts", "slow_samples", "operations", "lines")
UNKNOWN: Final[dict[str, Any]] = {
    **dict.fromkeys((*_PHASES, "parts", "setup", "busy_share", "runqueue_share", "read_rates")),
    **dict.fromkeys(("free_cpus", "padding", "val_workers", "val_loader")),
    "wall": NO_TIME,
    "machine": NO_MACHINE,
    "ranks": (),
}
"""Fact -> its value where it was not measured."""


def evidence_with(evidence: Evidence = NOTHING, /, **facts: Any) -> Evidence:
    """Return the evidence with some facts changed."""
    summary, loader = evidence.summary, evidence.loader
    if "summary" in facts:
        kept = {"transfer": summary.transfer, "augment": summary.augment, "causes": summary.causes}
        kept = {name: value for name, value in kept.items() if value is not None}
        summary = replace(facts.pop("summary"), **kept)
    for name in _PHASES:
        if name in facts:
            summary = replace(summary, **{name.removesuffix("_ms"): _phase(facts.pop(name))})
    causes = {name: facts.pop(name) for name in _CAUSES if name in facts}
    if causes:
        changed = {"wait" if name == "parts" else name: each for name, each in causes.items()}
        known = replace(summary.causes or NO_CAUSES, batches=1, **changed)
        summary = replace(summary, causes=None if causes.get("parts", ...) is None else known)
    now = facts.get("setup")
    if now is not None:
        facts.setdefault("setup_with", lambda n: replace(now, workers=n, look_ahead=max(8, 2 * n)))
    known = {name: facts.pop(name) for name in ("device", "cold_steps") if name in facts}
    facts["summary"] = replace(summary, **known)
    new = facts.pop("loader", loader)
    facts["loader"] = replace(new, closed=facts.pop("closed", new.closed or loader.closed))
    return replace(evidence, **facts)


def judge(
    summary: StageSummary, loader: LoaderFacts | None = None, evidence: Evidence | None = None
) -> Verdict:
    """Return what limits a stage of which this is known."""
    facts = {} if loader is None else {"loader": loader}
    return verdict.judge(evidence_with(evidence or NOTHING, summary=summary, **facts))


def _phase(ms: float | None) -> PhaseSummary | None:
    figures = dict.fromkeys(("mean_ms", "p50_ms", "p95_ms"), ms)
    return None if ms is None else PhaseSummary(**figures, share=0.0)


def of_loop(
    summary: StageSummary,
    loader: LoaderFacts = NO_LOADER,
    evidence: Evidence | None = None,
    val: StageSummary | None = None,
) -> Evidence:
    """Return what is known of a stage of a loop; ``evidence``: what stamps show."""
    known = evidence or evidence_of(summary, loader)
    return replace(known, wall=loop_time(summary, val))

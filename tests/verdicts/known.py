"""Evidence of which some facts are known, whichever families of causes they belong to."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

from lightning_fastdata.insight import verdict
from lightning_fastdata.insight.finding import LoaderFacts
from lightning_fastdata.insight.late_batches import LateBatches, late_batches_of
from lightning_fastdata.insight.machine import NO_MACHINE
from lightning_fastdata.insight.step_costs import StepCosts
from lightning_fastdata.insight.steps import PhaseSummary, StageSummary
from lightning_fastdata.insight.verdict import Evidence, Verdict
from lightning_fastdata.insight.waits import NO_CAUSES
from lightning_fastdata.insight.wall import Pauses, loop_time

NOTHING: Final = Evidence()
NO_LOADER: Final = LoaderFacts()
NO_LOADER: Final = LoaderFacts()
_PHASES: Final = ("step_ms", "wait_ms", "stall_ms", "transfer_ms", "augment_ms")
_CAUSES: Final = {
    "parts": "wait",
    "overtaken_share": "overtaken_share",
    "slow_samples": "slow_samples",
    "operations": "operations",
    "lines": "lines",
}
UNKNOWN: Final[dict[str, Any]] = {
    **dict.fromkeys(_PHASES),
    **dict.fromkeys(("parts", "setup", "busy_share", "runqueue_share", "read_rates", "free_cpus")),
    **dict.fromkeys(("padding", "val_workers", "val_loader")),
    "wall": Pauses().wall,
    "machine": NO_MACHINE,
    "ranks": (),
}
"""Fact -> its value where it was not measured."""


def evidence_with(evidence: Evidence = NOTHING, /, **facts: Any) -> Evidence:
    """Return the evidence with some facts changed, each in all families that have it."""
    families = {each.name: getattr(evidence, each.name) for each in fields(evidence)}
    late, step, cost = families["late"], families["step"], families["cost"]
    share = facts.pop("loader_share", 1.0)
    phases = {name: facts.pop(name) for name in _PHASES if name in facts}
    causes = {_CAUSES[name]: facts.pop(name) for name in _CAUSES if name in facts}
    if phases:
        summary = replace(step.summary, gap=None, **{n[:-3]: _phase(p) for n, p in phases.items()})
        step = replace(step, summary=summary)
        times = {name: ms for name, ms in phases.items() if name in _PHASES[:3]}
        families["ranks"] = replace(evidence.ranks, times=replace(evidence.ranks.times, **times))
        late = replace(late, times=replace(late.times, **times))
    late = replace(late, times=late.times.waiting_for(share))
    if causes.get("wait", ...) is None:
        late, cost = replace(late, causes=NO_CAUSES), replace(cost, wait=None)
    elif causes:
        late = replace(late, causes=replace(late.causes, **{"batches": 1, **causes}))
        cost = replace(cost, wait=late.causes.wait)
        step, cost = (_of_causes(each, causes) for each in (step, cost))
    if "summary" in facts:
        cost = replace(cost, summary=facts.pop("summary"))
        step = replace(step, summary=replace(step.summary, compute=cost.summary.compute))
    if "device" in facts:
        step = replace(step, summary=replace(step.summary, device=facts.pop("device")))
    if "ranks" in facts:
        families["ranks"] = replace(families["ranks"], ranks=facts.pop("ranks"))
    if "memory" in facts:
        families["memory"] = facts.pop("memory")
    loader = facts.pop("loader", cost.loader)
    closed = facts.pop("closed", loader.closed or cost.loader.closed)
    facts["loader"] = replace(loader, closed=closed)
    families |= {"late": late, "step": step, "cost": cost}
    for name, family in families.items():
        own = {each.name for each in fields(family)} & facts.keys()
        families[name] = replace(family, **{each: facts[each] for each in own})
    return Evidence(**families)


def judge(
    summary: StageSummary, loader: LoaderFacts | None = None, evidence: Evidence | None = None
) -> Verdict:
    """Return what limits a stage of which this is known."""
    facts = {} if loader is None else {"loader": loader}
    return verdict.judge(evidence_with(evidence or NOTHING, summary=summary, **facts))


def _phase(ms: float | None) -> PhaseSummary | None:
    return (
        None if ms is None else PhaseSummary(mean_ms=ms, p50_ms=ms, p95_ms=ms, max_ms=ms, share=0.0)
    )


def _of_causes(family: Any, causes: dict[str, Any]) -> Any:
    """Return a family whose summary, if it has causes, has these."""
    known = family.summary.causes
    if known is None:
        return family
    return replace(family, summary=replace(family.summary, causes=replace(known, **causes)))


def of_loop(
    summary: StageSummary,
    loader: LoaderFacts = NO_LOADER,
    late: LateBatches | None = None,
    val: StageSummary | None = None,
) -> Evidence:
    """Return what is known of a stage of a loop; ``late``: what stamps show."""
    return verdict.evidence_of(
        late or late_batches_of(summary, loader),
        StepCosts(summary=summary, loader=loader),
        Pauses(wall=loop_time(summary, val), epochs=summary.cold_steps, loader=loader),
    )

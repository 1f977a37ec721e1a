"""What limits a stage: the findings of all families of causes, in one order.

``docs/verdicts`` says what each code rests on. Those from FD302 on say why a step is slow; the
others need no stamps and say how much data costs: their bounds are shares of the step as the device
saw it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final

from lightning_fastdata.insight import late_batches, machine, ranks, step_costs, wall
from lightning_fastdata.insight.evidence import Evidence
from lightning_fastdata.insight.finding import (
    STALL_HIGH,
    STALL_LOW,
    TRANSFER_HIGH,
    Advice,
    Finding,
    Found,
    Gain,
    Kind,
    LoaderFacts,
    Rule,
    costs_much,
    cpus_text,
    duration_text,
    make_finding,
    passed,
    seen_by,
    steps_text,
)
from lightning_fastdata.insight.steps import StageSummary
from lightning_fastdata.insight.waits import PART_WORDS
from lightning_fastdata.insight.wall import WallTime
from lightning_fastdata.types import STAGE_WORDS

_SEVERITIES: Final = ("high", "moderate", "fine")
_OF_STEPS: Final = ("FD312", "FD313", "FD337")
"""Codes of findings about what makes a step longer besides data and the model."""
_CLEARLY: Final = 1.5
"""Ratio of two gains from which on one is clearly larger than the other."""
_FEWEST_STEPS: Final = 5
"""Number of steps below which nothing is said of a stage."""
_SHOWN_PARTS: Final = 3
RULES: Final = tuple(
    sorted(
        (*late_batches.RULES, *step_costs.RULES, *ranks.RULES, *wall.RULES, *machine.RULES),
        key=lambda rule: (rule.after or rule.code, rule.code),
    )
)
"""Rules of all families of causes, in the order of the catalogue."""


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Return everything that the evidence shows, the finding to act upon first."""
    return tuple(each.finding for each in ranked(evidence)[0])


def ranked(evidence: Evidence, cost: Found | None = None) -> tuple[list[Found], Found | None]:
    """Return the findings that no other one replaces, in their order, and the pause that leads.

    The order is by severity, then by clearly larger gains, then that of the rules in the catalogue.
    Before all others come the pause that costs the run most, if that is 10 % and more than late
    batches or another cost of steps do, and then a rank that holds up this one: no other remedy
    would help. ``cost`` is what was found without stamps. The pause is None if none costs the run
    so much.
    """
    label, held_up = evidence.loader.loader, ranks.is_held_up(evidence)
    found = [_naming_loader(each, label) for each in seen_by(RULES, evidence)]
    replaced = frozenset[str]().union(*(each.rule.replaces for each in found))
    if cost is not None:
        found.insert(0, cost)
    found = [_passed(each, evidence) for each in found if each.rule.code not in replaced]
    pause = _worst_pause(found, evidence.wall)
    why = sorted(
        (each for each in found if each.rule is not (cost and cost.rule)),
        key=lambda each: (each is not pause, *_weight(each)),
    )
    # The cost alone does not come before a rank that all others wait for.
    leading = why if held_up else why[:1]
    rank = next((each for each in leading if each.rule.about == "rank"), None)
    found.sort(key=lambda each: (each is not pause, each is not rank, *_weight(each)))
    return found, pause


def _passed(found: Found, e: Evidence) -> Found:
    """Return a finding after the gate, its remedy written for where the settings are."""
    finding = passed(found.finding, e.loader.closed)
    remedy = finding.remedy
    if e.settings_in != "LoaderOptions":
        remedy = remedy.replace("LoaderOptions(", f"{e.settings_in}(")
        remedy = remedy.replace("FastDataModule(cache='auto')", "CachedDataset(dataset)")
    return Found(found.rule, replace(finding, remedy=remedy))


def _naming_loader(found: Found, label: str | None) -> Found:
    """Return a finding on a loader with its name; so is its remedy if that is a loader's option."""
    rule, finding = found
    if label is None or rule.about not in ("loader", "machine"):
        return found
    advice = finding.advice
    if rule.about == "loader" and advice:
        advice = (replace(advice[0], text=f"{label}: {advice[0].text}"), *advice[1:])
    return Found(rule, replace(finding, cause=f"{label}: {finding.cause}", advice=advice))


def _worst_pause(found: Iterable[Found], wall: WallTime) -> Found | None:
    """Return the pause that costs the run most, if that is 10 % and more than its steps lose."""
    gains = [
        (gain.saved_ms, each)
        for each in found
        if (each.rule.about == "run" or each.rule.code in _OF_STEPS)
        and (gain := each.finding.gain)
        and each.finding.remedy
    ]
    if not gains:
        return None
    cost_ms, worst = max(gains, key=itemgetter(0))
    cost_s, waited_s = cost_ms * wall.steps / 1000, wall.parts_s.get("wait", 0.0)
    leads = worst.rule.about == "run" and cost_s > waited_s
    return worst if leads and wall.share(cost_s) > STALL_HIGH else None


def _weight(found: Found) -> tuple[int, int]:
    """Return the sort key of a finding: how severe it is, then what it gains."""
    gain = found.finding.gain
    # The wait of other ranks does not say why a rank is late: its own causes do.
    factor = 1.0 if gain is None or found.rule.about == "rank" else gain.factor
    steps = math.floor(math.log(factor, _CLEARLY)) if 1.0 < factor < math.inf else 0
    return _SEVERITIES.index(found.finding.severity), -steps


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict:
    """What limits a stage."""

    kind: Kind
    """What limits the stage. ``data-bound``: the device waits for data above 10 % of the step;
    ``balanced``: 3 to 10 %, or no longer than handing over a batch takes, or something else costs
    much; ``compute-bound``: neither; ``unknown``: too few steps. Other kinds name a pause that
    takes 10 % of the run or more, and more than late batches or another cost of steps do, or other
    programs."""
    sentence: str
    """One sentence on what limits the stage: how much it waits for data, or what pauses it."""
    evidence: tuple[str, ...]
    """Measured facts that support the verdict, and what is not known."""
    findings: tuple[Finding, ...]
    """Causes and remedies, the one to act upon first; never empty."""

    @property
    def code(self) -> str:
        """Stable code of the first finding."""
        return self.findings[0].code

    def __repr__(self) -> str:
        return f"<Verdict: {self.kind}, {self.sentence} [{self.code}]>"


def judge(evidence: Evidence) -> Verdict:
    """Return what limits the stage."""
    summary, loader = evidence.summary, evidence.loader
    cost = next(seen_by(COSTS, evidence))  # the last rule always holds
    stall = summary.stall
    if cost.rule.code == "FD000" or stall is None:
        seen = [f"{steps_text(summary.steps)} {'was' if summary.steps == 1 else 'were'} timed"]
        if stall is None and summary.steps:
            seen.append("waits for batches were not seen")
        return Verdict(
            kind="unknown",
            sentence=cost.finding.cause,
            evidence=tuple(seen),
            findings=(_passed(cost, evidence).finding,),
        )
    late = stall.share > STALL_HIGH and costs_much(stall.mean_ms, stall.share)
    kind: Kind = "data-bound" if late else "balanced"
    sentence = waiting_text(summary)
    order, pause = ranked(evidence, cost)
    costly = any(each.rule.code in _OF_STEPS for each in order)
    if stall.share < STALL_LOW and not costly:
        kind = "compute-bound"
    rule, first = order[0]
    if pause is not None:
        kind, sentence = pause.rule.kind or kind, pause.finding.cause
    elif kind == "data-bound" and rule.about == "machine":
        kind = rule.kind or kind
    if ranks.is_held_up(evidence):
        # This rank hardly waits for its own data; the others' is waited for in the backward pass.
        kind, sentence = "data-bound" if first.severity == "high" else "balanced", first.cause
    return Verdict(
        kind=kind,
        sentence=sentence,
        evidence=_evidence(summary, loader, evidence.wall),
        findings=tuple(each.finding for each in order),
    )


def _evidence(summary: StageSummary, loader: LoaderFacts, wall: WallTime) -> tuple[str, ...]:
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
    step, gap = summary.step, summary.gap
    if step and gap and gap.mean_ms > STALL_HIGH * (step.mean_ms + gap.mean_ms):
        evidence.append(f"{gap.mean_ms:.1f} ms pass beside each step")
    if summary.cold_wait_ms is not None:
        # Workers of torch start in iter(), before the first batch is waited for.
        later_s = dict(wall.names_of("epoch_starts")).get("later epochs", 0.0)
        first_ms = max(summary.cold_wait_ms, 1000 * later_s / max(1, summary.cold_steps - 1))
        evidence.append(f"first batch of an epoch after {first_ms:.0f} ms")
    which = "" if loader.loader is None else f"{loader.loader}: "
    if loader.num_workers is None:
        evidence.append(f"{which}number of workers not known")
    else:
        workers = f"{loader.num_workers} worker{'' if loader.num_workers == 1 else 's'}"
        cpus = loader.usable_cpus
        usable = "usable CPUs not known" if cpus is None else cpus_text(cpus, "usable ")
        evidence.append(f"{which}{workers}, {usable}")
    if loader.augment_on is not None:
        where = "on the CPU" if loader.augment_on == "cpu" else "on the device"
        if loader.augment_on == "device" and summary.device == "cpu":
            where = "in the training process"
        evidence.append(f"transforms run {where}")
    return tuple(evidence)


def waiting_text(summary: StageSummary) -> str:
    """Return how much of each step is waiting, in words; empty if that was not measured."""
    step, stall = summary.step, summary.stall
    if step is None or stall is None:
        return ""
    loop = STAGE_WORDS.get(summary.stage, summary.stage)
    who = "the GPU" if summary.device != "cpu" else f"the {loop} loop"
    times = f"({stall.mean_ms:.1f} of {step.mean_ms:.1f} ms)"
    return f"{who} waits {stall.share:.0%} of each step {times}"


def _too_few_steps(e: Evidence) -> Finding | None:
    summary = e.summary
    measured = summary.step is not None and summary.stall is not None
    if measured and summary.steps >= _FEWEST_STEPS:
        return None
    more = Advice(text=f"run at least {_FEWEST_STEPS} steps", for_speed=False)
    advice = (more,) if summary.steps < _FEWEST_STEPS else ()
    return Finding(severity="fine", cause="too little was measured to tell", advice=advice)


def _no_workers(e: Evidence) -> Finding | None:
    wanted, stall = _wanted_workers(e), e.summary.stall
    if e.loader.num_workers != 0 or stall is None or "num_workers" in e.loader.closed:
        return None
    if not wanted:
        remedy = "num_workers above 0, so that loading runs beside the training process"
        return _late(e, Advice(text=remedy, changes=("num_workers",)))
    # A step that waits takes as long as its batch, and workers make at most one batch each then.
    return _late(e, _more_workers(e, wanted), least_ms=stall.mean_ms / wanted)


def _few_workers(e: Evidence) -> Finding | None:
    wanted, workers, step = _wanted_workers(e), e.loader.num_workers, e.summary.step
    if not wanted or workers is None or workers >= wanted or step is None:
        return None
    if "num_workers" in e.loader.closed:
        return None
    return _late(e, _more_workers(e, wanted), least_ms=step.mean_ms * workers / wanted)


def _late(e: Evidence, remedy: Advice | None = None, *, least_ms: float = 0.0) -> Finding | None:
    """Return the finding that the device waits for data; None if the stall is 10 % or less.

    ``least_ms``: least time of a step with the remedy; None: it is to be known why. Who takes
    stamps is not told to do so, but how many workers would help.
    """
    step, stall = e.summary.step, e.summary.stall
    if step is None or stall is None or stall.share <= STALL_HIGH:
        return None
    if not costs_much(stall.mean_ms, stall.share):
        return None
    cause, label = waiting_text(e.summary), e.loader.loader
    prefix = "" if label is None else f"{label}: "
    text = e.loader.learn if remedy is None else remedy.text
    advice = [replace(remedy or Advice(text=text), text=f"{prefix}{text}")] if text else []
    if remedy is None and e.summary.causes is not None:
        largest = sorted(e.causes.wait.shares().items(), key=lambda part: -part[1])[:_SHOWN_PARTS]
        parts = "; ".join(f"{PART_WORDS[name + '_ms']}: {share:.0%}" for name, share in largest)
        cause += f"; {prefix}no single cost stands out: {parts} of the wait"
        advice = []
    # As of other findings: a step with the gap behind it, which faster data does not shorten.
    whole_ms = e.step_times.step_ms or step.mean_ms
    after_ms = max(whole_ms - e.stall_ms, least_ms)
    gain = Gain(before_ms=whole_ms, after_ms=after_ms, basis="floor")
    leave = _leave_alone(e.summary, "loading")
    if remedy is not None and e.loader.learn and not gain.worthwhile:
        learn = Advice(text=f"{prefix}{e.loader.learn}", for_speed=False)
        return make_finding(stall.share, cause, (learn,), None, leave)
    found = make_finding(stall.share, cause, tuple(advice), gain, leave)
    if remedy is not None or e.summary.causes is None:
        return found
    found = late_batches.more_that_wait(e, found)
    more = tuple(replace(each, text=f"{prefix}{each.text}") for each in found.advice)
    return replace(found, advice=more)


def _fine(e: Evidence) -> Finding:
    """Return the finding that hardly any batch is waited for."""
    cause, leave = waiting_text(e.summary), _leave_alone(e.summary, "")
    return Finding(severity="fine", cause=cause, leave_alone=leave)


def _moderate_stall(e: Evidence) -> Finding | None:
    return _fine(e) if (e.summary.stall_share or 0.0) >= STALL_LOW else None


COSTS: Final = (
    Rule("FD000", "too few steps were timed", _too_few_steps),
    Rule("FD101", "batches are late, and the training process loads them", _no_workers),
    Rule("FD102", "batches are late, and workers are fewer than free CPUs", _few_workers),
    Rule("FD104", "batches are late, and why is not known", _late),
    Rule("FD002", "the device waits a little", _moderate_stall),
    Rule("FD001", "data is free", _fine),
)
"""Rules for the largest cost of a stage; each assumes that those before it do not hold."""


def _more_workers(e: Evidence, wanted: int) -> Advice:
    cpus = e.loader.usable_cpus
    are = "is" if cpus == 1 else "are"
    free, taken = f"{cpus_text(cpus or 0)} {are} usable", e.machine.taken_of(cpus)
    if round(taken):
        free += f", of which other programs use {taken:.1f}"
    text = f"num_workers {e.loader.num_workers} -> {wanted}  ({free})"
    return Advice(text=text, changes=("num_workers",))


def _wanted_workers(e: Evidence) -> int | None:
    """Return how many workers the loaders' plan takes by itself; None: not known."""
    if e.loader.usable_cpus is None:
        return None
    cpus = e.machine.left_of(e.loader.usable_cpus)
    # One CPU is for the training process.
    return cpus if cpus <= 2 or e.summary.device == "cpu" else cpus - 1


def _leave_alone(summary: StageSummary, about: str) -> str:
    """Return in words which phases, other than ``about``, cost next to nothing."""
    phases = (
        ("loading", summary.stall),
        ("transfer", summary.transfer),
        ("augmentation", summary.augment),
    )
    small = {
        name: phase.share
        for name, phase in phases
        if phase is not None and phase.share < TRANSFER_HIGH and name != about
    }
    if not small:
        return ""
    *others, last = small
    listed = f"{', '.join(others)} and {last}" if others else last
    together = math.floor(100 * sum(small.values())) + 1
    verb = "together cost" if others else "costs"
    return f"{listed} {verb} < {together}% of the step"

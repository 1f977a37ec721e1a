"""Findings that need no stamps: cost, not cause.

Pure: the measured summary and what the loader says about itself in, one finding out. The bounds are
shares of the step as the device saw it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from lightning_fastdata.insight.measure.metrics import StageSummary
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import (
    STALL_HIGH,
    STALL_LOW,
    TRANSFER_HIGH,
    Advice,
    Finding,
    Found,
    Gain,
    Rule,
    costs_much,
    found,
)
from lightning_fastdata.insight.waits.attribution import PART_WORDS
from lightning_fastdata.types import STAGE_WORDS

_FEWEST_STEPS: Final = 5
"""Nothing is said of fewer."""
_SHOWN_PARTS: Final = 3
_LEARN: Final = Advice(text="FastDataModule.from_loaders(train_loader): it tells why, and tunes")


def largest_cost(e: Evidence) -> Found:
    """Return the largest cost of a stage: what the first rule that holds finds."""
    every = (Found(rule, finding) for rule in RULES if (finding := rule.find(e)) is not None)
    return next(every)  # the last rule always holds


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
    more = Advice(text=f"train for at least {_FEWEST_STEPS} steps", for_speed=False)
    advice = (more,) if summary.steps < _FEWEST_STEPS else ()
    cause = "too little was measured to tell"
    return replace(found("FD000", None, cause, advice), severity="fine")


def _no_workers(e: Evidence) -> Finding | None:
    wanted, stall = _wanted_workers(e), e.summary.stall
    if e.loader.num_workers != 0 or stall is None or "num_workers" in e.closed:
        return None
    if not wanted:
        remedy = "num_workers above 0, so that loading runs beside the training process"
        return _late(e, "FD101", Advice(text=remedy, changes=("num_workers",)))
    # A step that waits takes as long as its batch: workers make no more of these than they are.
    return _late(e, "FD101", _more_workers(e), least_ms=stall.mean_ms / wanted)


def _few_workers(e: Evidence) -> Finding | None:
    wanted, workers, step = _wanted_workers(e), e.loader.num_workers, e.summary.step
    if not wanted or workers is None or workers >= wanted or step is None:
        return None
    if "num_workers" in e.closed:
        return None
    least_ms = step.mean_ms * workers / wanted
    return _late(e, "FD102", _more_workers(e), least_ms=least_ms)


def _late(e: Evidence, code: str, remedy: Advice, *, least_ms: float = 0.0) -> Finding | None:
    """Return the finding that the device waits for data; None if the stall is 10 % or less.

    With the remedy, a step takes ``least_ms`` at least. Who takes stamps is not told to take some.
    """
    stall = e.summary.stall
    if stall is None or stall.share <= STALL_HIGH or not costs_much(stall.mean_ms, stall.share):
        return None
    cause, gain, step = waiting_text(e.summary), None, e.summary.step
    small = _small_costs(e) if remedy is _LEARN else ""
    if e.loader.loader is not None:
        remedy = replace(remedy, text=f"{e.loader.loader}: {remedy.text}")
    if small:
        label = "" if e.loader.loader is None else f"{e.loader.loader}: "
        cause = f"{cause}; {label}{small}"
    if step is not None:
        after_ms = max(step.mean_ms - e.loader_share * stall.mean_ms, least_ms)
        gain = Gain(before_ms=step.mean_ms, after_ms=after_ms, basis="floor")
    leave = _leave_alone(e.summary, "loading")
    return found(code, stall.share, cause, () if small else remedy, gain, leave)


def _fine(e: Evidence, code: str) -> Finding:
    """Return the finding that hardly any batch is waited for."""
    leave = _leave_alone(e.summary, "")
    finding = found(code, None, waiting_text(e.summary), (), leave_alone=leave)
    return replace(finding, severity="fine")


def _moderate_stall(e: Evidence) -> Finding | None:
    stall = e.summary.stall
    return None if stall is None or stall.share < STALL_LOW else _fine(e, "FD002")


_FINDERS: Final[tuple[tuple[str, str, Callable[[Evidence], Finding | None]], ...]] = (
    ("FD000", "too few steps were timed", _too_few_steps),
    ("FD101", "batches are late, and the training process loads them", _no_workers),
    ("FD102", "batches are late, and workers are fewer than free CPUs", _few_workers),
    (
        "FD104",
        "batches are late, and why is not known",
        partial(_late, code="FD104", remedy=_LEARN),
    ),
    ("FD002", "the device waits a little", _moderate_stall),
    ("FD001", "data is free", partial(_fine, code="FD001")),
)
RULES: Final = tuple(Rule(*each, replaces=frozenset()) for each in _FINDERS)
"""In the order in which they are tried: each rests on those before it not holding."""


def _more_workers(e: Evidence) -> Advice:
    facts, wanted = e.loader, _wanted_workers(e)
    free = f"{facts.usable_cpus} CPUs are usable"
    taken = e.machine.taken_of(facts.usable_cpus)
    if round(taken):
        free += f", of which other programs use {taken:.1f}"
    text = f"num_workers {facts.num_workers} -> {wanted}  ({free})"
    return Advice(text=text, changes=("num_workers",))


def _small_costs(e: Evidence) -> str:
    """Return what to look at where stamps show no part of the wait to stand out."""
    if e.parts is None:
        return ""
    largest = sorted(e.parts.shares().items(), key=lambda part: -part[1])[:_SHOWN_PARTS]
    shown = "; ".join(f"{PART_WORDS[name + '_ms']}: {share:.0%}" for name, share in largest)
    return f"no single cost stands out: {shown} of the wait"


def _wanted_workers(e: Evidence) -> int | None:
    """Return as many workers as the loaders' plan takes by itself."""
    cpus = e.loader.usable_cpus
    if cpus is not None:
        cpus = max(1, cpus - round(e.machine.taken_of(cpus)))
    if cpus is None or cpus <= 2 or e.summary.device == "cpu":
        return cpus
    return cpus - 1  # one for the training process


def _leave_alone(summary: StageSummary, about: str) -> str:
    """Return the phases that cost next to nothing and that the finding is not about."""
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

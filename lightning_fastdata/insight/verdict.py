"""What the measured shares mean, and the next thing to try. Pure: numbers in, words out.

===== ============= ======================================================= ====================
code  kind          holds when                                              next thing to try
===== ============= ======================================================= ====================
FD000 unknown       fewer than 5 steps were timed on the device             run longer
FD001 compute-bound stall below 3 %, transfer and augment small             the model
FD002 balanced      stall from 3 to 10 %                                    nothing urgent
FD101 data-bound    stall above 10 %, the training process loads            workers
FD102 data-bound    stall above 10 %, fewer workers than free CPUs          more workers
FD103 data-bound    as FD104, and the transforms run on the CPU             augment on the device
FD104 data-bound    stall above 10 %, workers enough                        cache decoded samples
FD105 data-bound    stall above 10 %, how batches are loaded is not known   give the loader's facts
FD106 any           epoch starts cost above 5 % of the time                 persistent workers
FD201 balanced      stall up to 10 %, transfer above 5 %                    pinned memory, uint8
FD202 balanced      stall up to 10 %, augment on the device above 10 %      cheaper transforms
===== ============= ======================================================= ====================

A code keeps its meaning for ever. The bounds 3 and 10 % are of the step as the device saw it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from lightning_fastdata.insight.metrics import PhaseSummary, StageSummary

Kind: TypeAlias = Literal["data-bound", "compute-bound", "balanced", "unknown"]

STALL_LOW, STALL_HIGH = 0.03, 0.10
TRANSFER_HIGH, AUGMENT_HIGH = 0.05, 0.10
EPOCH_START_HIGH = 0.05
_FEWEST_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """What is known about how batches are made. None = not known, e.g. of a foreign loader."""

    num_workers: int | None = None
    """Worker processes; 0 = the training process loads."""
    usable_cpus: int | None = None
    """CPUs this process may use, after affinity, cgroup quota and other ranks on the host."""
    augment_on: Literal["cpu", "device"] | None = None
    """Where the transforms run."""
    pinned: bool | None = None
    """Whether batches arrive in page-locked memory."""
    persistent_workers: bool | None = None
    """Whether workers live through the end of an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One finding, in words for people and a code for programs."""

    code: str
    """Stable code, see the table of this module."""
    kind: Kind
    """What limits the step."""
    sentence: str
    """The finding with its numbers."""
    evidence: tuple[str, ...]
    """Measured facts it rests on, and what is not known."""
    next_step: str
    """The next thing to try."""
    leave_alone: str | None = None
    """What is not worth touching; None if nothing could be ruled out."""


def judge(summary: StageSummary, facts: LoaderFacts | None = None) -> Verdict:
    """Return what limits the stage.

    Args:
        summary: the measured stage.
        facts: what is known about the loader; None = nothing.
    """
    facts = LoaderFacts() if facts is None else facts
    step, stall = summary.step, summary.stall
    timed = summary.steps - summary.dropped_steps
    if step is None or stall is None or timed < _FEWEST_STEPS:
        return Verdict(
            code="FD000",
            kind="unknown",
            sentence="too little was measured to tell",
            evidence=_unmeasured(summary, timed),
            next_step=f"train for at least {_FEWEST_STEPS} steps with the callback active",
        )
    code, kind, sentence = _finding(summary, stall, step, facts)
    next_step = _NEXT_STEP[code]
    if code == "FD102":
        next_step = (
            f"num_workers {facts.num_workers} -> {_wanted_workers(summary, facts)}  "
            f"({facts.usable_cpus} CPUs are usable)"
        )
    elif code == "FD101" and facts.usable_cpus is not None:
        next_step = (
            f"num_workers 0 -> {_wanted_workers(summary, facts)}  ({facts.usable_cpus} CPUs usable)"
        )
    elif code == "FD201" and facts.pinned:
        next_step = "send uint8 and normalize on the device (batches are pinned already)"
    if kind == "data-bound" and summary.speedup_possible is not None:
        next_step += f"; at most {summary.speedup_possible:.2f}x"
    return Verdict(
        code=code,
        kind=kind,
        sentence=sentence,
        evidence=_evidence(summary, facts),
        next_step=next_step,
        leave_alone=_leave_alone(summary, code),
    )


_NEXT_STEP = {
    "FD001": "data is free; optimize the model",
    "FD002": "nothing urgent; look again when the model gets faster",
    "FD101": "num_workers above 0, so that loading runs beside the training process",
    "FD102": "more workers",
    "FD103": "run the transforms on the device; every usable CPU has a worker already",
    "FD104": "cache decoded or resized samples; every usable CPU has a worker already",
    "FD105": "load with FastDataModule, or tell the number of workers, to learn which remedy fits",
    "FD106": "persistent_workers=True, so that workers start once and not in every epoch",
    "FD201": "pin_memory=True; send uint8 and normalize on the device",
    "FD202": "fewer or cheaper transforms on the device; interpolation and blur cost the most",
}


def _finding(
    summary: StageSummary, stall: PhaseSummary, step: PhaseSummary, facts: LoaderFacts
) -> tuple[str, Kind, str]:
    """Return code, kind and sentence: the largest cost first."""
    who = "the GPU" if summary.device != "cpu" else "the training loop"
    waits = (
        f"{who} waits {stall.share:.0%} of each step ({stall.mean_ms:.1f} of {step.mean_ms:.1f} ms)"
    )
    if stall.share > STALL_HIGH:
        return _data_bound_code(summary, facts), "data-bound", waits
    kind: Kind = "balanced" if stall.share >= STALL_LOW else "compute-bound"
    starts = _epoch_start_share(summary)
    if starts is not None and starts > EPOCH_START_HIGH and facts.persistent_workers is not True:
        return "FD106", kind, f"starting epochs takes {starts:.0%} of the time; otherwise {waits}"
    transfer, augment = summary.transfer, summary.augment
    if transfer is not None and summary.device != "cpu" and transfer.share > TRANSFER_HIGH:
        return "FD201", "balanced", f"the transfer takes {transfer.share:.0%} of each step; {waits}"
    if augment is not None and augment.share > AUGMENT_HIGH:
        return "FD202", "balanced", f"augmenting takes {augment.share:.0%} of each step; {waits}"
    return ("FD002" if kind == "balanced" else "FD001"), kind, waits


def _data_bound_code(summary: StageSummary, facts: LoaderFacts) -> str:
    wanted = _wanted_workers(summary, facts)
    if facts.num_workers is None or (wanted is None and facts.num_workers > 0):
        return "FD105"
    if facts.num_workers == 0:
        return "FD101"
    if wanted is not None and facts.num_workers < wanted:
        return "FD102"
    return "FD103" if facts.augment_on == "cpu" and summary.device != "cpu" else "FD104"


def _wanted_workers(summary: StageSummary, facts: LoaderFacts) -> int | None:
    """Return as many workers as the loaders' plan takes by itself."""
    cpus = facts.usable_cpus
    if cpus is None or cpus <= 2 or summary.device == "cpu":
        return cpus
    return cpus - 1  # one for the training process


def _epoch_start_share(summary: StageSummary) -> float | None:
    """Return the part of the wall time that first waits of epochs took, 0 to 1."""
    if summary.cold_wait_ms is None or summary.duration_s <= 0:
        return None
    return min(1.0, summary.cold_wait_ms * summary.cold_steps / (summary.duration_s * 1e3))


def _unmeasured(summary: StageSummary, timed: int) -> tuple[str, ...]:
    evidence = [f"{timed} of {summary.steps} steps were timed"]
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
    if facts.num_workers is None:
        evidence.append("number of workers not known")
    elif facts.usable_cpus is None:
        evidence.append(f"{facts.num_workers} workers, usable CPUs not known")
    else:
        evidence.append(f"{facts.num_workers} workers on {facts.usable_cpus} usable CPUs")
    if facts.augment_on is not None:
        evidence.append(f"transforms run on the {'CPU' if facts.augment_on == 'cpu' else 'device'}")
    return tuple(evidence)


def _leave_alone(summary: StageSummary, code: str) -> str | None:
    """Return the phases that cost next to nothing and that the finding is not about."""
    small = [
        (name, phase.share)
        for name, phase in (
            ("loading", None if code.startswith("FD1") else summary.stall),
            ("transfer", None if code == "FD201" else summary.transfer),
            ("augmentation", None if code == "FD202" else summary.augment),
        )
        if phase is not None and phase.share < TRANSFER_HIGH
    ]
    if not small:
        return None
    names = [name for name, _ in small]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    together = math.floor(100 * sum(share for _, share in small)) + 1
    verb = "costs" if len(names) == 1 else "together cost"
    return f"{listed} {verb} < {together}% of the step"

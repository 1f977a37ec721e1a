"""What can be told of a stage from outside its loader: how much data costs, and hardly why.

Pure: the measured summary and what the loader says about itself in, one finding out.

===== ======================================================= ====================
code  holds when                                              next thing to try
===== ======================================================= ====================
FD000 fewer than 5 steps were timed on the device             run longer
FD001 stall below 3 %, transfer and augment small             the model
FD002 stall from 3 to 10 %                                    nothing urgent
FD101 stall above 10 %, the training process loads            workers
FD102 stall above 10 %, fewer workers than free CPUs          more workers
FD103 as FD104, the transforms run on the CPU, not settled    augment on the device
FD104 stall above 10 %, workers enough                        stamps, which tell why
FD105 stall above 10 %, how batches are loaded is not known   give the loader's facts
FD106 epoch starts cost above 5 % of the time                 persistent workers
FD201 stall up to 10 %, transfer above 5 %                    pinned memory, uint8
FD202 stall up to 10 %, augment on the device above 10 %      cheaper transforms
===== ======================================================= ====================

A code keeps its meaning for ever. The bounds are shares of the step as the device saw it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.model.finding import (
    AUGMENT_HIGH,
    EPOCH_START_HIGH,
    STALL_HIGH,
    STALL_LOW,
    TRANSFER_HIGH,
    Finding,
    Gain,
    severity_of,
)
from lightning_fastdata.insight.model.loader_facts import LoaderFacts, device_could_augment
from lightning_fastdata.types import STAGE_WORDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.insight.measure.metrics import PhaseSummary, StageSummary

FEWEST_STEPS: Final = 5
"""Nothing is said of fewer."""

_REMEDIES: Final[Mapping[str, str]] = {
    "FD001": "data is free; optimize the model",
    "FD002": "nothing urgent; look again when the model gets faster",
    "FD101": "num_workers above 0, so that loading runs beside the training process",
    "FD102": "more workers",
    "FD103": "run the transforms on the device; every usable CPU has a worker already",
    "FD104": "FastDataModule or FastDataLoader, which tell why batches are late; more workers help "
    "only against waiting for storage, cached decoded samples against computing",
    "FD105": "load with FastDataModule, or tell the number of workers, to learn which remedy fits",
    "FD106": "persistent_workers=True, so that workers start once and not in every epoch",
    "FD201": "pin_memory=True; send uint8 and normalize on the device",
    "FD202": "fewer or cheaper transforms on the device; interpolation and blur cost the most",
}


def outside_finding(summary: StageSummary, facts: LoaderFacts) -> Finding:
    """Return the largest cost of a stage.

    Args:
        summary: The measured stage.
        facts: What its loader says about itself.
    """
    step, stall = summary.step, summary.stall
    if step is None or stall is None or timed_steps(summary) < FEWEST_STEPS:
        return Finding(
            code="FD000",
            severity="fine",
            cause="too little was measured to tell",
            remedy=f"train for at least {FEWEST_STEPS} steps",
        )
    code, cause, share, gained_ms = _largest_cost(summary, stall, facts)
    gain = None
    if gained_ms is not None:
        after_ms = max(step.mean_ms - gained_ms, _least_ms(code, summary, facts))
        gain = Gain(before_ms=step.mean_ms, after_ms=after_ms, basis="floor")
    return Finding(
        code=code,
        severity="fine" if code in ("FD001", "FD002") else severity_of(share),
        cause=cause,
        remedy=_remedy(code, summary, facts),
        gain=gain,
        leave_alone=_leave_alone(summary, code) or "",
    )


def _least_ms(code: str, summary: StageSummary, facts: LoaderFacts) -> float:
    """Return what a step takes at least with as many workers as are recommended.

    A step that waits takes as long as its batch, and workers make no more of these than they are.
    """
    wanted, step, stall = _wanted_workers(summary, facts), summary.step, summary.stall
    if step is None or stall is None or not wanted:
        return 0.0
    if code == "FD101":
        return stall.mean_ms / wanted
    if code == "FD102" and facts.num_workers:
        return step.mean_ms * facts.num_workers / wanted
    return 0.0


def timed_steps(summary: StageSummary) -> int:
    """Return the number of steps of which the device's figures are known."""
    return summary.steps - summary.dropped_steps


def waiting_text(summary: StageSummary) -> str:
    """Return how much of each step is waiting, in words; empty if that was not measured."""
    step, stall = summary.step, summary.stall
    if step is None or stall is None:
        return ""
    loop = STAGE_WORDS.get(summary.stage, summary.stage)
    who = "the GPU" if summary.device != "cpu" else f"the {loop} loop"
    return (
        f"{who} waits {stall.share:.0%} of each step ({stall.mean_ms:.1f} of {step.mean_ms:.1f} ms)"
    )


def _largest_cost(
    summary: StageSummary, stall: PhaseSummary, facts: LoaderFacts
) -> tuple[str, str, float, float | None]:
    """Return code, cause, its share of the step, and what would be gained without it in ms."""
    waits, transferred = waiting_text(summary), summary.device != "cpu"
    if stall.share > STALL_HIGH:
        return _data_bound_code(summary, facts), waits, stall.share, stall.mean_ms
    starts = _epoch_start_share(summary)
    if starts is not None and starts > EPOCH_START_HIGH and facts.persistent_workers is not True:
        return "FD106", f"starting epochs takes {starts:.0%} of the time", starts, None
    for code, phase, high, what in (
        ("FD201", summary.transfer if transferred else None, TRANSFER_HIGH, "the transfer"),
        ("FD202", summary.augment, AUGMENT_HIGH, "augmenting"),
    ):
        if phase is not None and phase.share > high:
            cause = f"{what} takes {phase.share:.0%} of each step"
            return code, cause, phase.share, phase.mean_ms
    return ("FD002" if stall.share >= STALL_LOW else "FD001"), waits, stall.share, None


def _data_bound_code(summary: StageSummary, facts: LoaderFacts) -> str:
    wanted = _wanted_workers(summary, facts)
    if facts.num_workers is None or (wanted is None and facts.num_workers > 0):
        return "FD105"
    if facts.num_workers == 0:
        return "FD101"
    if wanted is not None and facts.num_workers < wanted:
        return "FD102"
    return "FD103" if device_could_augment(summary.device, facts) else "FD104"


def _remedy(code: str, summary: StageSummary, facts: LoaderFacts) -> str:
    remedy = _remedy_of_loader(code, summary, facts)
    of_one = facts.loader is not None and code.startswith("FD1")
    return f"{facts.loader}: {remedy}" if of_one else remedy


def _remedy_of_loader(code: str, summary: StageSummary, facts: LoaderFacts) -> str:
    if code == "FD201" and facts.pinned:
        return "send uint8 and normalize on the device (batches are pinned already)"
    if code in ("FD101", "FD102") and facts.usable_cpus is not None:
        return (
            f"num_workers {facts.num_workers} -> {_wanted_workers(summary, facts)}  "
            f"({facts.usable_cpus} CPUs are usable)"
        )
    return _REMEDIES[code]


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

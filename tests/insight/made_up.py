"""Steps and stages that took what a test says."""

from __future__ import annotations

from typing import Any

from lightning_fastdata.insight.steps import StageSummary, StepHistory, StepTiming


def timing(step: int = 0, stall: float | None = 0.0, compute: float = 10.0, **known: Any) -> Any:
    """Return a step that waited for as long as its device stalled; it takes what its phases do."""
    phases = (compute, known.get("transfer_ms"), known.get("augment_ms"))
    whole = {
        "step": step,
        "samples": 64,
        "cold": False,
        "wait_ms": stall,
        "stall_ms": stall,
        "compute_ms": compute,
        "step_ms": None if stall is None else stall + sum(ms or 0.0 for ms in phases),
    }
    return StepTiming(**whole | known)


def history_of(*steps: StepTiming) -> StepHistory:
    history = StepHistory()
    for each in steps:
        history.append(each)
    return history


def stage(
    stall: float = 0.0,
    compute: float = 10.0,
    *,
    steps: int = 20,
    name: str = "train",
    duration_s: float = 9.0,
    device: str = "cpu",
    **known: Any,
) -> StageSummary:
    """Return a stage of so many steps alike."""
    history = history_of(*(timing(number, stall, compute, **known) for number in range(steps)))
    return history.summarize(name, duration_s=duration_s, device=device)

"""Remedies, followed as they are written: does a step then take what was predicted?"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

BOUNDS = ("floor", "independent")
"""Gains of these bases say that a step will take no less."""
_SLACK = 0.9


def setting_of(remedy: str) -> dict[str, Any]:
    """Return the loader options that a remedy begins with, apart from which it asks for nothing.

    They are written ``LoaderOptions(...)``, ``FastDataLoader(...)`` or ``num_workers 0 -> 2``. What
    a remedy says after ``", or"`` is another one; what it says after ``", and"`` belongs to it, and
    is no setting. Settings of the validation loader are not followed.
    """
    changed = re.match(r"num_workers (\d+) -> (\d+)(?!\d| for )", remedy)
    if changed:
        return {"num_workers": int(changed[2])}
    if not remedy.startswith(("LoaderOptions(", "FastDataLoader(")):
        return {}
    end = remedy.index(")") + 1
    if remedy[end:].startswith(", and"):
        return {}
    call = ast.parse(remedy[:end], mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


LEAST_GAIN = 1.03
NOT_FOR_SPEED = ("FD000", "FD001")
"""Codes whose advice averts an error, gets more known, or is about the model."""


def unlawful(verdict: Mapping[str, Any], chosen: Collection[str] = ()) -> list[str]:
    """Return what advice of a verdict no user should have been given, and why; empty: none.

    Args:
        verdict: As the report has it.
        chosen: Options of the training loader that the package chose; those of validation's begin
            with ``"val."``.
    """
    wrong = []
    for found in verdict["findings"]:
        remedy, gain = found["remedy"], found["gain"]
        if not remedy or found["code"] in NOT_FOR_SPEED:
            continue
        factor = 0.0 if gain is None else gain["before_ms"] / max(1e-9, gain["after_ms"])
        told = f"{found['code']}: {remedy}"
        if factor < LEAST_GAIN:
            wrong.append(f"{told}: gains {factor:.3f}")
        if "leave out collate_fn" in remedy:
            wrong.append(f"{told}: no batch may be possible without")
        written = remedy.replace("num_workers ", "num_workers=")
        prefix = "val." if found["code"] == "FD318" else ""
        own = [option for option in chosen if option.startswith("val.") == bool(prefix)]
        wrong += [f"{told}: {o} was chosen" for o in own if f"{o.removeprefix(prefix)}=" in written]
    pause = verdict["kind"].startswith(("paused", "starved", "held"))
    if pause and not verdict["findings"][0]["remedy"]:
        wrong.append(f"{verdict['kind']}: nothing can be done")
    return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step was said to take with a setting, and took."""

    basis: str
    """Of the gain, as the report says."""
    before_ms: float
    """As the finding says."""
    predicted_ms: float
    """As the finding says."""
    measured_ms: float
    """With the setting, by the report of that run."""

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def holds(self) -> bool:
        """A bound was not undercut by more than 10 %; anything else is within 10 %."""
        if self.basis in BOUNDS:
            return self.measured_ms >= _SLACK * self.predicted_ms
        return abs(self.error) <= 1 - _SLACK

    def __str__(self) -> str:
        return (
            f"{self.before_ms:.1f} ms a step, predicted {self.predicted_ms:.1f} ({self.basis}), "
            f"measured {self.measured_ms:.1f}, {self.error:+.0%}"
        )


def predicted(gain: Mapping[str, Any], before: Any, after: Any) -> Prediction:
    """Return what came of a gain.

    A gain is either about steps as they are measured, or about the wall time of all epochs over
    the number of steps: whichever its ``before_ms`` is closer to.

    Args:
        gain: Of a finding, as the report has it.
        before: The report with the finding.
        after: The report of the run with the setting.
    """
    ways = (step_ms, wall_ms_a_step)
    of = min(ways, key=lambda way: abs(way(before) - gain["before_ms"]))
    return Prediction(
        basis=gain["basis"],
        before_ms=gain["before_ms"],
        predicted_ms=gain["after_ms"],
        measured_ms=of(after),
    )


def step_ms(report: Any) -> float:
    """Return the mean step of training, milliseconds."""
    return float(report["stages"]["train"]["step"]["mean_ms"])


def wall_ms_a_step(report: Any) -> float:
    """Return the wall time apart from the setup, over the number of steps, milliseconds."""
    wall = report["wall"]
    return float(1000 * (wall["total_s"] - wall["parts_s"].get("setup", 0.0)) / wall["steps"])

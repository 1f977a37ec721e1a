"""Remedies, followed as they are written: does a step then take what was predicted?"""

from __future__ import annotations

import ast
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verdicts.workloads import Stage, train

if TYPE_CHECKING:
    from lightning_fastdata.insight.finding import Finding
    from verdicts.workloads import Training

FOLLOWED = ("FD302", "FD303", "FD305", "FD307", "FD310")
"""Codes whose remedies are options of the loader, and whose gains are predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A remedy that was followed."""

    options: dict[str, Any]
    """What was changed."""
    before_ms: float
    """Measured, as the finding says."""
    predicted_ms: float
    """Of a step, by the finding."""
    measured_ms: float
    """Of a step, with the changed options."""

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_ms / self.measured_ms - 1


def options_of(remedy: str) -> dict[str, Any]:
    """Return the options that a remedy names: what stands in ``LoaderOptions(...)``."""
    begin = remedy.find("LoaderOptions(")
    options: dict[str, Any] = {}
    if begin >= 0:
        call = ast.parse(remedy[begin : remedy.index(")", begin) + 1], mode="eval").body
        assert isinstance(call, ast.Call)
        options = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    if "leave out collate_fn" in remedy:
        options["collate_fn"] = None
    return options


def follow(finding: Finding, training: Training) -> Followed | None:
    """Change what the finding says and train again; None where it predicts or changes nothing."""
    options = options_of(finding.remedy)
    if not options or finding.gain is None:
        return None
    changed = training.with_options(**options)
    measured_ms = (
        _step_of_later_epochs_ms(changed) if changed.epochs > 1 else train(changed).step_ms
    )
    assert measured_ms is not None
    return Followed(
        options=options,
        before_ms=finding.gain.before_ms,
        predicted_ms=finding.gain.after_ms,
        measured_ms=measured_ms,
    )


def _step_of_later_epochs_ms(training: Training) -> float:
    """Return the mean step with the starts of epochs, apart from the first, which starts workers.

    It lasts from the end of the first epoch to that of the last one.
    """
    stage = Stage.start(training)
    try:
        stage.epoch()
        began_s, steps = time.perf_counter(), len(stage.records)
        for _ in range(training.epochs - 1):
            stage.epoch()
        return (time.perf_counter() - began_s) / (len(stage.records) - steps) * 1e3
    finally:
        stage.loader.close()

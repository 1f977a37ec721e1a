"""What other tools say of a training: Lightning's SimpleProfiler and TraceML 0.5.0."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainings.parts import Cost

INSTALL_TRACEML = (
    "not installed: python -m venv traceml; traceml/bin/pip install traceml-ai==0.5.0 "
    "lightning-fastdata; --traceml-python traceml/bin/python"
)
_OUTER = ("run_training_epoch", "run_training_batch", "optimizer_step")
"""Actions that contain the ones below them in SimpleProfiler's table."""
_BETWEEN_STEPS = ("[Callback]", "save_checkpoint", "batch_to_device", "LightningModule]")
_TRACEML_COSTS: dict[str, Cost] = {
    "INPUT_BOUND": "data",
    "RESIDUAL_HEAVY": "between steps",
    "COMPUTE_BOUND": "computing",
    "NO_CLEAR_PERFORMANCE_BOTTLENECK": "computing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What a tool said of a training."""

    cause: str
    """Of the training, as its author knows it."""
    right: bool
    """It names the kind of cost that is there: data, something between steps, computing."""
    verdict: str
    """In its own words."""

    @property
    def words(self) -> str:
        """The verdict without its figures."""
        return re.sub(r"\d[\d.,]*", "#", self.verdict)


def simple_profiler(seconds: Mapping[str, float]) -> tuple[Cost, str]:
    """Return what the largest action of SimpleProfiler's table that contains no other names.

    Args:
        seconds: Action -> all its time.
    """
    inner = {name: each for name, each in seconds.items() if not name.endswith(_OUTER)}
    top = max(inner, key=inner.__getitem__)
    share = inner[top] / seconds["run_training_epoch"]
    cost: Cost = "computing"
    if top.endswith("_next"):
        cost = "data"
    elif any(mark in top for mark in _BETWEEN_STEPS):
        cost = "between steps"
    return cost, f"{top} ({share:.0%} of the epochs)"


def traceml(name: str, python: Path, out: Path, environment: Mapping[str, str]) -> tuple[Cost, str]:
    """Run a training under TraceML, as its README tells, and return its primary diagnosis.

    It wraps torch's DataLoader, which therefore stands in the place of ours.
    """
    script = Path(__file__).with_name("__main__.py")
    command = [
        str(python.with_name("traceml")), "run", str(script), "--logs-dir", str(out),
        "--run-name", "run", "--args", name, "--out", str(out), "--watch", "none",
    ]  # fmt: skip
    subprocess.run(command, env=dict(environment), capture_output=True, timeout=180, check=True)
    found: Any = json.loads((out / "run" / "final_summary.json").read_text())["primary_diagnosis"]
    cost = _TRACEML_COSTS.get(found["kind"], "computing")
    return cost, f"{found['status']}: {found['summary']}"


def told(opinions: Iterable[Opinion]) -> int:
    """Return of how many trainings the cause is told.

    The cost is right, and what is said, without its figures, is said of no other cause.
    """
    opinions = list(opinions)
    said = Counter(words for words, _ in {(each.words, each.cause) for each in opinions})
    return sum(each.right and said[each.words] == 1 for each in opinions)

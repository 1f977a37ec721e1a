"""What loggers get of the newest steps: means and percentiles, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lightning_fastdata.insight.measure.metrics import measured, p50_and_p95, warm_steps

if TYPE_CHECKING:
    from lightning_fastdata.insight.measure.metrics import Columns, StepHistory


def window_means(columns: Columns, prefix: str = "data") -> dict[str, float]:
    """Return the scalars of a window of steps, as ``metric_names.STEPS`` has them.

    Cold steps are left out, unless there are no others.

    Args:
        columns: the steps, as from `StepHistory.newest`.
        prefix: ``data`` for training, ``data_val`` for validation.

    Returns:
        Name -> value; what was not measured has no key.
    """
    columns = warm_steps(columns)
    scalars: dict[str, float] = {}
    for phase in ("step", "time_augment", "time_compute", "time_transfer", "time_wait"):
        values = measured(columns[f"{phase.removeprefix('time_')}_ms"])
        if values.size:
            scalars[f"{prefix}/{phase}_ms"] = float(values.mean())
    step, stall = columns["step_ms"], columns["stall_ms"]
    timed = ~np.isnan(step)
    total = float(step[timed].sum())
    if total > 0:
        scalars[f"{prefix}/throughput_samples_per_s"] = (
            float(columns["samples"][timed].sum()) * 1e3 / total
        )
    both = timed & ~np.isnan(stall)
    total, stalled = float(step[both].sum()), float(stall[both].sum())
    if total > 0:
        scalars[f"{prefix}/stall_percent"] = 100.0 * stalled / total
        if total > stalled:
            free = float(columns["samples"][both].sum()) * 1e3 / (total - stalled)
            scalars[f"{prefix}_headroom/throughput_if_data_were_free_samples_per_s"] = free
            scalars[f"{prefix}_headroom/speedup_possible"] = total / (total - stalled)
    for phase in ("step", "stall", "compute"):
        values = measured(columns[f"{phase}_ms"])
        if values.size:
            p50, p95 = p50_and_p95(values)
            scalars[f"{prefix}_band/{phase}_p50_ms"] = p50
            scalars[f"{prefix}_band/{phase}_p95_ms"] = p95
            scalars[f"{prefix}_band/{phase}_max_ms"] = float(values.max())
    return dict(sorted(scalars.items()))


class MetricWindow:
    """Window means since they were last asked for.

    Args:
        history: where the steps are recorded.
        prefix: ``data`` for training, ``data_val`` for validation.
    """

    __slots__ = ("_history", "_prefix", "_seen")

    def __init__(self, history: StepHistory, prefix: str = "data") -> None:
        self._history = history
        self._prefix = prefix
        self._seen = history.steps

    def take(self) -> dict[str, float]:
        """Return `window_means` of the steps since the last call; empty if there were none.

        Of more steps than the history keeps, only the kept ones count.
        """
        new = self._history.steps - self._seen
        self._seen = self._history.steps
        return window_means(self._history.newest(new), self._prefix) if new else {}

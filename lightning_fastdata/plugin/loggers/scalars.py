"""Which scalars a run logs, and how TensorBoard lays them out. Pure: names and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from lightning_fastdata.insight.measure.wall import STEP_PARTS
from lightning_fastdata.insight.metric_names import MAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.insight.measure.wall import WallTime

Scalars: TypeAlias = Literal["main", "all"]
"""What is logged: the main numbers alone, or everything that is measured."""

PREDICTED_STEP: Final = "data_tune/predicted_step_ms"
"""What the model of the loader says that a step takes in the setup as it is."""


def chosen(metrics: Mapping[str, float], scalars: Scalars) -> dict[str, float]:
    """Return what is to be logged of some metrics, by name."""
    return {name: v for name, v in metrics.items() if scalars == "all" or name in MAIN}


def wall_scalars(wall: WallTime) -> dict[str, float]:
    """Return how fast the whole training was, and what part of its time was training steps."""
    steps_s = sum(wall.parts_s.get(part, 0.0) for part in STEP_PARTS)
    scalars = {"data_run/steps_percent": 100 * wall.share(steps_s)}
    if wall.samples_per_s is not None:
        scalars["data_run/samples_per_s"] = wall.samples_per_s
    return scalars


def custom_scalar_layout(scalars: Scalars = "main") -> dict[str, dict[str, list[Any]]]:
    """Return a layout for ``SummaryWriter.add_custom_scalars``: charts of what is logged, alone.

    TensorBoard gives all lines of a run one color, so no chart has more than two. The tags of a
    line chart are regular expressions, hence the ``$``; those of a band are exact, and are the
    line, its lower and its upper bound. A writer takes one layout only.

    Args:
        scalars: What is logged.
    """
    charts: dict[str, list[Any]] = {
        "samples/s, and if data were free": [
            "Multiline",
            [
                "data/throughput_samples_per_s$",
                "data_headroom/throughput_if_data_were_free_samples_per_s$",
            ],
        ],
        "ms a step, measured and predicted": [
            "Multiline",
            ["data/step_ms$", f"{PREDICTED_STEP}$"],
        ],
        "ms of stall, median to p95": [
            "Margin",
            ["data_band/stall_p50_ms", "data_band/stall_p50_ms", "data_band/stall_p95_ms"],
        ],
    }
    logged = {
        name: chart
        for name, chart in charts.items()
        if scalars == "all" or all(tag.removesuffix("$") in MAIN for tag in chart[1])
    }
    return {"Data": logged}

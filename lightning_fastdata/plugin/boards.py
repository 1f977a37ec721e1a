"""The same numbers on every board: scalars, text, and a picture of the step, for any logger.

Loggers are taken for what they can do, not for what they are called, so this module needs neither
Lightning nor any logger's package; what a logger cannot show is left out without a word.
"""

from __future__ import annotations

import glob
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from lightning_fastdata.errors import require
from lightning_fastdata.insight.report import WIDTH, RunReport
from lightning_fastdata.insight.steps import PHASES, Columns, Values
from lightning_fastdata.insight.wall import STEP_PARTS, WallTime

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger
    from matplotlib.figure import Figure


MAIN: Final = frozenset(
    (
        "data/step_ms",
        "data/stall_percent",
        "data/throughput_if_data_were_free_samples_per_s",
        "data/throughput_samples_per_s",
        "data/time_compute_ms",
        "data/time_wait_ms",
        "data_band/stall_p95_ms",
        "data_faults/deaths",
        "data_faults/samples",
        "data_ranks/stall_max_ms",
        "data_run/samples_per_s",
        "data_run/steps_percent",
        "data_step/augment_ms",
        "data_step/transfer_ms",
        "data_tune/workers",
        "data_val/stall_percent",
        "data_wait/read_blocked_ms",
        "data_wait/read_cpu_ms",
        "data_wait/read_ms",
        "data_wait/read_runqueue_ms",
    )
)
"""Names of the scalars that loggers get: 20 at most, several only where there is something to
measure. They are in the tables of `docs/measuring.md`."""

_COLORS: Final = {
    "compute": "#4c9f70",
    "augment": "#b07aa1",
    "transfer": "#59a1cf",
    "wait": "#d1495b",
}
"""Phase of a step -> its color, from below."""
_FONT_PT: Final = 10
"""Font size in points; at 150 dpi, shown by TensorBoard at 0.6 of the width, 12 pixels high."""
_MOST_COLUMNS: Final = 75
"""Most columns of the picture: as many as a person tells apart at that size."""
_LEGEND: Final = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1.0),
    "frameon": False,
    "fontsize": _FONT_PT,
    "handlelength": 0.9,
    "handletextpad": 0.4,
    "columnspacing": 1.0,
    "borderpad": 0,
    "borderaxespad": 0.3,
}


def chosen(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return those of some metrics that are logged, by name."""
    return {name: value for name, value in metrics.items() if name in MAIN}


def wall_scalars(wall: WallTime) -> dict[str, float]:
    """Return how fast the whole training was, and what part of its time was training steps."""
    steps_s = sum(wall.parts_s.get(part, 0.0) for part in STEP_PARTS)
    scalars = {"data_run/steps_percent": 100 * wall.share(steps_s)}
    if wall.samples_per_s is not None:
        scalars["data_run/samples_per_s"] = wall.samples_per_s
    return scalars


def custom_scalar_layout() -> dict[str, dict[str, list[Sequence[str]]]]:
    """Return a layout for ``SummaryWriter.add_custom_scalars``: charts of what is logged.

    TensorBoard gives all lines of a run one color, so no chart has more than two. The tags are
    regular expressions, hence the ``$``. A writer takes one layout only.
    """
    kind, rates = "Multiline", "data/throughput_samples_per_s$"
    free = "data/throughput_if_data_were_free_samples_per_s$"
    return {
        "Data": {
            "ms a step: wait and compute": [kind, ["data/time_wait_ms$", "data/time_compute_ms$"]],
            "samples/s, and if data were free": [kind, [rates, free]],
        }
    }


def phase_figure(steps: Columns) -> Figure:
    """Return the step as stacked areas over step number: compute, augment, transfer, wait.

    The legend has the mean of each phase. The dotted line is the floor that free data would give:
    the mean of ``step - stall``. With many steps, a column is the mean of several. It is drawn
    without pyplot, so neither its state nor a display is touched, on 4 x 2.8 inches at 150 dpi,
    with letters that can be read where TensorBoard shows it at 350 pixels.

    Args:
        steps: Columns of steps (`StepHistory.newest`). Steps without device figures are left out;
            first steps of epochs, too, as one of them would flatten the rest.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    require("matplotlib", extra="tensorboard", what="The figure of the steps")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    warm = steps["cold"] == 0
    drawn = ~np.isnan(steps["step_ms"]) & (warm if warm.any() else True)
    figure = Figure(figsize=(4, 2.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.tick_params(labelsize=_FONT_PT)
    axes.spines[["top", "right"]].set_visible(False)
    if not drawn.any():
        axes.set_title("not measured", y=0.5, fontsize=_FONT_PT)
        return figure
    total = steps["step_ms"][drawn]
    parts = np.array_split(np.arange(len(total)), min(len(total), _MOST_COLUMNS))
    x = _means(steps["step"][drawn], parts)
    several = len(total) > len(parts)
    axes.set_xlabel("step (a column is several)" if several else "step", fontsize=_FONT_PT)
    phases = [
        (name, np.nan_to_num(steps[f"{PHASES[name]}_ms"][drawn]), color)
        for name, color in _COLORS.items()
        if not np.isnan(steps[f"{PHASES[name]}_ms"][drawn]).all()
    ]
    areas = axes.stackplot(
        x,
        [_means(values, parts) for _, values, _ in phases],
        labels=[f"{name} {values.mean():.1f}" for name, values, _ in phases],
        colors=[color for *_, color in phases],
        linewidth=0,
        step="mid",
    )
    floor = float((total - np.nan_to_num(steps["stall_ms"][drawn])).mean())
    axes.axhline(floor, color="black", linewidth=0.9, linestyle=":")
    # A few spikes must not press everything else flat.
    axes.set_ylim(0, 1.15 * max(float(np.percentile(_means(total, parts), 95)), 1e-6))
    axes.set_xlim(float(x[0]), float(x[-1]) if x[-1] > x[0] else float(x[0]) + 1)
    axes.legend(handles=areas[::-1], ncols=len(areas) if len(areas) < 4 else 2, **_LEGEND)
    title = f"step {total.mean():.1f} ms   ····· {floor:.1f} if data were free"
    figure.suptitle(title, x=0.01, ha="left", fontsize=_FONT_PT + 1)
    return figure


def _means(values: Values, parts: Sequence[npt.NDArray[np.intp]]) -> Values:
    return np.array([values[part].mean() for part in parts])


def log_to(loggers: Iterable[Logger], metrics: Mapping[str, float], step: int) -> None:
    """Give metrics to every logger, with ``/`` replaced by the logger's own separator.

    ``step`` is the position on the step axis.
    """
    if not metrics:
        return
    for logger in loggers:
        logger.log_metrics({_key(logger, name): v for name, v in metrics.items()}, step=step)


def log_summary(loggers: Iterable[Logger], name: str, report: RunReport, step: int) -> None:
    """Show the summary of a run, under a name as ``group/name``, on every logger that has a place.

    TensorBoard, W&B, MLflow and Comet have one. ``step`` is the position on the step axis.
    """
    markdown = f"```\n{report.text(WIDTH)}\n```"
    for logger in loggers:
        key, experiment = _key(logger, name), getattr(logger, "experiment", None)
        if log := _method(logger, "log_text", "key", "columns", "data", "step"):
            log(key=key, columns=["text"], data=[[markdown]], step=step)
        elif log := _method(experiment, "add_text", "tag", "text_string", "global_step"):
            log(key, markdown, global_step=step)
        elif log := _method(experiment, "log_text", "run_id", "text", "artifact_file"):
            log(getattr(logger, "run_id", None), markdown, f"{name}_{step}.md")
        elif log := _method(experiment, "log_text", "text", "step", "metadata"):
            log(markdown, step=step, metadata={"name": name})


def log_figure(loggers: Iterable[Logger], name: str, draw: Callable[[], Figure], step: int) -> None:
    """Show a figure on every logger that has a place for it, as `log_summary` does a text.

    ``draw`` makes the figure; it is called only if a logger takes it.
    """
    draw = cache(draw)
    for logger in loggers:
        key, experiment = _key(logger, name), getattr(logger, "experiment", None)
        if log := _method(logger, "log_image", "key", "images", "step"):
            log(key=key, images=[draw()], step=step)
        elif log := _method(experiment, "add_figure", "tag", "figure", "global_step"):
            log(key, draw(), global_step=step, close=False)
        elif log := _method(experiment, "log_figure", "run_id", "figure", "artifact_file"):
            log(getattr(logger, "run_id", None), draw(), f"{name}_{step}.png")
        elif log := _method(experiment, "log_figure", "figure_name", "figure", "step"):
            log(figure_name=name, figure=draw(), step=step)


def log_file(loggers: Iterable[Logger], file: Path) -> None:
    """Attach a file to the run of every logger that keeps files.

    W&B, MLflow, Comet and Lightning's own do.
    """
    path = str(file)
    for logger in loggers:
        experiment = getattr(logger, "experiment", None)
        if log := _method(logger, "log_file", "path"):
            log(path)
        elif log := _method(experiment, "save", "glob_str", "base_path", "policy"):
            log(glob.escape(path), base_path=str(file.parent), policy="now")
        elif log := _method(experiment, "log_artifact", "run_id", "local_path"):
            log(getattr(logger, "run_id", None), path)
        elif log := _method(experiment, "log_asset", "file_data", "file_name", "overwrite"):
            log(path, file_name=file.name, overwrite=True)


def log_layout(loggers: Iterable[Logger], layout: Mapping[str, object]) -> None:
    """Write a layout as from `custom_scalar_layout` to TensorBoard loggers; once in a run."""
    for logger in loggers:
        if log := _method(getattr(logger, "experiment", None), "add_custom_scalars", "layout"):
            log(layout)


def _key(logger: Logger, name: str) -> str:
    separator = getattr(logger, "group_separator", None)
    return name.replace("/", separator) if isinstance(separator, str) else name


def _method(owner: object, name: str, *parameters: str) -> Callable[..., object] | None:
    """Return a method that has parameters of these names; None if the owner has none.

    Loggers share names of methods but not their meaning, so the parameters decide.
    """
    method: Any = getattr(owner, name, None)
    try:
        known = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return None
    return method if all(each in known for each in parameters) else None

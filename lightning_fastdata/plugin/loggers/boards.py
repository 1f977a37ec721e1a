"""The same numbers on every board: scalars, text, and a picture of the step, for any logger.

Loggers are taken for what they can do, not for what they are called, so this module needs neither
Lightning nor any logger's package; what a logger cannot show is left out without a word.
"""

from __future__ import annotations

import glob
import inspect
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from lightning_fastdata.errors import printable
from lightning_fastdata.insight.measure.metrics import columns_of
from lightning_fastdata.insight.measure.wall import STEP_PARTS, wall_text
from lightning_fastdata.insight.metric_names import MAIN
from lightning_fastdata.insight.model.finding import gain_text
from lightning_fastdata.insight.waits.causes import cause_lines, operations_table
from lightning_fastdata.insight.waits.lines import lines_table
from lightning_fastdata.plugin.seams.internals import scalar_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from lightning_fastdata.insight.measure.metrics import Columns, StageSummary, StepTiming
    from lightning_fastdata.insight.measure.wall import WallTime
    from lightning_fastdata.insight.verdicts.catalogue import Verdict


def write_scalars(logger: Any, scalars: Mapping[str, float], step: int) -> bool:
    """Write scalars as one event, and return whether the logger is one that this can be done for.

    It is a TensorBoardLogger with TensorBoard's own writer, no prefix, and no ``log_metrics`` that
    somebody else wrote.

    Args:
        logger: Any Lightning logger.
        scalars: By their tags.
        step: Position on the step axis.
    """
    own = getattr(logger.log_metrics, "__module__", "").endswith(".loggers.tensorboard")
    if not own or scalar_prefix(logger) != "":
        return False
    writer = logger.experiment
    events = getattr(writer, "file_writer", None)
    if type(writer).__module__ != "torch.utils.tensorboard.writer" or events is None:
        return False
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    events.add_summary(Summary(value=values), step)
    return True


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


_STACK = (
    ("compute", "compute_ms", "#4c9f70"),
    ("augment", "augment_ms", "#b07aa1"),
    ("transfer", "transfer_ms", "#59a1cf"),
    ("wait", "stall_ms", "#d1495b"),
)


def phase_figure(steps: Sequence[StepTiming] | Columns) -> Figure:
    """Return the step as stacked areas over step number: compute, augment, transfer, wait.

    The legend has the mean of each phase. The dotted line is the floor that free data would give:
    the median of ``step - stall``. Drawn without pyplot, so neither its state nor a display is
    touched. 4 x 2.4 inches at 150 dpi.

    Args:
        steps: single timings, or their columns (`StepHistory.newest`). Steps without device
            figures are left out; first steps of epochs too, as one of them would flatten the rest.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = steps if isinstance(steps, Mapping) else columns_of(steps)
    warm = columns["cold"] == 0
    drawn = ~np.isnan(columns["step_ms"]) & (warm if warm.any() else True)
    figure = Figure(figsize=(4, 2.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if not drawn.any():
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", fontsize=9)
        return figure
    x, total = columns["step"][drawn], columns["step_ms"][drawn]
    phases = [
        (name, columns[column][drawn], color)
        for name, column, color in _STACK
        if not np.isnan(columns[column][drawn]).all()
    ]
    areas = axes.stackplot(
        x,
        [np.nan_to_num(values) for _, values, _ in phases],
        labels=[f"{name} {np.nanmean(values):.1f}" for name, values, _ in phases],
        colors=[color for *_, color in phases],
        linewidth=0,
        step="mid",
    )
    floor = float(np.median(total - np.nan_to_num(columns["stall_ms"][drawn])))
    axes.axhline(floor, color="black", linewidth=0.9, linestyle=":")
    # A few spikes must not press everything else flat.
    axes.set_ylim(0, 1.15 * max(float(np.percentile(total, 95)), 1e-6))
    axes.set_xlim(float(x[0]), float(x[-1]) if x[-1] > x[0] else float(x[0]) + 1)
    axes.legend(
        handles=areas[::-1],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(areas),
        frameon=False,
        fontsize=7,
        handlelength=0.9,
        handletextpad=0.4,
        columnspacing=1.0,
        borderpad=0,
        borderaxespad=0.3,
    )
    figure.suptitle(
        f"step {total.mean():.1f} ms   ·····  {floor:.1f} if data were free",
        x=0.01,
        ha="left",
        fontsize=8.5,
    )
    return figure


def verdict_markdown(verdict: Verdict, summary: StageSummary, wall: WallTime | None = None) -> str:
    """Return the verdict as markdown: a table of phases, the findings, and what was measured."""
    lines = [f"### {verdict.kind}: {verdict.sentence}", ""]
    rows = [
        ("wait", summary.stall),
        ("transfer", summary.transfer),
        ("augment", summary.augment),
        ("compute", summary.compute),
    ]
    lines += ["| phase | mean ms | share | p50 | p95 | max |", "|---|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {name} | {phase.mean_ms:.1f} | {phase.share:.0%} "
        f"| {phase.p50_ms:.1f} | {phase.p95_ms:.1f} | {phase.max_ms:.1f} |"
        for name, phase in rows
        if phase is not None
    ]
    for found in verdict.findings:
        lines += ["", f"**{found.code}** {found.cause}", ""]
        lines += [f"- try: **{found.remedy}**"] if found.remedy else []
        lines += [f"- gain: {gain_text(found.gain)}"] if found.remedy and found.gain else []
        lines += [f"- skip: {found.leave_alone}"] if found.leave_alone else []
    causes = summary.causes
    facts = [*verdict.evidence, *([] if causes is None else cause_lines(causes))]
    if facts:
        lines += ["", "Also measured:", "", *(f"- {fact}" for fact in facts)]
    if wall is not None:
        lines += ["", f"The run so far, {wall_text(wall, summary.stage)}."]
    if causes is not None and causes.operations:
        lines += ["", operations_table(causes).rstrip()]
    if causes is not None and causes.lines:
        lines += ["", lines_table(causes.lines).rstrip()]
    return "\n".join(lines) + "\n"


def log_to(loggers: Iterable[Any], metrics: Mapping[str, float], step: int) -> None:
    """Give the metrics to every logger, with ``/`` replaced by the logger's own separator.

    Args:
        loggers: Lightning loggers.
        metrics: name -> number; nothing is logged if empty.
        step: position on the step axis.
    """
    if not metrics:
        return
    for logger in loggers:
        named = {_key(logger, name): value for name, value in metrics.items()}
        if not write_scalars(logger, named, step):
            logger.log_metrics(named, step=step)


def log_text(loggers: Iterable[Any], name: str, markdown: str, step: int) -> None:
    """Show a text on every logger that has a place for it: TensorBoard, W&B, MLflow.

    Args:
        loggers: Lightning loggers.
        name: tag, with ``/`` between group and name.
        markdown: the text.
        step: position on the step axis.
    """
    markdown = printable(markdown)
    for logger in loggers:
        key = _key(logger, name)
        if _takes(logger, "log_text", "key", "columns", "data", "step"):
            logger.log_text(key=key, columns=["text"], data=[[markdown]], step=step)
        elif _takes(_experiment(logger), "add_text", "tag", "text_string", "global_step"):
            logger.experiment.add_text(key, markdown, global_step=step)
        elif _takes(_experiment(logger), "log_text", "run_id", "text", "artifact_file"):
            logger.experiment.log_text(logger.run_id, markdown, f"{name}_{step}.md")


def log_figure(loggers: Iterable[Any], name: str, draw: Callable[[], Figure], step: int) -> None:
    """Show a figure on every logger that has a place for it: TensorBoard, W&B, MLflow.

    Args:
        loggers: Lightning loggers.
        name: tag, with ``/`` between group and name.
        draw: makes the figure; called only if a logger takes it.
        step: position on the step axis.
    """
    draw = cache(draw)
    for logger in loggers:
        key = _key(logger, name)
        if _takes(logger, "log_image", "key", "images", "step"):
            logger.log_image(key=key, images=[draw()], step=step)
        elif _takes(_experiment(logger), "add_figure", "tag", "figure", "global_step"):
            logger.experiment.add_figure(key, draw(), global_step=step, close=False)
        elif _takes(_experiment(logger), "log_figure", "run_id", "figure", "artifact_file"):
            logger.experiment.log_figure(logger.run_id, draw(), f"{name}_{step}.png")


def log_image(
    loggers: Iterable[Any], name: str, picture: np.ndarray, caption: str, step: int
) -> bool:
    """Show a picture on every logger that has a place for it: TensorBoard, W&B, MLflow.

    Args:
        loggers: Lightning loggers.
        name: tag, with ``/`` between group and name.
        picture: uint8 ``[H, W, 3]``.
        caption: what it shows, for loggers that write it beside the picture.
        step: position on the step axis.

    Returns:
        Whether a logger took it.
    """
    taken = False
    for logger in loggers:
        key = _key(logger, name)
        if _takes(logger, "log_image", "key", "images", "step"):
            logger.log_image(key=key, images=[picture], step=step, caption=[caption])
        elif _takes(_experiment(logger), "add_image", "tag", "img_tensor", "global_step"):
            logger.experiment.add_image(key, picture, global_step=step, dataformats="HWC")
        elif _takes(_experiment(logger), "log_image", "run_id", "image", "artifact_file"):
            logger.experiment.log_image(logger.run_id, picture, f"{name}_{step}.png")
        else:
            continue
        taken = True
    return taken


def log_files(loggers: Iterable[Any], files: Sequence[Path]) -> None:
    """Attach files to the run of every logger that keeps files: W&B, MLflow, Comet, Lightning's.

    Args:
        loggers: Lightning loggers.
        files: That exist, all in one folder.
    """
    for logger in loggers:
        experiment = _experiment(logger)
        for file in files:
            path = str(file)
            if _takes(logger, "log_file", "path"):
                logger.log_file(path)
            elif _takes(experiment, "save", "glob_str", "base_path", "policy"):
                experiment.save(glob.escape(path), base_path=str(file.parent), policy="now")
            elif _takes(experiment, "log_artifact", "run_id", "local_path"):
                experiment.log_artifact(logger.run_id, path)
            elif _takes(experiment, "log_asset", "file_data", "file_name", "overwrite"):
                experiment.log_asset(path, file_name=file.name, overwrite=True)


def log_layout(loggers: Iterable[Any], layout: Mapping[str, Any]) -> None:
    """Write a layout of custom scalars to TensorBoard loggers. To be called once per run.

    Args:
        loggers: Lightning loggers.
        layout: as from `scalars.custom_scalar_layout`.
    """
    for logger in loggers:
        if _takes(_experiment(logger), "add_custom_scalars", "layout"):
            logger.experiment.add_custom_scalars(layout)


def _key(logger: Any, name: str) -> str:
    separator = getattr(logger, "group_separator", "/")
    return name.replace("/", separator) if isinstance(separator, str) else name


def _experiment(logger: Any) -> Any:
    return getattr(logger, "experiment", None)


def _takes(owner: Any, method: str, *names: str) -> bool:
    """Return whether the owner has a method with parameters of these names.

    Loggers share method names but not their meaning, so the parameters decide.
    """
    function = getattr(owner, method, None)
    if not callable(function):
        return False
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return all(name in parameters for name in names)

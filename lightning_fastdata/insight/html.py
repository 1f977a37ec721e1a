"""The report as one page of HTML that needs nothing else: no network, no scripts, no fonts.

``templates/page.html`` says what the page shows and ``templates/chart.html`` draws the newest
steps; this module computes the numbers that they need beyond those of the report. All texts are
escaped, whatever names of files or classes hold, and the page's policy lets nothing be fetched or
run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Final

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from lightning_fastdata.errors import printable
from lightning_fastdata.insight.finding import Gain, duration_text, gain_text
from lightning_fastdata.insight.report import RunReport, figures, in_form
from lightning_fastdata.insight.steps import MOST_RECENT, PHASES, Columns, Values
from lightning_fastdata.insight.waits import PART_WORDS, WaitParts
from lightning_fastdata.insight.wall import PART_NAMES, STEP_PARTS

_HEIGHT: Final = 1000
_TICKS: Final = 4
_NICE: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_QUANTILE: Final = 0.95
"""Quantile of the steps a little above which the axis ends: a few spikes must not press all others
flat."""


def report_html(report: RunReport) -> str:
    """Return the page; the first of the report's stages is shown in full."""
    first = report.stages[0] if report.stages else None
    steps = {} if first is None else report.recent.get(first.stage, {})
    return _TEMPLATES.get_template("page.html").render(
        report=report,
        first=first,
        figures=figures(report) if report.stages else (),
        chart=timeline_chart(steps),
        chart_steps=min(MOST_RECENT, len(steps.get("step", ()))),
        chart_phases=_phases(steps),
        facts={**report.machine, **report.versions},
    )


def timeline_chart(steps: Columns) -> Markup | None:
    """Return the newest steps as stacked columns with axes, or None if none of them was timed.

    Each column shows its figures when the mouse rests on it.
    """
    steps = {name: values[-MOST_RECENT:] for name, values in steps.items()}
    total = steps.get("step_ms", np.array([]))
    timed = ~np.isnan(total)
    if not timed.any():
        return None
    warm = timed & (steps["cold"] == 0)
    top, ticks = axis(float(np.quantile(total[warm if warm.any() else timed], _QUANTILE)) * 1.1)
    phases = _phases(steps)
    without_stalls = (total - np.nan_to_num(steps["stall_ms"]))[timed]
    chart = _TEMPLATES.get_template("chart.html").render(
        steps=steps["step"].astype(int).tolist(),
        height=_HEIGHT,
        top=top,
        ticks=ticks,
        areas=_areas(phases, top),
        floor=_y(float(np.median(without_stalls)), top) if "wait" in phases else None,
        epochs=[i for i, cold in enumerate(steps["cold"]) if cold and i],
        figures=list(_figures(steps, phases)),
        above=int((total[timed] > top).sum()),
        highest=total[timed].max(),
    )
    return Markup(chart)


def axis(largest: float) -> tuple[float, list[float]]:
    """Return the end of an axis that holds ``largest``, and round numbers on it, from 0."""
    rough = max(largest, 1e-6) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in _NICE if nice * power >= rough * (1 - 1e-9))
    count = max(1, math.ceil(largest / step - 1e-9))
    return count * step, [i * step for i in range(count + 1)]


def _phases(steps: Columns) -> dict[str, Values]:
    """Return the times of each phase that was measured, the top one of a column first."""
    columns = {name: steps.get(f"{key}_ms", np.array([])) for name, key in PHASES.items()}
    return {name: column for name, column in columns.items() if not np.isnan(column).all()}


def _areas(phases: dict[str, Values], top: float) -> dict[str, str]:
    """Return the outline of each phase, stepwise, on top of those below it."""
    areas: dict[str, str] = {}
    base: Values | float = 0.0
    for name, values in reversed(phases.items()):
        upper = base + np.nan_to_num(values)
        spans = np.broadcast_arrays(base, upper)
        areas[name] = "".join(
            f"M{i} {_y(low, top)}V{_y(high, top)}H{i + 1}V{_y(low, top)}Z"
            for i, (low, high) in enumerate(zip(*spans, strict=True))
            if high > low
        )
        base = upper
    return areas


def _figures(steps: Columns, phases: dict[str, Values]) -> Iterator[str]:
    for i, (step, cold, total) in enumerate(
        zip(steps["step"], steps["cold"], steps["step_ms"], strict=True)
    ):
        lines = [f"step {step:.0f}{', first of its epoch' if cold else ''}"]
        lines.append("not timed" if np.isnan(total) else f"{total:.1f} ms in all")
        times = {name: column[i] for name, column in phases.items()}
        lines += [f"{name} {ms:.1f} ms" for name, ms in times.items() if not np.isnan(ms)]
        yield "\n".join(lines)


def _y(value_ms: float, top: float) -> int:
    return round(_HEIGHT * (1 - min(1.0, float(value_ms) / top)))


def _ms(value: float | None) -> str | None:
    return in_form(value, "{:.2g}" if value is not None and value < 0.1 else "{:.1f}")


def _longest(named_s: list[tuple[str, float]]) -> str:
    """Return the three names that took longest, with their times."""
    return ", ".join(f"{name} {duration_text(taken)}" for name, taken in named_s[:3])


def _gain_with_shares(gain: Gain) -> tuple[str, float, float]:
    """Return a gain in words, and the step before and after as shares of the longer of the two."""
    part = gain.after_ms / gain.before_ms if gain.before_ms > 0 else 1.0
    words = gain_text(gain) if gain.after_ms > 0 else "most of the step"
    return words, min(1.0, 1 / part) if part > 0 else 1.0, min(1.0, part)


def _parts(wait: WaitParts) -> list[tuple[str, float]]:
    """Return the parts of a wait that took any time, in words, the longest first."""
    parts = sorted(asdict(wait).items(), key=lambda part: -part[1])
    return [(PART_WORDS[name], ms) for name, ms in parts if ms > 0]


def _is_numeric(cell: object) -> bool:
    """Return whether a cell of a table stands right: one with a number, or with none measured."""
    if isinstance(cell, Markup):
        return False
    text = str(cell)
    return cell is None or (text[:1].isdigit() and text[-1:] in "0123456789%")


def _shown(value: object) -> object:
    """Return what a template writes for a value, before it is escaped."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


_TEMPLATES: Final = Environment(
    loader=PackageLoader("lightning_fastdata.insight"),
    autoescape=True,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= {
    "ms": _ms,
    "number": in_form,
    "percent": partial(in_form, form="{:.0%}"),
    "duration": duration_text,
    "longest": _longest,
    "gain_with_shares": _gain_with_shares,
    "parts": _parts,
}
_TEMPLATES.tests["numeric"] = _is_numeric
_TEMPLATES.globals |= {
    "part_names": PART_NAMES,
    "step_parts": STEP_PARTS,
}

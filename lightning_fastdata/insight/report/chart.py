"""The newest steps as a picture in SVG: what each took, phase upon phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_fastdata.insight.report.markup import Markup, element, section

STACK: Final = (
    ("compute", "compute_ms"),
    ("augment", "augment_ms"),
    ("transfer", "transfer_ms"),
    ("wait", "stall_ms"),
)
"""Phases from the bottom to the top, each with the column of `StepTiming` that holds it."""
_COLD_WORDS: Final = {1: ", first of its epoch", 2: ", first after a validation"}
_HEIGHT: Final = 1000
_TICKS: Final = 4
_NICE: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_QUANTILE: Final = 0.95
"""The axis ends a little above this part of the steps: a few spikes must not press all others
flat."""

Recent = Mapping[str, Sequence[float | None]]
"""Column of `StepTiming` -> one value per step, oldest first; None = not measured."""


def timeline_section(recent: Recent | None) -> Markup | None:
    """Return the chart of the newest steps with its heading and legend; None without any."""
    chart = timeline_chart(recent) if recent else None
    if recent is None or chart is None:
        return None
    shown = [
        name for name, column in STACK if any(value is not None for value in recent.get(column, ()))
    ]
    legend = [
        element("span", element("i", class_=f"back-{name}"), name) for name in reversed(shown)
    ]
    legend.append(element("span", element("i", class_="dots"), "median if data were free"))
    return section(
        f"The newest {len(recent['step'])} steps, ms",
        element("p", legend, class_="legend"),
        chart,
        element("p", "Rest on a step for its figures; thin lines are epochs.", class_="hint"),
    )


def timeline_chart(recent: Recent) -> Markup | None:
    """Return the steps as stacked columns with axes, or None if no step was timed.

    Each column shows its figures when the mouse rests on it. The picture takes all the width that
    there is; its labels are text beside it, which does not shrink with it.

    Args:
        recent: Columns of the newest steps.
    """
    totals = [value for value in recent.get("step_ms", ()) if value is not None]
    if not totals:
        return None
    warm = [
        value
        for value, cold in zip(recent["step_ms"], recent["cold"], strict=True)
        if value is not None and not cold
    ]
    top, ticks = axis(_quantile(warm or totals, _QUANTILE) * 1.1)
    numbers = [round(value or 0) for value in recent["step"]]
    plot = element(
        "svg",
        [_areas(recent, top), _floor(recent, top), _epochs(recent), _columns(recent)],
        viewBox=f"0 0 {len(numbers)} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label="Time of the newest steps, by phase",
    )
    labels = [
        element("span", f"{tick:g}", style=f"bottom:{100 * tick / top:.2f}%") for tick in ticks
    ]
    above = sum(value > top for value in totals)
    note = f"{above} above {top:g} ms, up to {max(totals):.0f} ms" if above else None
    return element(
        "div",
        element("div", labels, class_="y"),
        element("div", plot, class_="plot"),
        element(
            "div",
            element("span", f"step {numbers[0]}"),
            element("span", note) if note else None,
            element("span", f"step {numbers[-1]}"),
            class_="x",
        ),
        class_="chart",
    )


def axis(largest: float) -> tuple[float, list[float]]:
    """Return the end of an axis that holds ``largest``, and round numbers on it, from 0."""
    rough = max(largest, 1e-6) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in _NICE if nice * power >= rough * (1 - 1e-9))
    count = math.ceil(largest / step - 1e-9)
    return max(1, count) * step, [i * step for i in range(max(1, count) + 1)]


def _areas(recent: Recent, top: float) -> list[Markup]:
    """Return an area for each measured phase, stepwise, on top of those before it."""
    base = [0.0] * len(recent["step_ms"])
    areas = []
    for name, column in STACK:
        values = recent.get(column, ())
        if all(value is None for value in values):
            continue
        upper = [low + (value or 0.0) for low, value in zip(base, values, strict=True)]
        outline = "".join(
            f"M{i} {_y(low, top)}V{_y(high, top)}H{i + 1}V{_y(low, top)}Z"
            for i, (low, high) in enumerate(zip(base, upper, strict=True))
            if high > low
        )
        areas.append(element("path", d=outline, class_=f"fill-{name}"))
        base = upper
    return areas


def _floor(recent: Recent, top: float) -> Markup | None:
    """Return a dotted line where the median step would be if data were free."""
    left = [
        total - (stall or 0.0)
        for total, stall in zip(recent["step_ms"], recent["stall_ms"], strict=True)
        if total is not None
    ]
    if all(stall is None for stall in recent["stall_ms"]):
        return None
    y = _y(_quantile(left, 0.5), top)
    return element("line", x1=0, x2=len(recent["step_ms"]), y1=y, y2=y, class_="floor")


def _epochs(recent: Recent) -> list[Markup]:
    return [
        element("line", x1=i, x2=i, y1=0, y2=_HEIGHT, class_="epoch")
        for i, cold in enumerate(recent["cold"])
        if cold == 1 and i
    ]


def _columns(recent: Recent) -> list[Markup]:
    """Return an invisible column over each step, with its figures as a title."""
    return [
        element(
            "rect",
            element("title", _figures(recent, i)),
            x=i,
            y=0,
            width=1,
            height=_HEIGHT,
            class_="step",
        )
        for i in range(len(recent["step_ms"]))
    ]


def _figures(recent: Recent, i: int) -> str:
    total = recent["step_ms"][i]
    lines = [
        f"step {round(recent['step'][i] or 0)}{_COLD_WORDS.get(round(recent['cold'][i] or 0), '')}"
    ]
    lines.append("not timed" if total is None else f"{total:.1f} ms in all")
    for name, column in reversed(STACK):
        value = recent[column][i] if column in recent else None
        if value is not None:
            lines.append(f"{name} {value:.1f} ms")
    return "\n".join(lines)


def _y(value_ms: float, top: float) -> int:
    return round(_HEIGHT * (1 - min(1.0, value_ms / top)))


def _quantile(values: Sequence[float], part: float) -> float:
    """Return the quantile, linear between neighbours."""
    ordered = sorted(values)
    at = part * (len(ordered) - 1)
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)

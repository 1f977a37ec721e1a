"""The report as one page of HTML that needs nothing else: no network, no scripts, no fonts.

``templates/page.html`` says what the page shows and ``templates/chart.html`` draws the newest
steps; here are the numbers that they need beyond those of the report. Whatever names of files or
classes hold, texts are escaped, and the page's policy lets nothing be fetched or run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from lightning_fastdata.errors import printable
from lightning_fastdata.insight.measure.wall import PART_NAMES, STEP_PARTS
from lightning_fastdata.insight.model.finding import Gain, duration_text, family_of, gain_text
from lightning_fastdata.insight.verdicts.catalogue import TITLES
from lightning_fastdata.insight.waits.attribution import PART_WORDS
from lightning_fastdata.tuning.moves import Move
from lightning_fastdata.types import STAGE_WORDS

PHASES: Final = {
    "wait": "stall",
    "transfer": "transfer",
    "augment": "augment",
    "compute": "compute",
}
"""Phases from the top of a column to its bottom, each with the key of the report that holds it;
with ``_ms``, the column of `StepTiming`."""
_COLD_WORDS: Final = {1: ", first of its epoch", 2: ", first after a validation"}
_HEIGHT: Final = 1000
_TICKS: Final = 4
_NICE: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_QUANTILE: Final = 0.95
"""The axis ends a little above this part of the steps: a few spikes must not press all others
flat."""

Recent: TypeAlias = Mapping[str, Sequence[float | None]]
"""Column of `StepTiming` -> one value per step, oldest first; None: not measured."""
Phases: TypeAlias = dict[str, Sequence[float | None]]
"""Measured phase, the top one first -> its time in each step."""


def report_html(report: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        report: As from `RunReport.as_dict`, or read from the JSON file; the first of its stages is
            shown in full.
    """
    stages = list(report["stages"].values())
    first = stages[0] if stages else None
    wall = report.get("wall") or {}
    recent = {} if first is None else first.get("recent") or {}
    return TEMPLATES.get_template("page.html").render(
        first=first,
        stages=stages,
        steps=first
        and f"{first['stage']} · {first['steps']} steps in {duration_text(first['duration_s'])}",
        so_far="" if report.get("ended", True) else " so far",
        verdict=report.get("verdict"),
        figures=first and _headline(first, wall, report.get("device_minutes_waited")),
        wall=wall,
        measured=[name for name, key in PHASES.items() if first and first.get(key)],
        chart=timeline_chart(recent),
        chart_phases=measured_phases(recent),
        meanings=_meanings(report.get("verdict") or {}),
        ranks=report.get("ranks"),
        notes=[
            *(f"Done: {Move(**move)}." for move in report.get("moves", ())),
            *report.get("notes", ()),
        ],
        facts={**report.get("machine", {}), **report.get("versions", {})},
    )


def _meanings(verdict: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return what each code of a verdict stands for: its family, and its title."""
    codes = dict.fromkeys(found["code"] for found in verdict.get("findings", ()))
    return {code: (family_of(code), TITLES[code]) for code in codes if code in TITLES}


def _headline(
    first: Mapping[str, Any], wall: Mapping[str, Any], device_minutes_waited: float | None
) -> list[tuple[str | None, str]]:
    """Return the figures at the top of the page with their labels."""
    now, rate = first.get("samples_per_s"), first.get("samples_per_s_if_data_were_free")
    stage, waited = STAGE_WORDS.get(first["stage"], first["stage"]), device_minutes_waited or None
    if first.get("device", "cpu") == "cpu":
        # What the model would do with the CPUs that load is not known.
        rate = waited = None
    return [
        (_whole(wall.get("samples_per_s")), f"samples/s in the whole {stage}"),
        (_whole(now), "samples/s in a step"),
        (_whole(rate), "if data were free"),
        (f"{rate / now:.2f}x" if rate and now else None, "to gain, at most"),
        (_ms((first.get("step") or {}).get("mean_ms")), "ms a step"),
        (_percent(first.get("stall_share")), "of it waiting for data"),
        (_number("{:.1f}", waited), "GPU minutes waited"),
    ]


def timeline_chart(recent: Recent) -> Markup | None:
    """Return the steps as stacked columns with axes, or None if no step was timed.

    Each column shows its figures when the mouse rests on it.

    Args:
        recent: Columns of the newest steps.
    """
    totals = [value for value in recent.get("step_ms", ()) if value is not None]
    if not totals:
        return None
    pairs = zip(recent["step_ms"], recent["cold"], strict=True)
    warm = [value for value, cold in pairs if value is not None and not cold]
    top, ticks = axis(float(np.quantile(warm or totals, _QUANTILE)) * 1.1)
    phases = measured_phases(recent)
    pairs = zip(recent["step_ms"], recent["stall_ms"], strict=True)
    without_stalls = [total - (stall or 0.0) for total, stall in pairs if total is not None]
    chart = TEMPLATES.get_template("chart.html").render(
        steps=[round(value or 0) for value in recent["step"]],
        height=_HEIGHT,
        top=top,
        ticks=ticks,
        areas=_areas(phases, top),
        floor=_y(float(np.median(without_stalls)), top) if "wait" in phases else None,
        epochs=[i for i, cold in enumerate(recent["cold"]) if cold == 1 and i],
        figures=list(_figures(recent, phases)),
        above=sum(value > top for value in totals),
        highest=max(totals),
    )
    return Markup(chart)


def axis(largest: float) -> tuple[float, list[float]]:
    """Return the end of an axis that holds ``largest``, and round numbers on it, from 0."""
    rough = max(largest, 1e-6) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in _NICE if nice * power >= rough * (1 - 1e-9))
    count = max(1, math.ceil(largest / step - 1e-9))
    return count * step, [i * step for i in range(count + 1)]


def measured_phases(recent: Recent) -> Phases:
    """Return the times of each phase that was measured, the top one first."""
    columns = {name: recent.get(f"{key}_ms", ()) for name, key in PHASES.items()}
    return {
        name: column
        for name, column in columns.items()
        if any(value is not None for value in column)
    }


def _areas(phases: Phases, top: float) -> dict[str, str]:
    """Return the outline of each phase, stepwise, on top of those below it."""
    areas, base = {}, [0.0] * max(map(len, phases.values()), default=0)
    for name, values in reversed(phases.items()):
        upper = [low + (value or 0.0) for low, value in zip(base, values, strict=True)]
        areas[name] = "".join(
            f"M{i} {_y(low, top)}V{_y(high, top)}H{i + 1}V{_y(low, top)}Z"
            for i, (low, high) in enumerate(zip(base, upper, strict=True))
            if high > low
        )
        base = upper
    return areas


def _figures(recent: Recent, phases: Phases) -> Iterator[str]:
    """Yield the figures of each step, one in a line."""
    for i, total in enumerate(recent["step_ms"]):
        cold = _COLD_WORDS.get(round(recent["cold"][i] or 0), "")
        lines = [f"step {round(recent['step'][i] or 0)}{cold}"]
        lines.append("not timed" if total is None else f"{total:.1f} ms in all")
        times = {name: column[i] for name, column in phases.items()}
        lines += [f"{name} {value:.1f} ms" for name, value in times.items() if value is not None]
        yield "\n".join(lines)


def _y(value_ms: float, top: float) -> int:
    return round(_HEIGHT * (1 - min(1.0, value_ms / top)))


def _number(form: str, value: object) -> str | None:
    """Return a number in a form; None for what was not measured, or is not in an older report."""
    return form.format(value) if isinstance(value, int | float) else None


def _ms(value: object) -> str | None:
    small = isinstance(value, int | float) and value < 0.1
    return _number("{:.2g}" if small else "{:.1f}", value)


_percent = partial(_number, "{:.0%}")
_whole = partial(_number, "{:.0f}")


def _longest(named_s: Mapping[str, float]) -> str:
    """Return the first three names, which took longest, with their times."""
    return ", ".join(f"{name} {duration_text(taken)}" for name, taken in list(named_s.items())[:3])


def _gain_with_shares(gain: Mapping[str, Any]) -> tuple[str, float, float]:
    """Return a gain in words, and the step before and after as shares of the longer one."""
    known = Gain(before_ms=gain["before_ms"], after_ms=gain["after_ms"], basis=gain["basis"])
    part = known.after_ms / known.before_ms if known.before_ms > 0 else 1.0
    words = gain_text(known) if known.after_ms > 0 else "most of the step"
    return words, min(1.0, 1 / part) if part > 0 else 1.0, min(1.0, part)


def _is_numeric(cell: object) -> bool:
    """Return whether a cell of a table stands right: a number, or one that was not measured."""
    if isinstance(cell, Markup):
        return False
    text = str(cell)
    return cell is None or (text[:1].isdigit() and text[-1:] in "0123456789%")


def _written(value: object) -> object:
    """Return what a template writes for a value, before it is escaped."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


TEMPLATES: Final = Environment(
    loader=PackageLoader("lightning_fastdata.insight.report"),
    autoescape=True,
    finalize=_written,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {
    "ms": _ms,
    "percent": _percent,
    "whole": _whole,
    "duration": duration_text,
    "longest": _longest,
    "gain": gain_text,
    "gain_with_shares": _gain_with_shares,
}
TEMPLATES.tests["numeric"] = _is_numeric
TEMPLATES.globals |= {
    "phases": PHASES,
    "part_names": PART_NAMES,
    "part_words": PART_WORDS,
    "step_parts": STEP_PARTS,
}

"""The report as one page of HTML that needs nothing else: no network, no scripts, no fonts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final, TypeAlias

from lightning_fastdata.errors import printable
from lightning_fastdata.insight.measure.wall import PART_NAMES, STEP_PARTS
from lightning_fastdata.insight.model.finding import Gain, duration_text, gain_text
from lightning_fastdata.insight.waits.attribution import PART_WORDS
from lightning_fastdata.types import STAGE_WORDS

STYLE: Final = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1d2430; --faint: #667085; --line: #e3e7ee; --card: #f6f8fb;
  --wait: #d1495b; --transfer: #3f8ec2; --augment: #a2659a; --compute: #3f9164; --warn: #c98a12;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12161d; --ink: #e4e8ef; --faint: #94a0b3; --line: #2b3340; --card: #1a202a;
    --wait: #e2616f; --transfer: #5aa9dc; --augment: #bd85b6; --compute: #4fae7b; --warn: #e0a73c;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 40px; }
h1 { font-size: 22px; line-height: 1.35; margin: 4px 0 18px; font-weight: 600; }
h2 { font-size: 16px; margin: 34px 0 10px; }
h3 { font-size: 14px; margin: 20px 0 6px; }
p { margin: 6px 0; }
ul { margin: 8px 0; padding-left: 20px; color: var(--faint); }
.run, .hint { color: var(--faint); margin: 0; }
.hint { font-size: 13px; }
.badge { color: #fff; background: var(--faint); padding: 2px 10px; border-radius: 4px;
  text-transform: uppercase; font-size: 15px; letter-spacing: .04em; white-space: nowrap; }
.badge.data-bound { background: #c0374a; }
.badge.balanced { background: #96660a; }
.badge.paused, .badge.starved, .badge.held { background: #7a3d94; }
.badge.compute-bound { background: #2f7a52; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; }
.figures div { background: var(--card); border-radius: 8px; padding: 10px 14px; }
.figures b { display: block; font-size: 24px; line-height: 1.25; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.figures span { color: var(--faint); font-size: 13px; }
article { border-left: 4px solid var(--line); background: var(--card); padding: 10px 16px;
  margin: 10px 0; border-radius: 0 8px 8px 0; overflow-wrap: anywhere; }
article.high { border-color: var(--wait); }
article.moderate { border-color: var(--warn); }
article.fine { border-color: var(--compute); }
.cause { margin: 0; }
.code { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; color: var(--faint);
  border: 1px solid var(--line); border-radius: 4px; padding: 1px 5px; margin-right: 4px; }
dl { display: grid; grid-template-columns: 44px 1fr; gap: 4px 8px; margin: 8px 0 0; }
dl:empty { display: none; }
dt { color: var(--faint); }
dd { margin: 0; min-width: 0; }
dd.try { font-weight: 600; }
dd.skip { color: var(--faint); }
.before-after { display: block; max-width: 420px; margin-top: 5px; }
.before-after .bar { height: 6px; margin-bottom: 2px; }
i { font-style: normal; }
.bar { display: block; height: 12px; min-width: 1px; border-radius: 2px; }
.stack { display: flex; height: 26px; border-radius: 4px; overflow: hidden; margin-bottom: 10px; }
.stack .bar { height: 100%; border-radius: 0; flex: none; }
.back-gap { background: var(--faint); }
.back-wait { background: var(--wait); } .fill-wait { fill: var(--wait); }
.back-transfer { background: var(--transfer); } .fill-transfer { fill: var(--transfer); }
.back-augment { background: var(--augment); } .fill-augment { fill: var(--augment); }
.back-compute { background: var(--compute); } .fill-compute { fill: var(--compute); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; }
.legend i, td > span > i { display: inline-block; width: 11px; height: 11px; margin-right: 6px;
  border-radius: 2px; }
.legend .dots { width: 18px; height: 0; vertical-align: middle; border-radius: 0;
  border-top: 2px dotted var(--ink); }
.chart { display: grid; grid-template-columns: 42px 1fr; font-size: 12px; color: var(--faint);
  font-variant-numeric: tabular-nums; }
.y { position: relative; }
.y span { position: absolute; right: 8px; line-height: 1; transform: translateY(50%); }
.plot { height: 240px; border: solid var(--line); border-width: 0 0 1px 1px; }
.plot svg { display: block; width: 100%; height: 100%; }
.x { grid-column: 2; display: flex; justify-content: space-between; gap: 10px; padding-top: 3px; }
.floor { stroke: var(--ink); stroke-width: 1.5px; stroke-dasharray: 2 4;
  vector-effect: non-scaling-stroke; }
.epoch { stroke: var(--faint); stroke-width: 1px; opacity: .6; vector-effect: non-scaling-stroke; }
.step { fill: transparent; }
.step:hover { fill: var(--ink); opacity: .22; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--faint); font-weight: 500; font-size: 13px; }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
td { overflow-wrap: anywhere; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.parts td:first-child { width: 46%; }
.parts td:nth-child(2) { width: 34%; }
footer { margin-top: 36px; padding-top: 12px; border-top: 1px solid var(--line); font-size: 13px;
  color: var(--faint); display: flex; flex-wrap: wrap; gap: 2px 18px; }
footer b { font-weight: 500; color: var(--ink); }
@media (max-width: 560px) {
  main { padding: 14px 12px 30px; }
  h1 { font-size: 19px; }
  .figures { grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); gap: 8px; }
  .figures b { font-size: 20px; }
  .plot { height: 180px; }
  .parts td:nth-child(2), .parts th:nth-child(2) { display: none; }
  .parts td:first-child { width: 66%; }
}
@media print { article, .figures div { break-inside: avoid; } }
"""


class Markup(str):
    """Text that is markup already, and is written as it is."""

    __slots__ = ()


Child: TypeAlias = "str | Markup | Iterable[Child] | None"
"""What an element may hold: text, which is escaped; elements; any nesting of them."""

_VOID = frozenset(("br", "meta", "rect", "line", "path"))


def element(name: str, /, *children: Child, **attributes: str | float | None) -> Markup:
    """Return ``<name ...>children</name>``.

    Args:
        name: Of the element.
        children: What it holds.
        attributes: Underscores in their names become hyphens, one at the end is cut off
            (``class_``); those with None are left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = joined(children)
    if name in _VOID and not inner:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{inner}</{name}>")


def joined(children: Child) -> Markup:
    """Return elements and escaped texts one after the other."""
    if children is None:
        return Markup()
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return Markup(escape(printable(children)))
    return Markup("".join(joined(child) for child in children))


def section(title: str, *children: Child) -> Markup:
    """Return a part of the page under a heading."""
    return element("section", element("h2", title), children)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Child]], class_: str | None = None
) -> Markup:
    """Return a table whose cells of numbers stand right; None is a cell that was not measured."""
    body = [
        element(
            "tr",
            [element("td", "-" if cell is None else cell, class_=_kind(cell)) for cell in row],
        )
        for row in rows
    ]
    first = element("tr", [element("th", head) for head in heads])
    whole = element("table", element("thead", first), element("tbody", body), class_=class_)
    return element("div", whole, class_="wide")


def _kind(cell: Child) -> str | None:
    if cell is None:
        return "number"
    if not isinstance(cell, str) or isinstance(cell, Markup):
        return None
    return "number" if cell[:1].isdigit() and cell[-1:] in "0123456789%" else None


def bar(share: float, name: str) -> Markup:
    """Return a bar as long as a share of its cell, 0 to 1, in the color of a phase."""
    return element("i", class_=f"bar back-{name}", style=f"width:{100 * share:.2f}%")


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


_PHASES: Final = tuple((name, column.removesuffix("_ms")) for name, column in reversed(STACK))
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing is fetched and nothing runs, whatever the names of files or classes hold."""


def report_html(report: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        report: As from `RunReport.as_dict`, or read from the JSON file; the first of its stages is
            shown in full.
    """
    stages = list(report["stages"].values())
    first = stages[0] if stages else None
    so_far = "" if report.get("ended", True) else " so far"
    body: list[Child] = [_head(first, report.get("verdict"), report.get("wall"), so_far)]
    if first is not None:
        body += [
            _findings(report.get("verdict")),
            _wall(report.get("wall")),
            timeline_section(first.get("recent")),
            _phases(first),
            _loaders(stages),
            _late_batches(first.get("causes"), first.get("loaders")),
        ]
    body += [
        _ranks(report.get("ranks")),
        _other_stages(stages[1:]),
        _notes(report),
        _machine(report),
    ]
    title = "fastdata" if first is None else f"fastdata · {_steps(first)}{so_far}"
    page = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            element("title", title),
            element("style", Markup(STYLE)),
        ),
        element("body", element("main", body)),
        lang="en",
    )
    return f"<!doctype html>\n{page}\n"


def _head(
    first: Mapping[str, Any] | None,
    verdict: Mapping[str, Any] | None,
    wall: Mapping[str, Any] | None,
    so_far: str,
) -> Markup:
    if first is None:
        return element("header", element("h1", "nothing was measured"))
    sentence = None
    if verdict is not None:
        kind = verdict["kind"]
        sentence = element(
            "h1",
            element("span", kind, class_=f"badge {kind.split()[0]}"),
            " ",
            verdict["sentence"],
        )
    device = "" if first.get("device", "cpu") == "cpu" else f" on {first['device']}"
    now, free = first.get("samples_per_s"), first.get("headroom") or {}
    rate = free.get("samples_per_s", first.get("samples_per_s_if_data_were_free"))
    measured = free.get("basis") == "measured"
    if first.get("device", "cpu") == "cpu" and not measured:
        rate = None  # what the model would do with the CPUs that load is not known
    whole = STAGE_WORDS.get(first["stage"], first["stage"])
    figures: list[Child] = [
        _figure(_rounded((wall or {}).get("samples_per_s")), f"samples/s in the whole {whole}"),
        _figure(_rounded(now), "samples/s in a step"),
        _figure(_rounded(rate), "if data were free" + (", measured" if measured else "")),
        _figure(_times(rate / now) if rate and now else None, "to gain, at most"),
        _figure(_ms(_mean(first, "step")), "ms a step"),
        _figure(_percent(first.get("stall_share")), "of it waiting for data"),
    ]
    run = element("p", f"fastdata · {_steps(first)}{device}{so_far}", class_="run")
    return element("header", run, sentence, element("div", figures, class_="figures"))


def _figure(value: str | None, label: str) -> Markup | None:
    if value is None:
        return None
    return element("div", element("b", value), element("span", label))


def _findings(verdict: Mapping[str, Any] | None) -> Markup | None:
    if not verdict:
        return None
    articles = [_finding(found) for found in verdict.get("findings", ())]
    facts = "; ".join(verdict.get("evidence", ()))
    evidence = element("p", f"Also measured: {facts}.", class_="hint") if facts else None
    return section("Causes, and what to try", articles, evidence)


def _finding(found: Mapping[str, Any]) -> Markup:
    gain = found.get("gain")
    rows = [
        ("try", found.get("remedy")),
        ("gain", _gain(gain) if gain and found.get("remedy") else None),
        ("skip", found.get("leave_alone")),
    ]
    words = [
        (element("dt", label), element("dd", text, class_=label)) for label, text in rows if text
    ]
    code = element("span", found["code"], class_="code")
    cause = element("p", code, " ", found["cause"], class_="cause")
    return element("article", cause, element("dl", words), class_=found["severity"])


def _gain(gain: Mapping[str, Any]) -> list[Child]:
    """Return the gain in words, and the step before and after as two bars."""
    known = Gain(before_ms=gain["before_ms"], after_ms=gain["after_ms"], basis=gain["basis"])
    part = known.after_ms / known.before_ms if known.before_ms > 0 else 1.0
    bars = [bar(min(1.0, 1 / part) if part > 0 else 1.0, "wait"), bar(min(1.0, part), "compute")]
    words = gain_text(known) if known.after_ms > 0 else "most of the step"
    return [words, element("span", bars, class_="before-after")]


def _wall(wall: Mapping[str, Any] | None) -> Markup | None:
    """Return where the run went, each part with what most of it was spent on."""
    if not wall or wall["total_s"] <= 0:
        return None
    rows = []
    for part, seconds in sorted(wall["parts_s"].items(), key=lambda item: -item[1]):
        share = seconds / wall["total_s"]
        named = list(wall["named_s"].get(part, {}).items())[:3]  # the longest first
        most = ", ".join(f"{name} {duration_text(taken)}" for name, taken in named)
        drawn = bar(share, part if part in STEP_PARTS else "gap")
        name = PART_NAMES.get(part, part)
        rows.append([name, drawn, f"{seconds:.2f}", _percent(share), most])
    return section(
        f"Where the {duration_text(wall['total_s'])} of the run went",
        table(("part", "", "s", "share", "most of it"), rows, class_="parts"),
    )


def _phases(stage: Mapping[str, Any]) -> Markup | None:
    measured = [(name, stage[key]) for name, key in _PHASES if stage.get(key)]
    if not measured:
        return None
    stack = [bar(phase["share"], name) for name, phase in reversed(measured)]
    rows = [
        [element("span", element("i", class_=f"back-{name}"), name), *_phase_cells(phase)]
        for name, phase in measured
    ]
    for key, words in (("wait", "the host waited"), ("gap", "between steps"), ("step", "step")):
        if stage.get(key):
            rows.append([words, *_phase_cells(stage[key])])
    return section(
        "Where a step goes",
        element("div", stack, class_="stack"),
        table(("phase", "mean ms", "share", "p50", "p95", "max"), rows),
    )


def _phase_cells(phase: Mapping[str, float]) -> list[str | None]:
    return [
        _ms(phase["mean_ms"]),
        _percent(phase["share"]),
        *(_ms(phase[key]) for key in ("p50_ms", "p95_ms", "max_ms")),
    ]


def _loaders(stages: Iterable[Mapping[str, Any]]) -> Markup | None:
    """Return what each loader costs, of stages that have several."""
    rows = []
    for stage in stages:
        for each in stage.get("loaders") or ():
            parts = (each["causes"] or {}).get("wait") or {"": 0.0}
            part = max(parts, key=lambda name: parts[name])
            most = PART_WORDS[part] if parts[part] > 0 else None
            batches = None if each["batches"] is None else str(each["batches"])
            rows.append([stage["stage"], each["name"], _ms(each["wait_ms"]), batches, most])
    heads = ("stage", "loader", "wait, ms a step", "batches", "most of it")
    return section("Waits for each loader", table(heads, rows)) if rows else None


def _late_batches(
    causes: Mapping[str, Any] | None, loaders: Iterable[Mapping[str, Any]] | None
) -> Markup | None:
    if not causes:
        return None
    of = next((f" of {each['label']}" for each in loaders or () if each["causes"] == causes), "")
    parts = sorted(causes["wait"].items(), key=lambda item: -item[1])
    total = sum(ms for _, ms in parts)
    rows = [
        [PART_WORDS.get(name, name), bar(ms / total, "wait"), _ms(ms), _percent(ms / total)]
        for name, ms in parts
        if total > 0 and ms > 0
    ]
    late = causes["overtaken_share"]
    return section(
        "Why batches were late",
        element("p", f"The wait for one batch{of}, the mean of {causes['batches']}:"),
        table(("part", "", "ms", "share"), rows, class_="parts"),
        element("p", f"{late:.0%} of the batches came after later ones were done.")
        if late > 0
        else None,
        _sample_times(causes.get("sample_times")),
        _slow_samples(causes["slow_samples"]),
        _operations(causes["operations"]),
        _lines_of_code(causes.get("lines")),
    )


def _slow_samples(samples: Sequence[Mapping[str, Any]]) -> Child:
    rows = [
        [str(each["index"]), _ms(each["ms"]), _ms(each["typical_ms"]), each.get("path")]
        for each in samples
    ]
    heads = ("sample", "ms", "others", "file")
    title = element("h3", "Slowest samples that held up a batch")
    return [title, table(heads, rows)] if rows else None


def _operations(operations: Sequence[Mapping[str, Any]]) -> Child:
    rows = [
        [each["name"], _percent(each["share"]), f"{each['mean_ms']:.3g}", str(each["calls"])]
        for each in operations
    ]
    heads = ("operation", "share of reading", "ms a call", "calls")
    return [element("h3", "Operations on samples"), table(heads, rows)] if rows else None


def _lines_of_code(lines: Sequence[Mapping[str, Any]] | None) -> Child:
    if not lines:
        return None
    rows = [
        [
            f"{each['function']} ({each['file']}:{each['line']})",
            each["calls"],
            _percent(each["share"]),
            None if each["blocked_share"] is None else _percent(each["blocked_share"]),
            each["waits_in"],
        ]
        for each in lines
    ]
    heads = ("line of code", "calls", "share of reading", "of that waiting", "for a")
    return [element("h3", "Lines of code"), table(heads, rows)]


def _sample_times(times: Mapping[str, float] | None) -> Markup | None:
    if not times:
        return None
    p50, p95, p99 = (_ms(times[key]) for key in ("p50_ms", "p95_ms", "p99_ms"))
    return element(
        "p",
        f"Reading a sample takes {p50} ms in the middle, {p95} at the 95th percentile, {p99} at "
        f"the 99th, of {times['samples']} samples.",
    )


def _ranks(ranks: Iterable[Mapping[str, Any]] | None) -> Markup | None:
    if not ranks:
        return None
    keys = ("step_ms", "stall_ms", "wait_ms", "compute_ms")
    rows = [
        [
            str(each["rank"]),
            str(each.get("host", "")),
            *(_ms(each.get(key)) for key in keys),
            each.get("reason", ""),
        ]
        for each in ranks
    ]
    heads = ("rank", "host", "step ms", "stall", "wait", "compute", "most of its waits")
    return section("Ranks", table(heads, rows))


def _other_stages(stages: Iterable[Mapping[str, Any]]) -> Markup | None:
    rows = [
        [
            stage["stage"],
            str(stage["steps"]),
            duration_text(stage["duration_s"]),
            _ms(_mean(stage, "step")),
            _percent(stage.get("stall_share")),
            _rounded(stage.get("samples_per_s")),
        ]
        for stage in stages
    ]
    heads = ("stage", "steps", "took", "ms a step", "wait", "samples/s")
    return section("Other stages", table(heads, rows)) if rows else None


def _notes(report: Mapping[str, Any]) -> Markup | None:
    notes = [element("li", note) for note in report.get("notes", ())]
    return section("Notes", element("ul", notes)) if notes else None


def _machine(report: Mapping[str, Any]) -> Markup:
    facts = {**report.get("machine", {}), **report.get("versions", {})}
    shown = [
        element("span", element("b", name.replace("_", " ")), f" {value}")
        for name, value in facts.items()
    ]
    return element("footer", shown)


def _steps(stage: Mapping[str, Any]) -> str:
    return f"{stage['stage']} · {stage['steps']} steps in {duration_text(stage['duration_s'])}"


def _mean(stage: Mapping[str, Any], phase: str) -> float | None:
    found = stage.get(phase)
    return None if not found else found["mean_ms"]


def _ms(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"


def _times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"

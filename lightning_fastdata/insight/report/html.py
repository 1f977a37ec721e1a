"""The report as one page of HTML that needs nothing else: no network, no scripts, no fonts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.insight.measure.wall import PART_NAMES, STEP_PARTS
from lightning_fastdata.insight.model.finding import Gain, gain_text
from lightning_fastdata.insight.report.chart import STACK, timeline_section
from lightning_fastdata.insight.report.drawing import duration_text
from lightning_fastdata.insight.report.html_style import STYLE
from lightning_fastdata.insight.report.markup import (
    Child,
    Markup,
    bar,
    element,
    section,
    table,
)
from lightning_fastdata.insight.waits.attribution import PART_WORDS
from lightning_fastdata.types import STAGE_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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

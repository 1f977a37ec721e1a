"""Two runs compared: what became slower or faster, and whether it may."""

from __future__ import annotations

import math
import os
import string
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.errors import OptionsError, printable
from lightning_fastdata.insight.report import recorded
from lightning_fastdata.insight.report.summary_text import WIDTH, lines_html

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_SHOWN: Final = (
    "run_samples_per_s",
    "samples_per_s",
    "samples_per_s_if_data_were_free",
    "stall_percent",
    "step_ms",
    "step_p95_ms",
    "stall_ms",
    "stall_p95_ms",
    "wait_ms",
    "transfer_ms",
    "augment_ms",
    "compute_ms",
    "gap_ms",
    "cold_wait_ms",
    *recorded.WAIT_METRICS,
    *recorded.RUN_METRICS[1:],
)
_SHOWN_OF_OTHERS: Final = ("samples_per_s", "stall_percent", "step_ms")
_HIGHER_IS_BETTER: Final = frozenset(
    ("samples_per_s", "samples_per_s_if_data_were_free", "run_samples_per_s")
)
_NEITHER_IS_BETTER: Final = frozenset(("steps", "samples", "speedup_possible"))
_OUTCOME_STYLE: Final = {True: "bold red", False: "green"}
_VISIBLE_CHANGE: Final = 0.02
"""Smaller relative changes get no colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of both runs; None: not measured."""

    metric: str
    """Its name, with the stage before it if that is not training."""
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        """``b - a``."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def change_percent(self) -> float | None:
        """``100 (b - a) / a``; infinite if only a is 0."""
        if self.difference is None or not self.a:
            return math.inf if self.difference else self.difference
        return 100.0 * self.difference / self.a


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs, their metrics, and the conditions that were asked for.

    ``print(comparison.text())`` gives plain text; rich consoles and notebooks show it in colours.
    """

    a: str
    """Name of the run that the other is compared with."""
    b: str
    rows: tuple[Row, ...]
    """Every metric that either run measured."""
    outcomes: tuple[recorded.Outcome, ...] = ()
    """One for each condition, in their order."""
    notes: tuple[str, ...] = ()
    """What else differs and may be the reason: machine, versions, verdict."""

    @property
    def failed(self) -> bool:
        """Whether a condition holds."""
        return any(outcome.holds for outcome in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types; infinite changes are None."""
        return {
            "a": self.a,
            "b": self.b,
            "failed": self.failed,
            "metrics": {
                row.metric: {
                    "a": row.a,
                    "b": row.b,
                    "difference": row.difference,
                    "change_percent": _finite(row.change_percent),
                }
                for row in self.rows
            },
            "conditions": [
                {"text": one.condition.text, "found": _finite(one.found), "holds": one.holds}
                for one in self.outcomes
            ],
            "notes": list(self.notes),
        }

    def text(self, width: int = 80) -> str:
        """Return the comparison as plain ASCII text, but for what names and paths hold.

        Notes are wrapped at ``width`` columns; the table takes 80 and is never cut.
        """
        return "\n".join(text.rstrip() for text, _ in self._lines(width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for text, style in self._lines(options.max_width):
            yield Text(text, style=style, no_wrap=True, overflow="ignore")

    def _repr_html_(self) -> str:
        return lines_html([piece] for piece in self._lines(WIDTH))

    def _lines(self, width: int) -> Iterable[tuple[str, str]]:
        """Yield each line with its rich style."""
        yield f" a  {printable(self.a, keep='')}", ""
        yield f" b  {printable(self.b, keep='')}", ""
        yield "", ""
        asked = {one.condition.metric for one in self.outcomes}
        shown = [row for row in self.rows if _is_shown(row) or row.metric in asked]
        names = max((len(row.metric) for row in shown), default=6)
        yield f" {'metric':<{names}}  {'a':>9}  {'b':>9}  {'b - a':>9}  {'change':>8}", "bold"
        for row in shown:
            a, b = recorded.number_text(row.a), recorded.number_text(row.b)
            difference = recorded.signed_text(row.difference)
            change = recorded.signed_text(row.change_percent, "%")
            numbers = f"{a:>9}  {b:>9}  {difference:>9}  {change:>8}"
            yield f" {row.metric:<{names}}  {numbers}", _style(row)
        if self.outcomes:
            yield "", ""
        texts = max((len(one.condition.text) for one in self.outcomes), default=0)
        for one in self.outcomes:
            words = f"{one.condition.text:<{texts}}  it is {one.found_text}"
            yield f" {'FAIL' if one.holds else 'ok':<4}  {words}", _OUTCOME_STYLE[one.holds]
        if self.notes:
            yield "", ""
        wrapper = textwrap.TextWrapper(
            max(40, width), initial_indent=" note  ", subsequent_indent=" " * 7
        )
        for note in self.notes:
            yield from ((line, "dim") for line in wrapper.wrap(printable(note)))


def compare_files(
    a: str | os.PathLike[str], b: str | os.PathLike[str], fail_if: Iterable[str] = ()
) -> Comparison:
    """Return the comparison of two files that `RunReport.write_json` wrote; a comes before b.

    ``fail_if`` are conditions in the grammar of `lightning_fastdata.insight.report.recorded`.

    Raises:
        OptionsError: A file cannot be read or is no such report; a condition cannot be read, names
            an unknown metric, or one that was not measured in both runs.
    """
    conditions = [recorded.parse_condition(text) for text in fail_if]
    names = str(a), str(b)
    return compare(
        recorded.read_report(Path(a)), recorded.read_report(Path(b)), conditions, names=names
    )


def side_by_side(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of the metrics of several reports, as plain ASCII text but for their names.

    Args:
        reports: By name, as `read_report` returns them; behind the numbers of the later ones stands
            the change against the first one in percent.
    """
    letters = [string.ascii_lowercase[i % 26] + str(i // 26 or "") for i in range(len(reports))]
    pairs = zip(letters, reports, strict=True)
    lines = [f" {letter:<2} {printable(name, keep='')}" for letter, name in pairs]
    metrics = [recorded.report_metrics(report) for report in reports.values()]
    rows = [
        [Row(metric=name, a=metrics[0].get(name), b=each.get(name)) for each in metrics]
        for name in dict.fromkeys(name for each in metrics for name in each)
    ]
    shown = [row for row in rows if any(_is_shown(each) for each in row)]
    names = max((len(row[0].metric) for row in shown), default=6)
    lines += ["", f" {'metric':<{names}}" + "".join(f"  {letter:>17}" for letter in letters)]
    for row in shown:
        cells = [recorded.number_text(row[0].a)]
        for each in row[1:]:
            change = recorded.signed_text(each.change_percent, "%")
            cells.append(f"{recorded.number_text(each.b)} {f'({change})':>10}")
        lines.append(f" {row[0].metric:<{names}}" + "".join(f"  {cell:>17}" for cell in cells))
    kinds = [f"{a}: {_verdict(r)}" for a, r in zip(letters, reports.values(), strict=True)]
    return "\n".join([*lines, "", f" verdict  {'; '.join(kinds)}"])


def compare(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    conditions: Iterable[recorded.Condition] = (),
    *,
    names: tuple[str, str] = ("a", "b"),
) -> Comparison:
    """Return the comparison of two reports, as `RunReport.as_dict` gives them, called by names.

    Raises:
        OptionsError: A condition is about a metric that was not measured in both runs.
    """
    of_a, of_b = recorded.report_metrics(a), recorded.report_metrics(b)
    known = dict.fromkeys((*of_a, *of_b))
    rows = [Row(metric=name, a=of_a.get(name), b=of_b.get(name)) for name in known]
    by_name = {row.metric: row for row in rows}
    return Comparison(
        a=names[0],
        b=names[1],
        rows=tuple(row for row in rows if row.a is not None or row.b is not None),
        outcomes=tuple(_outcome(one, by_name, names) for one in conditions),
        notes=tuple(_other_differences(a, b)),
    )


def _outcome(
    condition: recorded.Condition, rows: Mapping[str, Row], names: tuple[str, str]
) -> recorded.Outcome:
    row = rows.get(condition.metric, Row(metric=condition.metric, a=None, b=None))
    missing = [name for name, value in zip(names, (row.a, row.b), strict=True) if value is None]
    if missing:
        raise OptionsError(
            f"The condition {condition.text!r} cannot be decided: {condition.metric} was not "
            f"measured in {' and '.join(missing)}. Leave the condition out, or record both runs "
            "so that they measure it."
        )
    found = {"value": row.b, "difference": row.difference, "percent": row.change_percent}
    return recorded.Outcome(condition=condition, found=found[condition.of] or 0.0)


def _other_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterable[str]:
    """Yield what else differs and may be the reason, or what the reader wants to know."""
    kinds = [_verdict(report) for report in (a, b)]
    if kinds[0] != kinds[1]:
        yield f"verdict: {kinds[0]} in a, {kinds[1]} in b"
    for group in ("machine", "versions"):
        of_a, of_b = a.get(group) or {}, b.get(group) or {}
        for name in dict.fromkeys((*of_a, *of_b)):
            if of_a.get(name) != of_b.get(name):
                yield f"{name}: {of_a.get(name, 'none')} in a, {of_b.get(name, 'none')} in b"


def _verdict(report: Mapping[str, Any]) -> str:
    verdict = report.get("verdict") or {}
    return f"{verdict['kind']} [{verdict['code']}]" if verdict else "none"


def _is_shown(row: Row) -> bool:
    stage, _, name = row.metric.rpartition(".")
    if not row.a and not row.b:
        return False
    return name in (_SHOWN_OF_OTHERS if stage else _SHOWN)


def _style(row: Row) -> str:
    """Return red for a visible change for the worse, green for the better."""
    name, change = row.metric.rpartition(".")[2], row.change_percent
    if name in _NEITHER_IS_BETTER or change is None or abs(change) < 100 * _VISIBLE_CHANGE:
        return ""
    return "green" if (change > 0) == (name in _HIGHER_IS_BETTER) else "red"


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value

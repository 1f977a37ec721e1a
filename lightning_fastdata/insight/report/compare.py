"""Two or more runs compared: what became slower or faster, and whether it may."""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from lightning_fastdata.errors import OptionsError, printable
from lightning_fastdata.insight.report import recorded

_SHOWN: Final = (
    *("run_samples_per_s", "samples_per_s", "samples_per_s_if_data_were_free", "stall_percent"),
    *("step_ms", "step_p95_ms", "stall_ms", "stall_p95_ms", "wait_ms", "transfer_ms"),
    *("augment_ms", "compute_ms", "gap_ms", "cold_wait_ms"),
    *recorded.WAIT_METRICS,
    *recorded.RUN_METRICS[1:],
)
_SHOWN_OF_OTHERS: Final = ("samples_per_s", "stall_percent", "step_ms")
_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_CONDITION: Final = re.compile(
    r"\s*(?P<metric>[A-Za-z_][\w.]*)\s*(?P<operator>>=|<=|>|<)\s*"
    r"(?P<sign>[+-]?)\s*(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<percent>%?)\s*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What must not be."""

    text: str
    """As it was written."""
    metric: str
    """Its name, with the stage before it if that is not training."""
    operator: str
    limit: float
    """Signed; in percent where ``of`` is ``"percent"``."""
    of: Literal["value", "difference", "percent"]
    """What is compared with the limit: b, b - a, or (b - a) / a in percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A condition, looked up in two runs."""

    condition: Condition
    found: float
    """What was compared with the limit. Infinite: a change in percent of what was 0."""

    @property
    def holds(self) -> bool:
        """Whether what must not be is."""
        return _OPERATORS[self.condition.operator](self.found, self.condition.limit)

    @property
    def found_text(self) -> str:
        """``found`` in words, e.g. ``+12.3%``."""
        if self.condition.of == "value":
            return number_text(self.found)
        return signed_text(self.found, "%" if self.condition.of == "percent" else "")


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
    """Two runs, their metrics, and the conditions that were asked for."""

    a: str
    """Name of the run that the other is compared with."""
    b: str
    rows: tuple[Row, ...]
    """Every metric that either run measured."""
    outcomes: tuple[Outcome, ...] = ()
    """One for each condition, in their order."""
    notes: tuple[str, ...] = ()
    """What else differs and may be the reason: machine, versions, verdict."""

    @property
    def failed(self) -> bool:
        """Whether a condition holds."""
        return any(outcome.holds for outcome in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types; infinite changes are None."""
        metrics = {
            row.metric: {
                "a": row.a,
                "b": row.b,
                "difference": row.difference,
                "change_percent": _finite(row.change_percent),
            }
            for row in self.rows
        }
        conditions = [
            {"text": one.condition.text, "found": _finite(one.found), "holds": one.holds}
            for one in self.outcomes
        ]
        told = {"a": self.a, "b": self.b, "failed": self.failed, "notes": list(self.notes)}
        return {**told, "metrics": metrics, "conditions": conditions}

    def text(self) -> str:
        """Return the comparison as plain ASCII text, but for what names and paths hold."""
        asked = {one.condition.metric for one in self.outcomes}
        shown = [row for row in self.rows if _is_shown(row) or row.metric in asked]
        names = max((len(row.metric) for row in shown), default=6)
        lines = [f" a  {printable(self.a, keep='')}", f" b  {printable(self.b, keep='')}", ""]
        lines += [f" {'metric':<{names}}  {'a':>9}  {'b':>9}  {'b - a':>9}  {'change':>8}"]
        for row in shown:
            numbers = f"{number_text(row.a):>9}  {number_text(row.b):>9}"
            difference, change = signed_text(row.difference), signed_text(row.change_percent, "%")
            lines.append(f" {row.metric:<{names}}  {numbers}  {difference:>9}  {change:>8}")
        texts = max((len(one.condition.text) for one in self.outcomes), default=0)
        outcomes = [
            f" {'FAIL' if one.holds else 'ok':<4}  {one.condition.text:<{texts}}  "
            f"it is {one.found_text}"
            for one in self.outcomes
        ]
        notes = [f" note  {printable(note)}" for note in self.notes]
        return "\n".join([*lines, *_behind_a_gap(outcomes), *_behind_a_gap(notes)])


def _behind_a_gap(lines: list[str]) -> list[str]:
    return ["", *lines] if lines else []


def compare_files(
    a: str | os.PathLike[str], b: str | os.PathLike[str], fail_if: Iterable[str] = ()
) -> Comparison:
    """Return the comparison of two files that `RunReport.write_json` wrote; a comes before b.

    ``fail_if`` are conditions as :func:`parse_condition` reads them.

    Raises:
        OptionsError: A file cannot be read or is no such report; a condition cannot be read, names
            an unknown metric, or one that was not measured in both runs.
    """
    conditions = [parse_condition(text) for text in fail_if]
    names = str(a), str(b)
    return compare(
        recorded.read_report(Path(a)), recorded.read_report(Path(b)), conditions, names=names
    )


def compare(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    conditions: Iterable[Condition] = (),
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


def _outcome(condition: Condition, rows: Mapping[str, Row], names: tuple[str, str]) -> Outcome:
    row = rows.get(condition.metric, Row(metric=condition.metric, a=None, b=None))
    missing = [name for name, value in zip(names, (row.a, row.b), strict=True) if value is None]
    if missing:
        raise OptionsError(
            f"The condition {condition.text!r} cannot be decided: {condition.metric} was not "
            f"measured in {' and '.join(missing)}. Leave the condition out, or record both runs "
            "so that they measure it."
        )
    found = {"value": row.b, "difference": row.difference, "percent": row.change_percent}
    return Outcome(condition=condition, found=found[condition.of] or 0.0)


def _other_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
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


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def parse_condition(text: str) -> Condition:
    """Return the condition that a text in the grammar of this module says.

    Raises:
        OptionsError: It is not in the grammar, or its metric is unknown.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise OptionsError(
            f"The condition {text!r} cannot be read. Write METRIC OP LIMIT with one of >, >=, <, "
            "<=: 'step_ms > +10%' (change in percent), 'stall_share > +0.02' (change) or "
            "'stall_percent > 5' (value)."
        )
    if found["percent"] and not found["sign"]:
        raise OptionsError(
            f"The condition {text!r} has a percentage without a sign. A change is written with "
            f"one: +{found['number']}% or -{found['number']}%."
        )
    metric = found["metric"].removeprefix(f"{recorded.MAIN_STAGE}.")
    name = metric.rpartition(".")[2]
    if name not in recorded.METRICS:
        near = difflib.get_close_matches(name, recorded.METRICS, n=3)
        meant = f" Did you mean {' or '.join(near)}?" if near else ""
        raise OptionsError(
            f"The condition {text!r} names an unknown metric, {name!r}.{meant} "
            f"Known are: {', '.join(recorded.METRICS)}; with 'val.' those of validation."
        )
    return Condition(
        text=text.strip(),
        metric=metric,
        operator=found["operator"],
        limit=float(found["sign"] + found["number"]),
        of="percent" if found["percent"] else "difference" if found["sign"] else "value",
    )


def number_text(value: float | None) -> str:
    """Return four digits, or all before the point; ``-`` for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def signed_text(value: float | None, unit: str = "") -> str:
    """Return the number with its sign, to a tenth where it is in percent; ``-`` for None."""
    if value is None:
        return "-"
    if unit or abs(value) >= 1000:
        return f"{value:+.{1 if unit else 0}f}{unit}"
    return f"{value:+.4g}"

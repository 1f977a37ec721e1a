"""Reports read back from their files and compared: what became slower, and whether it may."""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightning_fastdata.errors import OptionsError, printable
from lightning_fastdata.insight.measure.wall import PART_NAMES
from lightning_fastdata.insight.report.run_report import SCHEMA_VERSION
from lightning_fastdata.insight.waits.attribution import PARTS

_MAX_BYTES: Final = 64 << 20
"""Reports have some 100 kB."""
_MAIN_STAGE: Final = "train"
_PHASES: Final = ("step", "stall", "wait", "transfer", "augment", "compute", "gap")
_STATISTICS: Final = {"": "mean_ms", "_p50": "p50_ms", "_p95": "p95_ms", "_max": "max_ms"}
_OF_STAGE: Final = (
    *("samples_per_s", "samples_per_s_if_data_were_free", "speedup_possible", "stall_share"),
    *("cold_wait_ms", "duration_s", "steps", "samples"),
)
_SHOWN: Final = {
    *("samples_per_s", "samples_per_s_if_data_were_free", "stall_percent", "step_p95_ms"),
    *("stall_p95_ms", "cold_wait_ms", "run_samples_per_s", "run_s"),
    *(f"{phase}_ms" for phase in _PHASES),
    *(f"wait_{part}" for part in PARTS),
    *(f"run_{part}_s" for part in PART_NAMES),
}
_SHOWN_OF_OTHERS: Final = {"samples_per_s", "stall_percent", "step_ms"}
_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_CONDITION: Final = re.compile(
    r"\s*(?P<metric>[A-Za-z_][\w.]*)\s*(?P<operator>>=|<=|>|<)\s*(?P<sign>[+-]?)\s*"
    r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<percent>%?)\s*"
)


def read_report(path: Path) -> Mapping[str, Any]:
    """Return a JSON report that `RunReport.write_json` of this version wrote.

    Raises:
        OptionsError: The file cannot be read, has more than 64 MiB, or is no whole report.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise OptionsError(
            f"The report {path} cannot be read: {error.strerror or error}. The callback writes "
            "report.json into the trainer's log_dir, now and then and when a fit ends."
        ) from error
    if len(data) > _MAX_BYTES:
        raise OptionsError(f"{path} is no report: it has more than {_MAX_BYTES >> 20} MiB.")
    try:
        report: object = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise OptionsError(f"{path} is no report: it is not JSON in UTF-8 ({error}).") from error
    if not isinstance(report, dict) or "schema_version" not in report:
        raise OptionsError(
            f"{path} is no report of this package: it has no schema_version. Name a report.json."
        )
    if report["schema_version"] != SCHEMA_VERSION:
        raise OptionsError(
            f"{path} has schema version {report['schema_version']!r}; this version of fastdata "
            f"reads {SCHEMA_VERSION}. Its page beside it shows it; use the version that wrote it, "
            "or record the run again."
        )
    if not _is_whole(report):
        raise OptionsError(f"{path} is no whole report: a part is damaged. Record it again.")
    return report


def _no_number(text: str) -> float:
    # Not a number is neither above nor below any limit, so that every condition would pass.
    raise ValueError(f"{text} is not a number")


def _is_whole(report: Mapping[str, Any]) -> bool:
    """Return whether all that is read of a report is as this package writes it."""
    try:
        words = [word for line in report["summary"] for text, how in line for word in (text, how)]
        list(_other_differences(report, {}))  # all of them: one may end in an error
        numbers = [each for each in report_metrics(report).values() if each is not None]
        finite = all(type(each) in (int, float) and math.isfinite(each) for each in numbers)
    except (LookupError, AttributeError, TypeError, ValueError, OverflowError):
        return False
    return finite and all(isinstance(word, str) for word in words)


def report_metrics(report: Mapping[str, Any]) -> dict[str, float | None]:
    """Return all metrics of a report by name, of other stages than training with these before it.

    ``PHASE_ms`` is a mean, ``PHASE_{p50,p95,max}_ms`` are what they say, ``wait_PART_ms`` is a part
    of the mean wait for a batch (`WaitParts`), ``run_PART_s`` a part of the wall time of the whole
    run (`WallTime`). None: not measured.
    """
    metrics = {
        f"{'' if stage == _MAIN_STAGE else printable(stage, keep='') + '.'}{name}": value
        for stage, values in report["stages"].items()
        for name, value in _stage_metrics(values)
    }
    wall = report.get("wall") or {}
    parts, absent = wall.get("parts_s") or {}, 0.0 if wall else None
    metrics |= {"run_samples_per_s": wall.get("samples_per_s"), "run_s": wall.get("total_s")}
    return metrics | {f"run_{part}_s": parts.get(part, absent) for part in PART_NAMES}


def _stage_metrics(stage: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    for phase in _PHASES:
        summary = stage.get(phase) or {}
        yield from ((f"{phase}{end}_ms", summary.get(key)) for end, key in _STATISTICS.items())
    share = stage.get("stall_share")
    yield "stall_percent", None if share is None else 100.0 * share
    yield from ((name, stage.get(name)) for name in _OF_STAGE)
    causes = stage.get("causes") or {}
    yield "overtaken_share", causes.get("overtaken_share")
    wait = causes.get("wait") or {}
    yield from ((f"wait_{part}", wait.get(part)) for part in PARTS)


class Row(NamedTuple):
    """One metric of both runs; None: not measured."""

    a: float | None
    b: float | None
    difference: float | None
    """``b - a``."""
    change_percent: float | None
    """``100 (b - a) / a``; infinite if only a is 0."""

    @classmethod
    def of(cls, a: float | None, b: float | None) -> Row:
        """Return what the two runs have measured, and how it differs."""
        if a is None or b is None:
            return cls(a, b, None, None)
        return cls(a, b, b - a, 100.0 * (b - a) / a if a else math.inf if b else 0.0)


class Outcome(NamedTuple):
    """What must not be, looked up in two runs."""

    text: str
    """The condition as it was written."""
    metric: str
    found: float
    """What was compared with the limit. Infinite: a change in percent of what was 0."""
    found_text: str
    """The same in words, e.g. ``+12.3%``."""
    holds: bool
    """Whether what must not be is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs, their metrics, and the conditions that were asked for."""

    a: str
    """Name of the run that the other is compared with."""
    b: str
    rows: Mapping[str, Row]
    """Every metric that either run measured."""
    outcomes: tuple[Outcome, ...]
    """One for each condition, in their order."""
    notes: tuple[str, ...]
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
            "notes": list(self.notes),
            "metrics": {
                name: {key: _finite(value) for key, value in row._asdict().items()}
                for name, row in self.rows.items()
            },
            "conditions": [
                {"text": one.text, "found": _finite(one.found), "holds": one.holds}
                for one in self.outcomes
            ],
        }

    def text(self) -> str:
        """Return the comparison as plain ASCII text, but for what names and paths hold."""
        asked = {one.metric for one in self.outcomes}
        shown = {name: row for name, row in self.rows.items() if name in asked or _shown(name, row)}
        width = max(map(len, shown), default=6)
        lines = [f" a  {printable(self.a, keep='')}", f" b  {printable(self.b, keep='')}", ""]
        lines += [f" {'metric':<{width}}  {'a':>9}  {'b':>9}  {'b - a':>9}  {'change':>8}"]
        for name, row in shown.items():
            numbers = f"{_number(row.a):>9}  {_number(row.b):>9}  {_number(row.difference, '+'):>9}"
            lines += [f" {name:<{width}}  {numbers}  {_number(row.change_percent, '+', '%'):>8}"]
        width = max((len(one.text) for one in self.outcomes), default=0)
        outcomes = [
            f" {'FAIL' if one.holds else 'ok':<4}  {one.text:<{width}}  it is {one.found_text}"
            for one in self.outcomes
        ]
        notes = [f" note  {printable(note)}" for note in self.notes]
        for more in filter(None, (outcomes, notes)):
            lines += ["", *more]
        return "\n".join(lines)


def _shown(name: str, row: Row) -> bool:
    stage, _, last = name.rpartition(".")
    return bool(row.a or row.b) and last in (_SHOWN_OF_OTHERS if stage else _SHOWN)


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def _number(value: float | None, sign: str = "", unit: str = "") -> str:
    """Return four digits, or all before the point, in percent to a tenth; ``-`` for None."""
    if value is None:
        return "-"
    digits = ".1f" if unit else ".0f" if abs(value) >= 1000 else ".4g"
    return f"{value:{sign}{digits}}{unit}"


def compare_files(
    a: str | os.PathLike[str], b: str | os.PathLike[str], fail_if: Iterable[str] = ()
) -> Comparison:
    """Return the comparison of two files that `RunReport.write_json` wrote; a comes before b.

    ``fail_if`` are conditions on b, or on its change over a, e.g. ``step_ms > +10%``.

    Raises:
        OptionsError: A file cannot be read or is no such report; a condition cannot be read, or
            names what was not measured in both runs.
    """
    reports = read_report(Path(a)), read_report(Path(b))
    of_a, of_b = map(report_metrics, reports)
    rows = {name: Row.of(of_a.get(name), of_b.get(name)) for name in (*of_a, *of_b)}
    rows = {name: row for name, row in rows.items() if row.a is not None or row.b is not None}
    return Comparison(
        a=str(a),
        b=str(b),
        rows=rows,
        outcomes=tuple(_outcome(text, rows, {str(a): of_a, str(b): of_b}) for text in fail_if),
        notes=tuple(_other_differences(*reports)),
    )


def _outcome(
    text: str, rows: Mapping[str, Row], runs: Mapping[str, Mapping[str, float | None]]
) -> Outcome:
    """Return what a condition says of two runs, each with what it has measured."""
    read = _CONDITION.fullmatch(text)
    if read is None or (read["percent"] and not read["sign"]):
        raise OptionsError(
            f"The condition {text!r} cannot be read. Write METRIC OP LIMIT with one of >, >=, <, "
            "<=: 'step_ms > +10%' (change in percent), 'stall_share > +0.02' (change) or "
            "'stall_percent > 5' (value)."
        )
    metric = read["metric"].removeprefix(f"{_MAIN_STAGE}.")
    missing = [run for run, measured in runs.items() if measured.get(metric) is None]
    if missing:
        raise OptionsError(
            f"The condition {text!r} cannot be decided: {metric} was not measured in "
            f"{' and '.join(missing)}. Known are: {', '.join(rows)}."
        )
    row = rows[metric]
    if read["percent"]:
        found, words = row.change_percent, _number(row.change_percent, "+", "%")
    elif read["sign"]:
        found, words = row.difference, _number(row.difference, "+")
    else:
        found, words = row.b, _number(row.b)
    holds = _OPERATORS[read["operator"]](found or 0.0, float(read["sign"] + read["number"]))
    return Outcome(text.strip(), metric, found or 0.0, words, holds)


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

"""Reports read back from their files and compared: what became slower, and whether it may."""

from __future__ import annotations

import difflib
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from lightning_fastdata.errors import OptionsError, printable
from lightning_fastdata.insight.measure.wall import PART_NAMES
from lightning_fastdata.insight.report.run_report import SCHEMA_VERSION
from lightning_fastdata.insight.waits.attribution import WaitParts

_MAX_BYTES: Final = 64 << 20
"""Reports have some 100 kB."""
_MAIN_STAGE: Final = "train"
_PHASES: Final = ("step", "stall", "wait", "transfer", "augment", "compute", "gap")
_STATISTICS: Final = {"": "mean_ms", "_p50": "p50_ms", "_p95": "p95_ms", "_max": "max_ms"}
_OF_PHASES: Final = {
    f"{phase}{suffix}_ms": (phase, field)
    for phase in _PHASES
    for suffix, field in _STATISTICS.items()
}
_OF_STAGE: Final = (
    *("samples_per_s", "samples_per_s_if_data_were_free", "speedup_possible", "stall_share"),
    *("cold_wait_ms", "duration_s", "steps", "samples", "dropped_steps"),
)
_OF_WAIT: Final = {f"wait_{part.name}": part.name for part in fields(WaitParts)}
_OF_RUN: Final = {f"run_{part}_s": part for part in PART_NAMES}
METRICS: Final = (
    *(*_OF_PHASES, "stall_percent", *_OF_STAGE, "overtaken_share", *_OF_WAIT),
    *("run_samples_per_s", "run_s", *_OF_RUN),
)
"""What can be compared. ``PHASE_ms`` is a mean, ``PHASE_{p50,p95,max}_ms`` are what they say,
``wait_PART_ms`` is a part of the mean wait for a batch (`WaitParts`), ``run_PART_s`` a part of the
wall time of the whole run (`WallTime`)."""
_SHOWN: Final = (
    *("run_samples_per_s", "samples_per_s", "samples_per_s_if_data_were_free", "stall_percent"),
    *("step_ms", "step_p95_ms", "stall_ms", "stall_p95_ms", "wait_ms", "transfer_ms"),
    *("augment_ms", "compute_ms", "gap_ms", "cold_wait_ms", *_OF_WAIT, "run_s", *_OF_RUN),
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


# -- reports --------------------------------------------------------------------------------------


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
        report: object = json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise OptionsError(f"{path} is no report: it is not text in UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise OptionsError(f"{path} is no report: it is not JSON ({error}).") from error
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
    missing = _missing(report)
    if missing:
        raise OptionsError(f"{path} is no whole report: {missing} Record it again.")
    return report


def _no_number(text: str) -> float:
    # Not a number is neither above nor below any limit, so that every condition would pass.
    raise ValueError(f"{text} is not a number")


def _missing(report: Mapping[str, Any]) -> str:
    """Return what of a report is not as this package writes it; empty: nothing."""
    stages, verdict = report.get("stages"), report.get("verdict") or {"kind": "", "code": ""}
    if not isinstance(stages, dict) or not all(isinstance(one, dict) for one in stages.values()):
        return "its stages are missing."
    groups = (verdict, report.get("machine") or {}, report.get("versions") or {})
    whole = all(isinstance(one, dict) for one in groups) and {"kind", "code"} <= verdict.keys()
    try:
        numbers = [one for one in report_metrics(report).values() if one is not None]
        whole &= all(type(one) in (int, float) and math.isfinite(one) for one in numbers)
        lines = report["summary"]
        whole &= all(isinstance(text, str) for line in lines for pair in line for text in pair)
        whole &= all(len(pair) == 2 for line in lines for pair in line)
    except (LookupError, AttributeError, TypeError, OverflowError):
        whole = False
    return "" if whole else "its metrics, machine, versions, verdict or summary are damaged."


def report_metrics(report: Mapping[str, Any]) -> dict[str, float | None]:
    """Return all metrics of a report by name, of other stages than training with these before it.

    None: not measured.
    """
    metrics: dict[str, float | None] = {}
    for stage, values in report["stages"].items():
        prefix = "" if stage == _MAIN_STAGE else f"{printable(stage, keep='')}."
        metrics |= {f"{prefix}{name}": value for name, value in _stage_metrics(values).items()}
    wall = report.get("wall") or {}
    parts = wall.get("parts_s") or {}
    metrics |= {"run_samples_per_s": wall.get("samples_per_s"), "run_s": wall.get("total_s")}
    # What is not in it took 0 s.
    return metrics | {
        name: parts.get(part, 0.0) if wall else None for name, part in _OF_RUN.items()
    }


def _stage_metrics(stage: Mapping[str, Any]) -> dict[str, float | None]:
    causes, share = stage.get("causes") or {}, stage.get("stall_share")
    parts = causes.get("wait") or {}
    return {
        **{name: (stage.get(phase) or {}).get(key) for name, (phase, key) in _OF_PHASES.items()},
        "stall_percent": None if share is None else 100.0 * share,
        **{name: stage.get(name) for name in _OF_STAGE},
        "overtaken_share": causes.get("overtaken_share"),
        **{name: parts.get(part) for name, part in _OF_WAIT.items()},
    }


# -- comparisons ----------------------------------------------------------------------------------


class Row(NamedTuple):
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


class Outcome(NamedTuple):
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
    reports = read_report(Path(a)), read_report(Path(b))
    return compare(*reports, conditions, names=(str(a), str(b)))


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
    of_a, of_b = report_metrics(a), report_metrics(b)
    rows = {name: Row(name, of_a.get(name), of_b.get(name)) for name in (*of_a, *of_b)}
    return Comparison(
        a=names[0],
        b=names[1],
        rows=tuple(row for row in rows.values() if row.a is not None or row.b is not None),
        outcomes=tuple(_outcome(one, rows, names) for one in conditions),
        notes=tuple(_other_differences(a, b)),
    )


def _outcome(condition: Condition, rows: Mapping[str, Row], names: tuple[str, str]) -> Outcome:
    row = rows.get(condition.metric, Row(condition.metric, None, None))
    missing = [name for name, value in zip(names, (row.a, row.b), strict=True) if value is None]
    if missing:
        raise OptionsError(
            f"The condition {condition.text!r} cannot be decided: {condition.metric} was not "
            f"measured in {' and '.join(missing)}. Leave the condition out, or record both runs "
            "so that they measure it."
        )
    found = {"value": row.b, "difference": row.difference, "percent": row.change_percent}
    return Outcome(condition, found[condition.of] or 0.0)


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
    """Return the condition that a text says, e.g. ``step_ms > +10%``.

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
    metric = found["metric"].removeprefix(f"{_MAIN_STAGE}.")
    name = metric.rpartition(".")[2]
    if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, n=3)
        meant = f" Did you mean {' or '.join(near)}?" if near else ""
        raise OptionsError(
            f"The condition {text!r} names an unknown metric, {name!r}.{meant} "
            f"Known are: {', '.join(METRICS)}; with 'val.' those of validation."
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

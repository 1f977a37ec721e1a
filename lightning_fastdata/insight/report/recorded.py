"""A report read back from its file: what it measured, by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, get_args, get_origin, get_type_hints

from lightning_fastdata.errors import OptionsError, printable
from lightning_fastdata.insight.measure.metrics import StageSummary
from lightning_fastdata.insight.measure.wall import PART_NAMES, Activity, WallTime
from lightning_fastdata.insight.report.run_report import SCHEMA_VERSION, RunReport
from lightning_fastdata.insight.verdicts.catalogue import Verdict
from lightning_fastdata.insight.waits.attribution import WaitParts
from lightning_fastdata.insight.waits.causes import WaitCauses
from lightning_fastdata.insight.waits.ranks import RankTiming
from lightning_fastdata.insight.waits.several_loaders import LoaderWait
from lightning_fastdata.tuning.moves import Move

READABLE_SCHEMAS: Final = (2, 3, 4, 5, 6, 7, 8)
"""Versions of the JSON report that can be compared, also with each other."""

_MAX_BYTES: Final = 64 << 20
"""Reports have some 100 kB."""

MAIN_STAGE: Final = "train"
_PHASES: Final = ("step", "stall", "wait", "transfer", "augment", "compute", "gap")
_STATISTICS: Final = {"": "mean_ms", "_p50": "p50_ms", "_p95": "p95_ms", "_max": "max_ms"}
_PHASE_METRICS: Final = {
    f"{phase}{suffix}_ms": (phase, field)
    for phase in _PHASES
    for suffix, field in _STATISTICS.items()
}
_STAGE_METRICS: Final = (
    "samples_per_s",
    "samples_per_s_if_data_were_free",
    "speedup_possible",
    "stall_share",
    "cold_wait_ms",
    "duration_s",
    "steps",
    "samples",
    "dropped_steps",
)
WAIT_METRICS: Final = {f"wait_{part.name}": part.name for part in fields(WaitParts)}

_METRICS_OF_STAGE: Final = (
    *_PHASE_METRICS,
    "stall_percent",
    *_STAGE_METRICS,
    "overtaken_share",
    *WAIT_METRICS,
)
_RUN_PARTS: Final = {f"run_{part}_s": part for part in PART_NAMES}
RUN_METRICS: Final = ("run_samples_per_s", "run_s", *_RUN_PARTS)
METRICS: Final = (*_METRICS_OF_STAGE, *RUN_METRICS)
"""What can be compared. ``PHASE_ms`` is a mean, ``PHASE_{p50,p95,max}_ms`` are what they say,
``wait_PART_ms`` is a part of the mean wait for a batch (`WaitParts`), ``run_PART_s`` a part of the
wall time of the whole run (`WallTime`)."""


def read_report(path: Path) -> Mapping[str, Any]:
    """Return a JSON report that `RunReport.write_json` wrote.

    Raises:
        OptionsError: The file cannot be read, has more than 64 MiB, or is no report of a known
            schema version.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise OptionsError(f"{path} is no report: it has more than {_MAX_BYTES >> 20} MiB.")
        report: object = json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except OSError as error:
        reason = error.strerror or error
        raise OptionsError(
            f"The report {path} cannot be read: {reason}. The callback writes report.json into "
            "the trainer's log_dir, now and then and when a fit ends."
        ) from error
    except UnicodeDecodeError as error:
        raise OptionsError(f"{path} is no report: it is not text in UTF-8.") from error
    except OptionsError:
        raise
    except (ValueError, RecursionError) as error:
        raise OptionsError(f"{path} is no report: it is not JSON ({error}).") from error
    if not isinstance(report, dict) or "schema_version" not in report:
        raise OptionsError(
            f"{path} is no report of this package: it has no schema_version. Name a report.json."
        )
    version = report["schema_version"]
    if version not in READABLE_SCHEMAS:
        raise OptionsError(
            f"{path} has schema version {version!r}; this version of fastdata reads "
            f"{READABLE_SCHEMAS[0]} to {READABLE_SCHEMAS[-1]}. Compare with the version that wrote "
            "it, or record the run again."
        )
    stages = report.get("stages")
    if not isinstance(stages, dict) or not all(isinstance(one, dict) for one in stages.values()):
        raise OptionsError(f"{path} is no whole report: its stages are missing. Record it again.")
    if not _is_whole(report):
        raise OptionsError(
            f"{path} is no whole report: its metrics, machine, versions or verdict are not what "
            "this package writes. Record it again."
        )
    return report


def as_run_report(report: Mapping[str, Any], path: Path) -> RunReport:
    """Return what `read_report` returned as the `RunReport` that was written to that path.

    Without the single values of the newest steps, which only the page shows.

    Raises:
        OptionsError: Another version of this package wrote it, or it is not whole.
    """
    if report["schema_version"] != SCHEMA_VERSION:
        raise OptionsError(
            f"{path} has schema version {report['schema_version']}, and this version of fastdata "
            f"prints those of {SCHEMA_VERSION}. Its page beside it shows it; `fastdata compare` "
            "reads its numbers."
        )
    try:
        wall = report["wall"]
        found = RunReport(
            stages=tuple(_revived(StageSummary, each) for each in report["stages"].values()),
            verdict=_revived(Verdict, report["verdict"]),
            ended=report["ended"],
            ranks=_revived(tuple[RankTiming, ...], report["ranks"]),
            moves=_revived(tuple[Move, ...], report["moves"]),
            wall=None if wall is None else _wall(wall),
            device_minutes_waited=report["device_minutes_waited"],
            notes=tuple(report["notes"]),
            versions=report["versions"],
            machine=report["machine"],
            run=report["run"],
        )
        found.text()  # what it holds may have other types than a report has
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise OptionsError(
            f"{path} is no whole report: {type(error).__name__}: {error}. Record it again."
        ) from error
    return found


_NAMES: Final = {each.__name__: each for each in (WaitCauses, LoaderWait)}
"""What annotations name that their modules import for the type checker only."""


def _revived(kind: Any, value: Any) -> Any:
    """Return plain data as the dataclass, or tuple of them, that it was made from."""
    if value is None:
        return None
    if get_origin(kind) is tuple and isinstance(value, list):
        inner = get_args(kind)
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        return tuple(_revived(each, v) for each, v in zip(kinds, value, strict=True))
    choices = [each for each in get_args(kind) if is_dataclass(each)]
    kind = choices[0] if choices else kind
    if not is_dataclass(kind):
        return value
    hints = get_type_hints(kind, localns=_NAMES)
    known = [each.name for each in fields(kind) if each.name in value]
    made: Any = kind
    return made(**{name: _revived(hints[name], value[name]) for name in known})


def _wall(values: Mapping[str, Any]) -> WallTime:
    named = {
        Activity(part, name): seconds
        for part, of_part in values["named_s"].items()
        for name, seconds in of_part.items()
    }
    known = {name: values[name] for name in ("total_s", "parts_s", "steps", "samples")}
    return WallTime(**known, named_s=named)


def _is_whole(report: Mapping[str, Any]) -> bool:
    """Return whether all that is looked up in a report has the types that it should have."""
    verdict = report.get("verdict") or {"kind": "", "code": ""}
    groups = (verdict, report.get("machine") or {}, report.get("versions") or {})
    if not all(isinstance(one, dict) for one in groups) or not {"kind", "code"} <= verdict.keys():
        return False
    try:
        values = report_metrics(report).values()
        numbers = [one for one in values if one is not None]
        return all(type(one) in (int, float) and math.isfinite(one) for one in numbers)
    except (AttributeError, TypeError, OverflowError):
        return False


def report_metrics(report: Mapping[str, Any]) -> dict[str, float | None]:
    """Return all metrics of a report by name; None = not measured."""
    metrics: dict[str, float | None] = {}
    for stage, values in report.get("stages", {}).items():
        prefix = "" if stage == MAIN_STAGE else f"{printable(stage, keep='')}."
        metrics |= {f"{prefix}{name}": value for name, value in _stage_metrics(values).items()}
    return metrics | _run_metrics(report.get("wall") or {})


def _no_number(text: str) -> float:
    # Not a number is neither above nor below any limit, so that every condition would pass.
    raise ValueError(f"{text} is not a number")


def _stage_metrics(stage: Mapping[str, Any]) -> dict[str, float | None]:
    causes = stage.get("causes") or {}
    parts, share = causes.get("wait") or {}, stage.get("stall_share")
    found = {
        name: (stage.get(phase) or {}).get(field) for name, (phase, field) in _PHASE_METRICS.items()
    }
    found["stall_percent"] = None if share is None else 100.0 * share
    found |= {name: stage.get(name) for name in _STAGE_METRICS}
    found["overtaken_share"] = causes.get("overtaken_share")
    return found | {name: parts.get(part) for name, part in WAIT_METRICS.items()}


def _run_metrics(wall: Mapping[str, Any]) -> dict[str, float | None]:
    parts = wall.get("parts_s") or {}
    found = {"run_samples_per_s": wall.get("samples_per_s"), "run_s": wall.get("total_s")}
    if wall:  # what is not in it took 0 s
        found |= {name: parts.get(part, 0.0) for name, part in _RUN_PARTS.items()}
    return {name: found.get(name) for name in RUN_METRICS}

"""Reports read back from their files, and two of them side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning_fastdata.errors import OptionsError, printable
from lightning_fastdata.insight.report.run_report import SCHEMA_VERSION

_MAX_BYTES: Final = 64 << 20
"""Reports have some 100 kB."""
_DEEPEST: Final = 8
"""Reports are nested less deeply; a file that was made to break the reader may be more."""
_MEASURED: Final = re.compile(
    r"stages\.\w+\.(steps|samples_per_s\w*|stall_share|cold_wait_ms|\w+\.mean_ms"
    r"|(step|stall)\.p95_ms|causes\.wait\.\w+)|wall\.(total_s|samples_per_s|parts_s\.\w+)"
)
"""What is shown of two reports, by its place in the JSON."""
_ABOUT: Final = re.compile(r"verdict\.(kind|code)|(machine|versions)\..+")
"""What is shown where it differs."""


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
        report: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise OptionsError(f"{path} is no report: it is not JSON in UTF-8 ({error}).") from error
    if not isinstance(report, dict) or "schema_version" not in report:
        raise OptionsError(
            f"{path} is no report of this package: it has no schema_version. Name a report.json."
        )
    if report["schema_version"] != SCHEMA_VERSION:
        raise OptionsError(
            f"{path} has schema version {report['schema_version']!r}; this version of fastdata "
            f"reads {SCHEMA_VERSION}. Use the version that wrote it, or record the run again."
        )
    summary = report.get("summary")
    if not isinstance(summary, list) or not all(isinstance(line, str) for line in summary):
        raise OptionsError(f"{path} is no whole report: a part is damaged. Record it again.")
    return report


def side_by_side(a: Path, b: Path) -> str:
    """Return what was measured in two runs as a table, and below it what else differs.

    Each row has the place in the reports, the number of either run there, ``-`` where it was not
    measured, and by how much that of ``b`` is larger.

    Raises:
        OptionsError: As :func:`read_report`.
    """
    of_a, of_b = (dict(_leaves(read_report(path))) for path in (a, b))
    both = {name: (of_a.get(name), of_b.get(name)) for name in (*of_a, *of_b)}
    numbers = {n: pair for n, pair in both.items() if _MEASURED.fullmatch(n) and any(pair)}
    width = max(map(len, numbers), default=0)
    lines = [f" a  {a}", f" b  {b}", "", f" {'':<{width}}  {'a':>9}  {'b':>9}  {'change':>8}"]
    for name, pair in numbers.items():
        one, two = map(_written, pair)
        lines.append(f" {name:<{width}}  {one:>9}  {two:>9}  {_change(*pair):>8}".rstrip())
    lines += [
        f" note  {name}: {_written(one)} in a, {_written(two)} in b"
        for name, (one, two) in both.items()
        if _ABOUT.fullmatch(name) and one != two
    ]
    return "\n".join(printable(line, keep="") for line in lines)


def _leaves(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Yield all that a report holds, by its place: keys, joined by dots."""
    if not isinstance(value, dict) or place.count(".") > _DEEPEST:
        yield place.removeprefix("."), value
        return
    for key, part in value.items():
        yield from _leaves(part, f"{place}.{key}")


def _written(value: object) -> str:
    """Return four digits, or all before the point; ``-`` for what was not measured."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _change(one: object, two: object) -> str:
    """Return by how much the second number is larger, in percent; empty where nobody can say."""
    if not isinstance(one, int | float) or not isinstance(two, int | float):
        return ""
    with suppress(OverflowError, ZeroDivisionError):
        return f"{100 * (two / one - 1):+.1f}%"
    return ""

"""A run reported to people and to programs: a summary in lines, JSON, a page; two side by side."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from lightning_fastdata.errors import OptionsError, check, is_whole, printable
from lightning_fastdata.host.system_calls import write_atomically
from lightning_fastdata.insight.finding import gain_text, steps_text
from lightning_fastdata.insight.ranks import RankTiming, ranks_line
from lightning_fastdata.insight.steps import Columns, StageSummary, mean_ms
from lightning_fastdata.insight.verdict import Verdict
from lightning_fastdata.insight.waits import cause_lines
from lightning_fastdata.insight.wall import WallTime, wall_text
from lightning_fastdata.loading.tuner import Move
from lightning_fastdata.types import STAGE_WORDS

SCHEMA_VERSION = 12
"""Version of the form of the JSON report; raised when the form changes."""
_MOST_REMEDIES = 2
_MOST_MOVES = 3

_TO_ASCII = str.maketrans("─·→…█▉▊▋▌▍▎▏", "-|>.#####   ")
_INDENT = 7
_NARROWEST, _WIDEST = 60, 120
_BAR_SPACE = 42
"""Number of columns in a phase's row that the bar does not take."""
_LONG_PATH = re.compile(r"[^\s()'\"]*/[^\s()'\"/]+/([^\s()'\"/]+/[^\s()'\"/]+)")
"""Pattern of a path of more than two parts. Lines show the last two, page and JSON all."""

_T = TypeVar("_T")

WIDTH: Final = 100
"""Number of columns for which lines are laid out on loggers' boards."""
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MAX_BYTES: Final = 64 << 20
"""Most bytes of a file that is read as a report; reports have some 10 kB."""
_MARKS: Final = (b'"schema_version"', b"<title>fastdata")
"""What a report, or its page, has in its first ``_BEGINS_BYTES``."""
_BEGINS_BYTES: Final = 1024
_DEEPEST: Final = 8
"""Depth to which a report is taken apart. Reports are nested less; a hostile file may be more."""
_MEASURED: Final = re.compile(
    r"stages\.\w+\.(steps|samples_per_s\w*|stall_share|cold_wait_ms|\w+\.mean_ms"
    r"|(step|stall)\.p95_ms|causes\.wait\.\w+)|wall\.(total_s|samples_per_s|parts_s\.\w+)"
)
"""Pattern of the places in the JSON whose values are compared between two reports."""
_ABOUT: Final = re.compile(r"verdict\.(kind|code)|(machine|versions)\..+")
"""Pattern of the places in the JSON that are shown where two reports differ."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunReport:
    """Everything worth keeping of one run.

    ``print(report)`` gives the summary, :meth:`write_json` and :meth:`write_html` everything.
    """

    stages: tuple[StageSummary, ...]
    """Stages of the run: the first, shown in full, has the verdict; each other gets a line."""
    verdict: Verdict | None = None
    """What limits the first stage."""
    recent: Mapping[str, Columns] = field(default_factory=dict, compare=False)
    """Stage name -> the single values of its newest steps, which the page shows; reports are equal
    without them."""
    ended: bool = True
    """Whether the run had ended; False: it went on when this was measured."""
    ranks: tuple[RankTiming, ...] = ()
    """Mean times of the training steps of each rank, by rank; empty with one rank."""
    moves: tuple[Move, ...] = ()
    """Changes that the tuner made to the loaders of the first stage, the newest last."""
    wall: WallTime | None = None
    """Where the wall time of the run went; None where the user's own loop was timed."""
    device_minutes_waited: float | None = None
    """Minutes in which the devices were idle because of data, added up over them; None outside of
    training."""
    notes: tuple[str, ...] = ()
    """Decisions and limits to know about, one sentence each."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package name -> version."""
    machine: Mapping[str, str | int | float] = field(default_factory=dict)
    """Name of a fact of the machine, with its unit -> value."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types; keys of unmeasured numbers hold None."""
        return {
            "schema_version": SCHEMA_VERSION,
            "summary": self.lines(),
            "ended": self.ended,
            "stages": {stage.stage: _stage_as_dict(stage) for stage in self.stages},
            "verdict": None if self.verdict is None else _verdict_as_dict(self.verdict),
            "wall": None if self.wall is None else self.wall.as_dict(),
            "device_minutes_waited": self.device_minutes_waited,
            "ranks": [dataclasses.asdict(rank) for rank in self.ranks],
            "moves": [dataclasses.asdict(move) for move in self.moves],
            "notes": list(self.notes),
            "versions": dict(self.versions),
            "machine": dict(self.machine),
        }

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        stages = ", ".join(f"{stage.stage} {steps_text(stage.steps)}" for stage in self.stages)
        verdict = "" if self.verdict is None else f", {self.verdict.kind} {self.verdict.code}"
        so_far = "" if self.ended else " so far"
        return f"<RunReport: {stages or 'nothing was measured'}{so_far}{verdict}>"

    def write_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as JSON and return the path; its folder is created.

        Readers see the old file or the new one, never a part. In a folder the file is
        ``report.json``.

        Raises:
            OptionsError: The path is empty, an address, or that of something else: a device, say.
        """
        text = json.dumps(self.as_dict(), indent=2, allow_nan=False)
        return write_atomically(report_file(path, ".json"), text)

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one page of HTML, as `write_json` does.

        The page needs nothing else: no network, no scripts.
        """
        from lightning_fastdata.insight.html import report_html

        return write_atomically(report_file(path, ".html"), report_html(self))

    def text(self, width: int = 80, *, ascii: bool = False) -> str:  # noqa: A002
        """Return the summary as plain text.

        Args:
            width: Columns; the text is laid out for 60 at least and for 120 at most.
            ascii: Draw with ASCII signs, for terminals that are not UTF-8.

        Raises:
            OptionsError: ``width`` is no whole number.
        """
        text = "\n".join(self.lines(width))
        return as_ascii(text) if ascii else text

    def lines(self, width: int = 80) -> list[str]:
        """Return the lines of the summary, laid out as by :meth:`text`."""
        check("width", width, is_whole(width), "whole numbers")
        width = min(_WIDEST, max(_NARROWEST, width))
        lines: list[str] = []
        verdict = self.verdict
        if not self.stages:
            lines += [rule("fastdata ", width), " nothing was measured"]
        else:
            first = self.stages[0]
            so_far = "" if self.ended else "so far "
            lines.append(rule(f"fastdata · {first.title} {so_far}", width))
            if verdict is not None:
                badge = f" {verdict.kind.upper()}   "
                below, sentence = " " * len(badge), printable(verdict.sentence)
                lines += textwrap.wrap(
                    sentence, width, initial_indent=badge, subsequent_indent=below
                )
            lines += ["", *_phase_rows(first, width), ""]
            lines += _figure_lines(self, width)
        if verdict is not None:
            lines += _finding_lines(verdict, self.stages, width)
        for label, move in _labelled("done", self.moves[-_MOST_MOVES:]):
            lines += _words(label, str(move), width)
        for stage in self.stages[1:]:
            lines += _words(stage.stage, "  ·  ".join(stage.words), width)
        lines += _words("ranks", ranks_line(self.ranks) or "", width)
        for note in self.notes:
            lines += _words("note", note, width)
        lines.append(rule("", width))
        return lines


def report_file(path: str | os.PathLike[str], suffix: str) -> Path:
    """Return the file that the path of a report means: in a folder, ``report`` with the suffix.

    Raises:
        OptionsError: The path is empty, or an address.
    """
    fine = bool(os.fspath(path)) and "://" not in os.fspath(path)
    check("The path of a report", path, fine, "paths of a file or a folder of this machine")
    file = Path(path)
    return file / f"report{suffix}" if file.is_dir() else file


def check_ours(file: Path) -> None:
    """Raise OptionsError if there is a file that holds something else than a report."""
    with suppress(OSError), file.open("rb") as there:
        begins = there.read(_BEGINS_BYTES)
        if begins and not any(mark in begins for mark in _MARKS):
            raise OptionsError(
                f"{file} is a file of yours, and stays as it is. Give report= another path"
            )


def _stage_as_dict(stage: StageSummary) -> dict[str, Any]:
    derived = {"stall_share": stage.stall_share, "speedup_possible": stage.speedup_possible}
    return dataclasses.asdict(stage) | derived


def _verdict_as_dict(verdict: Verdict) -> dict[str, Any]:
    values = {"code": verdict.code, **dataclasses.asdict(verdict)}
    for found, written in zip(verdict.findings, values["findings"], strict=True):
        del written["advice"]
        written["family"] = found.family
        if found.gain is not None:
            factor = found.gain.factor
            written["gain"]["factor"] = factor if math.isfinite(factor) else None
    return values


def verdict_line(verdict: Verdict) -> str:
    """Return in one line what limits a run, and what to try."""
    finding = verdict.findings[0]
    sentence = verdict.sentence or finding.cause
    gain = "" if finding.gain is None else f": {gain_text(finding.gain)}"
    short = _LONG_PATH.sub(r".../\1", finding.remedy)
    remedy = f"; try {short}{gain}" if short else ""
    return printable(f"{verdict.kind}, {sentence}{remedy} [{finding.family}, {finding.code}]")


def page_line(page: Path) -> str:
    """Return the line below a summary that says where the page of the report is."""
    return f" page  {printable(str(page), keep='')}"


def print_lines(lines: Iterable[str]) -> None:
    """Print lines, drawn with ASCII signs where the output takes no others."""
    if sys.stdout is None:  # as in a program of Windows without a console
        return
    # What a program puts there, to write into two files, say, may have a write() alone.
    utf = (getattr(sys.stdout, "encoding", None) or "ascii").lower().startswith("utf")
    text = "\n".join(lines)
    sys.stdout.write(f"{text if utf else as_ascii(text)}\n")


def rule(title: str, width: int) -> str:
    """Return a line across the page that begins with a title."""
    return title + "─" * max(0, width - len(title))


def _phase_rows(stage: StageSummary, width: int) -> Iterable[str]:
    length = min(40, width - _BAR_SPACE)
    for name, phase in stage.phases.items():
        yield (
            f" {name:<9} {bar(phase.share, length):<{length}} {phase.mean_ms:8.1f} ms "
            f"{phase.share:>4.0%}  p95 {phase.p95_ms:7.1f}"
        )


def figures(report: RunReport) -> list[tuple[str | None, str]]:
    """Return the main figures of a run, each with its caption; None where one is not known."""
    first, wall = report.stages[0], report.wall
    on_device = first.device != "cpu"
    # Where the model computes on CPUs, nobody knows what it would do with those that load.
    free = first.samples_per_s_if_data_were_free if on_device else None
    waited = report.device_minutes_waited if on_device else None
    of_rank = " of this rank" if len(report.ranks) > 1 else ""
    whole = STAGE_WORDS.get(first.stage, first.stage) + of_rank
    return [
        (in_form(None if wall is None else wall.samples_per_s), f"samples/s in the whole {whole}"),
        (in_form(first.samples_per_s), "samples/s in a step"),
        (in_form(free), "if data were free"),
        (in_form(first.speedup_possible if on_device else None, "{:.2f}x"), "to gain, at most"),
        (in_form(mean_ms(first.step), "{:.1f}"), "ms a step"),
        (in_form(first.stall_share, "{:.0%}"), "of it waiting for data"),
        (in_form(waited or None, "{:.1f}"), "GPU minutes waited"),
    ]


def in_form(number: float | None, form: str = "{:.0f}") -> str | None:
    """Return a number in a form; None for what was not measured."""
    return None if number is None else form.format(number)


def _figure_lines(report: RunReport, width: int) -> Iterable[str]:
    """Return the rates of a run, and where its time went."""
    told = ["" if value is None else f"{value} {caption}" for value, caption in figures(report)]
    whole, step, free, gain, _, _, waited = told
    if whole and step:
        yield f" {whole}"
    rates = list(filter(None, (step, free, gain)))
    joined = "  ·  ".join(rates)
    yield from (f" {each}" for each in (rates if len(joined) >= width else [joined]) if each)
    if report.wall is not None:
        yield from _words("", wall_text(report.wall, report.stages[0].stage), width)
    yield from _words("", waited, width)


def _finding_lines(verdict: Verdict, stages: Sequence[StageSummary], width: int) -> Iterable[str]:
    """Return the lines on causes, on what to try with its gain, and on what to leave alone."""
    shown = [found for found in verdict.findings if found.remedy][:_MOST_REMEDIES]
    causes = [found.cause for found in shown or verdict.findings[:1]]
    why = [cause for cause in causes if cause != verdict.sentence]
    if len(why) < _MOST_REMEDIES:
        waits = stages[0].causes if stages and stages[0].stalls else None
        brief = [] if waits is None else cause_lines(waits, brief=True)
        # The largest part of the wait is told by a cause from stamps, and need not be said again.
        brief = brief[1 if why else 0 :]
        why.append("; ".join(line for line in brief if not any(line in cause for cause in causes)))
    why.append("; ".join(verdict.evidence))
    for label, line in _labelled("why", filter(None, why)):
        yield from _words(label, line, width)
    for label, found in _labelled("try", shown):
        gain = "" if found.gain is None else f": {gain_text(found.gain)}"
        yield from _words(label, _LONG_PATH.sub(r".../\1", found.remedy) + gain, width)
    first = verdict.findings[0]
    yield from _words("skip", first.leave_alone, width)
    yield from _words("", f"[{first.family}, {first.code}]", width)


def _labelled(label: str, items: Iterable[_T]) -> Iterable[tuple[str, _T]]:
    for number, item in enumerate(items):
        yield "" if number else label, item


def _words(label: str, text: str, width: int) -> Iterable[str]:
    """Return the text wrapped beside its label, its later lines further in than its first."""
    parts = textwrap.wrap(printable(text), width - _INDENT, subsequent_indent="  ")
    for i, part in enumerate(parts):
        yield f" {label if i == 0 else '':<{_INDENT - 2}} {part}"


def as_ascii(text: str) -> str:
    """Return the text with ASCII signs in the place of drawn ones."""
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode("ascii")


def bar(fraction: float, width: int) -> str:
    """Return a bar of ``fraction`` (clipped to 0..1) of ``width`` cells, to an eighth of a cell."""
    cells = min(1.0, max(0.0, fraction)) * width
    full, eighths = divmod(round(cells * 8), 8)
    return "█" * full + (_EIGHTHS[eighths] if eighths else "")


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

    Each row has a place in the JSON, the numbers of both runs there (``-``: not measured), and by
    how many percent that of ``b`` is larger.

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
    """Yield each value of a report with its place there: the keys, joined by dots."""
    if not isinstance(value, dict) or place.count(".") > _DEEPEST:
        yield place.removeprefix("."), value
        return
    for key, part in value.items():
        yield from _leaves(part, f"{place}.{key}")


def _written(value: object) -> str:
    """Return a number with four digits, or with all before its point; ``-``: not measured."""
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

"""A run told to people and to programs: plain text, colours, JSON; and two runs side by side."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from lightning_fastdata.errors import printable
from lightning_fastdata.host.files import write_atomically
from lightning_fastdata.insight.measure.wall import wall_text
from lightning_fastdata.insight.model.finding import STALL_LOW, gain_text
from lightning_fastdata.insight.report.drawing import bar, duration_text
from lightning_fastdata.insight.waits.causes import cause_lines
from lightning_fastdata.insight.waits.ranks import ranks_line
from lightning_fastdata.insight.waits.several_loaders import waits_line
from lightning_fastdata.types import STAGE_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import Console, ConsoleOptions, RenderResult

    from lightning_fastdata.insight.measure.metrics import Columns, StageSummary
    from lightning_fastdata.insight.measure.wall import WallTime
    from lightning_fastdata.insight.verdicts.verdict import Verdict
    from lightning_fastdata.insight.waits.ranks import RankTiming

SCHEMA_VERSION = 5
"""Raised when the form of the JSON report changes; 2 added ``causes`` to the stages, 3 ``recent``
to them and ``findings`` to the verdict, in the place of ``next_step`` and ``leave_alone``, 4
``wall``, 5 ``ended``, and ``loaders`` to the stages."""
_MOST_RECENT = 512
_MOST_REMEDIES = 2

PHASE_COLORS = {"wait": "red", "transfer": "cyan", "augment": "magenta", "compute": "green"}
_KIND_COLORS = {
    "data-bound": "bold white on red",
    "balanced": "bold black on yellow",
    "compute-bound": "bold white on green",
    "unknown": "bold reverse",
}
_PAUSE_COLOR = "bold white on magenta"
_TO_ASCII = str.maketrans({"─": "-", "·": "|", "→": ">", "…": "."})
_INDENT = 7
_NARROWEST, _WIDEST = 60, 120
_BAR_SPACE = 42
"""Columns of a phase's row that are not bar."""
_LONG_PATH = re.compile(r"[^\s()'\"]*/[^\s()'\"/]+/([^\s()'\"/]+/[^\s()'\"/]+)")
"""A path with more than its last two parts: the page of the report has it in full."""

_T = TypeVar("_T")

_Line: TypeAlias = "list[tuple[str, str]]"
"""Pieces of one line: text and rich style."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunReport:
    """Everything worth keeping of one run.

    ``print(report.text())`` gives plain text; rich consoles print it in colours; a notebook shows
    the page of :meth:`write_html`.
    """

    stages: tuple[StageSummary, ...]
    """The first one is told in full and is what the verdict is about; the others get a line."""
    verdict: Verdict | None = None
    """What limits the first stage."""
    recent: Mapping[str, Columns] = field(default_factory=dict, compare=False)
    """Stage name -> the single values of its newest steps; reports are equal without them."""
    ended: bool = True
    """False where the run went on when this was measured."""
    ranks: tuple[RankTiming, ...] = ()
    """What the training steps of each rank took, by rank; empty with one rank."""
    wall: WallTime | None = None
    """Where the wall time of the run went; None where a loop of one's own was timed."""
    notes: tuple[str, ...] = ()
    """Decisions and limits to know about, one sentence each."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package name -> version."""
    machine: Mapping[str, str | int | float] = field(default_factory=dict)
    """Facts of the machine, units in the names."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types; keys of unmeasured numbers hold None."""
        return {
            "schema_version": SCHEMA_VERSION,
            "ended": self.ended,
            "stages": {
                stage.stage: _stage_as_dict(stage, self.recent.get(stage.stage))
                for stage in self.stages
            },
            "verdict": None if self.verdict is None else _verdict_as_dict(self.verdict),
            "wall": None if self.wall is None else self.wall.as_dict(),
            "ranks": [dataclasses.asdict(rank) for rank in self.ranks],
            "notes": list(self.notes),
            "versions": dict(self.versions),
            "machine": dict(self.machine),
        }

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        stages = ", ".join(f"{stage.stage} {stage.steps} steps" for stage in self.stages)
        verdict = "" if self.verdict is None else f", {self.verdict.kind} {self.verdict.code}"
        so_far = "" if self.ended else " so far"
        return f"<RunReport: {stages or 'nothing was measured'}{so_far}{verdict}>"

    def _repr_html_(self) -> str:
        from lightning_fastdata.insight.report.html import report_html

        # In a frame of its own: the page's style is not the notebook's.
        page = html.escape(report_html(self.as_dict()), quote=True)
        style = "width:100%;height:40em;border:0"
        return f'<iframe sandbox srcdoc="{page}" style="{style}"></iframe>'

    def write_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as JSON; readers see the old file or the new one, never a part.

        Args:
            path: the file; its folder is created.

        Returns:
            The path.
        """
        return write_atomically(Path(path), json.dumps(self.as_dict(), indent=2, allow_nan=False))

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one page of HTML that needs nothing else: no network, no scripts.

        Args:
            path: the file; its folder is created.

        Returns:
            The path.
        """
        from lightning_fastdata.insight.report.html import report_html

        return write_atomically(Path(path), report_html(self.as_dict()))

    def text(self, width: int = 80, *, ascii: bool = False) -> str:  # noqa: A002
        """Return the summary as plain text.

        Args:
            width: columns; the text is laid out for 60 at least and for 120 at most.
            ascii: draw with ASCII signs, for terminals that are not UTF-8.
        """
        lines = self._lines(_fitted(width), ascii)
        return "\n".join("".join(piece for piece, _ in line).rstrip() for line in lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in self._lines(_fitted(options.max_width), options.ascii_only):
            yield Text.assemble(*line, no_wrap=True, overflow="ellipsis")

    def _lines(self, width: int, ascii_only: bool) -> list[_Line]:
        lines: list[_Line] = []
        if not self.stages:
            lines += [_rule("fastdata ", width), [(" nothing was measured", "")]]
        else:
            first = self.stages[0]
            so_far = "" if self.ended else "so far "
            lines.append(_rule(f"fastdata · {_headline(first)} {so_far}", width))
            lines += _verdict_lines(self.verdict, width)
            lines += [[], *_phase_rows(first, width, ascii_only), []]
            lines += _words("", waits_line(first.loaders), width, "")
            lines += _throughput_lines(first, self.wall, width)
            if self.wall is not None:
                lines += _words("", wall_text(self.wall, first.stage), width, "dim")
        if self.verdict is not None:
            lines += _finding_lines(self.verdict, self.stages, width)
        for stage in self.stages[1:]:
            lines += _words(stage.stage, _stage_line(stage), width, "")
            lines += _words("", waits_line(stage.loaders), width, "")
        lines += _words("ranks", ranks_line(self.ranks) or "", width, "")
        for note in self.notes:
            lines += _words("note", note, width, "dim")
        lines.append(_rule("", width))
        if not ascii_only:
            return lines
        return [[(_as_ascii(piece), style) for piece, style in line] for line in lines]


def first_word(verdict: Verdict, steps: int) -> str:
    """Return in one line what limits the first steps of a run, and what to try."""
    finding = verdict.findings[0]
    sentence = verdict.sentence or finding.cause
    gain = "" if finding.gain is None else f": {gain_text(finding.gain)}"
    short = _LONG_PATH.sub(r".../\1", finding.remedy)
    remedy = f"; try {short}{gain}" if short else ""
    told = f"fastdata after {steps} steps: {verdict.kind}, {sentence}{remedy} [{finding.code}]"
    return printable(told)


def comparison_text(
    reports: Mapping[str, RunReport],
    width: int = 80,
    *,
    ascii: bool = False,  # noqa: A002
) -> str:
    """Return a bar of samples/s for each run, with its stall and its ratio to the first run.

    Args:
        reports: Name of a run -> its report; the first is what the others are compared with.
        width: columns; the text is laid out for 60 at least and for 120 at most.
        ascii: draw with ASCII signs.
    """
    width = _fitted(width)
    reports = {printable(name): report for name, report in reports.items()}
    rates = [_rate(report) for report in reports.values()]
    top = max(rates, default=0.0)
    names = max((len(name) for name in reports), default=0)
    length = max(4, width - names - 38)
    lines = ["".join(piece for piece, _ in _rule("fastdata · the same training ", width))]
    for (name, report), rate in zip(reports.items(), rates, strict=True):
        share = report.stages[0].stall_share if report.stages else None
        stall = "" if share is None else f"wait {_percent(share):>4}"
        ratio = f"{rate / rates[0]:5.2f}x" if rate and rates[0] else ""
        drawn = bar(rate / top if top else 0.0, length, ascii=ascii)
        shown = f"{rate:6.0f} samples/s" if rate else "  not measured  "
        lines.append(f" {name:<{names}} {drawn:<{length}} {shown} {ratio}  {stall}".rstrip())
    text = "\n".join(lines)
    return _as_ascii(text) if ascii else text


def _stage_as_dict(stage: StageSummary, recent: Columns | None) -> dict[str, Any]:
    values = dataclasses.asdict(stage)
    values["stall_share"] = stage.stall_share
    values["speedup_possible"] = stage.speedup_possible
    if recent is not None:
        values["recent"] = {
            name: [None if math.isnan(each) else each for each in column[-_MOST_RECENT:].tolist()]
            for name, column in recent.items()
        }
    return values


def _verdict_as_dict(verdict: Verdict) -> dict[str, Any]:
    values = {"code": verdict.code, **dataclasses.asdict(verdict)}
    for found, told in zip(verdict.findings, values["findings"], strict=True):
        if found.gain is not None:
            told["gain"]["factor"] = found.gain.factor if math.isfinite(found.gain.factor) else None
    return values


def _rule(title: str, width: int) -> _Line:
    return [(title, "bold"), ("─" * max(0, width - len(title)), "dim")]


def _headline(stage: StageSummary) -> str:
    return f"{stage.stage} · {stage.steps} steps in {duration_text(stage.duration_s)}"


def _verdict_lines(verdict: Verdict | None, width: int) -> Iterable[_Line]:
    if verdict is None:
        return
    badge = f" {verdict.kind.upper()} "
    sentence = printable(verdict.sentence)
    for i, part in enumerate(textwrap.wrap(sentence, width - len(badge) - 2)):
        if i == 0:
            yield [(badge, _KIND_COLORS.get(verdict.kind, _PAUSE_COLOR)), (f"  {part}", "")]
        else:
            yield [(" " * (len(badge) + 2) + part, "")]


def _phase_rows(stage: StageSummary, width: int, ascii_only: bool) -> Iterable[_Line]:
    """Return a row for each measured phase; ``wait`` is the exposed part, so that all add up."""
    phases = {
        "wait": stage.stall,
        "transfer": stage.transfer,
        "augment": stage.augment,
        "compute": stage.compute,
    }
    length = min(40, width - _BAR_SPACE)
    for name, phase in phases.items():
        if phase is not None:
            drawn = bar(phase.share, length, ascii=ascii_only)
            yield [
                (f" {name:<9} ", "bold" if name == "wait" else ""),
                (f"{drawn:<{length}}", PHASE_COLORS[name]),
                (f" {phase.mean_ms:8.1f} ms {_percent(phase.share):>4}", ""),
                (f"  p95 {phase.p95_ms:7.1f}", "dim"),
            ]


def _throughput_lines(stage: StageSummary, wall: WallTime | None, width: int) -> Iterable[_Line]:
    if stage.samples_per_s is None:
        return
    line = [(f" {stage.samples_per_s:.0f} samples/s in a step", "")]
    if wall is not None and wall.samples_per_s is not None:
        whole = STAGE_WORDS.get(stage.stage, stage.stage)
        yield [(f" {wall.samples_per_s:.0f} samples/s in the whole {whole}", "")]
    free = stage.headroom
    # Where the model computes on the CPUs that load, nobody knows what it would do with them.
    if free is not None and (stage.device != "cpu" or free.basis == "measured"):
        basis = " (measured)" if free.basis == "measured" else ""
        gain = f"{free.samples_per_s / stage.samples_per_s:.2f}x to gain"
        line += [("  ·  ", "dim"), (f"{free.samples_per_s:.0f} if data were free{basis}", "")]
        if sum(len(piece) for piece, _ in line) + len(gain) + 5 > width:
            yield line
            line = [(f" {gain}", "bold")]
        else:
            line += [("  ·  ", "dim"), (gain, "bold")]
    yield line


def _finding_lines(
    verdict: Verdict, stages: tuple[StageSummary, ...], width: int
) -> Iterable[_Line]:
    """Return why, what to try with what it would gain, and what to leave alone."""
    shown = [found for found in verdict.findings if found.remedy][:_MOST_REMEDIES]
    causes = [found.cause for found in shown or verdict.findings[:1]]
    why = [cause for cause in causes if cause != verdict.sentence]
    if len(why) < _MOST_REMEDIES:
        # A cause seen from inside is the largest part of the wait, which need not be told again.
        inside = causes[0] != verdict.sentence
        brief = _brief_causes(stages)[1 if inside else 0 :]
        why.append("; ".join(line for line in brief if not any(line in told for told in causes)))
    why.append("; ".join(verdict.evidence))
    for label, line in _labelled("why", filter(None, why)):
        yield from _words(label, line, width, "")
    for label, found in _labelled("try", shown):
        gain = "" if found.gain is None else f": {gain_text(found.gain)}"
        yield from _words(label, _LONG_PATH.sub(r".../\1", found.remedy) + gain, width, "")
    first = verdict.findings[0]
    skip = " ".join(filter(None, (first.leave_alone, f"[{first.code}]")))
    yield from _words("skip" if first.leave_alone else "", skip, width, "dim")


def _labelled(label: str, items: Iterable[_T]) -> Iterable[tuple[str, _T]]:
    for number, item in enumerate(items):
        yield "" if number else label, item


def _brief_causes(stages: tuple[StageSummary, ...]) -> list[str]:
    """Return why the batches of the first stage were late, if that cost it anything."""
    first = stages[0] if stages else None
    if first is None or first.causes is None or (first.stall_share or 0.0) < STALL_LOW:
        return []
    return cause_lines(first.causes, brief=True)


def _stage_line(stage: StageSummary) -> str:
    parts = [f"{stage.steps} steps in {duration_text(stage.duration_s)}"]
    if stage.stall_share is not None:
        parts.append(f"wait {_percent(stage.stall_share)}")
    if stage.samples_per_s is not None:
        parts.append(f"{stage.samples_per_s:.0f} samples/s")
    return "  ·  ".join(parts)


def _words(label: str, text: str, width: int, style: str) -> Iterable[_Line]:
    """Return the text wrapped beside its label, so that the next item is told from its lines."""
    parts = textwrap.wrap(printable(text), width - _INDENT, subsequent_indent="  ")
    for i, part in enumerate(parts):
        yield [(f" {label if i == 0 else '':<{_INDENT - 2}} ", "bold"), (part, style)]


def _fitted(width: int) -> int:
    return min(_WIDEST, max(_NARROWEST, width))


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _as_ascii(text: str) -> str:
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode("ascii")


def _rate(report: RunReport) -> float:
    return (report.stages[0].samples_per_s or 0.0) if report.stages else 0.0

"""A run reported to people and to programs: a summary in styled lines, JSON, a page."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from lightning_fastdata.errors import has_package, printable
from lightning_fastdata.host.system_calls import write_atomically
from lightning_fastdata.insight.measure.metrics import MOST_RECENT, Columns, StageSummary
from lightning_fastdata.insight.measure.wall import WallTime, wall_text
from lightning_fastdata.insight.model.finding import (
    STALL_LOW,
    costs_much,
    gain_text,
)
from lightning_fastdata.insight.verdicts.catalogue import Verdict
from lightning_fastdata.insight.waits.causes import cause_lines
from lightning_fastdata.insight.waits.ranks import RankTiming, ranks_line
from lightning_fastdata.tuning.moves import Move
from lightning_fastdata.types import STAGE_WORDS

SCHEMA_VERSION = 10
"""Raised when the form of the JSON report changes."""
_MOST_REMEDIES = 2
_MOST_MOVES = 3

_PHASE_COLORS = {"wait": "red", "transfer": "cyan", "augment": "magenta", "compute": "green"}
_KIND_COLORS = {
    "data-bound": "bold white on red",
    "balanced": "bold black on yellow",
    "compute-bound": "bold white on green",
    "unknown": "bold reverse",
}
_PAUSE_COLOR = "bold white on magenta"
_TO_ASCII = str.maketrans("─·→…█▉▊▋▌▍▎▏", "-|>.#####   ")
_INDENT = 7
_NARROWEST, _WIDEST = 60, 120
_BAR_SPACE = 42
"""Columns of a phase's row that are not bar."""
_LONG_PATH = re.compile(r"[^\s()'\"]*/[^\s()'\"/]+/([^\s()'\"/]+/[^\s()'\"/]+)")
"""A path with more than its last two parts: the page of the report has it in full."""

_T = TypeVar("_T")

Line: TypeAlias = "list[tuple[str, str]]"
"""Pieces of one line: text and rich style."""
WIDTH: Final = 100
"""Columns for which lines are laid out in a notebook and on boards."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunReport:
    """Everything worth keeping of one run.

    ``print(report.text())`` gives plain text; a notebook shows the summary, and folded below it the
    page of :meth:`write_html`.
    """

    stages: tuple[StageSummary, ...]
    """The first one is shown in full and is what the verdict is about; the others get a line."""
    verdict: Verdict | None = None
    """What limits the first stage."""
    recent: Mapping[str, Columns] = field(default_factory=dict, compare=False)
    """Stage name -> the single values of its newest steps; reports are equal without them."""
    ended: bool = True
    """False where the run went on when this was measured."""
    ranks: tuple[RankTiming, ...] = ()
    """What the training steps of each rank took, by rank; empty with one rank."""
    moves: tuple[Move, ...] = ()
    """Changes that the tuner made to the loaders of the first stage, the newest last."""
    wall: WallTime | None = None
    """Where the wall time of the run went; None where a loop of one's own was timed."""
    device_minutes_waited: float | None = None
    """How long the devices had nothing to do because of data, added up over them; None outside of
    fits."""
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
            "summary": [[list(piece) for piece in line] for line in self.lines()],
            "ended": self.ended,
            "stages": {
                stage.stage: _stage_as_dict(stage, self.recent.get(stage.stage))
                for stage in self.stages
            },
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
        stages = ", ".join(f"{stage.stage} {stage.steps} steps" for stage in self.stages)
        verdict = "" if self.verdict is None else f", {self.verdict.kind} {self.verdict.code}"
        so_far = "" if self.ended else " so far"
        return f"<RunReport: {stages or 'nothing was measured'}{so_far}{verdict}>"

    def _repr_html_(self) -> str:
        from lightning_fastdata.insight.report.html import report_html

        # In a frame of its own: the page's style is not the notebook's.
        page = html.escape(report_html(self), quote=True)
        style = "width:100%;height:40em;border:0"
        frame = f'<iframe sandbox srcdoc="{page}" style="{style}"></iframe>'
        folded = f"<details><summary>the whole report</summary>{frame}</details>"
        return f"{text_html(self.text(WIDTH))}{folded}"

    def write_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as JSON and return the path; its folder is created.

        Readers see the old file or the new one, never a part.
        """
        return write_atomically(Path(path), json.dumps(self.as_dict(), indent=2, allow_nan=False))

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one page of HTML, as `write_json` does.

        The page needs nothing else: no network, no scripts.
        """
        from lightning_fastdata.insight.report.html import report_html

        return write_atomically(Path(path), report_html(self))

    def text(self, width: int = 80, *, ascii: bool = False) -> str:  # noqa: A002
        """Return the summary as plain text.

        Args:
            width: Columns; the text is laid out for 60 at least and for 120 at most.
            ascii: Draw with ASCII signs, for terminals that are not UTF-8.
        """
        return plain(self.lines(width), ascii_only=ascii)

    def lines(self, width: int = 80) -> list[Line]:
        """Return the summary as :meth:`text` does, in pieces with a style of rich each."""
        width = min(_WIDEST, max(_NARROWEST, width))
        lines: list[Line] = []
        verdict = self.verdict
        if not self.stages:
            lines += [rule("fastdata ", width), [(" nothing was measured", "")]]
        else:
            first = self.stages[0]
            so_far = "" if self.ended else "so far "
            lines.append(rule(f"fastdata · {first.title} {so_far}", width))
            lines += _verdict_lines(verdict, width)
            lines += [[], *_phase_rows(first, width), []]
            lines += _figure_lines(self, width)
        if verdict is not None:
            lines += _finding_lines(verdict, self.stages, width)
        for label, move in _labelled("done", self.moves[-_MOST_MOVES:]):
            lines += _words(label, str(move), width, "")
        for stage in self.stages[1:]:
            lines += _words(stage.stage, "  ·  ".join(stage.words), width, "")
        lines += _words("ranks", ranks_line(self.ranks) or "", width, "")
        for note in self.notes:
            lines += _words("note", note, width, "dim")
        lines.append(rule("", width))
        return lines


def _stage_as_dict(stage: StageSummary, recent: Columns | None) -> dict[str, Any]:
    values = dataclasses.asdict(stage)
    values |= {"stall_share": stage.stall_share, "speedup_possible": stage.speedup_possible}
    values["speedup_possible_is_least"] = stage.device == "cpu"
    if recent is not None:
        values["recent"] = {
            name: [None if math.isnan(each) else each for each in column[-MOST_RECENT:].tolist()]
            for name, column in recent.items()
        }
    return values


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


def plain(lines: Iterable[Line], *, ascii_only: bool = False) -> str:
    """Return lines as text without their styles."""
    texts = ("".join(piece for piece, _ in line) for line in lines)
    return "\n".join((as_ascii(text) if ascii_only else text).rstrip() for text in texts)


def print_lines(lines: Iterable[Line]) -> None:
    """Print lines: in colours on a terminal where there is rich, and plain elsewhere."""
    if not (sys.stdout.isatty() and has_package("rich")):
        utf = (sys.stdout.encoding or "ascii").lower().startswith("utf")
        sys.stdout.write(f"{plain(lines, ascii_only=not utf)}\n")
        return
    from rich.console import Console
    from rich.text import Text

    # By itself rich would show it in a notebook, to which processes of several ranks cannot speak.
    console = Console(force_jupyter=False)
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True, highlight=False)


def rule(title: str, width: int) -> Line:
    """Return a line across the page that begins with a title."""
    return [(title, "bold"), ("─" * max(0, width - len(title)), "dim")]


def _verdict_lines(verdict: Verdict | None, width: int) -> Iterable[Line]:
    if verdict is None:
        return
    badge = (f" {verdict.kind.upper()} ", _KIND_COLORS.get(verdict.kind, _PAUSE_COLOR))
    indent = len(badge[0])
    for i, part in enumerate(textwrap.wrap(printable(verdict.sentence), width - indent - 2)):
        yield [(" " * indent, "") if i else badge, (f"  {part}", "")]


def _phase_rows(stage: StageSummary, width: int) -> Iterable[Line]:
    """Return a row for each measured phase."""
    length = min(40, width - _BAR_SPACE)
    for name, phase in stage.phases.items():
        yield [
            (f" {name:<9} ", "bold" if name == "wait" else ""),
            (f"{bar(phase.share, length):<{length}}", _PHASE_COLORS[name]),
            (f" {phase.mean_ms:8.1f} ms {phase.share:>4.0%}", ""),
            (f"  p95 {phase.p95_ms:7.1f}", "dim"),
        ]


def figures(report: RunReport) -> list[tuple[str | None, str]]:
    """Return the figures at the top of a report, each with what it is; None: not known."""
    first, wall = report.stages[0], report.wall
    on_device = first.device != "cpu"
    # What the model would do with the CPUs that load, if it computes on them, is not known.
    gain = first.speedup_possible if on_device else None
    free = None if gain is None else first.samples_per_s_if_data_were_free
    waited = report.device_minutes_waited if on_device else None
    whole = STAGE_WORDS.get(first.stage, first.stage)
    return [
        (written(None if wall is None else wall.samples_per_s), f"samples/s in the whole {whole}"),
        (written(first.samples_per_s), "samples/s in a step"),
        (written(free), "if data were free"),
        (written(gain, "{:.2f}x"), "to gain, at most"),
        (written(None if first.step is None else first.step.mean_ms, "{:.1f}"), "ms a step"),
        (written(first.stall_share, "{:.0%}"), "of it waiting for data"),
        (written(waited or None, "{:.1f}"), "GPU minutes waited"),
    ]


def written(number: float | None, form: str = "{:.0f}") -> str | None:
    """Return a number in a form; None for what was not measured."""
    return None if number is None else form.format(number)


def _figure_lines(report: RunReport, width: int) -> Iterable[Line]:
    """Return the rates of a run, and where its time went."""
    rate_of_run, rate, free, gain, *_, waited = (
        "" if number is None else f"{number} {what.partition(',')[0]}"
        for number, what in figures(report)
    )
    if rate_of_run and rate:
        yield [(f" {rate_of_run}", "")]
    line = [(f" {rate}", "")]
    for text, style in filter(itemgetter(0), ((free, ""), (gain, "bold"))):
        if sum(len(piece) for piece, _ in line) + len(text) + 5 > width:
            yield line
            line = [(f" {text}", style)]
        else:
            line += [("  ·  ", "dim"), (text, style)]
    yield from [line] if rate else []
    if report.wall is not None:
        yield from _words("", wall_text(report.wall, report.stages[0].stage), width, "dim")
    yield from _words("", waited, width, "dim")


def _finding_lines(verdict: Verdict, stages: Sequence[StageSummary], width: int) -> Iterable[Line]:
    """Return why, what to try with what it would gain, and what to leave alone."""
    shown = [found for found in verdict.findings if found.remedy][:_MOST_REMEDIES]
    causes = [found.cause for found in shown or verdict.findings[:1]]
    why = [cause for cause in causes if cause != verdict.sentence]
    if len(why) < _MOST_REMEDIES:
        # A cause that stamps show is the largest part of the wait, which need not be said again.
        brief = _brief_causes(stages)[1 if causes[0] != verdict.sentence else 0 :]
        why.append("; ".join(line for line in brief if not any(line in cause for cause in causes)))
    why.append("; ".join(verdict.evidence))
    for label, line in _labelled("why", filter(None, why)):
        yield from _words(label, line, width, "")
    for label, found in _labelled("try", shown):
        gain = "" if found.gain is None else f": {gain_text(found.gain)}"
        yield from _words(label, _LONG_PATH.sub(r".../\1", found.remedy) + gain, width, "")
    first = verdict.findings[0]
    yield from _words("skip", first.leave_alone, width, "dim")
    yield from _words("", f"[{first.family}, {first.code}]", width, "dim")


def _labelled(label: str, items: Iterable[_T]) -> Iterable[tuple[str, _T]]:
    for number, item in enumerate(items):
        yield "" if number else label, item


def _brief_causes(stages: Sequence[StageSummary]) -> list[str]:
    """Return why the batches of the first stage were late, if that cost it anything."""
    first = stages[0] if stages else None
    stall = None if first is None else first.stall
    if first is None or first.causes is None or stall is None or stall.share < STALL_LOW:
        return []
    if not costs_much(stall.mean_ms, stall.share):
        return []
    return cause_lines(first.causes, brief=True)


def _words(label: str, text: str, width: int, style: str) -> Iterable[Line]:
    """Return the text wrapped beside its label, its later lines further in than its first."""
    parts = textwrap.wrap(printable(text), width - _INDENT, subsequent_indent="  ")
    for i, part in enumerate(parts):
        yield [(f" {label if i == 0 else '':<{_INDENT - 2}} ", "bold"), (part, style)]


def as_ascii(text: str) -> str:
    """Return the text with ASCII signs in the place of drawn ones."""
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode("ascii")


def bar(fraction: float, width: int) -> str:
    """Return a bar of ``fraction`` (clipped to 0..1) of ``width`` cells, to an eighth of a cell."""
    cells = min(1.0, max(0.0, fraction)) * width
    full, eighths = divmod(round(cells * 8), 8)
    return "█" * full + (_EIGHTHS[eighths] if eighths else "")


def text_html(text: str) -> str:
    """Return a text as HTML for a notebook: as it is, and escaped."""
    return f'<pre style="white-space:pre;overflow-x:auto">{html.escape(text)}</pre>'


class Explanation(str):
    """A text in lines, also where it is the last expression of a notebook's cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return text_html(printable(self))

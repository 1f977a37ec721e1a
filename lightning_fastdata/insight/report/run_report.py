"""A run reported to people and to programs: plain text, colours, JSON, a page."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fastdata.host.system_calls import write_atomically
from lightning_fastdata.insight.measure.metrics import MOST_RECENT, Columns, StageSummary
from lightning_fastdata.insight.measure.wall import WallTime
from lightning_fastdata.insight.report.summary_text import (
    WIDTH,
    Line,
    as_ascii,
    plain,
    summary_lines,
    text_html,
)
from lightning_fastdata.insight.verdicts.catalogue import Verdict
from lightning_fastdata.insight.waits.ranks import RankTiming
from lightning_fastdata.tuning.moves import Move

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

SCHEMA_VERSION = 9
"""Raised when the form of the JSON report changes."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunReport:
    """Everything worth keeping of one run.

    ``print(report.text())`` gives plain text; rich consoles print it in colours; a notebook shows
    the summary, and folded below it the page of :meth:`write_html`.
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

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in self.lines(options.max_width):
            drawn = [(as_ascii(piece) if options.ascii_only else piece, how) for piece, how in line]
            yield Text.assemble(*drawn, no_wrap=True, overflow="ellipsis")

    def lines(self, width: int = 80) -> list[Line]:
        """Return the summary as :meth:`text` does, in pieces with a style of rich each."""
        return summary_lines(self, width)


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

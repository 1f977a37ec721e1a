"""What a notebook shows: lines of text as HTML that is legible on light and on dark paper.

The HTML needs nothing else: no style sheet, no script, no network. Texts are escaped.
"""

from __future__ import annotations

import html
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_fastdata.errors import printable

if TYPE_CHECKING:
    from lightning_fastdata.insight.report.run_report import RunReport
    from lightning_fastdata.insight.report.summary_text import Line

WIDTH: Final = 100
"""Columns for which lines are laid out in a notebook."""
COLORS: Final = {
    "red": "#d1495b",
    "green": "#3f9164",
    "cyan": "#3a86b8",
    "magenta": "#a86aa0",
}
"""Colours of letters: as far from white paper as from black."""
BADGES: Final = {"red": "#c0374a", "yellow": "#96660a", "green": "#2f7a52", "magenta": "#7a3d94"}
"""Colours of paper under white letters; as on the page."""
_PRE: Final = (
    "margin:0;background:transparent;color:inherit;white-space:pre;overflow-x:auto;"
    "font:12px/1.4 ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
)


def lines_html(lines: Iterable[Line]) -> str:
    """Return lines, in pieces with a style of rich each, as one block of HTML."""
    shown = "\n".join("".join(_piece_html(*piece) for piece in line).rstrip() for line in lines)
    return f'<pre style="{html.escape(_PRE)}">{shown}</pre>'


def _piece_html(text: str, style: str) -> str:
    css, text = style_css(style), html.escape(text)
    return f'<span style="{css}">{text}</span>' if css else text


def style_css(style: str) -> str:
    """Return a style of rich, such as ``"bold white on red"``, as CSS."""
    letters, _, paper = style.partition(" on ")
    words = letters.split()
    css = []
    if "bold" in words:
        css.append("font-weight:600")
    if "dim" in words:
        css.append("opacity:.7")
    if paper:
        css.append(f"color:#fff;background:{BADGES[paper]}")
    elif "reverse" in words:
        css.append("border:1px solid")
    else:
        css += [f"color:{COLORS[word]}" for word in words if word in COLORS]
    return ";".join(css)


class Explanation(str):
    """A text in blocks, whose first lines are titles where others follow; for notebooks, too."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        lines: list[Line] = []
        for block in printable(self).split("\n\n"):
            title, *rest = block.split("\n")
            style = "bold" if rest else ""
            lines += [[(title, style)], *([(line, "")] for line in rest), []]
        return lines_html(lines[:-1])


class NotebookSummary:
    """The summary of a run as a notebook shows it, and any other frontend as text.

    Args:
        report: The run.
        page: Where its page was written; None: nowhere.
    """

    def __init__(self, report: RunReport, page: Path | None = None) -> None:
        self._report = report
        self._page = "" if page is None else f" page  {printable(str(page), keep='')}"

    def __repr__(self) -> str:
        return "\n".join(filter(None, (self._report.text(WIDTH), self._page)))

    def _repr_html_(self) -> str:
        page: list[Line] = [[(self._page, "dim")]] if self._page else []
        return lines_html([*self._report.lines(WIDTH), *page])


def notebook_display() -> Callable[[object], object] | None:
    """Return what shows an object below the cell that runs; None where there is no notebook.

    Processes that a notebook starts for a training with several ranks can only print: the kernel
    hears nothing else of them.
    """
    ipython = sys.modules.get("IPython")
    if ipython is None or multiprocessing.parent_process() is not None:
        return None
    try:
        if getattr(ipython.get_ipython(), "kernel", None) is None:
            return None
        from IPython.display import display
    except (AttributeError, ImportError):  # no whole IPython
        return None
    shows: Callable[[object], object] = display
    return shows

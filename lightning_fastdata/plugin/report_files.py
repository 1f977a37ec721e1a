"""What a training leaves behind: its report as JSON, as a page, and on the terminal."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fastdata.errors import FastDataWarning

if TYPE_CHECKING:
    from lightning_fastdata.insight.report import RunReport


def write_report(report: RunReport, path: str | Path | bool, log_dir: str) -> Path | None:
    """Write a report as asked for, and return the page; None where none was written.

    Args:
        report: what to write.
        path: where to write the JSON; ``True``: to ``report.json`` in ``log_dir``; ``False``:
            nowhere. The page is written beside it, with the suffix ``.html``.
        log_dir: the trainer's.
    """
    if path is False:
        return None
    file = Path(log_dir) / "report.json" if path is True else Path(path)
    try:
        report.write_json(file.with_suffix(".json") if file.suffix == ".html" else file)
        return report.write_html(file.with_suffix(".html"))
    except OSError as error:
        # The training is done; a full disk must not look like its failure.
        message = f"The report was not written: {error}."
        warnings.warn(message, FastDataWarning, stacklevel=2)
        return None


def print_report(report: RunReport, page: Path | None) -> None:
    """Print a report, and where its page is."""
    from rich.console import Console

    console = Console()
    console.print(report)
    if page is not None:
        console.print(f" page  {page}", soft_wrap=True, highlight=False, markup=False)

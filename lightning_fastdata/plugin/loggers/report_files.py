"""What a training leaves behind: its report as JSON, as a page, and on the terminal.

Measuring and reporting never end a training: what fails in them is a warning.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias

from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.insight.report import RunReport, page_line, print_lines

_Given = ParamSpec("_Given")


class Misfortunes:
    """Errors of measuring and reporting, each reported once as a warning.

    ``what`` says what came of an error, as in ``"The report was not written"``.
    """

    def __init__(self) -> None:
        self._told: set[tuple[str, type]] = set()

    def tell(self, what: str, error: Exception) -> None:
        """Warn of an error, unless one of its kind was warned of."""
        kind = (what, type(error))
        if kind in self._told:
            return
        self._told.add(kind)
        message = f"{what}: {type(error).__name__}: {error}. The training itself is not affected."
        warnings.warn(message, FastDataWarning, stacklevel=3)

    @contextmanager
    def survived(self, what: str) -> Iterator[None]:
        """Make a warning of an error in the block."""
        try:
            yield
        except Exception as error:
            self.tell(what, error)


_OfRun: TypeAlias = Callable[Concatenate[Any, Any, _Given], None]
_Hook: TypeAlias = Callable[Concatenate[Any, _Given], None]


def harmless(what: str) -> Callable[[_OfRun[_Given]], _Hook[_Given]]:
    """Make a hook of a callback from one that takes its run, too, and is not called without one.

    It warns of its errors, which are kept in its ``misfortunes``.
    """

    def guard(hook: _OfRun[_Given]) -> _Hook[_Given]:
        @wraps(hook)
        def guarded(self: Any, /, *args: _Given.args, **kwargs: _Given.kwargs) -> None:
            if self._run is None:
                return
            try:
                hook(self, self._run, *args, **kwargs)
            except Exception as error:
                self.misfortunes.tell(what, error)

        return guarded

    return guard


def report_file(path: str | Path | bool, log_dir: str, method: str) -> Path | None:
    """Return the file of the JSON that was asked for; None: none was.

    What is no fit has files of its own: ``report-test.json``.
    """
    if path is False:
        return None
    file = Path(log_dir) / "report.json" if path is True else Path(path)
    file = file.with_suffix(".json") if file.suffix == ".html" else file
    return file if method == "fit" else file.with_name(f"{file.stem}-{method}{file.suffix}")


def write_report(report: RunReport, file: Path) -> Path:
    """Write a report as JSON, and beside it as a page, whose path is returned."""
    report.write_json(file)
    return report.write_html(file.with_suffix(".html"))


def print_report(report: RunReport, page: Path | None) -> None:
    """Print a report as wide as the terminal is, and where its page is."""
    where = [] if page is None else [page_line(page)]
    print_lines([*report.lines(shutil.get_terminal_size().columns), *where])

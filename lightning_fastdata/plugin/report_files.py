"""What a training leaves behind: its report as JSON, as a page, and on the terminal.

Measuring and reporting never end a training: what fails in them is a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lightning_fastdata.errors import FastDataWarning, printable

if TYPE_CHECKING:
    from lightning_fastdata.insight.report import RunReport

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class Misfortunes:
    """Errors of measuring and reporting, each told once as a warning."""

    def __init__(self) -> None:
        self._told: set[tuple[str, type]] = set()

    def tell(self, what: str, error: Exception) -> None:
        """Warn of an error, unless one of its kind was warned of.

        Args:
            what: Came of it, as in ``"The report was not written"``.
            error: What was raised.
        """
        kind = (what, type(error))
        if kind in self._told:
            return
        self._told.add(kind)
        message = f"{what}: {type(error).__name__}: {error}. The training itself is not affected."
        warnings.warn(message, FastDataWarning, stacklevel=3)

    def survived_by(self, what: str, call: Callable[..., object]) -> Callable[..., None]:
        """Return a function that does the same and warns of errors.

        Args:
            what: As for :meth:`tell`.
            call: What is to be done.
        """

        def guarded(*args: Any) -> None:
            try:
                call(*args)
            except Exception as error:
                self.tell(what, error)

        return guarded

    @contextmanager
    def survived(self, what: str) -> Iterator[None]:
        """Make a warning of an error in the block.

        Args:
            what: As for :meth:`tell`.
        """
        try:
            yield
        except Exception as error:
            self.tell(what, error)


def harmless(what: str) -> Callable[[_Hook], _Hook]:
    """Make a hook of a callback warn of its errors, which are kept in its ``misfortunes``.

    Args:
        what: As for :meth:`Misfortunes.tell`.
    """

    def guard(hook: _Hook) -> _Hook:
        @wraps(hook)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                hook(self, *args, **kwargs)
            except Exception as error:
                self.misfortunes.tell(what, error)

        return cast("_Hook", guarded)

    return guard


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
    report.write_json(file.with_suffix(".json") if file.suffix == ".html" else file)
    return report.write_html(file.with_suffix(".html"))


def print_report(report: RunReport, page: Path | None) -> None:
    """Print a report, and where its page is."""
    from rich.console import Console

    console = Console()
    console.print(report)
    if page is not None:
        shown = f" page  {printable(str(page), keep='')}"
        console.print(shown, soft_wrap=True, highlight=False, markup=False)

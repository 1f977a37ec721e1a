"""The commands that show trainings: ``top`` while they run, ``report`` when they have ended."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_fastdata.cli.output import print_found
from lightning_fastdata.errors import OptionsError, require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jsonargparse import ArgumentParser

    from lightning_fastdata.insight.live.page import LivePage

_EVERY_S: Final = 1.0


def top(run: str | None = None, *, once: bool = False, web: bool = False, port: int = 0) -> None:
    """Show how trainings of this user on this machine are going, and where they hang.

    Args:
        run: The process number of one, or a part of the name of its script or log folder.
        once: Print one page and end; so it is where the output is no terminal.
        web: Serve the page to a browser on this machine, under an address with a secret.
        port: For that; 0: a free one.
    """
    from lightning_fastdata.insight.live.page import as_html, as_rich, live_page
    from lightning_fastdata.insight.live.status import live_folder, read_all

    def page() -> LivePage:
        now_s = time.time()
        return live_page(read_all(live_folder(), now_s), run, now_s)

    if web:
        from lightning_fastdata.insight.live.server import PageServer

        page()  # an error is better told here
        with PageServer(lambda: as_html(page(), _EVERY_S), port) as server:
            sys.stdout.write(f"{server.address}\n")
            sys.stdout.flush()
            sys.stderr.write("Open this address in a browser on this machine; Ctrl+C ends it.\n")
            _until_interrupted(server.serve_forever)
        return
    require("rich", extra="cli", what="This page")
    from rich.console import Console
    from rich.live import Live

    if once or not sys.stdout.isatty():
        # In a pipe nothing is known of the width, and what is cut off cannot be searched.
        width = None if sys.stdout.isatty() else 160
        Console(width=width, highlight=False).print(as_rich(page()))
        return
    with Live(as_rich(page()), screen=True, auto_refresh=False) as live:

        def show() -> None:
            while True:
                time.sleep(_EVERY_S)
                live.update(as_rich(page()), refresh=True)

        _until_interrupted(show)


def _until_interrupted(show: Callable[[], None]) -> None:
    with suppress(KeyboardInterrupt):
        show()


def report(runs: Sequence[str], *, open: bool = False) -> None:  # noqa: A002
    """Print the summary of a run again, or several runs side by side.

    Args:
        runs: Folders of runs, or their ``report.json``.
        open: Open the pages of their reports in the browser.
    """
    from lightning_fastdata.insight.report.compare import side_by_side
    from lightning_fastdata.insight.report.recorded import as_run_report, read_report
    from lightning_fastdata.insight.report.summary_text import page_line

    files = [report_file(Path(each)) for each in runs]
    reports = [read_report(file) for file in files]
    if len(reports) == 1:
        print_found(as_run_report(reports[0], files[0]))
    else:
        sys.stdout.write(f"{side_by_side(dict(zip(map(str, files), reports, strict=True)))}\n")
    pages = [page for file in files if (page := file.with_suffix(".html")).is_file()]
    for page in pages:
        sys.stdout.write(f"{page_line(page)}\n")
    if open:
        import webbrowser

        if not pages:
            raise OptionsError(f"There is no page beside {files[0]}.")
        for page in pages:
            webbrowser.open(page.resolve().as_uri())


def report_file(run: Path) -> Path:
    """Return the report that a path means: of a folder its ``report.json``, or the only other one.

    Raises:
        OptionsError: There is none, or it is not clear which.
    """
    if not run.is_dir():
        return run
    if (run / "report.json").is_file():
        return run / "report.json"
    found = sorted(run.glob("report-*.json")) or sorted(run.rglob("report.json"))
    if len(found) == 1:
        return found[0]
    listed = f" There are: {', '.join(map(str, found[:10]))}." if found else ""
    raise OptionsError(f"{run} has no report.json.{listed} Name a folder of a run, or its report.")


def top_parser() -> ArgumentParser:
    """Return the parser of ``top``."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        description="Show how trainings with a DataThroughputCallback are going, of this user on "
        "this machine, and where they hang."
    )
    parser.add_argument(
        "run",
        nargs="?",
        default=None,
        help="The process number of one, or a part of the name of its script or log folder.",
    )
    parser.add_argument("--once", action="store_true", help="Print one page and end.")
    parser.add_argument(
        "--web",
        action="store_true",
        help="Serve the page to a browser on this machine, under an address with a secret.",
    )
    parser.add_argument("--port", type=int, default=0, help="For --web; 0: a free one.")
    return parser


def report_parser() -> ArgumentParser:
    """Return the parser of ``report``."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        description="Print the summary of a run again, or several runs side by side."
    )
    parser.add_argument("runs", nargs="+", help="Folders of runs, or their report.json.")
    parser.add_argument(
        "--open", action="store_true", help="Open the pages of their reports in the browser."
    )
    return parser

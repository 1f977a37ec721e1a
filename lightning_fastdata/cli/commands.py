"""The commands that run scripts, and show trainings and reports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from lightning_fastdata.errors import OptionsError, printable
from lightning_fastdata.zero_code import VARIABLE, RunSettings

GROUP: Final = "lightning.pytorch.callbacks_factory"


def doctor() -> None:
    """Print what this machine allows, and what of it limits data loading."""
    from lightning_fastdata.host.cpu import read_cpu_limit
    from lightning_fastdata.host.machine import doctor_text, read_gpus, read_versions
    from lightning_fastdata.host.memory import read_host_memory

    cpu, memory, versions = read_cpu_limit(), read_host_memory(), read_versions()
    text = doctor_text(cpu=cpu, memory=memory, gpus=read_gpus(), versions=versions)
    sys.stdout.write(f"{text}\n")


def run(command: Sequence[str], *, module: bool = False, report: str | None = None) -> None:
    """Run a script; each Lightning Trainer that it makes gets a DataThroughputCallback.

    This process becomes that of the script: signals, exit code and output are its own.
    """
    check_found_by_lightning()
    program = program_of(command, "run", module=module)
    settings = RunSettings(report=None if report is None else str(Path(report).resolve()))
    sys.stderr.write(
        f"fastdata: each Trainer of {command[0]} gets a DataThroughputCallback. A loop without "
        "Lightning's Trainer is measured by StepTimer.\n"
    )
    _become(program, {**os.environ, VARIABLE: settings.as_text()})


def check_found_by_lightning() -> None:
    """Raise OptionsError unless Lightning finds what this package adds to a Trainer."""
    if not any(each.value.startswith("lightning_fastdata.") for each in entry_points(group=GROUP)):
        raise OptionsError(
            "Lightning cannot find this package, since it is only on the path, or was installed "
            "before it had `fastdata run`. Install it: pip install lightning-fastdata."
        )


def program_of(command: Sequence[str], asked: str, *, module: bool) -> list[str]:
    """Return the program and its arguments that the command of a user stands for.

    ``asked``: the command of ours; ``module``: it is a module, as of ``python -m``.

    Raises:
        OptionsError: There is no such file or program.
    """
    if not command:
        raise OptionsError(
            f"There is nothing to run. Write: fastdata {asked} train.py [arguments]."
        )
    first, *rest = command
    if module:
        return [sys.executable, "-m", first, *rest]
    if Path(first).is_file() and first.endswith(".py"):
        return [sys.executable, first, *rest]
    found = shutil.which(first)
    if found is None or first.endswith(".py"):
        raise OptionsError(f"{first!r} is no Python file here, and no program that can be found.")
    return [found, *rest]


def _become(program: list[str], environ: Mapping[str, str]) -> None:
    sys.stderr.flush()
    sys.stdout.flush()
    if os.name == "posix":
        os.execve(program[0], program, environ)
    # Elsewhere the shell would take the end of this process for the end of the script.
    raise SystemExit(subprocess.run(program, env=dict(environ), check=False).returncode)


def report(run: str, *, open: bool = False) -> None:  # noqa: A002
    """Print the summary of a run again."""
    from lightning_fastdata.insight.report import page_line, print_lines, read_report

    file = report_file(Path(run))
    print_lines(printable(line, keep="") for line in read_report(file)["summary"])
    page = file.with_suffix(".html")
    if page.is_file():
        sys.stdout.write(f"{page_line(page)}\n")
    if open:
        import webbrowser

        if not page.is_file():
            raise OptionsError(f"There is no page beside {file}.")
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


def takes_report(parser: ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    parser.add_argument("run", help="The folder of a run, or its report.json.")
    parser.add_argument("--open", action="store_true", help="Open its page in the browser.")


def compare(a: str, b: str) -> None:
    """Print two runs side by side, and what differs."""
    from lightning_fastdata.insight.report import side_by_side

    sys.stdout.write(f"{side_by_side(report_file(Path(a)), report_file(Path(b)))}\n")


def takes_command(parser: ArgumentParser, what: str) -> None:
    """Add the script to run; what follows it is its own."""
    parser.add_argument(
        "-m", dest="module", action="store_true", help="COMMAND is a module, as of python -m."
    )
    parser.add_argument("command", nargs="...", help=what)


def takes_run(parser: ArgumentParser) -> None:
    """Add the arguments of ``run``."""
    parser.add_argument(
        "--report",
        help="Where the report is written. Default: report.json in the Trainer's log folder.",
    )
    takes_command(
        parser,
        "A Python file and its arguments; or a program, such as torchrun, and its arguments.",
    )


def takes_compare(parser: ArgumentParser) -> None:
    """Add the arguments of ``compare``."""
    parser.add_argument("a", help="The folder or the report.json of the run to compare with.")
    parser.add_argument("b", help="The same of the run that is compared.")

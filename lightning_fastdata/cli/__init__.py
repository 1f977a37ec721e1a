"""The command line: ``fastdata run``, ``top``, ``report``, ``doctor``, ``compare``, ``tune``..."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastdata import __version__
from lightning_fastdata.cli.commands import compare, demo, doctor, doctor_parser, show_augment
from lightning_fastdata.cli.data_commands import cache, replay, tune, which
from lightning_fastdata.cli.live_commands import report, report_parser, top, top_parser
from lightning_fastdata.cli.run import run
from lightning_fastdata.errors import FastDataError, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from jsonargparse import ArgumentParser


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: What follows the program's name; None takes it from the shell.
    """
    try:
        require("jsonargparse", extra="cli", what="The command line")
    except FastDataError as error:
        raise SystemExit(f"fastdata: {error}") from error
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="fastdata", description="Data loading, measured and explained.", version=__version__
    )
    commands = parser.add_subcommands(dest="command")
    functions: dict[str, Callable[..., None]] = {
        "demo": demo,
        "doctor": doctor,
        "show-augment": show_augment,
        "tune": tune,
        "cache": cache,
    }
    for name, function in functions.items():
        summary = (function.__doc__ or "").partition("\n")[0]
        command = doctor_parser() if function is doctor else ArgumentParser(description=summary)
        if function is not doctor:
            command.add_function_arguments(function, as_positional=True)
        commands.add_subcommand(name, command, help=summary)
    commands.add_subcommand(
        "compare", _compare_parser(), help="Print what differs between two runs."
    )
    for name, function, own in (("top", top, top_parser()), ("report", report, report_parser())):
        functions[name] = function
        commands.add_subcommand(name, own, help=(function.__doc__ or "").partition("\n")[0])
    for name, function in (("replay", replay), ("which", which)):
        functions[name] = function
        summary = (function.__doc__ or "").partition("\n")[0]
        command = ArgumentParser(description=summary)
        command.add_argument("run", help="A checkpoint of Lightning, or the report.json of a run.")
        command.add_function_arguments(function, skip={"run"})
        commands.add_subcommand(name, command, help=summary)
    commands.add_subcommand("run", _run_parser(), help=(run.__doc__ or "").partition("\n")[0])
    functions |= {"compare": compare, "run": run}
    chosen = parser.parse_args(arguments)
    options = chosen[chosen.command].as_dict()
    try:
        functions[chosen.command](**options)
    except FastDataError as error:
        # The message says what to do; our stack would not help.
        raise SystemExit(f"fastdata: {error}") from error


def _compare_parser() -> ArgumentParser:
    """Return the parser of ``compare``, whose condition may be given several times."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        description="Print what differs between two runs. Exit codes: 0, 1 if a condition holds, "
        "2 if a report or a condition cannot be read."
    )
    parser.add_argument("a", help="The report.json of the run to compare with.")
    parser.add_argument("b", help="The report.json of the run that is compared.")
    parser.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="What must not be, any number of times: 'step_ms > +10%' is a change of b over a in "
        "percent, 'stall_share > +0.02' a change, 'stall_percent > 5' the value of b; with "
        "'val.' before the name, of validation.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    return parser


def _run_parser() -> ArgumentParser:
    """Return the parser of ``run``; what follows the script is the script's own."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        description="Run a script as it is; each Lightning Trainer that it makes gets a "
        "DataThroughputCallback, which prints a summary and writes a report."
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="Put a FastDataLoader in the place of plain DataLoaders, where the batches stay the "
        "same to the last bit. Loaders that stay are named, with the reason.",
    )
    parser.add_argument("--report", default=None, help="Where the report is written.")
    parser.add_argument(
        "-m", dest="module", action="store_true", help="COMMAND is a module, as of python -m."
    )
    parser.add_argument(
        "command",
        nargs="...",
        help="A Python file and its arguments; or a program, such as torchrun, and its arguments.",
    )
    return parser

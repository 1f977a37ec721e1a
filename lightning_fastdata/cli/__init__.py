"""The command line: ``fastdata run``, ``top``, ``report``, ``doctor``, ``compare``, ``tune``..."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastdata import __version__
from lightning_fastdata.cli.commands import (
    cache,
    demo,
    doctor,
    doctor_parser,
    replay,
    show_augment,
    tune,
    which,
)
from lightning_fastdata.cli.runs import (
    compare,
    compare_parser,
    report,
    report_parser,
    run,
    run_parser,
    top,
    top_parser,
)
from lightning_fastdata.errors import FastDataError, require

if TYPE_CHECKING:
    from collections.abc import Callable


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
        "compare", compare_parser(), help="Print what differs between two runs."
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
    commands.add_subcommand("run", run_parser(), help=(run.__doc__ or "").partition("\n")[0])
    functions |= {"compare": compare, "run": run}
    chosen = parser.parse_args(arguments)
    options = chosen[chosen.command].as_dict()
    try:
        functions[chosen.command](**options)
    except FastDataError as error:
        # The message says what to do; our stack would not help.
        raise SystemExit(f"fastdata: {error}") from error

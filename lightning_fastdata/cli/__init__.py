"""The command line: ``fastdata run``, ``prove``, ``top``, ``report``, ``compare``, ``doctor``..."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastdata import __version__
from lightning_fastdata.cli.commands import (
    doctor,
    doctor_parser,
    replay,
    replay_parser,
)
from lightning_fastdata.cli.proofs import prove, prove_parser
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
    known: dict[str, tuple[Callable[..., None], ArgumentParser]] = {
        "run": (run, run_parser()),
        "prove": (prove, prove_parser()),
        "top": (top, top_parser()),
        "report": (report, report_parser()),
        "compare": (compare, compare_parser()),
        "doctor": (doctor, doctor_parser()),
        "replay": (replay, replay_parser()),
    }
    for name, (function, own) in known.items():
        commands.add_subcommand(name, own, help=(function.__doc__ or "").partition("\n")[0])
    chosen = parser.parse_args(arguments)
    function, _ = known[chosen.command]
    try:
        function(**chosen[chosen.command].as_dict())
    except FastDataError as error:
        # The message says what to do; our stack would not help.
        raise SystemExit(f"fastdata: {error}") from error

"""The command line: ``fastdata run``, ``prove``, ``report``, ``compare``, ``doctor``..."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any, Final

from lightning_fastdata import __version__
from lightning_fastdata.cli.commands import (
    compare,
    doctor,
    report,
    run,
    takes_compare,
    takes_report,
    takes_run,
)
from lightning_fastdata.cli.proofs import prove, takes_prove
from lightning_fastdata.cli.replays import replay, takes_replay
from lightning_fastdata.errors import FastDataError

_COMMANDS: Final[dict[Callable[..., None], Callable[[ArgumentParser], None]]] = {
    run: takes_run,
    prove: takes_prove,
    report: takes_report,
    compare: takes_compare,
    doctor: lambda _: None,
    replay: takes_replay,
}
"""Each command, and what tells its parser what it takes."""
_UNUSABLE: Final = 2
"""As argparse ends; 1 is what `prove` says where it recommends a change."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    Exit codes: that of the command; 2 where its arguments, or what they name, cannot be used.

    Args:
        arguments: What follows the program's name; None takes it from the shell.
    """
    about = "Data loading, measured and explained."
    parser = ArgumentParser(prog="fastdata", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fastdata {__version__}")
    commands = parser.add_subparsers(dest="subcommand", required=True)
    for command, takes in _COMMANDS.items():
        does = " ".join((command.__doc__ or "").partition("\n\n")[0].split())
        own = commands.add_parser(command.__name__, help=does, description=does, allow_abbrev=False)
        takes(own)
        own.set_defaults(call=command)
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    del given["subcommand"]
    try:
        given.pop("call")(**given)
    except FastDataError as error:
        # The message says what to do; our stack would not help.
        sys.stderr.write(f"fastdata: {error}\n")
        raise SystemExit(_UNUSABLE) from error

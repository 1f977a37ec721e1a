"""``fastdata run``: a script as it is, with the callback in each of its Trainers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.zero_code import VARIABLE, RunSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GROUP: Final = "lightning.pytorch.callbacks_factory"


def run(
    command: Sequence[str], *, module: bool = False, fast: bool = False, report: str | None = None
) -> None:
    """Run a script; each Lightning Trainer that it makes gets a DataThroughputCallback.

    This process becomes that of the script: signals, exit code and output are its own.

    Args:
        command: A Python file and its arguments; or a program, such as torchrun, and its own.
        module: The first of them is a module, as of ``python -m``.
        fast: Put a FastDataLoader in the place of plain DataLoaders where that changes no batch.
        report: Where the report is written; None: ``report.json`` in the log folder of the Trainer.
    """
    if not any(each.value.startswith("lightning_fastdata.") for each in entry_points(group=GROUP)):
        raise OptionsError(
            "Lightning cannot find this package, since it is only on the path, or was installed "
            "before it had `fastdata run`. Install it: pip install lightning-fastdata."
        )
    program = program_of(command, module=module)
    settings = RunSettings(
        fast=fast, report=None if report is None else str(Path(report).resolve())
    )
    sys.stderr.write(
        f"fastdata: each Trainer of {command[0]} gets a DataThroughputCallback. A loop without "
        "Lightning's Trainer is measured by StepTimer.\n"
    )
    _become(program, {**os.environ, VARIABLE: settings.as_text()})


def program_of(command: Sequence[str], *, module: bool) -> list[str]:
    """Return the program and its arguments that a command stands for.

    Raises:
        OptionsError: There is no such file or program.
    """
    if not command:
        raise OptionsError("There is nothing to run. Write: fastdata run train.py [arguments].")
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

"""Stands for ``python`` where a program starts another one: forked from what imports Lightning.

:func:`warm_python` writes the command. What it runs has the streams, the folder and the environment
of the command, its signals and its exit code, and ``STARTED_BY``: who has started the command.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver, get_context, resource_tracker
from pathlib import Path
from typing import Any

_COMMAND = """#!{python}
import sys

sys.path.insert(0, {tests!r})
from warm_python import main

if __name__ == "__main__":
    main({address!r})
"""


def warm_python(folder: Path) -> str:
    """Write the command into a folder, and return its path."""
    server = forkserver._forkserver
    server.ensure_running()
    command = folder / "python"
    address = server._forkserver_address
    tests = str(Path(__file__).parent)
    command.write_text(_COMMAND.format(python=sys.executable, tests=tests, address=address))
    command.chmod(0o700)
    return str(command)


def main(address: str) -> None:
    """Be the command: run its arguments elsewhere, and end as they do."""
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running  # it is another one's child
    streams = [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2)]
    environment = {**os.environ, "STARTED_BY": str(os.getppid())}
    process = get_context("forkserver").Process(
        target=_run, args=(sys.argv[1:], streams, os.getcwd(), environment)
    )
    process.start()

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    process.join()
    code = process.exitcode or 0
    sys.exit(code if code >= 0 else 128 - code)


def _run(*arguments: Any) -> None:
    import programs

    programs._run(*arguments, threads=None)

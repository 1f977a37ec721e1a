"""Ranks as forked processes of one program: Lightning takes seconds to import, here once for all.

``launched`` starts such a program for a test, which calls ``on_ranks`` or ``started``.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from programs import run_program


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launched(program: Path, *arguments: str) -> None:
    """Run a program to its end; ranks that hang are killed and fail."""
    done = run_program(program, *arguments, threads=1, timeout_s=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def started(ranks: int, act: Callable[[], None], *, grouped: bool = True) -> list[int]:
    """Return the processes of ranks that call a function, all in a process group if asked for."""
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0"}
    running: list[int] = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            if grouped:
                os.setpgid(0, running[0] if running else 0)
            if ranks > 1:
                os.environ["LOCAL_RANK"] = str(rank)
            failed = 1
            try:
                act()
                failed = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(failed)
        if grouped:
            with suppress(PermissionError):  # it has begun, and done so itself
                os.setpgid(process, running[0] if running else 0)
        running.append(process)
    return running


def on_ranks(ranks: int, act: Callable[[], None]) -> None:
    """Call a function in a process of its own for each rank; end the program where one fails."""
    running = set(started(ranks, act, grouped=False))
    while running:
        process, status = os.wait()
        running.discard(process)
        if status:
            sys.exit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")

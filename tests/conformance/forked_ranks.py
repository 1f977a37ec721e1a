"""Ranks as forked processes of one program: Lightning takes seconds to import, here once for all.

``launched`` starts such a program for a test, ``on_ranks`` is what the program calls.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
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


def on_ranks(ranks: int, act: Callable[[], None]) -> None:
    """Call a function in a process of its own for each rank; end the program where one fails."""
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0"}
    running = set()
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
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
        running.add(process)
    while running:
        process, status = os.wait()
        running.discard(process)
        if status:
            sys.exit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")

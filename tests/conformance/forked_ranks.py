"""Ranks as forked processes of one program: Lightning takes seconds to import, here once for all.

``launched`` starts such a program for a test, ``on_ranks`` is what the program calls.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launched(program: Path, *arguments: str) -> None:
    """Run a program to its end; ranks that hang are killed and fail.

    Its process is forked from one that has imported what takes long (``conftest.py``).
    """
    with tempfile.NamedTemporaryFile() as output:
        process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(program, arguments, output.name, dict(os.environ))
        )
        process.start()
        try:
            process.join(500)
            assert process.exitcode == 0, Path(output.name).read_text()[-3000:]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()


def launched_anew(program: Path, *arguments: str) -> None:
    """Do the same in a process that a shell might have started, which takes signals as such."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(program.parents[1]), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, str(program), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output.decode()[-3000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _run(program: Path, arguments: list[str], output: str, environment: dict[str, str]) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # Python's own, as in any program
    torch.set_num_threads(1)
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.parents[1]))
    runpy.run_path(str(program), run_name="__main__")


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

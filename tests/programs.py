"""Programs of users, run to their end by a test.

Python takes six seconds of CPU time to import Lightning. :func:`run_program` forks from a process
that has imported it (``conftest.py``), and is otherwise as ``subprocess.run``. What a program
imports, and what its interpreter is told, is tested with ``subprocess``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from multiprocessing import connection, forkserver
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import lightning_fastdata

PRELOADED = [
    *("lightning.pytorch", "albumentations", "torch.utils.tensorboard"),
    *("torchvision.datasets", "torchvision.transforms.v2"),
    *sorted({f"lightning_fastdata.{home}" for home in lightning_fastdata._HOME.values()}),
    "lightning_fastdata.data",
]
"""What programs use, and tests, too: each would import it anew, which takes a second."""


def serve() -> None:
    """Have the processes of ``forkserver`` be forks of this one, with what takes long imported.

    The server that :mod:`multiprocessing` would start imports it once more.
    """
    address = connection.arbitrary_address("AF_UNIX")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive, ours = os.pipe()
    with warnings.catch_warnings():
        _warn_as_python_does()
        for name in PRELOADED:
            importlib.import_module(name)
        process = os.fork()
        if process == 0:
            _serve(listener, alive)
    os.close(alive)
    listener.close()
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, ours
    server._forkserver_pid = process


def _serve(listener: socket.socket, alive: int) -> None:
    """Be the server, until the process that it was forked from ends, without what pytest set."""
    try:
        own = {0, 1, 2, listener.fileno(), alive}
        for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - own:
            with suppress(OSError):
                os.close(descriptor)
        sys.unraisablehook = sys.__unraisablehook__
        threading.excepthook = threading.__excepthook__
        multiprocessing.set_forkserver_preload(["__main__"])
        # Programs collect garbage as Python does, but never search what is imported here.
        gc.freeze()
        gc.enable()
        forkserver.main(listener.detach(), alive, [])
    finally:
        os._exit(0)


def _warn_as_python_does() -> None:
    """Take away the filters of pytest, by which our warnings are errors."""
    warnings.resetwarnings()
    for kind in (ResourceWarning, ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")


def run_program(
    *command: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    python: str | None = None,
    timeout_s: float = 280,
) -> CompletedProcess[str]:
    """Run what stands behind ``python`` in a command: a file, ``-m`` a module, or ``-c`` code.

    Its processes are in a session of their own, which is killed when it ends or takes too long.
    What it starts as ``sys.executable`` is ``python``, if that is given.
    """
    arguments = list(map(str, command))
    environment = os.environ if env is None else env
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = multiprocessing.get_context("forkserver").Process(
            target=_run,
            args=(arguments, files, str(cwd or Path.cwd()), dict(environment), threads, python),
        )
        process.start()
        try:
            process.join(timeout_s)
            printed = [file.read_text() if file.exists() else "" for file in files]
            assert process.exitcode is not None, f"after {timeout_s} s: {printed}"
            return CompletedProcess(arguments, process.exitcode, *printed)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()


def _run(
    arguments: list[str],
    files: Sequence[str | Path],
    folder: str,
    environment: dict[str, str],
    threads: int | None,
    python: str | None = None,
) -> None:
    os.setsid()
    # A shell that runs its tests in the background hands down a SIGINT that is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # Python's own, as in any program
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if python is not None:
        sys.executable = python
    kind = arguments.pop(0) if arguments[0] in ("-m", "-c") else ""
    sys.argv = arguments
    sys.path.insert(0, folder if kind else str(Path(folder, arguments[0]).parent))
    try:
        if kind == "-m":
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            code, arguments[0] = arguments[0], kind
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(main))
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


@contextmanager
def refused(said: str) -> Iterator[None]:
    """Have a command of ours, called within this block, end with code 2 and this on stderr."""
    written = io.StringIO()
    with pytest.raises(SystemExit) as ended, redirect_stderr(written):
        yield
    assert ended.value.code == 2
    assert re.search(said, written.getvalue()), written.getvalue()

"""A process that tries out a dataset before the workers start, and is thrown away.

What a dataset opens when it is read must be opened in the workers: forked processes share the
position of an open file, and threads of a client that was used before a fork are missing after it.
So nothing is read in the training process. The process here is started as the workers will be. It
sends what it finds out piece by piece, so that a piece that takes too long costs only itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch

from lightning_fastdata.host.system_calls import die_with

Tell: TypeAlias = Callable[[str, Any], None]
"""Sends a finding to the training process: its name, and a value that can be pickled."""
FailureKind: TypeAlias = Literal["raised", "stuck", "late", "died", "not started"]

_DEADLINE_S: Final = 30.0
_START_S: Final = 60.0
"""A spawned process imports torch and unpickles the dataset, of which the size is not known."""
_STUCK_S: Final = 3.0
_LOOK_S: Final = 0.25
_STACK_S: Final = 1.0
_STACK_BYTES: Final = 2**15
_BUSY: Final = 0.02
"""CPU seconds a second, below which a process is not at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a trial came to no end."""

    kind: FailureKind
    """``"raised"``: the work raised an error. ``"stuck"``: all its threads waited for locks.
    ``"late"``: it took longer than the deadline. ``"died"``: a signal or an exit ended it.
    ``"not started"``: the process could not be started."""
    what: str
    """What happened, as the end of a sentence that begins with the process."""
    error: Exception | None = None
    """What was raised, with the traceback of the process as a note."""
    stack: str = ""
    """The Python stacks of a process that was stuck or late; empty if they could not be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What came of a trial."""

    values: dict[str, Any] = field(default_factory=dict)
    """The findings that were sent, by name."""
    failure: Failure | None = None
    """Why it did not end; None: it did."""


def try_apart(
    work: Callable[..., None],
    *arguments: Any,
    start_method: str,
    deadline_s: float = _DEADLINE_S,
) -> Findings:
    """Run some work in a process of its own, and return what it sends.

    The process is ended when the work has ended, or at the deadline.

    Args:
        work: Called with ``arguments`` and what sends a finding (:data:`Tell`).
        arguments: For the work; to be pickled unless processes are forked.
        start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
        deadline_s: Seconds from the start of the work.
    """
    context: Any = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe(duplex=False)
    stacks, stack_end = context.Pipe(duplex=False)
    parent = os.getpid() if start_method == "fork" else 0
    process = context.Process(
        target=_main,
        args=(theirs, stack_end, parent, work, arguments),
        daemon=True,
        name="fastdata-probe",
    )
    with ours, theirs, stacks, stack_end:
        try:
            process.start()
        except Exception as error:  # what cannot be pickled, and processes that may have no others
            what = f"could not be started: {type(error).__name__}: {error}"
            return Findings(failure=Failure(kind="not started", what=what))
        theirs.close()
        stack_end.close()
        try:
            return _listen(process, ours, stacks, deadline_s)
        finally:
            process.kill()
            process.join()
            process.close()


def _listen(process: Any, ours: Connection, stacks: Connection, deadline_s: float) -> Findings:
    values: dict[str, Any] = {}
    idle = _IdleWatch(process.pid)
    until = time.monotonic() + _START_S
    begun = False

    def failed(kind: FailureKind, what: str, stack: str = "") -> Findings:
        return Findings(values=values, failure=Failure(kind=kind, what=what, stack=stack))

    while True:
        ready = multiprocessing.connection.wait([ours, process.sentinel], _LOOK_S)
        if ours in ready:
            try:
                kind, name, payload = pickle.loads(ours.recv_bytes())  # from our own process
            except EOFError:
                ready = [process.sentinel]
            except Exception:
                continue  # a value that can be pickled, but not read again, is no finding
            else:
                if kind == "begun":
                    begun, until = True, time.monotonic() + deadline_s
                elif kind == "found":
                    values[name] = payload
                elif kind == "raised":
                    error = _as_error(name, *payload)
                    what = f"raised {name}: {error}"
                    return Findings(
                        values=values, failure=Failure(kind="raised", what=what, error=error)
                    )
                else:
                    return Findings(values=values)
                continue
        if process.sentinel in ready:
            process.join()
            return failed("died", _death(process.exitcode))
        if begun and idle.stuck():
            stack = _stack(process.pid, stacks)
            return failed("stuck", f"waited for locks for {_STUCK_S:g} s", stack)
        if time.monotonic() > until:
            stack = _stack(process.pid, stacks) if begun else ""
            within = f"{deadline_s if begun else _START_S:g} s"
            what = f"took more than {within}" if begun else f"did not start within {within}"
            return failed("late", what, stack)


def _main(
    end: Connection,
    stacks: Connection,
    parent: int,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True, chain=False)
    torch.set_num_threads(1)
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)

    def tell(name: str, value: Any) -> None:
        # What cannot be pickled cannot be had, and is decided without.
        with contextlib.suppress(Exception):
            end.send_bytes(pickle.dumps(("found", name, value), pickle.HIGHEST_PROTOCOL))

    end.send(("begun", "", None))
    try:
        work(*arguments, tell)
    except BaseException as error:  # sys.exit(), too, is the fault of a sample
        text = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = b""
        end.send(("raised", type(error).__name__, (pickled, str(error), text)))
    else:
        end.send(("ended", "", None))
    # Threads that the dataset has started are not waited for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _as_error(kind: str, pickled: bytes, message: str, text: str) -> Exception:
    sent: Any = None
    with contextlib.suppress(Exception):
        sent = pickle.loads(pickled)
    error = sent if isinstance(sent, Exception) else RuntimeError(f"{kind}: {message}")
    error.add_note(f"In the process that tried the dataset:\n{text}")
    return error


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"left with exit code {code}"


def _stack(pid: int, stacks: Connection) -> str:
    if not hasattr(faulthandler, "register"):
        return ""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR1)
        if stacks.poll(_STACK_S):
            time.sleep(0.05)  # it is written line by line
            return os.read(stacks.fileno(), _STACK_BYTES).decode(errors="replace")
    return ""


class _IdleWatch:
    """Sees that all threads of a process wait for locks that perhaps no thread will release.

    A thread that waits for a file or a network waits elsewhere in the kernel, and one that waits
    for a clock as well gives a time. Where the kernel does not say so, nothing is seen: see
    ``wchan`` and ``syscall`` in https://man7.org/linux/man-pages/man5/proc.5.html and
    https://man7.org/linux/man-pages/man2/futex.2.html.
    """

    def __init__(self, pid: int) -> None:
        self._threads = Path(f"/proc/{pid}/task")
        self._since: float | None = None
        self._cpu_s = 0.0

    def stuck(self) -> bool:
        """Return whether it has been so for some seconds."""
        cpu_s, waiting = self._read()
        now = time.monotonic()
        if not waiting:
            self._since = None
        elif self._since is None or cpu_s - self._cpu_s > _BUSY * (1 + now - self._since):
            self._since, self._cpu_s = now, cpu_s
        return self._since is not None and now - self._since >= _STUCK_S

    def _read(self) -> tuple[float, bool]:
        ticks, waiting = 0, False
        try:
            for thread in self._threads.iterdir():
                if "futex" not in (thread / "wchan").read_text():
                    return 0.0, False
                timeout = (thread / "syscall").read_text().split()[4]
                if int(timeout, 16) != 0:
                    return 0.0, False
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
                waiting = True
        except (OSError, ValueError, IndexError):
            return 0.0, False
        return ticks / os.sysconf("SC_CLK_TCK"), waiting

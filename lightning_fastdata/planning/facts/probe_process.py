"""A process that tries out a dataset before the workers start, and is thrown away.

What a dataset opens when it is read must be opened in the workers: forked processes share the
position of an open file, and threads of a client that was used before a fork are missing after it.
So nothing is read in the training process. The process here is started as the workers will be. It
sends what it finds out piece by piece, so that a piece that takes too long costs only itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, Literal, TypeAlias

import torch

from lightning_fastdata.host import clock, system_calls

Tell: TypeAlias = Callable[[str, object], None]
"""Sends a finding to the training process: its name, and a value that can be pickled."""
FailureKind: TypeAlias = Literal["raised", "late", "died", "not started"]

_DEADLINE_S: Final = 30.0
_START_S: Final = 60.0  # a spawned process imports torch and unpickles a dataset of unknown size
_LOOK_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a trial came to no end.

    The work raised an error, it took longer than the deadline ("late"), a signal or an exit ended
    it ("died"), or the process could not be started.
    """

    kind: FailureKind
    what: str
    """What happened, as the end of a sentence that begins with the process."""
    error: Exception | None = None
    """What was raised, with the traceback of the process as a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What came of a trial."""

    values: dict[str, Any] = field(default_factory=dict)  # what was sent, by name
    failure: Failure | None = None  # why it did not end; None: it did


def try_apart(
    work: Callable[..., None],
    *arguments: object,
    start_method: str,
    deadline_s: float = _DEADLINE_S,
) -> Findings:
    """Run some work in a process of its own, and return what it sends.

    The work is called with ``arguments``, to be pickled unless processes are forked, and what sends
    a finding (:data:`Tell`). The process is ended when the work has ended, or at the deadline.
    """
    context = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe(duplex=False)
    forked = start_method == "fork"
    parent, files = os.getpid() if forked else 0, system_calls.files_being_read() if forked else ()
    process = context.Process(  # type: ignore[attr-defined]  # a context has it
        target=_main,
        args=(theirs, parent, files, work, arguments),
        daemon=True,
        name="fastdata-probe",
    )
    with ours, theirs, contextlib.ExitStack() as running:
        try:
            running.enter_context(system_calls.started(process))
        except Exception as error:  # what cannot be pickled, and processes that may have no others
            what = f"could not be started: {type(error).__name__}: {error}"
            return Findings(failure=Failure(kind="not started", what=what))
        theirs.close()
        values: dict[str, object] = {}
        failure = _listen(process, ours, deadline_s, values)
        return Findings(values=values, failure=failure)


def _listen(
    process: BaseProcess, ours: Connection, deadline_s: float, values: dict[str, object]
) -> Failure | None:
    """Receive findings into ``values`` until the work ends; return why it did not."""
    begun, until = False, clock.monotonic() + _START_S
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
                    begun, until = True, clock.monotonic() + deadline_s
                elif kind == "found":
                    values[name] = payload
                elif kind == "raised":
                    error = _as_error(name, *payload)
                    return Failure(kind="raised", what=f"raised {name}: {error}", error=error)
                else:
                    return None
                continue
        if process.sentinel in ready:
            process.join()
            code = process.exitcode or 0
            died = f"was ended by {signal.Signals(-code).name}" if code < 0 else ""
            return Failure(kind="died", what=died or f"left with exit code {code}")
        if clock.monotonic() > until:
            slow, never = f"took more than {deadline_s:g} s", f"did not start within {_START_S:g} s"
            return Failure(kind="late", what=slow if begun else never)


def _main(
    end: Connection,
    parent: int,
    files: tuple[system_calls.OpenFile, ...],
    work: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    system_calls.die_with(parent)
    system_calls.open_anew(files)
    torch.set_num_threads(1)
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)

    def tell(name: str, value: object) -> None:
        # What cannot be pickled cannot be had, and is decided without.
        with contextlib.suppress(Exception):
            end.send_bytes(pickle.dumps(("found", name, value), pickle.HIGHEST_PROTOCOL))

    end.send(("begun", "", None))
    try:
        work(*arguments, tell)
    except BaseException as error:  # sys.exit(), too, is the fault of a sample
        text, pickled = "".join(traceback.format_exception(error)), b""
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(error)
        end.send(("raised", type(error).__name__, (pickled, str(error), text)))
    else:
        end.send(("ended", "", None))
    # Threads that the dataset has started are not waited for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _as_error(kind: str, pickled: bytes, message: str, text: str) -> Exception:
    sent: object = None
    with contextlib.suppress(Exception):
        sent = pickle.loads(pickled)
    error = sent if isinstance(sent, Exception) else RuntimeError(f"{kind}: {message}")
    error.add_note(f"In the process that tried the dataset:\n{text}")
    return error

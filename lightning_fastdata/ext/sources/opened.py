"""What the sources have in common: they open what they read in each process that reads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeAlias, TypeVar, cast

from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.host.system_calls import started

T = TypeVar("T")
Handle = TypeVar("Handle")
"""What a process has open."""

Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One path or several."""


def as_list(paths: Paths) -> list[str]:
    """Return paths as texts.

    Raises:
        OptionsError: There is none.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise OptionsError("There is no path; give at least one.")
    return [os.fspath(path) for path in several]


_opened: weakref.WeakKeyDictionary[OpenedInEachProcess[Any], tuple[int, Any]]
_opened = weakref.WeakKeyDictionary()
"""What each has open, with the process that opened it: not among the attributes of a dataset, where
it would count as something that forked workers share."""


_openers: dict[type[OpenedInEachProcess[Any]], set[int]] = {}
"""Processes in which a library that does not survive forks was used: this one, its ancestors."""


class OpenedInEachProcess(Generic[Handle]):
    """Keeps what was opened, and opens it anew in a process that was forked or sent a copy."""

    survives_forks = True
    """Whether the library works in a process that was forked from one that has used it."""

    def open(self) -> Handle:
        """Open what is read; called once in each process."""
        raise NotImplementedError

    def opened(self) -> Handle:
        """Return what is open in this process."""
        process, kept = _opened.get(self, (0, None))
        if process != os.getpid():
            if not self.survives_forks:
                self._refuse_after_fork()
            kept = self.open()
            _opened[self] = os.getpid(), kept
        handle: Handle = kept
        return handle

    def _refuse_after_fork(self) -> None:
        users = _openers.setdefault(type(self), set())
        if users - {os.getpid()}:
            raise DatasetError(
                f"{type(self).__name__} cannot read in this process, which was forked from one "
                "that has read with it, too: its library does not survive that. Start workers "
                'another way (multiprocessing_context="forkserver"), or read in workers from the '
                "start."
            )
        users.add(os.getpid())

    def asked_apart(self, question: Callable[[], T]) -> T:
        """Return what a function returns, called in a process that ends.

        So that its library is not used in this one, from which workers may still be forked. Where
        it was used already, the function is called here.

        Raises:
            DatasetError: It raised, with its text; or the process died.
        """
        if os.getpid() in _openers.get(type(self), ()):
            answer, error = _answer(question)
        else:
            context: Any = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send_answer, args=(question, theirs))
            with ours, theirs, started(process):
                theirs.close()
                try:
                    answer, error = ours.recv()
                except EOFError:
                    answer, error = None, "the process that asked died"
        if error is not None:
            raise DatasetError(error)
        return cast("T", answer)


def _answer(question: Callable[[], object]) -> tuple[object, str | None]:
    try:
        return question(), None
    except Exception as error:
        said = str(error).partition("\n")[0]
        return None, f"{type(error).__name__}: {said}"


def _send_answer(question: Callable[[], object], pipe: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    pipe.send(_answer(question))

"""A mutant is one function of the package replaced by a wrong one, and the law that must fail."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest


class StaleMutantError(Exception):
    """The mutant does not fit the package any more, so that it says nothing about its law."""


class SurvivorError(Exception):
    """The law passes although the package is wrong."""


@dataclass(frozen=True)
class Mutant:
    """One precaution taken out, and the law that it breaks."""

    name: str
    """What is wrong, in a few words: the name of the test."""
    law: Callable[[], None]
    """Takes no arguments and raises one of ``failures`` if the law does not hold. It may be called
    several times in one process, so it leaves nothing behind."""
    owner: Any
    """The class or module that has the function."""
    attribute: str
    """The function's name there."""
    wrong: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Given the right function, returns the wrong one, which takes the same arguments."""
    failures: tuple[type[BaseException], ...] = (AssertionError, pytest.fail.Exception)
    """How the law says that it does not hold. Anything else that is raised is an error here."""

    @contextmanager
    def installed(self) -> Iterator[list[None]]:
        """Replace the function while the block runs; yield a list that grows with each call.

        Raises:
            StaleMutantError: The package has no such function.
        """
        where = f"{getattr(self.owner, '__qualname__', self.owner.__name__)}.{self.attribute}"
        kept = inspect.getattr_static(self.owner, self.attribute, None)
        right = getattr(self.owner, self.attribute, None)
        if kept is None or not callable(right):
            raise StaleMutantError(
                f"The mutant {self.name!r} replaces {where}, which is no function of the package "
                "any more. Point it to what took the function's place."
            )
        original = kept.__func__ if isinstance(kept, staticmethod | classmethod) else kept
        wrong = self.wrong(original)
        calls: list[None] = []

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            return wrong(*args, **kwargs)

        bound = isinstance(kept, staticmethod | classmethod)
        with mock.patch.object(
            self.owner, self.attribute, type(kept)(counted) if bound else counted
        ):
            yield calls

    def check(self) -> None:
        """See that the law holds, and that it fails under this mutant.

        Raises:
            SurvivorError: The law passes under the mutant.
            StaleMutantError: The function is gone, or the law never calls it in this process.
        """
        _must_hold(self.law)
        with self.installed() as calls:
            try:
                self.law()
            except self.failures:
                caught = True
            else:
                caught = False
        if not calls:
            raise StaleMutantError(
                f"The law never calls {self.attribute} of {self.owner.__name__} in this process, "
                f"so the mutant {self.name!r} says nothing. Give it a law that does."
            )
        if not caught:
            raise SurvivorError(
                f"The law passes under the mutant {self.name!r} ({len(calls)} calls of the wrong "
                f"{self.attribute}). Sharpen the law: it does not see what it is there for."
            )


@functools.cache
def _must_hold(law: Callable[[], None]) -> None:
    """Run a law on the package as it is, once for all of its mutants."""
    law()


def registered() -> dict[str, Mutant]:
    """Return all mutants by ``module: name``."""
    folder = Path(__file__).parent
    found = {}
    for module in pkgutil.iter_modules([str(folder)]):
        if module.name == "mutant" or module.name.startswith("test_"):
            continue
        for mutant in importlib.import_module(f"mutants.{module.name}").MUTANTS:
            name = f"{module.name}: {mutant.name}"
            assert name not in found, f"two mutants are named {name!r}"
            found[name] = mutant
    return found

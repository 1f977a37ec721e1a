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
    """It raises one of ``failures`` if it does not hold, and leaves nothing behind."""
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
        """Replace the function while the block runs; yield a list that grows with each call."""
        kept = inspect.getattr_static(self.owner, self.attribute, None)
        if kept is None or not callable(getattr(self.owner, self.attribute, None)):
            raise StaleMutantError(f"{self.name}: {self.owner.__name__} has no {self.attribute}.")
        bound = isinstance(kept, staticmethod | classmethod)
        original = kept.__func__ if bound else kept
        wrong, calls = self.wrong(original), list[None]()

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            return wrong(*args, **kwargs)

        with mock.patch.object(
            self.owner, self.attribute, type(kept)(counted) if bound else counted
        ):
            yield calls

    def check(self) -> None:
        """See that the law holds, and that it fails under this mutant."""
        _must_hold(self.law)
        caught = False
        with self.installed() as calls:
            try:
                self.law()
            except self.failures:
                caught = True
        if not calls:
            raise StaleMutantError(f"{self.name}: its law never calls {self.attribute}.")
        if not caught:
            raise SurvivorError(f"The law passes under {self.name!r}, {len(calls)} calls of it.")


@functools.cache
def _must_hold(law: Callable[[], None]) -> None:
    """Run a law on the package as it is, once for all of its mutants."""
    law()


def registered() -> dict[str, Mutant]:
    """Return all mutants by ``module: name``."""
    found = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name != "mutant" and not module.name.startswith("test_"):
            for mutant in importlib.import_module(f"mutants.{module.name}").MUTANTS:
                name = f"{module.name}: {mutant.name}"
                assert name not in found, f"two mutants are named {name!r}"
                found[name] = mutant
    return found

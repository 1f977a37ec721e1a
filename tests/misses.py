"""One test for all cases of a law: it goes through them, and tells at its end of all that failed.

To collect a test, and to set it up, takes longer than many a case does.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from thoroughness import LONG

SHOWN = 20
"""So many failures are told in full, and of the others the cases."""


class Misses:
    """Collects what fails in each case; the end of the ``with`` block raises if anything did."""

    def __init__(self) -> None:
        self.cases = 0
        self._told: list[tuple[str, str]] = []
        self._skipped: list[str] = []

    @contextmanager
    def case(self, *what: object) -> Iterator[None]:
        """Note what the block raises as a miss of this case, and go on."""
        self.cases += 1
        try:
            yield
        except pytest.skip.Exception as reason:
            self._skipped.append(str(reason))
        except (Exception, pytest.fail.Exception) as error:
            self._told.append((" ".join(str(one) for one in what), _told(error)))

    def check(self, right: object, *what: object) -> None:
        """Note a miss of this case unless it is right."""
        self.cases += 1
        if not right:
            self._told.append((" ".join(str(one) for one in what), "is not so"))

    def __enter__(self) -> Misses:
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        if error is not None:
            return
        if not self.cases:
            pytest.fail("There was no case.")
        if len(self._skipped) == self.cases:
            pytest.skip(self._skipped[0])
        if self._told:
            shown = [f"{what or 'a case'}: {told}" for what, told in self._told[:SHOWN]]
            shown += [what for what, _ in self._told[SHOWN:]]
            pytest.fail(
                f"{len(self._told)} of {self.cases} cases:\n\n" + "\n\n".join(shown), pytrace=False
            )


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Any], Any]:
    """Run a test with each of these values, as ``pytest.mark.parametrize`` does, but as one test.

    Several of them above one test go through all combinations. With the mark ``cases(n)`` a short
    run takes only ``n`` of them, spread evenly. Fixtures are set up once, for all cases; but each
    has a folder ``tmp_path`` of its own, and what it does with ``monkeypatch`` is undone behind it.
    """
    found = tuple(names.replace(",", " ").split()) if isinstance(names, str) else tuple(names)
    rows = []
    for value in values:
        parts = value if len(found) > 1 else (value,)
        if isinstance(value, type(pytest.param())):
            assert not value.marks, f"{value}: mark the test itself"
            parts = value.values
        rows.append(dict(zip(found, parts, strict=True)))

    def decorate(function: Any) -> Any:
        inner, grid = getattr(function, "grid", (function, ()))
        grid = (rows, *grid)

        @functools.wraps(function)
        def loop(**fixtures: Any) -> None:
            cases = list(itertools.product(*grid))
            with Misses() as misses:
                for number, parts in enumerate(_spread(cases, None if LONG else _most(loop))):
                    case = {name: value for part in parts for name, value in part.items()}
                    words = (f"{name}={_word(one)}" for name, one in case.items())
                    with misses.case(*words), _own(fixtures, number) as given:
                        inner(**case, **given)

        loop.grid = inner, grid  # type: ignore[attr-defined]
        signature = inspect.signature(function)
        assert set(found) <= set(signature.parameters), f"{function} takes no {found}"
        left = [one for name, one in signature.parameters.items() if name not in found]
        loop.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return loop

    return decorate


@contextmanager
def _own(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Return the fixtures of one case."""
    given = dict(fixtures)
    if "tmp_path" in given:
        given["tmp_path"] = given["tmp_path"] / f"case {number}"
        given["tmp_path"].mkdir()
    with ExitStack() as ends:
        if "monkeypatch" in given:
            given["monkeypatch"] = ends.enter_context(given["monkeypatch"].context())
        yield given


def _most(function: Any) -> int | None:
    """Return how many cases a short run takes, or None: all."""
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "cases"]
    return marks[0].args[0] if marks else None


def _spread(cases: list[Any], count: int | None) -> list[Any]:
    """Return so many cases, spread evenly over all, or all of them."""
    if count is None or count >= len(cases):
        return cases
    return [cases[(2 * i + 1) * len(cases) // (2 * count)] for i in range(count)]


def _word(value: object) -> str:
    named = getattr(value, "__name__", None) or repr(value)
    return named if len(named) < 120 else f"{named[:117]}..."


def _told(error: BaseException) -> str:
    """Return an error in words, with the line of the tests that it comes from."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "/tests/" in one.filename]
    where = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(where.filename, where.lineno or 0).strip()
    words = "".join(traceback.format_exception_only(error)).strip()
    return f"{words}\n  {where.filename}:{where.lineno}: {line}"

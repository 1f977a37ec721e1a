"""Each law notices what it is there for, and the harness notices a law that does not."""

from __future__ import annotations

import pytest
from misses import each

from mutants.mutant import Mutant, StaleMutantError, SurvivorError, registered

MUTANTS = registered()


@pytest.mark.mutant
@pytest.mark.parametrize("name", MUTANTS)
def test_its_law_fails_under_a_mutant(name):
    MUTANTS[name].check()


class Adder:
    def add(self, one, other):
        return one + other

    @staticmethod
    def double(number):
        return 2 * number


def adds():
    assert Adder().add(1, 2) == 3


def doubles():
    assert Adder.double(2) == 4


def holds_whatever_is_added():
    Adder().add(1, 2)


def never():
    raise AssertionError("never")


def mutant(law, attribute, wrong):
    return Mutant("adds wrongly", law, Adder, attribute, lambda right: wrong)


def test_a_mutant_that_its_law_notices_passes_and_is_taken_out_again():
    before = dict(vars(Adder))
    mutant(adds, "add", lambda self, one, other: one - other).check()
    mutant(doubles, "double", lambda number: number).check()
    assert dict(vars(Adder)) == before


@each(
    ("law", "attribute", "wrong", "error"),
    [
        (holds_whatever_is_added, "add", lambda self, one, other: 0, SurvivorError),
        (adds, "subtract", lambda number: number, StaleMutantError),
        (adds, "double", lambda number: number, StaleMutantError),
        (never, "add", lambda self, one, other: 0, AssertionError),
        (adds, "add", lambda self: 0, TypeError),
    ],
)
def test_a_law_that_does_not_see_its_mutant_is_reported(law, attribute, wrong, error):
    with pytest.raises(error):
        mutant(law, attribute, wrong).check()

"""Each law notices what it is there for, and the harness notices a law that does not."""

from __future__ import annotations

import math

import pytest

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


def mutant(law, attribute, wrong, owner=Adder):
    return Mutant("adds wrongly", law, owner, attribute, lambda right: wrong)


def test_a_mutant_that_its_law_notices_passes_and_is_taken_out_again():
    before = dict(vars(Adder))
    mutant(adds, "add", lambda self, one, other: one - other).check()
    mutant(doubles, "double", lambda number: number).check()
    assert dict(vars(Adder)) == before


def test_a_law_that_passes_under_its_mutant_is_reported():
    with pytest.raises(SurvivorError, match=r"adds wrongly.*1 calls"):
        mutant(holds_whatever_is_added, "add", lambda self, one, other: 0).check()


@pytest.mark.parametrize("attribute", ["subtract", "double"])
def test_a_mutant_of_what_is_gone_or_is_never_called_is_reported(attribute):
    with pytest.raises(StaleMutantError, match=attribute):
        mutant(adds, attribute, lambda number: number).check()


def test_a_law_that_fails_by_itself_or_breaks_in_another_way_says_nothing_of_its_mutant():
    def never():
        raise AssertionError("never")

    with pytest.raises(AssertionError, match="never"):
        mutant(never, "add", lambda self, one, other: 0).check()
    with pytest.raises(TypeError):
        mutant(adds, "add", lambda self: 0).check()


def test_functions_of_modules_can_be_replaced_too():
    def finds_the_root():
        assert math.sqrt(4) == 2

    mutant(finds_the_root, "sqrt", lambda number: number, owner=math).check()
    assert math.sqrt(9) == 3

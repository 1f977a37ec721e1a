from __future__ import annotations

import pytest
from misses import each
from thoroughness import LONG


def failed(run, *args, **kwargs):
    with pytest.raises(pytest.fail.Exception) as told:
        run(*args, **kwargs)
    return str(told.value)


def test_every_case_is_tried_and_each_that_fails_is_told_with_what_it_is():
    tried = []

    @each("one", [1, 2, 3])
    @each(("name", "other"), [("a", 1), ("b", 3)])
    def law(one, name, other):
        tried.append((one, name))
        assert one != other

    told = failed(law)
    assert tried == [(one, name) for one in (1, 2, 3) for name in "ab"]
    assert told.startswith("2 of 6 cases")
    assert "one=1 name='a' other=1: AssertionError" in told
    assert "one=3 name='b' other=3: AssertionError" in told
    assert "test_misses.py:" in told


def test_a_law_without_cases_fails_and_one_whose_cases_are_all_skipped_is_skipped():
    @each("one", [])
    def empty(one):
        pass

    @each("one", [1, 2])
    def skipped(one):
        pytest.skip(f"there is no {one}")

    assert failed(empty) == "There was no case."
    with pytest.raises(pytest.skip.Exception, match="there is no 1"):
        skipped()


def test_a_short_run_takes_as_many_cases_as_its_mark_says():
    tried = []

    @pytest.mark.cases(2)
    @each("number", range(10))
    def law(number):
        tried.append(number)

    law()
    assert tried == (list(range(10)) if LONG else [2, 7])

"""A short run tries the same things each time."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from thoroughness import LONG, LONGEST


def examples():
    """Return what Hypothesis draws where it draws the same things each time."""
    found = []

    @settings(derandomize=True, database=None, max_examples=300, phases=[Phase.generate])
    @given(st.integers(0, 10**9), st.text())
    def tries(number, text):
        found.append((number, text))

    tries()
    return found


@pytest.mark.skipif(LONG, reason="a long run draws other examples each time")
def test_examples_are_the_same_whatever_is_imported(tmp_path, monkeypatch):
    before = examples()
    monkeypatch.syspath_prepend(tmp_path)
    lines = [f"N{number} = {number * 1001 + 7}, 'text {number}'" for number in range(200)]
    (tmp_path / "imported_meanwhile.py").write_text("\n".join(lines))
    importlib.import_module("imported_meanwhile")
    assert examples() == before


def test_the_files_that_take_longest_are_there():
    assert [file for file in LONGEST if not (Path(__file__).parent / file).exists()] == []

"""A fingerprint is the same while nothing changes, and another one after a change that is seen."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from front_door.test_changing_world import Rows
from misses import each
from torch.utils.data import Dataset, TensorDataset

from lightning_fastdata.fingerprint import fingerprint
from lightning_fastdata.host import clock

OF_NOBODY = object()
"""A global that is no plain data."""


HELPERS = """
import functools
LEVEL = 0
class Base:
    level = 0
class Settings(Base):
    pass
def helper(value):
    return value + LEVEL
def adding(function):
    @functools.wraps(function)
    def added(value):
        return function(value) + LEVEL
    return added
def new():
    return 1
"""


@each(
    ("text", "change"),
    [
        ("from {} import helper", lambda module: setattr(module, "LEVEL", 1)),
        ("from {} import helper as own", lambda module: setattr(module, "LEVEL", 1)),
        ("import {} as own", lambda module: setattr(module, "LEVEL", 1)),
        ("from {} import Settings", lambda module: setattr(module.Base, "level", 1)),
        ("from {} import Settings", lambda module: setattr(module, "LEVEL", 1)),
        ("import {} as own", lambda module: setattr(module, "helper", module.new)),
        (
            "import {} as own",
            lambda module: setattr(module.helper, "__code__", module.new.__code__),
        ),
        (
            "import {} as own\nclass Rows:\n    of = own.adding(lambda value: value)\ndel own",
            lambda module: setattr(module, "LEVEL", 1),
        ),
    ],
)
def test_modules_of_the_users_have_a_part_in_it_however_they_are_imported(
    text: str, change: Any, monkeypatch
) -> None:
    number = next(NUMBERS)
    for name, code in (f"helpers{number}", HELPERS), (f"rows{number}", text):
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(code.format(f"helpers{number}") if code is text else code, vars(module))
        exec("class Rows: pass\n" * ("Rows" not in vars(module)), vars(module))
    rows = sys.modules[f"rows{number}"].Rows()
    before = fingerprint(rows)
    assert before is not None
    assert fingerprint(rows) == before
    change(sys.modules[f"helpers{number}"])
    assert fingerprint(rows) != before


NUMBERS = itertools.count()


@each(
    ("value", "change"),
    [
        (torch.zeros(2).share_memory_(), lambda v: v.add_(1)),
        (multiprocessing.Value("i", 0), lambda v: setattr(v, "value", 1)),
        (multiprocessing.Array("i", 3), lambda v: v.__setitem__(0, 1)),
    ],
)
def test_what_other_processes_see_change_is_told_from_what_they_were_started_with(
    value: Any, change: Any
) -> None:
    data = Rows(lambda *_: 0, value=value)
    before = fingerprint(data)
    change(value)
    after = fingerprint(data)
    assert before is not None
    assert after is not None
    assert after.own == before.own
    assert after.live != before.live


@each("held", [torch.zeros(4).share_memory_().numpy()[1:], multiprocessing.RawArray("i", 3)])
def test_memory_of_which_that_is_not_known_is_compared(held: Any) -> None:
    before = fingerprint([held])
    assert before is not None
    held[0] = 5
    assert fingerprint([held]) != before


def test_what_cannot_be_compared_has_none(tmp_path) -> None:
    file = tmp_path / "rows"
    file.write_text("")
    with file.open() as opened:
        assert fingerprint(opened) is None
    assert fingerprint(iter([1, 2]) for _ in range(2)) is None
    assert fingerprint(torch.zeros(2, device="meta")) is None


def test_objects_that_refer_to_each_other_are_compared() -> None:
    one, other = Rows(lambda *_: 0), Rows(lambda *_: 0)
    one.other, other.other = other, one
    before = fingerprint(one)
    assert before is not None
    other.number = 3
    assert fingerprint(one) not in (None, before)


def test_no_more_time_is_spent_than_is_allowed(monkeypatch) -> None:
    passed = iter(range(1000))
    monkeypatch.setattr(clock, "thread_time", lambda: float(next(passed)))
    large = torch.zeros(2**22)
    assert fingerprint(large, within_s=3) is not None
    assert fingerprint([large, torch.zeros(2**23), torch.ones(2**23)], within_s=3) is None


def test_of_large_tensors_their_count_of_changes_is_enough_for_a_rough_one() -> None:
    data = TensorDataset(torch.zeros(2**20))
    before = fingerprint(data, roughly=True)
    assert fingerprint(data, roughly=True) == before
    data.tensors[0][3] = 1
    assert fingerprint(data, roughly=True) != before


@pytest.mark.parametrize("roughly", [False, True])
def test_an_array_of_no_elements_is_one(roughly) -> None:
    assert fingerprint(np.zeros((0, 3)), torch.zeros(0), roughly=roughly) is not None


class Row(NamedTuple):
    number: int


class ReadsRows(Dataset):
    def __getitem__(self, index):
        return Row(index)


def test_methods_that_are_made_anew_of_the_same_code_are_no_change(monkeypatch):
    before = fingerprint(ReadsRows())
    for name in ("_asdict", "__repr__"):
        old = vars(Row)[name]
        again = FunctionType(old.__code__, old.__globals__, name, old.__defaults__, old.__closure__)
        monkeypatch.setattr(Row, name, again)
    assert before is not None
    assert fingerprint(ReadsRows()) == before
    monkeypatch.setattr(Row, "_asdict", lambda row: {"number": row.number + 1})
    assert fingerprint(ReadsRows()) != before


def added(a, b):
    return a + b


def subtracted(a, b):
    return a - b


def kept_by(inner, number=1, **kept):
    def method(row):
        return inner(row, number)

    vars(method).update(kept)
    return method


METHODS = {
    "as it is": lambda: kept_by(added),
    "other code of the same form": lambda: kept_by(subtracted),
    "another number": lambda: kept_by(added, 2),
    "a function of a function": lambda: kept_by(kept_by(subtracted)),
    "another function of a function": lambda: kept_by(kept_by(added)),
    "another attribute": lambda: kept_by(added, told=1),
}


def test_methods_are_told_apart_by_all_that_they_are_made_of(monkeypatch):
    monkeypatch.setattr(subtracted, "__code__", subtracted.__code__.replace(
        co_name=added.__code__.co_name, co_qualname=added.__code__.co_qualname,
        co_firstlineno=added.__code__.co_firstlineno,
    ))  # fmt: skip
    found = {}
    for name, make in METHODS.items():
        monkeypatch.setattr(Row, "method", make(), raising=False)
        found[name] = fingerprint(ReadsRows())
        monkeypatch.setattr(Row, "method", make())
        assert fingerprint(ReadsRows()) == found[name], name
    assert None not in found.values()
    assert len(set(found.values())) == len(METHODS)

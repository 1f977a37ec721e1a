"""A fingerprint is the same while nothing changes, and another one after a change that is seen."""

from __future__ import annotations

import abc
import argparse
import importlib
import itertools
import json
import mmap
import multiprocessing
import operator
import os
import sys
import tempfile
from array import array
from collections import ChainMap, Counter, UserDict, UserList
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from front_door.test_changing_world import Rows
from misses import each
from torch.utils.data import Dataset

from lightning_fastdata import tree
from lightning_fastdata.fingerprint import Watched, fingerprint
from lightning_fastdata.host import clock

TEXTS = "'T'" if hasattr(np.dtypes, "StringDType") else "object"
"""Type of an array of texts of any length; NumPy 1 has none."""


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


def private_map(kind: str) -> mmap.mmap:
    if kind == "of a file":
        with tempfile.TemporaryFile() as file:
            file.write(bytes(16))
            file.flush()
            return mmap.mmap(file.fileno(), 16, access=mmap.ACCESS_COPY)
    return mmap.mmap(-1, 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@each(
    "held",
    [
        torch.zeros(4).share_memory_().numpy()[1:],
        multiprocessing.RawArray("i", 3),
        private_map("of a file"),
        *map(private_map, ["of no file"] * Path("/proc/self/maps").exists()),
    ],
)
def test_memory_of_which_that_is_not_known_is_compared(held: Any) -> None:
    before = fingerprint([held])
    assert before is not None
    assert fingerprint([held]) == before
    held[0] = 5
    assert fingerprint([held]) != before


def test_a_map_that_processes_share_is_the_same_whatever_it_holds() -> None:
    held = mmap.mmap(-1, 16)
    before = fingerprint(held)
    held[0] = 5
    assert fingerprint(held) == before


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


@each("kind", ["dates", "dates of a zone", "spans", "categories", "numbers with gaps", "days"])
def test_what_pandas_computes_as_a_frame_is_read_is_no_change_and_a_written_value_is_one(kind):
    pandas = pytest.importorskip("pandas")
    column = {
        "dates": lambda: pandas.date_range("2020", periods=6),
        "dates of a zone": lambda: pandas.date_range("2020", periods=6, tz="Europe/Berlin"),
        "spans": lambda: pandas.to_timedelta(range(6), unit="s"),
        "categories": lambda: pandas.Categorical(list("abcabc")),
        "numbers with gaps": lambda: pandas.array([1, 2, None] * 2, dtype="Int64"),
        "days": lambda: pandas.period_range("2020", periods=6, freq="D"),
    }[kind]()
    frame = pandas.DataFrame({"number": range(6), "column": column})
    groups = frame.groupby("number")
    before = fingerprint(frame, groups, with_globals=False)
    for row in range(6):
        str(frame.iloc[row]["column"])
        str(frame["column"].iloc[row])
        groups.get_group(row)
    read = fingerprint(frame, groups, with_globals=False)
    frame.loc[3, "column"] = frame.loc[1, "column"]
    assert before is not None
    assert read == before
    assert fingerprint(frame, groups, with_globals=False) != before


def test_no_more_time_is_spent_than_is_allowed(monkeypatch) -> None:
    passed = iter(range(1000))
    monkeypatch.setattr(clock, "thread_time", lambda: float(next(passed)))
    large = torch.zeros(2**22)
    assert fingerprint(large, within_s=3) is not None
    assert fingerprint([large, torch.zeros(2**23), torch.ones(2**23)], within_s=3) is None


def test_an_array_of_no_elements_is_one() -> None:
    assert fingerprint(np.zeros((0, 3)), torch.zeros(0)) is not None


@pytest.mark.parametrize("large", [torch.zeros(2**20), np.zeros(2**20, np.float32)])
def test_one_number_of_a_large_dataset_counts(large) -> None:
    data = [large, "another part"]
    before = fingerprint(data)
    assert fingerprint(data) == before
    large[-3] = 1
    assert fingerprint(data) != before


def test_a_single_number_of_a_table_can_be_compared() -> None:
    table = torch.zeros(2, 3)
    before = fingerprint(table[1:, 1])
    assert before is not None
    table[1, 1] = 1
    assert fingerprint(table[1:, 1]) != before


class Row(NamedTuple):
    number: int


class ReadsRows(Dataset):
    def __getitem__(self, index):
        return Row(index)


def test_methods_and_fields_that_are_made_anew_alike_are_no_change(monkeypatch):
    before = fingerprint(ReadsRows())
    for name in ("_asdict", "__repr__"):
        old = vars(Row)[name]
        again = FunctionType(old.__code__, old.__globals__, name, old.__defaults__, old.__closure__)
        monkeypatch.setattr(Row, name, again)
    monkeypatch.setattr(Row, "number", type(vars(Row)["number"])(0, "The field at 0."))
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


class Point(NamedTuple):
    """A tuple with names."""

    value: int


class Base(abc.ABC):  # noqa: B024 - as settings are
    """Of whom the user's settings are derived."""

    def __init__(self) -> None:
        self.value = 0


class Keeps(Base):
    """Of the user's, with something that is no plain data."""

    def __init__(self) -> None:
        self.kept = torch.nn.Linear(1, 1)


def changed(name: str, value: object) -> Callable[[ModuleType], None]:
    return lambda module: setattr(module, name, value)


@each(
    ("text", "change"),
    [
        ("at = Namespace(size=1, root=Path('.'))", lambda module: setattr(module.at, "size", 2)),
        (
            "at = {'device': torch.device('cpu'), 'size': 1}",
            lambda module: module.at.update(size=2),
        ),
        ("at = {'model': Linear(1, 1), 'size': 1}", lambda module: module.at.update(size=2)),
        ("at = [len, {'deep': [Linear(1, 1), 'a']}]", lambda m: m.at[1]["deep"].append("b")),
        ("at = [Linear(1, 1)]", lambda module: module.at.append(1)),
        ("at = {'a': Linear(1, 1)}", lambda module: module.at.update(b=module.at["a"])),
        ("at = {'a': Linear(1, 1)}", lambda module: module.at.update(b=module.at.pop("a"))),
        ("at = [Linear(1, 1)] * 300", lambda module: module.at.append(module.at[0])),
        ("at = {'a': Linear(1, 1)}", lambda module: module.at.update(a=torch.nn.Linear(1, 1))),
        ("at = {'deep': [{'a': len}]}", lambda module: module.at["deep"][0].update(a=max)),
        ("at = Linear(1, 1)", changed("at", torch.nn.Linear(1, 1))),
        ("at = Keeps()", changed("at", Keeps())),
        ("class at:\n pipe = Linear(1, 1)", lambda m: setattr(m.at, "pipe", torch.nn.Linear(1, 1))),
        ("class at:\n kinds = {'a': len}", lambda module: module.at.kinds.update(a=max)),
        ("at = Point(1)", changed("at", Point(2))),
        ("at = Base()", lambda module: setattr(module.at, "value", 1)),
        ("at = Path('a')", changed("at", Path("b"))),
        ("at = timedelta(1)", changed("at", timedelta(2))),
        ("at = Decimal(1)", changed("at", Decimal(2))),
        ("at = torch.float32", changed("at", torch.float64)),
        ("at = Counter(a=1)", lambda module: module.at.update(a=1)),
        ("at = Counter(a=1, b=len)", lambda module: module.at.update(a=1)),
        ("at = ChainMap({'a': 1})", lambda module: module.at.update(a=2)),
        ("at = UserDict(a=1)", lambda module: module.at.update(a=2)),
        ("at = UserList([1])", lambda module: module.at.append(2)),
        ("at = UserList([1, Linear(1, 1)])", lambda module: module.at.append(2)),
        ("at = array('d', [1])", lambda module: module.at.append(2)),
        ("at = np.array(['a', 1], dtype=object)", lambda module: module.at.put(0, "b")),
        (f"at = np.array(['a', 'b'], {TEXTS})", lambda module: operator.setitem(module.at, 0, "c")),
    ],
)
def test_of_globals_that_are_or_hold_other_things_it_is_compared_which_ones_and_what_is_plain(
    text, change, monkeypatch
):
    module = ModuleType("users_settings")
    here = {"Namespace": argparse.Namespace, "Path": Path, "torch": torch, "Decimal": Decimal}
    here |= {"Linear": torch.nn.Linear, "Point": Point, "Base": Base, "timedelta": timedelta}
    here |= {"Counter": Counter, "ChainMap": ChainMap, "UserDict": UserDict, "UserList": UserList}
    here |= {"array": array, "np": np, "Keeps": Keeps}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(here)
    exec(f"{text}\ndef read(own, index):\n    return at\n", vars(module))
    check_that_it_is_seen(module.read, partial(change, module))


@each(
    "change",
    [
        lambda: os.chdir("elsewhere"),
        lambda: os.environ.update(OF_THE_USER="2"),
        lambda: os.environ.pop("OF_THE_USER"),
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_device("meta"),
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: np.seterr(divide="raise"),
        lambda: torch.use_deterministic_algorithms(True),
    ],
)
def test_settings_with_which_new_processes_start_are_compared(change, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_USER", "1")
    dtype = torch.get_default_dtype()
    try:
        with torch.enable_grad(), np.errstate():
            check_that_it_is_seen(lambda own, index: index, change)
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.set_autocast_enabled("cpu", False)
        torch.use_deterministic_algorithms(False)


@each(
    "change",
    [
        lambda weight: setattr(weight, "grad", torch.ones(2)),
        lambda weight: setattr(weight, "grad", None),
        lambda weight: weight.grad.add_(1),
    ],
)
def test_gradients_are_compared(change):
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    check_that_it_is_seen(lambda own, index: weight.grad, partial(change, weight))


@each("held", ["by an attribute", "by a function of its text"])
def test_a_module_that_the_program_keeps_itself_is_compared(held):
    module = ModuleType("of_no_import")
    exec("size = 1\ndef read(own, index):\n    return size\n", vars(module))
    read = (lambda own, _, module=module: module.size) if held == "by an attribute" else module.read
    check_that_it_is_seen(read, lambda: setattr(module, "size", 2))


def test_the_globals_of_a_text_that_was_executed_are_compared():
    names: dict[str, Any] = {}
    exec("size = 1\ndef read(own, index):\n    return size\n", names)
    check_that_it_is_seen(names["read"], lambda: names.update(size=2))


def test_a_module_of_the_users_may_have_the_name_of_one_of_pythons(tmp_path, monkeypatch):
    (tmp_path / "sched.py").write_text("size = 1\ndef read(own, index):\n    return size\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sched", raising=False)
    tree.is_users.cache_clear()
    module = importlib.import_module("sched")
    try:
        check_that_it_is_seen(module.read, lambda: setattr(module, "size", 2))
    finally:
        monkeypatch.delitem(sys.modules, "sched")
        tree.is_users.cache_clear()


@each(("origin", "users"), [({"dir_info": {}}, True), ({"archive_info": {}}, False), (None, False)])
def test_a_project_of_the_users_may_be_installed(origin, users, tmp_path, monkeypatch):
    folder, name = tmp_path / "site-packages", f"project{abs(hash(str(origin)))}"
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text("size = 1\ndef read(own, index):\n    return size\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "RECORD").write_text(f"{name}.py,,\n{name}-1.dist-info/RECORD,,\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps({"url": "file:///project", **origin}))
    monkeypatch.syspath_prepend(folder)
    forget = (tree.is_users.cache_clear, tree._installed_projects.cache_clear)
    [each() for each in forget]
    module = importlib.import_module(name)
    try:
        dataset = Rows(module.read)
        before = fingerprint(dataset)
        module.size = 2
        assert (fingerprint(dataset) != before) is users
    finally:
        monkeypatch.delitem(sys.modules, name)
        [each() for each in forget]


def check_that_it_is_seen(read: Any, change: Callable[[], object]) -> None:
    """Check that a change is seen of a dataset that reads so, and nothing else before it."""
    dataset, watched = Rows(read), Watched()
    before = fingerprint(dataset), watched.now((dataset,), 1.0)
    assert None not in before
    assert before == (fingerprint(dataset), watched.now((dataset,), 1.0))
    change()
    assert fingerprint(dataset) != before[0]
    assert watched.now((dataset,), 1.0) != before[1]

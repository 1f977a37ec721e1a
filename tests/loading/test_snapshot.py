"""A snapshot holds while nothing changes, and no longer once anything has that is compared."""

from __future__ import annotations

import ctypes
import datetime
import functools
import itertools
import pickle
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from front_door.test_changing_world import KINDS, Rows, beside_an_open_file
from misses import Misses, each
from thoroughness import LONG
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lightning_fastdata.fingerprint import Watched, fingerprint

FOR_EVER = float("inf")


def looked_at(*objects):
    """Return what tells what objects are, and what it has told; it says the same at once."""
    watched = Watched()
    before = watched.now(objects, FOR_EVER)
    assert before is not None
    assert watched.now(objects, FOR_EVER) is before
    return watched, before


class Plain:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Other(Plain):
    pass


class Slotted:
    __slots__ = ("deep", "flat")

    def __init__(self, deep: Any) -> None:
        self.deep, self.flat = deep, 1


class Pair(NamedTuple):
    first: Any
    second: Any


def shifted(items):
    items["a"] = items.pop("a")


LIST = {
    "appended": lambda v: v.append(4),
    "replaced": lambda v: v.__setitem__(0, 5),
    "by what is equal": lambda v: v.__setitem__(0, True),
    "removed": lambda v: v.pop(),
    "reversed": lambda v: v.reverse(),
    "emptied": lambda v: v.clear(),
}
DICT = {
    "added": lambda v: v.update(c=3),
    "replaced": lambda v: v.update(a=5),
    "by what is equal": lambda v: v.update(a=True),
    "removed": lambda v: v.pop("b"),
    "in another order": shifted,
    "another name": lambda v: v.update(d=v.pop("b")),
    "emptied": lambda v: v.clear(),
}
SET = {
    "added": lambda v: v.add(9),
    "removed": lambda v: v.discard("three"),
    "emptied": lambda v: v.clear(),
}
DEQUE = {
    "appended": lambda v: v.append(4),
    "rotated": lambda v: v.rotate(1),
    "replaced": lambda v: v.__setitem__(0, 5),
}


def through_memory(address, count=1):
    ctypes.memset(address, 7, count)


def normalised(tensor):
    """The running mean is written without being counted."""
    torch.nn.functional.batch_norm(
        torch.ones(2, 3, 4), tensor[0], torch.ones(3), training=True, momentum=0.5
    )


def in_inference(tensor):
    with torch.inference_mode():
        tensor.add_(1)


def beside_the_old(tensor):
    OLD.append(tensor.data)
    tensor.data = torch.ones(2, 3)


OLD: list[object] = [print]
"""No plain data, so that it is not compared itself."""


def a_tensor():
    return torch.zeros(2, 3)


TENSOR = {
    "in place": lambda v: v.add_(1),
    "data": lambda v: v.data.add_(1),
    "numpy": lambda v: v.numpy().__setitem__((0, 0), 1),
    "dlpack": lambda v: torch.from_dlpack(torch.to_dlpack(v)).add_(1),
    "storage": lambda v: v.untyped_storage().__setitem__(2, 1),
    "apply": lambda v: v.apply_(lambda x: x + 1),
    "normalised": normalised,
    "inference": in_inference,
    "last byte": lambda v: through_memory(v.data_ptr() + v.nbytes - 1),
    "other data": lambda v: setattr(v, "data", torch.ones(2, 3)),
    "other data beside the old": beside_the_old,
    "set": lambda v: v.set_(torch.ones(2, 3)),
    "resized": lambda v: v.resize_(4, 3),
    "transposed": lambda v: v.t_(),
    "unsqueezed": lambda v: v.unsqueeze_(0),
    "shared": lambda v: v.share_memory_().add_(1),
    "gradient": lambda v: v.requires_grad_(),
    "attribute": lambda v: setattr(v, "tag", 1),
    "negative zero": lambda v: v.neg_(),
    "gone": lambda v: v.untyped_storage().resize_(0),
}


def an_array():
    return np.zeros((2, 3), np.float32)


ARRAY = {
    "in place": lambda v: v.__iadd__(1),
    "tensor": lambda v: torch.from_numpy(v).add_(1),
    "memoryview": lambda v: memoryview(v).__setitem__((0, 1), 1.0),
    "last byte": lambda v: through_memory(v.ctypes.data + v.nbytes - 1),
    "type": lambda v: setattr(v, "dtype", np.int32),
    "shape": lambda v: setattr(v, "shape", (3, 2)),
    "resized": lambda v: v.resize((4, 3), refcheck=False),
    "negative zero": lambda v: np.negative(v, out=v),
}


OBJECT = {
    "attribute": lambda v: setattr(v, "deep", 2),
    "by what is equal": lambda v: setattr(v, "deep", True),
}
MORE = {
    "new attribute": lambda v: setattr(v, "new", 2),
    "deleted": lambda v: delattr(v, "deep"),
    "other dict": lambda v: setattr(v, "__dict__", {"deep": 5}),
}


def a_function():
    cell = [1]
    number = 2

    def function(first=3, *, second=4):
        return cell, number, first, second

    function.kept = 5
    return function


def another_closure():
    other, another_one = 3, 4
    return lambda first=3, *, second=4: (other, another_one, first, second)


FUNCTION = {
    "code": lambda v: setattr(v, "__code__", another_closure().__code__),
    "defaults": lambda v: setattr(v, "__defaults__", (9,)),
    "keyword defaults": lambda v: setattr(v, "__kwdefaults__", {"second": 9}),
    "a keyword default": lambda v: v.__kwdefaults__.__setitem__("second", 9),
    "a cell": lambda v: setattr(v.__closure__[1], "cell_contents", 9),
    "in a cell": lambda v: v.__closure__[0].cell_contents.append(9),
    "attribute": lambda v: setattr(v, "kept", 9),
    "new attribute": lambda v: setattr(v, "new", 9),
}


def a_class():
    class Own(Plain):
        number = 1
        items = [1]  # noqa: RUF012 - as people write them

        def method(self):
            return 1

        @property
        def asked(self):
            return 1

        @staticmethod
        def alone():
            return 1

    return Own


CLASS = {
    "attribute": lambda v: setattr(v, "number", 2),
    "new attribute": lambda v: setattr(v, "new", 2),
    "in an attribute": lambda v: v.items.append(2),
    "method": lambda v: setattr(v, "method", lambda self: 2),
    "code of a method": lambda v: setattr(v.method, "__code__", (lambda self: 2).__code__),
    "property": lambda v: setattr(v, "asked", property(lambda self: 2)),
    "static method": lambda v: setattr(v, "alone", staticmethod(lambda: 2)),
    "deleted": lambda v: delattr(v, "number"),
    "bases": lambda v: setattr(v, "__bases__", (Other,)),
}


@functools.lru_cache(maxsize=8)
def remembered(number):
    return number


def remembering():
    remembered.cache_clear()
    return remembered


def a_module():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    return module.requires_grad_(False)


def no_gradient(module):
    module[0].weight.requires_grad_()


class Random(random.Random):
    pass


class Partial(functools.partial):
    pass


class Lists(defaultdict):
    pass


class Named(PurePosixPath):
    pass


class Unset:
    __slots__ = ("deep", "flat")


def of_a_metaclass():
    class Kind(type):
        factor = 1

    class Holder(metaclass=Kind):
        pass

    return Holder


class Described:
    """A descriptor."""

    number = 1

    def __get__(self, *_):
        return self.number


def describes():
    class Holder:
        described = Described()

        @functools.cached_property
        def cached(self):
            return 1

    return Holder


def exchanged_property(holder):
    other = functools.cached_property(lambda self: 2)
    other.__set_name__(holder, "cached")
    holder.cached = other


Ways = dict[str, Callable[[Any], object]]


def thing(make: Callable[[], Any], *, noted: bool = True, **ways: Callable[[Any], object]) -> Any:
    """Return how a thing is made, how it is changed, and whether a second look goes by notes."""
    return make, ways, noted


THINGS: dict[str, tuple[Callable[[], Any], Ways, bool]] = {
    "list": thing(lambda: [1, 2.0, "three"], **LIST),
    "dict": thing(lambda: {"a": 1, "b": 2}, **DICT),
    "set": thing(lambda: {1, "three"}, **SET),
    "deque": thing(lambda: deque([1, 2, 3], maxlen=3), **DEQUE),
    "ordered dict": thing(
        lambda: OrderedDict(a=1, b=2),
        **DICT,
        moved=lambda v: v.move_to_end("a"),
        named=lambda v: setattr(v, "x", 1),
    ),
    "default dict": thing(
        lambda: defaultdict(list, a=1, b=2),
        **DICT,
        asked=lambda v: v["z"],
        made=lambda v: setattr(v, "default_factory", int),
    ),
    "bytes": thing(lambda: bytearray(b"abc"), one=lambda v: v.__setitem__(1, 0)),
    "tensor": thing(a_tensor, **TENSOR),
    "tensor of an array": thing(
        lambda: torch.from_numpy(np.zeros(4)), array=lambda v: v.numpy().__iadd__(1)
    ),
    "half numbers": thing(lambda: torch.zeros(3, dtype=torch.bfloat16), add=lambda v: v.add_(1)),
    "parameter": thing(
        lambda: torch.nn.Parameter(a_tensor(), requires_grad=False),
        data=TENSOR["data"],
        numpy=TENSOR["numpy"],
    ),
    "transposed tensor": thing(lambda: a_tensor().T, data=TENSOR["data"], noted=False),
    "array": thing(an_array, **ARRAY),
    "columns": thing(
        lambda: np.asfortranarray(np.zeros((4, 3))), one=lambda v: v.__setitem__((1, 2), 1)
    ),
    "every other": thing(lambda: np.zeros(8)[::2], one=lambda v: v.__setitem__(1, 1), noted=False),
    "record": thing(
        lambda: np.zeros(3, [("a", "i4"), ("b", "f8")]), one=lambda v: v["b"].__setitem__(1, 1)
    ),
    "array of objects": thing(
        lambda: np.array([1, "a"], object), one=lambda v: v.__setitem__(1, "b"), noted=False
    ),
    "record of an array": thing(
        lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0],
        one=lambda v: v.__setitem__("a", 5),
        noted=False,
    ),
    "names of a record": thing(
        lambda: np.zeros(3, [("a", "i4"), ("b", "i4")]),
        other_names=lambda v: setattr(v.dtype, "names", ("b", "a")),
    ),
    "complex": thing(
        lambda: torch.tensor([1 + 2j]),
        conjugated=lambda v: setattr(v, "data", v.conj()),
        one=lambda v: v.imag.add_(1),
    ),
    "own random numbers": thing(lambda: Random(1), drawn=lambda v: v.random(), noted=False),
    "own partial": thing(
        lambda: Partial(int, base=2), all=lambda v: v.__setstate__((float, (), {}, {})), noted=False
    ),
    "own default dict": thing(
        lambda: Lists(list, a=1, b=2), **DICT, made=lambda v: setattr(v, "default_factory", int)
    ),
    "own path": thing(lambda: Named("a"), attribute=lambda v: setattr(v, "tag", 1)),
    "empty slots": thing(Unset, filled=lambda v: setattr(v, "flat", 2)),
    "metaclass": thing(of_a_metaclass, attribute=lambda v: setattr(type(v), "factor", 2)),
    "described": thing(
        describes,
        descriptor=lambda v: setattr(vars(v)["described"], "number", 2),
        another_descriptor=lambda v: setattr(v, "described", property(lambda self: 2)),
        cached_property=lambda v: setattr(vars(v)["cached"], "func", lambda self: 2),
        another_cached_property=exchanged_property,
    ),
    "buffer": thing(
        lambda: pickle.PickleBuffer(bytearray(3)),
        one=lambda v: v.raw().__setitem__(0, 1),
        noted=False,
    ),
    "masked": thing(
        lambda: np.ma.masked_array([1, 2], [True, False]),
        mask=lambda v: v.mask.__setitem__(1, True),
        noted=False,
    ),
    "object": thing(
        lambda: Plain(deep=1),
        **OBJECT,
        **MORE,
        another_class=lambda v: setattr(v, "__class__", Other),
    ),
    "slots": thing(lambda: Slotted(1), **OBJECT),
    "namespace": thing(lambda: types.SimpleNamespace(deep=1), **OBJECT),
    "partial": thing(
        lambda: functools.partial(int, base=2),
        keyword=lambda v: v.keywords.update(base=3),
        attribute=lambda v: setattr(v, "new", 1),
        all=lambda v: v.__setstate__((float, (), {}, {})),
    ),
    "module": thing(
        a_module,
        weight=lambda v: v[0].weight.data.add_(1),
        running_mean=lambda v: v[1](torch.ones(2, 2)),
        mode=lambda v: v.eval(),
        gradient=no_gradient,
        another_layer=lambda v: v.append(torch.nn.ReLU()),
        another_weight=lambda v: setattr(v[0], "weight", torch.nn.Parameter(torch.ones(2, 2))),
    ),
    "function": thing(a_function, **FUNCTION),
    "class": thing(a_class, **CLASS),
    "object of a class": thing(lambda: a_class()(deep=[]), list=lambda v: v.deep.append(1)),
    "what remembers": thing(remembering, called=lambda v: v(5)),
    "columns of tensors": thing(
        lambda: TensorDataset(a_tensor()),
        data=lambda v: v.tensors[0].data.add_(1),
        replaced=lambda v: setattr(v, "tensors", (torch.ones(2, 3),)),
    ),
    "subset": thing(
        lambda: Subset(TensorDataset(a_tensor()), [0, 1]),
        indices=lambda v: v.indices.reverse(),
        rows=lambda v: v.dataset.tensors[0].add_(1),
    ),
    "whole": thing(
        lambda: ConcatDataset([TensorDataset(a_tensor())]),
        rows=lambda v: v.datasets[0].tensors[0].data.add_(1),
    ),
    "generator": thing(lambda: np.random.default_rng(1), draw=lambda v: v.random(), noted=False),
    "subclass of a list": thing(
        lambda: type("Mine", (list,), {"__module__": __name__})([1, 2.0, "three"]),
        **LIST,
        noted=False,
    ),
    "subclass of a deque": thing(
        lambda: type("Mine", (deque,), {"__module__": __name__})([1, 2, 3]), **DEQUE, noted=False
    ),
}


def held_by_a_closure(value):
    return lambda: value


def held_by_a_default(value):
    def function(given=value):
        return given

    return function


def held_by_a_keyword(value):
    def function(*, given=value):
        return given

    return function


def held_by_a_class(value):
    return type("Holder", (Plain,), {"__module__": __name__, "held": value})(own=1)


def held_by_a_module(value):
    module = torch.nn.Identity()
    module.held = value
    return module


HOLDERS = {
    "alone": lambda value: value,
    "list": lambda value: [0, value],
    "tuple": lambda value: (value, 0),
    "dict": lambda value: {"a": {"b": value}},
    "deque": lambda value: deque([value]),
    "object": lambda value: Plain(deep=Plain(held=value)),
    "slots": Slotted,
    "named": lambda value: Pair(1, value),
    "namespace": lambda value: types.SimpleNamespace(held=value),
    "partial": lambda value: functools.partial(print, value),
    "closure": held_by_a_closure,
    "default": held_by_a_default,
    "keyword": held_by_a_keyword,
    "class": held_by_a_class,
    "module": held_by_a_module,
    "method": lambda value: Plain(held=value).__init__,
}


@pytest.mark.parametrize("thing", THINGS)
def test_each_thing_changed_in_each_way_is_seen_wherever_it_is_held(thing):
    make, ways, is_noted = THINGS[thing]
    with Misses() as misses:
        for number, (way, change) in enumerate(ways.items()):
            for place, (holder, hold) in enumerate(HOLDERS.items()):
                if not LONG and place and (number + place) % 8:
                    continue
                with misses.case(way, "in", holder):
                    value = make()
                    data = Rows(lambda *_: 0, value=hold(value))
                    watched = Watched()
                    before = watched.now((data,), FOR_EVER)
                    assert before == fingerprint(data)
                    again = watched.now((data,), FOR_EVER)
                    assert again == before
                    assert (again is before) == is_noted
                    change(value)
                    assert watched.now((data,), FOR_EVER) != before


@each("kind", [kind for kind in KINDS if kind is not beside_an_open_file])
def test_each_kind_of_change_of_a_program_is_seen(kind, tmp_path):
    given, change = kind(tmp_path)
    read = given["dataset"], given.get("collate_fn"), given.get("sampler")
    watched = Watched()
    before = watched.now(read, FOR_EVER)
    assert before is not None
    assert watched.now(read, FOR_EVER) == before
    change()
    assert watched.now(read, FOR_EVER) != before


IN_A_LIST = [1]
NUMBER = 1


def keeps(number=[1]):  # noqa: B006 - what it keeps is the point
    return number


WITH_A_MODEL = {"deep": {"model": torch.nn.Identity(), "crop": 20}}
OBJECTS = np.array([torch.nn.Identity(), 1], object)
FUNCTION_WITH_A_MODEL = held_by_a_keyword({"model": torch.nn.Identity(), "crop": 20})


def left_alone(held):
    """Take what is not compared out of a global, and change what is left."""
    del held["model"]
    held["crop"] = 10


class Global:
    items = [1]  # noqa: RUF012 - as people write them
    mixed = {"model": torch.nn.Identity(), "crop": 20}  # noqa: RUF012


THIS = sys.modules[__name__]


@each(
    ("change", "undo"),
    [
        (lambda: IN_A_LIST.append(2), IN_A_LIST.pop),
        (lambda: setattr(THIS, "NUMBER", 2), lambda: setattr(THIS, "NUMBER", 1)),
        (lambda: setattr(THIS, "ANOTHER", 2), lambda: delattr(THIS, "ANOTHER")),
        (lambda: keeps.__defaults__[0].append(2), keeps.__defaults__[0].pop),
        (lambda: setattr(keeps, "kept", 1), lambda: delattr(keeps, "kept")),
        (lambda: Global.items.append(2), Global.items.pop),
        (lambda: setattr(Global, "new", 1), lambda: delattr(Global, "new")),
        (lambda: remembered(77), lambda: None),
        (lambda: left_alone(WITH_A_MODEL["deep"]), lambda: None),
        (lambda: OBJECTS.put(0, 2), lambda: OBJECTS.put(0, torch.nn.Identity())),
        (lambda: left_alone(FUNCTION_WITH_A_MODEL.__kwdefaults__["given"]), lambda: None),
        (lambda: left_alone(Global.mixed), lambda: None),
    ],
)
def test_what_a_global_becomes_is_seen(change, undo):
    remembered.cache_clear()
    data = Rows(lambda *_: NUMBER)
    watched, before = looked_at(data)
    try:
        change()
        assert watched.now((data,), FOR_EVER) != before
    finally:
        undo()


class Fresh(Plain):
    """Of which there is no object before."""


def test_what_holds_is_not_gone_through_again():
    """Also from the first time on, in which Python notes what slots a class has."""
    looked_at(Rows(lambda *_: 0, deep=Fresh(rows=torch.zeros(3), name="one")))


def test_what_comes_in_the_place_of_its_like_makes_no_difference():
    data = Rows(lambda *_: 0, number=float("2.5"), others=[10**20])
    watched = Watched()
    before = watched.now((data,), FOR_EVER)
    for _ in range(3):
        data.number, data.others = float("2.5"), [10**20]
        assert watched.now((data,), FOR_EVER) == before


def test_files_that_are_named_are_looked_at(tmp_path):
    file = tmp_path / "rows.txt"
    for data in Rows(lambda *_: 0, path=str(file)), Rows(lambda *_: 0, deep=[file]):
        file.write_text("0")
        watched, before = looked_at(data)
        file.write_text("00")
        after = watched.now((data,), FOR_EVER)
        assert (after.own, after.live) != (before.own, before.live)
        assert after.own == before.own


def test_a_memory_map_is_looked_at_without_its_pages(tmp_path):
    np.zeros(2**23).tofile(tmp_path / "rows")
    rows = np.memmap(tmp_path / "rows", np.float64, "r")
    data = Rows(lambda *_: 0, rows=rows, part=rows[10:])
    watched, before = looked_at(data)
    data.part = rows[11:]
    assert watched.now((data,), FOR_EVER) != before


def test_a_look_keeps_no_other_global_alive(monkeypatch):
    class Model(torch.nn.Module):
        pass

    model = Model()
    gone = threading.Event()
    weakref.finalize(model, gone.set)
    monkeypatch.setattr(THIS, "MODEL", model, raising=False)
    monkeypatch.setattr(THIS, "MODELS", [model], raising=False)
    watched, _ = looked_at(Rows(lambda *_: NUMBER))
    monkeypatch.undo()
    del model
    assert gone.is_set()
    del watched


def test_too_many_numbers_are_compared_by_a_fingerprint():
    data = Rows(lambda *_: 0, rows=torch.zeros(2**24))
    watched = Watched()
    before = watched.now((data,), FOR_EVER)
    assert watched.now((data,), FOR_EVER) is not before
    data.rows.data[-1] = 1
    assert watched.now((data,), FOR_EVER) != before


REDUCED = itertools.count()


class Day(datetime.date):
    """No snapshot shows what it is."""

    def __reduce_ex__(self, protocol):
        next(REDUCED)
        return super().__reduce_ex__(protocol)


def test_what_has_no_snapshot_is_gone_through_once_each_time():
    data = Rows(lambda *_: 0, day=Day(2020, 1, 1))
    watched = Watched()
    for _ in range(3):
        began, before, once = next(REDUCED), fingerprint(data), next(REDUCED)
        assert watched.now((data,), FOR_EVER) == before
        assert next(REDUCED) - once == once - began


def test_what_generators_stand_for_is_compared_anew():
    generator = np.random.default_rng(1)
    data, stands = Rows(lambda *_: 0, generator=generator), {id(generator): "keyed"}
    watched = Watched()
    before = watched.now((data,), FOR_EVER, lambda: stands)
    generator.random()
    assert watched.now((data,), FOR_EVER, lambda: stands) == before
    stands[id(generator)] = "another"
    assert watched.now((data,), FOR_EVER, lambda: stands) != before


def test_what_the_program_sees_end_is_not_kept():
    gone = []

    class Ends:
        def __del__(self):
            gone.append(1)

    data = Rows(lambda *_: 0, ends=Ends())
    watched = Watched()
    before = watched.now((data,), FOR_EVER)
    assert watched.now((data,), FOR_EVER) == before
    data.ends = None
    assert gone
    assert watched.now((data,), FOR_EVER) != before


def test_a_comparison_is_of_the_objects_that_are_given():
    watched = Watched()
    ones = watched.now((torch.ones(2),), FOR_EVER)
    assert watched.now((torch.zeros(2),), FOR_EVER) != ones
    assert watched.now((), FOR_EVER) != ones

"""What share() puts in the place of lists and dicts reads as they did, once for all processes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import sys
import warnings
from collections import defaultdict
from datetime import date
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from misses import Misses
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_fastdata import FastDataLoader, FastDataWarning, share
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.sources.shared import Block

TEXT = st.text(st.characters(), max_size=8)  # lone surrogates too, as paths may hold
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT, st.binary(max_size=5)
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(TEXT, inner, max_size=4),
    ),
    max_leaves=12,
)
RECORDS = st.fixed_dictionaries({"path": TEXT, "label": st.integers(), "boxes": st.lists(PLAIN)})
LISTS = st.one_of(
    *(st.lists(kind, max_size=12) for kind in (PLAIN, RECORDS, st.integers(), st.floats(), TEXT))
)
KEYS = st.one_of(SCALARS, st.tuples(TEXT, st.integers()))
MANY = 1001
"""Lists of so many elements are shared."""


def same(one, other):
    """Compare values, nan with nan, and their types: True is not 1."""
    return repr(one) == repr(other)


def plain_within(value):
    """Return the lists and dicts within a value that could be changed."""
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    else:
        parts = value if isinstance(value, list | tuple) else ()
    own = [value] if type(value) in (list, dict) else []
    return own + [each for part in parts for each in plain_within(part)]


def block_of(shared):
    """Return the memory that a shared list reads from."""
    return shared.__reduce__()[1][-1]


@given(LISTS, st.integers(-14, 14), st.slices(12))
def test_a_shared_list_reads_as_the_list(items, number, some):
    shared = share(items)
    assert len(shared) == len(items)
    assert same(list(shared), items)
    assert plain_within(tuple(shared)) == []
    assert same(shared[some], items[some])
    assert repr(shared) == repr(items)
    assert same(pickle.loads(pickle.dumps(shared)), items)
    assert same(copy.copy(shared), items)
    assert type(shared.copy()) is type(copy.copy(shared)) is list
    if -len(items) <= number < len(items):
        assert same(shared[number], items[number])
        assert same(copy.deepcopy(shared[number]), items[number])
        assert same(shared[np.int64(number)], items[number])
    else:
        with pytest.raises(IndexError):
            shared[number]
    if items == items:  # no nan
        assert shared == items
        assert items == shared
        assert shared == share(list(items))
        assert all(item in shared for item in items)
    assert shared != [*items, 0]


@given(st.dictionaries(KEYS, PLAIN, max_size=12), KEYS)
def test_a_shared_dict_reads_as_the_dict(pairs, key):
    shared = share(pairs)
    assert len(shared) == len(pairs)
    assert same(dict(shared), pairs)
    assert list(shared) == list(pairs)
    assert same(list(shared.items()), list(pairs.items()))
    assert same(list(shared.values()), list(pairs.values()))
    assert plain_within(tuple(shared.values())) == []
    assert plain_within(tuple(shared.items())) == []
    assert (key in shared) == (key in pairs)
    assert same(shared.get(key, "none"), pairs.get(key, "none"))
    assert same(pickle.loads(pickle.dumps(shared)).copy(), pairs)
    assert shared == pairs
    assert pairs == shared
    assert all(same(shared[each], pairs[each]) for each in pairs)
    if key not in pairs:
        with pytest.raises(KeyError):
            shared[key]


def test_keys_that_are_equal_are_found_and_a_default_is_made_as_before():
    numbers = share({1: "a", 2.0: "b", True + 2: "c"})
    assert [numbers[1.0], numbers[np.int64(2)], numbers[3]] == ["a", "b", "c"]
    by_image = defaultdict(list, {7: [1, 2]})
    shared = share(by_image)
    assert shared[7] == [1, 2]
    assert shared[8] == []
    assert shared.get(8) is by_image.get(8) is None
    assert shared.copy() == by_image


def test_arrays_paths_and_dates_in_items_come_back_as_they_were():
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    items = [
        {"image": whole[:, ::2], "box": whole.T, "none": np.zeros((0, 3), np.uint8)},
        {"path": PurePosixPath("a/b"), "day": date(2026, 1, 2), "n": np.float32(1.5)},
        [Path("x"), (np.array(3), whole)],
        {"at": np.array(["2020-01-01"], "M8[D]"), "row": np.ones(2, [("a", "i4"), ("b", "U3")])},
        {
            "aligned": np.ones(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
            ">": whole.astype(">f4"),
        },
    ]
    shared = share(items)
    for one, other in (("image", whole[:, ::2]), ("box", whole.T)):
        read = shared[0][one]
        np.testing.assert_array_equal(read, other)
        assert (read.dtype, type(read)) == (other.dtype, np.ndarray)
        with pytest.raises(ValueError, match="read-only"):
            read[...] = 0
    assert shared[1] == items[1]
    assert repr(shared[2:]) == repr(items[2:])
    assert copy.deepcopy(shared[0])["image"].flags.writeable


UNLIKE = [
    [[1.5, 2], [], [3]],
    [{"a": [[1]], "b": None}, {"a": [], "b": [1]}, {"a": [[2], []], "b": {"c": [[]]}}],
    [{"a": [1], "b": [[2]]}, {"b": 3, "a": [4]}, {"a": 5}],
    [{1: [1], None: {"x": [2]}}, {(1, 2): [3]}, {Path("x"): [Path("y")]}],
    [("x", [1], {"y": [2]}), ("x", []), ((), [[]]), ("x", None, [3])],
    [{key: [[1]] for key in range(200)}, {}, tuple([[2]] * 200)],
    [frozenset({Path("x")}), [frozenset({1})], [np.float32(1), [np.arange(2)]], 5],
]


@pytest.mark.parametrize("items", UNLIKE, ids=range(len(UNLIKE)))
def test_nothing_can_be_changed_in_items_that_are_unlike(items):
    shared = share([*items, *items])
    assert repr(shared) == repr([*items, *items])
    assert plain_within(tuple(shared)) == []
    alone = [share([item])[0] for item in items]
    assert repr(alone) == repr(items)
    assert plain_within(tuple(alone)) == []
    assert repr(copy.deepcopy(alone)) == repr(pickle.loads(pickle.dumps(alone))) == repr(items)
    again = share([*shared])
    assert repr(again) == repr(shared)


def test_an_array_that_many_items_hold_is_written_once():
    camera = np.arange(10_000.0)
    shared = share([{"camera": camera, "at": n, "again": [camera]} for n in range(50)])
    assert np.shares_memory(shared[0]["camera"], shared[49]["again"][0])
    assert len(block_of(shared)) < 2 * camera.nbytes


def test_many_lists_take_one_open_file():
    photos = Photos(3)
    photos.by_class = {name: [*range(MANY), name] for name in range(20)}
    share(photos)
    lists = [block_of(each) for each in photos.by_class.values()]
    assert len(lists) == 20
    assert all(each is lists[0] for each in lists)


WRITES = {
    "list": [
        lambda x: x.append(1), lambda x: x.clear(), lambda x: x.extend([1]),
        lambda x: x.insert(0, 1), lambda x: x.pop(), lambda x: x.remove(x[0]),
        lambda x: x.reverse(), lambda x: x.sort(), lambda x: x.__setitem__(0, 1),
        lambda x: x.__delitem__(0), lambda x: x.__iadd__([1]), lambda x: x.__imul__(2),
    ],
    "dict": [
        lambda x: x.clear(), lambda x: x.pop("a"), lambda x: x.popitem(),
        lambda x: x.setdefault("b", 1), lambda x: x.update(b=1), lambda x: x.__setitem__("a", 1),
        lambda x: x.__delitem__("a"), lambda x: x.__ior__({"b": 1}),
    ],
}  # fmt: skip


def test_a_change_after_sharing_is_an_error_at_every_level():
    def made():
        return [{"a": [1, 2], "deep": ({"a": [[3]]},)}, {"a": [4], "deep": None}]

    shared, pairs = share(made()), share({"a": made()})
    places = {
        "list": [shared, shared[0]["a"], shared[0]["deep"][0]["a"], shared[0]["deep"][0]["a"][0]],
        "dict": [pairs, shared[0], shared[0]["deep"][0], pairs["a"][0]],
    }
    with Misses() as misses:
        for kind, writes in WRITES.items():
            for number, write in enumerate(writes):
                for place, at in enumerate(places[kind]):
                    case = misses.case(kind, number, place)
                    with case, pytest.raises(DatasetError, match="share"):
                        write(at)
    assert shared == made()
    assert pairs == {"a": made()}
    mine = shared[0].copy()
    mine["a"] = 1
    assert type(mine) is dict


class Photos(Dataset):
    def __init__(self, count=MANY):
        self.samples = [{"path": f"{n}.jpg", "label": n, "box": [n, n + 0.5]} for n in range(count)]
        self.names = [f"class {n}" for n in range(3)]
        self.index = {f"{n}.jpg": (n, str(n)) for n in range(count)}

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        sample = self.samples[number]
        return {**sample, "again": self.index[sample["path"]]}


def test_torch_makes_the_same_batches_of_a_shared_dataset():
    plain = list(DataLoader(Photos(), 100))
    photos = share(Photos())
    assert type(photos.names) is list  # it is small
    assert type(photos.samples) is not list
    batches = list(DataLoader(Subset(photos, range(MANY)), 100))
    assert repr(batches) == repr(plain)
    ours = list(FastDataLoader(photos, 100, num_workers=1))
    assert repr(ours) == repr(plain)
    raw = list(DataLoader(photos.samples, None))
    assert raw == Photos().samples


def test_objects_within_a_dataset_are_shared_each_once():
    inner = Photos()
    inner.again = inner.samples
    whole = share(Subset(inner, list(range(MANY))))
    assert inner.again is inner.samples
    assert inner.samples == Photos().samples
    assert whole.indices == list(range(MANY))
    assert type(whole.indices) is not list


class Opaque:
    pass


def test_what_cannot_be_shared_is_named_and_left_as_it_is():
    photos = Photos()
    photos.others = [{"at": (n, [Opaque()])} for n in range(MANY)]
    photos.sets = [set()] * MANY
    others = photos.others
    with pytest.warns(FastDataWarning) as all_:
        share(photos)
    assert "dataset.others[0]['at'][1][0] is a Opaque; turn it" in str(all_[0].message)
    assert "dataset.sets[0] is a set; turn it" in str(all_[0].message)
    assert photos.others is others
    assert photos.samples == Photos().samples
    with pytest.raises(DatasetError, match=r"dataset\[1\] is a Opaque"):
        share([1, Opaque()])
    with pytest.raises(DatasetError, match="frozenset among its keys"):
        share({frozenset(): 1})
    endless = []
    endless.append(endless)
    with pytest.raises(DatasetError, match="without end"):
        share(endless)
    with pytest.warns(FastDataWarning, match="Nothing of this Opaque is shared"):
        share(Opaque())


def _read(method_dataset, end):
    photos = method_dataset
    copied = _copied_kib(os.getpid(), "fastdata-shared")
    end.send((photos[3], photos.samples == Photos().samples, copied))


def _copied_kib(pid, name):
    """Return the kibibytes of a mapping, by a part of its name, that a process has copies of."""
    found, within = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            within = name in line
        elif within and line.startswith("Anonymous"):
            found += int(line.split()[1])
    return found


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_has_the_same_memory_however_it_is_started(method):
    photos, plain = share(Photos()), Photos()
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_read, args=(photos, theirs))
    process.start()
    sample, equal, copied = ours.recv()
    process.join()
    assert (sample, equal) == (plain[3], True)
    assert copied == 0


def in_a_fork(work):
    """Return the words that a forked process returns."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, work().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        words = file.read().split()
    os.waitpid(pid, 0)
    return words


def test_another_process_with_the_same_content_takes_over_the_memory():
    def inode(items):
        kept = share(items)
        return os.fstat(block_of(kept).descriptor).st_ino

    many = [f"{n} of many" for n in range(99)]
    mine = share(many)
    there = in_a_fork(lambda: f"{inode(many)} {inode(many[::-1])}")
    here = str(os.fstat(block_of(mine).descriptor).st_ino)
    assert there[0] == here != there[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="the memory of others is seen by root alone")
def test_the_memory_of_another_user_is_not_taken_for_ones_own():
    many = [f"{n} of another" for n in range(99)]
    theirs = share(many)
    os.fchown(block_of(theirs).descriptor, 12345, 12345)
    mine = share(many)
    own, other = (os.fstat(block_of(one).descriptor) for one in (mine, theirs))
    assert (own.st_uid, own.st_ino != other.st_ino) == (0, True)


def test_nobody_can_write_to_the_memory():
    block = block_of(share([1, 2]))
    again = os.open(f"/proc/self/fd/{block.descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 4)
    os.close(again)
    other = Block.at(os.dup(block.descriptor))
    block[4] = block[4] ^ 1  # this process's own copy
    assert Block.at(os.dup(block.descriptor))[4] == other[4] != block[4]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_what_torch_writes_over_a_shared_array_stays_in_its_process():
    items = [{"box": np.arange(4.0) + n} for n in range(3)]
    shared = share(items)
    with pytest.raises(ValueError, match="read-only"):
        shared[1]["box"][0] = 9
    before = Block.at(os.dup(block_of(shared).descriptor))
    torch.from_numpy(shared[1]["box"])[2:] += 1
    assert bytes(Block.at(os.dup(block_of(shared).descriptor))) == bytes(before)
    assert shared[2]["box"].tolist() == [2, 3, 4, 5]


@pytest.fixture
def usual_recursion():
    """Python's own limit of recursion: torch.compile raises that of its process."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


def test_what_was_shared_is_shared_again_and_what_cannot_be_is_named(usual_recursion):
    class Held:
        def __init__(self):
            self.rows = [{"name": str(n), "at": [n, n + 1]} for n in range(MANY + 9)]

    held = Held()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert share(share(held)) is held
        held.rows = list(held.rows)[1:]
        share(held)
    assert type(held.rows).__name__ == "SharedList"
    assert held.rows[0] == {"name": "1", "at": [1, 2]}
    assert share(held.rows) is held.rows
    deep: list = []
    for _ in range(600):
        deep = [deep]
    with pytest.raises(DatasetError, match=r"class Photos\. Make one of it: share\(Photos\("):
        share(Photos)
    for cannot in (np.zeros(1, [("a", "i4")])[0], np.array([None]), deep):
        with pytest.raises(DatasetError, match="Nothing is shared"):
            share([cannot] * 2)

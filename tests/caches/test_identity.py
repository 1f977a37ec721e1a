"""A dataset is the same in another run if it is made of the same, and another one if it is not."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import importlib
import inspect
import json
import linecache
import os
import pickle
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import albumentations as A
import numpy as np
import pytest
import torch
from misses import each
from torch.utils.data import Dataset, Subset
from torchvision.transforms import v2

from lightning_fastdata import CachedDataset, share
from lightning_fastdata.caches import folders
from lightning_fastdata.caches.folders import identity
from lightning_fastdata.errors import DatasetError


class Plain(Dataset):
    def __init__(self, **held):
        vars(self).update(held)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


# -- what it holds ---------------------------------------------------------------------------------


class Part:
    def __init__(self, value):
        self.value = value
        self.whole = self


class InSlots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


Item = collections.namedtuple("Item", "path label")


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


class Scales:
    def __init__(self, by):
        self.by = by

    def change(self, value):
        return self.by * value


def add(value, by):
    return value + by


def adding(by):
    def added(value, *, more=0):
        return value + by + more

    return added


def times_two(value):
    return 2 * value


def times_three(value):
    return 3 * value


ROWS = np.arange(1_000_000, dtype=np.int32)
ONE_ROW_DIFFERS = ROWS.copy()
ONE_ROW_DIFFERS[777_777] += 1
STATES = {
    "a number": (1, 2),
    "the type of a number": (1, 1.0),
    "a text": ("a", "b"),
    "a list": ([1, 2], [2, 1]),
    "an element deep within": ({"a": [({"b": 1},)]}, {"a": [({"b": 2},)]}),
    "the order of an ordered dict": tuple(
        collections.OrderedDict(items) for items in ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)])
    ),
    "a set": ({1, 2}, {1, 3}),
    "one row of many": (ROWS, ONE_ROW_DIFFERS),
    "the dtype of an array": (np.arange(3, dtype=np.int32), np.arange(3)),
    "an array of objects": (np.array([[1], [2]], object), np.array([[1], [3]], object)),
    "one row of a tensor": (torch.from_numpy(ROWS), torch.from_numpy(ONE_ROW_DIFFERS)),
    "the shape of a tensor": (torch.zeros(4), torch.zeros(2, 2)),
    "the dtype of a tensor": (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)),
    "a conjugate tensor": (torch.tensor([1j]).conj(), torch.tensor([1j])),
    "an object": (Part(1), Part(2)),
    "an object in slots": (InSlots(1), InSlots(2)),
    "a named tuple": (Item("a", 1), Item("a", 2)),
    "a member of an enumeration": (Mode.ONE, Mode.TWO),
    "a function": (times_two, times_three),
    "a function of NumPy": (np.add, np.multiply),
    "a function of Python": (len, max),
    "what a function closes over": (adding(1), adding(2)),
    "arguments filled in": (functools.partial(add, by=1), functools.partial(add, by=2)),
    "the object of a method": (Scales(2).change, Scales(3).change),
    "the object of a method written in C": ([1].count, [2].count),
    "a lambda": (
        lambda value: value + 1,
        lambda value: value + 2,
    ),
    "the second line of a lambda": (
        lambda value: (
            value  # the same in both
            + 1
        ),
        lambda value: (
            value  # the same in both
            + 2
        ),
    ),
    "a class": (Part, Scales),
    "a transform of Albumentations": tuple(A.Compose([A.Resize(n, n)]) for n in (8, 9)),
    "a transform": (v2.Compose([v2.Resize(8)]), v2.Compose([v2.Resize(9)])),
}


@pytest.mark.parametrize("what", STATES)
def test_what_a_dataset_holds_counts(what):
    one, other = STATES[what]
    first = identity(Plain(held=one))
    assert identity(Plain(held=one)) == first
    assert identity(Plain(held=other)) != first
    assert identity(Subset(Plain(held=[0, one]), [0])) != identity(
        Subset(Plain(held=[0, other]), [0])
    )


def test_a_single_number_of_a_table_counts():
    names = {identity(Plain(held=torch.full((2, 3), value)[1:, 1])) for value in (0, 0, 1)}
    assert len(names) == 2


def test_what_is_equal_counts_as_equal_in_whichever_order_it_was_made():
    name = "".join(["a", "b"])
    assert identity(Plain(held=[name, name])) == identity(Plain(held=["".join(["a", "b"]), name]))
    assert identity(Plain(held=Part(1))) == identity(Plain(held=copy.deepcopy(Part(1))))


class Annotated(Plain):
    kind: str = "plain"


def test_what_python_notes_on_a_class_makes_no_difference():
    before = identity(Annotated())
    pickle.loads(pickle.dumps(Annotated()))
    copy.copy(Annotated())
    inspect.get_annotations(Annotated)
    assert identity(Annotated()) == before


class Tabled(Plain):
    table = ({"a": 1},)


def test_what_a_class_holds_counts(monkeypatch):
    first = identity(Tabled())
    monkeypatch.setattr(Tabled, "table", ({"a": 2},))
    assert identity(Tabled()) != first


class Described:
    def __init__(self, value):
        self.value = value

    def __get__(self, _owner, _type=None):
        return self.value


def scaling(by):
    def decorate(method):
        @functools.wraps(method)
        def called(self, index):
            return by[0] * method(self, index)

        return called

    return decorate


def closed_over(by, **_):
    class Data(Plain):
        def __getitem__(self, index):
            return by[0] * index

    return Data


def as_default(by, **_):
    class Data(Plain):
        def __getitem__(self, index, by=by):
            return by[0] * index

    return Data


def decorated(by, **_):
    class Data(Plain):
        @scaling(by)
        def __getitem__(self, index):
            return index

    return Data


def in_a_property(by, **_):
    class Data(Plain):
        scale = property(lambda _: by[0])

    return Data


def in_a_descriptor(by, **_):
    class Data(Plain):
        scale = Described(by)

    return Data


def of_a_base(by, **_):
    class Data(closed_over(by)):
        pass

    return Data


def put_there(by, method):
    class Data(Plain):
        change = method

    return Data


HOLDERS = [closed_over, as_default, decorated, in_a_property, in_a_descriptor, of_a_base, put_there]


@each("made", HOLDERS)
def test_what_methods_of_a_class_hold_counts(made):
    first = identity(made([1], method=times_two)())
    assert identity(made([1], method=times_two)()) == first
    assert identity(made([2], method=times_three)()) != first


@dataclasses.dataclass
class Settings:
    size: int = 3
    names: list = dataclasses.field(default_factory=list)


def test_methods_without_a_source_are_no_obstacle():
    assert identity(Plain(held=Settings())) == identity(Plain(held=Settings()))
    assert identity(Plain(held=Settings())) != identity(Plain(held=Settings(names=["a"])))


# -- files -----------------------------------------------------------------------------------------


def test_a_memory_map_counts_by_its_file_and_by_which_part_of_it(tmp_path):
    def opened():
        return np.load(tmp_path / "a.npy", mmap_mode="r")

    np.save(tmp_path / "a.npy", np.zeros(10))
    first = identity(Plain(held=opened()))
    assert identity(Plain(held=opened())) == first
    assert identity(Plain(held=np.asarray(opened()))) != identity(Plain(held=np.zeros(10)))
    views = [opened()[:5], np.asarray(opened())[5:], opened()[::2], opened().reshape(2, 5)]
    assert len({first, *(identity(Plain(held=view)) for view in views)}) == 5
    os.utime(tmp_path / "a.npy", ns=(1, 1))
    assert identity(Plain(held=opened())) != first


def test_numbers_that_are_changed_in_a_memory_map_of_ones_own_count(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(10))
    own = np.load(tmp_path / "a.npy", mmap_mode="c")
    first = identity(Plain(held=own))
    own[7] = 1
    assert identity(Plain(held=own)) != first


class Named(Plain):
    def __getitem__(self, index):
        raise NotImplementedError("no sample is read")


NAMES = ["a7", "b7", "c7"]
WAYS = {
    "paths": lambda root: {"paths": [f"{root}/{name}.bin" for name in NAMES]},
    "paths of pathlib": lambda root: {"paths": [root / f"{name}.bin" for name in NAMES]},
    "pairs": lambda root: {"samples": [(f"{root}/{name}.bin", 1) for name in NAMES]},
    "names in a folder": lambda root: {"root": root, "names": [f"{name}.bin" for name in NAMES]},
    "names without endings": lambda root: {"root": str(root), "ids": NAMES},
    "names in folders of a folder": lambda root: {"root": root.parent, "ids": NAMES},
    "paths in a folder": lambda root: {
        "root": root.parent.parent,
        "names": [f"{root.parent.name}/{root.name}/{name}.bin" for name in NAMES],
    },
    "names beside a table": lambda root: {"table": __file__, "root": root, "names": NAMES},
    "an array": lambda root: {"root": root, "names": np.array([f"{name}.bin" for name in NAMES])},
    "notes": lambda root: {"root": root, "notes": [{"file": f"{n}.bin", "id": 3} for n in NAMES]},
    "pairs of a caption and a path": lambda root: {
        "pairs": [("caption", f"{root}/{name}.bin") for name in NAMES * 64]
    },
    "within another": lambda root: {"parts": [Named(root=root, names=NAMES)]},
    "within another, by name": lambda root: {"parts": {"x": Named(root=root, names=NAMES * 8)}},
    "a set": lambda root: {"paths": {f"{root}/{name}.bin" for name in NAMES}},
    "a deque": lambda root: {"paths": collections.deque(f"{root}/{name}.bin" for name in NAMES)},
    "objects": lambda root: {"items": [Part(f"{root}/{name}.bin") for name in NAMES]},
    "objects in slots": lambda root: {"items": [InSlots(root / f"{name}.bin") for name in NAMES]},
    "an index that is an object": lambda root: {
        "root": str(root),
        "ids": [1, 2, 3],
        "index": Part({number: {"file_name": f"{name}.bin"} for number, name in enumerate(NAMES)}),
    },
    "an array of texts of any length": lambda root: {
        "paths": np.array([f"{root}/{name}.bin" for name in NAMES], np.dtypes.StringDType())
    },
    "a column of records": lambda root: {
        "rows": np.array([(1, f"{root}/{name}.bin") for name in NAMES], [("y", int), ("x", "U999")])
    },
    "a shared list": lambda root: {"paths": share([f"{root}/{name}.bin" for name in NAMES])},
}


@pytest.mark.parametrize("way", WAYS)
def test_files_that_a_dataset_names_count_by_size_and_time(tmp_path, way):
    root = tmp_path / "data" / "images"
    root.mkdir(parents=True)
    for name in NAMES:
        (root / f"{name}.bin").write_bytes(b"x")
    (tmp_path / "data" / "log.txt").write_text("1")
    held = WAYS[way](root)
    first = identity(Named(**held))
    (tmp_path / "data" / "log.txt").write_text("12")
    assert identity(Named(**held)) == first
    (root / "b7.bin").write_bytes(b"xy")
    larger = identity(Named(**held))
    os.utime(root / "b7.bin", ns=(1, 1))
    assert len({first, larger, identity(Named(**held))}) == 3


def test_files_that_a_class_names_count(tmp_path):
    class Its(Named):
        paths = [str(tmp_path / "a.bin"), str(tmp_path / "b.bin")]  # noqa: RUF012

    for path in Its.paths:
        Path(path).write_bytes(b"x")
    first = identity(Its())
    Path(Its.paths[1]).write_bytes(b"xy")
    assert identity(Its()) != first


@pytest.mark.parametrize("kind", [list, lambda names: dict(enumerate(names))])
def test_of_very_many_names_some_from_all_over_count(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(folders, "_MOST_FILES", 3)
    names = [f"{tmp_path}/{number}.bin" for number in range(9)]
    for name in names:
        Path(name).write_bytes(b"x")
    first = identity(Named(names=kind(names)))
    Path(names[6]).write_bytes(b"xy")
    assert identity(Named(names=kind(names))) != first


# -- code ------------------------------------------------------------------------------------------

HEAD = """
import enum, functools
from torch.utils.data import Dataset
from torchvision.transforms import v2
import theirs_base
"""
DATASET = """
class Data(theirs_base.Base):
    {body}
    def __init__(self):
        self.held = {held}
    def __getitem__(self, index):
        return {value}
"""
BASE = (
    "from torch.utils.data import Dataset\nclass Base(Dataset):\n    def __len__(self): return 4\n"
)
HELPERS = "def change(x):\n    return x + VERSION\n"


def project(*, before="", body="", held="None", value="index", **others):
    """Return the files of a project, in which ``VERSION`` stands for what differs."""
    dataset = DATASET.format(body=body, held=held, value=value)
    return {"theirs_data": HEAD + before + dataset, "theirs_base": BASE, **others}


PROJECTS = {
    "a method": project(value="index + VERSION"),
    "a method of a base": project(theirs_base=f"{BASE}    def by(self): return VERSION\n"),
    "a setting of the class": project(body="size = VERSION"),
    "a pipeline of the class": project(
        before="PIPELINE = v2.Compose([v2.Resize(8 * VERSION)])\n", body="pipeline = PIPELINE"
    ),
    "a class within the class": project(body="class Config:\n        size = VERSION"),
    "a function that it holds": project(before=HELPERS, held="change"),
    "a function of a module that it holds": project(
        before="import theirs_help\n", held="theirs_help.change", theirs_help=HELPERS
    ),
    "a module that it holds": project(
        before="import theirs_help\n", held="theirs_help", theirs_help=HELPERS
    ),
    "a function with a cache": project(before=f"@functools.lru_cache\n{HELPERS}", held="change"),
    "a default": project(before="def change(x, by=VERSION): return x + by\n", held="change"),
    "a default made elsewhere": project(
        before="BY = VERSION\ndef change(x, *, by=BY): return x + by\n", held="change"
    ),
    "a function within a decorated one": project(
        before="def passes_on(function):\n    @functools.wraps(function)\n"
        f"    def called(x): return function(x)\n    return called\n@passes_on\n{HELPERS}",
        held="change",
    ),
    "what decorates a function": project(
        before="def passes_on(function):\n    @functools.wraps(function)\n"
        "    def called(x): return function(x) + VERSION\n    return called\n"
        "@passes_on\ndef change(x): return x\n",
        held="change",
    ),
    "the class of an object that it holds": project(
        before="class Adds:\n    def __call__(self, x): return x + VERSION\n", held="Adds()"
    ),
    "an enumeration": project(before="class Mode(enum.Enum):\n    a = VERSION\n", held="Mode.a"),
    "a lambda that it holds": project(held="lambda x: x + VERSION"),
}


@pytest.fixture
def identity_of(tmp_path, monkeypatch):
    """Return the identity of the dataset of a project in some version of it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def of(files, version):
        linecache.clearcache()  # as in another run
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text.replace("VERSION", str(version)))
        importlib.invalidate_caches()
        found = identity(importlib.import_module("theirs_data").Data())
        for name in [name for name in sys.modules if name.startswith("theirs_")]:
            del sys.modules[name]
        return found

    return of


@pytest.mark.parametrize("what", PROJECTS)
def test_the_code_of_a_dataset_and_of_what_it_holds_counts(identity_of, what):
    first = identity_of(PROJECTS[what], 1)
    assert identity_of(PROJECTS[what], 2) != first
    assert identity_of(PROJECTS[what], 1) == first


@pytest.mark.parametrize("package", ["torchvision", "torch"])
def test_the_version_of_an_installed_package_counts(monkeypatch, package):
    data = Plain(held=v2.Resize(8))
    first = identity(data)
    monkeypatch.setattr(sys.modules[package], "__version__", "0.0")
    assert identity(data) != first
    monkeypatch.undo()
    assert identity(data) == first


def test_of_a_package_without_a_version_the_file_of_the_module_counts(monkeypatch, tmp_path):
    package = tmp_path / "site-packages" / "untold"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("def part(value):\n    return value\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    data = Plain(held=importlib.import_module("untold.parts").part)
    first = identity(data)
    (package / "parts.py").write_text("def part(value):\n    return value + 1\n")
    assert identity(data) != first
    (package / "parts.py").write_text("def part(value):\n    return value\n")
    assert identity(data) == first


def test_of_a_package_without_a_version_the_file_of_a_base_class_counts(monkeypatch, tmp_path):
    package = tmp_path / "site-packages" / "untold"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "base.py").write_text("class Base:\n    value = 1\n")
    (package / "own.py").write_text("from untold.base import Base\nclass Own(Base): ...\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    data = Plain(held=importlib.import_module("untold.own").Own())
    first = identity(data)
    (package / "base.py").write_text("class Base:\n    value = 2\n")
    assert identity(data) != first


# -- other processes -------------------------------------------------------------------------------

IN_A_PROCESS = f"import json, {__name__} as tests; print(json.dumps(tests.identities()))"


def identities():
    """Return the identity of each state, and of what has an order by chance."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    told = {"a set of words": set(words), "a set of tuples": {(each, 1) for each in words}}
    found = {what: identity(Plain(held=held)) for what, held in told.items()}
    return found | {what: identity(Plain(held=held[0])) for what, held in STATES.items()}


def test_each_process_finds_the_same():
    """Whatever the order of its sets, and wherever in memory its objects are."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == identities()


SCRIPT = """
from torch.utils.data import Dataset
from lightning_fastdata import CachedDataset
class Data(Dataset):
    table = [len]
    def __init__(self): self.held = scaled, Data
    def __len__(self): return 3
    def __getitem__(self, index): return index
def scaled(value): return 2 * value
folder = CachedDataset(Data(), {root!r}).folder.name
"""


def test_a_script_that_runs_counts_as_when_it_is_imported(tmp_path, monkeypatch):
    """A program that fills the cache imports the class from the script of the training."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "theirs").mkdir()
    for name in ("their_script", "theirs/their_script"):
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(root=str(tmp_path)))
    top, within = map(importlib.import_module, ("their_script", "theirs.their_script"))
    del sys.modules["theirs.their_script"]  # another program has imported it
    for name in ("__main__", "__mp_main__"):
        told = runpy.run_path(str(tmp_path / "their_script.py"), run_name=name)
        assert told["folder"] == top.folder, name
        told = runpy.run_module("theirs.their_script", run_name=name, alter_sys=True)
        assert told["folder"] == within.folder, name
    assert top.folder != within.folder


# -- what cannot be compared -----------------------------------------------------------------------


def of_no_file(code):
    scope = {"__name__": "__main__", "Plain": Plain}
    exec(code, scope)
    return scope["made"]


def itself():
    held = []
    held.append(held)
    return held


REFUSED = {
    "a view of memory": lambda: memoryview(b"123"),
    "a lock": threading.Lock,
    "a generator": lambda: (number for number in range(3)),
    "a lambda without a source": lambda: of_no_file("made = lambda x: x"),
    "a function without a source": lambda: of_no_file("def made(x): return x"),
    "a class without a source": lambda: of_no_file("class made: pass"),
    "two lambdas in a line": lambda: [lambda x: x, lambda x: -x],
    "what holds itself": itself,
    "a sparse tensor": lambda: torch.zeros(3).to_sparse(),
}


@each("what", REFUSED)
def test_what_cannot_be_compared_asks_for_a_key(tmp_path, what):
    data = Plain(held=REFUSED[what]())
    with pytest.raises(DatasetError, match=r"Plain holds cannot be recog.*key=\"photos-1\""):
        CachedDataset(data, tmp_path)
    assert CachedDataset(data, tmp_path, key="mine")[2] == 2


def test_a_class_of_a_notebook_counts_by_its_methods(monkeypatch):
    def made(by):
        text = f"class Data(Plain):\n    def __getitem__(self, index): return index + {by}\n"
        name = f"<ipython-input-{by}>"
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(True), name))
        scope = {"__name__": "__main__", "Plain": Plain}
        exec(compile(text, name, "exec"), scope)
        return scope["Data"]()

    assert identity(made(1)) == identity(made(1))
    assert identity(made(1)) != identity(made(2))

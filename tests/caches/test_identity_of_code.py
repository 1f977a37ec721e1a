"""A dataset is another one when code or a file that it rests on has changed, wherever that is."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from torch.utils.data import Dataset

from lightning_fastdata.caches.identity import identity

HEAD = """
import enum, functools, os, threading
from dataclasses import dataclass
import numpy as np
from torch.utils.data import Dataset
from torchvision.transforms import v2

def passes_on(function):
    @functools.wraps(function)
    def called(*arguments):
        return function(*arguments)
    return called
"""
DATASET = """
class Data(Dataset):
    {body}
    def __len__(self):
        return 4
    {decorator}
    def __getitem__(self, index):
        {imports}
        return {value}
"""


def project(*, before="", body="", decorator="", imports="", value="index", **others):
    """Return the files of a project, in which ``VERSION`` stands for what differs."""
    parts = {"body": body, "decorator": decorator, "imports": imports, "value": value}
    return {"theirs_data": HEAD + before + DATASET.format(**parts), **others}


HELPERS = "def change(x):\n    return x + VERSION\n"
PROJECTS = {
    "a function": project(before=HELPERS, value="change(index)"),
    "a function of a module": project(
        before="import theirs_help", value="theirs_help.change(index)", theirs_help=HELPERS
    ),
    "a function of a module that it imports itself": project(
        imports="from theirs_help import change", value="change(index)", theirs_help=HELPERS
    ),
    "what a function of a module uses": project(
        before="import theirs_help",
        value="theirs_help.twice(index)",
        theirs_help=f"{HELPERS}def twice(x):\n    return change(change(x))\n",
    ),
    "a setting in a module": project(
        before="import theirs_config", value="theirs_config.SIZE", theirs_config="SIZE = VERSION"
    ),
    "a setting in an object": project(
        before="@dataclass\nclass Config:\n    size: int\nCONFIG = Config(VERSION)",
        value="CONFIG.size",
    ),
    "a pipeline beside the class": project(
        before="PIPELINE = v2.Compose([v2.Resize(8 * VERSION)])", value="PIPELINE(index)"
    ),
    "a pipeline of the class": project(
        body="pipeline = v2.Compose([v2.Resize(8 * VERSION)])", value="self.pipeline(index)"
    ),
    "a function with a cache": project(
        before=f"@functools.lru_cache\n{HELPERS}", value="change(index)"
    ),
    "a decorated function": project(before=f"@passes_on\n{HELPERS}", value="change(index)"),
    "a decorated method": project(decorator="@passes_on", value="index + VERSION"),
    "a default": project(before="def change(x, by=VERSION): return x + by", value="change(index)"),
    "a default by name": project(
        before="def change(x, *, by=VERSION): return x + by", value="change(index)"
    ),
    "a default of a method": project(
        body="def change(self, by=VERSION): return by", value="self.change()"
    ),
    "a function with arguments filled in": project(
        before="def add(x, y): return x + y\nchange = functools.partial(add, VERSION)",
        value="change(index)",
    ),
    "a table of functions": project(
        before="CHANGES = {'a': lambda x: x + VERSION}", value="CHANGES['a'](index)"
    ),
    "a property": project(body="@property\n    def by(self): return VERSION", value="self.by"),
    "a cached property": project(
        body="@functools.cached_property\n    def by(self): return VERSION", value="self.by"
    ),
    "a class method": project(
        body="@classmethod\n    def by(cls): return VERSION", value="self.by()"
    ),
    "a method with a cache": project(
        body="@functools.lru_cache\n    def by(self): return VERSION", value="self.by()"
    ),
    "a function by the type of its argument": project(
        before="@functools.singledispatch\ndef change(x): return x\n"
        "@change.register\ndef _(x: int): return x + VERSION",
        value="change(index)",
    ),
    "an object's method": project(
        before="class Adds:\n    def change(self, x): return x + VERSION\nADDS = Adds()",
        value="ADDS.change(index)",
    ),
    "an object with a lock": project(
        before="class Adds:\n    def __init__(self): self.lock = threading.Lock()\n"
        "    def change(self, x): return x + VERSION\nADDS = Adds()",
        value="ADDS.change(index)",
    ),
    "a class within the class": project(
        body="class Config:\n        size = VERSION", value="self.Config.size"
    ),
    "an enumeration": project(
        before="class Mode(enum.Enum):\n    a = VERSION", value="Mode.a.value"
    ),
    "a number of NumPy": project(before="BY = np.float32(VERSION)", value="BY"),
    "functions that call each other": project(
        before="def even(x): return x == 0 or odd(x - 1)\n"
        "def odd(x): return x != 0 and even(x - VERSION)",
        value="even(index)",
    ),
}
SAME = {
    "what is not used": project(before="UNUSED = VERSION\nimport theirs_help", theirs_help=HELPERS),
    "a name that is an attribute elsewhere": project(
        before="size = object() if VERSION == 1 else open", value="index.size"
    ),
    "the environment": project(before="from os import environ", value="environ.get('X')"),
}


@pytest.fixture
def identity_of(tmp_path, monkeypatch):
    """Return the identity of the dataset of a project in some version of it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def of(files, version):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text.replace("VERSION", str(version)))
        importlib.invalidate_caches()
        found = identity(importlib.import_module("theirs_data").Data())
        for name in [name for name in sys.modules if name.startswith("theirs_")]:
            del sys.modules[name]
        return found

    return of


@pytest.mark.parametrize("what", PROJECTS)
def test_code_that_a_dataset_rests_on_counts(identity_of, what):
    first = identity_of(PROJECTS[what], 1)
    assert identity_of(PROJECTS[what], 2) != first
    assert identity_of(PROJECTS[what], 1) == first


@pytest.mark.parametrize("what", SAME)
def test_what_makes_no_sample_does_not_count(identity_of, monkeypatch, what):
    first = identity_of(SAME[what], 1)
    monkeypatch.setenv("X", "another")
    assert identity_of(SAME[what], 2) == first


class Named(Dataset):
    def __init__(self, **held):
        vars(self).update(held)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise NotImplementedError


NAMES = ["a7", "b7", "c7"]
WAYS = {
    "paths": lambda root: {"paths": [f"{root}/{name}.bin" for name in NAMES]},
    "pairs": lambda root: {"items": [(f"{root}/{name}.bin", 1) for name in NAMES]},
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
    "within another": lambda root: {"parts": [Named(root=root, names=NAMES)]},
}


@pytest.mark.parametrize("way", WAYS)
def test_files_that_a_dataset_names_count(tmp_path, way):
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
    assert identity(Named(**held)) != first

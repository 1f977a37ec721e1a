"""Importing the package is quick and quiet, and the command line works without the plugin."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from misses import Misses, each

import lightning_fastdata.data
import lightning_fastdata.errors
from benchmarks.code_size import PACKAGE, names_of_augment
from lightning_fastdata import FastDataError, FastDataWarning, augment

HEAVY = (
    "albumentations",
    "cv2",
    "h5py",
    "jsonargparse",
    "lightning",
    "lmdb",
    "matplotlib",
    "obstore",
    "pyarrow",
    "pytorch_lightning",
    "rich",
    "tensorboard",
    "torchvision",
)


LIGHT = (
    "import lightning_fastdata",
    "import lightning_fastdata.errors, lightning_fastdata.host.cpu",
    "import lightning_fastdata.cli",
    "import lightning_fastdata.host.memory as memory; memory.read_host_memory()",
)
"""What loads no torch either."""
ROOMS = (
    "import lightning_fastdata.loading.loader",
    "import lightning_fastdata.augment.transform",
    "import lightning_fastdata.insight.report",
    "import lightning_fastdata.data",
    "import lightning_fastdata.sources",
    "from lightning_fastdata.tree import find_composes; find_composes([object()])",
)
IN_A_PROCESS = """
import json, os, sys

for statement in sys.argv[1:]:
    if statement == "import torch":
        import torch
    elif os.fork() == 0:
        before = set(sys.modules)
        exec(statement)
        loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(json.dumps([statement, [*loaded]]), flush=True)
        os._exit(0)
    else:
        os.wait()
"""


def test_importing_loads_nothing_heavy_and_the_rooms_below_the_plugin_torch_alone():
    command = [sys.executable, "-c", IN_A_PROCESS, *LIGHT, "import torch", *ROOMS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    loaded = dict(map(json.loads, done.stdout.splitlines()))
    with Misses() as misses:
        for statement in (*LIGHT, *ROOMS):
            found = set(loaded[statement]) & {*HEAVY, "torch"}
            misses.check(found == set(), statement, found)


WITHOUT_LINUX = """
import socket, sys
import torch

sys.modules["fcntl"] = None
del socket.CMSG_LEN
import lightning_fastdata.loading.loader
import lightning_fastdata.executors.pool.scheduler
"""


def test_what_only_some_systems_have_is_imported_where_it_is_used():
    subprocess.run([sys.executable, "-c", WITHOUT_LINUX], check=True, timeout=100)


@each("name", lightning_fastdata.__all__)
def test_every_public_name_can_be_used(name):
    assert getattr(lightning_fastdata, name).__name__ == name


def test_the_root_has_few_names_and_those_that_left_it_can_still_be_imported_from_it():
    assert len(lightning_fastdata.__all__) <= 22
    left = {name for names in lightning_fastdata._MOVED.values() for name in names.split()}
    for room, names in lightning_fastdata._MOVED.items():
        home = getattr(lightning_fastdata, room)
        for name in names.split():
            assert getattr(lightning_fastdata, name) is getattr(home, name)
    assert left.isdisjoint({*lightning_fastdata.__all__, *dir(lightning_fastdata)})
    errors = {
        name
        for name, one in vars(lightning_fastdata.errors).items()
        if isinstance(one, type) and issubclass(one, FastDataError | FastDataWarning)
    }
    assert left <= {*lightning_fastdata.data.__all__, *errors}


IMPORTED = re.compile(r"^ *from lightning_fastdata import (?:\(([^)]*)\)|([^(\n]*))$", re.MULTILINE)


def test_what_shows_the_package_imports_each_name_from_its_one_place():
    root = PACKAGE.parent
    shown = [root / "README.md"]
    for folder in ("benchmarks", "docs", "examples", "tests"):
        shown += [file for kind in ("*.py", "*.md") for file in (root / folder).rglob(kind)]
    with Misses() as misses:
        for file in shown:
            for lines, line in IMPORTED.findall(file.read_text(encoding="utf-8")):
                names = re.findall(r"(\w+)(?: as \w+)?,?", re.sub(r"#.*", "", lines or line))
                for name in {*names} - {*lightning_fastdata.__all__, "__version__"}:
                    misses.check(find_spec(f"lightning_fastdata.{name}"), str(file), name)


def test_other_rooms_know_augment_by_few_names():
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")}
    used = names_of_augment(trees)
    assert used <= set(augment.__all__)
    assert 3 < len(used) <= 15


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="FastDataModul'"):
        _ = lightning_fastdata.FastDataModul


def test_the_version_is_that_of_the_installed_package():
    from importlib.metadata import version

    assert lightning_fastdata.__version__ == version("lightning-fastdata")

"""Importing the package is quick and quiet, and the command line works without the plugin."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

import lightning_fastdata
from benchmarks.code_size import PACKAGE, names_of_augment
from lightning_fastdata import augment

HEAVY = (
    "albumentations",
    "cv2",
    "jsonargparse",
    "lightning",
    "matplotlib",
    "pytorch_lightning",
    "rich",
    "tensorboard",
    "torchvision",
)


def loaded_modules(statement: str) -> set[str]:
    """Return the top-level modules of a fresh interpreter after a statement."""
    code = f"{statement}; import json, sys; print(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    "statement",
    [
        "import lightning_fastdata",
        "import lightning_fastdata.errors, lightning_fastdata.host.cpu",
        "import lightning_fastdata.cli",
        "import lightning_fastdata.insight.live.status",
    ],
)
def test_importing_loads_nothing_heavy(statement):
    assert loaded_modules(statement) & {*HEAVY, "torch"} == set()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "module", ["loading.loader", "augment.transform", "insight.report.run_report"]
)
def test_the_rooms_below_the_plugin_load_no_lightning_and_no_extras(module):
    assert loaded_modules(f"import lightning_fastdata.{module}") & set(HEAVY) == set()


@pytest.mark.parametrize("name", lightning_fastdata.__all__)
def test_every_public_name_can_be_used(name):
    assert getattr(lightning_fastdata, name).__name__ == name


def test_other_rooms_know_augment_by_few_names():
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")}
    used = names_of_augment(trees)
    assert used <= set(augment.__all__)
    assert 5 < len(used) <= 15


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="FastDataModul'"):
        _ = lightning_fastdata.FastDataModul


def test_the_version_is_that_of_the_installed_package():
    from importlib.metadata import version

    assert lightning_fastdata.__version__ == version("lightning-fastdata")

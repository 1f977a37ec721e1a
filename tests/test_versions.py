"""What is too old is named before something in it is missing."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from misses import each

import lightning_fastdata
from lightning_fastdata.errors import VersionError
from lightning_fastdata.host.machine import LEAST, MALICIOUS, check_versions

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def having(**versions):
    def installed(name):
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    return installed


@each(
    "versions",
    [
        {"torch": "2.6.0+cu124", "lightning": "2.5.3"},
        {"torch": "2.11.0a0+git1234", "pytorch_lightning": "2.6.4"},
        {"torch": "10.0", "lightning": "2.6.1"},
        {"torch": "unknown"},
        {},
    ],
)
def test_what_is_new_enough_or_unknown_is_left_alone(versions):
    check_versions(having(**versions))


@each(
    ("versions", "told"),
    [
        ({"torch": "2.5.1+cu121"}, "needs torch 2.6 or newer, and 2.5.1"),
        ({"torch": "1.13"}, "pip install --upgrade 'torch>=2.6'"),
        ({"torch": "2.6", "lightning": "2.4.0.post1"}, r"needs lightning 2\.5\.3"),
        ({"pytorch_lightning": "2.0"}, r"needs pytorch-lightning 2\.5\.3"),
        ({"lightning": "2.6.2"}, "lightning 2.6.2 was a malicious upload"),
        ({"pytorch_lightning": "2.6.3"}, "GHSA-w37p-236h-pfx3"),
    ],
)
def test_what_is_too_old_or_harmful_is_named_with_what_to_do(versions, told):
    with pytest.raises(VersionError, match=told) as caught:
        check_versions(having(**versions))
    assert isinstance(caught.value, ImportError)


def test_the_versions_are_those_that_the_project_declares():
    declared = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    told = {name: ".".join(map(str, least)) for name, least in LEAST.items()}
    assert f"torch>={told['torch']}" in declared
    (lightning,) = (one for one in declared if one.startswith("lightning>="))
    bad = ",".join(f"!={'.'.join(map(str, one))}" for one in MALICIOUS["lightning"])
    assert lightning == f"lightning>={told['lightning']},{bad}"


def test_the_lowest_versions_are_those_of_everything_that_can_be_had():
    project = tomllib.loads(PROJECT.read_text())["project"]
    pinned = {one.partition("==")[0] for one in lowest_versions()}
    for extra in ("augment", "cli", "images", "jpeg", "objects", "tensorboard"):
        asked = {one.partition(">=")[0] for one in project["optional-dependencies"][extra]}
        assert {one for one in asked if "lightning-fastdata" not in one} <= pinned
    assert {"torch", "lightning", "numpy"} <= pinned


def test_every_package_that_is_imported_is_declared():
    own = Path(lightning_fastdata.__file__).parent
    imported = {name for file in own.rglob("*.py") for name in imported_by(file)}
    asked = lowest_versions(bounds=True)
    declared = {re.split(r"[\[>]", one)[0].replace("-", "_") for one in asked}
    names = {
        "PIL": "pillow",
        "albucore": "albumentations",  # brought along
        "markupsafe": "jinja2",  # brought along
        "cv2": "opencv_python_headless",
    }
    foreign = imported - sys.stdlib_module_names - {"lightning_fastdata"}
    assert {names.get(one, one) for one in foreign} - declared == MAY_BE_THERE


# Used where somebody else has installed them, or, as Ray, asked for by an extra of its own.
MAY_BE_THERE = {"pyarrow", "pytorch_lightning", "ray", "triton"}


def imported_by(file):
    """Yield the packages that a module imports, but for those that only type checkers look at."""
    waiting = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


def lowest_versions(*, bounds=False):
    """Return what an installation of everything asks for, or the lowest versions of it."""
    tool = runpy.run_path(str(PROJECT.parent / "tools" / "lowest_versions.py"))
    asked = tool["requirements"]("all", "jpeg")
    return asked if bounds else [tool["lowest"](one) for one in asked]


def test_an_old_torch_is_named_when_the_package_is_used(tmp_path):
    old = tmp_path / "torch-2.1.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n")
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    code = f"{first}; from lightning_fastdata import prefetch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs torch 2.6 or newer, and 2.1.0 is installed" in done.stderr

"""The files that are published: the wheel holds the package alone, and its metadata is whole."""

from __future__ import annotations

import re
import runpy
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import lightning_fastdata

REPOSITORY = Path(__file__).parents[1]
CHECKS = runpy.run_path(str(REPOSITORY / "tools" / "check_dist.py"))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("dist"))
    (wheel,) = WheelBuilder(str(REPOSITORY)).build(directory=folder, versions=["standard"])
    (sdist,) = SdistBuilder(str(REPOSITORY)).build(directory=folder, versions=["standard"])
    return Path(wheel), Path(sdist)


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
    assert CHECKS["wrong_in_wheel"](names) == []
    assert CHECKS["wrong_in_wheel"]([*names, "tests/test_cli.py"]) != []
    assert "lightning_fastdata/py.typed" in names


def test_the_sdist_holds_what_the_wheel_is_built_of(built):
    with tarfile.open(built[1]) as sdist:
        names = sdist.getnames()
    assert CHECKS["wrong_in_sdist"](names) == []
    assert CHECKS["wrong_in_sdist"]([name for name in names if "LICENSE" not in name]) != []


def test_the_metadata_says_version_licence_and_every_extra(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        said = Parser().parsestr(wheel.read(name).decode())
    assert CHECKS["wrong_in_metadata"](said.as_string()) == []
    for name in ("Author", "Summary", "License-Expression"):
        less = re.sub(f"^{name}: .*\n", "", said.as_string(), flags=re.MULTILINE)
        assert CHECKS["wrong_in_metadata"](less) != []
    for url in ("https://example.com/x", "github.com/x", "http://x.org"):
        more = f"Project-URL: Home, {url}\n{said.as_string()}"
        assert any("the URL 'Home'" in wrong for wrong in CHECKS["wrong_in_metadata"](more))
    assert said["Version"] == lightning_fastdata.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Description-Content-Type"] == "text/markdown"
    extras = {"all", "augment", "cli", "images", "jpeg", "objects", "tensorboard"}
    assert extras <= set(said.get_all("Provides-Extra"))
    free = [one for one in said.get_all("Requires-Dist") if "extra ==" not in one]
    names = {re.split("[>!]", one)[0] for one in free}
    ours = {"jinja2", "lightning", "lightning-utilities", "numpy", "psutil", "torch", "xxhash"}
    assert names == ours


DECLARED = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT, BUILD = DECLARED["project"], DECLARED["build-system"]
LOWEST = runpy.run_path(str(REPOSITORY / "tools" / "lowest_versions.py"))


def test_who_cites_the_package_names_this_version():
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["version"] == lightning_fastdata.__version__
    assert cited["license"] == PROJECT["license"]


def test_the_conda_package_asks_for_what_the_wheel_asks_for():
    recipe = yaml.safe_load((REPOSITORY / "conda" / "recipe.yaml").read_text())
    asked = recipe["requirements"]
    assert recipe["context"]["version"] == lightning_fastdata.__version__
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]
    ours = [conda_name(one) for one in PROJECT["dependencies"]]
    assert asked["run"] == ["python >=${{ python_min }}", *ours]
    # Conda has libjpeg-turbo itself.
    extras = [one for one in LOWEST["requirements"]("all") if not one.startswith("turbojpeg")]
    assert asked["run_constraints"] == [conda_name(one) for one in extras][len(ours) :]
    assert set(asked["host"]) == {
        "python ${{ python_min }}.*",
        "pip",
        *(one.replace(">=", " >=") for one in BUILD["requires"]),
    }
    (command,) = recipe["build"]["python"]["entry_points"]
    assert dict([command.split(" = ")]) == PROJECT["scripts"]


def conda_name(requirement):
    """Return a requirement as conda spells it: its own name of the package, and a space."""
    name, bounds = re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.+)", requirement).groups()
    own = {
        "torch": "pytorch",
        "matplotlib": "matplotlib-base",
        "opencv-python-headless": "py-opencv",
        "xxhash": "python-xxhash",
    }
    # The fourth part of OpenCV's version is that of its wheel.
    bounds = re.sub(r"(>=\d+\.\d+\.\d+)\.\d+$", r"\1", bounds)
    return f"{own.get(name, name)} {bounds}"

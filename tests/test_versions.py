"""What is too old is named before something in it is missing."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    "versions",
    [
        {"torch": "2.6.0+cu124", "lightning": "2.5.0"},
        {"torch": "2.11.0a0+git1234", "pytorch_lightning": "2.6.4"},
        {"torch": "10.0", "lightning": "2.6.1"},
        {"torch": "unknown"},
        {},
    ],
)
def test_what_is_new_enough_or_unknown_is_left_alone(versions):
    check_versions(having(**versions))


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ({"torch": "2.5.1+cu121"}, "needs torch 2.6 or newer, and 2.5.1"),
        ({"torch": "1.13"}, "pip install --upgrade 'torch>=2.6'"),
        ({"torch": "2.6", "lightning": "2.4.0.post1"}, "needs lightning 2.5"),
        ({"pytorch_lightning": "2.0"}, "needs pytorch-lightning 2.5"),
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
    (lightning,) = (one for one in declared if one.startswith("lightning"))
    bad = ",".join(f"!={'.'.join(map(str, one))}" for one in MALICIOUS["lightning"])
    assert lightning == f"lightning>={told['lightning']},{bad}"


def test_every_dependency_has_a_lowest_version():
    declared = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    assert [one for one in declared if ">=" not in one] == []


def test_an_old_torch_is_named_when_the_package_is_used(tmp_path):
    old = tmp_path / "torch-2.1.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n")
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    code = f"{first}; from lightning_fastdata import prefetch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs torch 2.6 or newer, and 2.1.0 is installed" in done.stderr

"""Print the lowest versions that pyproject.toml allows, of the package and of its extra "all"."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
OWN = "lightning-fastdata"


def requirements(*extras: str) -> list[str]:
    """Return what an installation with these extras asks for, as pyproject.toml says it."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    found = list(project["dependencies"])
    for extra in extras:
        for one in project["optional-dependencies"][extra]:
            inner = re.fullmatch(rf"{OWN}\[(.+)\]", one)
            found += requirements(*inner[1].split(",")) if inner else [one]
    return list(dict.fromkeys(found))


def lowest(requirement: str) -> str:
    """Return a requirement with its lower bound as the only version; its marker is kept."""
    wanted, _, marker = requirement.partition(";")
    exact = re.sub(r">=([\d.]+).*", r"==\1", wanted.strip())
    return f"{exact}; {marker.strip()}" if marker else exact


if __name__ == "__main__":
    print("\n".join(lowest(each) for each in requirements("all")))

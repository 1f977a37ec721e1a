"""Installed packages as they are where some were left out, metadata included."""

from __future__ import annotations

import os
import re
import sysconfig
from importlib.metadata import packages_distributions
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def environment_without(folder: Path, hidden: set[str]) -> dict[str, str]:
    """Return the environment for ``python -S``, in which packages are as if never installed.

    Libraries ask the metadata of a package whether it is there, and then import it: an import that
    fails is not enough. So a folder of links to all others takes the place of site-packages.

    Args:
        folder: For the links, with a name as packages are installed in; it is made.
        hidden: Names as they are imported.
    """
    folder.mkdir(parents=True)
    names = packages_distributions()
    gone = {_normal(name) for package in hidden for name in names.get(package, ())}
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site).iterdir():
            if entry.suffix == ".dist-info":
                left_out = _normal(entry.stem.rpartition("-")[0]) in gone
            else:
                left_out = entry.name.partition(".")[0] in hidden
            if not left_out:
                (folder / entry.name).symlink_to(entry)
    before = os.environ.get("PYTHONPATH", "")
    path = [str(REPOSITORY), *filter(None, before.split(os.pathsep)), str(folder)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()

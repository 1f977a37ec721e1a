"""Build sdist and wheel, install the wheel in a fresh environment, and use what it installed.

Its dependencies are those of the environment that runs this: nothing but the package is installed
anew. The two files are left in ``dist``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lightning_fastdata"
IN_SDIST = ("CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml")

USED = """
import importlib.metadata, importlib.resources, pathlib, sys

import lightning_fastdata

assert pathlib.Path(lightning_fastdata.__file__).is_relative_to(sys.prefix), lightning_fastdata
missing = [name for name in lightning_fastdata.__all__ if not hasattr(lightning_fastdata, name)]
assert not missing, missing
installed = importlib.metadata.distribution("lightning-fastdata")
assert installed.version == lightning_fastdata.__version__
assert [entry.load() for entry in installed.entry_points]
assert importlib.resources.files(lightning_fastdata).joinpath("py.typed").is_file()

from lightning_fastdata.insight.report import RunReport

assert "nothing was measured" in RunReport(stages=()).write_html("page.html").read_text()
"""


def package_files() -> set[str]:
    """Return what a wheel has to hold besides its metadata: the package, and nothing else."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file())
    kept = (path for path in files if "__pycache__" not in path.parts)
    return {path.relative_to(REPOSITORY).as_posix() for path in kept}


def wrong_in_wheel(names: Iterable[str]) -> list[str]:
    """Return what is wrong with the names of a wheel's files, in words."""
    held = {name for name in names if ".dist-info/" not in name}
    wanted = package_files()
    return [
        *(f"{name} is in the wheel and not in the package" for name in sorted(held - wanted)),
        *(f"{name} is in the package and not in the wheel" for name in sorted(wanted - held)),
    ]


def wrong_in_sdist(names: Iterable[str]) -> list[str]:
    """Return what is wrong with the names of an sdist's files, in words."""
    held = {name.partition("/")[2] for name in names}
    return [f"{name} is not in the sdist" for name in sorted({*IN_SDIST, *package_files()} - held)]


def wrong_in_metadata(text: str) -> list[str]:
    """Return what is wrong with the metadata of a wheel, in words."""
    said = Parser().parsestr(text)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    citation = (REPOSITORY / "CITATION.cff").read_text()
    authors = ", ".join(author["name"] for author in project.get("authors", []))
    urls = dict(url.split(", ", 1) for url in said.get_all("Project-URL") or [])
    wanted = {
        "Name": project["name"],
        "Summary": project["description"],
        "Author": authors,
        "License-Expression": project["license"],
        "Requires-Python": project["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    return [
        *(
            f"{name} is {said[name]!r}, not {value!r}"
            for name, value in wanted.items()
            if not value or said[name] != value
        ),
        *(
            f"{author!r} is not in CITATION.cff"
            for author in authors.split(", ")
            if author not in citation
        ),
        *(
            f"the URL {name!r} is {url!r}"
            for name, url in urls.items()
            if not re.fullmatch(r"https://(?!example\.)[\w.-]+\.[a-z]+/?\S*", url)
        ),
        *([] if urls == project.get("urls", {}) else ["the URLs are not those of pyproject.toml"]),
        *([] if said.get_payload() else ["there is no description"]),
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        python = fresh_environment(Path(folder))
        run(python, "-m", "pip", "install", "--quiet", "build")
        run(python, "-m", "build", "--outdir", "dist", ".")
        (wheel,) = newest("*.whl")
        (sdist,) = newest("*.tar.gz")
        with zipfile.ZipFile(wheel) as files:
            wrong = wrong_in_wheel(files.namelist())
            (name,) = [each for each in files.namelist() if each.endswith(".dist-info/METADATA")]
            wrong += wrong_in_metadata(files.read(name).decode())
        with tarfile.open(sdist) as archive:
            wrong += wrong_in_sdist(archive.getnames())
        if wrong:
            raise SystemExit("\n".join(wrong))
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
        run(python, "-c", USED, folder=folder)
        run(python.with_name("fastdata"), "--version", folder=folder)
        run(python.with_name("fastdata"), "doctor", folder=folder)
        run(python, "-m", "lightning_fastdata", "--help", folder=folder)
    print(f"{wheel.name} and {sdist.name} are whole, and work.")


def fresh_environment(folder: Path) -> Path:
    """Make an environment, with the packages of this one behind its own; return its Python."""
    venv.create(folder, with_pip=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # The files of a folder that is listed so are no paths: editable installations stay out.
    Path(own, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def newest(pattern: str) -> list[Path]:
    found = (REPOSITORY / "dist").glob(pattern)
    return sorted(found, key=lambda path: path.stat().st_mtime)[-1:]


def run(program: Path, *arguments: str, folder: str | Path = REPOSITORY) -> None:
    subprocess.run([str(program), *arguments], cwd=folder, check=True)


if __name__ == "__main__":
    main()

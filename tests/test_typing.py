"""What type checkers know of the package: its names, and that others are mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_fastdata
import lightning_fastdata.augment

PACKAGE = Path(lightning_fastdata.__file__).parent


def complaints(statement, tmp_path, *, package):
    """Return what mypy says of a statement, with the package's own declarations alone."""
    snippet = tmp_path / "snippet.py"
    snippet.write_text(f"{statement}\n")
    options = ["--strict", "--follow-imports=skip", "--explicit-package-bases"]
    options += ["--config-file=", f"--cache-dir={tmp_path}", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(snippet), str(package)],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=280,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(str(snippet))]


@pytest.mark.parametrize("module", [lightning_fastdata, lightning_fastdata.augment])
def test_every_name_is_known_and_a_misspelt_one_is_seen(tmp_path, module):
    names, at = module.__all__, Path(module.__file__)
    good = f"from {module.__name__} import {', '.join(names)}"
    assert complaints(good, tmp_path, package=at) == []
    wrong = f"from {module.__name__} import {names[0]}s"
    (said,) = complaints(wrong, tmp_path, package=at)
    assert f'has no attribute "{names[0]}s"' in said


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()

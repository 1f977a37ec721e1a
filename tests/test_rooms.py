"""The rooms of the package: their READMEs, and the way of a dataset through them."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"


def test_the_readme_of_a_room_is_what_its_modules_say():
    """``python tools/rooms.py`` writes them."""
    tool = runpy.run_path(str(TOOLS / "rooms.py"))
    written = {file.parent: file.read_text() for file in tool["PACKAGE"].rglob("README.md")}
    assert written == {room: tool["readme"](room) for room in tool["rooms"]()}


def test_the_way_of_a_dataset_to_a_loader_is_short():
    told = subprocess.run(
        [sys.executable, TOOLS / "ways.py"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TOOLS.parent)},
    ).stdout
    functions, files, up = map(
        int, re.search(r"make_loader +(\d+) functions in (\d+) files.* (\d+) to a", told).groups()
    )
    assert (functions <= 20, files <= 12, up <= 3) == (True, True, True), told

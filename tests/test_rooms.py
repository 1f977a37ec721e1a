"""Each large room of the package has a README that is up to date."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "rooms.py"


def test_the_readme_of_a_room_is_what_its_modules_say():
    """``python tools/rooms.py`` writes them."""
    tool = runpy.run_path(str(TOOL))
    written = {file.parent: file.read_text() for file in tool["PACKAGE"].rglob("README.md")}
    assert written == {room: tool["readme"](room) for room in tool["rooms"]()}

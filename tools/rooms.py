"""Write the README of each room: what it is, its modules, and what it may import.

    python tools/rooms.py

A room is a folder of the package; one of more than five modules has a README. All of it comes from
the docstrings of the room and its modules, and from the layers of import-linter in pyproject.toml.
``tests/test_rooms.py`` sees one that is out of date.
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_fastdata"
MOST_WITHOUT = 5
WIDTH = 110


def told_by(file: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n")[0]


def rooms() -> list[Path]:
    """Return the folders that have a README: those with more than five modules."""
    folders = {file.parent for file in PACKAGE.rglob("*.py")} - {PACKAGE}
    return sorted(each for each in folders if len(list(each.glob("*.py"))) - 1 > MOST_WITHOUT)


def below(room: Path) -> list[str]:
    """Return what a room may import of the package: the layers below its own."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (
        each["layers"] for each in contracts["contracts"] if each["name"] == "rooms only look down"
    )
    named = [[name.strip() for name in layer.replace(":", "|").split("|")] for layer in layers]
    own = room.relative_to(PACKAGE).parts[0]
    (place,) = (
        place for place, names in enumerate(named) if any(n.split(".")[0] == own for n in names)
    )
    return [name for names in named[place + 1 :] for name in names]


def readme(room: Path) -> str:
    """Return the text of a room's README."""
    name = ".".join(room.relative_to(PACKAGE).parts)
    modules = sorted(file for file in room.glob("*.py") if file.stem != "__init__")
    inner = sorted(file for file in room.glob("*/__init__.py"))
    lines = {file.name: told_by(file) for file in modules}
    lines |= {f"{file.parent.name}/": told_by(file) for file in inner}
    widest = max(map(len, lines))
    tree = "\n".join(f"{each:{widest}}  {line}" for each, line in lines.items())
    imports = f"It may import: {', '.join(f'`{each}`' for each in below(room))}."
    about = told_by(room / "__init__.py")
    return f"# {name}\n\n{about}\n\n```\n{tree}\n```\n\n{textwrap.fill(imports, WIDTH)}\n"


def main() -> None:
    """Write them, and remove those of rooms that have become small."""
    now = rooms()
    for old in PACKAGE.rglob("README.md"):
        if old.parent not in now:
            old.unlink()
    for room in now:
        (room / "README.md").write_text(readme(room))


if __name__ == "__main__":
    main()

"""How large the package is, and how entangled: what ``make measure`` prints.

    python benchmarks/code_size.py

Only reads source text. Cycles count imports for type checking, too.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_fastdata"
TESTS = Path(__file__).parents[1] / "tests"
PRIVATE = re.compile(r"(?<!self)(?<!cls)(?<!super\(\))\._(?!_)[a-z]\w*")


def module_name(file: Path) -> str:
    """Return the dotted name below the package; of a room's ``__init__`` that of the room."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(tree: ast.AST, known: set[str]) -> set[str]:
    """Return the modules of the package that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        package, _, base = node.module.partition(".")
        if package == PACKAGE.name:
            names = {".".join(filter(None, (base, alias.name))) for alias in node.names}
            found |= {name if name in known else base for name in names}
    return found & known


def names_of_augment(trees: dict[Path, ast.AST]) -> set[str]:
    """Return what other rooms import of ``augment``; the package's own names are the user's.

    Kernels are a part of ``augment`` that may be left out.
    """
    room = f"{PACKAGE.name}.augment"
    own = {PACKAGE / "augment", PACKAGE / "ext" / "kernels"}
    return {
        alias.name
        for file, tree in trees.items()
        if file != PACKAGE / "__init__.py" and own.isdisjoint(file.parents)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{room}.")
        for alias in node.names
    }


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other (Kosaraju's algorithm)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: dict[str, set[str]]) -> Iterator[str]:
        stack = [(start, iter(edges[start]))]
        seen.add(start)
        while stack:
            name, rest = stack[-1]
            following = next((each for each in rest if each not in seen), None)
            if following is None:
                stack.pop()
                yield name
            else:
                seen.add(following)
                stack.append((following, iter(edges[following])))

    for name in imports:
        if name not in seen:
            order += visit(name, imports)
    reverse: dict[str, set[str]] = {name: set() for name in imports}
    for name, targets in imports.items():
        for target in targets - {name}:
            reverse[target].add(name)
    seen.clear()
    groups = [sorted(visit(name, reverse)) for name in reversed(order) if name not in seen]
    return [group for group in groups if len(group) > 1]


def main() -> None:
    """Print everything."""
    files = sorted(PACKAGE.rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    lines = {module_name(file): text.count("\n") for file, text in texts.items()}
    modules = {
        module_name(file): lines[module_name(file)]
        for file in files
        if lines[module_name(file)] > 2
    }
    rooms: dict[str, int] = {}
    for file in files:
        if file.name != "__init__.py":
            room = module_name(file.parent / "__init__.py")
            rooms[room] = rooms.get(room, 0) + 1
    whole = "\n".join(texts.values())
    known = set(lines)
    circles = cycles({module_name(file): imports_of(tree, known) for file, tree in trees.items()})
    probes = sum(
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("getattr", "hasattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
        for tree in trees.values()
        for node in ast.walk(tree)
    )
    print(f"modules                       {len(modules)}")
    print(f"lines                         {sum(lines.values())}")
    print(f"lines of a module, median     {statistics.median(modules.values()):.0f}")
    print(f"rooms                         {len(rooms)}")
    print(f"import cycles                 {len(circles)}  of {[len(each) for each in circles]}")
    print(f"': Any' and '-> Any'          {len(re.findall(r'(?::|->) Any', whole))}")
    print(f"string getattr and hasattr    {probes}")
    print(f"private names of others       {len(PRIVATE.findall(whole))}")
    print(f"names of augment others use   {len(names_of_augment(trees))}")
    tests = [file.read_text(encoding="utf-8") for file in TESTS.rglob("*.py")]
    laws = sum(len(re.findall(r"^ *(?:async )?def test_", text, re.MULTILINE)) for text in tests)
    print(f"lines of tests                {sum(text.count(chr(10)) for text in tests)}")
    print(f"test functions                {laws}")
    print(f"time.sleep in tests           {sum(text.count('time.sleep(') for text in tests)}")


if __name__ == "__main__":
    main()

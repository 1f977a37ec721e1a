"""Settings of the documentation's site: ``make docs`` writes it to ``docs/_build/html``."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from lightning_fastdata import __version__  # noqa: E402

project = "lightning_fastdata"
release = version = __version__
copyright = "the authors of lightning_fastdata, Apache-2.0"  # noqa: A001
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "README.md"]
html_theme = "furo"
html_title = f"lightning_fastdata {release}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]

# Anchors as GitHub makes them, so that a link works in either place.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
copybutton_exclude = ".linenos, .gp, .go"

SHOWN = {
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "results": "benchmarks/results/two-cores.md",
    "results-gpu": "benchmarks/results/README.md",
}
"""Page -> the file of the repository outside of docs/ that it shows."""
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def show_outside(app: Sphinx, page: str, source: list[str]) -> None:
    """Put files from outside of docs/ into their pages, and lead links to them there."""
    shown = ROOT / SHOWN[page] if page in SHOWN else None
    if shown is not None:
        app.env.note_dependency(str(shown))
        source[0] = shown.read_text(encoding="utf-8")
    folder = (DOCS / page).parent if shown is None else shown.parent
    pages = {ROOT / path: DOCS / f"{name}.md" for name, path in SHOWN.items()}
    pages |= {DOCS / "README.md": DOCS / "index.md", ROOT / "docs": DOCS / "index.md"}
    pages |= {ROOT / "examples": DOCS / "howto" / "examples.md"}

    def lead(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        target = pages.get(target, target)
        if not target.is_file():
            return link[0]
        path = os.path.relpath(target, (DOCS / page).parent)
        return f"{link[1]}{path}{link[3] or ''}{link[4]}"

    source[0] = _LINK.sub(lead, source[0])


class CommandHelp(SphinxDirective):
    """Shows what ``fastdata --help`` and the help of each command print."""

    def run(self) -> list[nodes.Node]:
        """Return a literal block for the program and for each of its commands."""
        os.environ["COLUMNS"] = "96"
        usage = _help()
        commands = re.search(r"\{([\w,-]+)\}", usage)
        names = commands[1].split(",") if commands else []
        return [nodes.literal_block(text, text) for text in (usage, *map(_help, names))]


def _help(*command: str) -> str:
    from lightning_fastdata.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return printed.getvalue().rstrip()


def setup(app: Sphinx) -> None:
    """Register what is above; Sphinx calls it."""
    app.connect("source-read", show_outside)
    app.add_directive("command-help", CommandHelp)

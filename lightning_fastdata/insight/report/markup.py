"""HTML and SVG as nested elements; text and attributes are escaped and printable, always."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, TypeAlias

from lightning_fastdata.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Markup(str):
    """Text that is markup already, and is written as it is."""

    __slots__ = ()


Child: TypeAlias = "str | Markup | Iterable[Child] | None"
"""What an element may hold: text, which is escaped; elements; any nesting of them."""

_VOID = frozenset(("br", "meta", "rect", "line", "path"))


def element(name: str, /, *children: Child, **attributes: str | float | None) -> Markup:
    """Return ``<name ...>children</name>``.

    Args:
        name: Of the element.
        children: What it holds.
        attributes: Underscores in their names become hyphens, one at the end is cut off
            (``class_``); those with None are left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = joined(children)
    if name in _VOID and not inner:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{inner}</{name}>")


def joined(children: Child) -> Markup:
    """Return elements and escaped texts one after the other."""
    if children is None:
        return Markup()
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return Markup(escape(printable(children)))
    return Markup("".join(joined(child) for child in children))


def section(title: str, *children: Child) -> Markup:
    """Return a part of the page under a heading."""
    return element("section", element("h2", title), children)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Child]], class_: str | None = None
) -> Markup:
    """Return a table whose cells of numbers stand right; None is a cell that was not measured."""
    body = [
        element(
            "tr",
            [element("td", "-" if cell is None else cell, class_=_kind(cell)) for cell in row],
        )
        for row in rows
    ]
    first = element("tr", [element("th", head) for head in heads])
    whole = element("table", element("thead", first), element("tbody", body), class_=class_)
    return element("div", whole, class_="wide")


def _kind(cell: Child) -> str | None:
    if cell is None:
        return "number"
    if not isinstance(cell, str) or isinstance(cell, Markup):
        return None
    return "number" if cell[:1].isdigit() and cell[-1:] in "0123456789%" else None


def bar(share: float, name: str) -> Markup:
    """Return a bar as long as a share of its cell, 0 to 1, in the color of a phase."""
    return element("i", class_=f"bar back-{name}", style=f"width:{100 * share:.2f}%")

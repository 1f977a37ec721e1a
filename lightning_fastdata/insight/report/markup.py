"""HTML and SVG as nested elements; text and attributes are escaped and printable, always."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

from lightning_fastdata.errors import printable


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

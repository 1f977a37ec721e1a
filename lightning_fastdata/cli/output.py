"""What commands print, and files that they write."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from lightning_fastdata.errors import OptionsError, has_package

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Found(Protocol):
    """What rich prints in colours."""

    def text(self) -> str:
        """Return it as plain text."""


def print_lines(lines: Sequence[tuple[str, str]]) -> None:
    """Print lines of text, in their rich style on a terminal and plain in a pipe."""
    if not (sys.stdout.isatty() and has_package("rich")):
        sys.stdout.writelines(f"{text}\n" for text, _ in lines)
        return
    from rich.console import Console
    from rich.text import Text

    for text, style in lines:
        Console(soft_wrap=True).print(Text(text, style=style))


def print_found(found: Found) -> None:
    """Print what a command has found, in colours on a terminal and plain in a pipe."""
    if not (sys.stdout.isatty() and has_package("rich")):
        sys.stdout.write(f"{found.text()}\n")
        return
    from rich.console import Console

    Console(highlight=False).print(found)


def write_file(path: str, write: Callable[[], object]) -> None:
    """Have a file written, and say so; a file that cannot be written is an OptionsError."""
    try:
        write()
    except (OSError, RuntimeError) as error:  # torch's of a folder that is missing
        raise OptionsError(f"{path} cannot be written: {error}.") from error
    print_lines([(f"{path} written.", "dim")])

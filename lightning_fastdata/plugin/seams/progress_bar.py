"""Lightning's progress bars, as far as a summary on the console has to know them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def print_line(trainer: Trainer, text: str) -> None:
    """Print a line above the bar, if there is one."""
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", False):
        bar.print(text)
        return
    from rich.console import Console

    Console().print(text, soft_wrap=True, highlight=False, markup=False)


def close_progress_bar(trainer: Trainer) -> None:
    """Close the bar, whose own teardown may come after ours and would draw over the summary.

    Both of Lightning's bars are closed by these public names, and closing twice is harmless.
    """
    bar = trainer.progress_bar_callback
    rich_progress = getattr(bar, "progress", None)
    if rich_progress is not None:
        rich_progress.stop()
        return
    for stage in ("train", "val", "test", "predict"):
        with suppress(AttributeError, TypeError):  # TQDM's raise a TypeError before first use
            getattr(bar, f"{stage}_progress_bar").close()

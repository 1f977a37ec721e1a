"""Bars and durations, as people read them in a terminal."""

from __future__ import annotations

_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(fraction: float, width: int, *, ascii: bool = False) -> str:  # noqa: A002
    """Return a bar of ``fraction`` (clipped to 0..1) of ``width`` cells, to an eighth of a cell.

    With ``ascii``, to a whole cell.
    """
    cells = min(1.0, max(0.0, fraction)) * width
    if ascii:
        return "#" * round(cells)
    full, eighths = divmod(round(cells * 8), 8)
    return "█" * full + (_EIGHTHS[eighths] if eighths else "")


def duration_text(seconds: float) -> str:
    """Return ``0.8 s``, ``34 s``, ``1 min 34 s`` or ``2 h 05 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

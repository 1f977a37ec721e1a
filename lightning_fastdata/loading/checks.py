"""Checks of what a user sets about a loader."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_fastdata.errors import OptionsError


def check(name: str, value: object, fine: bool, allowed: str) -> None:
    """Raise an :class:`OptionsError` that names the option and its value, unless it is fine."""
    if not fine:
        raise OptionsError(f"{name} is {value!r}; allowed are {allowed}.")


def check_among(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise an :class:`OptionsError` unless the value is one of the allowed ones."""
    check(name, value, value in allowed, ", ".join(map(repr, allowed)))


def is_seconds(value: object) -> bool:
    """Return whether a value is a time that may be waited."""
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value < math.inf


def unsuited(executor: str, *, iterable: bool, workers: int) -> Iterator[str]:
    """Yield why an executor that the user chose will not be the one that fetches."""
    if iterable and executor in ("gather", "sidecar"):
        yield f"executor={executor!r} reads by index, which a stream has not; 'workers' reads it."
    elif not workers and executor in ("workers", "sidecar"):
        yield f"executor={executor!r} has num_workers=0, so the training process reads itself."

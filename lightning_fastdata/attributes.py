"""What an object holds, asked without running any of its code."""

from __future__ import annotations

from typing import Any


def held(owner: object, name: str) -> Any:
    """Return an attribute that an object holds itself; None if it has none of that name.

    Neither a property nor ``__getattr__`` is called: either may open what should be opened in the
    workers alone.
    """
    return getattr(owner, "__dict__", {}).get(name)
